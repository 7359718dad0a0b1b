//! The record of changes, as data: which granules of the disk may have changed since it began.
//!
//! It is an ordinary bitmap of the image with a name of its own, whose clusters lie one behind the other, so that it is
//! written in place (docs/design/bitmap-record.md).

use super::Bits;
use std::ops::Range;
use zebu_qcow2::Geometry;
use zebu_qcow2::bitmap::{data_bytes, table_entries};
use zebu_qcow2::limits::{MAX_BITMAP_GRANULARITY_BITS, MIN_BITMAP_GRANULARITY_BITS};
use zebu_storage::sabotage::{self, Limit};

/// The name of the bitmap that is the record.
pub(super) const NAME: &str = "zebu:record";
/// log2 of the bytes of a granule, unless the disk is small or very large.
const USUAL_BITS: u32 = 20;
/// Granules of a smaller disk, at least.
const FEW_GRANULES: u64 = 1024;
/// Bytes of bits, at most.
const MOST_BYTES: u64 = 1 << 20;
/// Granules that are marked together.
const GROUP: u64 = 16;
/// Bytes of a sector.
const SECTOR: u64 = 512;
const WORDS: u64 = SECTOR / 8;

/// Bytes of the trailer.
pub(super) const TRAILER: u64 = 32;
const MAGIC: [u8; 8] = *b"zebu-rec";
const VERSION: u32 = 1;

/// The trailer of a record whose bits lie at `offset` of the image file. A program that does not know it writes zeroes in its
/// place with the bitmap.
fn trailer(offset: u64) -> [u8; TRAILER as usize] {
    let mut bytes = [0; TRAILER as usize];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..12].copy_from_slice(&VERSION.to_be_bytes());
    bytes[16..24].copy_from_slice(&offset.to_be_bytes());
    let sum = blake3::hash(&bytes[..24]);
    bytes[24..].copy_from_slice(&sum.as_bytes()[..8]);
    bytes
}

/// Whether these are the last bytes of a record whose bits lie at `offset`.
pub(super) fn is_trailer(bytes: &[u8], offset: u64) -> bool {
    bytes == trailer(offset)
}

/// The size of the record of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Layout {
    size: u64,
    pub(super) granularity_bits: u8,
    /// Clusters of bits.
    pub(super) clusters: u64,
    cluster_bits: u32,
}

impl Layout {
    /// The layout for a disk of `size` bytes. `None`: it has no bytes, or too many.
    pub(super) fn of(size: u64, geometry: &Geometry) -> Option<Self> {
        if size == 0 {
            return None;
        }
        let most = sabotage::at_most(Limit::RecordBytes, MOST_BYTES);
        let few = (size / FEW_GRANULES).max(1).ilog2().clamp(MIN_BITMAP_GRANULARITY_BITS.into(), USUAL_BITS);
        (few as u8..=MAX_BITMAP_GRANULARITY_BITS).find_map(|granularity_bits| {
            let bytes = data_bytes(size, granularity_bits).next_multiple_of(8);
            let clusters = table_entries(size, granularity_bits, geometry);
            let cluster_bits = geometry.cluster_bits;
            let has_room = bytes + TRAILER <= clusters << cluster_bits && bytes <= most;
            has_room.then_some(Self { size, granularity_bits, clusters, cluster_bits })
        })
    }
}

/// Sectors of the record that are to be written one behind the other.
#[derive(Debug, Clone)]
pub(super) struct Part {
    /// Byte of the image file.
    pub(super) offset: u64,
    pub(super) bytes: Vec<u8>,
    first_word: u64,
}

/// The record of the changes of an opening.
#[derive(Debug)]
pub(crate) struct Record {
    /// Granules that are to be marked.
    wanted: Bits,
    /// Granules that are marked on disk, durably.
    durable: Bits,
    /// Byte of the image file at which the bits lie.
    offset: u64,
    /// Bytes there.
    len: u64,
}

impl Record {
    /// An empty record whose bits lie at `offset` of the image file.
    pub(super) fn new(layout: Layout, offset: u64) -> Self {
        let bits = || Bits::new(layout.size, layout.granularity_bits);
        Self { wanted: bits(), durable: bits(), offset, len: layout.clusters << layout.cluster_bits }
    }

    /// All that lies on disk of it.
    pub(super) fn bytes(&self) -> Vec<u8> {
        let mut bytes: Vec<u8> = (0..self.len / 8).flat_map(|w| self.wanted.word(w).to_le_bytes()).collect();
        let at = bytes.len() - TRAILER as usize;
        bytes[at..].copy_from_slice(&trailer(self.offset));
        bytes
    }

    /// Whether a crash finds the range of the disk marked.
    #[inline]
    pub(super) fn covers(&self, range: &Range<u64>) -> bool {
        self.durable.are_marked(range)
    }

    /// Asks for the range of the disk to be marked, with granules near it.
    pub(super) fn want(&self, range: &Range<u64>) {
        let group = GROUP << self.wanted.granularity_bits();
        let end = range.end.min(self.wanted.size());
        self.wanted.mark(range.start / group * group..end.next_multiple_of(group));
    }

    /// The sectors that are to be written.
    pub(super) fn wanted(&self) -> Vec<Part> {
        let mut parts: Vec<Part> = Vec::new();
        for sector in 0..self.wanted.words().div_ceil(WORDS) {
            let words = sector * WORDS..(sector + 1) * WORDS;
            if words.clone().all(|word| self.wanted.word(word) & !self.durable.word(word) == 0) {
                continue;
            }
            let mut bytes: Vec<u8> = words.flat_map(|word| self.wanted.word(word).to_le_bytes()).collect();
            if (sector + 1) * SECTOR == self.len {
                let at = bytes.len() - TRAILER as usize;
                bytes[at..].copy_from_slice(&trailer(self.offset));
            }
            let offset = self.offset + sector * SECTOR;
            match parts.last_mut() {
                Some(last) if last.offset + last.bytes.len() as u64 == offset => last.bytes.extend(bytes),
                _ => parts.push(Part { offset, bytes, first_word: sector * WORDS }),
            }
        }
        parts
    }

    /// Notes that parts are on disk, durably.
    pub(super) fn note_durable(&self, parts: &[Part]) {
        for part in parts {
            for (word, value) in (part.first_word..).zip(part.bytes.as_chunks::<8>().0) {
                self.durable.set_word(word, u64::from_le_bytes(*value) & self.durable.valid(word));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zebu_qcow2::Version;
    use zebu_qcow2::geometry::{DataLocation, L2Format};

    fn layout(size: u64, cluster_bits: u32) -> Option<Layout> {
        let geometry =
            Geometry::new(Version::V3, cluster_bits, 4, L2Format::Standard, DataLocation::InImage).unwrap();
        Layout::of(size, &geometry)
    }

    #[test]
    fn granules_of_small_and_of_large_disks() {
        let granule = |size| layout(size, 16).map(|layout| 1_u64 << layout.granularity_bits);
        assert_eq!(granule(0), None);
        assert_eq!(granule(512), Some(512));
        assert_eq!(granule(4 << 20), Some(4096));
        assert_eq!(granule(64 << 30), Some(1 << 20));
        // The bits would leave no room for the trailer.
        assert_eq!(granule(512 << 30), Some(2 << 20));
        assert_eq!(granule((512 << 30) + (1 << 20)), Some(1 << 20));
        // With 8 to 128 MiB, the bits fill whole clusters.
        assert_eq!(granule(64 << 40), Some(256 << 20));
        assert_eq!(granule((64 << 40) + (1 << 30)), Some(16 << 20));
        assert_eq!(layout(4 << 30, 9).map(|layout| layout.clusters), Some(1));
    }

    #[test]
    fn granules_are_marked_in_groups_and_once() {
        let record = Record::new(layout(64 << 30, 16).unwrap(), 7 << 16);
        let range = (100 << 20)..(100 << 20) + 512;
        assert!(!record.covers(&range));
        record.want(&range);
        assert!(!record.covers(&range), "it is not durable");
        let parts = record.wanted();
        assert_eq!(
            parts.iter().map(|part| (part.offset, part.bytes.len())).collect::<Vec<_>>(),
            [(7 << 16, 512)]
        );
        assert_eq!(parts[0].bytes[12..14], [0xff, 0xff]);
        record.note_durable(&parts);
        assert!(record.covers(&(96 << 20..112 << 20)) && !record.covers(&(96 << 20..(112 << 20) + 1)));
        record.want(&(97 << 20..98 << 20));
        assert!(record.wanted().is_empty());
    }

    #[test]
    fn the_last_sector_keeps_the_trailer() {
        let record = Record::new(layout(1 << 20, 9).unwrap(), 512);
        record.want(&(0..1 << 20));
        let parts = record.wanted();
        let end = parts[0].bytes.len() - TRAILER as usize;
        assert!(is_trailer(&parts[0].bytes[end..], 512) && !is_trailer(&parts[0].bytes[end..], 1024));
        assert_eq!(parts[0].bytes, record.bytes());
        record.note_durable(&parts);
        assert!(record.covers(&(0..1 << 20)));
    }
}
