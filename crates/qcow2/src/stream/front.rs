//! Room for tables in front of the clusters that they map.

use crate::geometry::Geometry;
use crate::limits;

/// Room behind the header for tables that are known at the end, in clusters.
#[derive(Debug, Clone, Copy)]
pub(super) struct Front {
    pub(super) l1: u64,
    pub(super) refcount_table: u64,
}

impl Front {
    /// For a disk of `size` bytes that is written whole.
    pub(super) fn new(geometry: &Geometry, size: u64, l1_entries: u64) -> Self {
        let l1 = geometry.host_clusters(l1_entries.saturating_mul(8)).max(1);
        let others =
            geometry.host_clusters(size).saturating_add(l1_entries).saturating_add(l1).saturating_add(1);
        // A block counts its own cluster, too.
        let per_block = geometry.refcount_entries_per_block().saturating_sub(1).max(1);
        let most = (limits::MAX_REFTABLE_SIZE >> geometry.cluster_bits).max(1);
        let mut refcount_table = 1u64;
        loop {
            let blocks = others.saturating_add(refcount_table).div_ceil(per_block);
            let needed = blocks.div_ceil(geometry.reftable_entries_per_cluster().max(1)).min(most);
            if needed <= refcount_table {
                return Self { l1, refcount_table };
            }
            refcount_table = needed;
        }
    }

    /// Clusters with that of the header.
    pub(super) fn clusters(self) -> u64 {
        self.l1.saturating_add(self.refcount_table).saturating_add(1)
    }
}
