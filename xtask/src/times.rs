//! The times of a run of all checks: of each step, and of the slowest tests.

use crate::nextest::{self, Timed};
use crate::run_log::{Kept, Origin};
use serde::{Deserialize, Serialize};
use std::time::Duration;
use zebu_bench::Outcome;
use zebu_bench::table::Table;

/// Tests that are shown.
const SLOWEST: usize = 20;

const KEPT: Kept = Kept {
    runs: "docs/records/times.jsonl",
    page: "CONTRIBUTING.md",
    begin: "<!-- times: written by `cargo xtask test --record-times` -->",
    end: "<!-- end of times -->",
};

/// A step that was run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct StepTime {
    name: String,
    seconds: f64,
    said: String,
}

impl StepTime {
    pub(crate) fn new(name: &str, took: Duration, said: &str) -> Self {
        Self { name: name.to_owned(), seconds: took.as_secs_f64(), said: said.to_owned() }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }
}

/// A kept run.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Run {
    #[serde(flatten)]
    origin: Origin,
    processors: usize,
    steps: Vec<StepTime>,
    /// Names and seconds.
    slowest: Vec<(String, f64)>,
}

/// Prints both tables.
pub(crate) fn print(steps: &[StepTime]) {
    let mut table = Table::new(["step", "minutes", ""]);
    for StepTime { name, seconds, said } in steps {
        table.row([name.clone(), minutes(*seconds), said.clone()]);
    }
    println!("\n{}", table.render());
    // What there is may be of an earlier run.
    let has_tests = steps.iter().any(|step| step.name.starts_with("tests"));
    let Some(slowest) = has_tests.then(|| nextest::slowest(SLOWEST).ok()).flatten() else { return };
    let mut table = Table::new(["slowest tests", "seconds"]);
    for Timed { name, seconds } in slowest {
        table.row([name, format!("{seconds:.1}")]);
    }
    println!("{}", table.render());
}

/// Writes both tables into `CONTRIBUTING.md`, and keeps the figures.
pub(crate) fn record(steps: &[StepTime]) -> Outcome {
    let slowest = nextest::slowest(SLOWEST)?.into_iter().map(|test| (test.name, test.seconds)).collect();
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let run = Run { origin: Origin::now()?, processors, steps: steps.to_vec(), slowest };
    KEPT.add(&run, last)
}

/// The tables of the last run.
fn last(runs: &[Run]) -> String {
    let Some(Run { origin, processors, steps, slowest }) = runs.last() else { return String::new() };
    let mut text = format!(
        "Commit {}, {}, {processors} processors.\n\n| step | minutes |\n|---|---:|\n",
        origin.commit, origin.date
    );
    for StepTime { name, seconds, .. } in steps {
        text += &format!("| {name} | {} |\n", minutes(*seconds));
    }
    text += "\n| slowest tests | seconds |\n|---|---:|\n";
    for (name, seconds) in slowest {
        text += &format!("| `{name}` | {seconds:.0} |\n");
    }
    text
}

fn minutes(seconds: f64) -> String {
    format!("{:.1}", seconds / 60.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_says_what_was_recorded() {
        KEPT.assert_up_to_date(last);
    }

    #[test]
    fn a_step_has_a_row() {
        let run = Run {
            origin: Origin { date: "2026-01-01".into(), commit: "a".into() },
            processors: 2,
            steps: vec![StepTime::new("lints", Duration::from_secs(90), "ok")],
            slowest: vec![("zebu::check clean::matrix".into(), 84.4)],
        };
        let text = last(&[run]);
        assert!(
            text.contains("| lints | 1.5 |\n") && text.contains("| `zebu::check clean::matrix` | 84 |"),
            "{text}"
        );
    }
}
