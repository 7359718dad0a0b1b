//! Where the blocks of a new image lie in its file.

use super::blocks::BlockTable;
use super::options::Allocation;

/// Bytes of a part of a long table.
pub(super) const TABLE_PART: u64 = 1 << 20;

/// Bytes that belong somewhere in the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// Offset in the file, bytes.
    pub offset: u64,
    /// Content.
    pub bytes: Vec<u8>,
}

/// Where the blocks of an image lie.
#[derive(Debug, Clone)]
pub(super) struct Places {
    /// Bytes of the disk, and of a block.
    pub(super) size: u64,
    pub(super) block: u64,
    /// Offset of the first block's data, and the distance from one to the next, in bytes.
    pub(super) first: u64,
    pub(super) stride: u64,
    pub(super) allocation: Allocation,
    /// Places at most.
    pub(super) most: u32,
    /// Bytes right before the data of each block.
    pub(super) mark: Vec<u8>,
}

impl Places {
    pub(super) fn blocks(&self) -> u64 {
        self.size.div_ceil(self.block.max(1))
    }

    /// The offset in the file of the data in a place.
    pub(super) fn host(&self, place: u64) -> u64 {
        self.first.saturating_add(place.saturating_mul(self.stride))
    }

    /// The end of the last place.
    pub(super) fn end(&self, used: u32) -> u64 {
        match self.allocation {
            Allocation::Fixed => self.host(self.blocks()),
            Allocation::Dynamic => self.host(u64::from(used)).saturating_sub(self.mark.len() as u64),
        }
    }

    /// The place of a block, if it has one.
    pub(super) fn of(&self, table: &BlockTable, index: u64) -> Option<u64> {
        match self.allocation {
            Allocation::Fixed => Some(index),
            Allocation::Dynamic => table.get(index).map(u64::from),
        }
    }
}
