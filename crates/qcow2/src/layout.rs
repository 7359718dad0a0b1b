//! The layout of a new image, and the size of any image: numbers that depend on each other, since refcount
//! blocks count themselves.

use crate::error::FormatError;
use crate::geometry::Geometry;
use crate::header::Header;
use crate::l1::L1Entry;
use crate::l2::L2Entry;
use crate::limits;
use crate::offsets::HostOffset;
use crate::refcount::{self, RefTableEntry};
use std::ops::Range;

/// Refcount blocks and refcount table of an image, in clusters.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RefcountStructures {
    /// Refcount blocks, of one cluster each.
    pub blocks: u64,
    /// Clusters of the refcount table.
    pub table_clusters: u64,
}

impl RefcountStructures {
    /// Clusters of both.
    pub fn clusters(&self) -> u64 {
        self.blocks.saturating_add(self.table_clusters)
    }
}

/// The smallest refcount structures that count `other_clusters` clusters and themselves.
///
/// `None` if the counts leave 64 bits. Whether the table is within QEMU's 8 MiB is not checked.
pub fn refcount_structures(other_clusters: u64, geometry: &Geometry) -> Option<RefcountStructures> {
    let mut found = RefcountStructures { blocks: 0, table_clusters: 0 };
    // Each round covers what the last one added. A structure has at least 64 entries, so what is added shrinks by
    // that factor and the rounds end.
    loop {
        let total = other_clusters.checked_add(found.clusters())?;
        let blocks = total.div_ceil(geometry.refcount_entries_per_block());
        let table_clusters = blocks.div_ceil(geometry.reftable_entries_per_cluster());
        if (blocks, table_clusters) == (found.blocks, found.table_clusters) {
            return Some(found);
        }
        found = RefcountStructures { blocks, table_clusters };
    }
}

/// The bytes of an image that is written in full: what `measure` reports.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct FullSize {
    /// Bytes of metadata: header, L1, L2 and refcount structures, all tables complete.
    pub metadata: u64,
    /// Bytes of guest data, in whole clusters.
    pub data: u64,
}

impl FullSize {
    /// Bytes of the file.
    pub fn total(&self) -> u64 {
        self.metadata.saturating_add(self.data)
    }
}

/// Clusters that the L1 table takes, for a disk of `size` bytes; at least the entries that it needs.
fn l1_clusters(entries: u64, geometry: &Geometry) -> Option<u64> {
    entries.checked_mul(L1Entry::SIZE as u64).map(|bytes| geometry.host_clusters(bytes))
}

fn checked_l1_entries(size: u64, geometry: &Geometry) -> Result<u64, FormatError> {
    geometry
        .l1_entries_for(size)
        .filter(|entries| *entries <= limits::MAX_L1_ENTRIES)
        .ok_or(FormatError::SizeTooLarge { size })
}

/// Size of an image of a disk of `size` bytes with every cluster allocated and `extra_clusters` more (those of a
/// LUKS header). With an external data file, the data is not in the image.
///
/// # Errors
/// [`FormatError::SizeTooLarge`] if no image can hold such a disk.
pub fn fully_allocated_size(
    size: u64,
    extra_clusters: u64,
    geometry: &Geometry,
) -> Result<FullSize, FormatError> {
    let too_large = FormatError::SizeTooLarge { size };
    let l2_tables = checked_l1_entries(size, geometry)?;
    let compute = || {
        let data_clusters = geometry.host_clusters(size);
        let data = data_clusters.checked_mul(geometry.cluster_size())?;
        let own = 1u64
            .checked_add(extra_clusters)?
            .checked_add(l1_clusters(l2_tables, geometry)?)?
            .checked_add(l2_tables)?;
        let refcounts = refcount_structures(own.checked_add(data_clusters)?, geometry)?;
        let metadata = own.checked_add(refcounts.clusters())?.checked_mul(geometry.cluster_size())?;
        metadata.checked_add(data)?;
        Some(FullSize { metadata, data })
    };
    compute().ok_or(too_large)
}

/// How much of a new image is allocated at once.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Preallocation {
    /// Header, refcount structures and L1 table only.
    Off,
    /// All L2 tables and data clusters as well.
    All,
}

/// Where the parts of a new image lie. They follow each other without gaps, each a whole number of clusters:
/// header, refcount table, refcount blocks, L1 table, LUKS header, L2 tables, data.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub struct FreshLayout {
    /// Sizes and shifts of the image.
    pub geometry: Geometry,
    /// Host offset of the refcount table.
    pub reftable_offset: HostOffset,
    /// Refcount blocks and clusters of the refcount table.
    pub refcounts: RefcountStructures,
    /// Host offset of the first refcount block; the others follow.
    pub refblocks_offset: HostOffset,
    /// Host offset of the L1 table.
    pub l1_offset: HostOffset,
    /// Entries of the L1 table.
    pub l1_entries: u32,
    /// Host offset of the LUKS header, if the image has one.
    pub luks_offset: HostOffset,
    /// Host offset of the first L2 table; the others follow.
    pub l2_offset: HostOffset,
    /// L2 tables: none, or one for each L1 entry.
    pub l2_tables: u32,
    /// Host offset of the first data cluster; the others follow. In the image, not in an external data file.
    pub data_offset: HostOffset,
    /// Data clusters in the image.
    pub data_clusters: u64,
    /// Clusters of the image, all with refcount 1.
    pub total_clusters: u64,
}

impl FreshLayout {
    /// The layout of a new image of a disk of `size` bytes.
    ///
    /// # Errors
    /// [`FormatError::SizeTooLarge`] if the L1 table would exceed 32 MiB or the refcount table 8 MiB.
    pub fn plan(size: u64, geometry: &Geometry, preallocation: Preallocation) -> Result<Self, FormatError> {
        Self::plan_with_luks(size, 0, geometry, preallocation)
    }

    /// The same with room for a LUKS header of `luks_len` bytes.
    ///
    /// # Errors
    /// As [`FreshLayout::plan`].
    pub fn plan_with_luks(
        size: u64,
        luks_len: u64,
        geometry: &Geometry,
        preallocation: Preallocation,
    ) -> Result<Self, FormatError> {
        let too_large = FormatError::SizeTooLarge { size };
        let l1_entries = checked_l1_entries(size, geometry)?;
        Self::place(size, l1_entries, luks_len, geometry, preallocation).ok_or(too_large)
    }

    fn place(
        size: u64,
        l1_entries: u64,
        luks_len: u64,
        geometry: &Geometry,
        preallocation: Preallocation,
    ) -> Option<Self> {
        let luks_clusters = geometry.host_clusters(luks_len);
        let l1_clusters = l1_clusters(l1_entries, geometry)?;
        let (l2_tables, data_clusters) = match preallocation {
            Preallocation::Off => (0, 0),
            Preallocation::All if geometry.external_data => (l1_entries, 0),
            Preallocation::All => (l1_entries, geometry.host_clusters(size)),
        };
        let metadata = 1u64.checked_add(l1_clusters)?.checked_add(luks_clusters)?.checked_add(l2_tables)?;
        let refcounts = refcount_structures(metadata.checked_add(data_clusters)?, geometry)?;
        let max_table = limits::MAX_REFTABLE_SIZE.wrapping_shr(geometry.cluster_bits);
        if refcounts.table_clusters > max_table {
            return None;
        }
        let mut next_cluster = 1u64;
        let mut take = |clusters: u64| {
            let start = geometry.cluster_offset(next_cluster)?;
            next_cluster = next_cluster.checked_add(clusters)?;
            Some(start)
        };
        let layout = Self {
            geometry: *geometry,
            reftable_offset: take(refcounts.table_clusters)?,
            refcounts,
            refblocks_offset: take(refcounts.blocks)?,
            l1_offset: take(l1_clusters)?,
            l1_entries: u32::try_from(l1_entries).ok()?,
            luks_offset: take(luks_clusters)?,
            l2_offset: take(l2_tables)?,
            l2_tables: u32::try_from(l2_tables).ok()?,
            data_offset: take(data_clusters)?,
            data_clusters,
            total_clusters: next_cluster,
        };
        let end = geometry.cluster_offset(layout.total_clusters)?;
        (end.0 <= limits::HOST_OFFSET_END).then_some(layout)
    }

    /// Sets the header's pointers to the tables.
    pub fn apply_to(&self, header: &mut Header) {
        header.refcount_table_offset = self.reftable_offset;
        // Bounded by the 8 MiB of the table.
        header.refcount_table_clusters = self.refcounts.table_clusters as u32;
        header.l1_table_offset = self.l1_offset;
        header.l1_size = self.l1_entries;
    }

    /// The refcount table, whole clusters, at most 8 MiB.
    pub fn reftable(&self) -> Vec<u8> {
        let geometry = &self.geometry;
        let mut table = Vec::new();
        for index in 0..self.refcounts.blocks {
            // The plan has bounded all offsets below 2^56.
            let block = self.refblocks_offset.0.saturating_add(index.saturating_mul(geometry.cluster_size()));
            table.extend_from_slice(&RefTableEntry::new(HostOffset(block)).0.to_be_bytes());
        }
        let len = self.refcounts.table_clusters.saturating_mul(geometry.cluster_size());
        table.resize(len as usize, 0);
        table
    }

    /// The L1 table, whole clusters: an entry for each L2 table of the layout.
    pub fn l1(&self) -> Vec<u8> {
        let cluster = self.geometry.cluster_size();
        let mut table = Vec::new();
        for index in 0..u64::from(self.l2_tables) {
            // The plan has bounded all offsets below 2^56.
            let l2 = self.l2_offset.0.saturating_add(index.saturating_mul(cluster));
            table.extend_from_slice(&L1Entry::new(HostOffset(l2), true).0.to_be_bytes());
        }
        table.resize((table.len() as u64).next_multiple_of(cluster) as usize, 0);
        table
    }

    /// L2 tables `tables` of the layout, one cluster each: every cluster of the disk is data, in the disk's order.
    pub fn l2(&self, tables: Range<u32>) -> Vec<u8> {
        let geometry = &self.geometry;
        let cluster = geometry.cluster_size();
        let per_table = geometry.l2_entries();
        let clusters = u64::from(tables.start).saturating_mul(per_table)
            ..u64::from(tables.end).saturating_mul(per_table).min(self.data_clusters);
        let mut table =
            vec![0; u64::from(tables.end.saturating_sub(tables.start)).saturating_mul(cluster) as usize];
        for (index, number) in clusters.enumerate() {
            let host = self.data_offset.0.saturating_add(number.saturating_mul(cluster));
            let written = L2Entry::data(HostOffset(host), geometry).write(&mut table, index, geometry);
            debug_assert!(written.is_ok(), "entry {index} lies behind its tables");
        }
        table
    }

    /// Refcount block `index`, one cluster: 1 for each cluster of the image. `None` past the last.
    pub fn refblock(&self, index: u64) -> Option<Vec<u8>> {
        if index >= self.refcounts.blocks {
            return None;
        }
        let geometry = &self.geometry;
        let mut block = vec![0; geometry.cluster_size() as usize];
        let per_block = geometry.refcount_entries_per_block();
        let counted_before = index.checked_mul(per_block)?;
        let used = self.total_clusters.saturating_sub(counted_before).min(per_block);
        for entry in 0..used {
            refcount::set(&mut block, entry as usize, geometry.refcount_order, 1).ok()?;
        }
        Some(block)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::{DataLocation, L2Format};
    use crate::version::Version;
    use proptest::prelude::*;

    fn make(cluster_bits: u32, order: u32) -> Geometry {
        Geometry::new(Version::V3, cluster_bits, order, L2Format::Standard, DataLocation::InImage).unwrap()
    }

    #[test]
    fn the_default_image_is_laid_out_as_qemu_does() {
        // Offsets as in the format reference: reftable in cluster 1, refblock 2, L1 3.
        let layout = FreshLayout::plan(1 << 30, &make(16, 4), Preallocation::Off).unwrap();
        assert_eq!(layout.reftable_offset, HostOffset(0x1_0000));
        assert_eq!(layout.refblocks_offset, HostOffset(0x2_0000));
        assert_eq!((layout.l1_offset, layout.l1_entries), (HostOffset(0x3_0000), 2));
        assert_eq!((layout.l2_tables, layout.data_clusters, layout.total_clusters), (0, 0, 4));
        assert_eq!(layout.reftable()[..16], [0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        let block = layout.refblock(0).unwrap();
        assert_eq!(block[..10], [0, 1, 0, 1, 0, 1, 0, 1, 0, 0]);
        assert_eq!(layout.refblock(1), None);
    }

    #[test]
    fn measured_size_of_a_gibibyte() {
        // QEMU's figures for 1 GiB at 64 KiB.
        let full = fully_allocated_size(1 << 30, 0, &make(16, 4)).unwrap();
        assert_eq!((full.metadata, full.total()), (393_216, 1_074_135_040));
    }

    #[test]
    fn sizes_that_cannot_be() {
        for size in [(128 << 30) + 1, 1 << 62, u64::MAX] {
            let geometry = make(9, 4);
            let refused = Err(FormatError::SizeTooLarge { size });
            assert_eq!(fully_allocated_size(size, 0, &geometry).map(|_| ()), refused);
            assert_eq!(FreshLayout::plan(size, &geometry, Preallocation::Off).map(|_| ()), refused);
        }
        assert!(FreshLayout::plan(128 << 30, &make(9, 4), Preallocation::Off).is_ok());
        // 64-bit refcounts of 512-byte clusters: 8 MiB of table count 32 GiB.
        assert!(FreshLayout::plan(33 << 30, &make(9, 6), Preallocation::All).is_err());
    }

    #[test]
    fn an_empty_disk() {
        let layout = FreshLayout::plan(0, &make(16, 4), Preallocation::All).unwrap();
        assert_eq!((layout.l1_entries, layout.total_clusters), (0, 3));
        assert_eq!(fully_allocated_size(0, 0, &make(16, 4)).unwrap().data, 0);
    }

    proptest! {
        /// The structures count all clusters, and one block or table cluster less would not.
        #[test]
        fn refcount_structures_are_sufficient_and_minimal(
            cluster_bits in 9u32..=21,
            order in 0u32..=6,
            clusters in prop_oneof![1u64..100_000, 1u64..1 << 44],
        ) {
            let g = make(cluster_bits, order);
            let found = refcount_structures(clusters, &g).unwrap();
            prop_assert!(found.blocks * g.refcount_entries_per_block() >= clusters + found.clusters());
            prop_assert!(found.table_clusters * g.reftable_entries_per_cluster() >= found.blocks);
            // With one block fewer, the table would have to have the same or one cluster less: neither suffices.
            let fewer = found.blocks - 1;
            let table = fewer.div_ceil(g.reftable_entries_per_cluster());
            prop_assert!(fewer * g.refcount_entries_per_block() < clusters + fewer + table);
        }

        #[test]
        fn tables_of_a_layout_map_every_cluster_once(
            cluster_bits in 14u32..=16,
            extended in any::<bool>(),
            size in 0u64..3 << 27,
        ) {
            let format = if extended { L2Format::Extended } else { L2Format::Standard };
            let g = Geometry::new(Version::V3, cluster_bits, 4, format, DataLocation::InImage).unwrap();
            let layout = FreshLayout::plan(size, &g, Preallocation::All).unwrap();
            let (l1, l2) = (layout.l1(), layout.l2(0..layout.l2_tables));
            let per_table = g.l2_entries();
            for cluster in 0..u64::from(layout.l2_tables) * per_table {
                let table = L1Entry::read(&l1, (cluster / per_table) as usize).unwrap();
                prop_assert!(table.copied());
                let expected = HostOffset(layout.l2_offset.0 + cluster / per_table * g.cluster_size());
                prop_assert_eq!(table.table(), Some(expected));
                let entry = L2Entry::read(&l2, cluster as usize, &g).unwrap();
                let data = HostOffset(layout.data_offset.0 + cluster * g.cluster_size());
                let expected = (cluster < layout.data_clusters).then(|| L2Entry::data(data, &g));
                prop_assert_eq!(entry, expected.unwrap_or_default());
            }
            prop_assert_eq!(layout.data_clusters, size.div_ceil(g.cluster_size()));
            let (first, rest) = (layout.l2(0..layout.l2_tables / 2), layout.l2(layout.l2_tables / 2..layout.l2_tables));
            prop_assert_eq!([first, rest].concat(), l2);
        }

        #[test]
        fn layouts_count_every_cluster_once(
            cluster_bits in 9u32..=12,
            order in 0u32..=6,
            size in 0u64..1 << 22,
            all in any::<bool>(),
        ) {
            let g = make(cluster_bits, order);
            let preallocation = if all { Preallocation::All } else { Preallocation::Off };
            let layout = FreshLayout::plan(size, &g, preallocation).unwrap();
            let mut counted = 0;
            for index in 0..layout.refcounts.blocks {
                let block = layout.refblock(index).unwrap();
                for entry in 0..g.refcount_entries_per_block() {
                    let cluster = index * g.refcount_entries_per_block() + entry;
                    let expected = u64::from(cluster < layout.total_clusters);
                    prop_assert_eq!(refcount::get(&block, entry as usize, order), Some(expected));
                    counted += expected;
                }
            }
            prop_assert_eq!(counted, layout.total_clusters);
            prop_assert_eq!(layout.reftable().len() as u64, layout.refcounts.table_clusters * g.cluster_size());
        }
    }
}
