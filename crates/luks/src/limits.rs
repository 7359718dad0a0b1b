//! Limits of what a header may ask for before it is believed.

use crate::error::LuksError;

/// Number of key slots of LUKS1 (format), and the most of LUKS2 (cryptsetup).
pub const LUKS1_SLOTS: usize = 8;
/// Most key slots of a LUKS2 header (cryptsetup).
pub const LUKS2_SLOTS: usize = 32;
/// Stripes of the key material that cryptsetup and QEMU write.
pub const STRIPES: u32 = 4000;
/// Most stripes that are read. Both tools write [`STRIPES`].
pub const MAX_STRIPES: u32 = 1 << 16;
/// Bytes of the sector that offsets and initialization vectors count.
pub(crate) const SECTOR: u64 = 512;

/// Bytes of the stack that are wiped after keys were derived or expanded. The largest schedule has 10 KiB, and is moved a few times.
pub(crate) const DERIVATION_STACK: usize = 96 << 10;
/// Bytes of the stack that are wiped after keys were used.
pub(crate) const CIPHER_STACK: usize = 4 << 10;

/// Costs that a header may ask for. A header can't be trusted before a key fits it, and to try a key costs what it says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Most PBKDF2 iterations of a key slot or a digest. The default, 50 million, is a minute or less for each slot.
    pub pbkdf2_iterations: u64,
    /// Most KiB of memory for Argon2. The default, 1 GiB, is cryptsetup's own.
    pub argon2_memory: u64,
    /// Most passes of Argon2, times KiB of its memory. The default is 64 passes over 1 GiB.
    pub argon2_work: u64,
}

zebu_storage::option_setters!(Limits { pbkdf2_iterations: u64, argon2_memory: u64, argon2_work: u64 });

impl Default for Limits {
    fn default() -> Self {
        Self { pbkdf2_iterations: 50_000_000, argon2_memory: 1 << 20, argon2_work: 64 << 20 }
    }
}

impl Limits {
    /// Limits that only the format has.
    pub const NONE: Self =
        Self { pbkdf2_iterations: u64::MAX, argon2_memory: u64::MAX, argon2_work: u64::MAX };

    pub(crate) fn check(field: &str, value: u64, limit: u64) -> Result<(), LuksError> {
        if value > limit {
            Err(LuksError::OverLimit { field: field.to_owned(), value, limit })
        } else {
            Ok(())
        }
    }
}
