//! The end of a backup or a checkpoint, for which guests wait no longer.

use crate::sync::atomic::{AtomicBool, Ordering::Acquire, Ordering::Release};
use crate::sync::{Mutex, WaitList};
use crate::Error;
use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;

/// Whether a job that guests wait for has ended, and why.
#[derive(Debug, Default)]
pub(super) struct Fate {
    has_ended: AtomicBool,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    failure: Option<Error>,
    waiting: WaitList,
}

impl Fate {
    pub(super) fn has_ended(&self) -> bool {
        self.has_ended.load(Acquire)
    }

    /// The reason why it can't become whole, or stay so.
    pub(super) fn failure(&self) -> Option<Error> {
        self.state.lock().failure.clone()
    }

    /// Ends it because it can't become whole, or stay so.
    pub(super) fn fail(&self, error: Error) {
        let mut state = self.state.lock();
        if !self.has_ended() {
            state.failure.get_or_insert(error);
        }
        drop(state);
        self.end();
    }

    /// Ends it: guests wait for nothing any more.
    pub(super) fn end(&self) {
        // Before the guests are let go: whoever has read what they write then sees that it has ended.
        self.has_ended.store(true, Release);
        let waiting = self.state.lock().waiting.take();
        waiting.wake();
    }

    /// The result of `work`, or `None` if the job ends first.
    pub(super) async fn or<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        let mut work = pin!(work);
        poll_fn(|cx| {
            if let Poll::Ready(value) = work.as_mut().poll(cx) {
                return Poll::Ready(Some(value));
            }
            let mut state = self.state.lock();
            if self.has_ended() {
                return Poll::Ready(None);
            }
            state.waiting.add(cx.waker());
            Poll::Pending
        })
        .await
    }
}
