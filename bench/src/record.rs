//! The recorder: a table's results, one file of JSON lines. The first line names the machine; a line a row follows.

use crate::Outcome;
use crate::metric::{Metric, Sample};
use crate::stats::{Ratio, Summary, ratio};
use crate::table::{Table, number};
use serde::{Deserialize, Serialize};
use std::fmt::Write;
use std::path::Path;

/// The figures of one side of a row: of each metric one value a round.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Measured {
    pub(crate) who: String,
    pub(crate) figures: Vec<(Metric, Vec<f64>)>,
}

/// A side that could not run, with the reason.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Failed {
    pub(crate) who: String,
    pub(crate) why: String,
}

/// One load, and everyone who served it in the same rounds. The first is compared with each of the others.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Row {
    pub(crate) row: String,
    pub(crate) sides: Vec<Measured>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) failed: Vec<Failed>,
}

/// Where, when and of what the figures are.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Heading {
    pub(crate) machine: String,
    pub(crate) date: String,
    /// `quick` or `full`.
    pub(crate) extent: String,
    /// The zebu that was measured.
    pub(crate) commit: String,
    /// How long the table took.
    pub(crate) seconds: u64,
}

/// The results of a table.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Results {
    pub(crate) table: String,
    pub(crate) heading: Heading,
    pub(crate) rows: Vec<Row>,
}

impl Measured {
    pub(crate) fn add(&mut self, sample: &Sample) {
        for (metric, value) in sample {
            let value = rounded(*value);
            match self.figures.iter_mut().find(|(known, _)| known == metric) {
                Some((_, values)) => values.push(value),
                None => self.figures.push((*metric, vec![value])),
            }
        }
    }

    pub(crate) fn of(&self, metric: Metric) -> Option<&[f64]> {
        self.figures.iter().find(|(known, _)| *known == metric).map(|(_, values)| values.as_slice())
    }

    /// `1.2 ±0.1`: the median and its spread.
    pub(crate) fn shown(&self, metric: Metric) -> String {
        self.of(metric).map(Summary::of).map_or_else(String::new, |figures| {
            format!("{} \u{b1}{}", number(figures.median), number(figures.mad))
        })
    }
}

/// Five digits: more say nothing, and make the files larger.
fn rounded(value: f64) -> f64 {
    format!("{value:.4e}").parse().unwrap_or(value)
}

/// A comparison of the first side of a row with another.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pair<'a> {
    pub(crate) row: &'a Row,
    pub(crate) other: &'a Measured,
    pub(crate) metric: Metric,
}

impl Row {
    pub(crate) fn side(&self, who: &str) -> Option<&Measured> {
        self.sides.iter().find(|side| side.who == who)
    }

    /// The metrics of the first side, the row's subject.
    pub(crate) fn metrics(&self) -> impl Iterator<Item = Metric> {
        self.sides.first().into_iter().flat_map(|side| side.figures.iter().map(|(metric, _)| *metric))
    }

    pub(crate) fn pair<'a>(&'a self, other: &'a Measured, metric: Metric) -> Pair<'a> {
        Pair { row: self, other, metric }
    }

    /// A table for a terminal: medians with their spread, and how much better the first side is.
    pub(crate) fn render(&self) -> String {
        let mut heading = vec![self.row.as_str()];
        for (place, side) in self.sides.iter().enumerate() {
            heading.push(&side.who);
            if place > 0 {
                heading.push("first better by");
            }
        }
        let mut table = Table::new(heading);
        for metric in self.metrics() {
            let mut cells = vec![metric.name()];
            for (place, side) in self.sides.iter().enumerate() {
                cells.push(side.shown(metric));
                if place > 0 {
                    cells.push(self.pair(side, metric).shown());
                }
            }
            table.row(cells);
        }
        let mut text = table.render();
        for Failed { who, why } in &self.failed {
            let _ = writeln!(text, "{who}: not measured: {why}");
        }
        text
    }
}

impl Pair<'_> {
    /// How many times better the first side is, whatever the metric's direction.
    pub(crate) fn advantage(&self) -> Option<Ratio> {
        let ours = self.row.sides.first()?.of(self.metric)?;
        let theirs = self.other.of(self.metric)?;
        if self.metric.is_rate() { ratio(ours, theirs) } else { ratio(theirs, ours) }
    }

    pub(crate) fn shown(&self) -> String {
        self.advantage().map_or_else(String::new, |advantage| advantage.shown())
    }

    /// Whether the first side is worse by more than the spread.
    pub(crate) fn is_behind(&self) -> bool {
        self.advantage().is_some_and(|advantage| advantage.is_below_one())
    }

    /// Whether another program is compared with zebu (and not zebu in another setting, the bare disk, or nobody).
    pub(crate) fn is_beside_a_peer(&self) -> bool {
        let ours = self.row.sides.first().is_some_and(|side| side.who.starts_with("zebu"));
        let no_peer = ["zebu", "raw", "fio", "idle"];
        ours && !no_peer.iter().any(|word| self.other.who.starts_with(word))
    }
}

impl Results {
    pub(crate) fn read(file: &Path) -> Outcome<Self> {
        let said = |what: String| format!("{}: {what}", file.display());
        let text = std::fs::read_to_string(file).map_err(|e| said(e.to_string()))?;
        let mut lines = (1..).zip(text.lines());
        let (_, heading) = lines.next().ok_or_else(|| said("empty".into()))?;
        let heading = serde_json::from_str(heading).map_err(|e| said(format!("line 1: {e}")))?;
        let parse = |(at, line)| {
            serde_json::from_str(line).map_err(|e: serde_json::Error| said(format!("line {at}: {e}")))
        };
        let rows = lines.map(parse).collect::<Outcome<_>>()?;
        let table = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        Ok(Self { table, heading, rows })
    }

    /// All tables of a folder, by name; or the one file.
    pub(crate) fn read_all(path: &Path) -> Outcome<Vec<Self>> {
        if path.is_file() {
            return Ok(vec![Self::read(path)?]);
        }
        let entries = std::fs::read_dir(path).map_err(|e| format!("{}: {e}", path.display()))?;
        let mut files: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
        files.retain(|file| file.extension().is_some_and(|e| e == "jsonl"));
        files.sort();
        files.iter().map(|file| Self::read(file)).collect()
    }

    /// Writes the table's file into `folder`, in the place of an earlier one.
    pub(crate) fn write(&self, folder: &Path) -> Outcome {
        let file = folder.join(format!("{}.jsonl", self.table));
        let json = |line: serde_json::Result<String>| line.map_err(|e| format!("{}: {e}", file.display()));
        let mut text = json(serde_json::to_string(&self.heading))? + "\n";
        for row in &self.rows {
            text += &(json(serde_json::to_string(row))? + "\n");
        }
        std::fs::write(&file, text).map_err(|e| format!("{}: {e}", file.display()))
    }
}

/// A row of one of the tables, by its name.
pub(crate) fn find<'a>(
    tables: impl IntoIterator<Item = &'a Results>,
    table: &str,
    row: &str,
) -> Option<&'a Row> {
    let table = tables.into_iter().find(|results| results.table == table)?;
    table.rows.iter().find(|found| found.row == row)
}

/// The figures of zebu in `new` that are worse than in `old` by more than both spreads, in words.
///
/// # Errors
/// They are of different sizes: then nothing can be said.
pub(crate) fn regressions(old: &[Results], new: &[Results]) -> Outcome<Vec<String>> {
    let mut found = Vec::new();
    for table in new {
        let Some(before) = old.iter().find(|results| results.table == table.table) else { continue };
        let (was, is) = (&before.heading, &table.heading);
        if was.extent != is.extent {
            return Err(format!(
                "{}: results of different sizes ({} and {})",
                table.table, was.extent, is.extent
            ));
        }
        if was.machine != is.machine {
            println!("note: {}: another machine, or another state of it: '{}'", table.table, was.machine);
        }
        for gone in before.rows.iter().filter(|was| !table.rows.iter().any(|row| row.row == was.row)) {
            found.push(format!("{}: {}: was measured, and is not any more", table.table, gone.row));
        }
        for (row, was) in pairs_of_rows(&table.rows, &before.rows) {
            let (Some(now), Some(was)) = (row.sides.first(), was.sides.first()) else { continue };
            for metric in row.metrics() {
                let (Some(new), Some(old)) = (now.of(metric), was.of(metric)) else { continue };
                let (new, old) = (Summary::of(new), Summary::of(old));
                let lost = if metric.is_rate() { old.median - new.median } else { new.median - old.median };
                if lost > (new.mad + old.mad).max(old.median.abs() * 0.01) {
                    let figures = format!("{} was {}", number(new.median), number(old.median));
                    found.push(format!("{}: {}, {}: {figures}", table.table, row.row, metric.name()));
                }
            }
        }
    }
    Ok(found)
}

fn pairs_of_rows<'a>(new: &'a [Row], old: &'a [Row]) -> impl Iterator<Item = (&'a Row, &'a Row)> {
    new.iter().filter_map(|row| Some((row, old.iter().find(|was| was.row == row.row)?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(metric: Metric, ours: &[f64], theirs: &[f64]) -> Row {
        let side = |who: &str, values: &[f64]| Measured {
            who: who.into(),
            figures: vec![(metric, values.to_vec())],
        };
        Row { row: "t".into(), sides: vec![side("zebu", ours), side("QEMU", theirs)], failed: Vec::new() }
    }

    fn results(row: Row) -> Results {
        let heading = Heading {
            machine: "m".into(),
            date: "d".into(),
            extent: "full".into(),
            commit: "c".into(),
            seconds: 1,
        };
        Results { table: "n".into(), heading, rows: vec![row] }
    }

    #[test]
    fn more_is_better_of_rates_and_less_of_times() {
        let (slow, fast) = ([1.0, 1.0, 1.1], [2.0, 2.0, 2.2]);
        let judged = |metric| {
            let row = row(metric, &fast, &slow);
            let pair = row.pair(&row.sides[1], metric);
            (pair.advantage().expect("enough rounds").figures.median > 1.9, pair.is_behind())
        };
        assert_eq!(judged(Metric::RequestsPerSecond), (true, false));
        assert_eq!(judged(Metric::WallSeconds), (false, true));
    }

    #[test]
    fn what_is_written_is_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let mut written = results(row(Metric::LatencyP99Micros, &[1.0, 2.5], &[3.0, 4.0]));
        written.rows[0].failed.push(Failed { who: "imago".into(), why: "can't".into() });
        written.write(folder.path()).unwrap();
        assert_eq!(Results::read_all(folder.path()).unwrap(), [written]);
        assert!((rounded(1234.5678) - 1234.6).abs() < 1e-9);
    }

    #[test]
    fn only_what_is_worse_by_more_than_the_spread_is_named() {
        let table = |values: &[f64]| vec![results(row(Metric::RequestsPerSecond, values, &[1.0; 3]))];
        let old = table(&[100.0, 104.0, 96.0]);
        let worse = |new: &[Results]| regressions(&old, new).unwrap().len();
        assert_eq!(worse(&table(&[97.0, 95.0, 99.0])), 0);
        assert_eq!(worse(&table(&[80.0, 81.0, 79.0])), 1);
        assert_eq!(worse(&table(&[120.0, 121.0, 119.0])), 0);
        let mut smaller = table(&[80.0, 81.0, 79.0]);
        smaller[0].heading.extent = "quick".into();
        assert!(regressions(&old, &smaller).unwrap_err().contains("sizes"));
    }
}
