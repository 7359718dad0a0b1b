//! Counts of what was executed, for `cargo xtask interleave --record`.

use crate::schedules::beside::{self, Beside};
use crate::schedules::explore::executions;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// Counts of one test. They are written where `ZEBU_COVERAGE` says, whatever failed.
pub(crate) struct Report {
    pairs: usize,
    executions: Arc<AtomicU64>,
    failed: AtomicU64,
    beside: Mutex<Beside>,
    start: Instant,
}

impl Report {
    pub(crate) fn of_pairs(pairs: usize) -> Self {
        Self {
            pairs,
            executions: Arc::default(),
            failed: AtomicU64::new(0),
            beside: Mutex::default(),
            start: Instant::now(),
        }
    }

    /// That of named scenarios.
    pub(crate) fn of_scenarios() -> Self {
        Self::of_pairs(0)
    }

    /// Where an execution is counted when it begins.
    pub(crate) fn counter(&self) -> Arc<AtomicU64> {
        self.executions.clone()
    }

    /// Adds what was seen on this thread at the steps of commits.
    pub(crate) fn note_steps(&self) {
        beside::add(&mut self.beside.lock().unwrap(), beside::take());
    }

    pub(crate) fn fail(&self) {
        self.failed.fetch_add(1, Ordering::Relaxed);
    }

    /// Writes `NAME.json`, and panics if anything has failed.
    pub(crate) fn finish(self, name: &str) {
        let (sum, failed) = (self.executions.load(Ordering::Relaxed), self.failed.load(Ordering::Relaxed));
        let of_each = if self.pairs > 0 { executions() } else { 0 };
        eprintln!(
            "{name}: {sum} executions, {failed} failed, in {:.0} s",
            self.start.elapsed().as_secs_f64()
        );
        if let Some(dir) = std::env::var_os("ZEBU_COVERAGE") {
            let pairs = self.pairs;
            // Names and numbers only: as Rust shows them, so JSON has them.
            let beside = format!("{:?}", self.beside.lock().unwrap());
            let text = format!(
                r#"{{"pairs":{pairs},"of_each":{of_each},"executions":{sum},"failed":{failed},"beside":{beside}}}"#
            );
            std::fs::write(Path::new(&dir).join(format!("{name}.json")), text).unwrap();
        }
        assert_eq!(failed, 0, "of {name}");
    }
}
