//! How a ring learns that a file was closed, to give up the reference that its table of files holds.

use crate::fresh_number::fresh_number;
use crate::notify::Notifier;
use crate::sync::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

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
        self.numbers.lock().push(number);
        self.any.store(true, Ordering::Release);
        self.notifier.notify();
    }

    /// Takes the files that were added since the last call; costs one load if there are none.
    pub(crate) fn take(&self) -> Vec<u64> {
        if self.any.load(Ordering::Relaxed) && self.any.swap(false, Ordering::AcqRel) {
            std::mem::take(&mut *self.numbers.lock())
        } else {
            Vec::new()
        }
    }
}

/// The rings that use a file.
pub(crate) struct RingUsers {
    /// Differs between all files that this process ever opened; never 0.
    number: u64,
    rings: Mutex<Vec<Arc<ClosedFiles>>>,
}

impl Default for RingUsers {
    fn default() -> Self {
        Self { number: fresh_number(), rings: Mutex::default() }
    }
}

impl RingUsers {
    /// A number that no other file of this process has or had; never 0.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// Has a ring told when the file is closed.
    pub(crate) fn add(&self, ring: &Arc<ClosedFiles>) {
        let mut rings = self.rings.lock();
        // Those whose only owner is this list are gone.
        rings.retain(|ring| Arc::strong_count(ring) > 1);
        rings.push(Arc::clone(ring));
    }
}

impl Drop for RingUsers {
    fn drop(&mut self) {
        for ring in std::mem::take(self.rings.get_mut()) {
            ring.add(self.number);
        }
    }
}
