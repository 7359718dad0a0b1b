//! Epochs of readers: knowing when no request can still use a host cluster that was unlinked.

use crate::sync::atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst};
use crate::sync::{AsyncMutex, AsyncMutexGuard, WaitQueue};
use zebu_storage::sabotage::{self, Fault};

const SLOTS: usize = crate::sync::spread(16);

/// Counters of requests inside, by worker (so that workers share no cache line) and phase.
#[repr(align(128))]
#[derive(Debug, Default)]
struct Slot {
    inside: [AtomicU64; 2],
}

/// Epoch-based reclamation, as sleepable RCU does it.
///
/// A request enters before it looks a mapping up and leaves when its I/O on that mapping is complete. A cluster that
/// was unlinked before [`ReadEpochs::wait`] was called is used by nobody when it returns: a request that entered
/// earlier has left, one that enters later sees the new mapping.
#[derive(Debug, Default)]
pub(crate) struct ReadEpochs {
    slots: [Slot; SLOTS],
    phase: AtomicUsize,
    waiting: WaitQueue,
    one_wait: AsyncMutex,
    /// Waits that have begun, and the latest of them that has ended.
    begun: AtomicU64,
    ended: AtomicU64,
}

/// A moment at which requests were inside. It has passed when all of these have left.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Moment(u64);

/// A request that is inside.
#[derive(Debug)]
pub(crate) struct EpochGuard<'a> {
    epochs: &'a ReadEpochs,
    slot: usize,
    phase: usize,
}

impl ReadEpochs {
    /// Enters. `worker` spreads the counters.
    pub(crate) fn enter(&self, worker: usize) -> EpochGuard<'_> {
        let slot = worker % SLOTS;
        let phase = self.phase.load(SeqCst) & 1;
        self.slots[slot].inside[phase].fetch_add(1, SeqCst);
        EpochGuard { epochs: self, slot, phase }
    }

    fn is_empty(&self, phase: usize) -> bool {
        self.slots.iter().all(|slot| slot.inside[phase].load(SeqCst) == 0)
    }

    /// This moment, if a request is inside.
    pub(crate) fn moment(&self) -> Option<Moment> {
        (!self.is_empty(0) || !self.is_empty(1)).then(|| Moment(self.begun.load(SeqCst)))
    }

    /// Whether a wait has ended that began after `moment`.
    pub(crate) fn has_passed(&self, moment: Moment) -> bool {
        self.ended.load(SeqCst) > moment.0
    }

    /// Waits until every request that was inside at the call has left.
    pub(crate) async fn wait(&self) {
        let one = self.one_wait.lock().await;
        self.wait_alone(&one).await;
    }

    /// Waits until every request that was inside at `moment` has left.
    pub(crate) async fn wait_past(&self, moment: Moment) {
        let one = self.one_wait.lock().await;
        if !self.has_passed(moment) {
            self.wait_alone(&one).await;
        }
    }

    async fn wait_alone(&self, _one: &AsyncMutexGuard<'_>) {
        let number = self.begun.fetch_add(1, SeqCst) + 1;
        // Twice: a request may have read the phase before the first flip and counted itself after it; only the
        // second round is sure to wait for it.
        let rounds = if sabotage::is(Fault::FlipOnce) { 1 } else { 2 };
        for _ in 0..rounds {
            let old = self.phase.fetch_add(1, SeqCst) & 1;
            self.waiting.until(|| self.is_empty(old).then_some(())).await;
        }
        self.ended.store(number, SeqCst);
    }
}

impl Drop for EpochGuard<'_> {
    fn drop(&mut self) {
        self.epochs.slots[self.slot].inside[self.phase].fetch_sub(1, SeqCst);
        self.epochs.waiting.wake_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Waker};

    #[test]
    fn a_wait_ends_when_all_who_were_inside_have_left() {
        let epochs = ReadEpochs::default();
        let a = epochs.enter(0);
        let b = epochs.enter(5);
        let mut wait = pin!(epochs.wait());
        let mut cx = Context::from_waker(Waker::noop());
        assert!(wait.as_mut().poll(&mut cx).is_pending());
        drop(a);
        assert!(wait.as_mut().poll(&mut cx).is_pending());
        let late = epochs.enter(1);
        drop(b);
        // `late` entered after the first flip: the second round waits for it as well, which is more than needed.
        let _ = wait.as_mut().poll(&mut cx);
        drop(late);
        assert!(wait.as_mut().poll(&mut cx).is_ready());
    }

    #[test]
    fn a_moment_passes_with_a_wait_that_began_later() {
        let epochs = ReadEpochs::default();
        assert_eq!(epochs.moment(), None);
        let mut cx = Context::from_waker(Waker::noop());
        let a = epochs.enter(0);
        let mut early = Box::pin(epochs.wait());
        assert!(early.as_mut().poll(&mut cx).is_pending());
        let b = epochs.enter(1);
        let moment = epochs.moment().unwrap();
        drop((a, b));
        assert!(early.as_mut().poll(&mut cx).is_ready());
        assert!(!epochs.has_passed(moment), "the wait began before");
        let c = epochs.enter(2);
        let mut past = pin!(epochs.wait_past(moment));
        assert!(past.as_mut().poll(&mut cx).is_pending());
        drop(c);
        assert!(past.as_mut().poll(&mut cx).is_ready());
        assert!(epochs.has_passed(moment));
        let _d = epochs.enter(3);
        assert!(pin!(epochs.wait_past(moment)).poll(&mut cx).is_ready(), "nobody else is waited for");
    }
}
