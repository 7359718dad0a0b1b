//! Dispatch over the places that do the work: io_uring, threads, a simulated disk.
//!
//! Every backend has the same methods, called by the worker on its own thread:
//! - `submit(id, request)` takes a request over; nothing needs to happen before `submit_queued`;
//! - `submit_queued()` starts everything taken over so far, without waiting, and lets the kernel deliver what is
//!   complete;
//! - `reap(done)` appends what is complete, without waiting;
//! - `wait(timeout, done)` does `submit_queued`, waits until something is complete or the worker's notifier was
//!   signalled or `timeout` is over (`None`: no limit), and reaps. It may return early and empty-handed.
//! - `in_flight()` counts the operations that have no completion yet;
//! - `now()` is the time since an arbitrary start, by which timers go (a simulated one has its own clock, and its
//!   `wait` lets that clock run).
//!
//! A backend never calls back into the worker or its tasks, and is never called from within a completion.

use crate::memory::FixedBuffer;
use crate::request::{Completion, Job, OpId, OpRequest};
use crate::ring::Ring;
use crate::simulated::{Door, SimulatedQueue};
use crate::socket::{SocketCompletion, SocketRequest};
use crate::threads::Threads;
#[cfg(feature = "io-uring")]
use crate::uring::Uring;
use crate::worker_types::WorkerKind;
use std::os::fd::RawFd;
use std::time::Duration;

/// The implementation of a worker's I/O.
#[allow(clippy::large_enum_variant)] // one for each worker, where it stays
pub(crate) enum Backend {
    #[cfg(feature = "io-uring")]
    Uring(Uring),
    Threads(Threads),
    #[cfg_attr(not(feature = "simulated"), expect(dead_code))] // never made
    Sim(Door<dyn SimulatedQueue>),
}

/// Calls the same method of whichever backend it is.
macro_rules! dispatch {
    ($self:ident, $backend:ident => $call:expr) => {
        match $self {
            #[cfg(feature = "io-uring")]
            Self::Uring($backend) => $call,
            Self::Threads($backend) => $call,
            Self::Sim($backend) => $call,
        }
    };
}

impl Backend {
    #[cfg(feature = "io-uring")]
    pub(crate) fn of_ring(ring: Ring) -> Self {
        Self::Uring(ring)
    }
    #[cfg(not(feature = "io-uring"))]
    pub(crate) fn of_ring(ring: Ring) -> Self {
        match ring {}
    }
    /// The descriptor that it waits on, if it has one.
    pub(crate) fn descriptor(&self) -> Option<RawFd> {
        match self {
            #[cfg(feature = "io-uring")]
            Self::Uring(ring) => Some(ring.descriptor()),
            Self::Threads(_) | Self::Sim(_) => None,
        }
    }
    pub(crate) fn kind(&self) -> WorkerKind {
        match self {
            #[cfg(feature = "io-uring")]
            Self::Uring(_) => WorkerKind::IoUring,
            Self::Threads(_) => WorkerKind::Threads,
            Self::Sim(_) => WorkerKind::Simulated,
        }
    }
    /// The simulated queue, if it is one.
    pub(crate) fn simulated(&self) -> Option<&dyn SimulatedQueue> {
        match self {
            #[cfg(feature = "io-uring")]
            Self::Uring(_) => None,
            Self::Threads(_) => None,
            Self::Sim(queue) => Some(&**queue),
        }
    }
    pub(crate) fn submit(&mut self, id: OpId, request: Box<OpRequest>) {
        if request.file.storage().is_some() {
            match self {
                #[cfg(feature = "io-uring")]
                Self::Uring(b) => b.submit_to_storage(id, request),
                Self::Threads(b) => b.submit_to_storage(id, request),
                // A simulated world has its own clock, and knows only its own files.
                Self::Sim(b) => b.submit(id, request),
            }
            return;
        }
        dispatch!(self, b => b.submit(id, request));
    }
    /// The worker ends: storages of programs are asked to answer.
    pub(crate) fn cancel_storages(&mut self) {
        match self {
            #[cfg(feature = "io-uring")]
            Self::Uring(b) => b.cancel_storages(),
            Self::Threads(b) => b.cancel_storages(),
            Self::Sim(_) => {}
        }
    }
    /// Takes a socket operation over; gives it back if it is over at once (or if this backend has none).
    pub(crate) fn submit_socket(&mut self, id: usize, request: SocketRequest) -> Option<SocketCompletion> {
        match self {
            #[cfg(feature = "io-uring")]
            Self::Uring(b) => b.submit_socket(id, request),
            Self::Threads(b) => b.sockets().submit(id, request),
            Self::Sim(_) => Some(SocketCompletion { id, request, result: Err(libc::EOPNOTSUPP) }),
        }
    }
    /// Ends a socket operation soon; its completion comes in any case.
    pub(crate) fn cancel_socket(&mut self, id: usize) {
        match self {
            #[cfg(feature = "io-uring")]
            Self::Uring(b) => b.cancel_socket(id),
            Self::Threads(b) => b.sockets().cancel(id),
            Self::Sim(_) => {}
        }
    }
    /// Somebody waits for a lazy send: it is not to be left to a sleep that only others end.
    pub(crate) fn hurry_sockets(&mut self) {
        match self {
            #[cfg(feature = "io-uring")]
            Self::Uring(b) => b.hurry_sockets(),
            Self::Threads(_) | Self::Sim(_) => {}
        }
    }
    /// Appends the socket operations that are over. To be called after `reap` or `wait`.
    pub(crate) fn reap_sockets(&mut self, done: &mut Vec<SocketCompletion>) {
        match self {
            #[cfg(feature = "io-uring")]
            Self::Uring(b) => b.reap_sockets(done),
            Self::Threads(b) => b.reap_sockets(done),
            Self::Sim(_) => {}
        }
    }
    pub(crate) fn submit_queued(&mut self) {
        dispatch!(self, b => b.submit_queued());
    }
    pub(crate) fn reap(&mut self, done: &mut Vec<Completion>) {
        dispatch!(self, b => b.reap(done));
    }
    pub(crate) fn wait(&mut self, timeout: Option<Duration>, done: &mut Vec<Completion>) {
        dispatch!(self, b => b.wait(timeout, done));
    }
    pub(crate) fn in_flight(&self) -> usize {
        dispatch!(self, b => b.in_flight())
    }
    pub(crate) fn now(&self) -> Duration {
        dispatch!(self, b => b.now())
    }
    /// Runs `job` on another thread where there is one to spare, else at once.
    pub(crate) fn run_blocking(&mut self, job: Job) {
        dispatch!(self, b => b.run_blocking(job));
    }
    /// System calls made for I/O so far.
    pub(crate) fn syscalls(&self) -> u64 {
        match self {
            #[cfg(feature = "io-uring")]
            Self::Uring(b) => b.syscalls(),
            Self::Threads(b) => b.syscalls(),
            Self::Sim(_) => 0,
        }
    }
    /// From now on, completions that come between turns show in the notifier's signal.
    pub(crate) fn watch(&mut self) {
        match self {
            #[cfg(feature = "io-uring")]
            Self::Uring(b) => b.watch(),
            // They notify.
            Self::Threads(_) | Self::Sim(_) => {}
        }
    }
    /// Begins a turn: the signal need not show what comes during it.
    pub(crate) fn signal_off(&mut self) {
        match self {
            #[cfg(feature = "io-uring")]
            Self::Uring(b) => b.signal_off(),
            Self::Threads(_) | Self::Sim(_) => {}
        }
    }
    /// Ends a turn: the signal shows what comes from now on, and what came and was not reaped.
    pub(crate) fn signal_on(&mut self) {
        match self {
            #[cfg(feature = "io-uring")]
            Self::Uring(b) => b.signal_on(),
            Self::Threads(b) => b.signal_on(),
            Self::Sim(_) => {}
        }
    }
    /// Makes memory of the buffer pool known to the kernel, where that spares it work.
    #[cfg(feature = "io-uring")]
    pub(crate) fn register_buffer(&mut self, start: *mut u8, len: usize) -> Option<FixedBuffer> {
        match self {
            Self::Uring(b) => b.register_buffer(start, len),
            Self::Threads(_) | Self::Sim(_) => None,
        }
    }
    #[cfg(not(feature = "io-uring"))]
    #[allow(clippy::unused_self)] // as its counterpart
    pub(crate) fn register_buffer(&mut self, _: *mut u8, _: usize) -> Option<FixedBuffer> {
        None
    }
}
