//! CBC of whole blocks, with the vector as it is or encrypted (ESSIV).

use crate::block_cipher::{BLOCK, Block16, Direction};
use cipher::array::Array;
use cipher::{BlockModeDecrypt, BlockModeEncrypt, InnerIvInit};

/// The keys of CBC.
pub(crate) struct Cbc<C, E> {
    /// Encrypts data.
    pub(crate) data: C,
    /// Encrypts the vector, with ESSIV.
    pub(crate) essiv: Option<E>,
}

impl<C: Block16, E: Block16> Cbc<C, E> {
    /// One sector, a whole number of blocks.
    pub(crate) fn sector(&self, direction: Direction, vector: [u8; BLOCK], sector: &mut [u8]) {
        let mut vector = Array(vector);
        if let Some(essiv) = &self.essiv {
            essiv.encrypt_block(&mut vector);
        }
        let (blocks, _rest) = Array::slice_as_chunks_mut(sector);
        match direction {
            Direction::Encrypt => cbc::Encryptor::inner_iv_init(&self.data, &vector).encrypt_blocks(blocks),
            Direction::Decrypt => cbc::Decryptor::inner_iv_init(&self.data, &vector).decrypt_blocks(blocks),
        }
    }
}
