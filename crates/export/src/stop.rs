//! A signal to tasks on several threads that it is time to end.

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};
use zebu_storage::sync::Mutex;

/// A switch that is thrown once. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub(crate) struct Stop(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    thrown: AtomicBool,
    waiting: Mutex<Vec<Waker>>,
}

impl Stop {
    pub(crate) fn throw(&self) {
        let mut waiting = self.0.waiting.lock();
        self.0.thrown.store(true, Ordering::Release);
        let wakers = std::mem::take(&mut *waiting);
        drop(waiting);
        wakers.into_iter().for_each(Waker::wake);
    }

    pub(crate) fn is_thrown(&self) -> bool {
        self.0.thrown.load(Ordering::Acquire)
    }

    /// Waits for it.
    pub(crate) fn wait(&self) -> impl Future<Output = ()> + use<> {
        Waiting(Arc::clone(&self.0))
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

struct Waiting(Arc<Inner>);

impl Future for Waiting {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let mut waiting = self.0.waiting.lock();
        if self.0.thrown.load(Ordering::Acquire) {
            return Poll::Ready(());
        }
        // Those that were dropped stay in the list until the next one comes.
        waiting.retain(|waker| !waker.will_wake(cx.waker()));
        waiting.push(cx.waker().clone());
        Poll::Pending
    }
}
