//! A table that is held in memory whole: the active L1 table, the refcount table.
//!
//! Entries are read without a lock. Changes set the entry and note its block; a commit freezes copies of the noted
//! blocks.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering::Acquire, Ordering::Release};
use std::sync::{Mutex, PoisonError};

/// Entries in a block of a table.
const ENTRIES_PER_512: usize = 64;

/// See the module.
#[derive(Debug)]
pub(crate) struct TopTable {
    entries: Box<[AtomicU64]>,
    entries_per_block: usize,
    dirty: Mutex<BTreeSet<usize>>,
}

/// A block of a table as a commit writes it.
#[derive(Debug)]
pub(crate) struct FrozenBlock {
    /// Number of the block in the table.
    pub(crate) block: usize,
    /// Big-endian content.
    pub(crate) bytes: Vec<u8>,
}

impl TopTable {
    /// A table of `entries`, written in blocks of `block_bytes`.
    pub(crate) fn new(entries: impl Iterator<Item = u64>, block_bytes: usize) -> Self {
        Self {
            entries: entries.map(AtomicU64::new).collect(),
            entries_per_block: (block_bytes / 8).max(ENTRIES_PER_512),
            dirty: Mutex::default(),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Entry `index`; 0 past the end.
    pub(crate) fn get(&self, index: u64) -> u64 {
        usize::try_from(index).ok().and_then(|i| self.entries.get(i)).map_or(0, |entry| entry.load(Acquire))
    }

    /// Changes entry `index`; `false` if there is none.
    pub(crate) fn set(&self, index: u64, value: u64) -> bool {
        let Some(entry) = usize::try_from(index).ok().and_then(|i| self.entries.get(i)) else { return false };
        entry.store(value, Release);
        self.dirty_blocks().insert(index as usize / self.entries_per_block);
        true
    }

    fn dirty_blocks(&self) -> std::sync::MutexGuard<'_, BTreeSet<usize>> {
        self.dirty.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is_dirty(&self) -> bool {
        !self.dirty_blocks().is_empty()
    }

    /// All entries, in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = u64> + '_ {
        self.entries.iter().map(|entry| entry.load(Acquire))
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
        let start = block * self.entries_per_block;
        let end = (start + self.entries_per_block).min(self.entries.len());
        self.entries[start..end].iter().flat_map(|entry| entry.load(Acquire).to_be_bytes()).collect()
    }

    /// The commit that froze these blocks failed: they are changed still.
    pub(crate) fn refreeze(&self, frozen: &[FrozenBlock]) {
        self.dirty_blocks().extend(frozen.iter().map(|block| block.block));
    }

    /// The whole table, big endian.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        self.iter().flat_map(u64::to_be_bytes).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_is_frozen_once_and_again_after_a_failure() {
        let table = TopTable::new((0..100).map(|_| 0), 512);
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
}
