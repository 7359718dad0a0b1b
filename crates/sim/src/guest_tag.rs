//! Sector contents that say who wrote them, and where.

use std::fmt;

/// Bytes of a guest sector.
pub const GUEST_SECTOR: u64 = 512;
const WORDS: usize = 512 / 8;
const SECTOR_BITS: u32 = 40;
const SECTOR_MASK: u64 = (1 << SECTOR_BITS) - 1;
/// The number of a write that stands for what the backing image, or the image at its start, holds.
const BACKING: u64 = 0;

/// The content of a sector.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Value {
    /// Zeroes.
    Zero,
    /// The bytes of [`backing_pattern`].
    Backing,
    /// The bytes of the write of this number; from 1 to 2^24 - 1.
    Write(u32),
}

/// The content found in a sector.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found {
    /// The content that belongs there for this value.
    Value(Value),
    /// The whole content of another place: of the guest sector `sector`.
    Misplaced {
        /// The value that they belong to.
        value: Value,
        /// Which sector's.
        sector: u64,
    },
    /// A mixture, or nothing that a guest wrote: the distinct 8-byte words in it with the offset of their first
    /// occurrence, at most four.
    Torn(Vec<(usize, u64)>),
}

/// A tag, 8 bytes that fill a sector: a reversible scramble of writer and sector, never 0.
fn tag(write: u64, sector: u64) -> u64 {
    scramble(write << SECTOR_BITS | sector & SECTOR_MASK)
}

fn scramble(plain: u64) -> u64 {
    let mut z = plain ^ 0x5a45_4255_7461_6773;
    z = (z ^ (z >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    z ^ (z >> 32)
}

fn unscramble(tag: u64) -> u64 {
    // Inverse of the odd multiplier modulo 2^64.
    const INVERSE: u64 = 0xcfee_444d_8b59_a89b;
    let mut z = tag ^ (tag >> 32);
    z = z.wrapping_mul(INVERSE);
    (z ^ (z >> 32)) ^ 0x5a45_4255_7461_6773
}

impl Value {
    /// The 8-byte word that fills `sector` for this value.
    fn word(self, sector: u64) -> u64 {
        match self {
            Self::Zero => 0,
            Self::Backing => tag(BACKING, sector),
            Self::Write(number) => tag(u64::from(number), sector),
        }
    }

    /// Fills `bytes`, which begin at a sector boundary at guest offset `offset`.
    pub fn fill(self, offset: u64, bytes: &mut [u8]) {
        for (index, sector) in bytes.chunks_mut(GUEST_SECTOR as usize).enumerate() {
            let word = self.word(offset / GUEST_SECTOR + index as u64).to_le_bytes();
            for chunk in sector.chunks_mut(8) {
                chunk.copy_from_slice(&word[..chunk.len()]);
            }
        }
    }
}

/// The bytes of a backing image (or of an image at its start) at a range, so that a model can speak of
/// [`Value::Backing`]. `offset` and `len` are multiples of 512.
pub fn backing_pattern(offset: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    Value::Backing.fill(offset, &mut bytes);
    bytes
}

/// Recognises the content of `sector`, 512 bytes.
pub(crate) fn recognise(bytes: &[u8], sector: u64) -> Found {
    let word = |index: usize| {
        let mut raw = [0; 8];
        raw.copy_from_slice(&bytes[index * 8..][..8]);
        u64::from_le_bytes(raw)
    };
    let first = word(0);
    // All words are equal just if the sector, moved by one word, equals itself.
    if bytes[8..] == bytes[..bytes.len() - 8] {
        if first == 0 {
            return Found::Value(Value::Zero);
        }
        let plain = unscramble(first);
        let value = match plain >> SECTOR_BITS {
            BACKING => Value::Backing,
            number => Value::Write(number as u32),
        };
        let origin = plain & SECTOR_MASK;
        return if origin == sector {
            Found::Value(value)
        } else {
            Found::Misplaced { value, sector: origin }
        };
    }
    let mut words: Vec<(usize, u64)> = Vec::new();
    for index in 0..WORDS {
        if words.len() < 4 && words.iter().all(|(_, w)| *w != word(index)) {
            words.push((index * 8, word(index)));
        }
    }
    Found::Torn(words)
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Zero => f.write_str("zero"),
            Self::Backing => f.write_str("backing"),
            Self::Write(number) => write!(f, "write {number}"),
        }
    }
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Value(value) => write!(f, "{value}"),
            Self::Misplaced { value, sector } => {
                write!(f, "{value} of guest offset {:#x} (or foreign bytes)", sector * GUEST_SECTOR)
            }
            Self::Torn(words) => {
                f.write_str("a mixture:")?;
                for (offset, word) in words {
                    let plain = unscramble(*word);
                    let (number, sector) = (plain >> SECTOR_BITS, plain & SECTOR_MASK);
                    write!(f, " +{offset} {word:016x}")?;
                    if *word != 0 {
                        write!(f, " (write {number}, guest offset {:#x}, if a tag)", sector * GUEST_SECTOR)?;
                    }
                }
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_are_recognised_and_nothing_else_is() {
        for value in [Value::Zero, Value::Backing, Value::Write(1), Value::Write(0xff_ffff)] {
            let mut bytes = vec![0; 1024];
            value.fill(7 * 512, &mut bytes);
            assert_eq!(recognise(&bytes[..512], 7), Found::Value(value));
            assert_eq!(recognise(&bytes[512..], 8), Found::Value(value));
            if value != Value::Zero {
                assert_eq!(recognise(&bytes[512..], 9), Found::Misplaced { value, sector: 8 });
                assert_ne!(bytes[..512], bytes[512..], "neighbours differ");
            }
        }
        let mut bytes = vec![0; 512];
        Value::Write(3).fill(0, &mut bytes);
        bytes[511] ^= 1;
        assert!(matches!(recognise(&bytes, 0), Found::Torn(words) if words.len() == 2));
        let mut mixed = vec![0; 512];
        Value::Write(3).fill(0, &mut mixed[..256]);
        assert!(matches!(recognise(&mixed, 0), Found::Torn(_)));
    }

    #[test]
    fn the_scramble_is_reversible() {
        for plain in [0, 1, 77, u64::MAX, 0x0123_4567_89ab_cdef] {
            assert_eq!(unscramble(scramble(plain)), plain);
        }
    }
}
