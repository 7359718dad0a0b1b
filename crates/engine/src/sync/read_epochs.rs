//! Epochs of readers: knowing when no request can still use a host cluster that was unlinked.

use crate::sync::atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst};
use crate::sync::{AsyncMutex, AsyncMutexGuard, Clock, Mutex, WaitQueue};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize as PlainUsize, Ordering::Relaxed};
use zebu_storage::drive::{Drive, OneOf};
use zebu_storage::sabotage::{self, Fault};

const SLOTS: usize = crate::sync::spread(16);

/// Workers of a slot that are known without a lock.
const KNOWN: usize = 4;

/// Counters of requests inside, by worker (so that workers share no cache line) and phase.
#[repr(align(128))]
#[derive(Debug, Default)]
struct Slot {
    inside: [AtomicU64; 2],
    /// Addresses of some of `drives`, for those who enter again.
    known: [PlainUsize; KNOWN],
    /// The workers that have entered here.
    drives: Mutex<OneOf>,
}

impl Slot {
    fn is_empty(&self) -> bool {
        self.inside.iter().all(|phase| phase.load(SeqCst) == 0)
    }

    /// Notes who enters, before it is counted.
    #[inline]
    fn note(&self, drive: &Arc<Drive>) {
        let address = Arc::as_ptr(drive).addr();
        if !self.known.iter().any(|known| known.load(Relaxed) == address) {
            self.note_anew(drive);
        }
    }

    #[cold]
    fn note_anew(&self, drive: &Arc<Drive>) {
        let mut drives = self.drives.lock();
        drives.retain(|other| !other.has_ended());
        if !drives.iter().any(|other| Arc::ptr_eq(other, drive)) {
            drives.push(drive.clone());
        }
        // The latest, and this one: an address is known as long as the list holds what lies there.
        let addresses = drives.iter().rev().filter(|other| !Arc::ptr_eq(other, drive));
        let mut addresses = std::iter::once(drive).chain(addresses).map(|drive| Arc::as_ptr(drive).addr());
        for known in &self.known {
            known.store(addresses.next().unwrap_or(0), Relaxed);
        }
    }
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
    /// Enters, as a request of the worker of `drive`.
    pub(crate) fn enter(&self, drive: &Arc<Drive>) -> EpochGuard<'_> {
        let slot = drive.number() % SLOTS;
        self.slots[slot].note(drive);
        let phase = self.phase.load(SeqCst) & 1;
        self.slots[slot].inside[phase].fetch_add(1, SeqCst);
        EpochGuard { epochs: self, slot, phase }
    }

    fn is_empty(&self, phase: usize) -> bool {
        self.slots.iter().all(|slot| slot.inside[phase].load(SeqCst) == 0)
    }

    /// The workers of those who are inside, and of whoever waits for them.
    pub(crate) fn awaited(&self) -> Vec<OneOf> {
        let inside = self.slots.iter().filter(|slot| !slot.is_empty());
        inside.map(|slot| slot.drives.lock().clone()).chain(self.one_wait.awaited()).collect()
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
    pub(crate) async fn wait(&self, clock: &impl Clock) {
        let one = self.one_wait.lock_by(clock.drive()).await;
        self.wait_alone(&one).await;
    }

    /// Waits until every request that was inside at `moment` has left.
    pub(crate) async fn wait_past(&self, clock: &impl Clock, moment: Moment) {
        let one = self.one_wait.lock_by(clock.drive()).await;
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
    use crate::sync::{Standing, drive};
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Waker};

    #[test]
    fn a_wait_ends_when_all_who_were_inside_have_left() {
        let epochs = ReadEpochs::default();
        let a = epochs.enter(&drive(0));
        let b = epochs.enter(&drive(5));
        let mut wait = pin!(epochs.wait(&Standing));
        let mut cx = Context::from_waker(Waker::noop());
        assert!(wait.as_mut().poll(&mut cx).is_pending());
        drop(a);
        assert!(wait.as_mut().poll(&mut cx).is_pending());
        let late = epochs.enter(&drive(1));
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
        let a = epochs.enter(&drive(0));
        let mut early = Box::pin(epochs.wait(&Standing));
        assert!(early.as_mut().poll(&mut cx).is_pending());
        let b = epochs.enter(&drive(1));
        let moment = epochs.moment().unwrap();
        drop((a, b));
        assert!(early.as_mut().poll(&mut cx).is_ready());
        assert!(!epochs.has_passed(moment), "the wait began before");
        let c = epochs.enter(&drive(2));
        let mut past = pin!(epochs.wait_past(&Standing, moment));
        assert!(past.as_mut().poll(&mut cx).is_pending());
        drop(c);
        assert!(past.as_mut().poll(&mut cx).is_ready());
        assert!(epochs.has_passed(moment));
        let _d = epochs.enter(&drive(3));
        assert!(
            pin!(epochs.wait_past(&Standing, moment)).poll(&mut cx).is_ready(),
            "nobody else is waited for"
        );
    }

    #[test]
    fn who_is_inside_is_known() {
        let epochs = ReadEpochs::default();
        assert!(epochs.awaited().is_empty());
        // More than are known without a lock, all of one slot.
        let drives: Vec<_> = (0..3 * KNOWN).map(|number| drive(number * SLOTS)).collect();
        for one in drives.iter().chain(&drives) {
            let inside = epochs.enter(one);
            let awaited = epochs.awaited();
            assert!(awaited.len() == 1 && awaited[0].iter().any(|other| Arc::ptr_eq(other, one)));
            drop(inside);
            assert!(epochs.awaited().is_empty());
        }
    }
}
