//! Facts about the header of an encrypted image.

use super::header::LuksHeader;
use zebu_luks::{CipherSpec, Kdf, Luks1Header, Luks2Header};

/// How an image is encrypted.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum EncryptionInfo {
    /// AES-128 with the passphrase itself as the key: the weak way of qcow2 before LUKS.
    Aes,
    /// LUKS.
    Luks(LuksInfo),
}

/// Facts about a LUKS header.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct LuksInfo {
    /// 1 or 2.
    pub version: u32,
    /// The UUID, as the header has it.
    pub uuid: String,
    /// The cipher of the data.
    pub cipher: CipherSpec,
    /// The hash of key slots and of the splitter; LUKS2 has one for each slot.
    pub hash: Option<&'static str>,
    /// Bytes of a sector.
    pub sector_size: u32,
    /// Byte at which the data begins; within qcow2, the bytes of the header.
    pub payload_offset: u64,
    /// PBKDF2 iterations of the master key's digest.
    pub master_key_iterations: Option<u32>,
    /// The key slots: all eight of LUKS1, those in use of LUKS2.
    pub slots: Vec<LuksSlotInfo>,
}

/// Facts about a key slot.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct LuksSlotInfo {
    /// Its number.
    pub number: u32,
    /// Whether it holds a key.
    pub is_active: bool,
    /// PBKDF2 iterations; `None` for Argon2 and for a slot without a key.
    pub iterations: Option<u32>,
    /// Byte of the header at which its key material begins; `None` for a slot that is unusable.
    pub key_offset: Option<u64>,
    /// Stripes of the anti-forensic splitter; `None` for a slot without a key.
    pub stripes: Option<u32>,
    /// The reason why no passphrase can be tried on it.
    pub unusable: Option<String>,
}

impl LuksInfo {
    /// Facts about a valid header.
    pub(crate) fn of(header: &LuksHeader) -> Self {
        match header {
            LuksHeader::V1(header) => Self::of_first(header),
            LuksHeader::V2(header) => Self::of_second(header),
        }
    }

    /// The cipher as QEMU names it, such as "aes-256".
    pub fn cipher_alg(&self) -> String {
        let key_len = self.cipher.key_len();
        let block_key = if self.cipher.mode().is_xts() { key_len / 2 } else { key_len };
        format!("{}-{}", self.cipher.cipher().name(), block_key * 8)
    }

    /// The mode as QEMU names it: "xts" or "cbc".
    pub fn cipher_mode(&self) -> &'static str {
        if self.cipher.mode().is_xts() { "xts" } else { "cbc" }
    }

    /// The generator of initialization vectors as QEMU names it.
    pub fn ivgen_alg(&self) -> &'static str {
        self.cipher.mode().vectors()
    }

    /// The hash of that generator, if it has one.
    pub fn ivgen_hash_alg(&self) -> Option<&'static str> {
        self.cipher.mode().is_essiv().then_some("sha256")
    }

    fn of_first(header: &Luks1Header) -> Self {
        let slots = (0u32..).zip(header.slots());
        Self {
            version: 1,
            uuid: header.uuid().to_owned(),
            cipher: header.cipher(),
            hash: Some(header.hash().name()),
            sector_size: 512,
            payload_offset: header.payload_offset(),
            master_key_iterations: Some(header.digest_iterations()),
            slots: slots
                .map(|(number, slot)| LuksSlotInfo {
                    number,
                    is_active: slot.is_active,
                    iterations: slot.is_active.then_some(slot.iterations),
                    key_offset: Some(u64::from(slot.material_sector) * 512),
                    stripes: slot.is_active.then_some(slot.stripes),
                    unusable: None,
                })
                .collect(),
        }
    }

    fn of_second(header: &Luks2Header) -> Self {
        let segment = header.metadata().segment();
        Self {
            version: 2,
            uuid: header.uuid().to_owned(),
            cipher: segment.cipher,
            hash: None,
            sector_size: segment.sector_size,
            payload_offset: segment.offset,
            master_key_iterations: None,
            slots: header
                .metadata()
                .slots()
                .map(|slot| LuksSlotInfo {
                    number: slot.number(),
                    is_active: true,
                    iterations: match slot.kdf() {
                        Kdf::Pbkdf2 { iterations, .. } => Some(*iterations),
                        _ => None,
                    },
                    key_offset: Some(slot.material().start),
                    stripes: None,
                    unusable: None,
                })
                .chain(header.metadata().unusable_slots().iter().map(|slot| LuksSlotInfo {
                    number: slot.number,
                    is_active: true,
                    iterations: None,
                    key_offset: None,
                    stripes: None,
                    unusable: Some(slot.reason.clone()),
                }))
                .collect(),
        }
    }
}
