//! XTS (IEEE 1619) of whole blocks, 32 at a time, so that AES instructions overlap.

use crate::block_cipher::{BLOCK, Block16, Direction};
use cipher::array::Array;
use cipher::consts::U16;

/// Blocks that are encrypted together.
const TOGETHER: usize = 32;
/// Sectors whose first tweaks are encrypted together.
const SECTORS: usize = 8;
/// Tweaks after which the next is made from one that is not the last: their computations overlap.
const STRIDE: usize = 8;

/// The two keys of XTS.
pub(crate) struct Xts<C> {
    /// Encrypts data.
    pub(crate) data: C,
    /// Encrypts the tweak.
    pub(crate) tweak: C,
}

/// The tweak times x in the field of 2^128 elements.
fn next(tweak: u128) -> u128 {
    (tweak << 1) ^ (0x87 * (tweak >> 127))
}

/// The tweak times x to the power of [`STRIDE`].
fn after_stride(tweak: u128) -> u128 {
    let out = (tweak >> (128 - STRIDE)) as u64;
    // 0x87 is x^7 + x^2 + x + 1.
    (tweak << STRIDE) ^ u128::from(out ^ (out << 1) ^ (out << 2) ^ (out << 7))
}

/// The tweaks of a group of blocks, of which `first` is the first.
fn tweaks(first: u128) -> [u128; TOGETHER] {
    let mut all = [first; TOGETHER];
    for at in 1..STRIDE {
        all[at] = next(all[at - 1]);
    }
    for at in STRIDE..TOGETHER {
        all[at] = after_stride(all[at - STRIDE]);
    }
    all
}

fn xor(blocks: &mut [Array<u8, U16>], tweaks: &[u128; TOGETHER]) {
    for (block, tweak) in blocks.iter_mut().zip(tweaks) {
        *block =
            Array((u128::from_ne_bytes(block.0) ^ u128::from_ne_bytes(tweak.to_le_bytes())).to_ne_bytes());
    }
}

impl<C: Block16> Xts<C> {
    /// Sectors of `size` bytes, each a whole number of blocks. `vector` makes the vector of each by its index.
    pub(crate) fn sectors(
        &self,
        direction: Direction,
        vector: impl Fn(u64) -> [u8; BLOCK],
        size: usize,
        data: &mut [u8],
    ) {
        let mut index = 0;
        for group in data.chunks_mut(size * SECTORS) {
            let mut first: [Array<u8, U16>; SECTORS] =
                std::array::from_fn(|at| Array(vector(index + at as u64)));
            self.tweak.encrypt_blocks(&mut first);
            for (sector, first) in group.chunks_mut(size).zip(first) {
                self.sector(direction, u128::from_le_bytes(first.0), sector);
            }
            index += SECTORS as u64;
        }
    }

    /// One sector, whose first tweak is given.
    fn sector(&self, direction: Direction, first: u128, sector: &mut [u8]) {
        let (blocks, _rest) = Array::slice_as_chunks_mut(sector);
        let mut first = first;
        for group in blocks.chunks_mut(TOGETHER) {
            let tweaks = tweaks(first);
            xor(group, &tweaks);
            match direction {
                Direction::Encrypt => self.data.encrypt_blocks(group),
                Direction::Decrypt => self.data.decrypt_blocks(group),
            }
            xor(group, &tweaks);
            first = next(tweaks[TOGETHER - 1]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tweaks_follow_each_other() {
        let mut tweak = 0x8123_4567_89ab_cdef_0fed_cba9_8765_4321;
        for _ in 0..4 {
            for made in tweaks(tweak) {
                assert_eq!(made, tweak);
                tweak = next(tweak);
            }
        }
    }
}
