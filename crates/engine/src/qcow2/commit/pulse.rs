//! The pulse of a commit that runs on the worker that asked for it.
//!
//! The thread of that worker has promised to drive it (`Worker::promise_to_drive`). Those who wait for the commit feel
//! its pulse now and then: they wake it, and look whether it took a turn. A disk that is slow does not keep a commit from
//! taking turns, but a thread that does something else does.

use crate::sync::atomic::{AtomicU64, Ordering::SeqCst};
use crate::sync::{LONG, Mutex};
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Waker;

/// The turns of a commit, and the way to ask for one more.
#[derive(Debug, Default)]
pub(crate) struct Pulse {
    turns: AtomicU64,
    waker: Mutex<Option<Waker>>,
}

impl Pulse {
    /// The commit `work`, whose turns are counted.
    pub(crate) async fn count<T>(&self, work: impl Future<Output = T>) -> T {
        let mut work = pin!(work);
        let value = poll_fn(|cx| {
            self.turns.fetch_add(1, SeqCst);
            let before = {
                let mut waker = self.waker.lock();
                if waker.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
                    None
                } else {
                    waker.replace(cx.waker().clone())
                }
            };
            // A waker is foreign code: none is dropped under the lock.
            drop(before);
            work.as_mut().poll(cx)
        })
        .await;
        let last = self.waker.lock().take();
        drop(last);
        value
    }

    /// Turns until now. Asks for another one.
    fn feel(&self) -> u64 {
        let turns = self.turns.load(SeqCst);
        let waker = self.waker.lock().clone();
        if let Some(waker) = waker {
            waker.wake();
        }
        turns
    }
}

/// Looks at the commits that one request waits for, one at each end of its patience.
#[derive(Debug, Default)]
pub(super) struct Watch {
    /// Number of the commit, and its turns, at the last look.
    seen: (u64, u64),
    /// Looks since something was different.
    still: u32,
}

impl Watch {
    /// Whether commit `number`, which has this pulse, has taken no turn for half a minute, although it was asked to.
    pub(super) fn has_stopped(&mut self, number: u64, pulse: &Pulse) -> bool {
        let now = (number, pulse.feel());
        self.still = if now == self.seen { self.still + 1 } else { 0 };
        self.seen = now;
        self.still >= LONG
    }
}
