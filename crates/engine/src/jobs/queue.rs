//! A bounded queue between the tasks of one thread: one task maps, several move data.

use crate::sync::WaitList;
use std::cell::{RefCell, RefMut};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::Poll;

struct State<T> {
    items: VecDeque<T>,
    capacity: usize,
    closed: bool,
    /// Tasks that wait for an item, for room, or for either to become impossible. Everyone is woken at every
    /// change and looks again: there are about as many tasks as requests in flight.
    waiting: WaitList,
}

/// The queue; clones are the same one.
pub(super) struct Queue<T>(Rc<RefCell<State<T>>>);

impl<T> Clone for Queue<T> {
    fn clone(&self) -> Self {
        Self(Rc::clone(&self.0))
    }
}

/// Wakes all who wait, with the state given back first.
fn wake_all<T>(mut state: RefMut<'_, State<T>>) {
    let waiting = state.waiting.take();
    drop(state);
    waiting.wake();
}

impl<T> Queue<T> {
    /// An empty queue of at most `capacity` items (at least 1).
    pub(super) fn new(capacity: usize) -> Self {
        let capacity = capacity.max(1);
        Self(Rc::new(RefCell::new(State {
            items: VecDeque::with_capacity(capacity),
            capacity,
            closed: false,
            waiting: WaitList::default(),
        })))
    }

    /// Appends an item, once there is room. False, and the item is dropped, if the queue is closed.
    pub(super) async fn push(&self, item: T) -> bool {
        let mut item = Some(item);
        poll_fn(|context| {
            let mut state = self.0.borrow_mut();
            if state.closed {
                return Poll::Ready(false);
            }
            if state.items.len() == state.capacity {
                state.waiting.add(context.waker());
                return Poll::Pending;
            }
            if let Some(item) = item.take() {
                state.items.push_back(item);
                wake_all(state);
            }
            Poll::Ready(true)
        })
        .await
    }

    /// Takes the first item, once there is one; `None` if the queue is closed and empty.
    pub(super) async fn pop(&self) -> Option<T> {
        poll_fn(|context| {
            let mut state = self.0.borrow_mut();
            if let Some(item) = state.items.pop_front() {
                wake_all(state);
                return Poll::Ready(Some(item));
            }
            if state.closed {
                return Poll::Ready(None);
            }
            state.waiting.add(context.waker());
            Poll::Pending
        })
        .await
    }

    /// Takes the first item, if there is one now.
    pub(super) fn try_pop(&self) -> Option<T> {
        let mut state = self.0.borrow_mut();
        let item = state.items.pop_front()?;
        wake_all(state);
        Some(item)
    }

    /// Lets no further item in; what is in the queue can still be taken.
    pub(super) fn close(&self) {
        let mut state = self.0.borrow_mut();
        state.closed = true;
        wake_all(state);
    }
}

/// Closes a queue when the task that fills it ends or is dropped, so that those that empty it never wait for good.
pub(super) struct CloseOnDrop<T>(pub(super) Queue<T>);

impl<T> Drop for CloseOnDrop<T> {
    fn drop(&mut self) {
        self.0.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::Future;
    use std::pin::pin;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Context, Wake, Waker};

    struct Count(AtomicUsize);
    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_full_queue_waits_and_an_empty_one_too() {
        let woken = Arc::new(Count(AtomicUsize::new(0)));
        let waker = Waker::from(Arc::clone(&woken));
        let mut context = Context::from_waker(&waker);
        let queue = Queue::new(1);

        let mut pop = pin!(queue.pop());
        assert!(pop.as_mut().poll(&mut context).is_pending());
        assert_eq!(pin!(queue.push(1)).poll(&mut context), Poll::Ready(true));
        assert_eq!(woken.0.load(Ordering::Relaxed), 1);

        let mut push = pin!(queue.push(2));
        assert!(push.as_mut().poll(&mut context).is_pending());
        assert_eq!(pop.poll(&mut context), Poll::Ready(Some(1)));
        assert_eq!(woken.0.load(Ordering::Relaxed), 2);
        assert_eq!(push.poll(&mut context), Poll::Ready(true));
    }

    #[test]
    fn a_closed_queue_gives_what_it_has_and_takes_nothing() {
        let waker = Waker::noop();
        let mut context = Context::from_waker(waker);
        let queue = Queue::new(4);
        assert_eq!(pin!(queue.push(7)).poll(&mut context), Poll::Ready(true));
        drop(CloseOnDrop(queue.clone()));
        assert_eq!(pin!(queue.push(8)).poll(&mut context), Poll::Ready(false));
        assert_eq!(pin!(queue.pop()).poll(&mut context), Poll::Ready(Some(7)));
        assert_eq!(pin!(queue.pop()).poll(&mut context), Poll::Ready(None));
    }
}
