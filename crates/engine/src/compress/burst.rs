//! Bursts of compression, and the sleep after each, so that others who share the processor don't wait for a whole cluster.
//!
//! A thread that wakes where another one computes waits until that one sleeps, or for its time slice of a millisecond
//! or more. That is long beside a read of a fast disk, and there need not be an idle processor that it goes to.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// How much is taken at once of what others wait for as well: the processor and the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Bursts {
    /// A whole cluster, and large writes: the quickest way.
    Whole,
    /// Parts of a cluster, with sleep in between, and small writes. A cluster takes twice the time or more, and its stream
    /// is a thirtieth longer at the default levels.
    Short,
}

/// Shortest burst after which a thread sleeps: going to sleep costs some microseconds of its own.
const SHORTEST_BURST: Duration = Duration::from_micros(20);
/// Longest sleep. A longer burst was interrupted, or is of a high level.
const LONGEST_SLEEP: Duration = Duration::from_micros(500);

/// Has the kernel end the sleeps of this thread on time, where it knows how; else they end some 50 us late.
pub(super) fn sleep_exactly() {
    #[cfg(target_os = "linux")]
    let _ = rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1000));
}

/// The work of a thread since it slept.
pub(super) struct Burst<'a> {
    begun: Instant,
    /// Number of waits for the work.
    hurried: &'a AtomicUsize,
}

impl<'a> Burst<'a> {
    pub(super) fn begin(hurried: &'a AtomicUsize) -> Self {
        Self { begun: Instant::now(), hurried }
    }

    /// Sleeps as long as the burst took, if it was long enough and nobody waits.
    pub(super) fn pause(&mut self) {
        let spent = self.begun.elapsed();
        if spent < SHORTEST_BURST {
            return;
        }
        if self.hurried.load(Relaxed) == 0 {
            sleep(spent.min(LONGEST_SLEEP));
        }
        self.begun = Instant::now();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pauses(hurried: usize) -> Duration {
        let hurried = AtomicUsize::new(hurried);
        let mut burst = Burst::begin(&hurried);
        burst.begun = Instant::now().checked_sub(Duration::from_millis(100)).unwrap();
        let before = Instant::now();
        burst.pause();
        before.elapsed()
    }

    #[test]
    fn a_thread_sleeps_after_a_burst_unless_somebody_waits() {
        assert!(pauses(0) >= LONGEST_SLEEP);
        // A thread that is interrupted takes long once, and hardly each time.
        assert!((0..20).any(|_| pauses(1) < LONGEST_SLEEP));
    }
}
