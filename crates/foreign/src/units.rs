//! Disks that are cut into units of one size.

use crate::error::{Error, Result};
use crate::files::{FileIndex, Files, Source};
use crate::limits::ENTRIES_AT_ONCE;
use crate::run::{Kind, Run};

/// The bytes of a unit, 1 at least.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Unit(u64);

impl Unit {
    pub(crate) fn new(bytes: u64) -> Option<Self> {
        (bytes > 0).then_some(Self(bytes))
    }

    pub(crate) fn bytes(self) -> u64 {
        self.0
    }

    /// The unit that `guest` lies in.
    pub(crate) fn index(self, guest: u64) -> u64 {
        guest.checked_div(self.0).unwrap_or_default()
    }

    /// Bytes of `guest` behind the start of its unit.
    pub(crate) fn within(self, guest: u64) -> u64 {
        guest.checked_rem(self.0).unwrap_or_default()
    }

    /// Units of `bytes`, the last of which may be cut short.
    pub(crate) fn count(self, bytes: u64) -> u64 {
        bytes.checked_sub(1).map_or(0, |last| self.index(last).saturating_add(1))
    }

    /// The first byte of a unit.
    pub(crate) fn start(self, index: u64) -> u64 {
        index.saturating_mul(self.0)
    }

    /// The run at `guest`, at most `max_len` bytes: that of its unit, and of those behind it that continue it. `kind` tells
    /// the place of a whole unit. Bytes that are missing, or damage, further on end the run.
    pub(crate) fn run(self, guest: u64, max_len: u64, kind: impl Fn(u64) -> Result<Kind>) -> Result<Run> {
        let (first, within) = (self.index(guest), self.within(guest));
        let found = advanced(kind(first)?, within);
        let mut len = self.0.saturating_sub(within);
        let last = first.saturating_add(ENTRIES_AT_ONCE);
        let mut index = first;
        while len < max_len && index < last && !matches!(found, Kind::Packed(_)) {
            index = index.saturating_add(1);
            match kind(index) {
                Ok(next) if found.continues_with(len, next) => len = len.saturating_add(self.0),
                _ => break,
            }
        }
        Ok(Run { kind: found, len: len.min(max_len) })
    }
}

/// The place of what lies `bytes` further on.
pub(crate) fn advanced(kind: Kind, bytes: u64) -> Kind {
    match kind {
        Kind::Data { file, offset } => Kind::Data { file, offset: offset.saturating_add(bytes) },
        other => other,
    }
}

/// Data of a unit at `offset` of a file. The part of it that belongs to the disk must lie within the file.
pub(crate) fn data(
    files: &dyn Files,
    file: FileIndex,
    offset: u64,
    start: u64,
    unit: u64,
    disk: u64,
) -> Result<Kind> {
    let len = unit.min(disk.saturating_sub(start));
    let source = Source::new(files, file);
    if !source.holds(offset, len) {
        let message = format!(
            "data of {len} bytes reaches past the end of the file at {}; the file is cut off or damaged",
            source.len()
        );
        return Err(Error::damaged(message).at(file, offset));
    }
    Ok(Kind::Data { file, offset })
}
