//! Bounds of the tables that a header or a snapshot points at.

use crate::geometry::Geometry;

/// A fault of a table that the header points at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum TableFault {
    TooLarge,
    OffsetInvalid,
}

/// A table must not exceed its limit, must start at a cluster boundary and must end below 2^63.
pub(crate) fn check(
    entries: u64,
    entry_size: u64,
    max_entries: u64,
    offset: u64,
    geometry: &Geometry,
) -> Result<(), TableFault> {
    if entries > max_entries {
        return Err(TableFault::TooLarge);
    }
    let end = entries.checked_mul(entry_size).and_then(|bytes| offset.checked_add(bytes));
    if end.is_none_or(|end| end > i64::MAX as u64) || !geometry.is_cluster_aligned(offset) {
        return Err(TableFault::OffsetInvalid);
    }
    Ok(())
}
