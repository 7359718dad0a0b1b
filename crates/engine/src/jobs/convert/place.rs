//! Sharing or moving file ranges in the kernel, where files and offsets allow it.

use super::job::Job;
use super::options::CopyMode;
use crate::{Error, ErrorKind, Format, Result};
use zebu_storage::{File, FileId, Worker};

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

/// The blocks that lie whole in a range, if those of the file and those of the target lie alike: their start and end
/// on the target's disk.
fn whole_blocks(file_offset: u64, target_offset: u64, len: u64) -> Option<(u64, u64)> {
    if file_offset % BLOCK != target_offset % BLOCK {
        return None;
    }
    let start = target_offset.checked_next_multiple_of(BLOCK)?;
    let end = target_offset.checked_add(len)? / BLOCK * BLOCK;
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
        let Some((start, end)) = whole_blocks(source.offset, offset, source.len) else {
            return Ok(Placement::Buffers);
        };
        if end - start < smallest || self.refused.contains(&source.file.id()) {
            return Ok(Placement::Buffers);
        }
        let Some(target) = job.target.data_file_at(0).filter(|_| job.target.format() == Format::Raw) else {
            return Ok(Placement::Buffers);
        };
        let mut at = start;
        while at < end && !job.is_stopped() {
            let len = (end - at).min(MAX_CLONE);
            let from = source.offset + (at - offset);
            if let Err(error) = worker.clone_range(source.file, from, target, at, len).await {
                if job.copy == CopyMode::Reflink {
                    let kind = Error::from(error.clone()).kind();
                    let kind = if kind == ErrorKind::NoSpace { kind } else { ErrorKind::Unsupported };
                    return Err(Error::new(
                        kind,
                        format!(
                            "can't share blocks with '{}': {error}; use --copy=auto to copy instead",
                            source.file.path().display()
                        ),
                    )
                    .on(target.path()));
                }
                self.refused.push(source.file.id());
                break;
            }
            at += len;
        }
        Ok(if at > start { Placement::Shared { start, end: at } } else { Placement::Buffers })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_blocks_that_lie_alike_are_shared() {
        assert_eq!(whole_blocks(0, 0, 65536), Some((0, 65536)));
        assert_eq!(whole_blocks(327680, 1 << 20, 65536), Some((1 << 20, (1 << 20) + 65536)));
        assert_eq!(whole_blocks(100, 4096 + 100, 10000), Some((8192, 12288)));
        assert_eq!(whole_blocks(100, 4096 + 100, 8000), None);
        assert_eq!(whole_blocks(512, 0, 65536), None);
        assert_eq!(whole_blocks(0, 0, 4095), None);
        assert_eq!(whole_blocks(u64::MAX - 100, u64::MAX - 100, 50), None);
    }
}
