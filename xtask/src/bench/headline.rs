//! The README's table of figures: written from what is saved, between two markers, never by hand.

use super::record::Saved;
use crate::Outcome;
use std::collections::HashSet;
use std::fmt::Write;
use std::path::Path;

const BEGIN: &str = "<!-- figures: written by `cargo xtask bench` -->";
const END: &str = "<!-- end of figures -->";

/// Writes the figures of all tables into the README, if it has the markers.
pub(super) fn write(readme: &Path, tables: &[Saved]) -> Outcome {
    let said = |e: std::io::Error| format!("{}: {e}", readme.display());
    let text = std::fs::read_to_string(readme).map_err(said)?;
    let (Some(begin), Some(end)) = (text.find(BEGIN), text.find(END)) else {
        return Err(format!("{}: the markers of the figures are gone", readme.display()));
    };
    let new = format!("{}{BEGIN}\n\n{}\n{}", &text[..begin], table(tables), &text[end..]);
    std::fs::write(readme, new).map_err(said)
}

/// One line a table: what zebu's advantage over the peers is, all in all and at worst, in each benchmark's first metric
/// that has a ratio.
fn table(tables: &[Saved]) -> String {
    let mut rows = String::new();
    let mut machines: Vec<String> = Vec::new();
    for table in tables {
        let mut seen = HashSet::new();
        let advantages: Vec<(f64, &str)> = table
            .cells
            .iter()
            .filter(|cell| cell.is_beside_a_peer())
            .filter_map(|cell| cell.advantage().map(|a| (a.median, cell.benchmark.as_str())))
            .filter(|(_, benchmark)| seen.insert(*benchmark))
            .collect();
        let Some((worst, which)) = advantages.iter().copied().min_by(|a, b| a.0.total_cmp(&b.0)) else {
            continue;
        };
        let mean = (advantages.iter().map(|(a, _)| a.ln()).sum::<f64>() / advantages.len() as f64).exp();
        let _ =
            writeln!(rows, "| {} | {} | {mean:.2}x | {worst:.2}x: {which} |", table.name, advantages.len());
        let machine = format!("{} ({} sizes): {}", table.date, table.extent, table.machine);
        if !machines.contains(&machine) {
            machines.push(machine);
        }
    }
    format!(
        "| table | benchmarks | zebu better by (geometric mean) | at worst |\n|---|---|---|---|\n{rows}\n\
         More is better; beside QEMU or the program named, ratios of medians. {}. Every figure with its spread, and a list \
         of where zebu is behind: [bench/results](bench/results/index.html).\n",
        machines.join("; ")
    )
}
