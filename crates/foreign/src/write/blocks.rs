//! The places of the blocks of a new image that were written.

/// Blocks of one leaf.
const LEAF: usize = 512;
/// The entry of a block that has no place.
const NONE: u32 = u32::MAX;

/// The place of each block that has one. Memory follows the blocks that were written: 4 bytes each, in leaves of 512.
#[derive(Debug, Clone)]
pub struct BlockTable {
    leaves: Vec<Option<Box<[u32; LEAF]>>>,
    used: u32,
}

impl BlockTable {
    /// The table of a disk of `blocks` blocks, none of which has a place.
    pub fn new(blocks: u64) -> Self {
        Self { leaves: vec![None; blocks.div_ceil(LEAF as u64) as usize], used: 0 }
    }

    /// The place of a block.
    pub fn get(&self, index: u64) -> Option<u32> {
        let (leaf, within) = split(index);
        let place = self.leaves.get(leaf)?.as_ref()?.get(within).copied()?;
        (place != NONE).then_some(place)
    }

    /// Gives the next place to a block that has none. `None` if there are `most` already, or no such block.
    pub fn insert(&mut self, index: u64, most: u32) -> Option<u32> {
        if self.used >= most {
            return None;
        }
        let (leaf, within) = split(index);
        let leaf = self.leaves.get_mut(leaf)?.get_or_insert_with(|| Box::new([NONE; LEAF]));
        let entry = leaf.get_mut(within)?;
        let place = self.used;
        *entry = place;
        self.used = place.checked_add(1)?;
        Some(place)
    }

    /// Places that were given.
    pub fn used(&self) -> u32 {
        self.used
    }

    /// Whether any of the 512 blocks from `512 * leaf` on has a place.
    pub(super) fn has_leaf(&self, leaf: usize) -> bool {
        self.leaves.get(leaf).is_some_and(Option::is_some)
    }
}

fn split(index: u64) -> (usize, usize) {
    let index = usize::try_from(index).unwrap_or(usize::MAX);
    (index / LEAF, index % LEAF)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_given_in_order_and_no_more_than_there_are() {
        let mut table = BlockTable::new(1000);
        assert_eq!(table.insert(999, 2), Some(0));
        assert_eq!(table.insert(3, 2), Some(1));
        assert_eq!(table.insert(4, 2), None);
        assert_eq!(
            (table.get(999), table.get(3), table.get(4), table.get(5000)),
            (Some(0), Some(1), None, None)
        );
        assert_eq!(table.insert(5000, 9), None);
        assert!(table.has_leaf(0) && table.has_leaf(1) && !table.has_leaf(2));
    }
}
