//! Keeping the counts of runs: one line for each in `docs/records/torture.jsonl`, their sums in `docs/records.md`.

use super::report::{Report, totals};
use crate::run_log::{Kept, Origin, by_origin};
use serde_json::Value;
use std::collections::BTreeMap;
use zebu_bench::Outcome;
use zebu_bench::table::grouped;

const KEPT: Kept = Kept {
    runs: "docs/records/torture.jsonl",
    page: "docs/records.md",
    begin: "<!-- torture: written by `cargo xtask torture --record` -->",
    end: "<!-- end of torture -->",
};

/// Adds a run, and writes the sums anew.
pub(super) fn add(report: &Report) -> Outcome {
    KEPT.add(report, sums)
}

/// The sums of some runs. What every run repeats counts once.
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
        let table = run.coverage.as_ref().map(in_brief).unwrap_or_default();
        text += &format!(
            "\nSteps of a commit, by {} of {}: how often each operation beside the step met the failure, from the \
             fewest to the most:\n\n{table}",
            run.origin.commit, run.origin.date
        );
    }
    text
}

/// The table of steps and failures with a row for each step, and the span of all operations in each cell.
fn in_brief(coverage: &Value) -> String {
    let rows = coverage["rows"].as_array().map_or(&[][..], Vec::as_slice);
    let mut failures = Vec::<&Value>::new();
    for row in rows {
        if !failures.contains(&&row[1]) {
            failures.push(&row[1]);
        }
    }
    let names: Vec<&str> = failures.iter().map(|failure| failure.as_str().unwrap_or_default()).collect();
    let mut text = format!("| step | {} |\n|---|{}\n", names.join(" | "), "---:|".repeat(names.len()));
    for step in rows.chunk_by(|a, b| a[0] == b[0]) {
        let cells = failures.iter().map(|failure| step.iter().find(|row| row[1] == **failure).map(span));
        let cells: Vec<String> = cells.map(Option::unwrap_or_default).collect();
        text += &format!("| {} | {} |\n", step[0][0].as_str().unwrap_or_default(), cells.join(" | "));
    }
    text
}

/// The least and the most of the numbers of a row; a dash where there is none.
fn span(row: &Value) -> String {
    let cells = row.as_array().into_iter().flatten().skip(2);
    let numbers: Vec<u64> = cells.filter_map(|cell| cell.as_str()?.parse().ok()).collect();
    match (numbers.iter().min(), numbers.iter().max()) {
        (Some(least), Some(most)) if least < most => format!("{least} to {most}"),
        (Some(least), _) => least.to_string(),
        _ => "–".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_says_what_was_run() {
        KEPT.assert_up_to_date(sums);
    }

    #[test]
    fn a_table_of_steps_in_brief_has_a_row_for_each_step() {
        let made = serde_json::json!({"columns": ["step", "failure", "write", "read"], "rows": [
            ["Links", "EIO", "8", "4"], ["Links", "late", "–", "–"], ["Punch", "EIO", "4", "–"],
        ]});
        assert_eq!(
            in_brief(&made),
            "| step | EIO | late |\n|---|---:|---:|\n| Links | 4 to 8 | – |\n| Punch | 4 |  |\n"
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
