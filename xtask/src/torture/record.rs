//! Keeping the counts of runs: one line for each in `docs/trust/runs.jsonl`, their sums in `docs/trust.md`.

use super::report::{Report, coverage_table, grouped, totals};
use crate::{Outcome, root};
use std::collections::BTreeMap;
use std::io::Write;

const RUNS: &str = "docs/trust/runs.jsonl";
const PAGE: &str = "docs/trust.md";
const BEGIN: &str = "<!-- counts: written by `cargo xtask torture --record` -->";
const END: &str = "<!-- end of counts -->";

/// Adds a run, and writes the sums anew.
pub(super) fn add(report: &Report) -> Outcome {
    let path = root().join(RUNS);
    let said = |e: std::io::Error| format!("{}: {e}", path.display());
    let line = serde_json::to_string(report).map_err(|e| e.to_string())?;
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).map_err(said)?;
    }
    let mut file = std::fs::OpenOptions::new().append(true).create(true).open(&path).map_err(said)?;
    writeln!(file, "{line}").map_err(said)?;
    let text = std::fs::read_to_string(&path).map_err(said)?;
    let runs = text
        .lines()
        .filter(|line| !line.trim().is_empty())
        .map(|line| serde_json::from_str(line).map_err(|e| format!("{RUNS}: {e}")))
        .collect::<Outcome<Vec<Report>>>()?;
    let page = root().join(PAGE);
    let said = |e: std::io::Error| format!("{}: {e}", page.display());
    let old = std::fs::read_to_string(&page).map_err(said)?;
    let new = between_markers(&old, &sums(&runs))?;
    std::fs::write(&page, new).map_err(said)?;
    println!("added to {RUNS} and {PAGE}");
    Ok(())
}

fn between_markers(page: &str, text: &str) -> Outcome<String> {
    let missing = || format!("{PAGE} has no place for the counts, between {BEGIN:?} and {END:?}");
    let (before, rest) = page.split_once(BEGIN).ok_or_else(missing)?;
    let (_, after) = rest.split_once(END).ok_or_else(missing)?;
    Ok(format!("{before}{BEGIN}\n\n{text}\n{END}{after}"))
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
    fn only_what_is_between_the_markers_changes() {
        let page = format!("a\n{BEGIN}\nold\n{END}\nb\n");
        let new = between_markers(&page, "new\n").unwrap();
        assert_eq!(new, format!("a\n{BEGIN}\n\nnew\n\n{END}\nb\n"));
        assert!(between_markers("nothing", "new").is_err());
    }

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
