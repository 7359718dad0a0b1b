//! The seek table of a blob in zstd: where its frames are, as zstd's `contrib/seekable_format` describes it.
//!
//! It is a skippable frame at the end: magic number and length, an entry for each frame (packed and unpacked bytes, and
//! perhaps a checksum), and a footer (number of frames, a descriptor, another magic number). Readers of plain zstd skip it.

use crate::failure::Failure;
use std::ops::Range;

/// Bytes of the footer.
pub(crate) const FOOTER: u64 = 9;
const SKIPPABLE: u32 = 0x184D_2A5E;
const MAGIC: u32 = 0x8F92_EAB1;
/// Bytes of the head of a skippable frame.
const HEAD: u64 = 8;
/// The bit of the descriptor that says that entries have checksums, and those that must be zero.
const CHECKSUMS: u8 = 0x80;
const RESERVED: u8 = 0x7c;
/// The most bytes of a table that is read: 2 Mi frames.
const LONGEST: u64 = 16 << 20;
/// The most and the fewest bytes of a frame that is unpacked by itself. The last one may have fewer.
pub(crate) const MOST_FRAME: u64 = 16 << 20;
const LEAST_FRAME: u64 = 4 << 10;

/// Where the frames of a blob are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SeekTable {
    /// Where each frame begins, packed and unpacked, and where the last one ends.
    starts: Vec<(u64, u64)>,
    largest: u64,
    /// Of all but the last frame.
    smallest: u64,
}

/// A frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Frame {
    pub(crate) packed: Range<u64>,
    pub(crate) unpacked: Range<u64>,
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..at + 4)?;
    Some(u32::from_le_bytes(bytes.try_into().ok()?))
}

fn wrong(reason: &str) -> Failure {
    Failure::wrong(format!("its seek table is wrong: {reason}"))
}

impl SeekTable {
    /// Where the table of a blob of `len` bytes is, whose last bytes are `footer`; `None` if it has none.
    ///
    /// # Errors
    /// It has one that does not fit in.
    pub(crate) fn range(footer: &[u8], len: u64) -> Result<Option<Range<u64>>, Failure> {
        let (Some(frames), Some(MAGIC), Some(&descriptor)) =
            (u32_at(footer, 0), u32_at(footer, 5), footer.get(4))
        else {
            return Ok(None);
        };
        let table = HEAD + u64::from(frames) * entry(descriptor) + FOOTER;
        if table > LONGEST {
            return Err(Failure::unsupported(format!("a seek table of {frames} frames is too long")));
        }
        let start = len.checked_sub(table).ok_or_else(|| wrong("it is longer than the blob"))?;
        Ok(Some(start..len))
    }

    /// Reads the table of a blob of `len` bytes, of which it is the end.
    ///
    /// # Errors
    /// It is none, or its frames are not all that is before it.
    pub(crate) fn read(table: &[u8], len: u64) -> Result<Self, Failure> {
        let footer = table.len().checked_sub(FOOTER as usize).ok_or_else(|| wrong("it is too short"))?;
        let descriptor = table[footer + 4];
        let content = table.len() as u64 - HEAD;
        if u32_at(table, 0) != Some(SKIPPABLE) || u32_at(table, 4).map(u64::from) != Some(content) {
            return Err(wrong("it does not begin as a skippable frame of its length"));
        }
        if descriptor & RESERVED != 0 {
            return Err(Failure::unsupported("its seek table is of another version"));
        }
        let mut starts = vec![(0, 0)];
        let (mut at, mut largest) = ((0u64, 0u64), 0);
        let (mut smallest, mut last) = (u64::MAX, u64::MAX);
        for bytes in table[HEAD as usize..footer].chunks_exact(entry(descriptor) as usize) {
            let packed = u64::from(u32_at(bytes, 0).unwrap_or_default());
            let unpacked = u64::from(u32_at(bytes, 4).unwrap_or_default());
            // At most so many as the table has entries of 32 bits.
            at = (at.0 + packed, at.1 + unpacked);
            largest = largest.max(packed).max(unpacked);
            smallest = smallest.min(last);
            last = unpacked;
            starts.push(at);
        }
        if at.0 != len - table.len() as u64 {
            return Err(wrong("its frames are not all of the blob before it"));
        }
        Ok(Self { starts, largest, smallest })
    }

    /// Whether frames can be unpacked by themselves: each is small enough, and they are not too many for a read.
    pub(crate) fn is_usable(&self) -> bool {
        self.largest <= MOST_FRAME && self.smallest >= LEAST_FRAME
    }

    /// Bytes of all frames, unpacked.
    pub(crate) fn len(&self) -> u64 {
        self.starts.last().map_or(0, |(_, end)| *end)
    }

    /// The number of the first frame that ends behind an offset of the unpacked bytes.
    pub(crate) fn frame_at(&self, offset: u64) -> usize {
        self.starts.partition_point(|(_, start)| *start <= offset).saturating_sub(1)
    }

    /// A frame by its number.
    pub(crate) fn frame(&self, number: usize) -> Option<Frame> {
        let (start, end) = (self.starts.get(number)?, self.starts.get(number + 1)?);
        Some(Frame { packed: start.0..end.0, unpacked: start.1..end.1 })
    }
}

/// Bytes of an entry.
fn entry(descriptor: u8) -> u64 {
    if descriptor & CHECKSUMS == 0 { 8 } else { 12 }
}

/// A table that is made: packed and unpacked bytes of each frame.
#[derive(Debug, Default)]
pub(crate) struct Making(Vec<(u32, u32)>);

impl Making {
    /// Adds a frame.
    pub(crate) fn add(&mut self, packed: usize, unpacked: usize) -> Result<(), Failure> {
        let fits = |len: usize| u32::try_from(len).map_err(|_| Failure::unsupported("a frame of 4 GiB"));
        self.0.push((fits(packed)?, fits(unpacked)?));
        Ok(())
    }

    /// The bytes of the table.
    pub(crate) fn finish(self) -> Result<Vec<u8>, Failure> {
        let too_many = |_| Failure::unsupported("too many frames");
        let content = self.0.len() as u64 * entry(0) + FOOTER;
        let mut table = SKIPPABLE.to_le_bytes().to_vec();
        table.extend(u32::try_from(content).map_err(too_many)?.to_le_bytes());
        for (packed, unpacked) in &self.0 {
            table.extend(packed.to_le_bytes());
            table.extend(unpacked.to_le_bytes());
        }
        table.extend(u32::try_from(self.0.len()).map_err(too_many)?.to_le_bytes());
        table.push(0);
        table.extend(MAGIC.to_le_bytes());
        Ok(table)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(frames: &[(usize, usize)]) -> Vec<u8> {
        let mut making = Making::default();
        for (packed, unpacked) in frames {
            making.add(*packed, *unpacked).unwrap();
        }
        making.finish().unwrap()
    }

    #[test]
    fn frames_are_found_by_their_offsets() {
        let bytes = table(&[(10, 100), (5, 0), (7, 50)]);
        let len = 22 + bytes.len() as u64;
        assert_eq!(SeekTable::range(&bytes[bytes.len() - 9..], len).unwrap(), Some(22..len));
        let read = SeekTable::read(&bytes, len).unwrap();
        assert_eq!(read.len(), 150);
        let frame = |offset| read.frame(read.frame_at(offset));
        assert_eq!(frame(0), Some(Frame { packed: 0..10, unpacked: 0..100 }));
        assert_eq!(frame(99), frame(0));
        // An empty frame has no offset.
        assert_eq!(frame(100), Some(Frame { packed: 15..22, unpacked: 100..150 }));
        assert_eq!(frame(150), None);
        let empty = table(&[]);
        assert_eq!(SeekTable::read(&empty, empty.len() as u64).unwrap().len(), 0);
    }

    #[test]
    fn hostile_tables_are_errors() {
        let bytes = table(&[(10, 100), (5, 0), (7, 50)]);
        let len = 22 + bytes.len() as u64;
        assert_eq!(SeekTable::range(b"no table.", 100).unwrap(), None);
        assert_eq!(SeekTable::range(b"", 0).unwrap(), None);
        let footer = |frames: u32, descriptor: u8| {
            [&frames.to_le_bytes()[..], &[descriptor], &MAGIC.to_le_bytes()].concat()
        };
        assert!(
            SeekTable::range(&footer(u32::MAX, 0x80), u64::MAX).is_err_and(|e| e.reason.contains("too long"))
        );
        assert!(SeekTable::range(&footer(1000, 0), 100).is_err_and(|e| e.reason.contains("longer")));
        for at in 0..bytes.len() {
            let mut wrong = bytes.clone();
            wrong[at] ^= 0x44;
            let range = SeekTable::range(&wrong[wrong.len() - 9..], len);
            let read = match range {
                Ok(Some(range)) if range.start >= 22 => {
                    SeekTable::read(&wrong[(range.start - 22) as usize..], len)
                }
                _ => continue,
            };
            // Lengths of unpacked bytes are found out when the frames are unpacked.
            assert!(read.is_err() || (12..32).contains(&at), "{at}");
        }
        for cut in 0..bytes.len() {
            assert!(SeekTable::read(&bytes[..cut], len).is_err(), "{cut}");
            assert!(SeekTable::read(&bytes[cut..], len).is_err() || cut == 0, "{cut}");
        }
        for (frames, is_usable) in [
            (vec![(10, 16 << 20), (10, 1)], true),
            (vec![(10, 17 << 20)], false),
            (vec![(10, 1), (10, 1)], false),
        ] {
            let bytes = table(&frames);
            let all = frames.len() as u64 * 10 + bytes.len() as u64;
            assert_eq!(SeekTable::read(&bytes, all).unwrap().is_usable(), is_usable, "{frames:?}");
        }
    }
}
