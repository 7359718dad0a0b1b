//! Packed sources of a conversion: whether they can be unpacked while they are copied.

use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use zebu_engine::jobs::SourceEnd;

/// A run of a conversion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pass {
    /// The first one: what can be unpacked while it is read is not unpacked before.
    First,
    /// Another, because a source must be read at any place. The target may be written in part.
    Again,
}

/// The sources of a conversion, as far as they are packed.
#[derive(Debug)]
pub(super) struct PackedSources {
    pub(super) pass: Pass,
    /// Whether one is read in order, by one thread.
    pub(super) is_stream: bool,
    /// The end of the one source, if that shows when it has been read.
    pub(super) end: Option<SourceEnd>,
}

/// Bytes of a block device; `None`: it is none. One that can't be opened is told later.
pub(super) fn size_of_device(target: &Path) -> Option<u64> {
    std::fs::metadata(target).ok().filter(|found| found.file_type().is_block_device())?;
    File::open(target).ok()?.seek(SeekFrom::End(0)).ok()
}
