//! The part of the active mapping that a commit writes.

use crate::Result;
use crate::qcow2::cache::resident_table::FrozenBlock;
use crate::qcow2::cache::slice_cache::{FrozenSlice, Written};
use crate::qcow2::map::active_map::{ActiveMap, L1, NewTable};
use std::collections::BTreeMap;
use std::sync::Arc;
use zebu_qcow2::L1Entry;
use zebu_storage::IoBuf;
use zebu_storage::sabotage::{self, Fault};

/// Copies of what changed since the last commit.
pub(crate) struct FrozenMap {
    l1: Arc<L1>,
    l1_blocks: Vec<FrozenBlock>,
    new_tables: BTreeMap<u64, NewTable>,
    slices: Vec<FrozenSlice>,
}

impl FrozenMap {
    /// The writes of changed blocks of the L1 table.
    pub(crate) fn l1_writes(&self) -> Vec<(u64, IoBuf)> {
        let (offset, block_bytes) = (self.l1.offset(), self.l1.table().block_bytes());
        self.l1_blocks.iter().map(|block| block.write(offset, block_bytes)).collect()
    }

    pub(crate) fn has_new_tables(&self) -> bool {
        !self.new_tables.is_empty()
    }
}

impl ActiveMap {
    /// Copies what changed. The order is L1, slices, new tables: an entry of L1 that is in the copy has its table in it,
    /// too, and a table has what its slices held.
    pub(crate) fn freeze(&self) -> FrozenMap {
        let l1 = self.l1();
        let l1_blocks = l1.table().freeze();
        let mut new_tables = BTreeMap::new();
        if sabotage::is(Fault::FreezeTablesFirst) {
            new_tables = self.new_tables();
        }
        let slices = self.slices().freeze();
        if !sabotage::is(Fault::FreezeTablesFirst) {
            new_tables = self.new_tables();
        }
        FrozenMap { l1, l1_blocks, new_tables, slices }
    }

    /// Whether `frozen` has anything to write where the disk may refer to it already.
    pub(crate) fn has_links(&self, frozen: &FrozenMap) -> bool {
        !frozen.l1_blocks.is_empty() || frozen.slices.iter().any(|slice| !self.is_of_new_table(frozen, slice))
    }

    fn is_of_new_table(&self, frozen: &FrozenMap, slice: &FrozenSlice) -> bool {
        frozen.new_tables.contains_key(&(slice.key() / self.slices_per_table()))
    }

    /// The writes of new tables: of one in fresh space the changed blocks; of others the whole table, with what is not
    /// cached as `read` gives it.
    pub(crate) async fn new_table_writes(
        &self,
        frozen: &FrozenMap,
        read: impl AsyncFn(u64) -> Result<Vec<u8>>,
    ) -> Result<Vec<(u64, IoBuf)>> {
        let per_table = self.slices_per_table();
        let slice_bytes = self.slices().slice_bytes();
        let mut by_table: BTreeMap<u64, Vec<&FrozenSlice>> = BTreeMap::new();
        for slice in &frozen.slices {
            by_table.entry(slice.key() / per_table).or_default().push(slice);
        }
        let mut writes = Vec::new();
        for (l1_index, table) in &frozen.new_tables {
            let slices = by_table.get(l1_index).map_or(&[][..], Vec::as_slice);
            if table.source.is_none() && table.content.is_fresh() {
                for slice in slices {
                    let start = table.host + slice.key() % per_table * slice_bytes as u64;
                    writes.extend(slice.dirty_blocks(start));
                }
                continue;
            }
            let mut bytes = match table.source {
                Some(source) => read(source).await?,
                None => vec![0; per_table as usize * slice_bytes],
            };
            for slice in slices {
                let at = (slice.key() % per_table) as usize * slice_bytes;
                if let Some(place) = bytes.get_mut(at..at + slice_bytes) {
                    place.copy_from_slice(slice.bytes());
                }
            }
            writes.push((table.host, IoBuf::copy_of(&bytes)));
        }
        Ok(writes)
    }

    /// The writes of changed blocks of tables that are on disk.
    pub(crate) fn entry_writes(&self, frozen: &FrozenMap) -> Vec<(u64, IoBuf)> {
        let existing = frozen.slices.iter().filter(|slice| !self.is_of_new_table(frozen, slice));
        existing.flat_map(|slice| slice.dirty_blocks(self.place_on_disk(frozen, slice))).collect()
    }

    /// Offset in the file of a slice of a table that is on disk.
    fn place_on_disk(&self, frozen: &FrozenMap, slice: &FrozenSlice) -> u64 {
        let per_table = self.slices_per_table();
        let table =
            L1Entry(frozen.l1.table().get(slice.key() / per_table)).table().map_or(0, |table| table.0);
        table + slice.key() % per_table * self.slices().slice_bytes() as u64
    }

    /// Replaces what `writes` hold of slices by what these hold now, as only a deliberate fault does.
    pub(crate) fn take_live_blocks(&self, frozen: &FrozenMap, writes: &mut [(u64, IoBuf)]) {
        for slice in &frozen.slices {
            let start = self.place_on_disk(frozen, slice);
            let mut shard = self.slices().lock(slice.key());
            let Some(live) = self.slices().get(&mut shard, slice.key()) else { continue };
            for (offset, buf) in &mut *writes {
                let at = offset.wrapping_sub(start) as usize;
                if let Some(bytes) = live.bytes().get(at..at.saturating_add(buf.len())) {
                    *buf = IoBuf::copy_of(bytes);
                }
            }
        }
    }

    /// Notes that the new tables are whole on the disk.
    pub(crate) fn publish(&self, frozen: &FrozenMap) {
        self.forget_new(&frozen.new_tables);
    }

    /// Ends the writing of what was frozen. After a failure it is dirty again.
    pub(crate) fn thaw(&self, frozen: &FrozenMap, outcome: Written) {
        self.slices().thaw(&frozen.slices, outcome);
        if outcome == Written::Failed {
            frozen.l1.table().refreeze(&frozen.l1_blocks);
        }
    }
}
