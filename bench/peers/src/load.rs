//! The requests of a run, handed out to whoever is free.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

pub(crate) struct Load {
    pub(crate) depth: u32,
    /// Bytes of a request.
    pub(crate) block: usize,
    pub(crate) write: bool,
    count: u64,
    step: u64,
    next: AtomicU64,
}

impl Load {
    pub(crate) fn new(count: u64, depth: u32, block: usize, step: u64, write: bool) -> Self {
        Self { depth, block, write, count, step, next: AtomicU64::new(0) }
    }

    /// The offset of the next request on a disk of `disk` bytes; none if all are given out. As in `zebu bench`, offsets
    /// wrap at the disk's size, and a request that would reach over the end is sent to the beginning.
    pub(crate) fn next(&self, disk: u64) -> Option<u64> {
        let index = self.next.fetch_add(1, Relaxed);
        let last = disk.checked_sub(self.block as u64)?;
        let offset = (u128::from(index) * u128::from(self.step) % u128::from(disk)) as u64;
        (index < self.count).then_some(if offset > last { 0 } else { offset })
    }
}
