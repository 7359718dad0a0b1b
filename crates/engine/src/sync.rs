//! What threads meet at: locks and atomics of the standard library. For `cargo xtask interleave` they are shuttle's, and
//! each use of them is a point where another thread may go on instead.

#[cfg(all(test, shuttle))]
pub(crate) use shuttle::sync::{Mutex, MutexGuard, RwLock, RwLockWriteGuard};
#[cfg(not(all(test, shuttle)))]
pub(crate) use std::sync::{Mutex, MutexGuard, RwLock, RwLockWriteGuard};

/// Atomics; their orders are the standard library's.
pub(crate) mod atomic {
    #[cfg(all(test, shuttle))]
    pub(crate) use shuttle::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize};
    pub(crate) use std::sync::atomic::Ordering;
    #[cfg(not(all(test, shuttle)))]
    pub(crate) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize};
}

/// How many places something is spread over, so that threads do not meet there. Few when interleavings are explored:
/// each place that is looked at is one more chance to switch, and they shall be where it matters.
pub(crate) const fn spread(places: usize) -> usize {
    if cfg!(all(test, shuttle)) { 2 } else { places }
}
