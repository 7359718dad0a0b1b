//! Refcounts of host clusters: cached slices of refcount blocks under a table in memory.
//!
//! Raising happens in the cache at once and reaches the disk in the first phase of a commit. Lowering happens in the
//! cache only after the commit that made the unlinking durable, so that a cached count is never lower than what the
//! disk still refers to.

use crate::qcow2::cache::resident_table::ResidentTable;
use crate::qcow2::cache::slice_cache::SliceCache;
use crate::qcow2::space::free::SpaceContent;
use crate::sync::atomic::{
    AtomicBool, AtomicU64,
    Ordering::{Acquire, Relaxed},
};
use crate::sync::{ArcCell, Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The refcount table and where it lies.
#[derive(Debug)]
pub(crate) struct RefTable {
    entries: ResidentTable,
    /// Offset in the file, bytes.
    offset: AtomicU64,
    /// Whether the header on disk does not name this table yet.
    moved: AtomicBool,
}

impl RefTable {
    /// The table that the header names.
    pub(super) fn named(entries: ResidentTable, offset: u64) -> Self {
        Self { entries, offset: AtomicU64::new(offset), moved: AtomicBool::new(false) }
    }

    /// A table that has no place yet, and that no header names.
    pub(super) fn unplaced(entries: ResidentTable) -> Self {
        Self { entries, offset: AtomicU64::new(0), moved: AtomicBool::new(true) }
    }

    pub(super) fn entries(&self) -> &ResidentTable {
        &self.entries
    }

    /// Offset in the file, bytes.
    pub(super) fn offset(&self) -> u64 {
        self.offset.load(Acquire)
    }

    pub(super) fn place(&self, offset: u64) {
        self.offset.store(offset, Relaxed);
    }

    /// Whether the header on disk does not name this table yet.
    pub(super) fn is_moved(&self) -> bool {
        self.moved.load(Acquire)
    }

    /// Notes that the header names this table; the next barrier makes that durable.
    pub(super) fn note_named(&self) {
        self.moved.store(false, Relaxed);
    }
}

/// A refcount block that no table entry on disk points to yet.
#[derive(Debug, Clone, Copy)]
pub(super) struct NewBlock {
    /// Offset in the file, bytes.
    pub(super) host: u64,
    pub(super) content: SpaceContent,
}

/// The counts of all host clusters.
#[derive(Debug)]
pub(super) struct Refcounts {
    table: ArcCell<RefTable>,
    cache: SliceCache,
    /// By index in the table.
    new_blocks: Mutex<BTreeMap<u64, NewBlock>>,
}

impl Refcounts {
    pub(super) fn new(table: RefTable, cache: SliceCache) -> Self {
        Self { table: ArcCell::new(table), cache, new_blocks: Mutex::default() }
    }

    pub(super) fn table(&self) -> Arc<RefTable> {
        self.table.load()
    }

    pub(super) fn set_table(&self, table: impl Into<Arc<RefTable>>) {
        self.table.store(table);
    }

    pub(super) fn cache(&self) -> &SliceCache {
        &self.cache
    }

    pub(super) fn new_blocks(&self) -> MutexGuard<'_, BTreeMap<u64, NewBlock>> {
        self.new_blocks.lock()
    }

    /// Whether a commit has anything to write of the counts.
    pub(super) fn is_dirty(&self) -> bool {
        self.cache.dirty_slices() > 0 || !self.new_blocks().is_empty() || self.table().entries().is_dirty()
    }
}
