//! Disks that are filled with runs of random, of repeating and of zero bytes.

use crate::random::Random;
use std::path::Path;

/// How much of a disk is filled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fill {
    /// Not at all.
    Nothing,
    /// In part.
    Some,
    /// All of it.
    All,
}

/// A disk: runs of random, of repeating and of zero bytes.
pub fn disk(size: usize, fill: Fill, random: &mut Random) -> Vec<u8> {
    let mut bytes = vec![0; size];
    let mut at = 0;
    while at < size && fill != Fill::Nothing {
        let len = (random.between(1, 400) as usize * 512).min(size - at);
        let kind = random.below(if fill == Fill::All { 2 } else { 5 });
        for (index, byte) in bytes[at..at + len].iter_mut().enumerate() {
            *byte = match kind {
                0 => random.bits() as u8,
                1 => (index % 251) as u8 | 1,
                _ => 0,
            };
        }
        at += len;
    }
    bytes
}

/// Writes a file with holes where a block is zero.
///
/// # Panics
/// The file can't be written.
pub fn write_sparse(path: &Path, bytes: &[u8]) {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::create(path).expect("scratch is writable");
    file.set_len(bytes.len() as u64).expect("scratch is writable");
    for (index, piece) in bytes.chunks(4096).enumerate().filter(|(_, piece)| piece.iter().any(|b| *b != 0)) {
        file.write_all_at(piece, index as u64 * 4096).expect("scratch is writable");
    }
}
