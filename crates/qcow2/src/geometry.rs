//! Sizes and shifts of one image, computed once.

use crate::error::FormatError;
use crate::limits;
use crate::offsets::{GuestOffset, HostOffset};
use crate::version::Version;

/// The form of L2 entries.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum L2Format {
    /// 64 bits, one state for the cluster.
    Standard,
    /// 128 bits, a state for each of 32 subclusters.
    Extended,
}

/// Where guest data lies.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum DataLocation {
    /// In the image file itself.
    InImage,
    /// In an external data file, at host offsets equal to the guest offsets.
    External,
}

/// Sizes and shifts of one image; cheap to copy, fields consistent with each other.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub struct Geometry {
    /// Version of the format.
    pub version: Version,
    /// log2 of the cluster size in bytes, 9 to 21.
    pub cluster_bits: u32,
    /// log2 of the number of entries in an L2 table, 6 to 18.
    pub l2_bits: u32,
    /// Bytes of an L2 entry, 8 or 16.
    pub l2_entry_size: u32,
    /// Whether L2 entries are 128 bits wide.
    pub extended_l2: bool,
    /// 1, or 32 with extended L2 entries.
    pub subclusters_per_cluster: u32,
    /// log2 of the subcluster size in bytes; the cluster's without extended L2 entries.
    pub subcluster_bits: u32,
    /// log2 of the refcount width in bits, 0 to 6.
    pub refcount_order: u32,
    /// Whether guest data lies in an external data file.
    pub external_data: bool,
}

/// `1 << bits` for the shifts of a validated geometry (all below 64).
#[inline]
const fn pow2(bits: u32) -> u64 {
    1u64.wrapping_shl(bits)
}

impl Geometry {
    /// Checks the parameters and computes the rest.
    ///
    /// # Errors
    /// [`FormatError::UnsupportedClusterSize`], [`FormatError::UnsupportedSubclusterSize`],
    /// [`FormatError::RefcountWidthTooLarge`].
    pub fn new(
        version: Version,
        cluster_bits: u32,
        refcount_order: u32,
        l2_format: L2Format,
        data: DataLocation,
    ) -> Result<Self, FormatError> {
        if !(limits::MIN_CLUSTER_BITS..=limits::MAX_CLUSTER_BITS).contains(&cluster_bits) {
            return Err(FormatError::UnsupportedClusterSize { cluster_bits });
        }
        let extended_l2 = l2_format == L2Format::Extended;
        let (subclusters_per_cluster, subcluster_shift, entry_bits) = if extended_l2 {
            (limits::SUBCLUSTERS_PER_CLUSTER, limits::SUBCLUSTERS_PER_CLUSTER_BITS, 4)
        } else {
            (1, 0, 3)
        };
        let subcluster_bits = cluster_bits.saturating_sub(subcluster_shift);
        if subcluster_bits < limits::SECTOR_BITS {
            return Err(FormatError::UnsupportedSubclusterSize { subcluster_size: pow2(subcluster_bits) });
        }
        if refcount_order > limits::MAX_REFCOUNT_ORDER {
            return Err(FormatError::RefcountWidthTooLarge);
        }
        Ok(Self {
            version,
            cluster_bits,
            l2_bits: cluster_bits.saturating_sub(entry_bits),
            l2_entry_size: 1u32.wrapping_shl(entry_bits),
            extended_l2,
            subclusters_per_cluster,
            subcluster_bits,
            refcount_order,
            external_data: data == DataLocation::External,
        })
    }

    /// Bytes of a cluster.
    #[inline]
    pub fn cluster_size(&self) -> u64 {
        pow2(self.cluster_bits)
    }

    /// Bytes of a subcluster; of a cluster without extended L2 entries.
    #[inline]
    pub fn subcluster_size(&self) -> u64 {
        pow2(self.subcluster_bits)
    }

    /// Entries of an L2 table.
    #[inline]
    pub fn l2_entries(&self) -> u64 {
        pow2(self.l2_bits)
    }

    /// Guest bytes that one L2 table maps.
    #[inline]
    pub fn guest_bytes_per_l2(&self) -> u64 {
        pow2(self.cluster_bits.wrapping_add(self.l2_bits))
    }

    /// Index in the L1 table of the entry that covers `guest`.
    #[inline]
    pub fn l1_index(&self, guest: GuestOffset) -> u64 {
        guest.0.wrapping_shr(self.cluster_bits.wrapping_add(self.l2_bits))
    }

    /// Index in its L2 table of the entry of `guest`.
    #[inline]
    pub fn l2_index(&self, guest: GuestOffset) -> u64 {
        guest.0.wrapping_shr(self.cluster_bits) & self.l2_entries().wrapping_sub(1)
    }

    /// First guest byte that entry `l2_index` of table `l1_index` maps, or `None` past 2^64.
    #[inline]
    pub fn guest_offset(&self, l1_index: u64, l2_index: u64) -> Option<GuestOffset> {
        let cluster = l1_index.checked_mul(self.l2_entries())?.checked_add(l2_index)?;
        cluster.checked_mul(self.cluster_size()).map(GuestOffset)
    }

    /// Index of the subcluster of `guest` within its cluster; 0 without extended L2 entries.
    #[inline]
    pub fn subcluster_index(&self, guest: GuestOffset) -> u32 {
        (self.offset_in_cluster(guest.0).wrapping_shr(self.subcluster_bits)) as u32
    }

    /// L1 entries that a disk of `size` bytes needs, or `None` if more than a 32-bit signed count (QEMU).
    #[inline]
    pub fn l1_entries_for(&self, size: u64) -> Option<u64> {
        let entries = size.div_ceil(self.guest_bytes_per_l2());
        i32::try_from(entries).is_ok().then_some(entries)
    }

    /// Refcounts in one refcount block.
    #[inline]
    pub fn refcount_entries_per_block(&self) -> u64 {
        pow2(self.cluster_bits.wrapping_add(3).wrapping_sub(self.refcount_order))
    }

    /// Entries in one cluster of the refcount table.
    #[inline]
    pub fn reftable_entries_per_cluster(&self) -> u64 {
        pow2(self.cluster_bits.wrapping_sub(3))
    }

    /// Bits of a refcount: 1, 2, 4, ... 64.
    #[inline]
    pub fn refcount_bits(&self) -> u32 {
        1u32.wrapping_shl(self.refcount_order)
    }

    /// The largest refcount of the image's width.
    #[inline]
    pub fn refcount_max(&self) -> u64 {
        u64::MAX.wrapping_shr(64u32.wrapping_sub(self.refcount_bits()))
    }

    /// Index of the refcount table entry that covers `host`.
    #[inline]
    pub fn reftable_index(&self, host: HostOffset) -> u64 {
        let bits = self.cluster_bits.wrapping_mul(2).wrapping_add(3).wrapping_sub(self.refcount_order);
        host.0.wrapping_shr(bits)
    }

    /// Index within its refcount block of the refcount of the cluster that holds `host`.
    #[inline]
    pub fn refblock_index(&self, host: HostOffset) -> u64 {
        self.cluster_index(host) & self.refcount_entries_per_block().wrapping_sub(1)
    }

    /// Index of the host cluster that holds `host`.
    #[inline]
    pub fn cluster_index(&self, host: HostOffset) -> u64 {
        host.0.wrapping_shr(self.cluster_bits)
    }

    /// Host offset of the host cluster with this index, or `None` past 2^64.
    #[inline]
    pub fn cluster_offset(&self, index: u64) -> Option<HostOffset> {
        index.checked_mul(self.cluster_size()).map(HostOffset)
    }

    /// Clusters that hold `len` bytes from a cluster boundary on.
    #[inline]
    pub fn host_clusters(&self, len: u64) -> u64 {
        len.div_ceil(self.cluster_size())
    }

    /// Bytes from the start of the cluster to `offset` (guest or host).
    #[inline]
    pub fn offset_in_cluster(&self, offset: u64) -> u64 {
        offset & self.cluster_size().wrapping_sub(1)
    }

    /// `offset` rounded down to a cluster boundary.
    #[inline]
    pub fn cluster_start(&self, offset: u64) -> u64 {
        offset & !self.cluster_size().wrapping_sub(1)
    }

    /// `len` rounded up to whole clusters, or `None` past 2^64.
    #[inline]
    pub fn round_up_to_cluster(&self, len: u64) -> Option<u64> {
        self.host_clusters(len).checked_mul(self.cluster_size())
    }

    /// Whether `offset` lies on a cluster boundary.
    #[inline]
    pub fn is_cluster_aligned(&self, offset: u64) -> bool {
        self.offset_in_cluster(offset) == 0
    }

    /// Host offsets below this can hold the start of a compressed stream: the descriptor of large clusters has
    /// fewer offset bits than 56.
    #[inline]
    pub fn compressed_offset_end(&self) -> u64 {
        pow2(self.compressed_offset_bits()).min(limits::HOST_OFFSET_END)
    }

    /// Bits of the host offset in a compressed cluster descriptor: 61 for 512-byte clusters, 49 for 2 MiB.
    #[inline]
    pub fn compressed_offset_bits(&self) -> u32 {
        70u32.wrapping_sub(self.cluster_bits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn standard(cluster_bits: u32, refcount_order: u32) -> Geometry {
        Geometry::new(Version::V3, cluster_bits, refcount_order, L2Format::Standard, DataLocation::InImage)
            .unwrap()
    }

    #[test]
    fn default_image() {
        let g = standard(16, 4);
        assert_eq!((g.cluster_size(), g.l2_entries(), g.l2_entry_size), (65536, 8192, 8));
        assert_eq!(g.guest_bytes_per_l2(), 512 << 20);
        let guest = GuestOffset((3 << 29) + (7 << 16) + 5);
        assert_eq!((g.l1_index(guest), g.l2_index(guest)), (3, 7));
        assert_eq!(g.guest_offset(3, 7), Some(GuestOffset((3 << 29) + (7 << 16))));
        assert_eq!(g.subcluster_index(guest), 0);
        // Reference figures of the format: one block covers 2 GiB, one table cluster 16 TiB.
        assert_eq!(g.refcount_entries_per_block(), 32768);
        assert_eq!(g.reftable_entries_per_cluster() * g.refcount_entries_per_block() * 65536, 16 << 40);
        assert_eq!(g.refcount_max(), 65535);
        let host = HostOffset((5 << 31) + (9 << 16) + 1);
        assert_eq!((g.reftable_index(host), g.refblock_index(host)), (5, 9));
    }

    #[test]
    fn extended_l2_halves_the_table_and_splits_the_cluster() {
        let g = Geometry::new(Version::V3, 17, 4, L2Format::Extended, DataLocation::InImage).unwrap();
        assert_eq!((g.l2_bits, g.l2_entry_size, g.subcluster_size()), (13, 16, 4096));
        assert_eq!(g.subcluster_index(GuestOffset((1 << 17) + 31 * 4096)), 31);
    }

    #[test]
    fn refcount_width_limits() {
        assert_eq!(standard(9, 0).refcount_max(), 1);
        assert_eq!(standard(9, 3).refcount_max(), 255);
        assert_eq!(standard(9, 6).refcount_max(), u64::MAX);
        // 512-byte clusters with 64-bit refcounts: 8 MiB of table cover 32 GiB.
        let g = standard(9, 6);
        assert_eq!(limits::MAX_REFTABLE_SIZE / 8 * g.refcount_entries_per_block() * 512, 32 << 30);
    }

    #[test]
    fn l1_entries_round_up_and_are_bounded() {
        let g = standard(16, 4);
        assert_eq!(g.l1_entries_for(0), Some(0));
        assert_eq!(g.l1_entries_for(1), Some(1));
        assert_eq!(g.l1_entries_for(512 << 20), Some(1));
        assert_eq!(g.l1_entries_for((512 << 20) + 1), Some(2));
        assert_eq!(g.l1_entries_for(u64::MAX), None);
        assert_eq!(standard(21, 4).l1_entries_for(u64::MAX), Some(1 << 25));
        assert_eq!(standard(9, 4).l1_entries_for(i32::MAX as u64 * 32768), Some(i32::MAX as u64));
        assert_eq!(standard(9, 4).l1_entries_for(i32::MAX as u64 * 32768 + 1), None);
    }

    #[test]
    fn rounding() {
        let g = standard(12, 4);
        assert_eq!((g.host_clusters(0), g.host_clusters(1), g.host_clusters(4097)), (0, 1, 2));
        assert_eq!(g.round_up_to_cluster(u64::MAX), None);
        assert_eq!((g.cluster_start(8191), g.offset_in_cluster(8191)), (4096, 4095));
    }

    #[test]
    fn limits_are_enforced() {
        let make = |bits, order, l2| Geometry::new(Version::V3, bits, order, l2, DataLocation::InImage);
        for bits in [0, 8, 22, u32::MAX] {
            assert_eq!(
                make(bits, 4, L2Format::Standard),
                Err(FormatError::UnsupportedClusterSize { cluster_bits: bits })
            );
        }
        assert_eq!(
            make(13, 4, L2Format::Extended),
            Err(FormatError::UnsupportedSubclusterSize { subcluster_size: 256 })
        );
        assert!(make(14, 4, L2Format::Extended).is_ok());
        assert_eq!(make(16, 7, L2Format::Standard), Err(FormatError::RefcountWidthTooLarge));
    }
}
