//! Refcounts of all widths in a refcount block, and refcount table entries.
//!
//! Widths of 8 bits and more are big endian. Narrower ones fill each byte from its low bits up: entry `i` of
//! width `w` lies in byte `i * w / 8` from bit `i * w % 8` on (format document, "Reference counts").

use crate::bytes;
use crate::error::{EntryError, OutOfBounds};
use crate::geometry::Geometry;
use crate::limits::MAX_REFCOUNT_ORDER;
use crate::offsets::HostOffset;

/// A refcount that could not be stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RefcountError {
    /// The block has no such entry, or refcounts do not have this width.
    #[error("refcount index outside the block")]
    OutOfBounds,
    /// The value does not fit the width.
    #[error("refcount {value} does not fit {bits} bits")]
    TooLarge {
        /// The value.
        value: u64,
        /// The width in bits.
        bits: u32,
    },
}

impl From<OutOfBounds> for RefcountError {
    fn from(_: OutOfBounds) -> Self {
        Self::OutOfBounds
    }
}

/// Byte index, shift and mask of a refcount narrower than a byte.
#[inline]
fn sub_byte(index: usize, order: u32) -> (usize, u32, u8) {
    let per_byte_bits = 3u32.wrapping_sub(order);
    let at = index.wrapping_shr(per_byte_bits);
    let within = index & 1usize.wrapping_shl(per_byte_bits).wrapping_sub(1);
    let shift = (within as u32).wrapping_shl(order);
    let mask = u8::MAX.wrapping_shr(8u32.wrapping_sub(1u32.wrapping_shl(order)));
    (at, shift, mask)
}

/// The refcount at `index` of a block (or a slice of one) with refcounts of `1 << order` bits; `None` past the
/// end or for a width above 64 bits.
#[inline]
pub fn get(block: &[u8], index: usize, order: u32) -> Option<u64> {
    match order {
        0..=2 => {
            let (at, shift, mask) = sub_byte(index, order);
            block.get(at).map(|byte| (byte.wrapping_shr(shift) & mask) as u64)
        }
        3 => block.get(index).map(|byte| *byte as u64),
        4 => bytes::u16_at(block, index.checked_mul(2)?).map(u64::from),
        5 => bytes::u32_at(block, index.checked_mul(4)?).map(u64::from),
        6 => bytes::u64_at(block, index.checked_mul(8)?),
        _ => None,
    }
}

/// Sets the refcount at `index` of a block (or a slice of one) with refcounts of `1 << order` bits.
///
/// # Errors
/// [`RefcountError::OutOfBounds`] past the end or for a width above 64 bits, [`RefcountError::TooLarge`] if the
/// value does not fit. Nothing is written then.
#[inline]
pub fn set(block: &mut [u8], index: usize, order: u32, value: u64) -> Result<(), RefcountError> {
    if order > MAX_REFCOUNT_ORDER {
        return Err(RefcountError::OutOfBounds);
    }
    let bits = 1u32.wrapping_shl(order);
    if value > u64::MAX.wrapping_shr(64u32.wrapping_sub(bits)) {
        return Err(RefcountError::TooLarge { value, bits });
    }
    let at = |size: usize| index.checked_mul(size).ok_or(RefcountError::OutOfBounds);
    match order {
        0..=2 => {
            let (at, shift, mask) = sub_byte(index, order);
            let byte = block.get_mut(at).ok_or(RefcountError::OutOfBounds)?;
            *byte = (*byte & !mask.wrapping_shl(shift)) | (value as u8).wrapping_shl(shift);
        }
        3 => bytes::put(block, index, &[value as u8])?,
        4 => bytes::put(block, at(2)?, &(value as u16).to_be_bytes())?,
        5 => bytes::put(block, at(4)?, &(value as u32).to_be_bytes())?,
        _ => bytes::put(block, at(8)?, &value.to_be_bytes())?,
    }
    Ok(())
}

/// Bits 9 to 63: the offset of the refcount block.
const OFFSET_MASK: u64 = !0x1ff;

/// An entry of the refcount table: where the refcount block is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct RefTableEntry(pub u64);

impl RefTableEntry {
    /// Bytes of an entry on disk.
    pub const SIZE: usize = 8;

    /// An entry that points at `block`, a cluster boundary.
    #[inline]
    pub fn new(block: HostOffset) -> Self {
        Self(block.0 & OFFSET_MASK)
    }

    /// The refcount block, or `None` if all its refcounts are 0. Alignment is not checked.
    #[inline]
    pub fn block(self) -> Option<HostOffset> {
        let offset = self.0 & OFFSET_MASK;
        (offset != 0).then_some(HostOffset(offset))
    }

    /// The refcount block, its offset checked for alignment to a cluster.
    ///
    /// # Errors
    /// [`EntryError::RefcountBlockUnaligned`].
    #[inline]
    pub fn checked_block(self, geometry: &Geometry) -> Result<Option<HostOffset>, EntryError> {
        match self.block() {
            Some(block) if !geometry.is_cluster_aligned(block.0) => {
                Err(EntryError::RefcountBlockUnaligned { offset: block.0 })
            }
            block => Ok(block),
        }
    }

    /// The reserved bits that are set. QEMU ignores them when it reads, and reports them in a check.
    #[inline]
    pub fn reserved_bits(self) -> u64 {
        self.0 & !OFFSET_MASK
    }

    /// All rules at once: no reserved bits, aligned block.
    ///
    /// # Errors
    /// [`EntryError::ReservedBits`], [`EntryError::RefcountBlockUnaligned`].
    pub fn validate(self, geometry: &Geometry) -> Result<(), EntryError> {
        if self.reserved_bits() != 0 {
            return Err(EntryError::ReservedBits { word: self.0 });
        }
        self.checked_block(geometry).map(|_| ())
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

    #[test]
    fn narrow_widths_fill_bytes_from_the_low_bits() {
        let block = [0b1011_0100, 0b0000_0001];
        let read = |order, n| (0..n).map(|i| get(&block, i, order).unwrap()).collect::<Vec<_>>();
        assert_eq!(read(0, 9), [0, 0, 1, 0, 1, 1, 0, 1, 1]);
        assert_eq!(read(1, 5), [0, 1, 3, 2, 1]);
        assert_eq!(read(2, 3), [4, 11, 1]);
    }

    #[test]
    fn wide_widths_are_big_endian() {
        let block = [0, 1, 2, 3, 4, 5, 6, 7, 8];
        assert_eq!(get(&block, 8, 3), Some(8));
        assert_eq!(get(&block, 3, 4), Some(0x0607));
        assert_eq!(get(&block, 1, 5), Some(0x0405_0607));
        assert_eq!(get(&block, 0, 6), Some(0x0001_0203_0405_0607));
        assert_eq!(get(&block, 4, 4), None);
        assert_eq!(get(&block, 1, 6), None);
        assert_eq!(get(&block, usize::MAX, 6), None);
        assert_eq!(get(&block, 0, 7), None);
        assert_eq!(get(&block, usize::MAX, 0), None);
    }

    #[test]
    fn values_must_fit() {
        let mut block = [0; 8];
        for order in 0..6 {
            let bits = 1 << order;
            let max = (1u64 << bits) - 1;
            assert_eq!(set(&mut block, 0, order, max), Ok(()));
            assert_eq!(
                set(&mut block, 0, order, max + 1),
                Err(RefcountError::TooLarge { value: max + 1, bits })
            );
        }
        assert_eq!(set(&mut block, 0, 6, u64::MAX), Ok(()));
        assert_eq!(set(&mut block, 1, 6, 0), Err(RefcountError::OutOfBounds));
        assert_eq!(set(&mut block, 0, 7, 0), Err(RefcountError::OutOfBounds));
    }

    #[test]
    fn table_entries() {
        let g = Geometry::new(Version::V3, 16, 4, L2Format::Standard, DataLocation::InImage).unwrap();
        assert_eq!(RefTableEntry(0).checked_block(&g), Ok(None));
        assert_eq!(
            RefTableEntry::new(HostOffset(0x2_0000)).checked_block(&g),
            Ok(Some(HostOffset(0x2_0000)))
        );
        assert_eq!(
            RefTableEntry(0x2_0200).checked_block(&g),
            Err(EntryError::RefcountBlockUnaligned { offset: 0x2_0200 })
        );
        assert_eq!(RefTableEntry(0x2_0001).checked_block(&g), Ok(Some(HostOffset(0x2_0000))));
        assert_eq!(RefTableEntry(0x2_0001).validate(&g), Err(EntryError::ReservedBits { word: 0x2_0001 }));
    }

    proptest! {
        /// A block behaves as an array of integers, whatever the width.
        #[test]
        fn a_block_is_an_array(
            order in 0u32..=6,
            writes in proptest::collection::vec((any::<u16>(), any::<u64>()), 0..200),
        ) {
            let mut block = vec![0; 512];
            let entries = (512 * 8) >> order;
            let max = u64::MAX >> (64 - (1 << order));
            let mut model = vec![0u64; entries];
            for (index, value) in writes {
                let index = index as usize % (entries + 4);
                let value = value & max;
                prop_assert_eq!(set(&mut block, index, order, value).is_ok(), index < entries);
                if let Some(slot) = model.get_mut(index) {
                    *slot = value;
                }
            }
            for (index, value) in model.iter().enumerate() {
                prop_assert_eq!(get(&block, index, order), Some(*value));
            }
            prop_assert_eq!(get(&block, entries, order), None);
        }

        #[test]
        fn table_round_trip(words in proptest::collection::vec(any::<u64>(), 1..64), index in 0usize..70) {
            let mut table: Vec<u8> = words.iter().flat_map(|w| w.to_be_bytes()).collect();
            let expected = words.get(index).copied().map(RefTableEntry);
            prop_assert_eq!(RefTableEntry::read(&table, index), expected);
            prop_assert_eq!(RefTableEntry(7).write(&mut table, index).is_ok(), expected.is_some());
        }
    }
}
