//! The background jobs of a server, of all kinds (docs/design/jobs.md).

use super::backups::Backups;
use super::checkpoints::Checkpoints;
use super::hydrations::Hydrations;
use serde_json::{Value, json};
use zebu_disks::printable;
use zebu_engine::storage::Worker;
use zebu_export::{Export, Exports};

/// The kinds of jobs, and all jobs of each.
#[derive(Clone, Copy)]
pub(crate) struct Jobs<'a> {
    pub(crate) backups: &'a Backups,
    pub(crate) hydrations: &'a Hydrations,
    pub(crate) checkpoints: &'a Checkpoints,
    pub(crate) exports: &'a Exports,
}

impl Jobs<'_> {
    /// All jobs that are remembered, those of one kind in the order in which they began.
    pub(crate) fn list(self) -> Value {
        let backups = self.backups.list().into_iter().map(|job| of_kind("backup", job));
        let hydrations = self.hydrations.list().into_iter().map(|job| of_kind("hydration", job));
        json!({ "jobs": backups.chain(hydrations).collect::<Vec<_>>() })
    }

    /// The kinds of the jobs of an export that run.
    pub(crate) fn running(self, export: &Export) -> Vec<&'static str> {
        let is_running = |told: Result<Value, String>| told.is_ok_and(|told| told["status"] == "running");
        let mut running = Vec::new();
        if is_running(self.backups.query(export, None)) {
            running.push("backup");
        }
        if is_running(self.hydrations.query(export)) {
            running.push("hydration");
        }
        if !self.checkpoints.of(export).is_empty() {
            running.push("checkpoint");
        }
        running
    }

    /// Ends the job of an export that runs, and waits until nothing of it goes on.
    pub(crate) async fn cancel(self, worker: &Worker, export: &Export) -> Result<Value, String> {
        let name = export.name();
        let (kind, ended) = match self.running(export)[..] {
            [] => {
                return Err(format!(
                    "no job of the export '{name}' is running (zebu ctl SOCKET jobs lists all)"
                ));
            }
            ["backup"] => ("backup", self.backups.cancel(worker, export, None).await?),
            ["hydration"] => ("hydration", self.hydrations.cancel(worker, export).await?),
            ["checkpoint"] => {
                let names = self.checkpoints.of(export).join("', '");
                return Err(format!("a checkpoint ends for all of its disks: checkpoint-end ('{names}')"));
            }
            ref several => {
                return Err(format!(
                    "several jobs of the export '{name}' are running ({}): say which (backup-cancel, hydrate-cancel, \
                     checkpoint-end)",
                    several.join(", ")
                ));
            }
        };
        Ok(of_kind(kind, (name.to_owned(), ended)))
    }

    /// Forgets the jobs of an export that is gone.
    pub(crate) fn forget(self, export: &str) {
        self.hydrations.forget(export);
    }

    /// Ends all jobs of an export.
    pub(crate) async fn cancel_all(self, worker: &Worker, export: &Export) {
        for kind in self.running(export) {
            // One that has ended meanwhile needs nothing.
            let _ = match kind {
                "backup" => self.backups.cancel(worker, export, None).await,
                "hydration" => self.hydrations.cancel(worker, export).await,
                _ => self.checkpoints.end_of(self.exports, export).await,
            };
        }
    }
}

fn of_kind(kind: &str, (export, mut job): (String, Value)) -> Value {
    job["kind"] = kind.into();
    job["export"] = export.into();
    job
}

/// A line for each job, of what [`Jobs::list`] tells.
pub(crate) fn lines(told: &Value) -> String {
    let jobs = told["jobs"].as_array().map(Vec::as_slice).unwrap_or_default();
    if jobs.is_empty() {
        return "no jobs\n".to_owned();
    }
    let text = |value: &Value| printable(value.as_str().unwrap_or_default()).into_owned();
    let line = |job: &Value| {
        let number = |key: &str| job[key].as_u64().unwrap_or_default();
        let done = u128::from(number("done")) * 100;
        let percent = done.checked_div(number("total").into()).unwrap_or(100);
        let error = job["error"].as_str().map(|error| format!(": {}", printable(error))).unwrap_or_default();
        format!(
            "{:<10} {:<10} {:>3} %  '{}'{error}\n",
            text(&job["kind"]),
            text(&job["status"]),
            percent.min(100),
            text(&job["export"])
        )
    };
    jobs.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_are_lines() {
        let told = json!({ "jobs": [
            { "kind": "backup", "export": "root", "status": "running", "done": 1u64 << 62, "total": 1u64 << 63 },
            { "kind": "hydration", "export": "a\nb", "status": "failed", "done": 0, "total": 0, "error": "no space" },
        ]});
        let lines = lines(&told);
        assert_eq!(lines.lines().count(), 2, "{lines}");
        assert!(lines.contains("backup     running") && lines.contains(": no space"), "{lines}");
        assert_eq!(super::lines(&json!({ "jobs": [] })), "no jobs\n");
    }
}
