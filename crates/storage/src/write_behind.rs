//! Writing behind: buffered writes of a file whose pages are not to stay in the page cache.
//!
//! For kernels and file systems without `RWF_DONTCACHE`. Ranges that were written are gathered into batches. When a batch
//! is full, its write-back begins, and that of the batch before is waited for; then its pages are dropped. So at most
//! two batches of a file are in the page cache.

use crate::sync::Mutex;
use rustix::io::Errno;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Bytes of a batch.
const BATCH: u64 = 8 << 20;
/// Ranges of a batch: many small ones are given out early.
const MOST_RANGES: usize = 256;

/// The ranges of a file that were written and may still be in the page cache.
#[derive(Default)]
pub(crate) struct WriteBehind {
    batches: Mutex<Batches>,
}

#[derive(Default)]
struct Batches {
    current: Vec<Range<u64>>,
    bytes: u64,
    /// The batch whose write-back has begun.
    begun: Vec<Range<u64>>,
}

/// Work that a full batch asks for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Due {
    /// Ranges whose write-back is to begin.
    begin: Vec<Range<u64>>,
    /// Ranges whose write-back is to be waited for; their pages go.
    drop: Vec<Range<u64>>,
}

impl WriteBehind {
    /// Notes that `range` was written; the work that is due.
    pub(crate) fn note(&self, range: Range<u64>) -> Option<Due> {
        let mut batches = self.batches.lock();
        batches.bytes += range.end - range.start;
        match batches.current.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => batches.current.push(range),
        }
        if batches.bytes < BATCH && batches.current.len() < MOST_RANGES {
            return None;
        }
        batches.bytes = 0;
        let begin = std::mem::take(&mut batches.current);
        let drop = std::mem::replace(&mut batches.begun, begin.clone());
        Some(Due { begin, drop })
    }
}

impl Due {
    /// Does it.
    ///
    /// # Errors
    /// The write-back failed, and the kernel will not tell a later flush through this descriptor: it counts as a
    /// failed flush.
    pub(crate) fn execute(&self, fd: BorrowedFd<'_>) -> Result<(), i32> {
        for range in &self.begin {
            sync_range(fd, range, libc::SYNC_FILE_RANGE_WRITE)?;
        }
        let whole = libc::SYNC_FILE_RANGE_WAIT_BEFORE
            | libc::SYNC_FILE_RANGE_WRITE
            | libc::SYNC_FILE_RANGE_WAIT_AFTER;
        for range in &self.drop {
            sync_range(fd, range, whole)?;
            drop_pages(fd, range.start, range.end - range.start);
        }
        Ok(())
    }
}

/// sync_file_range(2). A file system that has none is no failure: the next flush writes everything.
fn sync_range(fd: BorrowedFd<'_>, range: &Range<u64>, flags: libc::c_uint) -> Result<(), i32> {
    let (offset, len) = (range.start as libc::off64_t, (range.end - range.start) as libc::off64_t);
    // SAFETY: a system call without pointers, on a descriptor that is open.
    if unsafe { libc::sync_file_range(fd.as_raw_fd(), offset, len, flags) } == 0 {
        return Ok(());
    }
    match std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO) {
        libc::ENOSYS | libc::EOPNOTSUPP | libc::ESPIPE | libc::EINVAL | libc::EPERM | libc::EINTR => Ok(()),
        errno => Err(errno),
    }
}

/// Drops the clean pages of a range from the page cache; `len` 0: up to the end of the file. A refusal costs memory
/// only.
pub(crate) fn drop_pages(fd: BorrowedFd<'_>, offset: u64, len: u64) {
    let len = std::num::NonZeroU64::new(len);
    let done: Result<(), Errno> = rustix::fs::fadvise(fd, offset, len, rustix::fs::Advice::DontNeed);
    let _ = done;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_batch_begins_and_the_one_before_is_dropped() {
        let behind = WriteBehind::default();
        assert_eq!(behind.note(0..BATCH / 2), None);
        // Neighbours become one range.
        let one = |range: Range<u64>| Vec::from_iter([range]);
        let first = one(0..BATCH);
        assert_eq!(behind.note(BATCH / 2..BATCH), Some(Due { begin: first.clone(), drop: Vec::new() }));
        let due = behind.note(3 * BATCH..4 * BATCH);
        assert_eq!(due, Some(Due { begin: one(3 * BATCH..4 * BATCH), drop: first }));
    }

    #[test]
    fn many_small_ranges_are_a_batch() {
        let behind = WriteBehind::default();
        let due = (0..).find_map(|n| behind.note(n * 8192..n * 8192 + 512)).unwrap();
        assert_eq!(due.begin.len(), MOST_RANGES);
    }
}
