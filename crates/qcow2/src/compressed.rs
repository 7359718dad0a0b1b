//! Compressed cluster descriptors: where a stream starts, and how many sectors it may occupy.
//!
//! With `x = 70 - cluster_bits`, bits 0 to x-1 hold the byte offset and bits x to 61 the number of 512-byte
//! sectors after the one in which the stream starts (format document, "Compressed Clusters Descriptor").

use std::ops::Range;

use crate::error::EntryError;
use crate::geometry::Geometry;
use crate::limits::{HOST_OFFSET_END, SECTOR_BITS, SECTOR_SIZE};
use crate::offsets::HostOffset;

/// Bits 0 to 61 of an L2 entry: the descriptor.
pub(crate) const DESCRIPTOR_MASK: u64 = (1 << 62) - 1;

/// The bytes in which a compressed stream lies.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct CompressedRange {
    /// First byte of the stream; need not be aligned.
    pub offset: HostOffset,
    /// Bytes that may be read: up to the end of the last sector. The stream ends somewhere before, and what
    /// follows it there is not specified.
    pub len: u64,
}

impl CompressedRange {
    /// Decodes the low 62 bits of an L2 entry; higher bits are ignored.
    ///
    /// # Errors
    /// [`EntryError::CompressedOffsetTooLarge`] for offsets from 2^56 on.
    #[inline]
    pub fn decode(descriptor: u64, geometry: &Geometry) -> Result<Self, EntryError> {
        let descriptor = descriptor & DESCRIPTOR_MASK;
        let offset_bits = geometry.compressed_offset_bits();
        let offset = descriptor & 1u64.wrapping_shl(offset_bits).wrapping_sub(1);
        if offset >= HOST_OFFSET_END {
            return Err(EntryError::CompressedOffsetTooLarge { offset });
        }
        let additional = descriptor.wrapping_shr(offset_bits);
        let len = additional
            .wrapping_add(1)
            .wrapping_mul(SECTOR_SIZE)
            .wrapping_sub(offset & SECTOR_SIZE.wrapping_sub(1));
        Ok(Self { offset: HostOffset(offset), len })
    }

    /// The descriptor for a stream of `stream_len` bytes at `offset`, without the COMPRESSED flag.
    ///
    /// # Errors
    /// [`EntryError::CompressedOffsetTooLarge`] if the offset does not fit the descriptor,
    /// [`EntryError::CompressedLength`] if the stream is empty or takes more sectors than fit.
    #[inline]
    pub fn encode(offset: HostOffset, stream_len: u64, geometry: &Geometry) -> Result<u64, EntryError> {
        if offset.0 >= geometry.compressed_offset_end() {
            return Err(EntryError::CompressedOffsetTooLarge { offset: offset.0 });
        }
        let too_long = EntryError::CompressedLength { len: stream_len };
        let last_byte = stream_len.checked_sub(1).and_then(|n| offset.0.checked_add(n)).ok_or(too_long)?;
        let additional = last_byte.wrapping_shr(SECTOR_BITS).wrapping_sub(offset.0.wrapping_shr(SECTOR_BITS));
        let offset_bits = geometry.compressed_offset_bits();
        if additional > DESCRIPTOR_MASK.wrapping_shr(offset_bits) {
            return Err(too_long);
        }
        Ok(offset.0 | additional.wrapping_shl(offset_bits))
    }

    /// First byte after the readable ones; a multiple of 512.
    #[inline]
    pub fn end(self) -> HostOffset {
        HostOffset(self.offset.0.saturating_add(self.len))
    }

    /// Indices of the host clusters that the stream touches. Each has one reference for it.
    #[inline]
    pub fn host_clusters(self, geometry: &Geometry) -> Range<u64> {
        let first = geometry.cluster_index(self.offset);
        let last = geometry.cluster_index(HostOffset(self.end().0.saturating_sub(1)));
        first..last.saturating_add(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::{DataLocation, L2Format};
    use crate::version::Version;
    use proptest::prelude::*;

    fn geometry(cluster_bits: u32) -> Geometry {
        Geometry::new(Version::V3, cluster_bits, 4, L2Format::Standard, DataLocation::InImage).unwrap()
    }

    #[test]
    fn split_of_the_descriptor() {
        // (cluster bits, offset bits, bits of the sector count), from the format document's formula.
        for (cluster_bits, x, count_bits) in [(9, 61, 1), (12, 58, 4), (16, 54, 8), (21, 49, 13)] {
            assert_eq!(geometry(cluster_bits).compressed_offset_bits(), x);
            assert_eq!(62 - x, count_bits);
        }
    }

    #[test]
    fn a_descriptor_by_hand() {
        let g = geometry(16);
        // Starts 16 bytes into a sector, two more sectors: 3 * 512 - 16 bytes.
        let range = CompressedRange::decode((2 << 54) | 0x5_0010, &g).unwrap();
        assert_eq!(range, CompressedRange { offset: HostOffset(0x5_0010), len: 1520 });
        assert_eq!(range.end(), HostOffset(0x5_0600));
        assert_eq!(range.host_clusters(&g), 5..6);
        assert_eq!(CompressedRange::encode(HostOffset(0x5_0010), 1009, &g), Ok((2 << 54) | 0x5_0010));
        assert_eq!(CompressedRange::encode(HostOffset(0x5_0010), 1008, &g), Ok((1 << 54) | 0x5_0010));
    }

    #[test]
    fn a_stream_across_two_clusters() {
        let g = geometry(16);
        let range = CompressedRange::decode((1 << 54) | 0x5_fe00, &g).unwrap();
        assert_eq!(range.host_clusters(&g), 5..7);
    }

    #[test]
    fn limits_of_the_descriptor() {
        let g = geometry(21);
        assert_eq!(
            CompressedRange::encode(HostOffset(1 << 49), 1, &g),
            Err(EntryError::CompressedOffsetTooLarge { offset: 1 << 49 })
        );
        let g = geometry(9);
        assert_eq!(
            CompressedRange::encode(HostOffset(1 << 56), 1, &g),
            Err(EntryError::CompressedOffsetTooLarge { offset: 1 << 56 })
        );
        assert_eq!(
            CompressedRange::decode(1 << 56, &g),
            Err(EntryError::CompressedOffsetTooLarge { offset: 1 << 56 })
        );
        assert_eq!(
            CompressedRange::encode(HostOffset(0), 0, &g),
            Err(EntryError::CompressedLength { len: 0 })
        );
        assert!(CompressedRange::encode(HostOffset(511), 511, &g).is_ok());
        assert_eq!(
            CompressedRange::encode(HostOffset(511), 514, &g),
            Err(EntryError::CompressedLength { len: 514 })
        );
        assert!(CompressedRange::encode(HostOffset(0), u64::MAX, &g).is_err());
    }

    proptest! {
        #[test]
        fn every_stream_of_a_cluster_round_trips(
            cluster_bits in 9u32..=21,
            offset in any::<u64>(),
            len in any::<u64>(),
        ) {
            let g = geometry(cluster_bits);
            let offset = offset % g.compressed_offset_end();
            let len = 1 + len % g.cluster_size();
            let word = CompressedRange::encode(HostOffset(offset), len, &g).unwrap();
            let range = CompressedRange::decode(word, &g).unwrap();
            prop_assert_eq!(range.offset.0, offset);
            prop_assert!(range.len >= len && range.len < len + 512);
            prop_assert_eq!(range.end().0 % 512, 0);
            // Freeing by the readable length touches exactly the clusters that the stream touches.
            prop_assert_eq!(range.host_clusters(&g), offset >> cluster_bits..((offset + len - 1) >> cluster_bits) + 1);
        }

        #[test]
        fn every_descriptor_decodes_to_itself(cluster_bits in 9u32..=21, word in 0u64..1 << 62) {
            let g = geometry(cluster_bits);
            match CompressedRange::decode(word, &g) {
                Ok(range) => prop_assert_eq!(CompressedRange::encode(range.offset, range.len, &g), Ok(word)),
                Err(error) => {
                    let masked = word & ((1 << (70 - cluster_bits)) - 1);
                    prop_assert!(masked >= 1 << 56, "{}", error);
                }
            }
        }
    }
}
