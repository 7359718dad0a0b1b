//! Keeping the counts of runs: one line for each in `docs/trust/runs.jsonl`, their sums in `docs/trust.md`.

use super::report::{Report, coverage_table, totals};
use crate::Outcome;
use crate::kept::{Kept, Origin, by_origin};
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

/// What some runs add up to. What every run repeats counts once.
fn added<'a>(runs: impl IntoIterator<Item = &'a Report>) -> BTreeMap<String, u64> {
    let mut sums = BTreeMap::<String, u64>::new();
    for (name, number) in runs.into_iter().flat_map(|run| &run.totals) {
        let sum = sums.entry(name.clone()).or_default();
        *sum = if name == "mutants" || name == "tests" { (*sum).max(*number) } else { *sum + number };
    }
    sums
}

/// All runs together, each commit by itself, and the last table of the steps of a commit.
fn sums(runs: &[Report]) -> String {
    let mut text = format!("All runs together:\n\n{}\n", totals(&added(runs)));
    text += "By the commit that was tested (seconds: of lanes, at most one processor each):\n\n";
    text += "| date | commit | runs | seconds | seeds | requests | moments | crash states | fuzz inputs | failures |\n";
    text += "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|\n";
    for (Origin { date, commit }, runs) in by_origin(runs, |run| &run.origin) {
        let totals = added(runs.iter().copied());
        let of = |name: &str| grouped(totals.get(name).copied().unwrap_or(0));
        text += &format!(
            "| {date} | {commit} | {} | {} | {} | {} | {} | {} | {} | {} |\n",
            runs.len(),
            grouped(runs.iter().map(|run| run.seconds * run.lanes as u64).sum()),
            of("seeds"),
            of("requests"),
            of("moments"),
            of("crash_states"),
            of("inputs"),
            runs.iter().map(|run| run.failures.len()).sum::<usize>(),
        );
    }
    if let Some(run) = runs.iter().rev().find(|run| run.coverage.is_some()) {
        let table = run.coverage.as_ref().map(coverage_table).unwrap_or_default();
        text += &format!("\nSteps of a commit, by {} of {}:\n\n{table}", run.origin.commit, run.origin.date);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_says_what_was_run() {
        assert!(
            KEPT.is_up_to_date(sums),
            "{}: what is between the markers is not of {}",
            KEPT.page,
            KEPT.runs
        );
    }

    #[test]
    fn runs_of_one_commit_are_added_up() {
        let mut run = Report::new(Origin { date: "2026-01-01".into(), commit: "abc".into() }, 1, 2);
        run.seconds = 10;
        run.totals = [("seeds".to_owned(), 1500), ("mutants".to_owned(), 45)].into();
        let text = sums(&[run.clone(), run]);
        assert!(text.contains("| 2026-01-01 | abc | 2 | 40 | 3,000 |"), "{text}");
        assert!(text.contains("| deliberate faults caught | 45 |"), "{text}");
    }
}
