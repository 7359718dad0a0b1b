//! Times by which something must be over.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The least bytes in a second of a server that is not given up.
pub(crate) const BYTES_A_SECOND: u64 = 64 << 10;

/// The longest that anything waits: a longer time, as [`Duration::MAX`], is no longer than this. Instants have an end.
pub(crate) const LONGEST: Duration = Duration::from_secs(366 * 24 * 3600);

/// The most bytes of later requests that may be answered before a request.
pub(crate) const MOST_OVERTAKING: u64 = 64 << 20;

/// Bytes that the requests of a disk ask for or carry, and those that came.
#[derive(Debug, Clone)]
pub(crate) struct Backlog(Arc<Counts>);

#[derive(Debug)]
struct Counts {
    begun: Instant,
    /// Bytes of requests that are not answered.
    left: AtomicU64,
    /// Bytes of all that ever were.
    all: AtomicU64,
    /// How far the time has come, in microseconds after `begun`: each byte takes it on by the time that a byte may take, up to
    /// now. So a byte now and then is no progress.
    progress: AtomicU64,
}

impl Default for Backlog {
    fn default() -> Self {
        let (left, all, progress) = Default::default();
        Self(Arc::new(Counts { begun: Instant::now(), left, all, progress }))
    }
}

impl Backlog {
    fn since_begun(&self, time: Instant) -> u64 {
        time.saturating_duration_since(self.0.begun).as_micros() as u64
    }

    /// So many bytes came.
    pub(crate) fn note(&self, now: Instant, bytes: u64) {
        let (now, more) = (self.since_begun(now), bytes.saturating_mul(1_000_000) / BYTES_A_SECOND);
        let on = |progress: u64| Some(progress.saturating_add(more).min(now).max(progress));
        // Of what is counted alone, the order means nothing.
        let _ = self.0.progress.fetch_update(Ordering::Relaxed, Ordering::Relaxed, on);
    }

    /// The time up to which bytes came fast enough.
    pub(crate) fn progress(&self) -> Instant {
        self.0.begun + Duration::from_micros(self.0.progress.load(Ordering::Relaxed))
    }

    /// The time of a request of so many bytes, which began at `asked`.
    pub(crate) fn allowance(&self, asked: Instant, timeout: Duration, bytes: u64) -> Allowance {
        let before = self.0.left.fetch_add(bytes, Ordering::Relaxed);
        if before == 0 {
            // Nobody has waited for bytes.
            self.0.progress.fetch_max(self.since_begun(asked), Ordering::Relaxed);
        }
        let all = self.0.all.fetch_add(bytes, Ordering::Relaxed) + bytes;
        Allowance { asked, timeout, before, bytes, all, backlog: self.clone() }
    }
}

/// The time of a request: until bytes came too slowly for its timeout, and as long at most as all that may come before it takes.
#[derive(Debug)]
pub(crate) struct Allowance {
    asked: Instant,
    timeout: Duration,
    /// Bytes that others waited for when it began.
    before: u64,
    bytes: u64,
    /// Bytes of all requests up to this one.
    all: u64,
    backlog: Backlog,
}

impl Allowance {
    /// The time when it is over, if bytes came fast enough up to `progress`.
    #[cfg(any(feature = "nbd", test))]
    pub(crate) fn until(&self, progress: Instant) -> Instant {
        (self.asked.max(progress) + self.timeout).min(self.limit())
    }

    /// The time when it is over if no bytes come.
    pub(crate) fn deadline(&self) -> Instant {
        self.asked + self.timeout
    }

    /// The time when it is over even if bytes come. Answers need not come in the order of requests.
    pub(crate) fn limit(&self) -> Instant {
        let later = self.backlog.0.all.load(Ordering::Relaxed).saturating_sub(self.all).min(MOST_OVERTAKING);
        let bytes = self.before.saturating_add(self.bytes).saturating_add(later);
        self.deadline() + Duration::from_secs(bytes / BYTES_A_SECOND + 1)
    }

    /// Takes in the bytes of another, which begins later.
    #[cfg(feature = "http")]
    pub(crate) fn join(&mut self, mut other: Self) {
        self.asked = self.asked.min(other.asked);
        self.bytes += std::mem::take(&mut other.bytes);
    }
}

impl Drop for Allowance {
    fn drop(&mut self) {
        self.backlog.0.left.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// The time until then.
///
/// # Errors
/// It is over.
pub(crate) fn time_left(until: Instant) -> io::Result<Duration> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(late()) } else { Ok(left) }
}

/// The server took too long.
pub(crate) fn late() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "the server does not answer")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_runs_from_the_last_bytes_and_is_bounded_by_what_may_come_before() {
        let timeout = Duration::from_secs(60);
        let backlog = Backlog::default();
        let allowance = |bytes| backlog.allowance(Instant::now(), timeout, bytes);
        let first = allowance(10 * BYTES_A_SECOND);
        let at = |seconds| first.asked + Duration::from_secs(seconds);
        assert_eq!(first.until(backlog.0.begun), at(60));
        assert_eq!(first.until(at(7)), at(67));
        assert_eq!(first.until(at(1000)), at(60 + 11));
        let second = allowance(BYTES_A_SECOND);
        assert_eq!(second.until(at(1000)), second.asked + Duration::from_secs(60 + 12));
        // The second may be answered first, and so may not all that ever comes.
        assert_eq!(first.until(at(1000)), at(60 + 12));
        drop(second);
        let many: Vec<_> = (0..100).map(|_| allowance(MOST_OVERTAKING)).collect();
        assert_eq!(first.limit(), at(60 + 11 + MOST_OVERTAKING / BYTES_A_SECOND));
        drop((first, many));
        let last = allowance(0);
        assert_eq!(last.until(last.asked + timeout * 9), last.asked + Duration::from_secs(61));
    }

    #[test]
    fn a_byte_now_and_then_is_no_progress() {
        let backlog = Backlog::default();
        let begun = backlog.0.begun;
        let at = |seconds| begun + Duration::from_secs(seconds);
        let first = backlog.allowance(at(100), Duration::from_secs(60), 1 << 20);
        assert_eq!(backlog.progress(), at(100));
        for second in 101..131 {
            backlog.note(at(second), 1);
        }
        assert!(backlog.progress() < at(101));
        // Faster than it must be: no further than now.
        backlog.note(at(131), 1 << 30);
        assert_eq!(backlog.progress(), at(131));
        backlog.note(at(140), 4 * BYTES_A_SECOND);
        assert_eq!(backlog.progress(), at(135));
        // A pause without requests counts for nobody.
        drop(first);
        let _second = backlog.allowance(at(900), Duration::from_secs(60), 1);
        assert_eq!(backlog.progress(), at(900));
    }
}
