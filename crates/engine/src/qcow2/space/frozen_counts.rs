//! The part of the refcounts that a commit writes.

use crate::qcow2::cache::resident_table::FrozenBlock;
use crate::qcow2::cache::slice_cache::{FrozenSlice, Written};
use crate::qcow2::space::HostSpace;
use crate::qcow2::space::refcounts::{NewBlock, RefTable};
use std::collections::BTreeMap;
use std::sync::Arc;
use zebu_storage::IoBuf;

/// Copies of what changed since the last commit.
pub(crate) struct FrozenCounts {
    slices: Vec<FrozenSlice>,
    new_blocks: BTreeMap<u64, NewBlock>,
    table: Arc<RefTable>,
    table_blocks: Vec<FrozenBlock>,
    /// The whole table, if the header does not name its place yet.
    moved_table: Option<Vec<u8>>,
}

impl FrozenCounts {
    /// Whether anything has to be durable before counts are written: blocks, or the table.
    pub(crate) fn has_new_blocks(&self) -> bool {
        !self.new_blocks.is_empty() || !self.table_blocks.is_empty() || self.moved_table.is_some()
    }

    /// Whether counts are to be written.
    pub(crate) fn has_counts(&self) -> bool {
        !self.slices.is_empty()
    }

    /// Offset and content of the table, if the header does not name its place yet.
    pub(crate) fn moved_table(&self) -> Option<(u64, &[u8])> {
        self.moved_table.as_deref().map(|bytes| (self.table.offset(), bytes))
    }

    /// Notes that the header names the table that has moved.
    pub(crate) fn note_named(&self) {
        self.table.note_named();
    }

    /// The writes of changed entries of the table.
    pub(crate) fn table_writes(&self) -> Vec<(u64, IoBuf)> {
        let (offset, block_bytes) = (self.table.offset(), self.table.entries().block_bytes());
        self.table_blocks.iter().map(|block| block.write(offset, block_bytes)).collect()
    }
}

impl HostSpace {
    /// Copies what changed, while no window is refilled.
    pub(crate) async fn freeze(&self) -> FrozenCounts {
        let _no_refill = self.space_mutex.lock().await;
        let slices = self.refcounts.cache().freeze();
        let new_blocks = self.refcounts.new_blocks().clone();
        let table = self.refcounts.table();
        let table_blocks = table.entries().freeze();
        let moved_table = table.is_moved().then(|| table.entries().to_bytes());
        FrozenCounts { slices, new_blocks, table, table_blocks, moved_table }
    }

    /// The writes of refcount blocks that no entry on disk points to: of those in fresh space what is not zero, of others
    /// the whole.
    pub(crate) fn new_block_writes(&self, frozen: &FrozenCounts) -> Vec<(u64, IoBuf)> {
        let per_block = self.slices_per_block();
        let cluster = self.geometry.cluster_size() as usize;
        let slice_bytes = self.refcounts.cache().slice_bytes();
        let mut writes = Vec::new();
        for (index, block) in &frozen.new_blocks {
            let slices = frozen.slices.iter().filter(|slice| slice.key() / per_block == *index);
            if block.content.is_fresh() {
                // The rest of the block reads as zero already.
                writes.extend(slices.map(|slice| {
                    (block.host + slice.key() % per_block * slice_bytes as u64, IoBuf::copy_of(slice.bytes()))
                }));
                continue;
            }
            let mut bytes = vec![0; cluster];
            for slice in slices {
                let at = (slice.key() % per_block) as usize * slice_bytes;
                if let Some(place) = bytes.get_mut(at..at + slice_bytes) {
                    place.copy_from_slice(slice.bytes());
                }
            }
            writes.push((block.host, IoBuf::copy_of(&bytes)));
        }
        writes
    }

    /// The writes of changed counts in refcount blocks that are on disk.
    pub(crate) fn count_writes(&self, frozen: &FrozenCounts) -> Vec<(u64, IoBuf)> {
        let per_block = self.slices_per_block();
        let is_new = |slice: &&FrozenSlice| frozen.new_blocks.contains_key(&(slice.key() / per_block));
        let existing = frozen.slices.iter().filter(|slice| !is_new(slice));
        let place = |slice: &FrozenSlice| {
            let block = frozen.table.entries().get(slice.key() / per_block) & !511;
            block + slice.key() % per_block * self.refcounts.cache().slice_bytes() as u64
        };
        existing.flat_map(|slice| slice.dirty_blocks(place(slice))).collect()
    }

    /// Notes that the table on disk points to the blocks that were new.
    pub(crate) fn publish(&self, frozen: &FrozenCounts) {
        let mut new_blocks = self.refcounts.new_blocks();
        for index in frozen.new_blocks.keys() {
            new_blocks.remove(index);
        }
    }

    /// Ends the writing of frozen counts. After a failure they are dirty again.
    pub(crate) fn thaw(&self, frozen: &FrozenCounts, outcome: Written) {
        self.refcounts.cache().thaw(&frozen.slices, outcome);
        if outcome == Written::Failed {
            frozen.table.entries().refreeze(&frozen.table_blocks);
        }
    }
}
