//! Figures of a disk over the network.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counters of one disk since it was opened.
#[derive(Debug, Default)]
pub struct RemoteStats {
    requests: AtomicU64,
    read_bytes: AtomicU64,
    written_bytes: AtomicU64,
    retries: AtomicU64,
    reconnects: AtomicU64,
}

/// The counters at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StatsSnapshot {
    /// Requests that were sent, retries among them.
    pub requests: u64,
    /// Bytes of data that were received.
    pub read_bytes: u64,
    /// Bytes of data that were sent.
    pub written_bytes: u64,
    /// Requests that were sent again because their connection broke.
    pub retries: u64,
    /// Connections that were made in place of broken ones.
    pub reconnects: u64,
}

impl RemoteStats {
    pub(crate) fn count_request(&self, written: u64) {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.written_bytes.fetch_add(written, Ordering::Relaxed);
    }

    pub(crate) fn count_read(&self, bytes: u64) {
        self.read_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn count_retries(&self, requests: usize) {
        self.retries.fetch_add(requests as u64, Ordering::Relaxed);
    }

    pub(crate) fn count_reconnect(&self) {
        self.reconnects.fetch_add(1, Ordering::Relaxed);
    }

    /// The counters now.
    pub fn snapshot(&self) -> StatsSnapshot {
        StatsSnapshot {
            requests: self.requests.load(Ordering::Relaxed),
            read_bytes: self.read_bytes.load(Ordering::Relaxed),
            written_bytes: self.written_bytes.load(Ordering::Relaxed),
            retries: self.retries.load(Ordering::Relaxed),
            reconnects: self.reconnects.load(Ordering::Relaxed),
        }
    }
}
