//! Grace periods: knowing when no request can still use a host cluster that was unlinked (as RCU does).
//!
//! A request enters before it looks a mapping up and leaves when its I/O on that mapping is complete. A cluster that
//! was unlinked before [`Grace::wait`] was called is used by nobody when it returns: whoever entered earlier has
//! left, whoever enters later sees the new mapping.

use crate::gate::Gate;
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::future::poll_fn;
use std::sync::PoisonError;
use std::task::{Poll, Waker};
use zebu_storage::sabotage::{self, Fault};

const SLOTS: usize = crate::sync::spread(16);

/// Counters of requests inside, by worker (so that workers share no cache line) and phase.
#[repr(align(128))]
#[derive(Debug, Default)]
struct Slot {
    inside: [AtomicU64; 2],
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Grace {
    slots: [Slot; SLOTS],
    phase: AtomicUsize,
    waiting: AtomicBool,
    wakers: Mutex<Vec<Waker>>,
    one_at_a_time: Gate,
}

/// A request that is inside.
#[derive(Debug)]
pub(crate) struct GraceGuard<'a> {
    grace: &'a Grace,
    slot: usize,
    phase: usize,
}

impl Grace {
    /// Enters. `worker` spreads the counters.
    pub(crate) fn enter(&self, worker: usize) -> GraceGuard<'_> {
        let slot = worker % SLOTS;
        let phase = self.phase.load(SeqCst) & 1;
        self.slots[slot].inside[phase].fetch_add(1, SeqCst);
        GraceGuard { grace: self, slot, phase }
    }

    fn is_empty(&self, phase: usize) -> bool {
        self.slots.iter().all(|slot| slot.inside[phase].load(SeqCst) == 0)
    }

    /// Waits until every request that was inside at the call has left.
    pub(crate) async fn wait(&self) {
        let _turn = self.one_at_a_time.enter().await;
        // Twice: a request may have read the phase before the first flip and counted itself after it; only the
        // second round is sure to wait for it.
        let rounds = if sabotage::is(Fault::FlipOnce) { 1 } else { 2 };
        for _ in 0..rounds {
            let old = self.phase.fetch_add(1, SeqCst) & 1;
            poll_fn(|cx| {
                if self.is_empty(old) {
                    return Poll::Ready(());
                }
                self.wakers.lock().unwrap_or_else(PoisonError::into_inner).push(cx.waker().clone());
                self.waiting.store(true, SeqCst);
                if self.is_empty(old) { Poll::Ready(()) } else { Poll::Pending }
            })
            .await;
        }
    }
}

impl Drop for GraceGuard<'_> {
    fn drop(&mut self) {
        self.grace.slots[self.slot].inside[self.phase].fetch_sub(1, SeqCst);
        if self.grace.waiting.load(SeqCst) {
            let wakers = {
                let mut wakers = self.grace.wakers.lock().unwrap_or_else(PoisonError::into_inner);
                self.grace.waiting.store(false, SeqCst);
                std::mem::take(&mut *wakers)
            };
            for waker in wakers {
                waker.wake();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::Future;
    use std::pin::pin;
    use std::task::Context;

    #[test]
    fn a_wait_ends_when_all_who_were_inside_have_left() {
        let grace = Grace::default();
        let a = grace.enter(0);
        let b = grace.enter(5);
        let mut wait = pin!(grace.wait());
        let mut cx = Context::from_waker(Waker::noop());
        assert!(wait.as_mut().poll(&mut cx).is_pending());
        drop(a);
        assert!(wait.as_mut().poll(&mut cx).is_pending());
        let late = grace.enter(1);
        drop(b);
        // `late` entered after the first flip: the second round waits for it as well, which is more than needed.
        let _ = wait.as_mut().poll(&mut cx);
        drop(late);
        assert!(wait.as_mut().poll(&mut cx).is_ready());
    }
}
