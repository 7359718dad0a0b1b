//! Refcounts of a file that grows at its end: a block is complete when the file has grown past what it counts.

use super::error::StreamError;
use super::front::Front;
use crate::geometry::Geometry;
use crate::limits;
use crate::offsets::HostOffset;
use crate::refcount::{self, RefTableEntry};
use std::collections::VecDeque;

/// The references to host clusters, which come nearly in ascending order.
#[derive(Debug)]
pub(super) struct Refcounts {
    /// Where blocks are that were written.
    pub(super) blocks: Vec<HostOffset>,
    /// Blocks that follow them, not written yet.
    open: VecDeque<Vec<u8>>,
    /// Bytes of a block, counts of one, and the width of a count.
    size: usize,
    per_block: u64,
    order: u32,
}

/// The refcount structures at the end of a file.
pub(super) struct Tables {
    pub(super) blocks: Vec<Vec<u8>>,
    pub(super) table: Vec<u8>,
    /// Clusters of the file with them.
    pub(super) total: u64,
}

impl Refcounts {
    pub(super) fn new(geometry: &Geometry) -> Self {
        Self {
            blocks: Vec::new(),
            open: VecDeque::new(),
            size: geometry.cluster_size() as usize,
            per_block: geometry.refcount_entries_per_block(),
            order: geometry.refcount_order,
        }
    }

    /// The block of a host cluster among those that are open, and its place there.
    fn place(&self, cluster: u64) -> Option<(usize, usize)> {
        let block = cluster.checked_div(self.per_block)?.checked_sub(self.blocks.len() as u64)?;
        Some((usize::try_from(block).ok()?, cluster.checked_rem(self.per_block)? as usize))
    }

    fn count(&self, cluster: u64) -> u64 {
        let found = self.place(cluster).and_then(|(block, index)| {
            self.open.get(block).and_then(|block| refcount::get(block, index, self.order))
        });
        found.unwrap_or(0)
    }

    pub(super) fn has_room(&self, cluster: u64, geometry: &Geometry) -> bool {
        self.count(cluster) < geometry.refcount_max()
    }

    /// One more reference.
    pub(super) fn add(&mut self, cluster: u64, geometry: &Geometry) -> Result<(), StreamError> {
        let count = self.count(cluster).saturating_add(1);
        let (block, index) = self.place(cluster).ok_or(StreamError::TooLarge)?;
        if geometry.cluster_offset(cluster).is_none_or(|at| at.0 >= limits::HOST_OFFSET_END) {
            return Err(StreamError::TooLarge);
        }
        while self.open.len() <= block {
            self.open.push_back(vec![0; self.size]);
        }
        let bytes = self.open.get_mut(block).ok_or(StreamError::TooLarge)?;
        refcount::set(bytes, index, self.order, count).map_err(|_| StreamError::TooLarge)
    }

    /// The next block, if all that it counts lies before `end`. It counts as written; its place is to be noted.
    pub(super) fn next_complete(&mut self, end: u64, geometry: &Geometry) -> Option<Vec<u8>> {
        let clusters = (self.blocks.len() as u64).saturating_add(1).checked_mul(self.per_block)?;
        let whole = geometry.cluster_offset(clusters)?;
        if end < whole.0 {
            return None;
        }
        let block = self.open.pop_front()?;
        // Its own cluster is counted in a later one.
        self.blocks.push(HostOffset(0));
        Some(block)
    }

    /// The blocks that are left and the table, for a file whose other clusters are the first `clusters`. The table follows the blocks,
    /// unless there is room in front.
    pub(super) fn finish(
        &mut self,
        clusters: u64,
        front: Option<Front>,
        geometry: &Geometry,
    ) -> Result<Tables, StreamError> {
        let written = self.blocks.len() as u64;
        let per_table = geometry.reftable_entries_per_cluster();
        let (mut blocks, mut table) = (0u64, 0u64);
        // Each round counts what the last one added, which is less every time.
        let total = loop {
            let total = clusters.saturating_add(blocks).saturating_add(table);
            let all = total.div_ceil(self.per_block);
            let behind = if front.is_none() { all.div_ceil(per_table) } else { 0 };
            let next = (all.saturating_sub(written), behind);
            if next == (blocks, table) {
                break total;
            }
            (blocks, table) = next;
        };
        for cluster in clusters..total {
            self.add(cluster, geometry)?;
        }
        for block in 0..blocks {
            let at = geometry.cluster_offset(clusters.saturating_add(block)).ok_or(StreamError::TooLarge)?;
            self.blocks.push(at);
        }
        let entries =
            self.blocks.iter().flat_map(|block| RefTableEntry::new(*block).0.to_be_bytes()).collect();
        Ok(Tables { blocks: self.open.drain(..).collect(), table: entries, total })
    }
}
