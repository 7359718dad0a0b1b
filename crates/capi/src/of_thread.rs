//! The record of a thread: the words of its last failure, and the queues that belong to it. All of it ends with the thread.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::ffi::{CString, c_char, c_int};
use std::time::Duration;
use zebu_engine::{Completion, Queue};
use zebu_storage::ForkMark;

thread_local! {
    static OF_THREAD: OfThread = OfThread::default();
}

#[derive(Default)]
struct OfThread {
    said: RefCell<CString>,
    /// By their numbers.
    queues: RefCell<HashMap<usize, Held>>,
}

/// Makes `words` those of the last failure.
pub(crate) fn say(words: CString) {
    // A thread that is ending has no place for them, and nobody who asks.
    let _ = OF_THREAD.try_with(|own| own.said.replace(words));
}

/// The words of the last failure. They last until the next ones.
pub(crate) fn said() -> *const c_char {
    OF_THREAD.try_with(|own| own.said.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

/// Does `work` with the queues, which must not end in it.
pub(crate) fn with_queues<T>(work: impl FnOnce(&mut HashMap<usize, Held>) -> T) -> T {
    OF_THREAD.with(|own| work(&mut own.queues.borrow_mut()))
}

/// A queue, and what its next poll begins with.
pub(crate) struct Held {
    pub(crate) queue: Queue,
    pub(crate) made_in: ForkMark,
    /// Completions that the last poll had no room for.
    pub(crate) left: VecDeque<Completion>,
    /// Words of the failures that the last poll told of.
    pub(crate) words: Vec<CString>,
}

impl Held {
    pub(crate) fn new(queue: Queue) -> Self {
        Self { queue, made_in: ForkMark::here(), left: VecDeque::new(), words: Vec::new() }
    }

    /// Has the descriptor say that there are completions.
    pub(crate) fn show_what_is_left(&self) {
        if !self.left.is_empty() {
            self.queue.worker().show();
        }
    }

    /// Takes what has ended, at most so much, and waits for it if that is asked for.
    pub(crate) fn poll(&mut self, most: usize, timeout: c_int) -> Vec<Completion> {
        let mut done = Vec::new();
        if self.left.is_empty() {
            let timeout = u64::try_from(timeout).ok().map(Duration::from_millis);
            self.queue.wait(&mut done, timeout);
        } else {
            // The caller may have read from the descriptor what the ring said meanwhile.
            self.queue.poll(&mut done);
        }
        self.left.extend(done);
        let told = self.left.drain(..most.min(self.left.len())).collect();
        self.show_what_is_left();
        told
    }
}
