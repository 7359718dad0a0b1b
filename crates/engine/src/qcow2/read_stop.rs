//! Keeping reads out for the moment in which one mapping of the disk replaces another.

use crate::qcow2::grace::GraceGuard;
use crate::qcow2::state::Qcow2;
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::future::poll_fn;
use std::sync::PoisonError;
use std::task::{Poll, Waker};
use zebu_storage::Worker;

/// Whether reads wait, and those that do.
#[derive(Debug, Default)]
pub(crate) struct ReadStop {
    stopped: AtomicBool,
    waiting: Mutex<Vec<Waker>>,
}

/// Nobody reads the image.
#[derive(Debug)]
pub(crate) struct ReadsStopped<'a>(&'a ReadStop);

impl ReadStop {
    async fn until_over(&self) {
        poll_fn(|cx| {
            if !self.stopped.load(SeqCst) {
                return Poll::Ready(());
            }
            self.waiting.lock().unwrap_or_else(PoisonError::into_inner).push(cx.waker().clone());
            // It may have ended before the waker was there to be called.
            if self.stopped.load(SeqCst) { Poll::Pending } else { Poll::Ready(()) }
        })
        .await;
    }
}

impl Drop for ReadsStopped<'_> {
    fn drop(&mut self) {
        self.0.stopped.store(false, SeqCst);
        let waiting = std::mem::take(&mut *self.0.waiting.lock().unwrap_or_else(PoisonError::into_inner));
        for waker in waiting {
            waker.wake();
        }
    }
}

impl Qcow2 {
    /// Begins a read: its guard is held until its I/O is complete.
    pub(crate) async fn begin_read(&self, worker: &Worker) -> GraceGuard<'_> {
        loop {
            let inside = self.grace.enter(worker.id());
            if !self.read_stop.stopped.load(SeqCst) {
                return inside;
            }
            drop(inside);
            self.read_stop.until_over().await;
        }
    }

    /// Waits until no read is under way and keeps new ones waiting. The caller is alone ([`crate::turnstile`]), so
    /// there is one at a time.
    pub(crate) async fn stop_reads(&self) -> ReadsStopped<'_> {
        self.read_stop.stopped.store(true, SeqCst);
        let stopped = ReadsStopped(&self.read_stop);
        self.grace.wait().await;
        stopped
    }
}
