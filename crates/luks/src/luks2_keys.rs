//! Keys of a LUKS2 header: open a slot. Slots are not changed.

use crate::anti_forensic;
use crate::error::LuksError;
use crate::limits::DERIVATION_STACK;
use crate::luks2_metadata::{Luks2Metadata, MasterDigest};
use crate::master_key::{MasterKey, decrypt_material};
use crate::sector_cipher::SectorCipher;
use subtle::ConstantTimeEq;
use zebu_storage::on_wiped_stack;
use zeroize::Zeroizing;

impl Luks2Metadata {
    /// Tries a passphrase on one slot, whose key material [`Luks2Slot::material`](crate::Luks2Slot::material) places. `None`: it
    /// does not fit.
    ///
    /// # Errors
    /// [`LuksError::NoSuchSlot`], [`LuksError::MaterialLength`], [`LuksError::Memory`].
    pub fn unlock(
        &self,
        slot: u32,
        passphrase: &[u8],
        material: &[u8],
    ) -> Result<Option<MasterKey>, LuksError> {
        let entry = self.slots.iter().find(|entry| entry.number == slot);
        let entry = entry.ok_or(LuksError::NoSuchSlot { slot })?;
        let range = entry.material();
        let (expected, given) = (range.end - range.start, material.len() as u64);
        if expected != given {
            return Err(LuksError::MaterialLength { slot, expected, given });
        }
        on_wiped_stack::<DERIVATION_STACK, _>(|| {
            let slot_key = entry.kdf.derive(passphrase, entry.area_cipher.key_len())?;
            let split = decrypt_material(entry.area_cipher, &slot_key, material)?;
            let key = anti_forensic::merge(entry.splitter_hash, entry.key_len, entry.stripes, &split)?;
            let fits = self.digests.get(entry.digest).is_some_and(|digest| digest.is_of(&key));
            Ok(fits.then(|| MasterKey::from_locked(key)))
        })
    }

    /// The cipher of the data with its key.
    ///
    /// # Errors
    /// As [`SectorCipher::with_sector_size`].
    pub fn sector_cipher(&self, key: &MasterKey) -> Result<SectorCipher, LuksError> {
        SectorCipher::with_sector_size(self.segment.cipher, key.bytes(), self.segment.sector_size)
    }
}

impl MasterDigest {
    fn is_of(&self, key: &[u8]) -> bool {
        let mut digest = Zeroizing::new(vec![0; self.digest.len()]);
        self.hash.pbkdf2(key, &self.salt, self.iterations, &mut digest);
        bool::from(digest.as_slice().ct_eq(&self.digest))
    }
}
