//! The active mapping of an image: its L1 table, the slices of its L2 tables, and new tables that are not on disk yet.

use crate::chain::map::ChainMap;
use crate::qcow2::cache::resident_table::ResidentTable;
use crate::qcow2::cache::slice_cache::SliceCache;
use crate::qcow2::cache::slice_store::SliceStore;
use crate::qcow2::space::free::SpaceContent;
use crate::sync::atomic::{AtomicBool, Ordering::Relaxed};
use crate::sync::{ArcCell, AsyncMutex, AsyncMutexGuard, Mutex};
use std::collections::BTreeMap;
use std::sync::Arc;
use zebu_qcow2::{Geometry, GuestOffset, HostOffset, L1Entry};
use zebu_storage::sabotage::{self, Fault};

/// An L1 table and its place.
#[derive(Debug)]
pub(crate) struct L1 {
    table: ResidentTable,
    /// Offset in the file, bytes.
    offset: u64,
    /// Room in the file system for all of it is known to be there.
    has_room: AtomicBool,
}

impl L1 {
    pub(crate) fn new(table: ResidentTable, offset: u64) -> Self {
        Self { table, offset, has_room: AtomicBool::new(false) }
    }

    /// True if the file system is known to have room for all of it.
    pub(crate) fn has_room(&self) -> bool {
        self.has_room.load(Relaxed)
    }

    /// Notes that the file system has room for all of it.
    pub(crate) fn note_room(&self) {
        self.has_room.store(true, Relaxed);
    }

    pub(crate) fn table(&self) -> &ResidentTable {
        &self.table
    }

    /// Offset in the file, bytes.
    pub(crate) fn offset(&self) -> u64 {
        self.offset
    }
}

/// An L2 table that no L1 entry on disk points to yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct NewTable {
    /// Offset in the file, bytes.
    pub(super) host: u64,
    /// The present content of the space.
    pub(super) content: SpaceContent,
    /// The shared table that it is a copy of; slices that are not cached are still to be read there.
    pub(super) source: Option<u64>,
}

/// Where the slices of an L2 table are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TableSource {
    /// As the L1 entry says.
    Entry(L1Entry),
    /// The table is new: the table that it is a copy of, if any.
    New(Option<u64>),
}

/// The active mapping: the L1 table, L2 tables and their slices.
#[derive(Debug)]
pub(crate) struct ActiveMap {
    geometry: Geometry,
    l1: ArcCell<L1>,
    slices: SliceCache,
    /// By L1 index. An entry is made before the L1 entry points to the table and removed when the table is on disk.
    new_tables: Mutex<BTreeMap<u64, NewTable>>,
    /// Held while an L2 table is made.
    table_mutex: AsyncMutex,
    /// The map of the chain, if the image is its top.
    chain: Option<Arc<ChainMap>>,
}

impl ActiveMap {
    pub(crate) fn new(geometry: Geometry, l1: L1, slices: SliceCache, chain: Option<Arc<ChainMap>>) -> Self {
        Self {
            geometry,
            l1: ArcCell::new(l1),
            slices: slices.watched_by(chain.clone()),
            new_tables: Mutex::default(),
            table_mutex: AsyncMutex::default(),
            chain,
        }
    }

    pub(crate) fn l1(&self) -> Arc<L1> {
        self.l1.load()
    }

    /// Makes another table the active one.
    pub(crate) fn replace_l1(&self, l1: L1) {
        self.l1.store(l1);
    }

    /// The slices of L2 tables.
    #[inline]
    pub(crate) fn slices(&self) -> &SliceCache {
        &self.slices
    }

    /// The memory that the mapping of the whole chain is in.
    pub(crate) fn store(&self) -> &Arc<SliceStore> {
        self.slices.store()
    }

    /// The map of the chain, if the image is its top.
    #[inline]
    pub(crate) fn chain(&self) -> Option<&Arc<ChainMap>> {
        self.chain.as_ref()
    }

    /// Keeps L2 tables from being made.
    pub(crate) async fn hold_tables(&self) -> AsyncMutexGuard<'_> {
        self.table_mutex.lock().await
    }

    /// Whether a commit has anything to write.
    pub(crate) fn is_dirty(&self) -> bool {
        self.slices.dirty_slices() > 0 || !self.new_tables.lock().is_empty() || self.l1().table.is_dirty()
    }

    /// Makes the table at `host` that of L1 entry `index`, in place of `old`. The note comes first: a reader that sees the
    /// entry finds that the table is not on disk.
    pub(crate) fn add_table(&self, index: u64, host: u64, content: SpaceContent, old: Option<HostOffset>) {
        let l1 = self.l1();
        let table = NewTable { host, content, source: old.map(|table| table.0) };
        self.new_tables.lock().insert(index, table);
        l1.table.set(index, L1Entry::new(HostOffset(host), true).0);
    }

    /// Where the slices of table `index` are read.
    pub(super) fn source_of(&self, index: u64) -> TableSource {
        // L1 first: the note of a new table is made before L1 points to it, and removed when the table is on disk. The
        // other way round, a table made in between would be read from the place where it is not yet.
        let (entry, new_table) = if sabotage::is(Fault::LookAtNewTablesFirst) {
            let new_table = self.new_tables.lock().get(&index).copied();
            (self.l1().table.get(index), new_table)
        } else {
            let entry = self.l1().table.get(index);
            (entry, self.new_tables.lock().get(&index).copied())
        };
        match new_table {
            Some(table) => TableSource::New(table.source),
            None => TableSource::Entry(L1Entry(entry)),
        }
    }

    /// Copies of the new tables.
    pub(super) fn new_tables(&self) -> BTreeMap<u64, NewTable> {
        self.new_tables.lock().clone()
    }

    /// Forgets of `tables` those that are still the ones noted: they are on disk.
    pub(super) fn forget_new(&self, tables: &BTreeMap<u64, NewTable>) {
        let mut new_tables = self.new_tables.lock();
        for (index, table) in tables {
            if new_tables.get(index) == Some(table) {
                new_tables.remove(index);
            }
        }
    }

    /// Entries of an L2 table in one slice.
    pub(crate) fn entries_per_slice(&self) -> u64 {
        self.slices.slice_bytes() as u64 / u64::from(self.geometry.l2_entry_size)
    }

    /// Slices of one L2 table.
    pub(crate) fn slices_per_table(&self) -> u64 {
        self.geometry.cluster_size() / self.slices.slice_bytes() as u64
    }

    /// Key of the slice that maps `guest`, and the index of the entry in it.
    pub(crate) fn slice_of(&self, guest: u64) -> (u64, usize) {
        let cluster = guest >> self.geometry.cluster_bits;
        let entries = self.entries_per_slice();
        (cluster / entries, (cluster % entries) as usize)
    }

    /// Offset on the virtual disk just past what slice `key` maps.
    pub(crate) fn slice_end(&self, key: u64) -> u64 {
        ((key + 1) * self.entries_per_slice()) << self.geometry.cluster_bits
    }

    /// The L1 index of `guest`.
    pub(crate) fn l1_index(&self, guest: u64) -> u64 {
        self.geometry.l1_index(GuestOffset(guest))
    }
}
