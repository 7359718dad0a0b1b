//! Sharing or moving file ranges in the kernel, where files and offsets allow it.

use super::job::Job;
use super::moves::Moves;
use super::options::CopyMode;
use super::sink::Sink;
use super::source_range::{Destination, Moved, SourceRange};
use crate::Remedy;
use crate::transfer::Transfer;
use crate::{Error, ErrorKind, Format, Image, Result};
use std::ops::Range;
use zebu_storage::{FileId, Worker};

/// The part of a range that the kernel moves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Offload {
    /// Nothing of it is: it goes through buffers.
    Nothing,
    /// This part of it (offsets on the target's disk, within the range) is shared already.
    Shared(Range<u64>),
    /// This part of it the kernel can move, in pieces of at most so many bytes.
    Range(Range<u64>, Transfer, u64),
}

/// Block size of file systems with reflinks, as far as known: ranges are cut to it. A file system with larger blocks
/// refuses, and its ranges go through buffers.
const BLOCK: u64 = 4096;
/// Smallest range for which a reflink is tried unasked: a smaller one costs the file system more than copying it, and
/// leaves both files in pieces.
const WORTHWHILE: u64 = 64 << 10;
/// Most bytes shared and copied by one call: so many pass between two looks at a cancellation.
const MAX_CLONE: u64 = 256 << 20;
const MAX_RANGE: u64 = 16 << 20;

/// Chooses the way for each range.
pub(super) struct Offloader {
    /// Files that can't share blocks with the target, or of which the kernel copies nothing into it.
    refused: Vec<FileId>,
    /// Files of which the kernel copies.
    copied: Vec<FileId>,
}

/// The part of `start..end` that consists of whole units.
fn whole_units(start: u64, end: u64, unit: u64) -> Option<Range<u64>> {
    let start = start.checked_next_multiple_of(unit)?;
    let end = end / unit * unit;
    (start < end).then_some(start..end)
}

impl Offloader {
    pub(super) fn new() -> Self {
        Self { refused: Vec::new(), copied: Vec::new() }
    }

    /// Moves what it can of a range that goes to `offset` of the target's disk, or says how the caller does.
    pub(super) async fn offload(
        &mut self,
        worker: &Worker,
        job: &Job,
        source: &SourceRange,
        offset: u64,
    ) -> Result<Offload> {
        // In a raw image, a guest offset is a file offset; elsewhere, clusters are what can be offloaded.
        let target = match &job.target {
            Sink::Image(target) => target,
            Sink::Clusters { writer, moves } => {
                return later(job, moves, source, offset, writer.cluster_size());
            }
            Sink::Blocks(_) | Sink::Stream { .. } => return Ok(Offload::Nothing),
        };
        let unit = match target.format() {
            Format::Raw => 1,
            Format::Qcow2 | Format::Luks | Format::Foreign(_) => target.cluster_size(),
        };
        let place = source.place();
        let end = offset.saturating_add(place.len);
        let smallest = match job.copy {
            CopyMode::Buffers => return Ok(Offload::Nothing),
            CopyMode::Range => {
                let Some(whole) = whole_units(offset, end, unit) else { return Ok(Offload::Nothing) };
                let first =
                    source.from(whole.start - offset).first(unit.max(BLOCK).min(whole.end - whole.start));
                let copies = self.copies(worker, target, first, whole.start).await?;
                let range = Offload::Range(whole, Transfer::Copy, MAX_RANGE);
                return Ok(if copies { range } else { Offload::Nothing });
            }
            // Who asked for a fully allocated target wants no shared blocks, unless that was asked for, too.
            CopyMode::Auto if job.sparse_size == 0 => return Ok(Offload::Nothing),
            CopyMode::Auto => WORTHWHILE,
            CopyMode::Reflink => BLOCK,
        };
        // The blocks of both files must lie alike, which those of clusters smaller than a block do not.
        let unit = if unit == 1 { BLOCK } else { unit };
        if unit < BLOCK || place.offset % BLOCK != offset % BLOCK || self.refused.contains(&place.file.id()) {
            return Ok(Offload::Nothing);
        }
        match whole_units(offset, end, unit) {
            Some(whole) if whole.end - whole.start >= smallest => {
                self.share(worker, job, source, offset, whole).await
            }
            _ => Ok(Offload::Nothing),
        }
    }

    /// Whether the kernel copies from a file into the target: the first range of each file is tried. (Between two file
    /// systems it mostly does not.)
    async fn copies(
        &mut self,
        worker: &Worker,
        target: &Image,
        first: SourceRange,
        offset: u64,
    ) -> Result<bool> {
        let id = first.place().file.id();
        if self.refused.contains(&id) || self.copied.contains(&id) {
            return Ok(self.copied.contains(&id));
        }
        let to = Destination::Image(target.clone(), offset);
        match first.move_to(worker, Transfer::Copy, &to).await? {
            Moved::Bytes(_, None) => self.copied.push(id),
            Moved::Bytes(_, Some(refusal)) if refusal.kind() == ErrorKind::Unsupported => {
                self.refused.push(id);
            }
            Moved::Bytes(_, Some(error)) => return Err(error),
            // The next range tells.
            Moved::Elsewhere => {}
        }
        Ok(self.copied.contains(&id))
    }

    /// Shares the blocks of `whole`, a part of the source's range, which goes to `offset`.
    async fn share(
        &mut self,
        worker: &Worker,
        job: &Job,
        source: &SourceRange,
        offset: u64,
        whole: Range<u64>,
    ) -> Result<Offload> {
        let mut at = whole.start;
        while at < whole.end && !job.is_stopped() {
            let part = source.from(at - offset).first((whole.end - at).min(MAX_CLONE));
            // What is refused goes through buffers, which are charged for themselves.
            job.tracker.wait_for_rate(worker).await?;
            let Some(target) = job.target.image() else { return Ok(Offload::Nothing) };
            let to = Destination::Image(target.clone(), at);
            let Moved::Bytes(shared, refusal) = part.move_to(worker, Transfer::Share, &to).await? else {
                break;
            };
            job.tracker.charge(shared);
            at += shared;
            if let Some(refusal) = refusal {
                if job.copy == CopyMode::Reflink {
                    return Err(refused(source, job, &refusal));
                }
                self.refused.push(source.place().file.id());
                break;
            }
        }
        Ok(if at > whole.start { Offload::Shared(whole.start..at) } else { Offload::Nothing })
    }
}

/// The part of a range that the kernel moves to clusters that get their places when it is their turn.
fn later(job: &Job, moves: &Moves, source: &SourceRange, offset: u64, cluster: u64) -> Result<Offload> {
    let place = source.place();
    let Some(how) = moves.how else { return Ok(Offload::Nothing) };
    let Some(whole) = whole_units(offset, offset.saturating_add(place.len), cluster) else {
        return Ok(Offload::Nothing);
    };
    let (worthwhile, most) = match how {
        Transfer::Copy => (true, MAX_RANGE),
        Transfer::Share => {
            let smallest = if job.copy == CopyMode::Auto { WORTHWHILE } else { BLOCK };
            let is_aligned = cluster >= BLOCK && place.offset % BLOCK == offset % BLOCK;
            (is_aligned && whole.end - whole.start >= smallest, MAX_CLONE)
        }
    };
    match moves.refusal(&place.file) {
        _ if !worthwhile => Ok(Offload::Nothing),
        None => Ok(Offload::Range(whole, how, most)),
        Some(refusal) if job.copy == CopyMode::Reflink => Err(refused(source, job, &refusal)),
        Some(_) => Ok(Offload::Nothing),
    }
}

/// The error of a job that may only share blocks.
pub(super) fn refused(source: &SourceRange, job: &Job, refusal: &Error) -> Error {
    let kind = match refusal.kind() {
        ErrorKind::NoSpace => ErrorKind::NoSpace,
        _ => ErrorKind::Unsupported,
    };
    let source = source.place().file.path().display();
    let message = format!("can't share blocks with '{source}': {refusal}; its data can be copied instead");
    Error::new(kind, message).on(job.target.path()).with_remedy(Remedy::CopyData)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_units_are_offloaded() {
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
