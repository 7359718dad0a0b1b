//! Names of ciphers, as headers write them: "aes" with "xts-plain64".

use crate::error::LuksError;
use std::fmt;

/// The names that [`CipherSpec::parse`] takes.
const CIPHERS: &str = "aes, serpent, twofish";
const MODES: &str = "xts-plain64, xts-plain, xts-essiv:sha256, cbc-plain64, cbc-plain, cbc-essiv:sha256";
/// Hashes that QEMU knows for initialization vectors.
const VECTOR_HASHES: [&str; 7] = ["md5", "sha1", "sha224", "sha256", "sha384", "sha512", "ripemd160"];

/// A block cipher of 16-byte blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BlockCipher {
    /// AES, with keys of 128, 192 or 256 bits.
    Aes,
    /// Serpent, with keys of 128, 192 or 256 bits.
    Serpent,
    /// Twofish, with keys of 128, 192 or 256 bits.
    Twofish,
}

impl BlockCipher {
    /// The name in headers.
    pub fn name(self) -> &'static str {
        match self {
            Self::Aes => "aes",
            Self::Serpent => "serpent",
            Self::Twofish => "twofish",
        }
    }
}

/// How a sector's blocks are chained, and how its initialization vector comes about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Mode {
    /// XTS; the tweak is the sector's number in 64 bits.
    XtsPlain64,
    /// XTS; the tweak is the low 32 bits of the sector's number.
    XtsPlain,
    /// XTS; the tweak is the sector's number, encrypted with the SHA-256 of both keys. QEMU makes it; cryptsetup knows it, too.
    XtsEssivSha256,
    /// CBC; the vector is the sector's number in 64 bits.
    CbcPlain64,
    /// CBC; the vector is the low 32 bits of the sector's number.
    CbcPlain,
    /// CBC; the vector is the sector's number, encrypted with the SHA-256 of the key.
    CbcEssivSha256,
}

impl Mode {
    /// The name in headers.
    pub fn name(self) -> &'static str {
        match self {
            Self::XtsPlain64 => "xts-plain64",
            Self::XtsPlain => "xts-plain",
            Self::XtsEssivSha256 => "xts-essiv:sha256",
            Self::CbcPlain64 => "cbc-plain64",
            Self::CbcPlain => "cbc-plain",
            Self::CbcEssivSha256 => "cbc-essiv:sha256",
        }
    }

    /// The name of the generator of initialization vectors alone: "plain64", "plain" or "essiv".
    pub fn vectors(self) -> &'static str {
        match self {
            Self::XtsPlain64 | Self::CbcPlain64 => "plain64",
            Self::XtsPlain | Self::CbcPlain => "plain",
            Self::XtsEssivSha256 | Self::CbcEssivSha256 => "essiv",
        }
    }

    /// Whether the key is two keys of the block cipher.
    pub fn is_xts(self) -> bool {
        matches!(self, Self::XtsPlain64 | Self::XtsPlain | Self::XtsEssivSha256)
    }

    /// Whether the vector is encrypted, with a hash of the key.
    pub fn is_essiv(self) -> bool {
        matches!(self, Self::XtsEssivSha256 | Self::CbcEssivSha256)
    }
}

/// A cipher with its mode and the length of its key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CipherSpec {
    cipher: BlockCipher,
    mode: Mode,
    key_len: usize,
}

impl CipherSpec {
    /// AES-256 in XTS mode, as QEMU and cryptsetup choose.
    pub const AES_256_XTS: Self = Self { cipher: BlockCipher::Aes, mode: Mode::XtsPlain64, key_len: 64 };

    /// A cipher with a key of `key_len` bytes (for XTS, of both keys together).
    ///
    /// # Errors
    /// [`LuksError::KeyLength`].
    pub fn new(cipher: BlockCipher, mode: Mode, key_len: usize) -> Result<Self, LuksError> {
        let block_key = if mode.is_xts() { key_len / 2 } else { key_len };
        let is_whole = !mode.is_xts() || key_len.is_multiple_of(2);
        if !is_whole || !matches!(block_key, 16 | 24 | 32) {
            let cipher = format!("{}-{}", cipher.name(), mode.name());
            return Err(LuksError::KeyLength { cipher, len: key_len });
        }
        Ok(Self { cipher, mode, key_len })
    }

    /// Parses the two names of a LUKS1 header, such as "aes" and "xts-plain64".
    ///
    /// # Errors
    /// [`LuksError::Unsupported`] names what is not known; [`LuksError::KeyLength`].
    pub fn parse(cipher: &str, mode: &str, key_len: usize) -> Result<Self, LuksError> {
        let block = [BlockCipher::Aes, BlockCipher::Serpent, BlockCipher::Twofish];
        let block = block.into_iter().find(|known| known.name() == cipher);
        let block = block.ok_or_else(|| LuksError::unsupported("cipher", cipher, CIPHERS))?;
        let modes = [
            Mode::XtsPlain64,
            Mode::XtsPlain,
            Mode::XtsEssivSha256,
            Mode::CbcPlain64,
            Mode::CbcPlain,
            Mode::CbcEssivSha256,
        ];
        // QEMU writes the hash behind any generator that it was given with; only ESSIV has a use for it.
        let name = match mode.split_once(':') {
            Some((name, hash)) if !name.ends_with("essiv") && VECTOR_HASHES.contains(&hash) => name,
            _ => mode,
        };
        let known = modes.into_iter().find(|known| known.name() == name);
        let known = known.ok_or_else(|| LuksError::unsupported("cipher mode", mode, MODES))?;
        Self::new(block, known, key_len)
    }

    /// Parses the one name of a LUKS2 header, such as "aes-xts-plain64".
    ///
    /// # Errors
    /// As [`CipherSpec::parse`].
    pub fn parse_joined(name: &str, key_len: usize) -> Result<Self, LuksError> {
        let (cipher, mode) = name.split_once('-').unwrap_or((name, ""));
        Self::parse(cipher, mode, key_len)
    }

    /// The block cipher.
    pub fn cipher(self) -> BlockCipher {
        self.cipher
    }

    /// The mode.
    pub fn mode(self) -> Mode {
        self.mode
    }

    /// Bytes of the key; for XTS, of both keys together.
    pub fn key_len(self) -> usize {
        self.key_len
    }
}

/// The joined name, as in "aes-xts-plain64".
impl fmt::Display for CipherSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.cipher.name(), self.mode.name())
    }
}
