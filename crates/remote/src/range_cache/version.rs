//! The key of an object in the cache.

/// One version of an object: equal versions have equal bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectVersion {
    name: String,
    key: [u8; 32],
    len: u64,
}

impl ObjectVersion {
    /// The version `mark` (such as a strong ETag) of an object of `len` bytes.
    ///
    /// `shown` is its name in messages, and has no secrets. `place` is all of its name that tells it from others. It may
    /// have secrets: only a hash of it is kept.
    pub fn new(shown: &str, place: &str, mark: &str, len: u64) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("zebu range cache 1: an object's version");
        for part in [place.as_bytes(), mark.as_bytes(), &len.to_le_bytes()] {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
        Self { name: shown.to_owned(), key: *hasher.finalize().as_bytes(), len }
    }

    /// The name in messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Bytes of the object.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(super) fn key(&self) -> &[u8; 32] {
        &self.key
    }

    /// The name of its directory.
    pub(super) fn directory(&self) -> String {
        directory_of(&self.key)
    }
}

/// The name of the directory of an object with this key.
pub(super) fn directory_of(key: &[u8; 32]) -> String {
    blake3::Hash::from(*key).to_hex().to_string()
}
