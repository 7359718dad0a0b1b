//! How a passphrase becomes the key of a LUKS2 key slot.

use crate::error::LuksError;
use crate::hash::HashName;
use crate::limits::Limits;
use argon2::{Algorithm, Argon2, Block, Params, Version};
use std::io;
use zebu_storage::LockedBytes;
use zeroize::Zeroize;

/// A kind of Argon2 (RFC 9106).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Argon2Kind {
    /// Memory is used in an order that does not depend on the passphrase.
    Argon2i,
    /// The first half pass as Argon2i, the rest in an order that depends on it.
    Argon2id,
}

/// Costs of Argon2.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Argon2Cost {
    /// Passes over the memory.
    pub passes: u32,
    /// KiB of memory.
    pub memory: u32,
    /// Lanes. They are computed one after another.
    pub lanes: u32,
}

impl Argon2Cost {
    pub(crate) fn validate(self, path: &str, salt_len: usize, limits: &Limits) -> Result<(), LuksError> {
        let memory = u64::from(self.memory);
        Limits::check(&format!("{path}.memory (KiB)"), memory, limits.argon2_memory)?;
        let work = u64::from(self.passes) * memory;
        Limits::check(&format!("{path}.time, times its memory in KiB,"), work, limits.argon2_work)?;
        if salt_len < argon2::MIN_SALT_LEN {
            return Err(LuksError::field(format!("{path}.salt"), format!("{salt_len} bytes are too few")));
        }
        self.params(32).map(drop).map_err(|error| {
            let Self { passes, memory, lanes } = self;
            let cost = format!("time {passes}, memory {memory}, cpus {lanes}");
            LuksError::field(path, format!("{cost} can't be run: {error}"))
        })
    }

    fn params(self, key_len: usize) -> Result<Params, argon2::Error> {
        Params::new(self.memory, self.passes, self.lanes, Some(key_len))
    }
}

/// A key derivation function with its costs and salt.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Kdf {
    /// PBKDF2.
    Pbkdf2 {
        /// The hash.
        hash: HashName,
        /// Iterations.
        iterations: u32,
        /// The salt.
        salt: Vec<u8>,
    },
    /// Argon2, version 1.3.
    Argon2 {
        /// The kind.
        kind: Argon2Kind,
        /// The costs.
        cost: Argon2Cost,
        /// The salt.
        salt: Vec<u8>,
    },
}

impl Kdf {
    /// Derives a key of `len` bytes.
    ///
    /// # Errors
    /// [`LuksError::Memory`]; [`LuksError::Field`] for costs that were not validated.
    pub fn derive(&self, passphrase: &[u8], len: usize) -> Result<LockedBytes, LuksError> {
        let mut key = LockedBytes::zeroed(len).map_err(|error| LuksError::key_memory(len, error))?;
        match self {
            Self::Pbkdf2 { hash, iterations, salt } => hash.pbkdf2(passphrase, salt, *iterations, &mut key),
            Self::Argon2 { kind, cost, salt } => argon2(*kind, *cost, salt, passphrase, &mut key)?,
        }
        Ok(key)
    }
}

fn argon2(
    kind: Argon2Kind,
    cost: Argon2Cost,
    salt: &[u8],
    passphrase: &[u8],
    key: &mut [u8],
) -> Result<(), LuksError> {
    let refused = |error: argon2::Error| LuksError::field("kdf", format!("Argon2 refuses it: {error}"));
    let params = cost.params(key.len()).map_err(refused)?;
    let blocks = params.block_count();
    let mut memory = Vec::new();
    memory.try_reserve_exact(blocks).map_err(|_| LuksError::Memory {
        purpose: "Argon2",
        bytes: u64::from(cost.memory) << 10,
        source: io::ErrorKind::OutOfMemory.into(),
    })?;
    memory.resize(blocks, Block::new());
    let algorithm = match kind {
        Argon2Kind::Argon2i => Algorithm::Argon2i,
        Argon2Kind::Argon2id => Algorithm::Argon2id,
    };
    let argon2 = Argon2::new(algorithm, Version::V0x13, params);
    let derived = argon2.hash_password_into_with_memory(passphrase, salt, key, &mut memory);
    memory.iter_mut().for_each(Zeroize::zeroize);
    derived.map_err(refused)
}
