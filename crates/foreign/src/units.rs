//! Disks that are cut into units of one size.

use crate::error::{Error, Result};
use crate::files::Files;
use crate::limits::ENTRIES_AT_ONCE;
use crate::run::{Kind, Run};

/// Bytes of a sector.
const SECTOR: u64 = 512;

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

    /// The run at `guest`, at most `max_len` bytes: that of its unit, and of those behind it that continue it. `units` tells
    /// the place of a whole unit, and of how many units. Bytes that are missing, or damage, further on end the run.
    pub(crate) fn run(self, guest: u64, max_len: u64, units: impl Fn(u64) -> Result<Units>) -> Result<Run> {
        let within = self.within(guest);
        let mut index = self.index(guest);
        let first = units(index)?;
        let found = advanced(first.kind, within);
        let mut len = self.start(first.count).saturating_sub(within);
        index = index.saturating_add(first.count);
        let mut looked = 0;
        while len < max_len && looked < ENTRIES_AT_ONCE && !matches!(found, Kind::Packed(_)) {
            match units(index) {
                Ok(next) if found.continues_with(len, next.kind) => {
                    len = len.saturating_add(self.start(next.count));
                    index = index.saturating_add(next.count);
                }
                _ => break,
            }
            looked = looked.saturating_add(1);
        }
        Ok(Run { kind: found, len: len.min(max_len) })
    }
}

/// Units that follow each other and have one place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Units {
    kind: Kind,
    /// Units, 1 at least; more than 1 of holes and zeroes alone.
    count: u64,
}

impl Units {
    /// All units from one on: there are no entries for them.
    pub(crate) const NO_MORE: Self = Self { kind: Kind::Hole, count: u64::MAX };

    /// The units from `index` on to the end of the table that it is in: there is no such table. A table has `entries`.
    pub(crate) fn without_table(index: u64, entries: Unit) -> Self {
        let count = entries.bytes().saturating_sub(entries.within(index));
        Self { kind: Kind::Hole, count }
    }
}

impl From<Kind> for Units {
    fn from(kind: Kind) -> Self {
        Self { kind, count: 1 }
    }
}

/// The place of what lies `bytes` further on.
pub(crate) fn advanced(kind: Kind, bytes: u64) -> Kind {
    match kind {
        Kind::Data { file, offset } => Kind::Data { file, offset: offset.saturating_add(bytes) },
        other => other,
    }
}

/// A run without the data that lies behind the end of its file. Whole sectors are kept: a part of one is no data.
pub(crate) fn within_file(files: &dyn Files, guest: u64, run: Run) -> Result<Run> {
    let Kind::Data { file, offset } = run.kind else { return Ok(run) };
    let there = files.len(file).saturating_sub(offset);
    if run.len <= there {
        return Ok(run);
    }
    let end = guest.saturating_add(there);
    let kept = end.saturating_sub(end % SECTOR).saturating_sub(guest);
    if kept > 0 {
        return Ok(Run { len: kept, ..run });
    }
    let message = format!(
        "data of {} bytes reaches past the end of the file at {}; the file is cut off or damaged",
        run.len,
        files.len(file)
    );
    Err(Error::damaged(message).at(file, offset))
}
