//! The map of an object as pure data: a header, and a record for each range.
//!
//! A record is one sector of 512 bytes, so a disk keeps it whole or not at all. Should it be torn all the same, its sums
//! do not fit the blocks.

/// Bytes of a block; the last one of an object may have fewer.
pub(super) const BLOCK: u64 = 64 << 10;
/// Blocks of a range.
pub(super) const BLOCKS: u64 = 16;
/// Bytes of a range, which has a record.
pub(super) const RANGE: u64 = BLOCK * BLOCKS;
/// Bytes of a record in the map.
pub(super) const RECORD: usize = 512;
/// Bytes at the beginning of a record that tell whether it was changed.
pub(super) const HEAD: usize = 16;
/// Bytes of the map before the first record.
pub(super) const HEADER: u64 = 4096;
/// The format of a cache directory.
pub(super) const VERSION: u32 = 1;

const MAGIC: &[u8; 8] = b"zebumap\n";
const SUM: usize = 16;

/// The sum of a block.
pub(super) type Sum = [u8; SUM];

/// The sum of block `number` of the object `key`.
pub(super) fn sum_of(key: &[u8; 32], number: u64, bytes: &[u8]) -> Sum {
    let mut hasher = blake3::Hasher::new_keyed(key);
    hasher.update(&number.to_le_bytes());
    hasher.update(bytes);
    let mut sum = [0; SUM];
    sum.copy_from_slice(&hasher.finalize().as_bytes()[..SUM]);
    sum
}

/// The beginning of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Head {
    /// Grows before a block of the range loses its bytes.
    pub(super) generation: u32,
    /// A bit for each block that is there.
    pub(super) present: u16,
    /// When the range was used last, in seconds since 1970, roughly.
    pub(super) used: u32,
}

impl Head {
    pub(super) fn decode(bytes: &[u8; HEAD]) -> Self {
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        Self { generation: word(0), present: u16::from_le_bytes([bytes[4], bytes[5]]), used: word(8) }
    }

    /// Whether a block is there.
    pub(super) fn has(&self, block: u64) -> bool {
        self.present & bit(block) != 0
    }
}

/// The bit of a block in its range.
pub(super) fn bit(block: u64) -> u16 {
    1 << (block % BLOCKS)
}

/// A record.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Record {
    pub(super) head: Head,
    sums: [Sum; BLOCKS as usize],
}

impl Record {
    /// Byte of the map at which the record of a range begins.
    pub(super) fn offset(range: u64) -> u64 {
        HEADER + range * RECORD as u64
    }

    pub(super) fn decode(bytes: &[u8; RECORD]) -> Self {
        let mut head = [0; HEAD];
        head.copy_from_slice(&bytes[..HEAD]);
        let mut record = Self { head: Head::decode(&head), sums: Default::default() };
        for (sum, bytes) in record.sums.iter_mut().zip(bytes[HEAD..].chunks_exact(SUM)) {
            sum.copy_from_slice(bytes);
        }
        record
    }

    pub(super) fn encode(&self) -> [u8; RECORD] {
        let mut bytes = [0; RECORD];
        bytes[..4].copy_from_slice(&self.head.generation.to_le_bytes());
        bytes[4..6].copy_from_slice(&self.head.present.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.head.used.to_le_bytes());
        for (sum, bytes) in self.sums.iter().zip(bytes[HEAD..].chunks_exact_mut(SUM)) {
            bytes.copy_from_slice(sum);
        }
        bytes
    }

    /// The sum of a block that is there.
    pub(super) fn sum(&self, block: u64) -> Option<&Sum> {
        self.head.has(block).then(|| self.sums.get((block % BLOCKS) as usize)).flatten()
    }

    /// Notes a block.
    pub(super) fn add(&mut self, block: u64, sum: Sum) {
        self.head.present |= bit(block);
        if let Some(place) = self.sums.get_mut((block % BLOCKS) as usize) {
            *place = sum;
        }
    }

    /// Bytes that its blocks count for.
    pub(super) fn bytes(&self) -> u64 {
        u64::from(self.head.present.count_ones()) * BLOCK
    }
}

/// The header of an object's map.
pub(super) fn header(key: &[u8; 32], len: u64) -> Vec<u8> {
    let mut bytes = vec![0; HEADER as usize];
    bytes[..8].copy_from_slice(MAGIC);
    bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
    bytes[16..24].copy_from_slice(&len.to_le_bytes());
    bytes[32..64].copy_from_slice(key);
    bytes
}

/// The key and the length of an object, if `bytes` are the header of its map.
pub(super) fn read_header(bytes: &[u8]) -> Option<([u8; 32], u64)> {
    let key: [u8; 32] = bytes.get(32..64)?.try_into().ok()?;
    let len = u64::from_le_bytes(bytes.get(16..24)?.try_into().ok()?);
    (bytes == header(&key, len) && i64::try_from(len).is_ok()).then_some((key, len))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_read_as_it_was_written_and_each_bit_of_a_block_counts() {
        let key = [7; 32];
        let mut record = Record { head: Head { generation: 9, present: 0, used: 77 }, ..Record::default() };
        for block in [0, 3, 15] {
            record.add(block + 160, sum_of(&key, block + 160, &[block as u8; 100]));
        }
        let bytes = record.encode();
        assert_eq!(Record::decode(&bytes), record);
        assert_eq!(record.bytes(), 3 * BLOCK);
        assert!(record.sum(161).is_none() && record.sum(163).is_some());
        let mut content = [3; 100];
        assert_eq!(record.sum(163), Some(&sum_of(&key, 163, &content)));
        for at in 0..800 {
            content[at / 8] ^= 1 << (at % 8);
            assert_ne!(record.sum(163), Some(&sum_of(&key, 163, &content)));
            content[at / 8] ^= 1 << (at % 8);
        }
        // Another place, another object.
        assert_ne!(record.sum(163), Some(&sum_of(&key, 164, &content)));
        assert_ne!(record.sum(163), Some(&sum_of(&[8; 32], 163, &content)));
    }

    #[test]
    fn a_header_with_any_change_is_none() {
        let good = header(&[5; 32], 12345);
        assert_eq!(read_header(&good), Some(([5; 32], 12345)));
        for at in [0, 8, 12, 70, 4095] {
            let mut bad = good.clone();
            bad[at] ^= 1;
            assert_eq!(read_header(&bad), None, "{at}");
        }
        assert_eq!(read_header(&good[..100]), None);
    }
}
