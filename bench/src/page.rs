//! The page of results: one self-contained HTML file, written from what is saved and nothing else.

use crate::Outcome;
use crate::front;
use crate::metric::{Kind, Metric};
use crate::record::{Measured, Pair, Results, Row};
use crate::stats::Summary;
use crate::table::shown;
use crate::tables::{TABLES, named};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};

const STYLE: &str = "
:root{color-scheme:light dark}
body{font:16px/1.45 system-ui,sans-serif;max-width:64rem;margin:0 auto;padding:.75rem}
h1,h2{line-height:1.2}
h2{margin-top:2.5rem}
table{border-collapse:collapse;font-size:.875rem;width:100%}
th,td{padding:.25rem .4rem;text-align:right;border-bottom:1px solid #8884;vertical-align:top}
th:first-child,td:first-child{text-align:left;padding-left:0}
.kind th{text-align:left;padding:1.1rem 0 .3rem;font-size:1rem}
.kind small{font-weight:normal}
td+td{white-space:nowrap}
i{font-style:normal;opacity:.75}
i.b{color:#c02020;opacity:1}
s{text-decoration:none}
svg{display:block;max-width:100%;height:auto;margin:1rem 0}
nav a{margin-right:1rem;white-space:nowrap}
@media(max-width:40rem){body{padding:.5rem}table{font-size:.75rem}th,td{padding:.25rem .2rem}td+td{white-space:normal}i{white-space:nowrap}td+td s{display:none}}
@media(prefers-color-scheme:dark){i.b{color:#ff8080}}
";

const INTRO: &str = "<p>Programs take turns on one machine. Figures are medians of the rounds. A factor says how many times \
better zebu is, whatever the direction of the figure: the median of the rounds\u{2019} ratios and its spread, or the \
least and the most where the rounds scatter.</p>\n<p>imago and qcow2-rs are libraries: they take part where a small program \
can make their requests. nbdkit serves the raw file. \u{201c}raw\u{201d} and \u{201c}fio, raw file\u{201d} are what the \
disk can do without an image format.</p>\n";

/// Figures that others have published about the same questions.
const PUBLISHED: &str = include_str!("../published.html");

/// The parts of the page, each by kind of work.
const PARTS: [(Kind, &str, &str); 5] = [
    (Kind::Throughput, "throughput", "Throughput"),
    (Kind::Latency, "latency", "Latency"),
    (Kind::ProcessorTime, "cpu", "Processor time"),
    (Kind::Memory, "memory", "Memory"),
    (Kind::Count, "counts", "Calls, requests, sizes"),
];

/// Writes the page of the tables into `folder`.
pub(crate) fn write(folder: &Path, tables: &[Results]) -> Outcome<PathBuf> {
    let file = folder.join("index.html");
    std::fs::write(&file, page(tables)).map_err(|e| format!("{}: {e}", file.display()))?;
    Ok(file)
}

fn page(tables: &[Results]) -> String {
    let place = |name: &str| TABLES.iter().position(|table| table.name == name).unwrap_or(TABLES.len());
    let mut tables: Vec<&Results> = tables.iter().collect();
    tables.sort_by_key(|table| place(&table.table));
    let mut html = format!(
        "<!doctype html>\n<html lang=\"en\"><meta charset=\"utf-8\"><meta name=\"viewport\" \
         content=\"width=device-width\">\n<title>zebu: measured</title><style>{STYLE}</style>\n<h1>zebu: measured</h1>\n<nav>"
    );
    let links = [("behind", "Behind a peer")].into_iter().chain(PARTS.map(|(_, id, title)| (id, title)));
    for (id, title) in links.chain([("where", "Machines"), ("published", "Published by others")]) {
        let _ = write!(html, "<a href=\"#{id}\">{title}</a> ");
    }
    html += "</nav>\n";
    html += &front::plot(&tables);
    behind(&mut html, &tables);
    html += INTRO;
    for (kind, id, title) in PARTS {
        part(&mut html, &tables, kind, id, title);
    }
    machines(&mut html, &tables);
    html + PUBLISHED
}

/// The first metric of a kind, which the row is about; of counts, all.
fn metrics(row: &Row, kind: Kind) -> Vec<Metric> {
    let of_kind = row.metrics().filter(|metric| metric.kind() == kind);
    of_kind.take(if kind == Kind::Count { usize::MAX } else { 1 }).collect()
}

/// Throughput, latency and processor time in which a peer is better by more than the spread, the worst first.
fn behind(html: &mut String, tables: &[&Results]) {
    let mut found: Vec<(f64, String)> = Vec::new();
    for row in tables.iter().flat_map(|table| &table.rows) {
        for metric in PARTS[..3].iter().flat_map(|(kind, ..)| metrics(row, *kind)) {
            let pairs = row.sides.iter().skip(1).map(|other| row.pair(other, metric));
            for pair in pairs.filter(|pair| pair.is_beside_a_peer() && pair.is_behind()) {
                let advantage = pair.advantage().map_or(1.0, |advantage| advantage.figures.median);
                let unit = text(&metric.name());
                let (ours, theirs) = (median(&row.sides[0], metric), value(pair.other, metric));
                let name = text(&row.row);
                let cells = format!("{name}<br><i>{unit}</i><td>{ours}<td>{theirs}<td>{}", factor(pair));
                found.push((advantage, cells));
            }
        }
    }
    found.sort_by(|a, b| a.0.total_cmp(&b.0));
    *html += "<h2 id=behind>Behind a peer</h2>\n";
    if found.is_empty() {
        *html += "<p>Nowhere by more than the spread of the rounds.</p>\n";
        return;
    }
    *html += "<p>Throughput, latency and processor time in which another program is better by more than the spread of the \
              rounds.</p>\n<table><tr><th>load<th>zebu<th>peer<th>zebu better by\n";
    for (_, cells) in found {
        let _ = writeln!(html, "<tr><td>{cells}");
    }
    *html += "</table>\n";
}

fn part(html: &mut String, tables: &[&Results], kind: Kind, id: &str, title: &str) {
    let _ = writeln!(html, "<h2 id={id}>{title}</h2>");
    if kind == Kind::Memory {
        *html += "<p>The largest resident set of a process, MiB.</p>\n";
    }
    *html += "<table><tr><th>load<th>zebu<th>QEMU<th>others\n";
    for table in tables {
        let mut rows = String::new();
        for row in &table.rows {
            for metric in metrics(row, kind) {
                self::row(&mut rows, row, metric);
            }
        }
        if !rows.is_empty() {
            let (title, about) = named(&table.table).map_or(("", ""), |table| (table.title, table.about));
            let _ = write!(
                html,
                "<tr class=kind><th colspan=4>{} <small>{}</small>\n{rows}",
                text(title),
                text(about)
            );
        }
    }
    *html += "</table>\n";
}

/// One load: zebu, QEMU, and everyone else with his name.
fn row(html: &mut String, row: &Row, metric: Metric) {
    let Some(first) = row.sides.first() else { return };
    let is_memory = metric.kind() == Kind::Memory;
    let unit = if is_memory { String::new() } else { format!(" <i>{}</i>", text(&metric.name())) };
    let first_name = if first.who == "zebu" { String::new() } else { format!("{}<br>", text(&first.who)) };
    let cell = |side: &Measured, name: &str| {
        let pair = row.pair(side, metric);
        let factor = if is_memory { String::new() } else { format!(" {}", factor(pair)) };
        format!("{name}{}{factor}", median(side, metric))
    };
    let with_figures = || row.sides[1..].iter().filter(|side| side.of(metric).is_some());
    let qemu = with_figures().find(|side| side.who == "QEMU").map_or_else(String::new, |side| cell(side, ""));
    let others = with_figures().filter(|side| side.who != "QEMU");
    let others: Vec<String> = others.map(|side| cell(side, &format!("{} ", text(&side.who)))).collect();
    let _ = writeln!(
        html,
        "<tr><td>{}{unit}<td>{first_name}{}<td>{qemu}<td>{}",
        text(&row.row),
        median(first, metric),
        others.join("<br>")
    );
}

fn median(side: &Measured, metric: Metric) -> String {
    side.of(metric).map_or_else(String::new, |values| shown(Summary::of(values).median))
}

/// With the name of the side.
fn value(side: &Measured, metric: Metric) -> String {
    format!("{} {}", text(&side.who), median(side, metric))
}

fn factor(pair: Pair<'_>) -> String {
    let class = if pair.is_behind() { " class=b" } else { "" };
    let shown = pair.shown();
    let (factor, spread) = shown.split_once(' ').unwrap_or((&shown, ""));
    format!("<i{class}>{factor} <s>{spread}</s></i>")
}

fn machines(html: &mut String, tables: &[&Results]) {
    let mut machines = BTreeMap::<String, Vec<String>>::new();
    for Results { table, heading, .. } in tables {
        let machine = heading.machine.split_whitespace().collect::<Vec<_>>().join(" ");
        let of_table = format!(
            "{table} ({}, {} sizes, zebu {}, {} s)",
            heading.date, heading.extent, heading.commit, heading.seconds
        );
        machines.entry(machine).or_default().push(of_table);
    }
    *html += "<h2 id=where>Machines</h2>\n<p>ext4, XFS and btrfs of the tables are made anew, with the defaults of mkfs and \
              mount, on loop devices with direct I/O.</p>\n";
    for (machine, tables) in machines {
        let _ = writeln!(html, "<p>{}: <small>{}</small></p>", text(&machine), text(&tables.join(", ")));
    }
    let failed = tables.iter().flat_map(|table| &table.rows);
    let failed: Vec<String> = failed
        .flat_map(|row| row.failed.iter().map(|side| format!("{}: {}: {}", row.row, side.who, side.why)))
        .collect();
    if !failed.is_empty() {
        let _ = writeln!(html, "<p>Not measured: <small>{}</small></p>", text(&failed.join("; ")));
    }
}

fn text(raw: &str) -> String {
    raw.replace('&', "&amp;").replace('<', "&lt;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Heading;

    #[test]
    fn what_is_behind_in_speed_stands_at_the_top_and_memory_is_no_loss() {
        let side = |who: &str, iops: f64, memory: f64| Measured {
            who: who.into(),
            figures: vec![(Metric::RequestsPerSecond, vec![iops; 5]), (Metric::MaxRssMib, vec![memory; 5])],
        };
        let row = |name: &str, sides| Row { row: name.into(), sides, failed: Vec::new() };
        let slower = row("slower", vec![side("zebu", 10.0, 5.0), side("QEMU", 20.0, 5.0)]);
        let larger = row("larger", vec![side("zebu", 10.0, 9.0), side("QEMU", 9.0, 5.0)]);
        let disk = row("nearest", vec![side("zebu", 10.0, 9.0), side("fio, raw file", 20.0, 5.0)]);
        let heading = Heading {
            machine: "m".into(),
            date: "d".into(),
            extent: "full".into(),
            commit: "c".into(),
            seconds: 1,
        };
        let results = Results { table: "random".into(), heading, rows: vec![slower, larger, disk] };
        let page = page(&[results]);
        let (top, rest) = page.split_once("id=throughput>").unwrap();
        assert!(top.contains("slower") && top.contains("0.50x") && !top.contains("larger"), "{top}");
        assert!(!top.contains("nearest") && rest.contains("larger") && rest.contains("fio, raw file 20"));
    }
}
