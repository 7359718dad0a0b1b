//! Counting what clients do, without a shared lock.

use std::sync::atomic::{AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::time::Duration;

/// Kinds of requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum RequestKind {
    /// Reading.
    Read,
    /// Writing.
    Write,
    /// Making durable.
    Flush,
    /// Giving up a range.
    Discard,
    /// Zeroing a range.
    WriteZeroes,
    /// Any other: what a range is made of, reading ahead.
    Other,
}

impl RequestKind {
    /// All kinds.
    pub const ALL: [Self; 6] =
        [Self::Read, Self::Write, Self::Flush, Self::Discard, Self::WriteZeroes, Self::Other];

    /// As in metrics.
    pub fn name(self) -> &'static str {
        match self {
            RequestKind::Read => "read",
            RequestKind::Write => "write",
            RequestKind::Flush => "flush",
            RequestKind::Discard => "discard",
            RequestKind::WriteZeroes => "write_zeroes",
            RequestKind::Other => "other",
        }
    }
}

/// Buckets of latencies: the bucket `i` holds what took up to `2^i` microseconds, the last one all that took longer.
pub const LATENCY_BUCKETS: usize = 24;
/// Threads count in different cache lines, up to this many.
const SHARDS: usize = 16;

/// Requests of one kind.
#[derive(Debug, Default)]
struct KindCounters {
    requests: AtomicU64,
    bytes: AtomicU64,
    errors: AtomicU64,
    nanoseconds: AtomicU64,
    buckets: [AtomicU64; LATENCY_BUCKETS],
}

#[derive(Debug, Default)]
#[repr(align(128))]
struct Shard {
    kinds: [KindCounters; 6],
    started: AtomicU64,
    ended: AtomicU64,
}

/// Counters of an export.
#[derive(Debug, Default)]
pub struct ExportMetrics {
    shards: [Shard; SHARDS],
    clients: AtomicU64,
    /// Clients that have come.
    arrivals: AtomicU64,
    /// Of the changed bytes, those that a flush has covered.
    flushed: AtomicU64,
}

/// How much was changed when a flush began.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mark(u64);

/// Counters of one kind of request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct KindTotals {
    /// Requests that ended.
    pub requests: u64,
    /// Bytes of those that succeeded.
    pub bytes: u64,
    /// Requests that failed or were refused.
    pub errors: u64,
    /// Their latencies, added up, in nanoseconds.
    pub nanoseconds: u64,
    /// Latencies by powers of two of microseconds.
    pub buckets: [u64; LATENCY_BUCKETS],
}

impl ExportMetrics {
    /// Counts a request that begins; `thread` is the number of the worker.
    pub(crate) fn start(&self, thread: usize) {
        self.shards[thread % SHARDS].started.fetch_add(1, Relaxed);
    }

    /// Counts a request that ended.
    pub(crate) fn end(&self, thread: usize, kind: RequestKind, bytes: u64, is_ok: bool, took: Duration) {
        let shard = &self.shards[thread % SHARDS];
        shard.ended.fetch_add(1, Relaxed);
        let counters = &shard.kinds[kind as usize];
        counters.requests.fetch_add(1, Relaxed);
        if is_ok {
            counters.bytes.fetch_add(bytes, Relaxed);
        } else {
            counters.errors.fetch_add(1, Relaxed);
        }
        let nanoseconds = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        counters.nanoseconds.fetch_add(nanoseconds, Relaxed);
        counters.buckets[bucket(nanoseconds)].fetch_add(1, Relaxed);
    }

    /// To be asked for before a flush begins.
    pub(crate) fn mark(&self) -> Mark {
        Mark(self.changed())
    }

    /// Notes that changes before the mark are durable.
    pub(crate) fn is_durable(&self, Mark(changed): Mark) {
        self.flushed.fetch_max(changed, Relaxed);
    }

    /// Bytes of all successful writes, discards and zeroing.
    fn changed(&self) -> u64 {
        let kinds = [RequestKind::Write, RequestKind::Discard, RequestKind::WriteZeroes];
        let counters = self.shards.iter().flat_map(|shard| kinds.map(|kind| &shard.kinds[kind as usize]));
        counters.map(|counters| counters.bytes.load(Relaxed)).sum()
    }

    /// Bytes of writes, discards and zeroing that succeeded and that no flush has covered. (Some may be durable all the
    /// same: writes with FUA, and what was committed for other reasons.)
    pub fn unflushed(&self) -> u64 {
        self.changed().saturating_sub(self.flushed.load(Relaxed))
    }

    /// Counts a client that comes.
    pub(crate) fn client_comes(&self) {
        self.clients.fetch_add(1, Relaxed);
        // After that: whoever sees that one has come, and none is there, knows that it has gone.
        self.arrivals.fetch_add(1, Release);
    }

    /// Counts a client that goes.
    pub(crate) fn client_goes(&self) {
        self.clients.fetch_sub(1, Relaxed);
    }

    /// Clients that use the export now.
    pub fn clients(&self) -> u64 {
        self.clients.load(Relaxed)
    }

    /// Clients that have come since the beginning, whether they are still there or not.
    pub fn arrivals(&self) -> u64 {
        self.arrivals.load(Acquire)
    }

    /// Requests under way.
    pub fn in_flight(&self) -> u64 {
        let ended: u64 = self.shards.iter().map(|shard| shard.ended.load(Relaxed)).sum();
        let started: u64 = self.shards.iter().map(|shard| shard.started.load(Relaxed)).sum();
        started.saturating_sub(ended)
    }

    /// Totals of one kind.
    pub fn totals(&self, kind: RequestKind) -> KindTotals {
        let mut totals = KindTotals::default();
        for shard in &self.shards {
            let counters = &shard.kinds[kind as usize];
            totals.requests += counters.requests.load(Relaxed);
            totals.bytes += counters.bytes.load(Relaxed);
            totals.errors += counters.errors.load(Relaxed);
            totals.nanoseconds += counters.nanoseconds.load(Relaxed);
            for (total, bucket) in totals.buckets.iter_mut().zip(&counters.buckets) {
                *total += bucket.load(Relaxed);
            }
        }
        totals
    }
}

fn bucket(nanoseconds: u64) -> usize {
    let microseconds = nanoseconds.div_ceil(1000).max(1);
    (microseconds.next_power_of_two().trailing_zeros() as usize).min(LATENCY_BUCKETS - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_powers_of_two_of_microseconds() {
        for (nanoseconds, expected) in
            [(0, 0), (1000, 0), (1001, 1), (2000, 1), (2001, 2), (4_000_000, 12), (u64::MAX >> 1, 23)]
        {
            assert_eq!(bucket(nanoseconds), expected, "{nanoseconds}");
        }
    }

    #[test]
    fn a_flush_covers_what_was_written_before_it_began() {
        let metrics = ExportMetrics::default();
        let write = |bytes| metrics.end(0, RequestKind::Write, bytes, true, Duration::ZERO);
        write(100);
        let (first, second) = (metrics.mark(), metrics.mark());
        write(10);
        assert_eq!(metrics.unflushed(), 110);
        metrics.is_durable(second);
        assert_eq!(metrics.unflushed(), 10);
        let third = metrics.mark();
        metrics.is_durable(third);
        metrics.is_durable(first);
        assert_eq!(metrics.unflushed(), 0);
        metrics.end(0, RequestKind::Write, 5, false, Duration::ZERO);
        metrics.end(0, RequestKind::Read, 5, true, Duration::ZERO);
        assert_eq!(metrics.unflushed(), 0);
    }

    #[test]
    fn threads_add_up() {
        let metrics = ExportMetrics::default();
        std::thread::scope(|scope| {
            for thread in 0..40 {
                let metrics = &metrics;
                scope.spawn(move || {
                    for turn in 0..100 {
                        metrics.start(thread);
                        metrics.end(thread, RequestKind::Write, 512, turn % 4 != 0, Duration::from_micros(3));
                    }
                });
            }
        });
        metrics.start(3);
        let totals = metrics.totals(RequestKind::Write);
        assert_eq!((totals.requests, totals.errors, totals.bytes), (4000, 1000, 3000 * 512));
        assert_eq!((totals.buckets[2], totals.nanoseconds), (4000, 12_000_000));
        assert_eq!((metrics.in_flight(), metrics.totals(RequestKind::Read)), (1, KindTotals::default()));
    }
}
