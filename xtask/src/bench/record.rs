//! Results as they are kept: one file a table, JSON lines; the first names the machine.

use crate::Outcome;
use crate::stats::Ratio;
use serde::Deserialize;
use std::path::Path;

/// What one side's rounds gave.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(super) struct Figures {
    pub(super) label: String,
    pub(super) median: f64,
    /// Median of the absolute deviations.
    pub(super) mad: f64,
    pub(super) min: f64,
    pub(super) max: f64,
    values: Vec<f64>,
}

/// One metric of one benchmark.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(super) struct Cell {
    pub(super) benchmark: String,
    pub(super) metric: String,
    pub(super) rounds: usize,
    pub(super) a: Figures,
    pub(super) b: Figures,
}

/// A table of results.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Saved {
    pub(super) name: String,
    pub(super) machine: String,
    pub(super) date: String,
    /// How much was measured: `quick` or `full`.
    pub(super) extent: String,
    pub(super) cells: Vec<Cell>,
}

#[derive(Deserialize)]
struct Heading {
    machine: String,
    date: String,
    #[serde(default = "unstated")]
    extent: String,
}

/// Of results that were kept before it was noted.
fn unstated() -> String {
    "unstated".into()
}

impl Cell {
    /// How much better `a` is than `b`: above 1 is better, whatever the metric's direction. `None` if the rounds
    /// scatter too much to say.
    pub(super) fn advantage(&self) -> Option<Advantage> {
        let ratio = if is_rate(&self.metric) {
            Ratio::of(&self.a.values, &self.b.values)
        } else {
            Ratio::of(&self.b.values, &self.a.values)
        };
        match ratio {
            Ratio::Known(s) => Some(Advantage { median: s.median, mad: s.mad, min: s.min, max: s.max }),
            Ratio::Meaningless(_) => None,
        }
    }

    /// Whether the other side is another program's (and not zebu in another setting).
    pub(super) fn is_beside_a_peer(&self) -> bool {
        self.a.label.starts_with("zebu") && !self.b.label.starts_with("zebu")
    }

    /// Whether this run's `a` is worse than an earlier one's by more than the spread of both.
    pub(super) fn is_worse_than(&self, old: &Cell) -> bool {
        let spread = self.a.mad + old.a.mad;
        let lost =
            if is_rate(&self.metric) { old.a.median - self.a.median } else { self.a.median - old.a.median };
        lost > spread.max(old.a.median.abs() * 0.01)
    }
}

/// A ratio of which more is better.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Advantage {
    pub(super) median: f64,
    pub(super) mad: f64,
    pub(super) min: f64,
    pub(super) max: f64,
}

impl Advantage {
    /// Whether it is below 1 by more than its spread.
    pub(super) fn is_behind(&self) -> bool {
        self.median + self.mad < 1.0
    }
}

/// Rates are better when larger; times, requests and memory when smaller.
fn is_rate(metric: &str) -> bool {
    matches!(metric, "IOPS" | "MiB/s")
}

impl Saved {
    /// Reads a table's file.
    pub(super) fn read(file: &Path) -> Outcome<Self> {
        let said = |what: String| format!("{}: {what}", file.display());
        let text = std::fs::read_to_string(file).map_err(|e| said(e.to_string()))?;
        let mut lines = text.lines();
        let heading = lines.next().ok_or_else(|| said("empty".into()))?;
        let heading: Heading = serde_json::from_str(heading).map_err(|e| said(format!("line 1: {e}")))?;
        let cells = lines
            .enumerate()
            .map(|(i, line)| serde_json::from_str(line).map_err(|e| said(format!("line {}: {e}", i + 2))))
            .collect::<Result<_, _>>()?;
        let name = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        Ok(Self { name, machine: heading.machine, date: heading.date, extent: heading.extent, cells })
    }

    /// All tables of a folder, by name; or the one file.
    pub(super) fn read_all(path: &Path) -> Outcome<Vec<Self>> {
        if path.is_file() {
            return Ok(vec![Self::read(path)?]);
        }
        let entries = std::fs::read_dir(path).map_err(|e| format!("{}: {e}", path.display()))?;
        let mut files: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
        files.retain(|file| file.extension().is_some_and(|e| e == "jsonl"));
        files.sort();
        files.iter().map(|file| Self::read(file)).collect()
    }
}

/// The cells of `new` that are worse than the same ones of `old`, in words.
pub(super) fn regressions(old: &[Saved], new: &[Saved]) -> Vec<String> {
    let mut found = Vec::new();
    for table in new {
        let Some(before) = old.iter().find(|t| t.name == table.name) else { continue };
        for cell in &table.cells {
            let same = |c: &&Cell| {
                c.benchmark == cell.benchmark && c.metric == cell.metric && c.a.label == cell.a.label
            };
            if let Some(was) = before.cells.iter().find(same)
                && cell.is_worse_than(was)
            {
                found.push(format!(
                    "{}: {}, {}: {} was {}",
                    table.name,
                    cell.benchmark,
                    cell.metric,
                    crate::table::number(cell.a.median),
                    crate::table::number(was.a.median)
                ));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell(metric: &str, a: &[f64], b: &[f64]) -> Cell {
        let side = |label: &str, values: &[f64]| {
            let s = crate::stats::Summary::of(values);
            Figures {
                label: label.into(),
                median: s.median,
                mad: s.mad,
                min: s.min,
                max: s.max,
                values: values.to_vec(),
            }
        };
        Cell {
            benchmark: "t".into(),
            metric: metric.into(),
            rounds: a.len(),
            a: side("zebu", a),
            b: side("QEMU", b),
        }
    }

    #[test]
    fn more_is_better_of_rates_and_less_of_times() {
        let (slow, fast) = ([1.0, 1.0, 1.1], [2.0, 2.0, 2.2]);
        assert!(cell("IOPS", &fast, &slow).advantage().is_some_and(|a| a.median > 1.9 && !a.is_behind()));
        assert!(cell("time (s)", &fast, &slow).advantage().is_some_and(|a| a.median < 0.6 && a.is_behind()));
        assert!(cell("IOPS", &[1.0, 5.0, 9.0], &[1.0, 1.0, 1.0]).advantage().is_none(), "too much scatter");
    }

    #[test]
    fn only_what_is_worse_by_more_than_the_spread_is_named() {
        let table = |values: &[f64]| {
            let cells = vec![cell("IOPS", values, &[1.0; 3])];
            vec![Saved {
                name: "n".into(),
                machine: String::new(),
                date: String::new(),
                extent: unstated(),
                cells,
            }]
        };
        let old = table(&[100.0, 104.0, 96.0]);
        assert!(regressions(&old, &table(&[97.0, 95.0, 99.0])).is_empty());
        assert_eq!(regressions(&old, &table(&[80.0, 81.0, 79.0])).len(), 1);
        assert!(regressions(&old, &table(&[120.0, 121.0, 119.0])).is_empty());
    }
}
