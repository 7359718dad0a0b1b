//! A table that is held in memory: the active L1 table, the refcount table.
//!
//! Entries are read without a lock. Changes set the entry and note its block; a commit freezes copies of the noted
//! blocks. A block that holds nothing takes no memory, so a large disk costs what of it is in use.

use crate::qcow2::cache::slice_store::SliceStore;
use crate::sync::atomic::{AtomicU64, Ordering::Acquire, Ordering::Release, Ordering::SeqCst};
use crate::sync::{Mutex, OnceLock};
use std::collections::BTreeSet;
use std::sync::Arc;
use zebu_storage::IoBuf;
use zebu_storage::sabotage::{self, Fault};

/// Entries in a block of a table.
const ENTRIES_PER_512: usize = 64;

type Block = Box<[AtomicU64]>;

/// A table that is held in memory whole.
///
/// Changes and single reads are `SeqCst`, as the counters of [`crate::sync::ReadEpochs`] are: a reader that enters after a
/// wait for the earlier ones began sees the change before that wait.
#[derive(Debug)]
pub(crate) struct ResidentTable {
    blocks: Box<[OnceLock<Block>]>,
    len: usize,
    entries_per_block: usize,
    dirty: Mutex<BTreeSet<usize>>,
    /// The store whose budget the memory counts in.
    store: Arc<SliceStore>,
}

/// A block of a table as a commit writes it.
#[derive(Debug)]
pub(crate) struct FrozenBlock {
    /// Number of the block in the table.
    block: usize,
    /// Big-endian content.
    bytes: Vec<u8>,
}

impl FrozenBlock {
    /// The block with its place in the file, where the table lies at `start` and is written in blocks of `block_bytes`.
    pub(crate) fn write(&self, start: u64, block_bytes: usize) -> (u64, IoBuf) {
        (start + (self.block * block_bytes) as u64, IoBuf::copy_of(&self.bytes))
    }
}

impl ResidentTable {
    /// A table of `len` entries, all 0, written in blocks of `block_bytes`.
    pub(crate) fn new(len: usize, block_bytes: usize, store: &Arc<SliceStore>) -> Self {
        let entries_per_block = (block_bytes / 8).max(ENTRIES_PER_512);
        let blocks: Box<[_]> = (0..len.div_ceil(entries_per_block)).map(|_| OnceLock::new()).collect();
        store.budget().take_for_tables(size_of_val(&*blocks) as u64);
        Self { blocks, len, entries_per_block, dirty: Mutex::default(), store: store.clone() }
    }

    /// The same table with room for `len` entries, none of them changed.
    pub(crate) fn resized(&self, len: usize) -> Self {
        let table = Self::new(len, self.block_bytes(), &self.store);
        for (index, entry) in self.iter_set() {
            table.store_entry(index, entry);
        }
        table
    }

    /// A table of as many entries, all 0.
    pub(crate) fn emptied(&self) -> Self {
        Self::new(self.len, self.block_bytes(), &self.store)
    }

    /// Takes entries over as they are on disk, from entry `start` on; they count as unchanged.
    pub(crate) fn fill(&self, start: usize, bytes: &[u8]) {
        for (i, entry) in bytes.as_chunks::<8>().0.iter().enumerate() {
            let entry = u64::from_be_bytes(*entry);
            if entry != 0 {
                self.store_entry(start + i, entry);
            }
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Entry `index`; 0 past the end.
    #[inline]
    pub(crate) fn get(&self, index: u64) -> u64 {
        let Ok(index) = usize::try_from(index) else { return 0 };
        let block = self.blocks.get(index / self.entries_per_block).and_then(OnceLock::get);
        block
            .and_then(|block| block.get(index % self.entries_per_block))
            .map_or(0, |entry| entry.load(SeqCst))
    }

    /// The place of entry `index` in memory, which is taken if need be.
    fn entry(&self, index: usize) -> Option<&AtomicU64> {
        if index >= self.len {
            return None;
        }
        let number = index / self.entries_per_block;
        let block = self.blocks.get(number)?;
        if block.get().is_none() {
            let len = self.entries_in(number);
            let is_first = block.set((0..len).map(|_| AtomicU64::new(0)).collect()).is_ok();
            if is_first {
                self.store.budget().take_for_tables(len as u64 * 8);
            }
        }
        block.get()?.get(index % self.entries_per_block)
    }

    fn store_entry(&self, index: usize, value: u64) {
        if let Some(entry) = self.entry(index) {
            entry.store(value, Release);
        }
    }

    fn entries_in(&self, block: usize) -> usize {
        (self.len - block * self.entries_per_block).min(self.entries_per_block)
    }

    /// Changes entry `index`; `false` if there is none.
    pub(crate) fn set(&self, index: u64, value: u64) -> bool {
        let Ok(index) = usize::try_from(index) else { return false };
        let Some(entry) = self.entry(index) else { return false };
        if sabotage::is(Fault::NoteEntriesLate) {
            entry.store(value, SeqCst);
        }
        // Both under the lock: whoever has seen the entry and freezes the table finds it noted. What builds on an entry may
        // be made durable by a commit that begins before this returns.
        let mut dirty = self.dirty_blocks();
        entry.store(value, SeqCst);
        dirty.insert(index / self.entries_per_block);
        true
    }

    fn dirty_blocks(&self) -> crate::sync::MutexGuard<'_, BTreeSet<usize>> {
        self.dirty.lock()
    }

    pub(crate) fn is_dirty(&self) -> bool {
        !self.dirty_blocks().is_empty()
    }

    /// The entries that are not 0, in order, with their indices.
    pub(crate) fn iter_set(&self) -> impl Iterator<Item = (usize, u64)> + '_ {
        self.blocks.iter().enumerate().filter_map(|(number, block)| Some((number, block.get()?))).flat_map(
            |(number, block)| {
                let start = number * self.entries_per_block;
                let entries = block.iter().map(|entry| entry.load(Acquire)).enumerate();
                entries.filter(|(_, entry)| *entry != 0).map(move |(i, entry)| (start + i, entry))
            },
        )
    }

    /// Bytes of a block.
    pub(crate) fn block_bytes(&self) -> usize {
        self.entries_per_block * 8
    }

    /// Copies of the changed blocks, which count as unchanged from here on. The last block may be short.
    pub(crate) fn freeze(&self) -> Vec<FrozenBlock> {
        let blocks = std::mem::take(&mut *self.dirty_blocks());
        blocks.into_iter().map(|block| FrozenBlock { block, bytes: self.block(block) }).collect()
    }

    fn block(&self, block: usize) -> Vec<u8> {
        match self.blocks.get(block).and_then(OnceLock::get) {
            Some(entries) => entries.iter().flat_map(|entry| entry.load(Acquire).to_be_bytes()).collect(),
            None => vec![0; self.entries_in(block) * 8],
        }
    }

    /// The commit that froze these blocks failed: they are changed still.
    pub(crate) fn refreeze(&self, frozen: &[FrozenBlock]) {
        self.dirty_blocks().extend(frozen.iter().map(|block| block.block));
    }

    /// The whole table, big endian.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        (0..self.blocks.len()).flat_map(|block| self.block(block)).collect()
    }
}

impl Drop for ResidentTable {
    fn drop(&mut self) {
        let blocks = self.blocks.iter().filter_map(OnceLock::get).map(|block| block.len() * 8).sum::<usize>();
        self.store.budget().give_back_tables((size_of_val(&*self.blocks) + blocks) as u64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_is_frozen_once_and_again_after_a_failure() {
        let table =
            ResidentTable::new(100, 512, &Arc::new(SliceStore::new(1 << 20, std::time::Duration::ZERO)));
        assert!(table.set(70, 0x1234));
        assert!(!table.set(100, 1));
        let frozen = table.freeze();
        assert_eq!(frozen.len(), 1);
        assert_eq!(frozen[0].block, 1);
        assert_eq!(frozen[0].bytes.len(), 36 * 8, "the last block is short");
        assert_eq!(frozen[0].bytes[6 * 8..7 * 8], 0x1234u64.to_be_bytes());
        assert!(table.freeze().is_empty());
        table.refreeze(&frozen);
        assert_eq!(table.freeze().len(), 1);
    }

    #[test]
    fn what_holds_nothing_takes_no_memory() {
        let store = Arc::new(SliceStore::new(1 << 20, std::time::Duration::ZERO));
        let table = ResidentTable::new(1 << 20, 4096, &store);
        let empty = store.budget().tables();
        assert!(empty <= (1 << 20) / 512 * 24);
        table.fill(512 * 7, &[0; 4096]);
        assert_eq!(store.budget().tables(), empty);
        table.fill(512 * 7, &[0, 0, 0, 0, 0, 0, 0, 9]);
        assert_eq!(store.budget().tables(), empty + 4096);
        assert_eq!((table.get(512 * 7), table.get(512 * 8), table.get(1 << 30)), (9, 0, 0));
        let shorter = table.resized(100);
        assert_eq!((shorter.len(), shorter.iter_set().count()), (100, 0));
        let resized = table.resized(1 << 21);
        assert_eq!(resized.iter_set().collect::<Vec<_>>(), [(512 * 7, 9)]);
        assert_eq!(table.to_bytes().len(), 8 << 20);
        drop((table, shorter, resized));
        assert_eq!(store.budget().used(), 0);
    }
}
