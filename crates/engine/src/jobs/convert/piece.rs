//! Units of work, handed from the task that walks the mapping to those that move data.

use super::source_range::SourceRange;
use crate::transfer::Transfer;

/// A piece of work for the tasks that move data. Offsets are on the target's disk.
pub(super) enum Piece {
    /// Read, scan, write: at most one chunk, within one source.
    Copy {
        /// Index of the source.
        part: usize,
        offset: u64,
        len: usize,
    },
    /// Make the range read as zero.
    Zero { offset: u64, len: u64 },
    /// Let the kernel move data from a file: whole clusters of the target.
    Range {
        /// Index of the source.
        part: usize,
        source: SourceRange,
        offset: u64,
        how: Transfer,
    },
}
