//! A worker's operations on sockets that are under way.

use crate::socket::SocketCompletion;
use slab::Slab;
use std::cell::RefCell;
use std::task::Waker;

/// The state of an operation.
pub(crate) enum State {
    /// Under way, and the task that waits for it.
    Waiting(Option<Waker>),
    Over(SocketCompletion),
    /// Nobody any more.
    Abandoned,
}

/// The socket operations of a worker that are not over, or whose end nobody has taken yet.
#[derive(Default)]
pub(crate) struct SocketOps(pub(crate) RefCell<Slab<State>>);

impl SocketOps {
    /// Whether there is none.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.borrow().is_empty()
    }

    /// Wakes who waits for the completions.
    pub(crate) fn complete(&self, done: &mut Vec<SocketCompletion>) -> bool {
        let any = !done.is_empty();
        for completion in done.drain(..) {
            self.complete_one(completion);
        }
        any
    }

    /// Wakes who waits for the completion.
    pub(crate) fn complete_one(&self, completion: SocketCompletion) {
        let id = completion.id;
        let mut ops = self.0.borrow_mut();
        match ops.get_mut(id) {
            Some(State::Waiting(waker)) => {
                let waker = waker.take();
                ops[id] = State::Over(completion);
                drop(ops);
                if let Some(waker) = waker {
                    waker.wake();
                }
            }
            Some(State::Abandoned) => {
                ops.remove(id);
                drop(ops);
                // Buffers may have owners with destructors of their own.
                drop(completion);
            }
            Some(State::Over(_)) | None => {}
        }
    }
}
