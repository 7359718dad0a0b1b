//! Tasks that wait for what atomics show.

use crate::sync::atomic::{AtomicBool, Ordering::SeqCst};
use crate::sync::{Mutex, WaitList};
use std::future::poll_fn;
use std::task::Poll;
use zebu_storage::sabotage::{self, Fault};

/// Tasks that wait for a condition that no lock guards, like an event count.
///
/// The code that makes the condition true calls [`WaitQueue::wake_all`] afterwards. Both sides use `SeqCst`: either the
/// waker is seen, or the task's second look sees the change.
#[derive(Debug, Default)]
pub(crate) struct WaitQueue {
    /// Whether the list may have wakers.
    any: AtomicBool,
    list: Mutex<WaitList>,
}

impl WaitQueue {
    /// Waits until `look` gives something.
    pub(crate) async fn until<T>(&self, mut look: impl FnMut() -> Option<T>) -> T {
        poll_fn(|cx| {
            if let Some(found) = look() {
                return Poll::Ready(found);
            }
            self.list.lock().add(cx.waker());
            self.any.store(true, SeqCst);
            if sabotage::is(Fault::LookOnce) {
                return Poll::Pending;
            }
            look().map_or(Poll::Pending, Poll::Ready)
        })
        .await
    }

    /// Has those who wait look again.
    pub(crate) fn wake_all(&self) {
        if self.any.load(SeqCst) {
            let wakers = {
                let mut list = self.list.lock();
                self.any.store(false, SeqCst);
                list.take()
            };
            wakers.wake();
        }
    }
}
