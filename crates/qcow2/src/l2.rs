//! L2 table entries, standard (64 bits) and extended (128 bits).

use crate::bytes;
use crate::compressed::CompressedRange;
use crate::error::{EntryError, OutOfBounds};
use crate::geometry::Geometry;
use crate::offsets::{GuestOffset, HostOffset};
use crate::version::Version;

/// Bits 9 to 55: the offset of the host cluster.
const OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;
/// Bit 63: the refcount of the host cluster is exactly 1.
const COPIED: u64 = 1 << 63;
/// Bit 62: the rest is a compressed cluster descriptor.
const COMPRESSED: u64 = 1 << 62;
/// Bit 0: the cluster reads as zero; reserved in extended entries.
const ZERO: u64 = 1;

/// An entry of an L2 table as it is on disk.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct L2Entry {
    /// The first 64 bits.
    pub word: u64,
    /// The second 64 bits of an extended entry: ALLOC in bits 0 to 31, ZERO in bits 32 to 63. 0 otherwise.
    pub bitmap: u64,
}

/// The state of a cluster, as its L2 entry says.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Mapping {
    /// Nothing here: the backing file shows through, or zeroes.
    Unallocated,
    /// Reads as zero.
    Zero {
        /// A host cluster that is kept for later writes.
        host: Option<HostOffset>,
        /// Whether that cluster's refcount is exactly 1.
        copied: bool,
    },
    /// Guest data.
    Data {
        /// The host cluster.
        host: HostOffset,
        /// Whether its refcount is exactly 1, so that it may be written in place.
        copied: bool,
    },
    /// A compressed cluster.
    Compressed(CompressedRange),
    /// An extended entry that is not compressed: each subcluster has its own state. A subcluster is data where
    /// its `alloc` bit is set, zero where its `zero` bit is set, unallocated where neither is; never both.
    Subclusters {
        /// The host cluster; without one, no `alloc` bit is set.
        host: Option<HostOffset>,
        /// Whether that cluster's refcount is exactly 1.
        copied: bool,
        /// Bit i: subcluster i holds data in the host cluster.
        alloc: u32,
        /// Bit i: subcluster i reads as zero.
        zero: u32,
    },
}

impl L2Entry {
    /// An entry without a mapping.
    #[inline]
    pub fn unallocated() -> Self {
        Self::default()
    }

    /// A cluster that reads as zero and has no host cluster. Version 3 only.
    #[inline]
    pub fn zero_plain(geometry: &Geometry) -> Self {
        if geometry.extended_l2 {
            Self { word: 0, bitmap: (u32::MAX as u64) << 32 }
        } else {
            Self { word: ZERO, bitmap: 0 }
        }
    }

    /// A cluster that reads as zero and keeps `host` (refcount 1) for later writes. Version 3 only.
    #[inline]
    pub fn zero_allocated(host: HostOffset, geometry: &Geometry) -> Self {
        let plain = Self::zero_plain(geometry);
        Self { word: plain.word | (host.0 & OFFSET_MASK) | COPIED, ..plain }
    }

    /// A cluster of data at `host`, whole, with refcount 1.
    #[inline]
    pub fn data(host: HostOffset, geometry: &Geometry) -> Self {
        let bitmap = if geometry.extended_l2 { u32::MAX as u64 } else { 0 };
        Self { word: (host.0 & OFFSET_MASK) | COPIED, bitmap }
    }

    /// An extended entry with the given state of each subcluster and, with a host cluster, refcount 1.
    #[inline]
    pub fn subclusters(host: Option<HostOffset>, alloc: u32, zero: u32) -> Self {
        let word = host.map_or(0, |host| (host.0 & OFFSET_MASK) | COPIED);
        Self { word, bitmap: alloc as u64 | ((zero as u64) << 32) }
    }

    /// A compressed stream of `stream_len` bytes at `offset`.
    ///
    /// # Errors
    /// As [`CompressedRange::encode`].
    #[inline]
    pub fn compressed(offset: HostOffset, stream_len: u64, geometry: &Geometry) -> Result<Self, EntryError> {
        let descriptor = CompressedRange::encode(offset, stream_len, geometry)?;
        Ok(Self { word: COMPRESSED | descriptor, bitmap: 0 })
    }

    /// The same entry with the COPIED flag as given.
    #[inline]
    pub fn with_copied(self, copied: bool) -> Self {
        let word = if copied { self.word | COPIED } else { self.word & !COPIED };
        Self { word, ..self }
    }

    /// Whether the COPIED flag is set. A check reports it on compressed entries, where it must not be.
    #[inline]
    pub fn copied(self) -> bool {
        self.word & COPIED != 0
    }

    /// Whether the entry is a compressed cluster.
    #[inline]
    pub fn is_compressed(self) -> bool {
        self.word & COMPRESSED != 0
    }

    /// The host cluster that a standard or extended entry refers to, whatever its state; `None` for none and for
    /// compressed entries. The alignment is not checked.
    #[inline]
    pub fn host(self, geometry: &Geometry) -> Option<HostOffset> {
        if self.is_compressed() {
            return None;
        }
        let offset = self.word & OFFSET_MASK;
        let zero_standard = !geometry.extended_l2 && self.word & ZERO != 0;
        // With a data file, offset 0 is the first cluster of that file where COPIED is set.
        let first_of_data_file = geometry.external_data && self.copied() && !zero_standard;
        (offset != 0 || first_of_data_file).then_some(HostOffset(offset))
    }

    /// Decodes the entry. The order of tests is the format's: compressed first, then zero, then the offset.
    /// Reserved bits are ignored, as QEMU does: see [`Self::reserved_bits`].
    ///
    /// # Errors
    /// The entry cannot be followed: see [`EntryError`]. The image is corrupt there.
    #[inline]
    pub fn decode(self, geometry: &Geometry) -> Result<Mapping, EntryError> {
        if self.is_compressed() {
            if geometry.external_data {
                return Err(EntryError::CompressedWithDataFile);
            }
            return CompressedRange::decode(self.word, geometry).map(Mapping::Compressed);
        }
        let host = self.host(geometry);
        if let Some(host) = host
            && !geometry.is_cluster_aligned(host.0)
        {
            return Err(EntryError::ClusterUnaligned { offset: host.0 });
        }
        let copied = self.copied();
        if geometry.extended_l2 {
            let (alloc, zero) = (self.bitmap as u32, (self.bitmap >> 32) as u32);
            if alloc & zero != 0 || (host.is_none() && alloc != 0) {
                return Err(EntryError::InvalidSubclusters { alloc, zero });
            }
            return Ok(Mapping::Subclusters { host, copied, alloc, zero });
        }
        if self.word & ZERO != 0 {
            if geometry.version == Version::V2 {
                return Err(EntryError::ZeroInVersion2);
            }
            return Ok(Mapping::Zero { host, copied });
        }
        Ok(host.map_or(Mapping::Unallocated, |host| Mapping::Data { host, copied }))
    }

    /// The reserved bits that are set in the first word; 0 for compressed entries, which have none.
    #[inline]
    pub fn reserved_bits(self, geometry: &Geometry) -> u64 {
        if self.is_compressed() {
            return 0;
        }
        let zero = if geometry.extended_l2 || geometry.version == Version::V2 { 0 } else { ZERO };
        self.word & !(OFFSET_MASK | COPIED | COMPRESSED | zero)
    }

    /// Reads entry `index` of a table (or a slice of one) on disk, or `None` past its end.
    #[inline]
    pub fn read(table: &[u8], index: usize, geometry: &Geometry) -> Option<Self> {
        let at = index.checked_mul(geometry.l2_entry_size as usize)?;
        let word = bytes::u64_at(table, at)?;
        let bitmap = if geometry.extended_l2 { bytes::u64_at(table, at.checked_add(8)?)? } else { 0 };
        Some(Self { word, bitmap })
    }

    /// Writes entry `index` of a table (or a slice of one) on disk.
    ///
    /// # Errors
    /// [`OutOfBounds`] past its end; nothing is written then.
    #[inline]
    pub fn write(self, table: &mut [u8], index: usize, geometry: &Geometry) -> Result<(), OutOfBounds> {
        let at = index.checked_mul(geometry.l2_entry_size as usize).ok_or(OutOfBounds)?;
        if geometry.extended_l2 {
            let both = (self.word as u128) << 64 | self.bitmap as u128;
            bytes::put(table, at, &both.to_be_bytes())
        } else {
            bytes::put(table, at, &self.word.to_be_bytes())
        }
    }
}

/// The rule of images with an external data file: data lies at the host offset equal to the guest offset.
///
/// # Errors
/// [`EntryError::DataFileOffset`] where `host` is not the start of the cluster of `guest`.
#[inline]
pub fn check_data_file_offset(
    host: HostOffset,
    guest: GuestOffset,
    geometry: &Geometry,
) -> Result<(), EntryError> {
    let guest = geometry.cluster_start(guest.0);
    if host.0 == guest { Ok(()) } else { Err(EntryError::DataFileOffset { host: host.0, guest }) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::{DataLocation, L2Format};
    use proptest::prelude::*;

    fn make(version: Version, l2: L2Format, data: DataLocation) -> Geometry {
        Geometry::new(version, 16, 4, l2, data).unwrap()
    }

    fn standard() -> Geometry {
        make(Version::V3, L2Format::Standard, DataLocation::InImage)
    }

    fn extended() -> Geometry {
        make(Version::V3, L2Format::Extended, DataLocation::InImage)
    }

    fn entry(word: u64) -> L2Entry {
        L2Entry { word, bitmap: 0 }
    }

    /// The table of cluster types in the format document, one line each.
    #[test]
    fn standard_types() {
        let g = standard();
        let host = HostOffset(0x5_0000);
        assert_eq!(entry(0).decode(&g), Ok(Mapping::Unallocated));
        assert_eq!(entry(COPIED).decode(&g), Ok(Mapping::Unallocated));
        assert_eq!(entry(1).decode(&g), Ok(Mapping::Zero { host: None, copied: false }));
        assert_eq!(entry(COPIED | 0x5_0001).decode(&g), Ok(Mapping::Zero { host: Some(host), copied: true }));
        assert_eq!(entry(COPIED | 0x5_0000).decode(&g), Ok(Mapping::Data { host, copied: true }));
        assert_eq!(entry(0x5_0000).decode(&g), Ok(Mapping::Data { host, copied: false }));
        // Compressed wins over everything else in the word.
        assert_eq!(
            entry(COPIED | COMPRESSED | 0x5_0001).decode(&g),
            Ok(Mapping::Compressed(CompressedRange { offset: HostOffset(0x5_0001), len: 511 }))
        );
    }

    #[test]
    fn entries_that_cannot_be_followed() {
        let g = standard();
        let unaligned = EntryError::ClusterUnaligned { offset: 0x5_0200 };
        assert_eq!(entry(0x5_0200).decode(&g), Err(unaligned));
        assert_eq!(entry(0x5_0201).decode(&g), Err(unaligned));
        let v2 = make(Version::V2, L2Format::Standard, DataLocation::InImage);
        assert_eq!(entry(1).decode(&v2), Err(EntryError::ZeroInVersion2));
        let data_file = make(Version::V3, L2Format::Standard, DataLocation::External);
        assert_eq!(entry(COMPRESSED).decode(&data_file), Err(EntryError::CompressedWithDataFile));
    }

    #[test]
    fn offset_zero_is_legal_in_a_data_file_with_copied() {
        let g = make(Version::V3, L2Format::Standard, DataLocation::External);
        assert_eq!(entry(COPIED).decode(&g), Ok(Mapping::Data { host: HostOffset(0), copied: true }));
        assert_eq!(entry(0).decode(&g), Ok(Mapping::Unallocated));
        let g = make(Version::V3, L2Format::Extended, DataLocation::External);
        assert_eq!(
            L2Entry { word: COPIED, bitmap: 1 }.decode(&g),
            Ok(Mapping::Subclusters { host: Some(HostOffset(0)), copied: true, alloc: 1, zero: 0 })
        );
        assert_eq!(
            L2Entry { word: 0, bitmap: 1 }.decode(&g),
            Err(EntryError::InvalidSubclusters { alloc: 1, zero: 0 })
        );
        // The reserved bit 0 changes nothing.
        assert_eq!(L2Entry { word: COPIED | 1, bitmap: 1 }.host(&g), Some(HostOffset(0)));
    }

    #[test]
    fn data_file_offsets_must_match() {
        let g = make(Version::V3, L2Format::Standard, DataLocation::External);
        assert_eq!(check_data_file_offset(HostOffset(0x5_0000), GuestOffset(0x5_1234), &g), Ok(()));
        assert_eq!(
            check_data_file_offset(HostOffset(0x5_0000), GuestOffset(0x6_0000), &g),
            Err(EntryError::DataFileOffset { host: 0x5_0000, guest: 0x6_0000 })
        );
    }

    #[test]
    fn extended_types() {
        let g = extended();
        let word = COPIED | 0x5_0000;
        assert_eq!(
            L2Entry { word, bitmap: 0x8000_0000_0000_0003 }.decode(&g),
            Ok(Mapping::Subclusters {
                host: Some(HostOffset(0x5_0000)),
                copied: true,
                alloc: 3,
                zero: 0x8000_0000
            })
        );
        assert_eq!(
            L2Entry { word, bitmap: 0x1_0000_0001 }.decode(&g),
            Err(EntryError::InvalidSubclusters { alloc: 1, zero: 1 })
        );
        assert_eq!(
            L2Entry { word: 0, bitmap: 1 }.decode(&g),
            Err(EntryError::InvalidSubclusters { alloc: 1, zero: 0 })
        );
        // Bit 0 is reserved here, not a zero flag.
        let reserved = entry(word | 1);
        assert_eq!(
            reserved.decode(&g),
            Ok(Mapping::Subclusters { host: Some(HostOffset(0x5_0000)), copied: true, alloc: 0, zero: 0 })
        );
        assert_eq!(reserved.reserved_bits(&g), 1);
    }

    #[test]
    fn reserved_bits_are_those_of_the_format() {
        assert_eq!(entry(!COMPRESSED).reserved_bits(&standard()), 0x3f00_0000_0000_01fe);
        assert_eq!(entry(!COMPRESSED).reserved_bits(&extended()), 0x3f00_0000_0000_01ff);
        assert_eq!(entry(u64::MAX).reserved_bits(&standard()), 0);
    }

    #[test]
    fn encoders_decode_to_what_they_say() {
        let host = HostOffset(0x5_0000);
        for g in [standard(), extended()] {
            let all = Mapping::Subclusters { host: None, copied: false, alloc: 0, zero: u32::MAX };
            let zero = L2Entry::zero_plain(&g).decode(&g).unwrap();
            assert_eq!(zero, if g.extended_l2 { all } else { Mapping::Zero { host: None, copied: false } });
            let kept = L2Entry::zero_allocated(host, &g).decode(&g).unwrap();
            let all = Mapping::Subclusters { host: Some(host), copied: true, alloc: 0, zero: u32::MAX };
            assert_eq!(
                kept,
                if g.extended_l2 { all } else { Mapping::Zero { host: Some(host), copied: true } }
            );
            let data = L2Entry::data(host, &g).decode(&g).unwrap();
            let all = Mapping::Subclusters { host: Some(host), copied: true, alloc: u32::MAX, zero: 0 };
            assert_eq!(data, if g.extended_l2 { all } else { Mapping::Data { host, copied: true } });
            let stream = L2Entry::compressed(HostOffset(0x5_0123), 700, &g).unwrap();
            let range = CompressedRange { offset: HostOffset(0x5_0123), len: 1024 - 0x123 };
            assert_eq!(stream.decode(&g), Ok(Mapping::Compressed(range)));
            assert!(!stream.copied());
        }
        let parts = L2Entry::subclusters(Some(host), 1, 2);
        assert_eq!(
            parts.decode(&extended()),
            Ok(Mapping::Subclusters { host: Some(host), copied: true, alloc: 1, zero: 2 })
        );
        assert!(!parts.with_copied(false).copied());
        assert_eq!(L2Entry::subclusters(None, 0, 2).word, 0);
    }

    fn any_geometry() -> impl Strategy<Value = Geometry> {
        (9u32..=21, any::<bool>(), any::<bool>(), any::<bool>()).prop_filter_map(
            "legal",
            |(bits, v3, ext, data)| {
                let version = if v3 { Version::V3 } else { Version::V2 };
                let l2 = if ext { L2Format::Extended } else { L2Format::Standard };
                let data = if data { DataLocation::External } else { DataLocation::InImage };
                Geometry::new(version, bits, 4, l2, data).ok()
            },
        )
    }

    proptest! {
        #[test]
        fn any_word_gives_a_verdict(g in any_geometry(), word in any::<u64>(), bitmap in any::<u64>()) {
            let entry = L2Entry { word, bitmap: if g.extended_l2 { bitmap } else { 0 } };
            match entry.decode(&g) {
                Ok(Mapping::Data { host, .. } | Mapping::Zero { host: Some(host), .. }) => {
                    prop_assert_eq!(host.0 % g.cluster_size(), 0);
                    prop_assert!(host.0 < 1 << 56);
                }
                Ok(Mapping::Subclusters { host, alloc, zero, .. }) => {
                    prop_assert_eq!(alloc & zero, 0);
                    prop_assert!(host.is_some() || alloc == 0);
                    prop_assert!(g.extended_l2);
                }
                Ok(Mapping::Compressed(range)) => prop_assert!(range.len > 0 && range.offset.0 < 1 << 56),
                Ok(Mapping::Unallocated) => prop_assert!(!g.extended_l2),
                Ok(Mapping::Zero { host: None, .. }) => prop_assert!(g.version == Version::V3),
                Err(_) => {}
            }
        }

        #[test]
        fn table_round_trip(g in any_geometry(), index in 0usize..40, word in any::<u64>(), bitmap in any::<u64>()) {
            let size = g.l2_entry_size as usize;
            let mut table = vec![0x5a; 32 * size];
            let entry = L2Entry { word, bitmap: if g.extended_l2 { bitmap } else { 0 } };
            prop_assert_eq!(entry.write(&mut table, index, &g).is_ok(), index < 32);
            if index < 32 {
                prop_assert_eq!(L2Entry::read(&table, index, &g), Some(entry));
                prop_assert!(table[..index * size].iter().all(|b| *b == 0x5a));
                prop_assert!(table[(index + 1) * size..].iter().all(|b| *b == 0x5a));
            } else {
                prop_assert_eq!(L2Entry::read(&table, index, &g), None);
                prop_assert!(table.iter().all(|b| *b == 0x5a));
            }
        }
    }
}
