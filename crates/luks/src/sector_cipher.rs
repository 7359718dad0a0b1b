//! Encryption of sectors in place.

use crate::block_cipher::{BLOCK, Block16, Direction};
use crate::cbc_sectors::Cbc;
use crate::cipher_spec::{BlockCipher, CipherSpec, Mode};
use crate::error::LuksError;
use crate::limits::{CIPHER_STACK, DERIVATION_STACK, SECTOR};
use crate::xts_sectors::Xts;
use aes::{Aes128, Aes192, Aes256};
use cipher::{Array, KeyInit};
use serpent::Serpent;
use sha2::{Digest, Sha256};
use std::fmt;
use twofish::Twofish;
use zebu_storage::{LockedBox, on_wiped_stack};
use zeroize::Zeroizing;

/// Blocks of a sector, one after the other.
enum Chain<C> {
    Xts(Xts<C>),
    Cbc(Cbc<C>),
}

/// Expanded keys of a cipher `C`, and of the cipher `E` with a key of 256 bits, which encrypts the vector with ESSIV.
struct Keyed<C, E> {
    chain: Chain<C>,
    essiv: Option<E>,
}

impl<C: Block16 + KeyInit, E: Block16 + KeyInit> Keyed<C, E> {
    fn new(mode: Mode, key: &[u8]) -> Option<Self> {
        let chain = if mode.is_xts() {
            let (data, tweak) = key.split_at_checked(key.len() / 2)?;
            let (data, tweak) = (C::new_from_slice(data).ok()?, C::new_from_slice(tweak).ok()?);
            Chain::Xts(Xts { data, tweak })
        } else {
            Chain::Cbc(Cbc { data: C::new_from_slice(key).ok()? })
        };
        let essiv = if mode.is_essiv() {
            let salt = Zeroizing::new(Sha256::digest(key));
            Some(E::new_from_slice(&salt).ok()?)
        } else {
            None
        };
        Some(Self { chain, essiv })
    }

    /// Sectors of `size` bytes, the last perhaps cut short. `vector` makes the vector of each by its index.
    fn sectors(
        &self,
        direction: Direction,
        vector: impl Fn(u64) -> [u8; BLOCK],
        size: usize,
        data: &mut [u8],
    ) {
        let vector = |index| {
            let Some(essiv) = &self.essiv else { return vector(index) };
            let mut vector = Array(vector(index));
            essiv.encrypt_block(&mut vector);
            vector.0
        };
        match &self.chain {
            Chain::Xts(xts) => xts.sectors(direction, vector, size, data),
            Chain::Cbc(cbc) => {
                for (index, sector) in (0u64..).zip(data.chunks_mut(size)) {
                    cbc.sector(direction, vector(index), sector);
                }
            }
        }
    }
}

#[expect(clippy::large_enum_variant, reason = "lies in locked memory of its own")]
enum Schedule {
    Aes128(Keyed<Aes128, Aes256>),
    Aes192(Keyed<Aes192, Aes256>),
    Aes256(Keyed<Aes256, Aes256>),
    Serpent(Keyed<Serpent, Serpent>),
    Twofish(Keyed<Twofish, Twofish>),
}

impl Schedule {
    /// The schedule of a key, in locked memory; `None` if the key has another length. Copies of it stay on the stack.
    fn locked(spec: CipherSpec, key: &[u8]) -> Result<Option<LockedBox<Self>>, LuksError> {
        let mode = spec.mode();
        let block_key = if mode.is_xts() { key.len() / 2 } else { key.len() };
        let schedule = match (spec.cipher(), block_key) {
            (BlockCipher::Aes, 16) => Keyed::new(mode, key).map(Self::Aes128),
            (BlockCipher::Aes, 24) => Keyed::new(mode, key).map(Self::Aes192),
            (BlockCipher::Aes, _) => Keyed::new(mode, key).map(Self::Aes256),
            (BlockCipher::Serpent, _) => Keyed::new(mode, key).map(Self::Serpent),
            (BlockCipher::Twofish, _) => Keyed::new(mode, key).map(Self::Twofish),
        };
        let Some(schedule) = schedule else { return Ok(None) };
        let locked = LockedBox::new(schedule);
        locked.map(Some).map_err(|error| LuksError::key_memory(size_of::<Self>(), error))
    }
}

/// A cipher with its key, in locked memory. Sectors are encrypted and decrypted in place.
pub struct SectorCipher {
    spec: CipherSpec,
    sector_size: usize,
    schedule: LockedBox<Schedule>,
}

impl SectorCipher {
    /// A cipher for sectors of 512 bytes.
    ///
    /// # Errors
    /// [`LuksError::KeyLength`] if `key` has another length than `spec` says; [`LuksError::Memory`].
    pub fn new(spec: CipherSpec, key: &[u8]) -> Result<Self, LuksError> {
        Self::with_sector_size(spec, key, SECTOR as u32)
    }

    /// A cipher for sectors of `sector_size` bytes: a power of two from 512 to 4096.
    ///
    /// # Errors
    /// As [`SectorCipher::new`], and [`LuksError::Field`] for another sector size.
    pub fn with_sector_size(spec: CipherSpec, key: &[u8], sector_size: u32) -> Result<Self, LuksError> {
        if !matches!(sector_size, 512 | 1024 | 2048 | 4096) {
            return Err(LuksError::field(
                "sector_size",
                format!("{sector_size} is none of 512, 1024, 2048, 4096"),
            ));
        }
        let wrong_len = || LuksError::KeyLength { cipher: spec.to_string(), len: key.len() };
        if key.len() != spec.key_len() {
            return Err(wrong_len());
        }
        let schedule =
            on_wiped_stack::<DERIVATION_STACK, _>(|| Schedule::locked(spec, key))?.ok_or_else(wrong_len)?;
        Ok(Self { spec, sector_size: sector_size as usize, schedule })
    }

    /// The cipher, its mode and the length of its key.
    pub fn spec(&self) -> CipherSpec {
        self.spec
    }

    /// Bytes of a sector: what is encrypted with one initialization vector.
    pub fn sector_size(&self) -> usize {
        self.sector_size
    }

    /// Encrypts whole sectors in place. `first` is the number of the first, in units of 512 bytes whatever the sector size.
    ///
    /// # Errors
    /// [`LuksError::PartialBlock`] if `data` is no whole number of blocks of 16 bytes; nothing is changed then. A last sector may be
    /// cut short between blocks.
    pub fn encrypt(&self, first: u64, data: &mut [u8]) -> Result<(), LuksError> {
        self.run(Direction::Encrypt, first, data)
    }

    /// Decrypts whole sectors in place; see [`SectorCipher::encrypt`].
    ///
    /// # Errors
    /// As [`SectorCipher::encrypt`].
    pub fn decrypt(&self, first: u64, data: &mut [u8]) -> Result<(), LuksError> {
        self.run(Direction::Decrypt, first, data)
    }

    fn run(&self, direction: Direction, first: u64, data: &mut [u8]) -> Result<(), LuksError> {
        if !data.len().is_multiple_of(BLOCK) {
            return Err(LuksError::PartialBlock { len: data.len() });
        }
        let is_short = matches!(self.spec.mode(), Mode::XtsPlain | Mode::CbcPlain);
        let per_sector = self.sector_size as u64 / SECTOR;
        let vector = |index: u64| {
            let number = first.wrapping_add(index.wrapping_mul(per_sector));
            let number = if is_short { number & u64::from(u32::MAX) } else { number };
            u128::from(number).to_le_bytes()
        };
        let size = self.sector_size;
        // Keys that find no place in registers are spilled.
        on_wiped_stack::<CIPHER_STACK, _>(|| match &*self.schedule {
            Schedule::Aes128(keyed) => keyed.sectors(direction, vector, size, data),
            Schedule::Aes192(keyed) => keyed.sectors(direction, vector, size, data),
            Schedule::Aes256(keyed) => keyed.sectors(direction, vector, size, data),
            Schedule::Serpent(keyed) => keyed.sectors(direction, vector, size, data),
            Schedule::Twofish(keyed) => keyed.sectors(direction, vector, size, data),
        });
        Ok(())
    }
}

/// Says the cipher, not the key.
impl fmt::Debug for SectorCipher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SectorCipher")
            .field("spec", &self.spec)
            .field("sector_size", &self.sector_size)
            .finish_non_exhaustive()
    }
}
