//! The report of a run, as JSON and as Markdown.

use super::job::{Done, Job};
use super::programs::Kind;
use crate::run_log::Origin;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;
use zebu_bench::Outcome;
use zebu_bench::table::{Table, grouped};

/// Everything that is known of a run.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Report {
    #[serde(flatten)]
    pub(super) origin: Origin,
    pub(super) seed: u64,
    pub(super) lanes: usize,
    pub(super) seconds: u64,
    pub(super) totals: BTreeMap<String, u64>,
    /// By name of the job.
    pub(super) jobs: BTreeMap<String, BTreeMap<String, u64>>,
    /// Steps of a commit, by operations and failures.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) coverage: Option<Value>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) failures: Vec<String>,
}

/// The numbers that a report is about: key, and what it is.
pub(super) const SAID: [(&str, &str); 9] = [
    ("seeds", "seeds"),
    ("requests", "requests of simulated guests"),
    ("operations", "operations of simulated disks"),
    ("failures", "of these made to fail"),
    ("moments", "moments at which every crash state was judged at once"),
    ("crash_states", "crash states opened, checked and read one by one"),
    ("mutants", "deliberate faults caught"),
    ("inputs", "fuzz inputs"),
    ("differential", "operations compared with QEMU"),
];

impl Report {
    pub(super) fn new(origin: Origin, seed: u64, lanes: usize) -> Self {
        Self {
            origin,
            seed,
            lanes,
            seconds: 0,
            totals: BTreeMap::new(),
            jobs: BTreeMap::new(),
            coverage: None,
            failures: Vec::new(),
        }
    }

    pub(super) fn add(&mut self, job: &Job, done: Done) {
        let of_job = self.jobs.entry(job.name.to_owned()).or_default();
        for (name, number) in &done.counts {
            *of_job.entry(name.clone()).or_default() += number;
            let total = match (job.kind, name.as_str()) {
                (Kind::Differential, "requests") => "differential",
                (Kind::Faults, "tests") => "mutants",
                (_, "milliseconds" | "pieces") => continue,
                (_, name) => name,
            };
            *self.totals.entry(total.to_owned()).or_default() += number;
        }
        if done.coverage.is_some() {
            self.coverage = done.coverage;
        }
        if let Some(said) = done.failure {
            eprintln!("\n== {} failed\n{said}\n", job.name);
            self.failures.push(format!("{}: {said}", job.name));
        }
    }

    pub(super) fn finish(&mut self, time: Duration) {
        self.seconds = time.as_secs();
    }

    pub(super) fn write(&self, dir: &Path) -> Outcome {
        let put = |name: &str, text: String| {
            let path = dir.join(name);
            std::fs::write(&path, text).map_err(|e| format!("{}: {e}", path.display()))
        };
        let json = serde_json::to_string_pretty(self).map_err(|e| e.to_string())?;
        put("report.json", json + "\n")?;
        put("report.md", self.markdown())
    }

    pub(super) fn verdict(&self) -> Outcome {
        if self.failures.is_empty() {
            Ok(())
        } else {
            Err(format!("{} pieces failed; above is how to repeat each", self.failures.len()))
        }
    }

    pub(super) fn markdown(&self) -> String {
        let mut text = format!(
            "# Torture report\n\n{}, commit {}, seed {}, {} lanes, {} s. Failures: {}.\n\n{}\n",
            self.origin.date,
            self.origin.commit,
            self.seed,
            self.lanes,
            self.seconds,
            self.failures.len(),
            totals(&self.totals)
        );
        let mut table =
            Table::new(["job", "pieces", "seconds", "seeds", "requests", "crash states", "other"]);
        for (name, counts) in &self.jobs {
            let of = |key: &str| counts.get(key).copied().unwrap_or(0);
            let other = ["moments", "tests", "inputs"].map(of).iter().sum::<u64>();
            let row = [
                of("pieces"),
                of("milliseconds") / 1000,
                of("seeds"),
                of("requests"),
                of("crash_states"),
                other,
            ];
            table.row(std::iter::once(name.clone()).chain(row.map(grouped)));
        }
        text += &format!("```\n{}```\n", table.render());
        if let Some(coverage) = &self.coverage {
            text += &format!("\n## Steps of a commit\n\n{}", coverage_table(coverage));
        }
        for failure in &self.failures {
            text += &format!("\n## Failed\n\n```\n{failure}\n```\n");
        }
        text
    }
}

/// The numbers as a table in Markdown.
pub(super) fn totals(totals: &BTreeMap<String, u64>) -> String {
    let mut text = "| | |\n|---|---:|\n".to_owned();
    for (key, what) in SAID {
        text += &format!("| {what} | {} |\n", grouped(totals.get(key).copied().unwrap_or(0)));
    }
    text
}

/// Rows of steps and failures, columns of operations, as the test wrote them.
pub(super) fn coverage_table(coverage: &Value) -> String {
    let words = |value: &Value| -> Vec<String> {
        value.as_array().into_iter().flatten().map(|v| v.as_str().unwrap_or_default().to_owned()).collect()
    };
    let columns = words(&coverage["columns"]);
    let mut text = format!("| {} |\n|{}\n", columns.join(" | "), "---|".repeat(columns.len()));
    for row in coverage["rows"].as_array().into_iter().flatten() {
        text += &format!("| {} |\n", words(row).join(" | "));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_coverage_table_has_a_line_for_each_row() {
        let made = serde_json::json!({"columns": ["step", "write"], "rows": [["barrier", "8"]]});
        assert_eq!(coverage_table(&made), "| step | write |\n|---|---|\n| barrier | 8 |\n");
    }
}
