//! Blocks of the object in bounded memory; those that were used last stay.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// Bytes of a block; the last one may have fewer.
pub(super) const BLOCK: u64 = 64 << 10;

/// The blocks.
pub(super) struct Cache {
    blocks: HashMap<u64, (Arc<[u8]>, u64)>,
    /// Numbers of blocks by the time of their latest use.
    order: BTreeMap<u64, u64>,
    time: u64,
    bytes: u64,
    most: u64,
}

impl Cache {
    /// A cache of `most` bytes.
    pub(super) fn new(most: u64) -> Self {
        Self { blocks: HashMap::new(), order: BTreeMap::new(), time: 0, bytes: 0, most }
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
        let (block, time) = self.blocks.get_mut(&number)?;
        self.order.remove(time);
        self.time += 1;
        *time = self.time;
        self.order.insert(self.time, number);
        Some(block)
    }

    /// Adds a block, and gives up others for it.
    pub(super) fn insert(&mut self, number: u64, block: Arc<[u8]>) {
        self.time += 1;
        self.bytes += block.len() as u64;
        if let Some((old, time)) = self.blocks.insert(number, (block, self.time)) {
            self.bytes -= old.len() as u64;
            self.order.remove(&time);
        }
        self.order.insert(self.time, number);
        while self.bytes > self.most {
            let Some((_, oldest)) = self.order.pop_first() else { break };
            if let Some((block, _)) = self.blocks.remove(&oldest) {
                self.bytes -= block.len() as u64;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_used_last_stays() {
        let mut cache = Cache::new(30);
        let block = |byte: u8| -> Arc<[u8]> { vec![byte; 10].into() };
        for number in 0..3 {
            cache.insert(number, block(number as u8));
        }
        assert_eq!(cache.get(0), Some(&[0; 10][..]));
        cache.insert(3, block(3));
        assert!(cache.has(0) && !cache.has(1) && cache.has(2) && cache.has(3));
        cache.insert(3, block(7));
        assert_eq!(cache.get(3), Some(&[7; 10][..]));
        assert_eq!((cache.bytes, cache.order.len()), (30, 3));
        cache.insert(9, vec![0; 40].into());
        assert_eq!((cache.bytes, cache.blocks.len(), cache.order.len()), (0, 0, 0));
    }
}
