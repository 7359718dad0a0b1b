//! Counters in Prometheus' text format (version 0.0.4).

use crate::exports::Exports;
use crate::memory_budget::MemoryBudget;
use crate::metrics::{LATENCY_BUCKETS, RequestKind};
use crate::throttle::{LimitGroup, Limits};
use std::fmt::Write as _;

/// All counters of all exports, and of the memory of NBD clients.
pub fn prometheus(exports: &Exports, memory: &MemoryBudget) -> String {
    let mut text = Text(String::new());
    text.family("zebu_requests_total", "counter", "Requests of clients that ended.");
    text.kinds(exports, "zebu_requests_total", |totals| totals.requests);
    text.family(
        "zebu_request_bytes_total",
        "counter",
        "Bytes of the disk that successful requests were about.",
    );
    text.kinds(exports, "zebu_request_bytes_total", |totals| totals.bytes);
    text.family("zebu_request_errors_total", "counter", "Requests that failed or were refused.");
    text.kinds(exports, "zebu_request_errors_total", |totals| totals.errors);
    text.latencies(exports);
    text.family("zebu_requests_in_flight", "gauge", "Requests under way.");
    text.gauges(exports, "zebu_requests_in_flight", |export| export.metrics().in_flight());
    text.family(
        "zebu_longest_wait_seconds",
        "gauge",
        "Longest wait for a file, if it has taken ten seconds.",
    );
    text.gauges(exports, "zebu_longest_wait_seconds", |export| {
        let waits = export.image().long_waits();
        waits.iter().map(|wait| wait.took.as_secs()).max().unwrap_or(0)
    });
    text.family("zebu_clients", "gauge", "NBD connections and running vhost-user rings.");
    text.gauges(exports, "zebu_clients", |export| export.metrics().clients());
    text.limits(exports);
    text.family("zebu_disk_bytes", "gauge", "Size of the virtual disk.");
    text.gauges(exports, "zebu_disk_bytes", |export| export.image().virtual_size());
    text.image(exports);
    let of_memory: [(&str, &str, u64); 3] = [
        ("zebu_memory_bytes", "Memory of clients and of their requests.", memory.used()),
        ("zebu_memory_limit_bytes", "What they may take.", memory.limit()),
        ("zebu_memory_waiting", "Clients that wait for memory.", memory.waiting() as u64),
    ];
    for (name, help, value) in of_memory {
        text.family(name, "gauge", help);
        let _ = writeln!(text.0, "{name} {value}");
    }
    text.0
}

struct Text(String);

impl Text {
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn sample(&mut self, name: &str, labels: &str, value: impl std::fmt::Display) {
        let _ = writeln!(self.0, "{name}{{{labels}}} {value}");
    }

    fn kinds(&mut self, exports: &Exports, name: &str, value: fn(&crate::metrics::KindTotals) -> u64) {
        for export in exports.iter() {
            for kind in RequestKind::ALL {
                let labels = format!("export=\"{}\",kind=\"{}\"", escaped(export.name()), kind.name());
                self.sample(name, &labels, value(&export.metrics().totals(kind)));
            }
        }
    }

    fn gauges(&mut self, exports: &Exports, name: &str, value: fn(&crate::Export) -> u64) {
        for export in exports.iter() {
            self.sample(name, &format!("export=\"{}\"", escaped(export.name())), value(&export));
        }
    }

    fn latencies(&mut self, exports: &Exports) {
        let name = "zebu_request_seconds";
        self.family(name, "histogram", "Time from a request's receipt until its reply was ready to be sent.");
        for export in exports.iter() {
            for kind in RequestKind::ALL {
                let totals = export.metrics().totals(kind);
                let labels = format!("export=\"{}\",kind=\"{}\"", escaped(export.name()), kind.name());
                let mut sum = 0;
                for (index, count) in totals.buckets.iter().take(LATENCY_BUCKETS - 1).enumerate() {
                    sum += count;
                    let limit = (1u64 << index) as f64 / 1e6;
                    self.sample(&format!("{name}_bucket"), &format!("{labels},le=\"{limit}\""), sum);
                }
                sum += totals.buckets[LATENCY_BUCKETS - 1];
                self.sample(&format!("{name}_bucket"), &format!("{labels},le=\"+Inf\""), sum);
                self.sample(&format!("{name}_sum"), &labels, totals.nanoseconds as f64 / 1e9);
                self.sample(&format!("{name}_count"), &labels, sum);
            }
        }
    }

    /// Limits, one sample for each that is set, and requests that waited for them.
    fn limits(&mut self, exports: &Exports) {
        self.family(
            "zebu_limit",
            "gauge",
            "Limits of requests and bytes per second, of an export or a group.",
        );
        let mut groups: Vec<LimitGroup> = Vec::new();
        for export in exports.iter() {
            let label = format!("export=\"{}\"", escaped(export.name()));
            self.limits_of(&label, &export.limits());
            let group = export.limit_group();
            groups.extend(group.filter(|group| groups.iter().all(|other| other.name() != group.name())));
        }
        for group in &groups {
            self.limits_of(&format!("group=\"{}\"", escaped(group.name())), &group.limits());
        }
        self.family("zebu_limit_waiting", "gauge", "Requests that wait for a limit.");
        self.gauges(exports, "zebu_limit_waiting", |export| export.throttle_stats().waiting);
        self.family("zebu_limit_waited_total", "counter", "Requests that had to wait for a limit.");
        self.gauges(exports, "zebu_limit_waited_total", |export| export.throttle_stats().waited);
        let name = "zebu_limit_waited_seconds_total";
        self.family(name, "counter", "How long these waited.");
        for export in exports.iter() {
            let seconds = export.throttle_stats().nanoseconds as f64 / 1e9;
            self.sample(name, &format!("export=\"{}\"", escaped(export.name())), seconds);
        }
    }

    fn limits_of(&mut self, label: &str, limits: &Limits) {
        for (name, value) in limits.named() {
            if let Some(value) = value {
                self.sample("zebu_limit", &format!("{label},limit=\"{name}\""), value);
            }
        }
    }

    fn image(&mut self, exports: &Exports) {
        type Value = fn(&zebu_engine::ImageStats) -> u64;
        let counters: [(&str, &str, &str, Value); 13] = [
            ("zebu_cache_hits_total", "counter", "Lookups of a mapping slice in memory.", |s| s.cache_hits),
            ("zebu_cache_misses_total", "counter", "Lookups of one that was not.", |s| s.cache_misses),
            ("zebu_cache_loads_total", "counter", "Mapping slices loaded.", |s| s.cache_loads),
            ("zebu_cache_evictions_total", "counter", "Mapping slices given up.", |s| s.cache_evictions),
            ("zebu_cache_index_hits_total", "counter", "Lookups that the extent index answered.", |s| {
                s.index_hits
            }),
            ("zebu_cache_limit_bytes", "gauge", "Memory that the mapping cache may take.", |s| s.cache_limit),
            (
                "zebu_cache_miscounts_total",
                "counter",
                "Times that the cache's count of its memory was wrong: a bug to be reported.",
                |s| s.cache_miscounts,
            ),
            ("zebu_cache_bytes", "gauge", "Memory of the mapping cache in use.", |s| s.cache_bytes),
            ("zebu_commits_total", "counter", "Commits of metadata.", |s| s.commits),
            ("zebu_clusters_allocated_total", "counter", "Host clusters allocated.", |s| {
                s.clusters_allocated
            }),
            ("zebu_clusters_freed_total", "counter", "Host clusters freed.", |s| s.clusters_freed),
            (
                "zebu_clusters_released_total",
                "counter",
                "Freed host clusters that came out of quarantine, to be used again.",
                |s| s.clusters_released,
            ),
            (
                "zebu_clusters_quarantined",
                "gauge",
                "Freed host clusters that wait for a commit or for I/O under way.",
                |s| s.clusters_freed.saturating_sub(s.clusters_released),
            ),
        ];
        for (name, kind, help, value) in counters {
            self.family(name, kind, help);
            for export in exports.iter() {
                let labels = format!("export=\"{}\"", escaped(export.name()));
                self.sample(name, &labels, value(&export.image().stats()));
            }
        }
    }
}

/// A label's value.
fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Export;
    use std::time::Duration;
    use zebu_engine::{Access, CreateOptions, Disk, OpenOptions};

    #[test]
    fn histograms_are_cumulative_and_labels_are_escaped() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk.qcow2");
        Disk::create(&path, &CreateOptions::default().size(Some(1 << 20))).unwrap();
        let disk = Disk::open(&path, &OpenOptions::default()).unwrap();
        let exports = Exports::new(vec![Export::new("a\"b", disk.image(), Access::ReadOnly)]).unwrap();
        let export = exports.find("a\"b").unwrap();
        let metrics = export.metrics();
        for microseconds in [1, 3, 3, 100_000_000] {
            metrics.start(0);
            metrics.end(0, RequestKind::Read, 10, true, Duration::from_micros(microseconds));
        }
        let text = prometheus(&exports, &MemoryBudget::default());
        let label = "{export=\"a\\\"b\",kind=\"read\"";
        for line in [
            format!("zebu_requests_total{label}}} 4"),
            format!("zebu_request_bytes_total{label}}} 40"),
            format!("zebu_request_seconds_bucket{label},le=\"0.000001\"}} 1"),
            format!("zebu_request_seconds_bucket{label},le=\"0.000004\"}} 3"),
            format!("zebu_request_seconds_bucket{label},le=\"4.194304\"}} 3"),
            format!("zebu_request_seconds_bucket{label},le=\"+Inf\"}} 4"),
            format!("zebu_request_seconds_sum{label}}} 100.000007"),
            "zebu_disk_bytes{export=\"a\\\"b\"} 1048576".to_owned(),
        ] {
            assert!(text.lines().any(|other| other == line), "{line} is missing in {text}");
        }
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            assert_eq!(
                line.rsplit_once(' ').map(|(_, value)| value.parse::<f64>().is_ok()),
                Some(true),
                "{line}"
            );
        }
        disk.close().unwrap();
    }
}
