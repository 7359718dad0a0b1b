//! CBC of whole blocks.

use crate::block_cipher::{BLOCK, Block16, Direction};
use cipher::array::Array;
use cipher::{BlockModeDecrypt, BlockModeEncrypt, InnerIvInit};

/// The keys of CBC.
pub(crate) struct Cbc<C> {
    pub(crate) data: C,
}

impl<C: Block16> Cbc<C> {
    /// One sector, a whole number of blocks.
    pub(crate) fn sector(&self, direction: Direction, vector: [u8; BLOCK], sector: &mut [u8]) {
        let vector = Array(vector);
        let (blocks, _rest) = Array::slice_as_chunks_mut(sector);
        match direction {
            Direction::Encrypt => cbc::Encryptor::inner_iv_init(&self.data, &vector).encrypt_blocks(blocks),
            Direction::Decrypt => cbc::Decryptor::inner_iv_init(&self.data, &vector).decrypt_blocks(blocks),
        }
    }
}
