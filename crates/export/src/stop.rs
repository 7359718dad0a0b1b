//! A signal to tasks on several threads that it is time to end.

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use zebu_storage::sync::{Mutex, WaitPlace, WaitRoom};

/// A switch that is thrown once. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub(crate) struct Stop(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    thrown: AtomicBool,
    waiting: Mutex<WaitRoom>,
}

impl Stop {
    pub(crate) fn throw(&self) {
        let mut waiting = self.0.waiting.lock();
        self.0.thrown.store(true, Ordering::Release);
        let wakers = waiting.take();
        drop(waiting);
        wakers.wake();
    }

    pub(crate) fn is_thrown(&self) -> bool {
        self.0.thrown.load(Ordering::Acquire)
    }

    /// Waits for it.
    pub(crate) fn wait(&self) -> impl Future<Output = ()> + use<> {
        Waiting { of: Arc::clone(&self.0), place: WaitPlace::default() }
    }

    /// The value of `future`, or `None` if the switch is thrown first.
    pub(crate) async fn or<T>(&self, future: impl Future<Output = T>) -> Option<T> {
        let (mut future, mut stop) = (pin!(future), pin!(self.wait()));
        std::future::poll_fn(|cx| {
            if let Poll::Ready(value) = future.as_mut().poll(cx) {
                return Poll::Ready(Some(value));
            }
            stop.as_mut().poll(cx).map(|()| None)
        })
        .await
    }
}

struct Waiting {
    of: Arc<Inner>,
    place: WaitPlace,
}

impl Future for Waiting {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let Self { of, place } = self.get_mut();
        let mut waiting = of.waiting.lock();
        if of.thrown.load(Ordering::Acquire) {
            return Poll::Ready(());
        }
        waiting.wait(place, cx.waker());
        Poll::Pending
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let waker = self.of.waiting.lock().leave(&mut self.place);
        drop(waker);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::pending;
    use std::task::{Wake, Waker};

    struct Task;

    impl Wake for Task {
        fn wake(self: Arc<Self>) {}
    }

    /// As a server has it whose requests wait for limits: each is a task of its own.
    #[test]
    fn who_has_waited_leaves_nothing_behind() {
        let stop = Stop::default();
        let mut wakers = Vec::new();
        for _ in 0..100 {
            let waker = Waker::from(Arc::new(Task));
            let mut request = pin!(stop.or(pending::<()>()));
            assert!(request.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
            assert!(request.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
            wakers.push(waker);
        }
        assert!(stop.0.waiting.lock().is_empty());
        let mut waiting = pin!(stop.wait());
        assert!(waiting.as_mut().poll(&mut Context::from_waker(&wakers[0])).is_pending());
        stop.throw();
        assert!(waiting.poll(&mut Context::from_waker(&wakers[1])).is_ready());
    }
}
