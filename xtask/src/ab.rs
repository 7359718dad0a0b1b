//! Two things measured alternately, and what their ratio is.

use crate::Outcome;
use crate::process::{Usage, measure_ok};
use crate::stats::{Ratio, Summary};
use crate::table::{Table, number};
use clap::Args;
use serde_json::{Value, json};
use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

#[derive(Args)]
pub(crate) struct AbArgs {
    /// Measured rounds; in each both commands run once, in turn the one and the other first
    #[arg(long, default_value_t = 7)]
    rounds: usize,
    /// Rounds before them that don't count
    #[arg(long, default_value_t = 1)]
    warm_up: usize,
    /// A shell command that runs before each measured command, unmeasured
    #[arg(long, value_name = "COMMAND")]
    prepare: Option<String>,
    /// Append the results to this file, one JSON object a line
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// The two commands, with `--vs` between them
    #[arg(last = true, required = true, value_name = "CMD_A --vs CMD_B")]
    commands: Vec<String>,
}

/// What was measured, with its unit in the name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Metric {
    WallSeconds,
    CpuSeconds,
    MaxRssMib,
    MibPerSecond,
    RequestsPerSecond,
    CpuMicrosPerRequest,
    LatencyP99Micros,
    DeviceReads,
    DeviceWrites,
    /// System calls on the target, seen by strace.
    TargetReads,
    TargetWrites,
    /// The same that make durable: fdatasync, fsync.
    TargetSyncs,
    /// The same that do none of this: fallocate, ftruncate.
    TargetOthers,
    /// Of the writes, those that do not begin and end where 4 KiB blocks do.
    UnalignedWrites,
    /// In the page cache after the run.
    SourceCachedMib,
    TargetCachedMib,
    /// Of both files in the page cache, at most, while it ran.
    PeakCachedMib,
    /// Extents of a file on its file system, for each GiB of the disk.
    ExtentsPerGib,
    /// Of the image that was made.
    ImageMib,
    /// Bytes of data in the source, beside those of the image that was made.
    CompressionRatio,
    /// Milliseconds more than the program needs to start and end.
    OverBareMillis,
    /// In user mode, seen by callgrind.
    InstructionsPerRequest,
    /// Requests per second with many in flight, beside those with one.
    DepthScaling,
}

impl Metric {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Metric::WallSeconds => "time (s)",
            Metric::CpuSeconds => "CPU (s)",
            Metric::MaxRssMib => "memory (MiB)",
            Metric::ImageMib => "image (MiB)",
            Metric::MibPerSecond => "MiB/s",
            Metric::RequestsPerSecond => "IOPS",
            Metric::LatencyP99Micros => "p99 (µs)",
            Metric::CpuMicrosPerRequest => "CPU per request (µs)",
            Metric::TargetReads => "reads of the target",
            Metric::TargetWrites => "writes to the target",
            Metric::TargetSyncs => "syncs of the target",
            Metric::TargetOthers => "other calls on the target",
            Metric::UnalignedWrites => "unaligned writes",
            Metric::SourceCachedMib => "source left in the page cache (MiB)",
            Metric::TargetCachedMib => "target left in the page cache (MiB)",
            Metric::PeakCachedMib => "page cache while it ran (MiB)",
            Metric::DeviceReads => "device reads",
            Metric::DeviceWrites => "device writes",
            Metric::ExtentsPerGib => "extents per GiB",
            Metric::CompressionRatio => "source's data beside the image (x)",
            Metric::OverBareMillis => "over a bare start (ms)",
            Metric::InstructionsPerRequest => "instructions per request",
            Metric::DepthScaling => "depth 32 beside depth 1 (x)",
        }
    }
}

/// One run's figures, always in the same order.
pub(crate) type Sample = Vec<(Metric, f64)>;

/// Anything that can be run once and measured.
pub(crate) struct Side<'a> {
    /// Its name in tables.
    pub(crate) label: String,
    /// Runs it once.
    pub(crate) run: Box<dyn FnMut() -> Outcome<Sample> + 'a>,
}

/// The figures of all rounds.
pub(crate) struct Comparison {
    name: String,
    labels: [String; 2],
    metrics: Vec<(Metric, [Vec<f64>; 2])>,
}

/// How often things run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rounds {
    /// Measured.
    pub(crate) measured: usize,
    /// Before those.
    pub(crate) warm_up: usize,
}

/// Why a row has no result.
#[derive(Debug, Clone)]
pub(crate) struct CannotRun {
    /// The side that can't.
    pub(crate) label: String,
    pub(crate) why: String,
}

/// A row of results: its name, and which two of the sides it compares.
#[derive(Debug, Clone)]
pub(crate) struct Row {
    pub(crate) name: String,
    pub(crate) pair: [usize; 2],
}

impl Row {
    /// Compares the sides at two places.
    pub(crate) fn of(name: impl Into<String>, pair: [usize; 2]) -> Self {
        Self { name: name.into(), pair }
    }
}

/// Runs all sides in turn, each once a round, and makes the rows of them. Which one goes first changes from round to round,
/// so that what the first leaves behind (caches, a busy disk) hits all alike. A side that fails does not run again, and its
/// rows are told with the reason.
pub(crate) fn compare(
    rounds: Rounds,
    mut sides: Vec<Side<'_>>,
    rows: &[Row],
) -> Vec<Result<Comparison, CannotRun>> {
    let empty = |row: &Row| Comparison {
        name: row.name.clone(),
        labels: row.pair.map(|place| sides[place].label.clone()),
        metrics: Vec::new(),
    };
    let mut comparisons: Vec<Comparison> = rows.iter().map(empty).collect();
    let mut failures: Vec<Option<String>> = vec![None; sides.len()];
    for round in 0..rounds.warm_up + rounds.measured {
        let mut samples = vec![Sample::new(); sides.len()];
        let mut order: Vec<usize> = (0..sides.len()).collect();
        if round % 2 != 0 {
            order.reverse();
        }
        for place in order {
            if failures[place].is_none() {
                match (sides[place].run)() {
                    Ok(sample) => samples[place] = sample,
                    Err(why) => failures[place] = Some(why),
                }
            }
        }
        if round >= rounds.warm_up {
            for (row, comparison) in rows.iter().zip(&mut comparisons) {
                comparison.add(&samples[row.pair[0]], &samples[row.pair[1]]);
            }
        }
    }
    let judged = |(row, comparison): (&Row, Comparison)| {
        let failed = |place: &usize| {
            let why = failures[*place].clone()?;
            Some(CannotRun { label: sides[*place].label.clone(), why })
        };
        row.pair.iter().find_map(failed).map_or(Ok(comparison), Err)
    };
    rows.iter().zip(comparisons).map(judged).collect()
}

impl Comparison {
    /// Takes in the figures of a round.
    fn add(&mut self, a: &Sample, b: &Sample) {
        for (metric, value) in a {
            let Some((_, other)) = b.iter().find(|(m, _)| m == metric) else { continue };
            let at = self.metrics.iter().position(|(m, _)| m == metric).unwrap_or_else(|| {
                self.metrics.push((*metric, [Vec::new(), Vec::new()]));
                self.metrics.len() - 1
            });
            self.metrics[at].1[0].push(*value);
            self.metrics[at].1[1].push(*other);
        }
    }

    /// A table: medians with their spread, and the ratio of the first to the second.
    pub(crate) fn render(&self) -> String {
        let [a, b] = &self.labels;
        let mut table = Table::new([self.name.as_str(), a, b, &format!("{a} / {b}")]);
        for (metric, [va, vb]) in &self.metrics {
            let shown = |values: &[f64]| {
                let s = Summary::of(values);
                format!("{} ±{} [{} .. {}]", number(s.median), number(s.mad), number(s.min), number(s.max))
            };
            table.row([metric.name().to_owned(), shown(va), shown(vb), Ratio::of(va, vb).shown()]);
        }
        table.render()
    }

    /// One JSON object per metric.
    pub(crate) fn json_lines(&self) -> Vec<Value> {
        let side = |label: &str, values: &[f64]| {
            let s = Summary::of(values);
            json!({ "label": label, "median": s.median, "mad": s.mad, "min": s.min, "max": s.max, "values": values })
        };
        let line = |(metric, [va, vb]): &(Metric, [Vec<f64>; 2])| {
            let ratio = match Ratio::of(va, vb) {
                Ratio::Known(s) => json!({ "median": s.median, "mad": s.mad, "min": s.min, "max": s.max }),
                Ratio::Meaningless(why) => json!({ "none": why }),
            };
            json!({
                "benchmark": self.name, "metric": metric.name(), "rounds": va.len(),
                "a": side(&self.labels[0], va), "b": side(&self.labels[1], vb), "ratio": ratio,
            })
        };
        self.metrics.iter().map(line).collect()
    }

    /// Appends [`Comparison::json_lines`] to a file.
    pub(crate) fn append_to(&self, file: &Path) -> Outcome {
        let said = |e: std::io::Error| format!("{}: {e}", file.display());
        let mut out = OpenOptions::new().create(true).append(true).open(file).map_err(said)?;
        self.json_lines().iter().try_for_each(|line| writeln!(out, "{line}")).map_err(said)
    }
}

/// Time, CPU and memory of a finished command.
pub(crate) fn sample(usage: &Usage) -> Sample {
    vec![
        (Metric::WallSeconds, usage.wall.as_secs_f64()),
        (Metric::CpuSeconds, usage.cpu.as_secs_f64()),
        (Metric::MaxRssMib, usage.max_rss as f64 / 1048576.0),
    ]
}

pub(crate) fn run(args: &AbArgs) -> Outcome {
    let (a, b) = split(&args.commands)?;
    let side = |label: &str, words: &[String]| {
        let words = words.to_vec();
        Side {
            label: label.to_owned(),
            run: Box::new(move || {
                if let Some(prepare) = &args.prepare {
                    crate::process::run(Command::new("sh").args(["-c", prepare]))?;
                }
                Ok(sample(&measure_ok(Command::new(&words[0]).args(&words[1..]))?))
            }),
        }
    };
    println!("A: {}\nB: {}\n", a.join(" "), b.join(" "));
    let rounds = Rounds { measured: args.rounds, warm_up: args.warm_up };
    let rows = [Row::of("A / B", [0, 1])];
    let mut compared = compare(rounds, vec![side("A", a), side("B", b)], &rows);
    let comparison = compared.pop().ok_or("nothing was compared")?.map_err(|failed| failed.why)?;
    println!("{}", comparison.render());
    args.json.as_ref().map_or(Ok(()), |file| comparison.append_to(file))
}

fn split(words: &[String]) -> Outcome<(&[String], &[String])> {
    let at = words.iter().position(|w| w == "--vs").ok_or("no `--vs` between the two commands")?;
    let (a, b) = (&words[..at], &words[at + 1..]);
    if a.is_empty() || b.is_empty() { Err("a command is empty".into()) } else { Ok((a, b)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    #[test]
    fn sides_take_turns_and_warm_up_does_not_count() {
        let order = RefCell::new(String::new());
        let side = |label: &str, factor: f64| {
            let (order, name) = (&order, label.to_owned());
            Side {
                label: label.to_owned(),
                run: Box::new(move || {
                    order.borrow_mut().push_str(&name);
                    Ok(vec![(Metric::WallSeconds, factor * order.borrow().len() as f64)])
                }),
            }
        };
        let rounds = Rounds { measured: 3, warm_up: 1 };
        let rows = [Row::of("t", [0, 1])];
        let compared = compare(rounds, vec![side("a", 1.0), side("b", 10.0)], &rows);
        let c = compared[0].as_ref().expect("runs");
        assert_eq!(*order.borrow(), "abbaabba");
        assert_eq!(c.metrics, [(Metric::WallSeconds, [vec![4.0, 5.0, 8.0], vec![30.0, 60.0, 70.0]])]);
        let lines = c.json_lines();
        assert_eq!((&lines[0]["rounds"], &lines[0]["a"]["median"]), (&json!(3), &json!(5.0)));
        order.borrow_mut().clear();
        let sides = vec![side("a", 1.0), side("b", 10.0), side("c", 100.0)];
        let rows = [Row::of("t", [0, 1]), Row::of("t", [2, 0])];
        let compared = compare(Rounds { measured: 2, warm_up: 0 }, sides, &rows);
        assert_eq!(*order.borrow(), "abccba");
        let figures: Vec<_> = compared.iter().map(|c| &c.as_ref().expect("ran").metrics[..]).collect();
        assert_eq!(figures[0], [(Metric::WallSeconds, [vec![1.0, 6.0], vec![20.0, 50.0]])]);
        assert_eq!(figures[1], [(Metric::WallSeconds, [vec![300.0, 400.0], vec![1.0, 6.0]])]);
    }

    #[test]
    fn a_side_that_fails_does_not_take_the_others_with_it() {
        let side = |label: &str, fails: bool| Side {
            label: label.to_owned(),
            run: Box::new(move || {
                if fails { Err("broken".to_owned()) } else { Ok(vec![(Metric::WallSeconds, 1.0)]) }
            }),
        };
        let sides = vec![side("a", false), side("b", true), side("c", false)];
        let rows = [Row::of("t", [0, 1]), Row::of("t", [0, 2])];
        let compared = compare(Rounds { measured: 3, warm_up: 0 }, sides, &rows);
        let failed = compared[0].as_ref().err().map(|failed| (failed.label.as_str(), failed.why.as_str()));
        assert_eq!(failed, Some(("b", "broken")));
        assert_eq!(compared[1].as_ref().expect("ran").metrics[0].1, [vec![1.0; 3], vec![1.0; 3]]);
    }

    #[test]
    fn commands_are_split_at_vs() {
        let words = |s: &str| s.split(' ').map(String::from).collect::<Vec<_>>();
        assert_eq!(split(&words("a -x --vs b")).expect("fine"), (&words("a -x")[..], &words("b")[..]));
        assert!(split(&words("a b")).is_err() && split(&words("--vs b")).is_err());
    }
}
