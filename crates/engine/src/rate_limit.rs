//! A limit on bytes per second.

use std::num::NonZeroU64;
use std::time::{Duration, Instant};
use zebu_storage::sync::Mutex;

/// How far a job that fell behind its limit may catch up.
const BURST: Duration = Duration::from_millis(100);

/// Hands out the time from which on bytes may move, such that their average keeps to the limit: a token bucket, kept
/// as the time at which it will be full again.
pub(crate) struct RateLimit {
    bytes_per_second: NonZeroU64,
    /// When everything handed out so far has moved at the limit's rate.
    paid_until: Mutex<Instant>,
}

impl RateLimit {
    pub(crate) fn new(bytes_per_second: NonZeroU64, now: Instant) -> Self {
        Self { bytes_per_second, paid_until: Mutex::new(now) }
    }

    /// The time from which on `bytes` may move. Any thread may ask.
    pub(crate) fn reserve(&self, bytes: u64, now: Instant) -> Instant {
        let mut paid_until = self.paid_until.lock();
        let earliest = now.checked_sub(BURST).unwrap_or(now);
        let start = (*paid_until).max(earliest);
        let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(self.bytes_per_second.get());
        let cost = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
        *paid_until = start.checked_add(cost).unwrap_or(start);
        start
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_average_keeps_to_the_limit() {
        let begin = Instant::now() + Duration::from_secs(10);
        let limit = RateLimit::new(NonZeroU64::new(1000).unwrap(), begin);
        let mut now = begin;
        for _ in 0..50 {
            now = now.max(limit.reserve(100, now));
        }
        // 5000 bytes: the last 100 may start when 4900 have moved, less the burst allowed at the beginning.
        let elapsed = now - begin;
        assert!(elapsed <= Duration::from_millis(4900), "{elapsed:?}");
        assert!(elapsed + BURST >= Duration::from_millis(4900), "{elapsed:?}");
    }

    #[test]
    fn time_not_used_is_not_saved_up() {
        let begin = Instant::now() + Duration::from_secs(10);
        let limit = RateLimit::new(NonZeroU64::new(1000).unwrap(), begin);
        let later = begin + Duration::from_secs(60);
        assert!(limit.reserve(500, later) <= later);
        let next = limit.reserve(500, later);
        assert_eq!(next + BURST, later + Duration::from_millis(500));
    }

    #[test]
    fn absurd_sizes_do_not_overflow() {
        let now = Instant::now();
        let limit = RateLimit::new(NonZeroU64::new(1).unwrap(), now);
        for _ in 0..4 {
            limit.reserve(u64::MAX, now);
        }
    }
}
