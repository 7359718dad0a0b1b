//! A queue within a value that may be moved to another thread.
//!
//! The interfaces of monitors want queues that are `Send`, and use each on one thread from its first request on. The queue
//! waits, detached, in the value; with the first request it takes a seat on the thread that makes it.

use std::cell::RefCell;
use std::collections::HashMap;
use std::io;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use zebu::{DetachedQueue, Queue};

thread_local! {
    /// The queues that sit on this thread.
    static SEATED: RefCell<HashMap<u64, Rc<Queue>>> = RefCell::default();
}

/// A queue, here or on its way.
pub(crate) struct Seat {
    number: u64,
    detached: Option<DetachedQueue>,
}

impl Seat {
    pub(crate) fn new(queue: DetachedQueue) -> Self {
        static NUMBERS: AtomicU64 = AtomicU64::new(0);
        Self { number: NUMBERS.fetch_add(1, Ordering::Relaxed), detached: Some(queue) }
    }

    /// The queue, which belongs to this thread from the first call on.
    ///
    /// # Errors
    /// It belongs to another thread.
    pub(crate) fn queue(&mut self) -> io::Result<Rc<Queue>> {
        SEATED.with_borrow_mut(|seated| {
            if let Some(queue) = self.detached.take() {
                seated.insert(self.number, Rc::new(queue.attach()));
            }
            seated
                .get(&self.number)
                .cloned()
                .ok_or_else(|| io::Error::other("the queue is used by another thread"))
        })
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        // On another thread nothing is found: the queue ends with its own thread.
        let queue = SEATED.try_with(|seated| seated.borrow_mut().remove(&self.number));
        drop(queue);
    }
}
