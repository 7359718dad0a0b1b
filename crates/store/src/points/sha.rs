//! SHA-256 of objects, as lower-case hexadecimal digits.

use crate::hex::hex;
use sha2::{Digest, Sha256};
use std::io::{self, Read};

/// Bytes read at once.
const PIECE: usize = 1 << 20;

/// Takes bytes, and gives their hash.
#[derive(Default)]
pub(super) struct Hasher(Sha256);

impl Hasher {
    pub(super) fn add(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    pub(super) fn finish(self) -> String {
        hex(&self.0.finalize())
    }
}

/// The hash of bytes.
pub(super) fn of_bytes(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// The length and the hash of all that a reader gives.
pub(super) fn of_reader(mut reader: impl Read) -> io::Result<(u64, String)> {
    let mut piece = vec![0; PIECE];
    let (mut hasher, mut len) = (Hasher::default(), 0);
    loop {
        match reader.read(&mut piece)? {
            0 => return Ok((len, hasher.finish())),
            read => {
                hasher.add(&piece[..read]);
                len += read as u64;
            }
        }
    }
}

/// Whether a text is such a hash.
pub(super) fn is_hash(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_those_of_sha256sum() {
        let empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(of_bytes(b""), empty);
        assert_eq!(of_reader(&b""[..]).unwrap(), (0, empty.to_owned()));
        let abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(of_reader(&b"abc"[..]).unwrap(), (3, abc.to_owned()));
        assert!(is_hash(abc) && !is_hash(&abc.to_uppercase()) && !is_hash("../x"));
    }
}
