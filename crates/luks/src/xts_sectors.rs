//! XTS (IEEE 1619) of whole blocks, 32 at a time, so that AES instructions overlap.

use crate::block_cipher::{BLOCK, Block16, Direction};
use cipher::array::Array;

/// Blocks that are encrypted together.
const TOGETHER: usize = 32;

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

fn xor(blocks: &mut [Array<u8, cipher::consts::U16>], tweaks: &[u128; TOGETHER]) {
    for (block, tweak) in blocks.iter_mut().zip(tweaks) {
        *block =
            Array((u128::from_ne_bytes(block.0) ^ u128::from_ne_bytes(tweak.to_le_bytes())).to_ne_bytes());
    }
}

impl<C: Block16> Xts<C> {
    /// One sector, a whole number of blocks.
    pub(crate) fn sector(&self, direction: Direction, vector: [u8; BLOCK], sector: &mut [u8]) {
        let mut first = Array(vector);
        self.tweak.encrypt_block(&mut first);
        let mut tweak = u128::from_le_bytes(first.0);
        let (blocks, _rest) = Array::slice_as_chunks_mut(sector);
        for group in blocks.chunks_mut(TOGETHER) {
            let mut tweaks = [0u128; TOGETHER];
            for one in &mut tweaks[..group.len()] {
                *one = tweak;
                tweak = next(tweak);
            }
            xor(group, &tweaks);
            match direction {
                Direction::Encrypt => self.data.encrypt_blocks(group),
                Direction::Decrypt => self.data.decrypt_blocks(group),
            }
            xor(group, &tweaks);
        }
    }
}
