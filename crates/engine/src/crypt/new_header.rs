//! The LUKS header of a new image.

use super::cipher_run::COUNTED;
use super::header::luks_error;
use super::keys::{HeaderCosts, Keys, Passphrase};
use crate::{Error, ErrorKind, Remedy, Result};
use std::path::Path;
use std::time::Duration;
use zebu_luks::{
    CipherSpec, HashName, Limits, Luks1Header, Luks1Options, MIN_ITERATIONS, STRIPES, SystemRandom,
    pbkdf2_iterations,
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
    /// Whether more iterations are allowed than an image may ask for when it is opened with [`HeaderCosts::Bounded`].
    pub costs: HeaderCosts,
}

zebu_storage::option_setters!(NewEncryption {
    passphrase: impl Into<Option<Passphrase>>,
    method: NewMethod,
    cipher: CipherSpec,
    hash: HashName,
    iteration_time: Duration,
    costs: HeaderCosts,
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
            costs: HeaderCosts::Bounded,
        }
    }
}

/// A header that was made, ready to be written.
pub(crate) struct MadeHeader {
    /// From its beginning to the payload's.
    pub(crate) bytes: Vec<u8>,
}

/// Iterations of a key slot that take `time`.
///
/// # Errors
/// More than `limits` let a header ask for: the image would be refused when it is opened, whichever key is given.
pub(crate) fn slot_iterations(
    path: &Path,
    hash: HashName,
    key_len: usize,
    time: Duration,
    limits: &Limits,
) -> Result<u32> {
    if time < Duration::from_millis(1) {
        return Ok(MIN_ITERATIONS);
    }
    let iterations = pbkdf2_iterations(hash, key_len, time);
    let most = limits.pbkdf2_iterations;
    if u64::from(iterations) <= most {
        return Ok(iterations);
    }
    let message = format!(
        "an iter-time of {} ms is {iterations} iterations of PBKDF2 on this machine, and an image that asks for more than \
         {most} is not opened: give a shorter time",
        time.as_millis()
    );
    Err(Error::new(ErrorKind::InvalidArgument, message).on(path).with_remedy(Remedy::AllowHeaderCosts))
}

impl NewEncryption {
    /// AES-256 in XTS mode with this passphrase.
    pub fn new(passphrase: Passphrase) -> Self {
        Self { passphrase: Some(passphrase), ..Self::default() }
    }

    /// The keys that open the image.
    pub(crate) fn keys(&self) -> Keys {
        self.passphrase.clone().map(Keys::of_top).unwrap_or_default().with_costs(self.costs)
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

    /// Fails if QEMU aborts when it opens such an image: it takes key material for whole sectors. 24 bytes in 4000 stripes are none.
    fn check_material(&self, path: &Path) -> Result<()> {
        let material = self.cipher.key_len() as u64 * u64::from(STRIPES);
        if material.is_multiple_of(COUNTED) {
            return Ok(());
        }
        let message = format!(
            "{} with a key of {} bits is not made: QEMU aborts when it opens such a disk",
            self.cipher,
            self.cipher.key_len() * 8
        );
        Err(Error::new(ErrorKind::Unsupported, message).on(path))
    }

    /// Makes a header with a new master key; of AES as before LUKS, there is none. Takes as long as it takes to try a passphrase, twice at most.
    ///
    /// # Errors
    /// [`crate::ErrorKind::KeyMissing`] without a passphrase; a key that QEMU can't open; no memory, or no random bytes.
    pub(crate) async fn make(&self, worker: &Worker, path: &Path) -> Result<MadeHeader> {
        let Some(passphrase) = self.passphrase.clone() else {
            let message = "an encrypted image needs a passphrase (encrypt.key-secret, or key-secret for the format luks)";
            return Err(Error::new(ErrorKind::KeyMissing, message).on(path));
        };
        if self.method == NewMethod::LegacyAes {
            return Ok(MadeHeader { bytes: Vec::new() });
        }
        self.check_material(path)?;
        let (this, mut options, path) = (self.clone(), self.options(), path.to_owned());
        let made = worker.run_blocking(move || {
            let (limits, key_len) = (this.costs.limits(), this.cipher.key_len());
            options.slot_iterations =
                slot_iterations(&path, this.hash, key_len, this.iteration_time, &limits)?;
            let share = this.iteration_time / DIGEST_SHARE;
            options.digest_iterations = slot_iterations(&path, this.hash, DIGEST_LEN, share, &limits)?;
            Luks1Header::create(&options, passphrase.as_bytes(), &mut SystemRandom)
                .map_err(|error| luks_error(&path, &error))
        });
        let (_, _, bytes) = made.await?;
        Ok(MadeHeader { bytes })
    }
}
