//! Reads past all copies, for those who found that a copy can't be right.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// While it lives, reads of the disk are answered by the server, and copies of what they read are given up.
#[derive(Debug)]
pub struct Afresh(Arc<AtomicUsize>);

impl Drop for Afresh {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Release);
    }
}

/// Counts the living [`Afresh`] of a disk.
#[derive(Debug, Default)]
pub(crate) struct AfreshCount(Arc<AtomicUsize>);

impl AfreshCount {
    /// One more.
    pub(crate) fn add(&self) -> Afresh {
        self.0.fetch_add(1, Ordering::Release);
        Afresh(Arc::clone(&self.0))
    }

    /// Whether there is one.
    pub(crate) fn is_wanted(&self) -> bool {
        self.0.load(Ordering::Acquire) > 0
    }
}
