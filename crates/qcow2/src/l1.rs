//! L1 table entries.

use crate::bytes;
use crate::error::{EntryError, OutOfBounds};
use crate::geometry::Geometry;
use crate::offsets::HostOffset;

/// Bits 9 to 55: the offset of the L2 table.
const OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;
/// Bit 63: the refcount of the L2 table is exactly 1.
const COPIED: u64 = 1 << 63;

/// An entry of an L1 table: where the L2 table is, and whether it may be changed in place.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct L1Entry(pub u64);

impl L1Entry {
    /// Bytes of an entry on disk.
    pub const SIZE: usize = 8;

    /// An entry without an L2 table.
    pub const UNALLOCATED: Self = Self(0);

    /// An entry that points at `table`, a cluster boundary below 2^56.
    #[inline]
    pub fn new(table: HostOffset, copied: bool) -> Self {
        Self(table.0 & OFFSET_MASK).with_copied(copied)
    }

    /// The L2 table, or `None` if the range has none. The alignment is not checked: see [`Self::checked_table`].
    #[inline]
    pub fn table(self) -> Option<HostOffset> {
        let offset = self.0 & OFFSET_MASK;
        (offset != 0).then_some(HostOffset(offset))
    }

    /// The L2 table, its offset checked for alignment to a cluster.
    ///
    /// # Errors
    /// [`EntryError::TableUnaligned`].
    #[inline]
    pub fn checked_table(self, geometry: &Geometry) -> Result<Option<HostOffset>, EntryError> {
        match self.table() {
            Some(table) if !geometry.is_cluster_aligned(table.0) => {
                Err(EntryError::TableUnaligned { offset: table.0 })
            }
            table => Ok(table),
        }
    }

    /// Whether the refcount of the L2 table is exactly 1; only meaningful in the active L1 table.
    #[inline]
    pub fn copied(self) -> bool {
        self.0 & COPIED != 0
    }

    /// The same entry with the COPIED flag as given.
    #[inline]
    pub fn with_copied(self, copied: bool) -> Self {
        Self(if copied { self.0 | COPIED } else { self.0 & !COPIED })
    }

    /// The reserved bits that are set. QEMU ignores them when it reads, and reports them in a check.
    #[inline]
    pub fn reserved_bits(self) -> u64 {
        self.0 & !(OFFSET_MASK | COPIED)
    }

    /// All rules at once: no reserved bits, aligned table.
    ///
    /// # Errors
    /// [`EntryError::ReservedBits`], [`EntryError::TableUnaligned`].
    pub fn validate(self, geometry: &Geometry) -> Result<(), EntryError> {
        if self.reserved_bits() != 0 {
            return Err(EntryError::ReservedBits { word: self.0 });
        }
        self.checked_table(geometry).map(|_| ())
    }

    /// Reads entry `index` of a table on disk, or `None` past its end.
    #[inline]
    pub fn read(table: &[u8], index: usize) -> Option<Self> {
        bytes::u64_at(table, index.checked_mul(Self::SIZE)?).map(Self)
    }

    /// Writes entry `index` of a table on disk.
    ///
    /// # Errors
    /// [`OutOfBounds`] past its end.
    #[inline]
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

    #[test]
    fn flags_and_offset() {
        let entry = L1Entry::new(HostOffset(0x40000), true);
        assert_eq!(entry.0, 0x8000_0000_0004_0000);
        assert_eq!((entry.table(), entry.copied()), (Some(HostOffset(0x40000)), true));
        assert_eq!(entry.with_copied(false).0, 0x40000);
        assert_eq!(L1Entry(1 << 63).table(), None);
    }

    #[test]
    fn reserved_bits_are_those_of_the_format() {
        assert_eq!(L1Entry(u64::MAX).reserved_bits(), 0x7f00_0000_0000_01ff);
        assert_eq!(L1Entry(0x4_0001).validate(&geometry()), Err(EntryError::ReservedBits { word: 0x4_0001 }));
        assert_eq!(
            L1Entry(0x4_0200).validate(&geometry()),
            Err(EntryError::TableUnaligned { offset: 0x4_0200 })
        );
        assert_eq!(L1Entry(0x4_0000).validate(&geometry()), Ok(()));
    }

    proptest! {
        #[test]
        fn table_round_trip(words in proptest::collection::vec(any::<u64>(), 1..64), index in 0usize..70) {
            let mut table: Vec<u8> = words.iter().flat_map(|w| w.to_be_bytes()).collect();
            let expected = words.get(index).copied().map(L1Entry);
            prop_assert_eq!(L1Entry::read(&table, index), expected);
            let new = L1Entry(0x1234_5678_9abc_def0);
            prop_assert_eq!(new.write(&mut table, index).is_ok(), expected.is_some());
            if expected.is_some() {
                prop_assert_eq!(L1Entry::read(&table, index), Some(new));
            }
        }
    }
}
