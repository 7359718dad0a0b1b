//! A queue within a value that may be moved to another thread.
//!
//! The interfaces of monitors want queues that are `Send`, and use each on one thread from its first request on. The queue
//! waits, detached, in the value; with the first request it takes a seat on the thread that makes it.

use std::cell::RefCell;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use zebu::{DetachedQueue, Queue};

thread_local! {
    /// The queues that sit on this thread, and what tells them apart.
    static SEATED: RefCell<Vec<(Arc<()>, Rc<Queue>)>> = RefCell::default();
}

/// A queue, here or on its way.
pub(crate) struct Seat {
    /// No other seat has the same allocation.
    mark: Arc<()>,
    detached: Option<DetachedQueue>,
}

impl Seat {
    pub(crate) fn new(queue: DetachedQueue) -> Self {
        Self { mark: Arc::default(), detached: Some(queue) }
    }

    /// The queue, which belongs to this thread from the first call on.
    ///
    /// # Errors
    /// It belongs to another thread.
    pub(crate) fn queue(&mut self) -> io::Result<Rc<Queue>> {
        SEATED.with_borrow_mut(|seated| {
            if let Some(queue) = self.detached.take() {
                seated.push((Arc::clone(&self.mark), Rc::new(queue.attach())));
            }
            let found = seated.iter().find(|(mark, _)| Arc::ptr_eq(mark, &self.mark));
            found
                .map(|(_, queue)| Rc::clone(queue))
                .ok_or_else(|| io::Error::other("the queue is used by another thread"))
        })
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        // On another thread nothing is found: the queue ends with its own thread.
        let queue = SEATED.try_with(|seated| {
            let mut seated = seated.borrow_mut();
            let at = seated.iter().position(|(mark, _)| Arc::ptr_eq(mark, &self.mark));
            at.map(|at| seated.swap_remove(at))
        });
        drop(queue);
    }
}
