//! Block ciphers of 16-byte blocks, and the two ways through them.

use cipher::{BlockCipherDecrypt, BlockCipherEncrypt, BlockSizeUser, consts::U16};

/// Bytes of a block of all ciphers here.
pub(crate) const BLOCK: usize = 16;

/// Block ciphers of 16-byte blocks.
pub(crate) trait Block16:
    BlockSizeUser<BlockSize = U16> + BlockCipherEncrypt + BlockCipherDecrypt
{
}
impl<C: BlockSizeUser<BlockSize = U16> + BlockCipherEncrypt + BlockCipherDecrypt> Block16 for C {}

/// Which way data goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    Encrypt,
    Decrypt,
}
