//! Digests of blobs: an algorithm and what it makes of their bytes.

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256, Sha512};
use std::fmt::{self, Write as _};
use std::str::FromStr;

/// A digest: `sha256:` or `sha512:` and lower-case hexadecimal digits.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest {
    algorithm: Algorithm,
    hex: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Algorithm {
    Sha256,
    Sha512,
}

/// Why a text is no digest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DigestError(&'static str);

impl fmt::Display for DigestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

impl std::error::Error for DigestError {}

impl Digest {
    /// The SHA-256 of bytes.
    pub fn of(bytes: &[u8]) -> Self {
        let mut hasher = Hasher::sha256();
        hasher.update(bytes);
        hasher.finish()
    }

    pub(crate) fn algorithm(&self) -> &'static str {
        match self.algorithm {
            Algorithm::Sha256 => "sha256",
            Algorithm::Sha512 => "sha512",
        }
    }

    pub(crate) fn hex(&self) -> &str {
        &self.hex
    }

    /// Whether these bytes have it.
    pub(crate) fn fits(&self, bytes: &[u8]) -> bool {
        let mut hasher = self.hasher();
        hasher.update(bytes);
        hasher.finish() == *self
    }

    /// A hasher of the same algorithm.
    pub(crate) fn hasher(&self) -> Hasher {
        match self.algorithm {
            Algorithm::Sha256 => Hasher::sha256(),
            Algorithm::Sha512 => Hasher(Kind::Sha512(Sha512::new())),
        }
    }
}

impl FromStr for Digest {
    type Err = DigestError;

    fn from_str(text: &str) -> Result<Self, DigestError> {
        let (algorithm, hex) = text.split_once(':').ok_or(DigestError("a digest is ALGORITHM:HEX"))?;
        let (algorithm, digits) = match algorithm {
            "sha256" => (Algorithm::Sha256, 64),
            "sha512" => (Algorithm::Sha512, 128),
            _ => {
                return Err(DigestError(
                    "digests of another algorithm than sha256 and sha512 are not supported",
                ));
            }
        };
        let fits = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        if hex.len() != digits || !hex.bytes().all(fits) {
            return Err(DigestError(
                "a digest of sha256 has 64, one of sha512 has 128 lower-case hexadecimal digits",
            ));
        }
        Ok(Self { algorithm, hex: hex.to_owned() })
    }
}

impl TryFrom<String> for Digest {
    type Error = DigestError;

    fn try_from(text: String) -> Result<Self, DigestError> {
        text.parse()
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> Self {
        digest.to_string()
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.algorithm(), self.hex)
    }
}

/// Makes a digest of bytes that come one after the other.
#[derive(Clone)]
pub(crate) struct Hasher(Kind);

#[derive(Clone)]
enum Kind {
    Sha256(Sha256),
    Sha512(Sha512),
}

impl Hasher {
    pub(crate) fn sha256() -> Self {
        Self(Kind::Sha256(Sha256::new()))
    }

    pub(crate) fn update(&mut self, bytes: &[u8]) {
        match &mut self.0 {
            Kind::Sha256(hasher) => hasher.update(bytes),
            Kind::Sha512(hasher) => hasher.update(bytes),
        }
    }

    pub(crate) fn finish(self) -> Digest {
        let (algorithm, bytes) = match self.0 {
            Kind::Sha256(hasher) => (Algorithm::Sha256, hasher.finalize().to_vec()),
            Kind::Sha512(hasher) => (Algorithm::Sha512, hasher.finalize().to_vec()),
        };
        let hex = bytes.iter().fold(String::new(), |mut hex, byte| {
            let _ = write!(hex, "{byte:02x}");
            hex
        });
        Digest { algorithm, hex }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_are_read_and_made() {
        let empty = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(Digest::of(b"").to_string(), empty);
        let read: Digest = empty.parse().unwrap();
        assert!(read.fits(b"") && !read.fits(b"x"));
        let long: Digest = format!("sha512:{}", "0".repeat(128)).parse().unwrap();
        assert!(!long.fits(b""));
        let upper = empty.to_uppercase();
        for wrong in
            ["", "sha256", "sha256:", "md5:00", &empty[..70], upper.as_str(), "sha256:../../etc/passwd"]
        {
            assert!(wrong.parse::<Digest>().is_err(), "{wrong}");
        }
    }
}
