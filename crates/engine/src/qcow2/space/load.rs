//! Setting up the host space of an image: at its opening, and before its first write.

use crate::Result;
use crate::qcow2::cache::resident_table::ResidentTable;
use crate::qcow2::cache::slice_cache::SliceCache;
use crate::qcow2::cache::slice_store::{Class, SliceStore};
use crate::qcow2::files::ImageFiles;
use crate::qcow2::read_barrier::Readers;
use crate::qcow2::read_tables::read_table;
use crate::qcow2::space::metadata_map::{METADATA_PLACE, Metadata, MetadataMap};
use crate::qcow2::space::quarantine::Quarantine;
use crate::qcow2::space::refcounts::{RefTable, Refcounts};
use crate::qcow2::space::{HostSpace, Pool};
use crate::sync::atomic::{AtomicBool, AtomicU64};
use crate::sync::{AsyncMutex, Mutex};
use std::sync::Arc;
use zebu_qcow2::{Header, RefTableEntry};
use zebu_storage::{FileKind, Worker};

impl HostSpace {
    /// `slice`, `block`: bytes of a slice, and of a block of a table.
    pub(crate) fn new(
        files: ImageFiles,
        header: &Header,
        store: &Arc<SliceStore>,
        slice: usize,
        block: usize,
    ) -> Self {
        // The table is read before the first write.
        let table = ResidentTable::new(0, block, store);
        let table = RefTable::named(table, header.refcount_table_offset.0);
        Self {
            files,
            geometry: header.geometry(),
            refcounts: Refcounts::new(table, SliceCache::new(store.clone(), Class::Table, slice)),
            pool: Mutex::new(Pool::default()),
            space_mutex: AsyncMutex::default(),
            metadata: MetadataMap::new(store),
            quarantine: Quarantine::default(),
            readers: Readers::default(),
            can_reserve: AtomicBool::new(true),
            clusters_allocated: AtomicU64::new(0),
        }
    }

    /// Notes how far the file reaches.
    pub(crate) fn note_file_end(&self) {
        let (file, cluster) = (self.files.file(), self.geometry.cluster_size());
        let clusters = match file.kind() {
            // No table fits into what is left at the end of a device.
            FileKind::BlockDevice => file.len() / cluster,
            _ => file.len().div_ceil(cluster),
        };
        let mut pool = self.pool();
        pool.file_clusters = clusters;
        pool.clusters_at_open = clusters;
        pool.scan_end = clusters;
    }

    /// Reads the refcount table, and notes for the overlap check where refcount blocks and the L2 tables at `tables` lie.
    pub(crate) async fn load(
        &self,
        worker: &Worker,
        header: &Header,
        tables: impl Iterator<Item = u64>,
        store: &Arc<SliceStore>,
    ) -> Result<()> {
        let bits = self.geometry.cluster_bits;
        let bytes = u64::from(header.refcount_table_clusters) << bits;
        let offset = header.refcount_table_offset.0;
        let entries = ResidentTable::new((bytes / 8) as usize, self.refcounts.cache().block_bytes(), store);
        self.files.file().announce("reftable_load");
        read_table(worker, self.files.file(), offset, &entries).await?;
        let blocks = entries.iter_set().filter_map(|(_, entry)| RefTableEntry(entry).block());
        let mut shared =
            self.metadata.insert_tables(blocks.map(|block| block.0 >> bits), Metadata::RefcountBlock);
        let tables = tables.map(|table| table >> bits);
        shared.extend(self.metadata.insert_tables(tables, Metadata::ActiveL2));
        self.metadata.set_shared_tables(shared);
        self.refcounts.set_table(RefTable::named(entries, offset));
        Ok(())
    }

    /// Bytes of the budget that the first write adds: the refcount table, and places in the overlap check for
    /// `l2_tables` L2 tables and for refcount blocks.
    pub(crate) fn bytes_for_writing(&self, header: &Header, l2_tables: u64) -> u64 {
        let clusters = self.files.file().len().div_ceil(self.geometry.cluster_size());
        let blocks = clusters.div_ceil(self.geometry.refcount_entries_per_block());
        let table = u64::from(header.refcount_table_clusters) << self.geometry.cluster_bits;
        let block_bytes = self.refcounts.cache().block_bytes() as u64;
        let directory = table.div_ceil(block_bytes) * 24;
        directory + (blocks * 8).next_multiple_of(block_bytes) + (l2_tables + blocks + 16) * METADATA_PLACE
    }
}
