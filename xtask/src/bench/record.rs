//! Results as they are kept: one file a table, JSON lines; the first names the machine.

use crate::Outcome;
use crate::ab::Metric;
use crate::stats::Ratio;
use serde::Deserialize;
use std::collections::HashSet;
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

/// A benchmark that could not run.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(super) struct NotMeasured {
    pub(super) benchmark: String,
    /// Why.
    #[serde(rename = "not measured")]
    pub(super) why: String,
}

/// A line of a table's file.
#[derive(Deserialize)]
#[serde(untagged)]
enum Line {
    Cell(Cell),
    NotMeasured(NotMeasured),
}

/// A table of results.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Saved {
    pub(super) name: String,
    pub(super) machine: String,
    pub(super) date: String,
    /// How much was measured: `quick` or `full`.
    pub(super) extent: String,
    /// Which zebu: a commit.
    pub(super) commit: String,
    pub(super) cells: Vec<Cell>,
    pub(super) not_measured: Vec<NotMeasured>,
}

#[derive(Deserialize)]
struct Heading {
    machine: String,
    date: String,
    #[serde(default = "unstated")]
    extent: String,
    #[serde(default = "unstated")]
    commit: String,
}

/// Of results that were kept before it was noted.
fn unstated() -> String {
    "unstated".into()
}

impl Cell {
    /// How much better `a` is than `b`: above 1 is better, whatever the metric's direction. `None` if the rounds
    /// scatter too much to say.
    pub(super) fn advantage(&self) -> Option<Advantage> {
        // Nothing is so many times as much as nothing.
        if self.a.max <= 0.0 || self.b.max <= 0.0 {
            return None;
        }
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

    /// The advantage in words: as a number, or why there is none.
    pub(super) fn advantage_shown(&self) -> String {
        match (self.advantage(), self.a.max > 0.0, self.b.max > 0.0) {
            (Some(Advantage { median, mad, .. }), ..) => format!("{median:.2}x \u{b1}{mad:.2}"),
            (None, false, false) => "none on either side".to_owned(),
            (None, false, true) => "none beside some".to_owned(),
            (None, true, false) => "some beside none".to_owned(),
            (None, true, true) => "scatters".to_owned(),
        }
    }

    /// Whether `a` is worse than `b` by more than the spread.
    pub(super) fn is_behind(&self) -> bool {
        let alone_costs = !is_rate(&self.metric) && self.a.min > 0.0 && self.b.max <= 0.0;
        alone_costs || self.advantage().is_some_and(|advantage| advantage.is_behind())
    }

    /// Whether the other side is another program's (and not zebu in another setting, or nobody).
    pub(super) fn is_beside_a_peer(&self) -> bool {
        self.a.label.starts_with("zebu") && !self.b.label.starts_with("zebu") && self.b.label != NOBODY
    }

    /// Whether this run's `a` is worse than an earlier one's by more than the spread of both.
    pub(super) fn is_worse_than(&self, old: &Cell) -> bool {
        let spread = self.a.mad + old.a.mad;
        let lost =
            if is_rate(&self.metric) { old.a.median - self.a.median } else { self.a.median - old.a.median };
        lost > spread.max(old.a.median.abs() * 0.01)
    }
}

/// The label of a side on which nothing runs.
pub(super) const NOBODY: &str = "idle";

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
    fn is_behind(&self) -> bool {
        self.median + self.mad < 1.0
    }
}

/// Rates are better when larger; times, requests and memory when smaller.
fn is_rate(metric: &str) -> bool {
    [Metric::RequestsPerSecond, Metric::MibPerSecond, Metric::DepthScaling, Metric::CompressionRatio]
        .iter()
        .any(|rate| rate.name() == metric)
}

impl Saved {
    /// What each benchmark is about: the first of its metrics. (The others say what that costs.)
    pub(super) fn first_cells(&self) -> impl Iterator<Item = &Cell> {
        let mut seen = HashSet::new();
        self.cells.iter().filter(move |cell| seen.insert(cell.benchmark.as_str()))
    }

    /// Reads a table's file.
    pub(super) fn read(file: &Path) -> Outcome<Self> {
        let said = |what: String| format!("{}: {what}", file.display());
        let text = std::fs::read_to_string(file).map_err(|e| said(e.to_string()))?;
        let mut lines = text.lines();
        let heading = lines.next().ok_or_else(|| said("empty".into()))?;
        let heading: Heading = serde_json::from_str(heading).map_err(|e| said(format!("line 1: {e}")))?;
        let (mut cells, mut not_measured) = (Vec::new(), Vec::new());
        for (i, line) in lines.enumerate() {
            match serde_json::from_str(line).map_err(|e| said(format!("line {}: {e}", i + 2)))? {
                Line::Cell(cell) => cells.push(cell),
                Line::NotMeasured(row) => not_measured.push(row),
            }
        }
        let name = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let Heading { machine, date, extent, commit } = heading;
        Ok(Self { name, machine, date, extent, commit, cells, not_measured })
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
///
/// # Errors
/// They are of different sizes: then nothing can be said.
pub(super) fn regressions(old: &[Saved], new: &[Saved]) -> Outcome<Vec<String>> {
    let mut found = Vec::new();
    for table in new {
        let Some(before) = old.iter().find(|t| t.name == table.name) else { continue };
        if before.extent != table.extent {
            let (was, is) = (&before.extent, &table.extent);
            return Err(format!("{}: results of different sizes ({was} and {is})", table.name));
        }
        if before.machine != table.machine {
            println!("note: {}: another machine, or another state of it: '{}'", table.name, before.machine);
        }
        let is_there = |cell: &Cell| table.cells.iter().any(|c| c.benchmark == cell.benchmark);
        for gone in before.first_cells().filter(|cell| !is_there(cell)) {
            found.push(format!("{}: {}: was measured, and is not any more", table.name, gone.benchmark));
        }
        for cell in &table.cells {
            let of_row =
                || before.cells.iter().filter(|c| c.benchmark == cell.benchmark && c.metric == cell.metric);
            let same = of_row().find(|was| was.a.label == cell.a.label);
            if let (None, Some(was)) = (same, of_row().next()) {
                let (row, is, was) = (&cell.benchmark, &cell.a.label, &was.a.label);
                println!("note: {}: {row}: not compared, '{is}' was '{was}'", table.name);
            }
            if let Some(was) = same
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
    Ok(found)
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
    fn nothing_is_told_from_scatter() {
        let (none, some) = ([0.0; 3], [4.0; 3]);
        let shown = |a, b| cell("pages", a, b).advantage_shown();
        assert_eq!(shown(&none, &none), "none on either side");
        assert_eq!(
            (shown(&none, &some), shown(&some, &none)),
            ("none beside some".into(), "some beside none".into())
        );
        assert!(cell("pages", &some, &none).is_behind() && !cell("pages", &none, &some).is_behind());
        assert!(!cell("IOPS", &some, &none).is_behind(), "more is better");
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
                commit: unstated(),
                cells,
                not_measured: Vec::new(),
            }]
        };
        let old = table(&[100.0, 104.0, 96.0]);
        let worse = |new: &[Saved]| regressions(&old, new).unwrap();
        assert!(worse(&table(&[97.0, 95.0, 99.0])).is_empty());
        assert_eq!(worse(&table(&[80.0, 81.0, 79.0])).len(), 1);
        assert!(worse(&table(&[120.0, 121.0, 119.0])).is_empty());
        let mut smaller = table(&[80.0, 81.0, 79.0]);
        smaller[0].extent = "quick".into();
        assert!(regressions(&old, &smaller).unwrap_err().contains("sizes"));
    }
}
