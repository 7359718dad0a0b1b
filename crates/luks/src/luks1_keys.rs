//! Keys of a LUKS1 header: make one, open a slot, fill one, empty one.
//!
//! Changes are lists of steps. Each is to be durable before the next, and after any crash between or within them (a step may be
//! torn anywhere between sectors) every slot that was not changed still opens.

use crate::anti_forensic;
use crate::cipher_spec::CipherSpec;
use crate::error::LuksError;
use crate::hash::HashName;
use crate::limits::{DERIVATION_STACK, LUKS1_SLOTS, SECTOR, STRIPES};
use crate::luks1::{Luks1Header, Luks1Slot, encode_slot, slot_offset};
use crate::master_key::{MasterKey, decrypt_material};
use crate::random::Random;
use crate::sector_cipher::SectorCipher;
use subtle::ConstantTimeEq;
use zebu_storage::{LockedBytes, on_wiped_stack};

/// Alignment of key material and of the payload, as both tools write it: 4 KiB.
const ALIGNMENT: u64 = 4096;

/// A new header's cipher and costs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Luks1Options {
    /// The cipher of the data and of the key material.
    pub cipher: CipherSpec,
    /// The hash of passphrases, of the splitter and of the master key's digest.
    pub hash: HashName,
    /// PBKDF2 iterations of the first slot's passphrase; 0 counts as 1.
    pub slot_iterations: u32,
    /// PBKDF2 iterations of the master key's digest; 0 counts as 1.
    pub digest_iterations: u32,
}

zebu_storage::option_setters!(Luks1Options { slot_iterations: u32, digest_iterations: u32 });

impl Luks1Options {
    /// As many iterations ([`crate::MIN_ITERATIONS`] at least) for the first key slot and for the digest.
    pub fn new(cipher: CipherSpec, hash: HashName, iterations: u32) -> Self {
        Self { cipher, hash, slot_iterations: iterations, digest_iterations: iterations }
    }
}

impl Luks1Options {
    /// Bytes of the header with the key material of all slots: where the payload begins.
    pub fn header_len(&self) -> u64 {
        ALIGNMENT + material_len(self.cipher).next_multiple_of(ALIGNMENT) * LUKS1_SLOTS as u64
    }
}

fn material_len(cipher: CipherSpec) -> u64 {
    cipher.key_len() as u64 * u64::from(STRIPES)
}

/// Bytes to be written at an offset of the header's device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeaderWrite {
    /// Byte from the header's begin.
    pub offset: u64,
    /// The bytes.
    pub bytes: Vec<u8>,
}

/// Writes in any order; all are to be durable before the next step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeaderStep {
    /// The writes, which do not overlap.
    pub writes: Vec<HeaderWrite>,
}

impl HeaderStep {
    fn one(offset: u64, bytes: Vec<u8>) -> Self {
        Self { writes: vec![HeaderWrite { offset, bytes }] }
    }
}

/// Whether the last key may be removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LastKey {
    /// It is refused.
    Keep,
    /// It is removed, and with it the data.
    Remove,
}

impl Luks1Header {
    /// Makes a header with a new master key and one passphrase in slot 0. Returns it, the key, and the bytes from the
    /// header's begin to the payload.
    ///
    /// # Errors
    /// [`LuksError::Random`], [`LuksError::Memory`].
    pub fn create(
        options: &Luks1Options,
        passphrase: &[u8],
        random: &mut dyn Random,
    ) -> Result<(Self, MasterKey, Vec<u8>), LuksError> {
        let material = material_len(options.cipher).next_multiple_of(ALIGNMENT);
        let slot = |number: u64| Luks1Slot {
            is_active: false,
            iterations: 0,
            salt: [0; 32],
            material_sector: ((ALIGNMENT + number * material) / SECTOR) as u32,
            stripes: STRIPES,
        };
        let key = MasterKey::generate(options.cipher.key_len(), random)?;
        let mut header = Self {
            cipher: options.cipher,
            hash: options.hash,
            payload_sector: (options.header_len() / SECTOR) as u32,
            digest: [0; 20],
            digest_salt: [0; 32],
            digest_iterations: options.digest_iterations.max(1),
            uuid: random_uuid(random)?,
            slots: std::array::from_fn(|number| slot(number as u64)),
        };
        random.fill(&mut header.digest_salt)?;
        header.digest = header.digest_of(key.bytes());
        let steps = header.add_key(Some(0), &key, passphrase, options.slot_iterations, random)?;
        let mut bytes = vec![0; options.header_len() as usize];
        for write in steps.iter().flat_map(|step| &step.writes) {
            let at = write.offset as usize;
            bytes[at..at + write.bytes.len()].copy_from_slice(&write.bytes);
        }
        let encoded = header.encode();
        bytes[..encoded.len()].copy_from_slice(&encoded);
        Ok((header, key, bytes))
    }

    /// Tries a passphrase on one slot, whose key material [`Luks1Header::material`] places. `None`: it does not fit.
    ///
    /// # Errors
    /// [`LuksError::NoSuchSlot`], [`LuksError::SlotInactive`], [`LuksError::MaterialLength`], [`LuksError::Memory`].
    pub fn unlock(
        &self,
        slot: u32,
        passphrase: &[u8],
        material: &[u8],
    ) -> Result<Option<MasterKey>, LuksError> {
        let range = self.material(slot)?;
        let entry = *self.slot(slot)?;
        if !entry.is_active {
            return Err(LuksError::SlotInactive { slot });
        }
        let (expected, given) = (range.end - range.start, material.len() as u64);
        if expected != given {
            return Err(LuksError::MaterialLength { slot, expected, given });
        }
        on_wiped_stack::<DERIVATION_STACK, _>(|| {
            let slot_key = self.slot_key(&entry, passphrase)?;
            let split = decrypt_material(self.cipher, &slot_key, material)?;
            let key = anti_forensic::merge(self.hash, self.cipher.key_len(), entry.stripes, &split)?;
            Ok(self.is_master_key(&key).then(|| MasterKey::from_locked(key)))
        })
    }

    /// Fills a slot, or the first that is free, with a passphrase for the master key. `iterations` of 0 count as 1.
    ///
    /// The header has the slot at once. On the device, first the key material and the slot's other fields are written, then the
    /// four bytes that make it active.
    ///
    /// # Errors
    /// [`LuksError::SlotInUse`], [`LuksError::NoFreeSlot`], [`LuksError::NoSuchSlot`], [`LuksError::WrongMasterKey`],
    /// [`LuksError::Random`], [`LuksError::Memory`]. The header is as it was then.
    pub fn add_key(
        &mut self,
        slot: Option<u32>,
        key: &MasterKey,
        passphrase: &[u8],
        iterations: u32,
        random: &mut dyn Random,
    ) -> Result<Vec<HeaderStep>, LuksError> {
        if !self.is_master_key(key.bytes()) {
            return Err(LuksError::WrongMasterKey);
        }
        let slot = match slot {
            Some(slot) if self.slot(slot)?.is_active => return Err(LuksError::SlotInUse { slot }),
            Some(slot) => slot,
            None => (0u32..)
                .zip(&self.slots)
                .find(|(_, slot)| !slot.is_active)
                .map(|(number, _)| number)
                .ok_or(LuksError::NoFreeSlot { slots: LUKS1_SLOTS as u32 })?,
        };
        let range = self.material(slot)?;
        let mut entry = Luks1Slot { is_active: false, iterations: iterations.max(1), ..*self.slot(slot)? };
        random.fill(&mut entry.salt)?;
        let slot_key = self.slot_key(&entry, passphrase)?;
        let len = (range.end - range.start) as usize;
        let mut split = LockedBytes::zeroed(len).map_err(|error| LuksError::key_memory(len, error))?;
        on_wiped_stack::<DERIVATION_STACK, _>(|| {
            anti_forensic::split(self.hash, key.bytes(), &mut split, random)
        })?;
        SectorCipher::new(self.cipher, &slot_key)?.encrypt(0, &mut split)?;

        let inactive = encode_slot(&entry);
        entry.is_active = true;
        let active = encode_slot(&entry);
        self.slots[slot as usize] = entry;
        let offset = slot_offset(slot);
        let fields = HeaderStep {
            writes: vec![
                HeaderWrite { offset: range.start, bytes: split.to_vec() },
                HeaderWrite { offset, bytes: inactive.to_vec() },
            ],
        };
        Ok(vec![fields, HeaderStep::one(offset, active[..4].to_vec())])
    }

    /// Empties a slot. The header has it empty at once. On the device, first the slot becomes inactive, then its salt and key
    /// material are overwritten with random bytes.
    ///
    /// A crash between the steps leaves the material of a slot that is inactive. The next key in the slot overwrites it.
    ///
    /// # Errors
    /// [`LuksError::NoSuchSlot`], [`LuksError::SlotInactive`], [`LuksError::LastSlot`], [`LuksError::Random`]. The header is
    /// as it was then.
    pub fn remove_key(
        &mut self,
        slot: u32,
        last: LastKey,
        random: &mut dyn Random,
    ) -> Result<Vec<HeaderStep>, LuksError> {
        let range = self.material(slot)?;
        let mut entry = *self.slot(slot)?;
        if !entry.is_active {
            return Err(LuksError::SlotInactive { slot });
        }
        if last == LastKey::Keep && self.active_slots().count() == 1 {
            return Err(LuksError::LastSlot { slot });
        }
        let mut wiped = vec![0; (range.end - range.start) as usize];
        random.fill(&mut wiped)?;
        entry.is_active = false;
        let inactive = encode_slot(&entry);
        entry.salt = [0; 32];
        entry.iterations = 0;
        let empty = encode_slot(&entry);
        self.slots[slot as usize] = entry;
        let offset = slot_offset(slot);
        let wipe = HeaderStep {
            writes: vec![
                HeaderWrite { offset: range.start, bytes: wiped },
                HeaderWrite { offset, bytes: empty.to_vec() },
            ],
        };
        Ok(vec![HeaderStep::one(offset, inactive[..4].to_vec()), wipe])
    }

    /// Whether a key is the master key of this header.
    pub fn is_master_key(&self, key: &[u8]) -> bool {
        key.len() == self.cipher.key_len() && bool::from(self.digest_of(key).ct_eq(&self.digest))
    }

    fn digest_of(&self, key: &[u8]) -> [u8; 20] {
        let mut digest = [0; 20];
        on_wiped_stack::<DERIVATION_STACK, _>(|| {
            self.hash.pbkdf2(key, &self.digest_salt, self.digest_iterations, &mut digest);
        });
        digest
    }

    fn slot_key(&self, slot: &Luks1Slot, passphrase: &[u8]) -> Result<LockedBytes, LuksError> {
        let len = self.cipher.key_len();
        let mut key = LockedBytes::zeroed(len).map_err(|error| LuksError::key_memory(len, error))?;
        on_wiped_stack::<DERIVATION_STACK, _>(|| {
            self.hash.pbkdf2(passphrase, &slot.salt, slot.iterations, &mut key);
        });
        Ok(key)
    }
}

/// A random UUID (RFC 9562, version 4) as text.
fn random_uuid(random: &mut dyn Random) -> Result<String, LuksError> {
    let mut bytes = [0; 16];
    random.fill(&mut bytes)?;
    let number =
        u128::from_be_bytes(bytes) & !(0xf000 << 64) & !(0xc000 << 48) | (0x4000 << 64) | (0x8000 << 48);
    let hex = format!("{number:032x}");
    Ok(format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]))
}
