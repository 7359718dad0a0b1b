//! The encryption of a qcow2 image that is being opened.

use crate::crypt::header::{LuksHeader, luks_error, passphrase};
use crate::crypt::protection::Protection;
use crate::crypt::sectors::{EncryptedSectors, Numbering};
use crate::crypt::{EncryptionInfo, LuksInfo};
use crate::error::format_error;
use crate::options::{Access, OpenOptions, Purpose};
use crate::qcow2::encryption::ImageEncryption;
use crate::{Error, ErrorKind, Result};
use std::ops::Range;
use zebu_luks::legacy_aes;
use zebu_qcow2::{Autoclear, Encryption, Header};
use zebu_storage::{File, Worker};

/// The option that names the key.
const KEY: &str = "encrypt.key-secret";

/// The bytes of an image file that belong to its LUKS header.
pub(crate) fn luks_area(header: &Header) -> Option<Range<u64>> {
    let pointer = header.luks()?;
    Some(pointer.offset.0..pointer.offset.0.saturating_add(pointer.len))
}

/// Reads the LUKS header of an image.
///
/// # Errors
/// It is damaged, asks for too much, or is of another version than the format has.
pub(crate) async fn read_luks(
    worker: &Worker,
    file: &File,
    header: &Header,
    options: &OpenOptions,
) -> Result<LuksHeader> {
    let Some(area) = luks_area(header) else {
        let message = "the image is encrypted with LUKS and names no LUKS header";
        return Err(Error::new(ErrorKind::Corrupt, message).on(file.path()));
    };
    match LuksHeader::read(worker, file, area, &options.header_limits()).await? {
        LuksHeader::V2(_) => {
            let message = "the image has a LUKS header of version 2; the format has version 1 alone";
            Err(Error::new(ErrorKind::Unsupported, message).on(file.path()))
        }
        first @ LuksHeader::V1(_) => Ok(first),
    }
}

/// Finds the key of an image at `depth` of its chain.
///
/// # Errors
/// [`ErrorKind::KeyMissing`], [`ErrorKind::WrongKey`], a damaged header. An image that is only looked at needs no key.
pub(crate) async fn unlock(
    worker: &Worker,
    file: &File,
    header: &Header,
    options: &OpenOptions,
    depth: u32,
) -> Result<ImageEncryption> {
    let path = file.path();
    let looks_only = options.purpose == Purpose::Inspect;
    let is_raw_external = header.autoclear.contains(Autoclear::RAW_EXTERNAL_DATA);
    if header.encryption != Encryption::None && is_raw_external && options.access == Access::ReadWrite {
        let message = "the data file is encrypted and said to be raw, which contradict each other: the image is \
                       opened for reading only";
        return Err(Error::new(ErrorKind::Unsupported, message).on(file.path()));
    }
    let (cipher, numbering, info) = match header.encryption {
        Encryption::None => return Ok(ImageEncryption::NONE),
        Encryption::Unknown(_) => {
            return Err(header
                .check_not_encrypted()
                .map_err(|e| format_error(file.path(), &e))
                .err()
                .unwrap_or_else(|| {
                    Error::new(ErrorKind::Unsupported, "an unknown encryption").on(file.path())
                }));
        }
        Encryption::Aes if looks_only => {
            return Ok(ImageEncryption::new(Protection::Locked, Some(EncryptionInfo::Aes)));
        }
        Encryption::Luks if looks_only => {
            let luks = read_luks(worker, file, header, options).await.ok();
            let info = luks.map(|luks| EncryptionInfo::Luks(LuksInfo::of(&luks)));
            return Ok(ImageEncryption::new(Protection::Locked, info));
        }
        Encryption::Aes => {
            let passphrase = passphrase(worker, &options.keys, depth, path, "aes", KEY).await?;
            let cipher =
                legacy_aes(passphrase.as_bytes()).map_err(|error| luks_error(file.path(), &error))?;
            (cipher, Numbering::Guest { first: 0 }, EncryptionInfo::Aes)
        }
        Encryption::Luks => {
            let luks = read_luks(worker, file, header, options).await?;
            let passphrase = passphrase(worker, &options.keys, depth, path, "luks", KEY).await?;
            let start = luks_area(header).map_or(0, |area| area.start);
            let (_, key) = luks.unlock(worker, file, start, &passphrase, &options.header_limits()).await?;
            let cipher = luks.sector_cipher(&key).map_err(|error| luks_error(file.path(), &error))?;
            (cipher, Numbering::Host, EncryptionInfo::Luks(LuksInfo::of(&luks)))
        }
    };
    let sectors = EncryptedSectors::new(cipher, numbering, options.compress.pool.clone());
    Ok(ImageEncryption::new(Protection::Encrypted(Box::new(sectors)), Some(info)))
}
