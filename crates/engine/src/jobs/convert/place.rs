//! Sharing or moving file ranges in the kernel, where files and offsets allow it.

use super::job::Job;
use super::options::CopyMode;
use crate::transfer::{FileRange, Transfer};
use crate::{Error, ErrorKind, Format, Result};
use std::ops::Range;
use zebu_storage::{FileId, Worker};

/// How a range gets to the target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Placement {
    /// Through buffers.
    Buffers,
    /// This part of it (offsets on the target's disk, within the range) is shared already.
    Shared(Range<u64>),
    /// This part of it the kernel can copy.
    Range(Range<u64>),
}

/// Block size of file systems with reflinks, as far as known: ranges are cut to it. A file system with larger blocks
/// refuses, and its ranges go through buffers.
const BLOCK: u64 = 4096;
/// Smallest range for which a reflink is tried unasked: a smaller one costs the file system more than copying it, and
/// leaves both files in pieces.
const WORTHWHILE: u64 = 64 << 10;
/// Most bytes shared by one call: so many pass between two looks at a cancellation.
const MAX_CLONE: u64 = 256 << 20;

/// Chooses the way for each range.
pub(super) struct Placer {
    /// Files that can't share blocks with the target.
    refused: Vec<FileId>,
}

/// The part of `start..end` that consists of whole units.
fn whole_units(start: u64, end: u64, unit: u64) -> Option<Range<u64>> {
    let start = start.checked_next_multiple_of(unit)?;
    let end = end / unit * unit;
    (start < end).then_some(start..end)
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
        source: &FileRange,
        offset: u64,
    ) -> Result<Placement> {
        // In a raw image, a guest offset is a file offset; elsewhere, clusters are what can be placed.
        let unit = match job.target.format() {
            Format::Raw => 1,
            Format::Qcow2 => job.target.cluster_size(),
        };
        let end = offset.saturating_add(source.len);
        let smallest = match job.copy {
            CopyMode::Buffers => return Ok(Placement::Buffers),
            CopyMode::Range => {
                return Ok(whole_units(offset, end, unit).map_or(Placement::Buffers, Placement::Range));
            }
            // Who asked for a fully allocated target wants no shared blocks, unless that was asked for, too.
            CopyMode::Auto if job.sparse_size == 0 => return Ok(Placement::Buffers),
            CopyMode::Auto => WORTHWHILE,
            CopyMode::Reflink => BLOCK,
        };
        // The blocks of both files must lie alike, which those of clusters smaller than a block do not.
        let unit = if unit == 1 { BLOCK } else { unit };
        if unit < BLOCK || source.offset % BLOCK != offset % BLOCK || self.refused.contains(&source.file.id())
        {
            return Ok(Placement::Buffers);
        }
        match whole_units(offset, end, unit) {
            Some(whole) if whole.end - whole.start >= smallest => {
                self.share(worker, job, source, offset, whole).await
            }
            _ => Ok(Placement::Buffers),
        }
    }

    /// Shares the blocks of `whole`, a part of the source's range, which goes to `offset`.
    async fn share(
        &mut self,
        worker: &Worker,
        job: &Job,
        source: &FileRange,
        offset: u64,
        whole: Range<u64>,
    ) -> Result<Placement> {
        let mut at = whole.start;
        while at < whole.end && !job.is_stopped() {
            let part = source.from(at - offset).first((whole.end - at).min(MAX_CLONE));
            job.tracker.throttle(worker, part.len).await?;
            let (shared, refusal) = job.target.transfer_from(worker, Transfer::Share, part, at).await?;
            at += shared;
            if let Some(refusal) = refusal {
                if job.copy == CopyMode::Reflink {
                    return Err(refused(source, job, &refusal));
                }
                self.refused.push(source.file.id());
                break;
            }
        }
        Ok(if at > whole.start { Placement::Shared(whole.start..at) } else { Placement::Buffers })
    }
}

/// The error of a job that may only share blocks.
fn refused(source: &FileRange, job: &Job, refusal: &Error) -> Error {
    let kind = match refusal.kind() {
        ErrorKind::NoSpace => ErrorKind::NoSpace,
        _ => ErrorKind::Unsupported,
    };
    let source = source.file.path().display();
    let message = format!("can't share blocks with '{source}': {refusal}; use --copy=auto to copy instead");
    Error::new(kind, message).on(job.target.path())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_units_are_placed() {
        assert_eq!(whole_units(0, 65536, BLOCK), Some(0..65536));
        assert_eq!(whole_units(4196, 14196, BLOCK), Some(8192..12288));
        assert_eq!(whole_units(4196, 12196, BLOCK), None);
        assert_eq!(whole_units(0, 4095, BLOCK), None);
        assert_eq!(whole_units(u64::MAX - 100, u64::MAX - 50, BLOCK), None);
        assert_eq!(whole_units(8192, 208_192, 65536), Some(65536..196608));
        assert_eq!(whole_units(8192, 108_192, 65536), None);
        assert_eq!(whole_units(100, 101, 1), Some(100..101));
    }
}
