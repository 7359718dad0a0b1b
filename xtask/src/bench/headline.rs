//! The README's figures, a plot and a table: written from what is saved, between two markers, never by hand.

use super::bars::{Bar, drawn};
use super::record::{Cell, Saved};
use crate::Outcome;
use crate::ab::Metric;
use std::collections::{BTreeSet, HashSet};
use std::fmt::Write;
use std::path::Path;

const BEGIN: &str = "<!-- figures: written by `cargo xtask bench` -->";
const END: &str = "<!-- end of figures -->";

/// The plot, in the folder of results.
const PLOT: &str = "headline.svg";

/// What a table says all in all.
struct Line<'a> {
    table: &'a Saved,
    benchmarks: usize,
    /// Whose rounds scatter too much for a ratio.
    scatter: usize,
    /// How many times zebu is better: the geometric mean.
    mean: f64,
    best: f64,
    worst: (f64, &'a str),
}

/// Writes the figures of all tables into the README, if it has the markers, and the plot into `results`.
pub(super) fn write(readme: &Path, results: &Path, tables: &[Saved]) -> Outcome {
    let said = |e: std::io::Error| format!("{}: {e}", readme.display());
    let text = std::fs::read_to_string(readme).map_err(said)?;
    let (Some(begin), Some(end)) = (text.find(BEGIN), text.find(END)) else {
        return Err(format!("{}: the markers of the figures are gone", readme.display()));
    };
    let lines: Vec<Line<'_>> = tables.iter().filter_map(line).collect();
    let bars = lines.iter().map(|line| Bar {
        name: format!("{}: mean, worst and best of {}", line.table.name, line.benchmarks - line.scatter),
        value: line.mean,
        low: line.worst.0,
        high: line.best,
    });
    let plot = results.join(PLOT);
    std::fs::write(&plot, drawn(&bars.collect::<Vec<_>>())?)
        .map_err(|e| format!("{}: {e}", plot.display()))?;
    let new = format!("{}{BEGIN}\n\n{}\n{}", &text[..begin], table(&lines), &text[end..]);
    std::fs::write(readme, new).map_err(said)
}

/// What zebu's advantage over the peers is, all in all and at worst, in what each benchmark is about. Benchmarks that
/// count calls are no measure of speed, and are left out.
fn line(table: &Saved) -> Option<Line<'_>> {
    let counts_calls: HashSet<&str> = table
        .cells
        .iter()
        .filter(|cell| cell.metric == Metric::TargetWrites.name())
        .map(|cell| cell.benchmark.as_str())
        .collect();
    let cells: Vec<&Cell> = table
        .first_cells()
        .filter(|cell| cell.is_beside_a_peer() && !counts_calls.contains(cell.benchmark.as_str()))
        .collect();
    let advantages: Vec<(f64, &str)> = cells
        .iter()
        .filter_map(|cell| cell.advantage().map(|a| (a.median, cell.benchmark.as_str())))
        .collect();
    let worst = advantages.iter().copied().min_by(|a, b| a.0.total_cmp(&b.0))?;
    Some(Line {
        table,
        benchmarks: cells.len(),
        scatter: cells.len() - advantages.len(),
        mean: (advantages.iter().map(|(a, _)| a.ln()).sum::<f64>() / advantages.len() as f64).exp(),
        best: advantages.iter().map(|(a, _)| *a).fold(worst.0, f64::max),
        worst,
    })
}

/// A row for each table that is beside a peer.
fn table(lines: &[Line<'_>]) -> String {
    let mut rows = String::new();
    for Line { table, benchmarks, scatter, mean, worst: (worst, which), .. } in lines {
        let scatter = if *scatter > 0 { format!(" ({scatter} scatter)") } else { String::new() };
        let _ =
            writeln!(rows, "| {} | {benchmarks}{scatter} | {mean:.2}x | {worst:.2}x: {which} |", table.name);
    }
    format!(
        "![How many times better than its peers zebu is, by table](bench/results/{PLOT})\n\n\
         | table | benchmarks | zebu better by (geometric mean) | at worst |\n|---|---|---|---|\n{rows}\n\
         More is better; beside QEMU or the program named, ratios of medians. {} Every figure with its spread, and a list \
         of where zebu is behind: [bench/results](bench/results/index.html).\n",
        machines(lines.iter().map(|line| line.table))
    )
}

/// Which tables were measured where, and when: the machine of most of them first.
fn machines<'a>(tables: impl Iterator<Item = &'a Saved>) -> String {
    let mut machines: Vec<(String, Vec<&Saved>)> = Vec::new();
    for table in tables {
        let words: Vec<&str> = table.machine.split_whitespace().collect();
        let machine = format!("{} sizes: {}", table.extent, words.join(" "));
        match machines.iter_mut().find(|(known, _)| *known == machine) {
            Some((_, of_machine)) => of_machine.push(table),
            None => machines.push((machine, vec![table])),
        }
    }
    machines.sort_by_key(|(_, tables)| std::cmp::Reverse(tables.len()));
    let mut text = String::new();
    for (place, (machine, tables)) in machines.iter().enumerate() {
        let dates: BTreeSet<&str> = tables.iter().map(|table| table.date.as_str()).collect();
        let names: Vec<&str> = tables.iter().map(|table| table.name.as_str()).collect();
        let which = if place == 0 { "Measured".to_owned() } else { names.join(", ") };
        let dates: Vec<&str> = dates.into_iter().collect();
        let but = if place == 0 && machines.len() > 1 { ", but for those named below" } else { "" };
        let _ = write!(text, "{which} {}, {machine}{but}. ", dates.join(" and "));
    }
    text.trim_end().to_owned()
}
