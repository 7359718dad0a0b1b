//! The pace at which bytes are sent.

use std::num::NonZeroU64;
use std::time::{Duration, Instant};
use zebu_storage::sync::Mutex;

/// Turns of those who send, in the order in which they ask.
#[derive(Debug, Default)]
pub(super) struct Pace(Mutex<Turns>);

#[derive(Debug, Default)]
struct Turns {
    /// Bytes a second; none: no limit.
    rate: Option<NonZeroU64>,
    /// The time at which all that has a turn is through.
    next: Option<Instant>,
}

impl Pace {
    pub(super) fn limit(&self, rate: Option<NonZeroU64>) {
        self.0.lock().rate = rate;
    }

    /// Waits until so many bytes may go.
    pub(super) fn wait_for(&self, bytes: u64) {
        std::thread::sleep(self.turn(bytes, Instant::now()));
    }

    /// The wait for a turn of so many bytes, which it takes.
    fn turn(&self, bytes: u64, now: Instant) -> Duration {
        let mut turns = self.0.lock();
        let Some(rate) = turns.rate else { return Duration::ZERO };
        let begin = turns.next.map_or(now, |next| next.max(now));
        let takes = Duration::try_from_secs_f64(bytes as f64 / rate.get() as f64).unwrap_or(Duration::MAX);
        turns.next = begin.checked_add(takes).or(Some(begin));
        begin - now
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_keep_to_the_rate_and_nothing_is_saved_up() {
        let (pace, begin) = (Pace::default(), Instant::now());
        assert_eq!(pace.turn(u64::MAX, begin), Duration::ZERO);
        pace.limit(NonZeroU64::new(1000));
        for second in 0..3 {
            assert_eq!(pace.turn(1000, begin), Duration::from_secs(second));
        }
        let later = begin + Duration::from_secs(60);
        assert_eq!(pace.turn(500, later), Duration::ZERO);
        assert_eq!(pace.turn(1, later), Duration::from_millis(500));
    }
}
