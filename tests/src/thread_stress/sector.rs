//! The content of a sector, which tells which write it is from and where it belongs.

use crate::random::Random;
use std::ops::Range;

/// Bytes of a sector: what is written and judged as one.
pub const SECTOR: usize = 512;
/// Words of a sector.
const WORDS: usize = SECTOR / 8;
/// The value of a sector of zeroes. No write has it.
pub const ZERO: u64 = 0;

/// The content found in a sector.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Seen {
    /// One value as a whole: that of a write, or [`ZERO`].
    Value(u64),
    /// No value that belongs here.
    Torn(Box<[u8; SECTOR]>),
}

/// Makes values: each says whose write it is, and no two are the same.
#[derive(Debug, Clone)]
pub struct Values {
    high: u64,
    next: u64,
}

impl Values {
    /// The values of one writer (below 255) of a case.
    pub fn new(seed: u64, writer: u64) -> Self {
        // A bit of each, so that what another case left behind is not taken for ours.
        let case = Random::new(seed).below(0xffff) + 1;
        Self { high: case << 48 | (writer + 1) << 40, next: 0 }
    }

    /// A new value. One in four sectors is noise, which does not become shorter by compression.
    pub fn next_value(&mut self) -> u64 {
        self.next += 1;
        self.high | self.next
    }
}

/// The writer of a value, and which of its values it is.
pub fn name(value: u64) -> String {
    if value == ZERO {
        return "zeroes".to_owned();
    }
    format!("value {} of writer {}", value & 0xff_ffff_ffff, ((value >> 40) & 0xff).wrapping_sub(1))
}

fn word(value: u64, sector: u64, index: usize) -> u64 {
    let place = sector ^ value.rotate_left(20);
    match index {
        0 => value,
        1 => place,
        _ if value.is_multiple_of(4) => Random::new(value ^ sector << 24 ^ index as u64).bits(),
        _ if index.is_multiple_of(2) => value,
        _ => place,
    }
}

/// Fills whole sectors, of which the first has this number.
pub fn fill(bytes: &mut [u8], value: u64, first: u64) {
    if value == ZERO {
        bytes.fill(0);
        return;
    }
    for (sector, bytes) in (first..).zip(bytes.chunks_exact_mut(SECTOR)) {
        for (index, bytes) in bytes.chunks_exact_mut(8).enumerate() {
            bytes.copy_from_slice(&word(value, sector, index).to_le_bytes());
        }
    }
}

/// Tells what a sector holds.
pub fn look(bytes: &[u8], sector: u64) -> Seen {
    let words: Vec<u64> =
        bytes.chunks_exact(8).map(|bytes| u64::from_le_bytes(bytes.try_into().unwrap_or_default())).collect();
    let value = words[0];
    let is_whole = if value == ZERO {
        words.iter().all(|word| *word == 0)
    } else {
        (0..WORDS).all(|index| words[index] == word(value, sector, index))
    };
    if is_whole { Seen::Value(value) } else { Seen::Torn(Box::new(bytes.try_into().unwrap_or([0; SECTOR]))) }
}

/// Tells what whole sectors hold.
pub fn look_at_all(bytes: &[u8], first: u64) -> Vec<Seen> {
    (first..).zip(bytes.chunks_exact(SECTOR)).map(|(sector, bytes)| look(bytes, sector)).collect()
}

/// Whether a word of a sector is that of `value`.
pub fn is_word_of(bytes: &[u8], sector: u64, index: usize, value: u64) -> bool {
    let found = u64::from_le_bytes(bytes.try_into().unwrap_or_default());
    match value {
        ZERO => found == 0,
        value => found == word(value, sector, index),
    }
}

/// The way in which a sector is torn while it is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tearing {
    /// At any byte: the kernel copies a page of its cache byte by byte.
    Bytes,
    /// So is what is stored, encrypted (XTS): a block of the cipher that is cut reads as noise.
    CipherBlocks,
}

/// Bytes of a block of the cipher.
const CIPHER_BLOCK: usize = 16;
/// The most cuts in a sector: a copy that another overtakes, and one more that it overtakes.
const MOST_CUTS: usize = 2;

/// Whether a torn sector is made of `values`.
pub fn is_made_of(bytes: &[u8; SECTOR], sector: u64, values: &[u64], tearing: Tearing) -> bool {
    let wholes: Vec<[u8; SECTOR]> = values
        .iter()
        .map(|value| {
            let mut whole = [0; SECTOR];
            fill(&mut whole, *value, sector);
            whole
        })
        .collect();
    match tearing {
        Tearing::Bytes => (0..SECTOR).all(|index| wholes.iter().any(|whole| whole[index] == bytes[index])),
        Tearing::CipherBlocks => {
            let blocks = (0..SECTOR).step_by(CIPHER_BLOCK).map(|start| start..start + CIPHER_BLOCK);
            let is_cut = |block: &Range<usize>| {
                wholes.iter().all(|whole| whole[block.clone()] != bytes[block.clone()])
            };
            blocks.filter(is_cut).count() <= MOST_CUTS
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sector_tells_its_value_and_its_place() {
        let mut values = Values::new(7, 3);
        for _ in 0..8 {
            let value = values.next_value();
            let mut bytes = [0; 2 * SECTOR];
            fill(&mut bytes, value, 40);
            assert_eq!(look_at_all(&bytes, 40), [Seen::Value(value), Seen::Value(value)]);
            assert!(matches!(look(&bytes[..SECTOR], 41), Seen::Torn(_)), "a sector in a wrong place");
            bytes[SECTOR - 1] ^= 1;
            assert!(matches!(look(&bytes[..SECTOR], 40), Seen::Torn(_)), "a byte that changed");
        }
        assert_eq!(look(&[0; SECTOR], 9), Seen::Value(ZERO));
    }

    /// Sector 5, of which the first `cut` bytes are of a newer write than the rest; the older value, and the newer one.
    fn cut_sector(cut: usize) -> ([u8; SECTOR], u64, u64) {
        let mut values = Values::new(7, 3);
        let (old, new) = (values.next_value(), values.next_value());
        let (mut bytes, mut newer) = ([0; SECTOR], [0; SECTOR]);
        fill(&mut bytes, old, 5);
        fill(&mut newer, new, 5);
        bytes[..cut].copy_from_slice(&newer[..cut]);
        (bytes, old, new)
    }

    #[test]
    fn a_torn_sector_is_made_of_what_was_there() {
        let (bytes, old, new) = cut_sector(203);
        let is_made_of = |bytes, sector, values: &[u64]| is_made_of(bytes, sector, values, Tearing::Bytes);
        assert!(is_made_of(&bytes, 5, &[old, new]), "cut in the middle of a word");
        assert!(!is_made_of(&bytes, 5, &[old]));
        assert!(!is_made_of(&bytes, 6, &[old, new]));
    }

    #[test]
    fn a_block_of_the_cipher_that_is_cut_is_noise() {
        let (mut bytes, old, new) = cut_sector(192);
        bytes[192..208].fill(0x5a);
        let is_made_of =
            |bytes: &[u8; SECTOR], values: &[u64]| is_made_of(bytes, 5, values, Tearing::CipherBlocks);
        assert!(is_made_of(&bytes, &[old, new]));
        assert!(!is_made_of(&bytes, &[old]));
        bytes[304..336].fill(0x5a);
        assert!(!is_made_of(&bytes, &[old, new]), "two copies make two cuts");
    }
}
