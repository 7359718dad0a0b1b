//! The encryption of qcow2 before LUKS (`crypt_method` 1): AES-128 in CBC mode, with the passphrase itself as the key.

use crate::cipher_spec::{BlockCipher, CipherSpec, Mode};
use crate::error::LuksError;
use crate::sector_cipher::SectorCipher;
use zebu_storage::LockedBytes;

/// Bytes of the key: a longer passphrase is cut, a shorter one is followed by zeroes (QEMU's `docs/interop/qcow2`).
const KEY_LEN: usize = 16;

/// The cipher of an image with `crypt_method` 1. Its sector number is that of the guest's disk.
///
/// There is no way to know that the passphrase is right. New images should not use it: the scheme is weak.
///
/// # Errors
/// [`LuksError::Memory`].
pub fn legacy_aes(passphrase: &[u8]) -> Result<SectorCipher, LuksError> {
    let mut key = LockedBytes::zeroed(KEY_LEN).map_err(|error| LuksError::key_memory(KEY_LEN, error))?;
    let len = passphrase.len().min(KEY_LEN);
    key[..len].copy_from_slice(&passphrase[..len]);
    SectorCipher::new(CipherSpec::new(BlockCipher::Aes, Mode::CbcPlain64, KEY_LEN)?, &key)
}
