//! The simulated completion queue of a worker (see [`crate::backend`] for the contract).

use super::core::Core;
use super::rng::SimRng;
use crate::backend::Job;
use crate::notify::Notifier;
use crate::request::{Completion, OpId, OpRequest};
use std::cell::RefCell;
use std::os::fd::{AsFd, BorrowedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// One worker's door to its world.
pub(crate) struct SimBackend {
    core: Rc<RefCell<Core>>,
    port: usize,
    queued: Vec<(OpId, Box<OpRequest>)>,
    notifier: Arc<Notifier>,
    /// Chooses what happens while the worker blocks.
    rng: SimRng,
}

impl SimBackend {
    pub(super) fn new(core: Rc<RefCell<Core>>, port: usize, notifier: Arc<Notifier>, rng: SimRng) -> Self {
        Self { core, port, queued: Vec::new(), notifier, rng }
    }

    /// The number of the worker in its world, from 0 in the order of making.
    pub(crate) fn number(&self) -> usize {
        self.port
    }

    pub(crate) fn submit(&mut self, id: OpId, request: Box<OpRequest>) {
        self.queued.push((id, request));
    }

    pub(crate) fn submit_queued(&mut self) {
        let mut core = self.core.borrow_mut();
        for (id, request) in self.queued.drain(..) {
            core.submit(self.port, id, request);
        }
    }

    pub(crate) fn reap(&mut self, done: &mut Vec<Completion>) {
        self.core.borrow_mut().reap(self.port, done);
    }

    /// The worker blocks in its own call and not under the scheduler of the world: operations of the whole world go
    /// on, in random order, but no other worker does.
    ///
    /// # Panics
    /// If it waits for something that no operation can bring.
    pub(crate) fn wait(&mut self, timeout: Option<Duration>, done: &mut Vec<Completion>) {
        self.submit_queued();
        let deadline = timeout.map(|timeout| self.core.borrow().now.saturating_add(timeout));
        loop {
            self.reap(done);
            if !done.is_empty() {
                return;
            }
            let mut core = self.core.borrow_mut();
            let jobs = core.jobs();
            let ready = core.ready();
            if !jobs.is_empty() && (ready.is_empty() || self.rng.chance(1, 2)) {
                let job = core.take_job(*self.rng.pick(&jobs));
                drop(core);
                if let Some(job) = job {
                    job();
                }
                // It may have woken somebody.
                return;
            }
            if !ready.is_empty() {
                core.advance(*self.rng.pick(&ready));
                continue;
            }
            match (core.next_delay(), deadline) {
                (Some(delay), limit) if limit.is_none_or(|limit| delay <= limit) => core.now = delay,
                (_, Some(limit)) => {
                    core.now = core.now.max(limit);
                    return;
                }
                (_, None) if core.in_flight(self.port) > 0 => core.give_up(self.port),
                (_, None) if std::thread::panicking() => return,
                (_, None) => panic!(
                    "worker {} blocks for ever: it has nothing in flight, no timer, and nobody else runs",
                    self.port
                ),
            }
        }
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.queued.len() + self.core.borrow().in_flight(self.port)
    }

    pub(crate) fn now(&self) -> Duration {
        self.core.borrow().now
    }

    pub(crate) fn run_blocking(&mut self, job: Job) {
        self.core.borrow_mut().add_job(self.port, job);
    }

    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.notifier.as_fd()
    }
}
