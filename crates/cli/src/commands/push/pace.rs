//! The pace of a push.

use std::cell::{Cell, OnceCell};
use std::num::NonZeroU64;
use std::time::{Duration, Instant};
use zebu_engine::jobs::Cancel;

/// The most bytes that a registry takes at once. Where more are done, a blob was there.
const MOST_AT_ONCE: u64 = 256 << 20;
/// How long it sleeps before it looks whether it was cancelled.
const NAP: Duration = Duration::from_millis(100);

/// Holds up who sends, so that it keeps to a rate.
pub(super) struct Pace {
    rate: Option<NonZeroU64>,
    /// The time of the first bytes: what came before was no sending.
    begun: OnceCell<Instant>,
    /// Bytes that are done.
    done: Cell<u64>,
    /// The part of them that was sent.
    sent: Cell<u64>,
}

impl Pace {
    pub(super) fn begin(rate: Option<NonZeroU64>) -> Self {
        Self { rate, begun: OnceCell::new(), done: Cell::new(0), sent: Cell::new(0) }
    }

    /// Waits until it is time for so many bytes to be done.
    pub(super) fn keep(&self, done: u64, cancel: &Cancel) {
        let begun = *self.begun.get_or_init(Instant::now);
        let Some(due) = self.due(done) else { return };
        while !cancel.is_cancelled() {
            let left = due.saturating_sub(begun.elapsed());
            if left.is_zero() {
                return;
            }
            std::thread::sleep(left.min(NAP));
        }
    }

    /// The time from the first bytes on at which so many bytes may be done.
    fn due(&self, done: u64) -> Option<Duration> {
        let new = done.saturating_sub(self.done.replace(done));
        if new <= MOST_AT_ONCE {
            self.sent.set(self.sent.get() + new);
        }
        let rate = self.rate?;
        Some(Duration::try_from_secs_f64(self.sent.get() as f64 / rate.get() as f64).unwrap_or(Duration::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_that_are_sent_keep_to_the_rate() {
        let pace = Pace::begin(NonZeroU64::new(1 << 20));
        assert_eq!(pace.due(1 << 20), Some(Duration::from_secs(1)));
        // A blob that was there.
        assert_eq!(pace.due(1 << 40), Some(Duration::from_secs(1)));
        assert_eq!(pace.due((1 << 40) + (1 << 20)), Some(Duration::from_secs(2)));
        // It begins a blob anew.
        assert_eq!(pace.due(0), Some(Duration::from_secs(2)));
        assert_eq!(Pace::begin(None).due(1 << 20), None);
    }
}
