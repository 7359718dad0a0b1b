//! Who may change the image now: requests of the guest together, or one operation on the whole image alone.
//!
//! A change (write, zero, discard, resize) enters before it looks anything up and leaves when it is linked. An
//! operation that rewrites mappings wholesale waits until all have left and keeps new ones waiting; reads go on, until
//! it stops them as well for the moment in which one mapping replaces another.
//!
//! Entering costs two atomic operations on a cache line of the worker's own.

use crate::Result;
use crate::gate::{Gate, GateGuard};
use crate::qcow2::grace::GraceGuard;
use crate::qcow2::state::Qcow2;
use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Mutex, PoisonError};
use std::task::{Poll, Waker};
use zebu_storage::Worker;

const SLOTS: usize = 16;

/// Changes under way, by worker.
#[repr(align(128))]
#[derive(Debug, Default)]
struct Slot(AtomicU64);

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Turns {
    slots: [Slot; SLOTS],
    changes_stopped: AtomicBool,
    reads_stopped: AtomicBool,
    alone: Gate,
    wakers: Mutex<Vec<Waker>>,
}

/// A change under way.
#[derive(Debug)]
pub(crate) struct ChangeTurn<'a> {
    turns: &'a Turns,
    slot: usize,
}

/// Nobody else changes the image.
#[derive(Debug)]
pub(crate) struct Alone<'a> {
    turns: &'a Turns,
    _one_at_a_time: GateGuard<'a>,
}

/// Nobody reads the image either.
#[derive(Debug)]
pub(crate) struct ReadsStopped<'a>(&'a Turns);

impl Turns {
    /// Takes part in changing, once nobody is alone. `worker` spreads the counters.
    pub(crate) async fn change(&self, worker: usize) -> ChangeTurn<'_> {
        let slot = worker % SLOTS;
        loop {
            self.slots[slot].0.fetch_add(1, SeqCst);
            let turn = ChangeTurn { turns: self, slot };
            if !self.changes_stopped.load(SeqCst) {
                return turn;
            }
            drop(turn);
            self.until(|| !self.changes_stopped.load(SeqCst)).await;
        }
    }

    /// Waits until no change is under way and keeps others out.
    pub(crate) async fn alone(&self) -> Alone<'_> {
        let one_at_a_time = self.alone.enter().await;
        self.changes_stopped.store(true, SeqCst);
        // From here on, dropping lets the others in again.
        let alone = Alone { turns: self, _one_at_a_time: one_at_a_time };
        self.until(|| self.slots.iter().all(|slot| slot.0.load(SeqCst) == 0)).await;
        alone
    }

    async fn until(&self, condition: impl Fn() -> bool) {
        poll_fn(|cx| {
            if condition() {
                return Poll::Ready(());
            }
            self.wakers.lock().unwrap_or_else(PoisonError::into_inner).push(cx.waker().clone());
            // It may have come true before the waker was there to be called.
            if condition() { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    fn wake(&self) {
        let wakers = std::mem::take(&mut *self.wakers.lock().unwrap_or_else(PoisonError::into_inner));
        for waker in wakers {
            waker.wake();
        }
    }
}

impl Drop for ChangeTurn<'_> {
    fn drop(&mut self) {
        self.turns.slots[self.slot].0.fetch_sub(1, SeqCst);
        if self.turns.changes_stopped.load(SeqCst) {
            self.turns.wake();
        }
    }
}

impl Drop for Alone<'_> {
    fn drop(&mut self) {
        self.turns.changes_stopped.store(false, SeqCst);
        self.turns.wake();
    }
}

impl Drop for ReadsStopped<'_> {
    fn drop(&mut self) {
        self.0.reads_stopped.store(false, SeqCst);
        self.0.wake();
    }
}

impl Qcow2 {
    /// Begins a change: waits for its turn, and does what must be done before the first one of an opening.
    pub(crate) async fn begin_change(&self, worker: &Worker) -> Result<ChangeTurn<'_>> {
        let turn = self.turns.change(worker.id()).await;
        self.before_write(worker).await?;
        Ok(turn)
    }

    /// Begins a read: its guard is held until its I/O is complete.
    pub(crate) async fn begin_read(&self, worker: &Worker) -> GraceGuard<'_> {
        loop {
            let inside = self.grace.enter(worker.id());
            if !self.turns.reads_stopped.load(SeqCst) {
                return inside;
            }
            drop(inside);
            self.turns.until(|| !self.turns.reads_stopped.load(SeqCst)).await;
        }
    }

    /// Waits until no read is under way and keeps new ones waiting; the caller is alone.
    pub(crate) async fn stop_reads(&self) -> ReadsStopped<'_> {
        self.turns.reads_stopped.store(true, SeqCst);
        let stopped = ReadsStopped(&self.turns);
        self.grace.wait().await;
        stopped
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::Future;
    use std::pin::pin;
    use std::task::Context;

    #[test]
    fn one_who_wants_to_be_alone_waits_for_changes_and_holds_up_others() {
        let turns = Turns::default();
        let mut cx = Context::from_waker(Waker::noop());
        let mut first = pin!(turns.change(3));
        let Poll::Ready(change) = first.as_mut().poll(&mut cx) else { panic!("nobody is alone yet") };
        let mut alone = pin!(turns.alone());
        assert!(alone.as_mut().poll(&mut cx).is_pending(), "a change is under way");
        let mut second = pin!(turns.change(4));
        assert!(second.as_mut().poll(&mut cx).is_pending(), "somebody waits to be alone");
        drop(change);
        let Poll::Ready(guard) = alone.as_mut().poll(&mut cx) else { panic!("no change is left") };
        assert!(second.as_mut().poll(&mut cx).is_pending());
        drop(guard);
        assert!(second.as_mut().poll(&mut cx).is_ready());
    }

    #[test]
    fn giving_up_the_wait_lets_others_in() {
        let turns = Turns::default();
        let mut cx = Context::from_waker(Waker::noop());
        let mut first = pin!(turns.change(0));
        let Poll::Ready(_change) = first.as_mut().poll(&mut cx) else { panic!("nobody is alone yet") };
        {
            let mut alone = pin!(turns.alone());
            assert!(alone.as_mut().poll(&mut cx).is_pending());
        }
        let mut second = pin!(turns.change(0));
        assert!(second.as_mut().poll(&mut cx).is_ready());
    }
}
