//! LUKS headers in files: reading them, trying a passphrase.

use super::keys::{Keys, Passphrase};
use crate::file_bytes::read_bytes;
use crate::{Error, ErrorKind, Remedy, Result};
use std::ops::Range;
use std::path::Path;
use zebu_luks::{
    Kdf, LUKS1_HEADER_LEN, LUKS2_HEADERS_MAX, Limits, Luks1Header, Luks2Header, Luks2Slot, LuksError,
    MasterKey, Priority, SectorCipher,
};
use zebu_storage::{File, Worker};

/// Bytes of a header that tell its version.
const VERSION_END: usize = 8;
const MAGIC: &[u8] = b"LUKS\xba\xbe";

/// Costs of all key slots that are tried, as a multiple of the limits of one.
const TOGETHER: f64 = 2.0;

/// Key slots by whether a passphrase is tried on them.
#[derive(Debug, Default)]
pub(crate) struct SlotsToTry {
    /// Their numbers, in the order in which they are tried.
    pub(crate) tried: Vec<u32>,
    /// The others, each with the reason.
    left_out: Vec<String>,
    /// Whether any of these costs too much.
    is_over_limit: bool,
}

/// A valid header of either version.
#[derive(Debug, Clone)]
pub(crate) enum LuksHeader {
    V1(Box<Luks1Header>),
    V2(Box<Luks2Header>),
}

/// Guest data behind a header of a file by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Payload {
    /// Byte of the file at which it begins.
    pub(crate) offset: u64,
    /// Bytes; `None`: up to the end of the file.
    pub(crate) len: Option<u64>,
    /// Number of its first sector of 512 bytes.
    pub(crate) first_sector: u64,
}

/// An error of the crate for headers, as the engine says it.
pub(crate) fn luks_error(path: &Path, error: &LuksError) -> Error {
    let kind = match error {
        LuksError::NotLuks
        | LuksError::Truncated { .. }
        | LuksError::Field { .. }
        | LuksError::BothCopiesDamaged { .. } => ErrorKind::Corrupt,
        LuksError::UnsupportedVersion { .. }
        | LuksError::Unsupported { .. }
        | LuksError::OverLimit { .. }
        | LuksError::KeyLength { .. } => ErrorKind::Unsupported,
        LuksError::LastSlot { .. }
        | LuksError::SlotInUse { .. }
        | LuksError::NoFreeSlot { .. }
        | LuksError::NoSuchSlot { .. }
        | LuksError::SlotInactive { .. } => ErrorKind::InvalidArgument,
        _ => ErrorKind::Io,
    };
    let told = Error::new(kind, error.to_string()).on(path);
    if matches!(error, LuksError::OverLimit { .. }) {
        return told.with_remedy(Remedy::AllowHeaderCosts);
    }
    told
}

impl LuksHeader {
    /// Reads the header at byte `area.start` of `file`. `area` is what belongs to the header, or the whole file.
    ///
    /// # Errors
    /// It is damaged, not supported, or asks for more than `limits`.
    pub(crate) async fn read(
        worker: &Worker,
        file: &File,
        area: Range<u64>,
        limits: &Limits,
    ) -> Result<Self> {
        let refuse = |error: LuksError| luks_error(file.path(), &error);
        // What the file does not hold costs no memory, whatever a pointer says.
        let present = area.end.min(file.len()).saturating_sub(area.start);
        let first =
            read_bytes(worker, file, area.start, present.min(LUKS1_HEADER_LEN as u64) as usize).await?;
        if first.starts_with(MAGIC) && first.get(6..VERSION_END) == Some(&[0, 1]) {
            // A slot that costs too much is left out; the digest belongs to all of them.
            let header = Luks1Header::parse(&first, &Limits::NONE).map_err(refuse)?;
            let (value, limit) = (u64::from(header.digest_iterations()), limits.pbkdf2_iterations);
            if value > limit {
                return Err(refuse(LuksError::OverLimit {
                    field: "mk-digest-iter".to_owned(),
                    value,
                    limit,
                }));
            }
            if header.payload_offset() > area.end.saturating_sub(area.start) {
                let message = format!(
                    "the LUKS header says that it has {} bytes, {} are there",
                    header.payload_offset(),
                    area.end - area.start
                );
                return Err(Error::new(ErrorKind::Corrupt, message).on(file.path()));
            }
            return Ok(Self::V1(Box::new(header)));
        }
        if (first.len() as u64) < LUKS1_HEADER_LEN as u64 {
            // Too short for either version.
            return Err(refuse(Luks1Header::parse(&first, limits).err().unwrap_or(LuksError::NotLuks)));
        }
        // The first copy of a header of version 2 may be damaged, its magic number included.
        let bytes = read_bytes(worker, file, area.start, present.min(LUKS2_HEADERS_MAX) as usize).await?;
        let header = Luks2Header::parse(&bytes, limits).map_err(refuse)?;
        Ok(Self::V2(Box::new(header)))
    }

    /// Tries a passphrase on every slot that holds a key. Returns the slot that it opens and the master key.
    ///
    /// # Errors
    /// [`ErrorKind::WrongKey`]: it opens none of those that are supported and cost no more than `limits`.
    pub(crate) async fn unlock(
        &self,
        worker: &Worker,
        file: &File,
        start: u64,
        passphrase: &Passphrase,
        limits: &Limits,
    ) -> Result<(u32, MasterKey)> {
        let slots = self.slots_to_try(limits);
        if let Some(opened) = self.first_opened(worker, file, start, passphrase, &slots).await? {
            return Ok(opened);
        }
        let message = match slots.left_out.first() {
            None if slots.tried.is_empty() => {
                "no key slot is active: no passphrase opens this image any more".to_owned()
            }
            None => "Invalid password, cannot unlock any keyslot".to_owned(),
            Some(left_out) => {
                format!("Invalid password, cannot unlock any keyslot that was tried; one was not: {left_out}")
            }
        };
        let error = Error::new(ErrorKind::WrongKey, message).on(file.path());
        Err(if slots.is_over_limit { error.with_remedy(Remedy::AllowHeaderCosts) } else { error })
    }

    /// Whether a passphrase opens any slot.
    pub(crate) async fn opens(
        &self,
        worker: &Worker,
        file: &File,
        start: u64,
        passphrase: &Passphrase,
        limits: &Limits,
    ) -> Result<bool> {
        let slots = self.slots_to_try(limits);
        Ok(self.first_opened(worker, file, start, passphrase, &slots).await?.is_some())
    }

    /// The first slot that a passphrase opens, and the master key.
    async fn first_opened(
        &self,
        worker: &Worker,
        file: &File,
        start: u64,
        passphrase: &Passphrase,
        slots: &SlotsToTry,
    ) -> Result<Option<(u32, MasterKey)>> {
        for slot in &slots.tried {
            if let Some(key) = self.unlock_slot(worker, file, start, *slot, passphrase).await? {
                return Ok(Some((*slot, key)));
            }
        }
        Ok(None)
    }

    /// Tries a passphrase on one slot.
    pub(crate) async fn unlock_slot(
        &self,
        worker: &Worker,
        file: &File,
        start: u64,
        slot: u32,
        passphrase: &Passphrase,
    ) -> Result<Option<MasterKey>> {
        let refuse = |error: LuksError| luks_error(file.path(), &error);
        let range = self.material(slot).map_err(refuse)?;
        let len = (range.end - range.start) as usize;
        let material = read_bytes(worker, file, start + range.start, len).await?;
        let (header, passphrase) = (self.clone(), passphrase.clone());
        // Seconds of computation, as the header asks for.
        worker
            .run_blocking(move || match &header {
                Self::V1(header) => header.unlock(slot, passphrase.as_bytes(), &material),
                Self::V2(header) => header.metadata().unlock(slot, passphrase.as_bytes(), &material),
            })
            .await
            .map_err(refuse)
    }

    /// The slots that a passphrase is tried on, in this order, as long as all of them together cost no more than [`TOGETHER`].
    pub(crate) fn slots_to_try(&self, limits: &Limits) -> SlotsToTry {
        let mut slots = SlotsToTry::default();
        let mut together = 0.0;
        let share = |value: u64, limit: u64| value as f64 / limit.max(1) as f64;
        let by_iterations = |value: u32| share(value.into(), limits.pbkdf2_iterations);
        let mut offer = |number: u32, own: f64, digest: u32, cost: String| {
            let sum = together + own + by_iterations(digest);
            if own > 1.0 || sum > TOGETHER {
                slots.left_out.push(format!("key slot {number} costs {cost}, more than is allowed"));
                slots.is_over_limit = true;
            } else {
                together = sum;
                slots.tried.push(number);
            }
        };
        match self {
            Self::V1(header) => {
                for number in header.active_slots() {
                    let iterations = header.slots()[number as usize].iterations;
                    let cost = format!("{iterations} iterations of PBKDF2");
                    offer(number, by_iterations(iterations), header.digest_iterations(), cost);
                }
            }
            Self::V2(header) => {
                let metadata = header.metadata();
                let is_ignored = |slot: &Luks2Slot| slot.priority() == Priority::Ignore;
                for slot in metadata.slots().filter(|slot| !is_ignored(slot)) {
                    let (own, cost) = match slot.kdf() {
                        Kdf::Pbkdf2 { iterations, .. } => {
                            (by_iterations(*iterations), format!("{iterations} iterations of PBKDF2"))
                        }
                        Kdf::Argon2 { cost, .. } => {
                            let work = u64::from(cost.passes) * u64::from(cost.memory);
                            let words = format!("{} passes of Argon2 over {} KiB", cost.passes, cost.memory);
                            (share(work, limits.argon2_work), words)
                        }
                        _ => continue,
                    };
                    offer(slot.number(), own, metadata.digest_iterations(slot), cost);
                }
                for slot in metadata.slots().filter(|slot| is_ignored(slot)) {
                    let ignored = "of the priority \"ignore\", which `cryptsetup config` changes";
                    slots.left_out.push(format!("key slot {} is {ignored}", slot.number()));
                }
                for slot in metadata.unusable_slots() {
                    slots.left_out.push(format!("key slot {}: {}", slot.number, slot.reason));
                    slots.is_over_limit |= slot.is_over_limit;
                }
            }
        }
        slots
    }

    fn material(&self, slot: u32) -> Result<Range<u64>, LuksError> {
        match self {
            Self::V1(header) => header.material(slot),
            Self::V2(header) => header
                .metadata()
                .slots()
                .find(|found| found.number() == slot)
                .map(|found| found.material())
                .ok_or(LuksError::NoSuchSlot { slot }),
        }
    }

    /// The cipher of the data.
    pub(crate) fn sector_cipher(&self, key: &MasterKey) -> Result<SectorCipher, LuksError> {
        match self {
            Self::V1(header) => key.sector_cipher(header.cipher()),
            Self::V2(header) => header.metadata().sector_cipher(key),
        }
    }

    /// The place of the data of a file by itself.
    pub(crate) fn payload(&self) -> Payload {
        match self {
            Self::V1(header) => Payload { offset: header.payload_offset(), len: None, first_sector: 0 },
            Self::V2(header) => {
                let segment = header.metadata().segment();
                Payload { offset: segment.offset, len: segment.len, first_sector: segment.first_sector }
            }
        }
    }
}

/// The passphrase of the image at `depth`, which is encrypted by `method`; asked for if need be. `parameter` is the option
/// that names it.
///
/// # Errors
/// [`ErrorKind::KeyMissing`].
pub(crate) async fn passphrase(
    worker: &Worker,
    keys: &Keys,
    depth: u32,
    path: &Path,
    method: &str,
    parameter: &str,
) -> Result<Passphrase> {
    keys.check_method(depth, method, path)?;
    let asked = match (keys.known(depth), keys.ask()) {
        (Some(known), _) => return Ok(known),
        (None, Some(ask)) => {
            let path = path.to_owned();
            worker.run_blocking(move || ask(&path)).await?
        }
        (None, None) => None,
    };
    asked.ok_or_else(|| {
        let message = format!("Parameter '{parameter}' is required for cipher");
        Error::new(ErrorKind::KeyMissing, message).on(path)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use zebu_luks::{CipherSpec, HashName, Luks1Options, SystemRandom};

    /// A header whose slots ask for these iterations.
    fn asking_for(iterations: [u32; 8]) -> LuksHeader {
        let options = Luks1Options::new(CipherSpec::AES_256_XTS, HashName::Sha256, 1000);
        let (header, ..) = Luks1Header::create(&options, b"pass", &mut SystemRandom).unwrap();
        let mut bytes = header.encode();
        for (slot, iterations) in iterations.into_iter().enumerate() {
            let at = 208 + 48 * slot;
            bytes[at..at + 4].copy_from_slice(&0x00ac_71f3u32.to_be_bytes());
            bytes[at + 4..at + 8].copy_from_slice(&iterations.to_be_bytes());
        }
        LuksHeader::V1(Box::new(Luks1Header::parse(&bytes, &Limits::NONE).unwrap()))
    }

    #[test]
    fn slots_are_tried_as_long_as_they_cost_little_together() {
        let tried = |iterations, limits| asking_for(iterations).slots_to_try(&limits).tried;
        let bounded = Limits::default();
        assert_eq!(tried([10_000_000; 8], bounded), [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(tried([20_000_000; 8], bounded), [0, 1, 2, 3]);
        // One that costs too much alone takes nothing from the others.
        let one = [1000, 60_000_000, 1000, 1000, 1000, 1000, 1000, 1000];
        assert_eq!(tried(one, bounded), [0, 2, 3, 4, 5, 6, 7]);
        assert_eq!(tried([u32::MAX; 8], Limits::NONE), [0, 1, 2, 3, 4, 5, 6, 7]);
        let slots = asking_for(one).slots_to_try(&bounded);
        assert!(slots.is_over_limit && slots.left_out[0].contains("key slot 1 costs 60000000"));
    }
}
