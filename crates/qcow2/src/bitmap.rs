//! Persistent dirty bitmaps: the directory, and the tables that lead to a bitmap's data.
//!
//! A bitmap has one bit for each `1 << granularity_bits` bytes of the disk, lowest bit of a byte first. Its data
//! lies in clusters that its table names in order (format document, "Bitmaps").

use bitflags::bitflags;

use crate::bytes::{self, ZeroExtended};
use crate::error::{EntryError, FormatError, OutOfBounds};
use crate::geometry::Geometry;
use crate::limits;
use crate::offsets::HostOffset;

bitflags! {
    /// State of a bitmap. Unknown bits are kept.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    pub struct BitmapFlags: u32 {
        /// A program had the bitmap in memory and did not write it back: it cannot be trusted.
        const IN_USE = 1 << 0;
        /// The bitmap records all writes to the disk.
        const AUTO = 1 << 1;
        /// The bitmap may be used although its extra data is not understood.
        const EXTRA_DATA_COMPATIBLE = 1 << 2;
        const _ = !0;
    }
}

/// The only type that the format defines: a dirty tracking bitmap.
const TYPE_DIRTY: u8 = 1;
/// Bytes of the fixed part of a directory entry.
const FIXED: usize = 24;

/// An entry of the bitmap directory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BitmapEntry {
    /// Host offset of the bitmap's table, a cluster boundary.
    pub table_offset: HostOffset,
    /// Entries of the bitmap's table.
    pub table_entries: u32,
    /// State.
    pub flags: BitmapFlags,
    /// log2 of the bytes of disk that one bit stands for, 9 to 31.
    pub granularity_bits: u8,
    /// Name, 1 to 1023 bytes.
    pub name: Vec<u8>,
    kind: u8,
    extra: Vec<u8>,
}

impl BitmapEntry {
    /// A dirty tracking bitmap without extra data.
    pub fn new(name: Vec<u8>, granularity_bits: u8, flags: BitmapFlags) -> Self {
        Self {
            table_offset: HostOffset(0),
            table_entries: 0,
            flags,
            granularity_bits,
            name,
            kind: TYPE_DIRTY,
            extra: Vec::new(),
        }
    }

    /// Extra data, whose meaning is not known.
    pub fn extra(&self) -> &[u8] {
        &self.extra
    }

    /// That QEMU would take the entry for a disk of `virtual_size` bytes. Such an image does not open there
    /// otherwise, as long as its autoclear bit says that the bitmaps are consistent.
    ///
    /// # Errors
    /// [`FormatError::BitmapExtraData`], [`FormatError::BitmapConstraints`].
    pub fn validate(&self, geometry: &Geometry, virtual_size: u64) -> Result<(), FormatError> {
        if !self.extra.is_empty() {
            return Err(FormatError::BitmapExtraData);
        }
        let data_size = (self.table_entries as u64).saturating_mul(geometry.cluster_size());
        let granularity = limits::MIN_BITMAP_GRANULARITY_BITS..=limits::MAX_BITMAP_GRANULARITY_BITS;
        let sound = self.table_entries != 0
            && self.table_entries <= limits::MAX_BITMAP_TABLE_ENTRIES
            && data_size <= limits::MAX_BITMAP_DATA_SIZE
            && self.table_offset.0 != 0
            && geometry.is_cluster_aligned(self.table_offset.0)
            && (BitmapFlags::IN_USE | BitmapFlags::AUTO).contains(self.flags)
            && self.kind == TYPE_DIRTY
            && granularity.contains(&self.granularity_bits)
            && (1..=limits::MAX_BITMAP_NAME as usize).contains(&self.name.len())
            // A bitmap in use may be of an older, smaller disk: it is not read.
            && (self.flags.contains(BitmapFlags::IN_USE)
                || data_size >= data_bytes(virtual_size, self.granularity_bits));
        if sound {
            Ok(())
        } else {
            Err(FormatError::BitmapConstraints { name: String::from_utf8_lossy(&self.name).into_owned() })
        }
    }

    /// Bytes of the entry on disk, padding included.
    pub fn len_on_disk(&self) -> u64 {
        let len =
            (FIXED as u64).saturating_add(self.extra.len() as u64).saturating_add(self.name.len() as u64);
        len.next_multiple_of(8)
    }
}

/// Bytes of data of a bitmap over `virtual_size` bytes of disk.
pub fn data_bytes(virtual_size: u64, granularity_bits: u8) -> u64 {
    virtual_size.div_ceil(1u64.wrapping_shl(granularity_bits as u32)).div_ceil(8)
}

/// Entries of the table of a bitmap over `virtual_size` bytes of disk.
pub fn table_entries(virtual_size: u64, granularity_bits: u8, geometry: &Geometry) -> u64 {
    geometry.host_clusters(data_bytes(virtual_size, granularity_bits))
}

/// Granularity of a bitmap where the user does not say: the cluster size, but 4 KiB to 64 KiB (QEMU).
pub fn default_granularity_bits(geometry: &Geometry) -> u8 {
    geometry.cluster_bits.clamp(12, 16) as u8
}

/// Parses the bitmap directory: `directory` is all of it, `count` what the header extension says.
///
/// The entries are not judged one by one: see [`BitmapEntry::validate`].
///
/// # Errors
/// [`FormatError::BitmapDirectoryEmpty`], [`FormatError::BitmapDirectorySize`],
/// [`FormatError::BitmapDirectoryBroken`], [`FormatError::MoreBitmapsThanExpected`],
/// [`FormatError::FewerBitmapsThanExpected`].
pub fn parse_directory(directory: &[u8], count: u32) -> Result<Vec<BitmapEntry>, FormatError> {
    let size = directory.len() as u64;
    if size == 0 {
        return Err(FormatError::BitmapDirectoryEmpty);
    }
    if size > limits::MAX_BITMAP_DIRECTORY_SIZE {
        return Err(FormatError::BitmapDirectorySize { size });
    }
    let mut entries = Vec::new();
    let mut rest = directory;
    while !rest.is_empty() {
        let fixed = rest.first_chunk::<FIXED>().ok_or(FormatError::BitmapDirectoryBroken)?;
        if entries.len() as u64 >= count as u64 {
            return Err(FormatError::MoreBitmapsThanExpected);
        }
        let fixed = ZeroExtended(fixed);
        let name_len = u16::from_be_bytes(fixed.array(18)) as usize;
        let extra_len = fixed.u32(20) as usize;
        let name_at = FIXED.saturating_add(extra_len);
        let name_end = name_at.saturating_add(name_len);
        let parts = (rest.get(FIXED..name_at), rest.get(name_at..name_end));
        let padded = name_end.checked_next_multiple_of(8).and_then(|end| rest.get(end..));
        let ((Some(extra), Some(name)), Some(next)) = (parts, padded) else {
            return Err(FormatError::BitmapDirectoryBroken);
        };
        let [kind, granularity_bits] = fixed.array(16);
        entries.push(BitmapEntry {
            table_offset: HostOffset(fixed.u64(0)),
            table_entries: fixed.u32(8),
            flags: BitmapFlags::from_bits_retain(fixed.u32(12)),
            granularity_bits,
            name: name.to_vec(),
            kind,
            extra: extra.to_vec(),
        });
        rest = next;
    }
    if (entries.len() as u64) < count as u64 {
        return Err(FormatError::FewerBitmapsThanExpected);
    }
    Ok(entries)
}

/// The bytes of a bitmap directory.
///
/// # Errors
/// [`FormatError::TooManyBitmaps`], [`FormatError::BitmapDirectorySize`],
/// [`FormatError::BitmapConstraints`] for a name or extra data that does not fit its length field.
pub fn encode_directory(entries: &[BitmapEntry]) -> Result<Vec<u8>, FormatError> {
    let count = u32::try_from(entries.len()).unwrap_or(u32::MAX);
    if count > limits::MAX_BITMAPS {
        return Err(FormatError::TooManyBitmaps { count });
    }
    let mut out = Vec::new();
    for entry in entries {
        let name_len = u16::try_from(entry.name.len());
        let extra_len = u32::try_from(entry.extra.len());
        let (Ok(name_len), Ok(extra_len)) = (name_len, extra_len) else {
            let name = String::from_utf8_lossy(&entry.name).into_owned();
            return Err(FormatError::BitmapConstraints { name });
        };
        out.extend_from_slice(&entry.table_offset.0.to_be_bytes());
        out.extend_from_slice(&entry.table_entries.to_be_bytes());
        out.extend_from_slice(&entry.flags.bits().to_be_bytes());
        out.extend_from_slice(&[entry.kind, entry.granularity_bits]);
        out.extend_from_slice(&name_len.to_be_bytes());
        out.extend_from_slice(&extra_len.to_be_bytes());
        out.extend_from_slice(&entry.extra);
        out.extend_from_slice(&entry.name);
        out.resize(out.len().next_multiple_of(8), 0);
        let size = out.len() as u64;
        if size > limits::MAX_BITMAP_DIRECTORY_SIZE {
            return Err(FormatError::BitmapDirectorySize { size });
        }
    }
    Ok(out)
}

/// Bits 9 to 55: the offset of the data cluster.
const OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;
/// Bit 0, without an offset: all bits of the cluster are 1.
const ALL_ONES: u64 = 1;

/// An entry of a bitmap's table.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct BitmapTableEntry(pub u64);

/// Where the bits of one entry of a bitmap's table are.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum BitmapCluster {
    /// All are 0.
    AllZeroes,
    /// All are 1.
    AllOnes,
    /// In this host cluster.
    Data(HostOffset),
}

impl BitmapTableEntry {
    /// Bytes of an entry on disk.
    pub const SIZE: usize = 8;

    /// The entry for a cluster of bits.
    pub fn new(cluster: BitmapCluster) -> Self {
        match cluster {
            BitmapCluster::AllZeroes => Self(0),
            BitmapCluster::AllOnes => Self(ALL_ONES),
            BitmapCluster::Data(host) => Self(host.0 & OFFSET_MASK),
        }
    }

    /// Decodes the entry.
    ///
    /// # Errors
    /// [`EntryError::BitmapTable`] for reserved bits or an offset that is not a cluster boundary.
    pub fn decode(self, geometry: &Geometry) -> Result<BitmapCluster, EntryError> {
        let offset = self.0 & OFFSET_MASK;
        match (offset, self.0 & !OFFSET_MASK) {
            (0, 0) => Ok(BitmapCluster::AllZeroes),
            (0, ALL_ONES) => Ok(BitmapCluster::AllOnes),
            (offset, 0) if geometry.is_cluster_aligned(offset) => Ok(BitmapCluster::Data(HostOffset(offset))),
            _ => Err(EntryError::BitmapTable { word: self.0 }),
        }
    }

    /// Reads entry `index` of a table on disk, or `None` past its end.
    pub fn read(table: &[u8], index: usize) -> Option<Self> {
        bytes::u64_at(table, index.checked_mul(Self::SIZE)?).map(Self)
    }

    /// Writes entry `index` of a table on disk.
    ///
    /// # Errors
    /// [`OutOfBounds`] past its end.
    pub fn write(self, table: &mut [u8], index: usize) -> Result<(), OutOfBounds> {
        let at = index.checked_mul(Self::SIZE).ok_or(OutOfBounds)?;
        bytes::put(table, at, &self.0.to_be_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::{DataLocation, L2Format};
    use crate::version::Version;
    use proptest::prelude::*;

    fn geometry() -> Geometry {
        Geometry::new(Version::V3, 16, 4, L2Format::Standard, DataLocation::InImage).unwrap()
    }

    fn bitmap() -> BitmapEntry {
        let mut entry = BitmapEntry::new(b"backup".to_vec(), 16, BitmapFlags::AUTO);
        entry.table_offset = HostOffset(0x5_0000);
        entry.table_entries = 1;
        entry
    }

    #[test]
    fn an_entry_by_hand() {
        let mut bytes = vec![];
        bytes.extend_from_slice(&0x5_0000u64.to_be_bytes());
        bytes.extend_from_slice(&1u32.to_be_bytes());
        bytes.extend_from_slice(&2u32.to_be_bytes());
        bytes.extend_from_slice(&[1, 16, 0, 6, 0, 0, 0, 0]);
        bytes.extend_from_slice(b"backup\0\0");
        assert_eq!(parse_directory(&bytes, 1), Ok(vec![bitmap()]));
        assert_eq!(encode_directory(&[bitmap()]), Ok(bytes));
    }

    #[test]
    fn sizes() {
        // 1 GiB at 64 KiB: 16384 bits in 2 KiB, one cluster.
        assert_eq!(data_bytes(1 << 30, 16), 2048);
        assert_eq!(table_entries(1 << 30, 16, &geometry()), 1);
        assert_eq!(data_bytes((1 << 30) + 1, 16), 2049);
        assert_eq!(data_bytes(u64::MAX, 9), 1 << 52);
        assert_eq!(default_granularity_bits(&geometry()), 16);
    }

    #[test]
    fn directories_that_do_not_add_up() {
        let two = encode_directory(&[bitmap(), bitmap()]).unwrap();
        assert_eq!(parse_directory(&two, 1), Err(FormatError::MoreBitmapsThanExpected));
        assert_eq!(parse_directory(&two, 3), Err(FormatError::FewerBitmapsThanExpected));
        assert_eq!(parse_directory(&two[..two.len() - 1], 2), Err(FormatError::BitmapDirectoryBroken));
        assert_eq!(parse_directory(&two[..40], 2), Err(FormatError::BitmapDirectoryBroken));
        assert_eq!(parse_directory(&[], 0), Err(FormatError::BitmapDirectoryEmpty));
    }

    #[test]
    fn constraints() {
        let size = 1 << 30;
        assert_eq!(bitmap().validate(&geometry(), size), Ok(()));
        let refused = |change: fn(&mut BitmapEntry)| {
            let mut entry = bitmap();
            change(&mut entry);
            entry.validate(&geometry(), size).is_err()
        };
        assert!(refused(|e| e.table_entries = 0));
        assert!(refused(|e| e.table_entries = 8193));
        assert!(refused(|e| e.table_offset = HostOffset(0)));
        assert!(refused(|e| e.table_offset = HostOffset(0x5_0200)));
        assert!(refused(|e| e.flags = BitmapFlags::EXTRA_DATA_COMPATIBLE));
        assert!(refused(|e| e.flags = BitmapFlags::from_bits_retain(0x10)));
        assert!(refused(|e| e.kind = 0));
        assert!(refused(|e| e.granularity_bits = 8));
        assert!(refused(|e| e.granularity_bits = 32));
        assert!(refused(|e| e.name = vec![]));
        assert!(refused(|e| e.name = vec![b'x'; 1024]));
        assert!(refused(|e| e.extra = vec![0]));
        // One cluster of bits at 512 bytes covers 256 MiB, no more.
        let mut fine = bitmap();
        fine.granularity_bits = 9;
        assert_eq!(fine.validate(&geometry(), 256 << 20), Ok(()));
        assert!(fine.validate(&geometry(), (256 << 20) + 512).is_err());
        assert!(refused(|e| e.granularity_bits = 9));
        assert!(!refused(|e| {
            e.granularity_bits = 9;
            e.flags = BitmapFlags::IN_USE;
        }));
    }

    #[test]
    fn table_entries_decode() {
        let g = geometry();
        assert_eq!(BitmapTableEntry(0).decode(&g), Ok(BitmapCluster::AllZeroes));
        assert_eq!(BitmapTableEntry(1).decode(&g), Ok(BitmapCluster::AllOnes));
        assert_eq!(BitmapTableEntry(0x5_0000).decode(&g), Ok(BitmapCluster::Data(HostOffset(0x5_0000))));
        for word in [2, 0x100, 0x5_0001, 0x5_0200, 1 << 56, 1 << 63] {
            assert_eq!(BitmapTableEntry(word).decode(&g), Err(EntryError::BitmapTable { word }));
        }
        for cluster in
            [BitmapCluster::AllZeroes, BitmapCluster::AllOnes, BitmapCluster::Data(HostOffset(1 << 16))]
        {
            assert_eq!(BitmapTableEntry::new(cluster).decode(&g), Ok(cluster));
        }
    }

    prop_compose! {
        fn any_bitmap()(
            table_offset in any::<u64>(),
            table_entries in any::<u32>(),
            flags in any::<u32>(),
            kind in any::<u8>(),
            granularity_bits in any::<u8>(),
            name in proptest::collection::vec(any::<u8>(), 0..40),
            extra in proptest::collection::vec(any::<u8>(), 0..40),
        ) -> BitmapEntry {
            let flags = BitmapFlags::from_bits_retain(flags);
            let table_offset = HostOffset(table_offset);
            BitmapEntry { table_offset, table_entries, flags, granularity_bits, name, kind, extra }
        }
    }

    proptest! {
        #[test]
        fn round_trip(entries in proptest::collection::vec(any_bitmap(), 1..6)) {
            let bytes = encode_directory(&entries).unwrap();
            prop_assert_eq!(bytes.len() as u64, entries.iter().map(BitmapEntry::len_on_disk).sum::<u64>());
            for entry in &entries {
                // Any verdict, but no panic.
                let _ = entry.validate(&geometry(), u64::MAX);
            }
            prop_assert_eq!(parse_directory(&bytes, entries.len() as u32), Ok(entries));
        }

        #[test]
        fn any_bytes_give_a_verdict(bytes in proptest::collection::vec(any::<u8>(), 0..200), count in 0u32..10) {
            if let Ok(entries) = parse_directory(&bytes, count) {
                prop_assert_eq!(entries.len() as u32, count);
            }
        }
    }
}
