//! The LUKS header of a new image.

use super::header::luks_error;
use super::keys::{Keys, Passphrase};
use crate::Result;
use std::path::Path;
use std::time::Duration;
use zebu_luks::{
    CipherSpec, HashName, Luks1Header, Luks1Options, MIN_ITERATIONS, SystemRandom, pbkdf2_iterations,
};
use zebu_storage::Worker;

/// Bytes of the digest of a master key.
const DIGEST_LEN: usize = 20;
/// Part of the time of a key slot that the digest of the master key takes, as QEMU and cryptsetup choose it.
const DIGEST_SHARE: u32 = 8;

/// The encryption of a new image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum NewMethod {
    /// LUKS, version 1.
    #[default]
    Luks1,
    /// AES-128 in CBC mode, with the passphrase itself as the key, as qcow2 had it before LUKS. It is weak: for programs that read
    /// nothing else. The other choices don't count.
    LegacyAes,
}

/// How a new image is encrypted.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct NewEncryption {
    /// The passphrase of key slot 0, or the key of [`NewMethod::LegacyAes`]. A size can be measured without one.
    pub passphrase: Option<Passphrase>,
    /// With LUKS, or as before it. Files by themselves have LUKS.
    pub method: NewMethod,
    /// The cipher of the data and of the key slots.
    pub cipher: CipherSpec,
    /// The hash of the passphrase and of the anti-forensic splitter.
    pub hash: HashName,
    /// Time that it takes to try a passphrase on a machine like this one. The iterations are at least 1000 in any case.
    pub iteration_time: Duration,
}

zebu_storage::option_setters!(NewEncryption {
    passphrase: impl Into<Option<Passphrase>>,
    method: NewMethod,
    cipher: CipherSpec,
    hash: HashName,
    iteration_time: Duration,
});

impl Default for NewEncryption {
    /// AES-256 in XTS mode, SHA-256, two seconds, as QEMU and cryptsetup choose.
    fn default() -> Self {
        Self {
            passphrase: None,
            method: NewMethod::Luks1,
            cipher: CipherSpec::AES_256_XTS,
            hash: HashName::Sha256,
            iteration_time: Duration::from_secs(2),
        }
    }
}

/// A header that was made, ready to be written.
pub(crate) struct MadeHeader {
    /// From its beginning to the payload's.
    pub(crate) bytes: Vec<u8>,
}

/// Iterations of a key slot that take `time`.
pub(crate) fn slot_iterations(hash: HashName, key_len: usize, time: Duration) -> u32 {
    if time < Duration::from_millis(1) { MIN_ITERATIONS } else { pbkdf2_iterations(hash, key_len, time) }
}

impl NewEncryption {
    /// AES-256 in XTS mode with this passphrase.
    pub fn new(passphrase: Passphrase) -> Self {
        Self { passphrase: Some(passphrase), ..Self::default() }
    }

    /// The keys that open the image.
    pub(crate) fn keys(&self) -> Keys {
        self.passphrase.clone().map(Keys::of_top).unwrap_or_default()
    }

    fn options(&self) -> Luks1Options {
        Luks1Options::new(self.cipher, self.hash, MIN_ITERATIONS)
    }

    /// Bytes of the header.
    pub(crate) fn header_len(&self) -> u64 {
        match self.method {
            NewMethod::Luks1 => self.options().header_len(),
            NewMethod::LegacyAes => 0,
        }
    }

    /// Makes a header with a new master key; of AES as before LUKS, there is none. Takes as long as it takes to try a passphrase, twice at most.
    ///
    /// # Errors
    /// [`crate::ErrorKind::KeyMissing`] without a passphrase; no memory, or no random bytes.
    pub(crate) async fn make(&self, worker: &Worker, path: &Path) -> Result<MadeHeader> {
        let Some(passphrase) = self.passphrase.clone() else {
            let message = "an encrypted image needs a passphrase (encrypt.key-secret, or key-secret for the format luks)";
            return Err(crate::Error::new(crate::ErrorKind::KeyMissing, message).on(path));
        };
        if self.method == NewMethod::LegacyAes {
            return Ok(MadeHeader { bytes: Vec::new() });
        }
        let (this, mut options) = (self.clone(), self.options());
        let made = worker.run_blocking(move || {
            let key_len = this.cipher.key_len();
            options.slot_iterations = slot_iterations(this.hash, key_len, this.iteration_time);
            options.digest_iterations =
                slot_iterations(this.hash, DIGEST_LEN, this.iteration_time / DIGEST_SHARE);
            Luks1Header::create(&options, passphrase.as_bytes(), &mut SystemRandom)
        });
        let (_, _, bytes) = made.await.map_err(|error| luks_error(path, &error))?;
        Ok(MadeHeader { bytes })
    }
}
