//! The ranges of its source that a backup could not read.

use super::options::BackupReport;
use crate::jobs::convert::SkippedRange;
use crate::qcow2::bitmaps::Bits;
use std::ops::Range;
use std::sync::Arc;

/// Ranges that are reported one by one.
const MAX_REPORTED: usize = 1024;
/// log2 of the bytes that a bit stands for.
const GRANULARITY_BITS: u8 = 16;

/// The ranges that could not be read.
pub(super) struct Unreadable {
    /// Bytes of the disk.
    disk: u64,
    bytes: u64,
    count: u64,
    first: Vec<SkippedRange>,
    /// Where the backup may hold something else than the disk; more than that by parts of a granule. However many ranges
    /// there are, this does not grow with them.
    bits: Option<Arc<Bits>>,
}

impl Unreadable {
    /// Nothing yet, of a disk of so many bytes.
    pub(super) fn new(disk: u64) -> Self {
        Self { disk, bytes: 0, count: 0, first: Vec::new(), bits: None }
    }

    /// Notes a range that could not be read and is zero in the backup. Ranges come in order.
    pub(super) fn note(&mut self, range: SkippedRange) {
        self.doubt(range.offset..range.offset.saturating_add(range.len));
        self.bytes += range.len;
        self.count += 1;
        if self.first.len() < MAX_REPORTED {
            self.first.push(range);
        }
    }

    /// Notes a range that the backup holds, but perhaps not as the disk does.
    pub(super) fn doubt(&mut self, range: Range<u64>) {
        let disk = self.disk;
        self.bits.get_or_insert_with(|| Arc::new(Bits::new(disk, GRANULARITY_BITS))).mark(range);
    }

    /// The ranges in which the backup may differ from the disk; `None`: there are none.
    pub(super) fn bits(&self) -> Option<&Arc<Bits>> {
        self.bits.as_ref()
    }

    /// Whether a part of the range was noted.
    pub(super) fn touches(&self, range: Range<u64>) -> bool {
        let found = self.bits.as_ref().and_then(|bits| bits.next_dirty(range.start));
        found.is_some_and(|found| found.start < range.end)
    }

    /// Adds it to the report.
    pub(super) fn tell(self, report: &mut BackupReport) {
        report.unreadable = self.bytes;
        report.unreadable_range_count = self.count;
        report.unreadable_ranges = self.first;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Error, ErrorKind};

    #[test]
    fn the_list_is_cut_and_nothing_else() {
        let mut unreadable = Unreadable::new(1 << 40);
        assert!(unreadable.bits().is_none() && !unreadable.touches(0..1 << 40));
        for index in 0..3000 {
            let error = Error::new(ErrorKind::Io, "unreadable");
            unreadable.note(SkippedRange { offset: index << 20, len: 4096, error });
        }
        assert!(unreadable.touches(2999 << 20..(2999 << 20) + 1) && !unreadable.touches(3000 << 20..1 << 40));
        assert_eq!(unreadable.bits().map(|bits| bits.dirty_bytes()), Some(3000 << 16));
        let mut report = BackupReport::default();
        unreadable.tell(&mut report);
        assert_eq!((report.unreadable, report.unreadable_range_count), (3000 * 4096, 3000));
        assert_eq!(report.unreadable_ranges.len(), 1024);
    }
}
