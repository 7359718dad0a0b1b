//! The header of LUKS1: parse, validate, encode ("LUKS1 On-Disk Format Specification", version 1.2.3).

use crate::bytes::{array, text, u16_at, u32_at};
use crate::cipher_spec::CipherSpec;
use crate::error::LuksError;
use crate::hash::HashName;
use crate::limits::{LUKS1_SLOTS, Limits, MAX_STRIPES, SECTOR};
use std::ops::Range;

/// The first bytes of a header of either version.
pub(crate) const MAGIC: [u8; 6] = *b"LUKS\xba\xbe";
/// Bytes of a LUKS1 header without its key material.
pub const LUKS1_HEADER_LEN: usize = 592;
const SLOTS_AT: usize = 208;
const SLOT_LEN: usize = 48;
/// The states of a slot.
const ACTIVE: u32 = 0x00AC_71F3;
const INACTIVE: u32 = 0x0000_DEAD;

/// One of the eight key slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Luks1Slot {
    /// Whether the slot holds a key.
    pub is_active: bool,
    /// PBKDF2 iterations of its passphrase.
    pub iterations: u32,
    /// Salt of its passphrase.
    pub salt: [u8; 32],
    /// Offset of its key material, in sectors of 512 bytes.
    pub material_sector: u32,
    /// Stripes of the anti-forensic splitter.
    pub stripes: u32,
}

/// A valid LUKS1 header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Luks1Header {
    pub(crate) cipher: CipherSpec,
    pub(crate) hash: HashName,
    pub(crate) payload_sector: u32,
    pub(crate) digest: [u8; 20],
    pub(crate) digest_salt: [u8; 32],
    pub(crate) digest_iterations: u32,
    pub(crate) uuid: String,
    pub(crate) slots: [Luks1Slot; LUKS1_SLOTS],
}

impl Luks1Header {
    /// Parses and validates a header. `bytes` are the first of the device, or of the area in a qcow2 file, at least
    /// [`LUKS1_HEADER_LEN`] of them.
    ///
    /// # Errors
    /// The first thing that is wrong, with the field's name of the format document.
    pub fn parse(bytes: &[u8], limits: &Limits) -> Result<Self, LuksError> {
        if bytes.len() >= MAGIC.len() && !bytes.starts_with(&MAGIC) {
            return Err(LuksError::NotLuks);
        }
        if bytes.len() < LUKS1_HEADER_LEN {
            let (needed, present) = (LUKS1_HEADER_LEN as u64, bytes.len() as u64);
            return Err(LuksError::Truncated { needed, present });
        }
        let version = u16_at(bytes, 6);
        if version != 1 {
            return Err(LuksError::UnsupportedVersion { version });
        }
        let (cipher, mode) = (text::<32>(bytes, 8, "cipher-name")?, text::<32>(bytes, 40, "cipher-mode")?);
        let hash = HashName::parse(&text::<32>(bytes, 72, "hash-spec")?)?;
        let key_len = u32_at(bytes, 108);
        let cipher = CipherSpec::parse(&cipher, &mode, key_len as usize)
            .map_err(|error| name_key_length(error, key_len))?;
        let header = Self {
            cipher,
            hash,
            payload_sector: u32_at(bytes, 104),
            digest: array(bytes, 112),
            digest_salt: array(bytes, 132),
            digest_iterations: u32_at(bytes, 164),
            uuid: text::<40>(bytes, 168, "uuid")?,
            slots: std::array::from_fn(|slot| slot_at(bytes, slot)),
        };
        for slot in 0..LUKS1_SLOTS {
            let state = u32_at(bytes, SLOTS_AT + slot * SLOT_LEN);
            if !matches!(state, ACTIVE | INACTIVE) {
                let problem = format!("{state:#010x} is neither active nor inactive");
                return Err(LuksError::field(slot_field(slot, "active"), problem));
            }
        }
        header.validate(limits)?;
        Ok(header)
    }

    fn validate(&self, limits: &Limits) -> Result<(), LuksError> {
        iterations("mk-digest-iter", self.digest_iterations, limits)?;
        let header_sectors = (LUKS1_HEADER_LEN as u64).div_ceil(SECTOR);
        if self.payload_sector == 0 {
            return Err(LuksError::field(
                "payload-offset",
                "0: the header is detached, made for a device apart from its data",
            ));
        }
        if u64::from(self.payload_sector) < header_sectors {
            let problem =
                format!("{} lies inside the header of {header_sectors} sectors", self.payload_sector);
            return Err(LuksError::field("payload-offset", problem));
        }
        for (number, slot) in self.slots.iter().enumerate() {
            let stripes = slot_field(number, "stripes");
            if slot.stripes == 0 {
                return Err(LuksError::field(stripes, "0 stripes hold no key"));
            }
            if slot.stripes > MAX_STRIPES {
                let problem = format!("{}, of which at most {MAX_STRIPES} are read", slot.stripes);
                return Err(LuksError::field(stripes, problem));
            }
            let len = self.cipher.key_len() as u64 * u64::from(slot.stripes);
            if !len.is_multiple_of(16) {
                let problem = format!("{len} bytes of key material are no whole blocks of the cipher");
                return Err(LuksError::field(stripes, problem));
            }
            let field = || slot_field(number, "key-material-offset");
            let material = self.material_of(slot);
            if material.start < header_sectors * SECTOR {
                let problem = format!("{} lies inside the header", slot.material_sector);
                return Err(LuksError::field(field(), problem));
            }
            let payload = self.payload_offset();
            if material.end > payload {
                let problem = format!(
                    "the key material ends at byte {}, after the payload's begin at {payload}",
                    material.end
                );
                return Err(LuksError::field(field(), problem));
            }
            for (other, earlier) in self.slots[..number].iter().enumerate() {
                let earlier = self.material_of(earlier);
                if material.start < earlier.end && earlier.start < material.end {
                    let problem = format!("the key material overlaps that of slot {other}");
                    return Err(LuksError::field(field(), problem));
                }
            }
            if slot.is_active {
                iterations(&slot_field(number, "iterations"), slot.iterations, limits)?;
            }
        }
        Ok(())
    }

    /// The header's bytes, without key material.
    pub fn encode(&self) -> [u8; LUKS1_HEADER_LEN] {
        let mut bytes = [0; LUKS1_HEADER_LEN];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(0, &MAGIC);
        put(6, &1u16.to_be_bytes());
        put(8, self.cipher.cipher().name().as_bytes());
        put(40, self.cipher.mode().name().as_bytes());
        put(72, self.hash.name().as_bytes());
        put(104, &self.payload_sector.to_be_bytes());
        put(108, &(self.cipher.key_len() as u32).to_be_bytes());
        put(112, &self.digest);
        put(132, &self.digest_salt);
        put(164, &self.digest_iterations.to_be_bytes());
        put(168, self.uuid.as_bytes());
        for (number, slot) in self.slots.iter().enumerate() {
            put(SLOTS_AT + number * SLOT_LEN, &encode_slot(slot));
        }
        bytes
    }

    /// The cipher of the data and of the key material.
    pub fn cipher(&self) -> CipherSpec {
        self.cipher
    }

    /// The hash of passphrases, of the splitter and of the master key's digest.
    pub fn hash(&self) -> HashName {
        self.hash
    }

    /// Byte at which the data begins. In a qcow2 file, the length of the area that the header needs.
    pub fn payload_offset(&self) -> u64 {
        u64::from(self.payload_sector) * SECTOR
    }

    /// PBKDF2 iterations of the master key's digest.
    pub fn digest_iterations(&self) -> u32 {
        self.digest_iterations
    }

    /// The UUID, as text.
    pub fn uuid(&self) -> &str {
        &self.uuid
    }

    /// The key slots, by number.
    pub fn slots(&self) -> &[Luks1Slot; LUKS1_SLOTS] {
        &self.slots
    }

    /// Numbers of the slots that hold keys.
    pub fn active_slots(&self) -> impl Iterator<Item = u32> + '_ {
        (0u32..).zip(&self.slots).filter(|(_, slot)| slot.is_active).map(|(number, _)| number)
    }

    /// Bytes of the device that hold a slot's key material.
    ///
    /// # Errors
    /// [`LuksError::NoSuchSlot`].
    pub fn material(&self, slot: u32) -> Result<Range<u64>, LuksError> {
        Ok(self.material_of(self.slot(slot)?))
    }

    pub(crate) fn slot(&self, slot: u32) -> Result<&Luks1Slot, LuksError> {
        self.slots.get(slot as usize).ok_or(LuksError::NoSuchSlot { slot })
    }

    fn material_of(&self, slot: &Luks1Slot) -> Range<u64> {
        let start = u64::from(slot.material_sector) * SECTOR;
        start..start + self.cipher.key_len() as u64 * u64::from(slot.stripes)
    }
}

/// Offset of a slot's entry in the header.
pub(crate) fn slot_offset(slot: u32) -> u64 {
    (SLOTS_AT + slot as usize * SLOT_LEN) as u64
}

/// A slot's entry. Its first four bytes say whether the slot is active.
pub(crate) fn encode_slot(slot: &Luks1Slot) -> [u8; SLOT_LEN] {
    let mut bytes = [0; SLOT_LEN];
    let state = if slot.is_active { ACTIVE } else { INACTIVE };
    bytes[..4].copy_from_slice(&state.to_be_bytes());
    bytes[4..8].copy_from_slice(&slot.iterations.to_be_bytes());
    bytes[8..40].copy_from_slice(&slot.salt);
    bytes[40..44].copy_from_slice(&slot.material_sector.to_be_bytes());
    bytes[44..].copy_from_slice(&slot.stripes.to_be_bytes());
    bytes
}

fn slot_at(bytes: &[u8], slot: usize) -> Luks1Slot {
    let at = SLOTS_AT + slot * SLOT_LEN;
    Luks1Slot {
        is_active: u32_at(bytes, at) == ACTIVE,
        iterations: u32_at(bytes, at + 4),
        salt: array(bytes, at + 8),
        material_sector: u32_at(bytes, at + 40),
        stripes: u32_at(bytes, at + 44),
    }
}

fn slot_field(slot: usize, field: &str) -> String {
    format!("{field} of key slot {slot}")
}

fn iterations(field: &str, iterations: u32, limits: &Limits) -> Result<(), LuksError> {
    if iterations == 0 {
        return Err(LuksError::field(field, "0 iterations"));
    }
    Limits::check(field, iterations.into(), limits.pbkdf2_iterations)
}

fn name_key_length(error: LuksError, key_len: u32) -> LuksError {
    match error {
        LuksError::KeyLength { cipher, .. } => {
            LuksError::field("key-bytes", format!("{key_len} bytes are no key of {cipher}"))
        }
        other => other,
    }
}
