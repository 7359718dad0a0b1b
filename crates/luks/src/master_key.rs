//! The key of the data, which key slots hold encrypted.

use crate::cipher_spec::CipherSpec;
use crate::error::LuksError;
use crate::random::Random;
use crate::sector_cipher::SectorCipher;
use zebu_storage::LockedBytes;

/// The key of the data, in locked memory. It is never written as it is.
#[derive(Debug)]
pub struct MasterKey(LockedBytes);

impl MasterKey {
    pub(crate) fn from_locked(key: LockedBytes) -> Self {
        Self(key)
    }

    /// A key of `len` random bytes.
    ///
    /// # Errors
    /// [`LuksError::Random`], [`LuksError::Memory`].
    pub fn generate(len: usize, random: &mut dyn Random) -> Result<Self, LuksError> {
        let mut key = LockedBytes::zeroed(len).map_err(|error| LuksError::key_memory(len, error))?;
        random.fill(&mut key)?;
        Ok(Self(key))
    }

    /// The key's bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// The cipher of data with this key, for sectors of 512 bytes.
    ///
    /// # Errors
    /// As [`SectorCipher::new`].
    pub fn sector_cipher(&self, spec: CipherSpec) -> Result<SectorCipher, LuksError> {
        SectorCipher::new(spec, &self.0)
    }
}

/// Decrypts a copy of key material with a key derived from a passphrase.
pub(crate) fn decrypt_material(
    spec: CipherSpec,
    key: &LockedBytes,
    material: &[u8],
) -> Result<LockedBytes, LuksError> {
    let mut copy = LockedBytes::copy_of(material).map_err(|e| LuksError::key_memory(material.len(), e))?;
    SectorCipher::new(spec, key)?.decrypt(0, &mut copy)?;
    Ok(copy)
}
