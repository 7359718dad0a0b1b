//! Requests that change an image, and now and then one that must be alone (a resize, a snapshot).
//!
//! Entering costs one counter of the worker's own cache line. Whoever wants to be alone shows that first, and then
//! waits until everybody inside has left; newcomers wait until it is over.

use crate::gate::{Gate, GateGuard};
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use crate::sync::{Mutex, MutexGuard};
use std::future::poll_fn;
use std::sync::PoisonError;
use std::task::{Poll, Waker};
use zebu_storage::sabotage::{self, Fault};

const SLOTS: usize = crate::sync::spread(16);

/// Requests inside, of the workers that share the slot.
#[repr(align(128))]
#[derive(Debug, Default)]
struct Slot(AtomicU64);

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Turnstile {
    slots: [Slot; SLOTS],
    closed: AtomicBool,
    waiting: Mutex<Vec<Waker>>,
    one_alone: Gate,
}

/// A request that is inside.
#[derive(Debug)]
pub(crate) struct Inside<'a> {
    turnstile: &'a Turnstile,
    slot: usize,
}

/// The request that is alone.
#[derive(Debug)]
pub(crate) struct Alone<'a> {
    turnstile: &'a Turnstile,
    _one: GateGuard<'a>,
}

impl Turnstile {
    fn waiting(&self) -> MutexGuard<'_, Vec<Waker>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self) {
        let waiting = std::mem::take(&mut *self.waiting());
        for waker in waiting {
            waker.wake();
        }
    }

    fn try_enter(&self, slot: usize) -> Option<Inside<'_>> {
        if sabotage::is(Fault::LookBeforeCount) {
            return self.enter_late(slot);
        }
        // Counted first, then looked: the one who wants to be alone shows it first, then counts.
        self.slots[slot].0.fetch_add(1, SeqCst);
        let inside = Inside { turnstile: self, slot };
        (!self.closed.load(SeqCst)).then_some(inside)
    }

    /// Enters; waits while another is alone. `worker` spreads the counters. Who is inside must not wait for anything
    /// that needs to be alone.
    pub(crate) async fn enter(&self, worker: usize) -> Inside<'_> {
        let slot = worker % SLOTS;
        if let Some(inside) = self.try_enter(slot) {
            return inside;
        }
        poll_fn(|cx| {
            if self.closed.load(SeqCst) {
                self.waiting().push(cx.waker().clone());
                if self.closed.load(SeqCst) {
                    return Poll::Pending;
                }
            }
            if let Some(inside) = self.try_enter(slot) {
                return Poll::Ready(inside);
            }
            // Closed again meanwhile.
            cx.waker().wake_by_ref();
            Poll::Pending
        })
        .await
    }

    /// Waits until nobody else is inside, and keeps others out until the guard is dropped.
    pub(crate) async fn alone(&self) -> Alone<'_> {
        let alone = Alone { _one: self.one_alone.enter().await, turnstile: self };
        self.closed.store(true, SeqCst);
        poll_fn(|cx| {
            if self.is_empty() {
                return Poll::Ready(());
            }
            self.waiting().push(cx.waker().clone());
            if self.is_empty() && !sabotage::is(Fault::LookOnce) { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
        alone
    }

    /// A faulty [`Turnstile::try_enter`]: it looks first, then counts.
    fn enter_late(&self, slot: usize) -> Option<Inside<'_>> {
        if self.closed.load(SeqCst) {
            return None;
        }
        self.slots[slot].0.fetch_add(1, SeqCst);
        Some(Inside { turnstile: self, slot })
    }

    fn is_empty(&self) -> bool {
        self.slots.iter().all(|slot| slot.0.load(SeqCst) == 0)
    }
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.turnstile.slots[self.slot].0.fetch_sub(1, SeqCst);
        if self.turnstile.closed.load(SeqCst) {
            self.turnstile.wake();
        }
    }
}

impl Drop for Alone<'_> {
    fn drop(&mut self) {
        self.turnstile.closed.store(false, SeqCst);
        self.turnstile.wake();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::pin;
    use std::sync::Arc;
    use std::task::{Context, Wake};

    fn poll<F: Future>(future: std::pin::Pin<&mut F>) -> Poll<F::Output> {
        future.poll(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn whoever_is_alone_waits_for_those_inside_and_keeps_newcomers_out() {
        let turnstile = Turnstile::default();
        let Poll::Ready(first) = poll(pin!(turnstile.enter(0))) else { panic!("nobody is alone") };
        let mut alone = pin!(turnstile.alone());
        assert!(poll(alone.as_mut()).is_pending());
        let mut late = pin!(turnstile.enter(17));
        assert!(poll(late.as_mut()).is_pending());
        drop(first);
        let Poll::Ready(alone) = poll(alone) else { panic!("everybody has left") };
        assert!(poll(late.as_mut()).is_pending());
        let mut second = pin!(turnstile.alone());
        assert!(poll(second.as_mut()).is_pending());
        drop(alone);
        let Poll::Ready(late) = poll(late) else { panic!("nobody is alone any more") };
        assert!(poll(second.as_mut()).is_pending());
        drop(late);
        assert!(poll(second.as_mut()).is_ready());
    }

    #[test]
    fn a_wait_that_is_given_up_lets_the_others_in() {
        let turnstile = Turnstile::default();
        let Poll::Ready(_inside) = poll(pin!(turnstile.enter(0))) else { panic!("nobody is alone") };
        {
            let mut alone = pin!(turnstile.alone());
            assert!(poll(alone.as_mut()).is_pending());
        }
        assert!(poll(pin!(turnstile.enter(1))).is_ready());
    }

    struct Unpark(std::thread::Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }

    fn block_on<T>(future: impl Future<Output = T>) -> T {
        let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
        let mut future = pin!(future);
        loop {
            if let Poll::Ready(value) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
                return value;
            }
            std::thread::park();
        }
    }

    #[test]
    fn threads_never_meet_the_one_who_is_alone() {
        let turnstile = Turnstile::default();
        let (inside, alone) = (AtomicU64::new(0), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for worker in 0..3 {
                let (turnstile, inside, alone) = (&turnstile, &inside, &alone);
                scope.spawn(move || {
                    for round in 0..2000 {
                        if round % 20 == worker {
                            let _alone = block_on(turnstile.alone());
                            alone.fetch_add(1, SeqCst);
                            assert_eq!((inside.load(SeqCst), alone.load(SeqCst)), (0, 1));
                            alone.fetch_sub(1, SeqCst);
                        } else {
                            let _inside = block_on(turnstile.enter(worker));
                            inside.fetch_add(1, SeqCst);
                            assert_eq!(alone.load(SeqCst), 0);
                            inside.fetch_sub(1, SeqCst);
                        }
                    }
                });
            }
        });
    }
}
