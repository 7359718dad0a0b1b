//! A mutex whose holder may await.

use crate::sync::{Mutex, WaitList};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use zebu_storage::drive::{Drive, OneOf};
use zebu_storage::sabotage::{self, Fault};

/// A mutual exclusion lock that workers of any thread wait for without blocking.
///
/// The task that is polled first after the lock was given back gets it, so that a task whose worker is not polled holds
/// nobody up. It guards no value of its own: the fields that it guards say so.
#[derive(Debug, Default)]
pub(crate) struct AsyncMutex {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    held: bool,
    /// The worker of the holder, if that may be one that nobody drives.
    holder: Option<Arc<Drive>>,
    waiting: WaitList,
}

/// The lock, held until this is dropped.
#[derive(Debug)]
pub(crate) struct AsyncMutexGuard<'a>(&'a AsyncMutex);

impl AsyncMutex {
    /// Waits for the lock, for a holder that is driven.
    pub(crate) fn lock(&self) -> Lock<'_> {
        Lock { mutex: self, holder: None }
    }

    /// Waits for the lock, for a holder on the worker of `drive`.
    pub(crate) fn lock_by(&self, drive: Option<&Arc<Drive>>) -> Lock<'_> {
        Lock { mutex: self, holder: drive.cloned() }
    }

    /// The worker of the holder, if it is known.
    pub(crate) fn awaited(&self) -> Vec<OneOf> {
        let state = self.state.lock();
        state.holder.iter().map(|drive| vec![drive.clone()]).collect()
    }
}

impl Drop for AsyncMutexGuard<'_> {
    fn drop(&mut self) {
        let waiting = {
            let mut state = self.0.state.lock();
            state.held = false;
            drop(state.holder.take());
            state.waiting.take()
        };
        if sabotage::is(Fault::WakeOneAtMutex) { waiting.wake_first() } else { waiting.wake() }
    }
}

/// The wait for an [`AsyncMutex`].
#[derive(Debug)]
pub(crate) struct Lock<'a> {
    mutex: &'a AsyncMutex,
    holder: Option<Arc<Drive>>,
}

impl<'a> Future for Lock<'a> {
    type Output = AsyncMutexGuard<'a>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mutex = self.mutex;
        let mut state = mutex.state.lock();
        if !state.held {
            state.held = true;
            state.holder = self.holder.take();
            return Poll::Ready(AsyncMutexGuard(mutex));
        }
        state.waiting.add(cx.waker());
        Poll::Pending
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::task::Waker;

    fn poll<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
        Pin::new(future).poll(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn one_is_inside_at_a_time() {
        let mutex = AsyncMutex::default();
        let Poll::Ready(first) = poll(&mut mutex.lock()) else { panic!("it is free") };
        let mut second = mutex.lock();
        assert!(poll(&mut second).is_pending());
        drop(first);
        assert!(poll(&mut second).is_ready());
    }

    #[test]
    fn a_waiter_that_is_not_polled_holds_nobody_up() {
        let mutex = AsyncMutex::default();
        let Poll::Ready(first) = poll(&mut mutex.lock()) else { panic!("it is free") };
        let (mut sleeper, mut other) = (mutex.lock(), mutex.lock());
        assert!(poll(&mut sleeper).is_pending());
        assert!(poll(&mut other).is_pending());
        drop(first);
        assert!(poll(&mut other).is_ready());
    }
}
