//! The report of a run, in one line.

use super::history::Counts;
use super::judge::Verdict;
use std::fmt;
use std::time::{Duration, Instant};

/// The sums of a run.
#[derive(Debug)]
pub struct Report {
    first: u64,
    last: u64,
    runs: u64,
    counts: Counts,
    crashes: u64,
    failed: Vec<u64>,
    started: Instant,
}

impl Report {
    /// That of a run which begins with this seed.
    pub fn new(first: u64) -> Self {
        let counts = Counts::default();
        Self { first, last: first, runs: 0, counts, crashes: 0, failed: Vec::new(), started: Instant::now() }
    }

    /// Adds what became of a seed.
    pub fn add(&mut self, seed: u64, verdict: &Verdict) {
        self.last = seed;
        self.runs += 1;
        self.counts += verdict.counts;
        self.crashes += verdict.crashes;
        if !verdict.violations.is_empty() {
            self.failed.push(seed);
        }
    }

    /// The sums, for a program.
    pub fn to_json(&self) -> String {
        let Counts { requests, flushes, looks } = self.counts;
        serde_json::json!({
            "cases": self.runs, "requests": requests, "flushes": flushes, "sectors": looks,
            "crashes": self.crashes, "violations": self.failed.len(),
        })
        .to_string()
    }

    /// Whether nothing was wrong.
    pub fn is_clean(&self) -> bool {
        self.failed.is_empty()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { first, last, runs, counts, crashes, failed, started } = self;
        let Counts { requests, flushes, looks } = counts;
        write!(
            f,
            "threads: {runs} runs of seeds {first} to {last}, {requests} requests, {flushes} flushes, "
        )?;
        write!(f, "{looks} sectors seen, {crashes} crashes judged, {} violations", failed.len())?;
        if !failed.is_empty() {
            write!(f, " (seeds {failed:?})")?;
        }
        let seconds = |time: Duration| time.as_secs_f64();
        write!(f, ", {:.0} s, {:.0} s of CPU time", seconds(started.elapsed()), seconds(cpu_time()))
    }
}

/// CPU time of this process and of its children that have ended: fields 14 to 17 of proc_pid_stat(5).
fn cpu_time() -> Duration {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = text.rsplit(')').next().unwrap_or_default().split_whitespace();
    let ticks: u64 = fields.skip(11).take(4).filter_map(|field| field.parse::<u64>().ok()).sum();
    let per_second = rustix::param::clock_ticks_per_second();
    Duration::from_secs_f64(ticks as f64 / per_second as f64)
}
