//! The README's figures, a table and a plot: written from what is saved, between two markers, never by hand.

use crate::Outcome;
use crate::metric::Metric;
use crate::plot::{Bar, drawn};
use crate::process::output;
use crate::record::{Results, find};
use crate::stats::Summary;
use crate::table::shown;
use crate::workspace::root;
use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::Path;
use std::process::Command;

const BEGIN: &str = "<!-- figures: written by `cargo xtask bench` -->";
const END: &str = "<!-- end of figures -->";

/// The plot, in the folder of results.
const PLOT: &str = "headline.svg";

/// A line of the table; where it has two loads, their figures stand side by side.
struct Line {
    name: &'static str,
    metric: Metric,
    loads: &'static [Load],
}

/// A row of a table, the side of it that stands for QEMU, and the row and side of what there is without either.
struct Load {
    /// In the plot.
    name: &'static str,
    table: &'static str,
    row: &'static str,
    qemu: &'static str,
    without: Option<(&'static str, &'static str)>,
}

const fn load(name: &'static str, table: &'static str, row: &'static str) -> Load {
    Load { name, table, row, qemu: "QEMU", without: None }
}

const DISK: &str = "fio, raw file";
const NBD: &str = "serve: 4 KiB random reads, depth 32";
const READER: &str = "4 KiB random reads of another process during a backup";

#[rustfmt::skip]
const LINES: &[Line] = &[
    Line { name: "convert raw to qcow2, 4 GiB, O_DIRECT: MiB/s", metric: Metric::MibPerSecond, loads: &[
        load("convert", "convert", "convert raw to qcow2, O_DIRECT, 4 GiB"),
    ] },
    Line { name: "compress a file system with zstd: MiB/s", metric: Metric::MibPerSecond, loads: &[
        load("compress", "compress", "convert -c of a file system, zstd, O_DIRECT"),
    ] },
    Line { name: "4 KiB random reads / writes, depth 32: IOPS", metric: Metric::RequestsPerSecond, loads: &[
        Load { without: Some(("4 KiB random reads, depth 32, beside the disk", DISK)),
               ..load("random reads", "random", "4 KiB scattered reads, depth 32") },
        Load { without: Some(("4 KiB random writes, depth 32, beside the disk", DISK)),
               ..load("random writes", "random", "4 KiB scattered writes, depth 32") },
    ] },
    Line { name: "first 4 KiB writes into 64 KiB clusters (QEMU's default), ext4: IOPS", metric: Metric::RequestsPerSecond, loads: &[
        Load { without: Some(("Ext4: first 4 KiB writes, raw sparse file", "zebu")),
               ..load("first writes", "preallocation", "Ext4: first 4 KiB writes, 64 KiB clusters, preallocation off") },
    ] },
    Line { name: "random reads through a chain of 10 images: IOPS", metric: Metric::RequestsPerSecond, loads: &[
        load("chain of 10", "chains", "reads through a chain of 10, 300000 reads"),
    ] },
    Line { name: "check of 16 TiB in 2 MiB clusters, all allocated: seconds", metric: Metric::WallSeconds, loads: &[
        load("check of 16 TiB", "check", "check of 16 TiB, 2 MiB clusters, all allocated"),
    ] },
    Line { name: "serve NBD, 4 KiB random reads, depth 32: IOPS", metric: Metric::RequestsPerSecond, loads: &[
        Load { without: Some((NBD, DISK)), ..load("serve NBD", "serve", NBD) },
    ] },
    Line { name: "reads of another process during a backup: p99, \u{b5}s", metric: Metric::LatencyP99Micros, loads: &[
        Load { qemu: "QEMU, direct", without: Some((READER, "idle")), ..load("p99 beside a backup", "backup", READER) },
    ] },
];

/// Commits that figures may be behind the tree that shows them.
pub const MOST_COMMITS_BEHIND: u64 = 200;

/// How many commits are newer than the day of the README's oldest figures.
///
/// # Errors
/// The results can't be read, or the tree has no history.
pub fn commits_behind() -> Outcome<u64> {
    let tables = Results::read_all(&root().join("bench/results"))?;
    let dates = tables.iter().filter(|results| is_shown(results)).map(|results| &results.heading.date);
    let oldest = dates.min().ok_or("no figure of the README is kept")?;
    let since = format!("--since={oldest}T23:59:59Z");
    let count =
        output(Command::new("git").arg("-C").arg(root()).args(["rev-list", "--count", &since, "HEAD"]))?;
    count.trim().parse().map_err(|e| format!("git rev-list: {e}"))
}

/// Whether the README shows a figure of a table.
fn is_shown(results: &Results) -> bool {
    LINES.iter().flat_map(|line| line.loads).any(|load| load.table == results.table)
}

/// Writes the figures into the README, which has the markers, and the plot into `results`.
pub(crate) fn write(readme: &Path, results: &Path, tables: &[Results]) -> Outcome {
    let said = |e: std::io::Error| format!("{}: {e}", readme.display());
    let text = std::fs::read_to_string(readme).map_err(said)?;
    let (Some(begin), Some(end)) = (text.find(BEGIN), text.find(END)) else {
        return Err(format!("{}: the markers of the figures are gone", readme.display()));
    };
    let plot = results.join(PLOT);
    let tables: Vec<&Results> = tables.iter().collect();
    std::fs::write(&plot, self::plot(&tables)).map_err(|e| format!("{}: {e}", plot.display()))?;
    let new = format!("{}{BEGIN}\n\n{}\n{}", &text[..begin], figures(&tables), &text[end..]);
    std::fs::write(readme, new).map_err(said)
}

/// The plot, as a document of its own or a part of a page; nothing where no load of it was measured.
pub(crate) fn plot(tables: &[&Results]) -> String {
    let bars = bars(tables);
    if bars.is_empty() { String::new() } else { drawn("Times better than QEMU (logarithmic)", &bars) }
}

fn bars(tables: &[&Results]) -> Vec<Bar> {
    let bar = |load: &Load, metric| {
        let row = find(tables.iter().copied(), load.table, load.row)?;
        let ratio = row.pair(row.side(load.qemu)?, metric).advantage()?;
        let shown = ratio.shown();
        // The spread is drawn.
        let label = shown.split(" \u{b1}").next().unwrap_or_default().to_owned();
        let Summary { median, min, max, .. } = ratio.figures;
        Some(Bar { name: load.name.to_owned(), value: median, low: min, high: max, label })
    };
    LINES.iter().flat_map(|line| line.loads.iter().filter_map(move |load| bar(load, line.metric))).collect()
}

fn figures(tables: &[&Results]) -> String {
    let mut text = String::from("| | zebu | QEMU | raw file or disk |\n|---|---:|---:|---:|\n");
    for Line { name, metric, loads } in LINES {
        let cells = |of: &dyn Fn(&Load) -> Option<(&'static str, &'static str)>| {
            let median = |load: &Load| {
                let (name, who) = of(load)?;
                let values = find(tables.iter().copied(), load.table, name)?.side(who)?.of(*metric)?;
                Some(shown(Summary::of(values).median))
            };
            let cells: Vec<String> =
                loads.iter().map(|load| median(load).unwrap_or_else(|| "\u{2013}".into())).collect();
            cells.join(" / ")
        };
        let zebu = cells(&|load| Some((load.row, "zebu")));
        let qemu = cells(&|load| Some((load.row, load.qemu)));
        let without = cells(&|load| load.without);
        let _ = writeln!(text, "| {name} | {zebu} | {qemu} | {without} |");
    }
    let used: Vec<&Results> = tables.iter().copied().filter(|results| is_shown(results)).collect();
    let dates: BTreeSet<&str> = used.iter().map(|results| results.heading.date.as_str()).collect();
    let machines: BTreeSet<&str> = used.iter().map(|results| brief(&results.heading.machine)).collect();
    let joined = |set: BTreeSet<&str>| set.into_iter().collect::<Vec<_>>().join("; ");
    let _ = write!(
        text,
        "\nMedians of alternating rounds ({}; {}). QEMU converts with its fastest options; a backup is compared with \
         `qemu-img convert -c` to a target with O_DIRECT, its last column is an idle machine. For \
         random requests and first writes, the last column is of runs of its own (fio; zebu on a sparse raw file). \
         [Every figure, its spread, and first of all where zebu is behind](bench/results/index.html).\n\n\
         ![Times better than QEMU, on a logarithmic axis](bench/results/{PLOT})\n\n\
         The lines across the bars span all rounds.\n",
        joined(machines),
        joined(dates)
    );
    text
}

/// Kernel, processors and memory: the rest of a machine is on the page.
fn brief(machine: &str) -> &str {
    machine.match_indices(", ").nth(2).map_or(machine, |(at, _)| &machine[..at])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_readme_says_what_is_kept() {
        let tables = Results::read_all(&root().join("bench/results")).unwrap();
        let tables: Vec<&Results> = tables.iter().collect();
        let readme = std::fs::read_to_string(root().join("README.md")).unwrap();
        assert!(readme.contains(&figures(&tables)), "run `cargo xtask bench --page`");
        for load in LINES.iter().flat_map(|line| line.loads) {
            let row = find(tables.iter().copied(), load.table, load.row).expect(load.row);
            assert!(row.side("zebu").is_some() && row.side(load.qemu).is_some(), "{}", load.row);
        }
        assert!(LINES.len() <= 8);
    }

    #[test]
    fn the_age_of_the_figures_is_known() {
        if root().join(".git").exists() {
            commits_behind().unwrap();
        }
    }

    #[test]
    fn a_machine_in_brief_is_without_its_file_system() {
        assert_eq!(brief("Linux 6, 2 x CPU, 24 GiB, ext4 rw, QEMU"), "Linux 6, 2 x CPU, 24 GiB");
    }
}
