//! LUKS headers in files: reading them, trying a passphrase.

use super::keys::{Keys, Passphrase};
use crate::file_bytes::read_bytes;
use crate::{Error, ErrorKind, Remedy, Result};
use std::ops::Range;
use std::path::Path;
use zebu_luks::{
    LUKS1_HEADER_LEN, LUKS2_HEADERS_MAX, Limits, Luks1Header, Luks2Header, LuksError, MasterKey, Priority,
    SectorCipher,
};
use zebu_storage::{File, Worker};

/// Bytes of a header that tell its version.
const VERSION_END: usize = 8;
const MAGIC: &[u8] = b"LUKS\xba\xbe";

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
        let is_first_version = first.starts_with(MAGIC) && first.get(6..VERSION_END) == Some(&[0, 1]);
        if is_first_version || !first.starts_with(MAGIC) {
            let header = Luks1Header::parse(&first, limits).map_err(refuse)?;
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
        let bytes = read_bytes(worker, file, area.start, present.min(LUKS2_HEADERS_MAX) as usize).await?;
        let header = Luks2Header::parse(&bytes, limits).map_err(refuse)?;
        Ok(Self::V2(Box::new(header)))
    }

    /// Tries a passphrase on every slot that holds a key. Returns the slot that it opens and the master key.
    ///
    /// # Errors
    /// [`ErrorKind::WrongKey`]: it opens none.
    pub(crate) async fn unlock(
        &self,
        worker: &Worker,
        file: &File,
        start: u64,
        passphrase: &Passphrase,
    ) -> Result<(u32, MasterKey)> {
        for slot in self.slots_to_try() {
            if let Some(key) = self.unlock_slot(worker, file, start, slot, passphrase).await? {
                return Ok((slot, key));
            }
        }
        let message = "Invalid password, cannot unlock any keyslot";
        Err(Error::new(ErrorKind::WrongKey, message).on(file.path()))
    }

    /// Whether a passphrase opens any slot.
    pub(crate) async fn opens(
        &self,
        worker: &Worker,
        file: &File,
        start: u64,
        passphrase: &Passphrase,
    ) -> Result<bool> {
        for slot in self.slots_to_try() {
            if self.unlock_slot(worker, file, start, slot, passphrase).await?.is_some() {
                return Ok(true);
            }
        }
        Ok(false)
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

    fn slots_to_try(&self) -> Vec<u32> {
        match self {
            Self::V1(header) => header.active_slots().collect(),
            Self::V2(header) => {
                let of = |priority: Priority| {
                    let slots = header.metadata().slots().filter(move |slot| slot.priority() == priority);
                    slots.map(|slot| slot.number())
                };
                of(Priority::Prefer).chain(of(Priority::Normal)).collect()
            }
        }
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
