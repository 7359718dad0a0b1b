//! The simulated completion queue of a worker.

use crate::core::Core;
use crate::rng::SimRng;
use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;
use zebu_storage::Worker;
use zebu_storage::simulated::{Completion, Job, OpId, OpRequest, SimulatedQueue};

/// Adds a worker to a world. Its scheduler, which owns the workers, is told.
pub(crate) fn add_worker(core: &Rc<RefCell<Core>>, rng: SimRng) -> Worker {
    let (port, pool_bytes, workers) = core.borrow_mut().add_port();
    let rng = Rc::new(RefCell::new(rng));
    let queue = SimBackend { core: Rc::clone(core), port, queued: Vec::new(), rng: Rc::clone(&rng) };
    let core = Rc::clone(core);
    let sibling = move || {
        let sibling = add_worker(&core, rng.borrow_mut().fork());
        core.borrow_mut().background.insert(sibling.id());
        sibling
    };
    let worker = Worker::simulated(Box::new(queue), pool_bytes, sibling).expect("an eventfd");
    if let Some(workers) = workers {
        workers.borrow_mut().push(worker.clone());
    }
    worker
}

/// One worker's door to its world.
struct SimBackend {
    core: Rc<RefCell<Core>>,
    port: usize,
    queued: Vec<(OpId, Box<OpRequest>)>,
    /// Chooses what happens while the worker blocks.
    rng: Rc<RefCell<SimRng>>,
}

impl SimBackend {
    /// Whether this is the worker of a thread that calls and waits.
    fn is_caller(&self) -> bool {
        self.core.borrow().callers.contains(&self.port)
    }

    /// The workers that go on while this one blocks: those of the background. A thread that calls has all others beside it
    /// that are not in the middle of something further up the stack.
    fn siblings(&self) -> Vec<Worker> {
        let core = self.core.borrow();
        let Some(workers) = core.workers.upgrade() else { return Vec::new() };
        let is_caller = self.is_caller();
        let goes_on = |worker: &&Worker| {
            let port = worker.id();
            let is_other = port != self.port && !core.callers.contains(&port);
            is_other && (core.background.contains(&port) || is_caller && !worker.is_in_turn())
        };
        workers.borrow().iter().filter(goes_on).cloned().collect()
    }

    fn is_runnable(&self, worker: &Worker) -> bool {
        let has_done = self.core.borrow().has_done(worker.id());
        has_done || worker.has_ready() || worker.next_timer() == Some(Duration::ZERO)
    }
}

impl SimulatedQueue for SimBackend {
    fn number(&self) -> usize {
        self.port
    }

    fn submit(&mut self, id: OpId, request: Box<OpRequest>) {
        self.queued.push((id, request));
    }

    fn submit_queued(&mut self) {
        let is_caller = self.is_caller();
        let mut core = self.core.borrow_mut();
        for (id, request) in self.queued.drain(..) {
            let op = core.submit(self.port, id, request);
            if let Some(op) = op.filter(|_| is_caller) {
                core.do_at_once(op);
            }
        }
    }

    fn reap(&mut self, done: &mut Vec<Completion>) {
        self.core.borrow_mut().reap(self.port, done);
    }

    /// The worker blocks in its own call and not under the scheduler of the world: operations of the whole world go
    /// on, in random order, and background workers do, but no other worker does, unless this is a thread that calls.
    ///
    /// # Panics
    /// If it waits for something that no operation can bring.
    fn wait(&mut self, timeout: Option<Duration>, done: &mut Vec<Completion>) {
        self.submit_queued();
        let deadline = timeout.map(|timeout| self.core.borrow().now.saturating_add(timeout));
        loop {
            self.reap(done);
            if !done.is_empty() {
                return;
            }
            let mut siblings = self.siblings();
            let timer = siblings.iter().filter_map(Worker::next_timer).min();
            siblings.retain(|worker| self.is_runnable(worker));
            if !siblings.is_empty()
                && (self.core.borrow().ready().is_empty() || self.rng.borrow_mut().chance(1, 2))
            {
                self.rng.borrow_mut().pick(&siblings).poll();
                // It may have woken this one.
                return;
            }
            let mut core = self.core.borrow_mut();
            let jobs = core.jobs();
            let ready = core.ready();
            if !jobs.is_empty() && (ready.is_empty() || self.rng.borrow_mut().chance(1, 2)) {
                let job = core.take_job(*self.rng.borrow_mut().pick(&jobs));
                drop(core);
                if let Some(job) = job {
                    job();
                }
                // It may have woken somebody.
                return;
            }
            if !ready.is_empty() {
                core.advance(*self.rng.borrow_mut().pick(&ready));
                continue;
            }
            let timer = timer.map(|left| core.now.saturating_add(left));
            match (core.next_delay().into_iter().chain(timer).min(), deadline) {
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

    fn in_flight(&self) -> usize {
        self.queued.len() + self.core.borrow().in_flight(self.port)
    }

    fn now(&self) -> Duration {
        self.core.borrow().now
    }

    fn run_blocking(&mut self, job: Job) {
        self.core.borrow_mut().add_job(self.port, job);
    }
}
