//! The snapshot table as it is known in memory.

use zebu_qcow2::snapshot::SnapshotEntry;

/// The table and where it lies.
#[derive(Debug, Clone, Default)]
pub(crate) struct SnapshotTable {
    entries: Vec<SnapshotEntry>,
    /// Offset in the file, bytes.
    offset: u64,
    /// Bytes on disk.
    len: u64,
}

impl SnapshotTable {
    /// A table of `len` bytes at `offset` of the file.
    pub(crate) fn new(entries: Vec<SnapshotEntry>, offset: u64, len: u64) -> Self {
        Self { entries, offset, len }
    }

    /// The snapshots, oldest first.
    pub(crate) fn entries(&self) -> &[SnapshotEntry] {
        &self.entries
    }

    /// Offset in the file and bytes on disk.
    pub(super) fn place(&self) -> (u64, u64) {
        (self.offset, self.len)
    }
}
