//! The end of a backup or a checkpoint, for which guests wait no longer.

use crate::Error;
use crate::sync::atomic::{AtomicBool, Ordering::Acquire, Ordering::Release};
use crate::sync::{Mutex, WaitPlace, WaitRoom};
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
    /// Guests' requests, each as long as it waits.
    waiting: WaitRoom,
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
        let (mut work, mut waiting) = (pin!(work), Waiting { of: self, place: WaitPlace::default() });
        poll_fn(|cx| {
            if let Poll::Ready(value) = work.as_mut().poll(cx) {
                return Poll::Ready(Some(value));
            }
            let mut state = self.state.lock();
            if self.has_ended() {
                return Poll::Ready(None);
            }
            state.waiting.wait(&mut waiting.place, cx.waker());
            Poll::Pending
        })
        .await
    }
}

/// One who waits for the end.
struct Waiting<'a> {
    of: &'a Fate,
    place: WaitPlace,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let waker = self.of.state.lock().waiting.leave(&mut self.place);
        drop(waker);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::task::{Context, Wake, Waker};

    struct Task;

    impl Wake for Task {
        fn wake(self: Arc<Self>) {}
    }

    #[test]
    fn requests_that_have_gone_leave_nothing_behind() {
        let fate = Fate::default();
        let mut wakers = Vec::new();
        for _ in 0..100 {
            let waker = Waker::from(Arc::new(Task));
            let mut request = pin!(fate.or(std::future::pending::<()>()));
            assert!(request.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
            wakers.push(waker);
        }
        assert!(fate.state.lock().waiting.is_empty());
        let mut request = pin!(fate.or(std::future::pending::<()>()));
        assert!(request.as_mut().poll(&mut Context::from_waker(&wakers[0])).is_pending());
        fate.end();
        assert_eq!(request.as_mut().poll(&mut Context::from_waker(&wakers[0])), Poll::Ready(None));
    }
}
