//! A disk behind a LUKS header in a file of its own.

use crate::crypt::header::{LuksHeader, luks_error, passphrase};
use crate::crypt::protection::Protection;
use crate::crypt::sectors::{EncryptedSectors, Numbering};
use crate::crypt::{EncryptionInfo, LuksInfo};
use crate::options::{OpenOptions, Purpose};
use crate::{Error, ErrorKind, Result};
use std::path::Path;
use zebu_storage::{File, Worker};

/// The data behind the header of an open file.
#[derive(Debug)]
pub(crate) struct LuksDisk {
    pub(crate) protection: Protection,
    pub(crate) info: EncryptionInfo,
    /// Byte of the file at which the data begins.
    pub(crate) offset: u64,
    /// Bytes of data, if the header says.
    len: Option<u64>,
}

impl LuksDisk {
    /// Reads the header and, unless the file is only looked at, finds its key.
    ///
    /// # Errors
    /// [`ErrorKind::KeyMissing`], [`ErrorKind::WrongKey`], a damaged header.
    pub(crate) async fn open(
        worker: &Worker,
        file: &File,
        options: &OpenOptions,
        depth: u32,
    ) -> Result<Self> {
        let limits = options.header_limits();
        let header = LuksHeader::read(worker, file, 0..u64::MAX, &limits).await?;
        let payload = header.payload();
        if payload.offset > file.len() {
            let message = format!(
                "the LUKS header says that the data begins at byte {}, but the file has {}; it was cut short",
                payload.offset,
                file.len()
            );
            return Err(Error::new(ErrorKind::Corrupt, message).on(file.path()));
        }
        let info = EncryptionInfo::Luks(LuksInfo::of(&header));
        let protection = if options.purpose == Purpose::Inspect {
            Protection::Locked
        } else {
            let passphrase =
                passphrase(worker, &options.keys, depth, file.path(), "luks", "key-secret").await?;
            let (_, key) = header.unlock(worker, file, 0, &passphrase, &limits).await?;
            let cipher = header.sector_cipher(&key).map_err(|error| luks_error(file.path(), &error))?;
            let numbering = Numbering::Guest { first: payload.first_sector };
            let pool = options.compress.pool.clone();
            Protection::Encrypted(Box::new(EncryptedSectors::new(cipher, numbering, pool)))
        };
        Ok(Self { protection, info, offset: payload.offset, len: payload.len })
    }

    /// Bytes of the disk, in a file of `file_len` bytes: whole sectors.
    pub(crate) fn size_in(&self, file_len: u64) -> u64 {
        let present = file_len.saturating_sub(self.offset);
        let len = self.len.map_or(present, |len| len.min(present));
        len - len % u64::from(self.sector_size())
    }

    /// Fails if the disk can't be `size` bytes long.
    pub(crate) fn check_size(&self, size: u64, path: &Path) -> Result<()> {
        if self.len.is_some() {
            let message = "the LUKS header sets the size of the disk, which is not changed";
            return Err(Error::new(ErrorKind::Unsupported, message).on(path));
        }
        let sector = u64::from(self.sector_size());
        if !size.is_multiple_of(sector) {
            let message = format!("the new size must be a multiple of the sector size, {sector} bytes");
            return Err(Error::new(ErrorKind::InvalidArgument, message).on(path));
        }
        Ok(())
    }

    /// Bytes of the cipher's sector.
    pub(crate) fn sector_size(&self) -> u32 {
        match &self.info {
            EncryptionInfo::Luks(luks) => luks.sector_size,
            EncryptionInfo::Aes => 512,
        }
    }
}
