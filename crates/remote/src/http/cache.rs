//! Blocks of the object in bounded memory; those that were used last stay.

use super::read_around::ReadAround;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// Bytes of a block; the last one may have fewer.
pub(super) const BLOCK: u64 = 16 << 10;

/// The blocks.
pub(super) struct Cache {
    blocks: HashMap<u64, Entry>,
    /// Numbers of blocks by the time of their latest use.
    order: BTreeMap<u64, u64>,
    time: u64,
    bytes: u64,
    most: u64,
    around: ReadAround,
}

struct Entry {
    block: Arc<[u8]>,
    /// Of its latest use.
    time: u64,
    /// Nobody has asked for it yet.
    is_unasked: bool,
}

/// Why a block was fetched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cause {
    /// Somebody waits for it.
    Read,
    /// It is near what somebody reads.
    Neighbour,
}

impl Cache {
    /// A cache of `most` bytes, which tells `around` how its blocks are used.
    pub(super) fn new(most: u64, around: ReadAround) -> Self {
        Self { blocks: HashMap::new(), order: BTreeMap::new(), time: 0, bytes: 0, most, around }
    }

    /// Bytes to fetch around one more small read.
    pub(super) fn bytes_around(&mut self) -> u64 {
        self.around.next()
    }

    /// Bytes that it may have.
    pub(super) fn most(&self) -> u64 {
        self.most
    }

    /// Whether it has a block, which is no use of it.
    pub(super) fn has(&self, number: u64) -> bool {
        self.blocks.contains_key(&number)
    }

    /// A block.
    pub(super) fn get(&mut self, number: u64) -> Option<&[u8]> {
        let entry = self.blocks.get_mut(&number)?;
        if std::mem::take(&mut entry.is_unasked) {
            self.around.note_used();
        }
        self.order.remove(&entry.time);
        self.time += 1;
        entry.time = self.time;
        self.order.insert(self.time, number);
        Some(&entry.block)
    }

    /// Gives up a block.
    pub(super) fn remove(&mut self, number: u64) {
        if let Some(entry) = self.blocks.remove(&number) {
            self.bytes -= entry.block.len() as u64;
            self.order.remove(&entry.time);
        }
    }

    /// Adds a block, and gives up others for it.
    pub(super) fn insert(&mut self, number: u64, block: Arc<[u8]>, cause: Cause) {
        self.time += 1;
        self.bytes += block.len() as u64;
        let entry = Entry { block, time: self.time, is_unasked: cause == Cause::Neighbour };
        if let Some(old) = self.blocks.insert(number, entry) {
            self.bytes -= old.block.len() as u64;
            self.order.remove(&old.time);
        }
        self.order.insert(self.time, number);
        while self.bytes > self.most {
            let Some((_, oldest)) = self.order.pop_first() else { break };
            if let Some(entry) = self.blocks.remove(&oldest) {
                self.bytes -= entry.block.len() as u64;
                if entry.is_unasked {
                    self.around.note_wasted();
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_used_last_stays() {
        let mut cache = Cache::new(30, ReadAround::new(None, BLOCK));
        let block = |byte: u8| -> Arc<[u8]> { vec![byte; 10].into() };
        for number in 0..3 {
            cache.insert(number, block(number as u8), Cause::Read);
        }
        assert_eq!(cache.get(0), Some(&[0; 10][..]));
        cache.insert(3, block(3), Cause::Read);
        assert!(cache.has(0) && !cache.has(1) && cache.has(2) && cache.has(3));
        cache.insert(3, block(7), Cause::Read);
        assert_eq!(cache.get(3), Some(&[7; 10][..]));
        assert_eq!((cache.bytes, cache.order.len()), (30, 3));
        cache.remove(3);
        cache.remove(8);
        assert!(!cache.has(3));
        assert_eq!((cache.bytes, cache.order.len()), (20, 2));
        cache.insert(9, vec![0; 40].into(), Cause::Read);
        assert_eq!((cache.bytes, cache.blocks.len(), cache.order.len()), (0, 0, 0));
    }
}
