//! Sources whose length shows when they have been read, such as the streams of packed files.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Not known yet. No disk is so long.
const UNKNOWN: u64 = u64::MAX;

/// The end of a source that is read in order and that learns its length at the end. Until then, the source counts as longer;
/// it reads as zero past its end. Clones are the same end.
#[derive(Debug, Clone)]
pub struct SourceEnd(Arc<Ends>);

#[derive(Debug)]
struct Ends {
    end: AtomicU64,
    expected: AtomicU64,
}

impl Default for SourceEnd {
    fn default() -> Self {
        Self(Arc::new(Ends { end: AtomicU64::new(UNKNOWN), expected: AtomicU64::new(0) }))
    }
}

impl SourceEnd {
    /// An end that is not known yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Notes how many bytes there are likely to be: for the progress of the job alone.
    pub fn expect(&self, bytes: u64) {
        self.0.expected.store(bytes, Ordering::Relaxed);
    }

    /// Notes how many bytes there are, a multiple of 512. The source calls this before it answers the first read that
    /// goes on past them.
    pub fn set(&self, bytes: u64) {
        self.0.end.store(bytes, Ordering::Release);
    }

    /// Bytes of the source, once they are known.
    pub fn get(&self) -> Option<u64> {
        Some(self.0.end.load(Ordering::Acquire)).filter(|end| *end != UNKNOWN)
    }

    /// Bytes of the source as far as is known, or likely.
    pub(super) fn likely(&self) -> u64 {
        self.get().unwrap_or_else(|| self.0.expected.load(Ordering::Relaxed))
    }
}
