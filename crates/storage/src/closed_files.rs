//! How a ring learns that a file was closed, to give up the reference that its table of files holds.

use crate::notify::Notifier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Numbers of files that were closed since the ring last looked. Files die on any thread; only the ring's own thread
/// may change its table.
pub(crate) struct ClosedFiles {
    any: AtomicBool,
    numbers: Mutex<Vec<u64>>,
    notifier: Arc<Notifier>,
}

impl ClosedFiles {
    pub(crate) fn new(notifier: Arc<Notifier>) -> Self {
        Self { any: AtomicBool::new(false), numbers: Mutex::default(), notifier }
    }

    /// Notes that the file is closed, and wakes the ring's worker.
    pub(crate) fn add(&self, number: u64) {
        self.numbers.lock().unwrap_or_else(PoisonError::into_inner).push(number);
        self.any.store(true, Ordering::Release);
        self.notifier.notify();
    }

    /// What was added since the last call; costs one load if nothing was.
    pub(crate) fn take(&self) -> Vec<u64> {
        if self.any.load(Ordering::Relaxed) && self.any.swap(false, Ordering::AcqRel) {
            std::mem::take(&mut *self.numbers.lock().unwrap_or_else(PoisonError::into_inner))
        } else {
            Vec::new()
        }
    }
}
