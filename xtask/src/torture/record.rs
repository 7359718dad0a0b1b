//! Keeping the counts of runs: one line for each in `docs/trust/runs.jsonl`, their sums in `docs/trust.md`.

use super::report::{Report, coverage_table, totals};
use crate::Outcome;
use crate::kept::Kept;
use crate::table::grouped;
use std::collections::BTreeMap;

const KEPT: Kept = Kept {
    runs: "docs/trust/runs.jsonl",
    page: "docs/trust.md",
    begin: "<!-- counts: written by `cargo xtask torture --record` -->",
    end: "<!-- end of counts -->",
};

/// Adds a run, and writes the sums anew.
pub(super) fn add(report: &Report) -> Outcome {
    KEPT.add(report, sums)
}

/// The runs of one commit on one day.
#[derive(Default)]
struct OfCommit {
    date: String,
    commit: String,
    runs: u64,
    /// Of all lanes.
    seconds: u64,
    failures: u64,
    totals: BTreeMap<String, u64>,
}

/// All runs together, each commit by itself, and the last table of the steps of a commit.
fn sums(runs: &[Report]) -> String {
    let mut all: BTreeMap<String, u64> = BTreeMap::new();
    let mut commits: Vec<OfCommit> = Vec::new();
    for run in runs {
        let known = commits.iter().position(|c| c.date == run.date && c.commit == run.commit);
        let at = known.unwrap_or_else(|| {
            let (date, commit) = (run.date.clone(), run.commit.clone());
            commits.push(OfCommit { date, commit, ..OfCommit::default() });
            commits.len() - 1
        });
        let of_commit = &mut commits[at];
        of_commit.runs += 1;
        of_commit.seconds += run.seconds * run.lanes as u64;
        of_commit.failures += run.failures.len() as u64;
        for (name, number) in &run.totals {
            for sum in [&mut all, &mut of_commit.totals] {
                let known = sum.entry(name.clone()).or_default();
                // What every run repeats counts once.
                *known = if name == "mutants" || name == "tests" {
                    (*known).max(*number)
                } else {
                    *known + number
                };
            }
        }
    }
    let mut text = format!("All runs together:\n\n{}\n", totals(&all));
    text += "By the commit that was tested (seconds: of lanes, at most one processor each):\n\n";
    text += "| date | commit | runs | seconds | seeds | requests | moments | crash states | fuzz inputs | failures |\n";
    text += "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|\n";
    for OfCommit { date, commit, runs: count, seconds, failures, totals } in &commits {
        let of = |name: &str| grouped(totals.get(name).copied().unwrap_or(0));
        text += &format!(
            "| {date} | {commit} | {count} | {} | {} | {} | {} | {} | {} | {failures} |\n",
            grouped(*seconds),
            of("seeds"),
            of("requests"),
            of("moments"),
            of("crash_states"),
            of("inputs")
        );
    }
    if let Some(run) = runs.iter().rev().find(|run| run.coverage.is_some()) {
        let table = run.coverage.as_ref().map(coverage_table).unwrap_or_default();
        text += &format!("\nSteps of a commit, by {} of {}:\n\n{table}", run.commit, run.date);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_one_commit_are_added_up() {
        let mut run = Report::new(1, 2);
        (run.date, run.commit, run.seconds) = ("2026-01-01".into(), "abc".into(), 10);
        run.totals = [("seeds".to_owned(), 1500), ("mutants".to_owned(), 45)].into();
        let text = sums(&[run.clone(), run]);
        assert!(text.contains("| 2026-01-01 | abc | 2 | 40 | 3,000 |"), "{text}");
        assert!(text.contains("| deliberate faults caught | 45 |"), "{text}");
    }
}
