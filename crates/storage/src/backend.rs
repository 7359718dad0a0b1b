//! Dispatch over the places that do the work: io_uring, threads, a simulated disk.
//!
//! Every backend has the same six methods, called by the worker on its own thread:
//! - `submit(id, request)` takes a request over; nothing needs to happen before `submit_queued`;
//! - `submit_queued()` starts everything taken over so far, without waiting;
//! - `reap(done)` appends what is complete, without waiting;
//! - `wait(timeout, done)` does `submit_queued`, waits until something is complete or the worker's notifier was
//!   signalled or `timeout` is over (`None`: no limit), and reaps. It may return early and empty-handed.
//! - `in_flight()` counts the operations that have no completion yet;
//! - `now()` is the time since an arbitrary start, by which timers go (a simulated one has its own clock, and its
//!   `wait` lets that clock run).
//!
//! A backend never calls back into the worker or its tasks, and is never called from within a completion.

use crate::request::{Completion, OpId, OpRequest};
use crate::sim::SimBackend;
use crate::threads::Threads;
use crate::worker_types::WorkerKind;
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// A piece of computation for another thread.
pub(crate) type Job = Box<dyn FnOnce() + Send>;

/// What does the work of a worker.
pub(crate) enum Backend {
    Threads(Threads),
    Sim(SimBackend),
}

impl Backend {
    pub(crate) fn kind(&self) -> WorkerKind {
        match self {
            Self::Threads(_) => WorkerKind::Threads,
            Self::Sim(_) => WorkerKind::Simulated,
        }
    }
    pub(crate) fn submit(&mut self, id: OpId, request: Box<OpRequest>) {
        match self {
            Self::Threads(b) => b.submit(id, request),
            Self::Sim(b) => b.submit(id, request),
        }
    }
    pub(crate) fn submit_queued(&mut self) {
        match self {
            Self::Threads(b) => b.submit_queued(),
            Self::Sim(b) => b.submit_queued(),
        }
    }
    pub(crate) fn reap(&mut self, done: &mut Vec<Completion>) {
        match self {
            Self::Threads(b) => b.reap(done),
            Self::Sim(b) => b.reap(done),
        }
    }
    pub(crate) fn wait(&mut self, timeout: Option<Duration>, done: &mut Vec<Completion>) {
        match self {
            Self::Threads(b) => b.wait(timeout, done),
            Self::Sim(b) => b.wait(timeout, done),
        }
    }
    pub(crate) fn in_flight(&self) -> usize {
        match self {
            Self::Threads(b) => b.in_flight(),
            Self::Sim(b) => b.in_flight(),
        }
    }
    pub(crate) fn now(&self) -> Duration {
        match self {
            Self::Threads(b) => b.now(),
            Self::Sim(b) => b.now(),
        }
    }
    /// Runs `job` on another thread where there is one to spare, else at once.
    pub(crate) fn run_blocking(&mut self, job: Job) {
        match self {
            Self::Threads(b) => b.run_blocking(job),
            Self::Sim(b) => b.run_blocking(job),
        }
    }
    /// System calls made for I/O so far.
    pub(crate) fn syscalls(&self) -> u64 {
        match self {
            Self::Threads(b) => b.syscalls(),
            Self::Sim(_) => 0,
        }
    }
    /// Readable when there is something to reap or the notifier was signalled.
    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Threads(b) => b.as_fd(),
            Self::Sim(b) => b.as_fd(),
        }
    }
}
