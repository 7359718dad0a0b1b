//! Locks, atomics, and the ways to wait on them: each mechanism once.
//!
//! They are the standard library's. For `cargo xtask interleave` they are shuttle's, and each use of one is a point
//! where another thread may go on instead.

mod arc_cell;
mod async_mutex;
mod gate;
mod mutex;
mod once_lock;
mod patience;
mod read_epochs;
mod request_barrier;
mod rw_lock;
mod wait_queue;

pub(crate) use arc_cell::ArcCell;
pub(crate) use async_mutex::{AsyncMutex, AsyncMutexGuard};
pub(crate) use gate::{Closed as ClosedGate, Gate};
pub(crate) use mutex::{Mutex, MutexGuard};
pub(crate) use once_lock::OnceLock;
pub(crate) use patience::{Clock, GrowingPatience, while_driven, with_patience};
#[cfg(test)]
pub(crate) use patience::{Standing, drive};
pub(crate) use read_epochs::{EpochGuard, Moment, ReadEpochs};
pub(crate) use request_barrier::{Alone, Inside, RequestBarrier};
pub(crate) use rw_lock::{RwLock, RwLockWriteGuard};
pub(crate) use wait_queue::WaitQueue;
pub(crate) use zebu_storage::sync::{WaitList, WaitPlace, WaitRoom, Wakers};

/// Atomics; their orders are the standard library's.
pub(crate) mod atomic {
    #[cfg(shuttle)]
    pub(crate) use shuttle::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize};
    pub(crate) use std::sync::atomic::Ordering;
    #[cfg(not(shuttle))]
    pub(crate) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize};
}

/// Number of parts that something is spread over, so that threads do not meet there. Schedules are explored with two:
/// each part that is looked at is one more chance to switch, and they shall be where it matters.
pub(crate) const fn spread(parts: usize) -> usize {
    if cfg!(shuttle) { 2 } else { parts }
}
