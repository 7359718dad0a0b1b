//! A server at one moment, as its control socket reports it.

use serde_json::Value;
use std::time::Instant;

/// The counters of requests of one kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Counter {
    pub(crate) requests: u64,
    pub(crate) bytes: u64,
    /// Time that all of them took.
    pub(crate) nanoseconds: u64,
}

/// Work on a disk in the background.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Job {
    pub(crate) kind: &'static str,
    /// Bytes that are done, and in all.
    pub(crate) done: u64,
    pub(crate) total: u64,
}

impl Job {
    /// The part that is done, from 0 to 100.
    pub(crate) fn percent(&self) -> u64 {
        let done = u128::from(self.done.min(self.total)) * 100;
        done.checked_div(u128::from(self.total)).unwrap_or(0) as u64
    }
}

/// An export at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Export {
    pub(crate) name: String,
    pub(crate) file: String,
    pub(crate) size: u64,
    pub(crate) is_read_only: bool,
    pub(crate) clients: u64,
    pub(crate) in_flight: u64,
    /// Things that requests wait for, longer than they should.
    pub(crate) waits: Vec<String>,
    pub(crate) reads: Counter,
    pub(crate) writes: Counter,
    pub(crate) cache_hits: u64,
    pub(crate) cache_misses: u64,
    pub(crate) jobs: Vec<Job>,
}

/// A server at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Sample {
    pub(crate) at: Instant,
    /// Its exports; or why it could not be asked.
    pub(crate) found: Result<Vec<Export>, String>,
}

/// Exports in the answer to `stats`.
pub(crate) fn exports(stats: &Value) -> Vec<Export> {
    stats["exports"].as_array().map(Vec::as_slice).unwrap_or_default().iter().map(export).collect()
}

fn export(stats: &Value) -> Export {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let number = |value: &Value| value.as_u64().unwrap_or_default();
    let waits = stats["waits"].as_array().map(Vec::as_slice).unwrap_or_default();
    Export {
        name: text(&stats["name"]),
        file: text(&stats["filename"]),
        size: number(&stats["virtual-size"]),
        is_read_only: stats["read-only"] == true,
        clients: number(&stats["clients"]),
        in_flight: number(&stats["in-flight"]),
        waits: waits.iter().map(|wait| text(&wait["for"])).collect(),
        reads: counter(&stats["requests"]["read"]),
        writes: counter(&stats["requests"]["write"]),
        cache_hits: number(&stats["image"]["cache-hits"]),
        cache_misses: number(&stats["image"]["cache-misses"]),
        jobs: Vec::new(),
    }
}

fn counter(kind: &Value) -> Counter {
    let number = |key: &str| kind[key].as_u64().unwrap_or_default();
    let requests = number("requests");
    Counter {
        requests,
        bytes: number("bytes"),
        nanoseconds: number("latency-mean-ns").saturating_mul(requests),
    }
}

/// A job in the answer to a query, while it goes on.
pub(crate) fn job(kind: &'static str, state: &Value) -> Option<Job> {
    let number = |key: &str| state[key].as_u64().unwrap_or_default();
    (state["status"] == "running").then(|| Job { kind, done: number("done"), total: number("total") })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_answer_is_understood_whatever_it_leaves_out() {
        let stats = json!({ "exports": [
            { "name": "a", "filename": "a.qcow2", "virtual-size": 4096, "read-only": true, "clients": 2, "in-flight": 3,
              "waits": [{ "for": "a write" }],
              "requests": { "read": { "requests": 10, "bytes": 40960, "latency-mean-ns": 500 } },
              "image": { "cache-hits": 9, "cache-misses": 1 } },
            {},
        ] });
        let found = exports(&stats);
        assert_eq!(found.len(), 2);
        assert_eq!(found[0].reads, Counter { requests: 10, bytes: 40960, nanoseconds: 5000 });
        assert_eq!((found[0].cache_hits, found[0].clients, found[0].is_read_only), (9, 2, true));
        assert_eq!(found[0].waits, ["a write"]);
        assert_eq!(found[1], Export::default());
        assert!(exports(&Value::Null).is_empty());
    }

    #[test]
    fn only_jobs_that_go_on_are_shown() {
        let running = json!({ "status": "running", "done": 1, "total": 4 });
        assert_eq!(job("backup", &running).unwrap().percent(), 25);
        assert_eq!(job("backup", &json!({ "status": "completed", "done": 4, "total": 4 })), None);
        assert_eq!(Job { kind: "backup", done: 5, total: 0 }.percent(), 0);
    }
}
