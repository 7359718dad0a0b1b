//! A cipher over buffers.

use zebu_luks::SectorCipher;
use zebu_storage::IoBufs;

/// Bytes that initialization vectors count.
pub(crate) const COUNTED: u64 = 512;

/// Encrypting or decrypting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    Encrypt,
    Decrypt,
}

/// Encrypts or decrypts buffers, each of whole sectors, that follow each other on the disk. The first has the number `first`.
///
/// # Panics
/// If a buffer is no whole number of the cipher's blocks: what is not encrypted must not get any further.
pub(crate) fn apply(cipher: &SectorCipher, direction: Direction, first: u64, bufs: &mut IoBufs) {
    let mut number = first;
    for buf in bufs.parts_mut() {
        let bytes = buf.as_mut_slice();
        let sectors = bytes.len() as u64 / COUNTED;
        let result = match direction {
            Direction::Encrypt => cipher.encrypt(number, bytes),
            Direction::Decrypt => cipher.decrypt(number, bytes),
        };
        assert!(result.is_ok(), "sectors are whole blocks");
        number = number.wrapping_add(sectors);
    }
}
