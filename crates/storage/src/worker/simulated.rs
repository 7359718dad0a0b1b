//! A worker of a simulated world, and the holds that its scheduler has on it.

use super::Worker;
use crate::backend::Backend;
use crate::memory::FreeList;
use crate::notify::Notifier;
use crate::simulated::SimulatedQueue;
use std::io;
use std::sync::Arc;

impl Worker {
    /// A worker on `queue`, whose pool keeps `pool_bytes` bytes of free buffers. It ends when its world says so, not at
    /// the end of its thread. `sibling` makes another worker of the same world, which works for others as if on a thread
    /// of its own.
    ///
    /// # Errors
    /// The process has no file descriptor left.
    pub fn simulated(
        queue: Box<dyn SimulatedQueue>,
        pool_bytes: usize,
        sibling: impl Fn() -> Self + 'static,
    ) -> io::Result<Self> {
        let notifier = Arc::new(Notifier::new()?);
        Ok(Self::with_backend(
            Backend::Sim(queue),
            notifier,
            FreeList::new(pool_bytes),
            None,
            Some(Box::new(sibling)),
        ))
    }

    /// Whether a task is to be polled, or somebody has asked for a turn.
    pub fn has_ready(&self) -> bool {
        self.inner.executor.has_ready() || self.inner.drive.is_asked()
    }

    /// Whether it is being run, further up the stack.
    pub fn is_in_turn(&self) -> bool {
        self.inner.turns.get() > 0
    }

    /// Tasks that are not over.
    pub fn live_tasks(&self) -> usize {
        self.inner.executor.live_tasks()
    }

    /// Starts the operations taken over outside of a turn.
    pub fn submit_queued(&self) {
        self.inner.backend.borrow_mut().submit_queued();
    }

    /// Drops all tasks and timers where they stand. Operations in flight are abandoned.
    pub fn cancel_tasks(&self) {
        self.inner.executor.cancel_all();
        self.inner.timers.take();
    }
}
