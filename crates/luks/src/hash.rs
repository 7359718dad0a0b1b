//! Hashes by the names of headers, and PBKDF2 with them.

use crate::error::LuksError;
use hmac::Hmac;
use sha1::Sha1;
use sha2::{Digest, Sha256, Sha512};

const HASHES: &str = "sha1, sha256, sha512";

/// A hash function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum HashName {
    /// SHA-1.
    Sha1,
    /// SHA-256.
    Sha256,
    /// SHA-512.
    Sha512,
}

impl HashName {
    /// Parses the name in a header.
    ///
    /// # Errors
    /// [`LuksError::Unsupported`].
    pub fn parse(name: &str) -> Result<Self, LuksError> {
        let known = [Self::Sha1, Self::Sha256, Self::Sha512].into_iter().find(|known| known.name() == name);
        known.ok_or_else(|| LuksError::unsupported("hash", name, HASHES))
    }

    /// The name in headers.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sha1 => "sha1",
            Self::Sha256 => "sha256",
            Self::Sha512 => "sha512",
        }
    }

    /// Bytes of a digest.
    pub fn digest_len(self) -> usize {
        match self {
            Self::Sha1 => 20,
            Self::Sha256 => 32,
            Self::Sha512 => 64,
        }
    }

    /// Replaces each full digest's length of `bytes`, and the shorter rest, by the hash of its number and itself, as the
    /// anti-forensic splitter does.
    pub(crate) fn diffuse(self, bytes: &mut [u8]) {
        for (number, piece) in (0u32..).zip(bytes.chunks_mut(self.digest_len())) {
            let number = number.to_be_bytes();
            match self {
                Self::Sha1 => hash_into::<Sha1>(&number, piece),
                Self::Sha256 => hash_into::<Sha256>(&number, piece),
                Self::Sha512 => hash_into::<Sha512>(&number, piece),
            }
        }
    }

    /// Fills `key` with PBKDF2 of a passphrase. `iterations` of 0 count as 1.
    pub fn pbkdf2(self, passphrase: &[u8], salt: &[u8], iterations: u32, key: &mut [u8]) {
        let derived = match self {
            Self::Sha1 => pbkdf2::pbkdf2::<Hmac<Sha1>>(passphrase, salt, iterations, key),
            Self::Sha256 => pbkdf2::pbkdf2::<Hmac<Sha256>>(passphrase, salt, iterations, key),
            Self::Sha512 => pbkdf2::pbkdf2::<Hmac<Sha512>>(passphrase, salt, iterations, key),
        };
        debug_assert!(derived.is_ok(), "HMAC takes keys of any length");
    }
}

fn hash_into<H: Digest>(number: &[u8], piece: &mut [u8]) {
    let mut hash = H::new();
    hash.update(number);
    hash.update(&*piece);
    let digest = hash.finalize();
    let len = piece.len();
    piece.copy_from_slice(&digest[..len]);
}
