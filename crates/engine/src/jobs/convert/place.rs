//! Sharing or moving file ranges in the kernel, where files and offsets allow it.

use super::job::Job;
use super::options::CopyMode;
use crate::{Error, ErrorKind, Format, Result};
use zebu_storage::{File, FileId, IoError, Worker};

/// A range of a file that holds data.
pub(super) struct FileRange<'a> {
    pub(super) file: &'a File,
    pub(super) offset: u64,
    pub(super) len: u64,
}

/// How a range gets to the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Placement {
    /// Through buffers.
    Buffers,
    /// This part of it (offsets on the target's disk, within the range) is shared already.
    Shared { start: u64, end: u64 },
    /// copy_file_range.
    Range,
}

/// Block size of file systems with reflinks, as far as known: ranges are cut to it. A file system with larger blocks
/// refuses, and its ranges go through buffers.
const BLOCK: u64 = 4096;
/// Smallest range for which a reflink is tried unasked: a smaller one costs the file system more than copying it, and
/// leaves both files in pieces.
const WORTHWHILE: u64 = 64 << 10;
/// Most bytes shared by one call: so many pass between two looks at a cancellation.
const MAX_CLONE: u64 = 1 << 30;

/// Chooses the way for each range.
pub(super) struct Placer {
    /// Files that can't share blocks with the target.
    refused: Vec<FileId>,
}

/// The units that lie whole in a range, if blocks of the file and those of the target lie alike: their start and end
/// on the target's disk. A unit is a multiple of a block.
fn whole_units(file_offset: u64, target_offset: u64, len: u64, unit: u64) -> Option<(u64, u64)> {
    if file_offset % BLOCK != target_offset % BLOCK {
        return None;
    }
    let start = target_offset.checked_next_multiple_of(unit)?;
    let end = target_offset.checked_add(len)? / unit * unit;
    (start < end).then_some((start, end))
}

impl Placer {
    pub(super) fn new() -> Self {
        Self { refused: Vec::new() }
    }

    /// Moves what it can of a range that goes to `offset` of the target's disk, or says how the caller does.
    pub(super) async fn place(
        &mut self,
        worker: &Worker,
        job: &Job,
        source: &FileRange<'_>,
        offset: u64,
    ) -> Result<Placement> {
        let smallest = match job.copy {
            CopyMode::Buffers => return Ok(Placement::Buffers),
            CopyMode::Range => {
                // Only in a raw image is a guest offset a file offset.
                let raw = job.target.format() == Format::Raw;
                return Ok(if raw { Placement::Range } else { Placement::Buffers });
            }
            // Who asked for a fully allocated target wants no shared blocks, unless that was asked for, too.
            CopyMode::Auto if job.sparse_size == 0 => return Ok(Placement::Buffers),
            CopyMode::Auto => WORTHWHILE,
            CopyMode::Reflink => BLOCK,
        };
        // In a raw image, a guest offset is a file offset; elsewhere, clusters are what can be placed.
        let unit = match job.target.format() {
            Format::Raw => BLOCK,
            Format::Qcow2 => job.target.cluster_size(),
        };
        if unit < BLOCK || self.refused.contains(&source.file.id()) {
            return Ok(Placement::Buffers);
        }
        let Some((start, end)) = whole_units(source.offset, offset, source.len, unit) else {
            return Ok(Placement::Buffers);
        };
        if end - start < smallest {
            return Ok(Placement::Buffers);
        }
        let mut at = start;
        while at < end && !job.is_stopped() {
            let len = (end - at).min(MAX_CLONE);
            let from = source.offset + (at - offset);
            job.tracker.throttle(worker, len).await?;
            let (shared, refusal) = job.target.share_from(worker, source.file, from, at..at + len).await?;
            at += shared;
            if let Some(refusal) = refusal {
                if job.copy == CopyMode::Reflink {
                    return Err(refused(source.file, job, &refusal));
                }
                self.refused.push(source.file.id());
                break;
            }
        }
        Ok(if at > start { Placement::Shared { start, end: at } } else { Placement::Buffers })
    }
}

/// The error of a job that may only share blocks.
fn refused(source: &File, job: &Job, refusal: &IoError) -> Error {
    let kind = match Error::from(refusal.clone()).kind() {
        ErrorKind::NoSpace => ErrorKind::NoSpace,
        _ => ErrorKind::Unsupported,
    };
    let source = source.path().display();
    let message = format!("can't share blocks with '{source}': {refusal}; use --copy=auto to copy instead");
    Error::new(kind, message).on(job.target.path())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_units_whose_blocks_lie_alike_are_shared() {
        assert_eq!(whole_units(0, 0, 65536, BLOCK), Some((0, 65536)));
        assert_eq!(whole_units(327680, 1 << 20, 65536, BLOCK), Some((1 << 20, (1 << 20) + 65536)));
        assert_eq!(whole_units(100, 4096 + 100, 10000, BLOCK), Some((8192, 12288)));
        assert_eq!(whole_units(100, 4096 + 100, 8000, BLOCK), None);
        assert_eq!(whole_units(512, 0, 65536, BLOCK), None);
        assert_eq!(whole_units(0, 0, 4095, BLOCK), None);
        assert_eq!(whole_units(u64::MAX - 100, u64::MAX - 100, 50, BLOCK), None);
        assert_eq!(whole_units(4096, 8192, 200_000, 65536), Some((65536, 196608)));
        assert_eq!(whole_units(4096, 8192, 100_000, 65536), None);
    }
}
