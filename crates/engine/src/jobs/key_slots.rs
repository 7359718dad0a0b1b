//! Adding and removing keys of an encrypted image.

use crate::crypt::header::{LuksHeader, passphrase};
use crate::crypt::slots::{self, SlotRights};
use crate::open::flags;
use crate::qcow2::life::open::parse;
use crate::qcow2::life::unlock::luks_area;
use crate::{
    Access, Error, ErrorKind, Format, KeySlotChange, KeySlotGuard, OpenOptions, OpenedFile, Purpose, Result,
    probe_by,
};
use std::path::Path;
use zebu_qcow2::Encryption;
use zebu_storage::Worker;

/// Changes the key slots of the LUKS1 header of an image, which nobody else has open. The data is not touched, and no image that
/// it stands on is opened. `open` has a key of the image ([`OpenOptions::keys`]), whatever the change.
///
/// Each step is durable before the next. Whatever a crash leaves, every slot that was not changed opens as before.
///
/// # Errors
/// [`ErrorKind::KeyMissing`], [`ErrorKind::WrongKey`]. [`ErrorKind::InvalidArgument`]: the last key would go, or every slot that the
/// given key opens, or a key in use be overwritten, or there is no such slot, or no free one. [`ErrorKind::Unsupported`]: the image is not encrypted with LUKS1.
pub async fn change_key_slots(
    worker: &Worker,
    path: &Path,
    open: &OpenOptions,
    change: &KeySlotChange,
    guard: KeySlotGuard,
) -> Result<()> {
    let open = OpenOptions { access: Access::ReadWrite, purpose: Purpose::Io, ..open.clone() };
    let file = open.remote.open(path, &flags(&open)).map_err(|e| Error::from(e).on(path))?;
    let format = match open.format {
        Some(format) => format,
        None => probe_by(&worker.uncounted(), &file, open.probe).await?,
    };
    change_key_slots_in(worker, &OpenedFile { file, data_file: None, format }, &open, change, guard).await
}

/// The same in a file that the caller has opened, and locked.
///
/// # Errors
/// As [`change_key_slots`].
pub async fn change_key_slots_in(
    worker: &Worker,
    image: &OpenedFile,
    open: &OpenOptions,
    change: &KeySlotChange,
    guard: KeySlotGuard,
) -> Result<()> {
    let worker = &worker.uncounted();
    let (file, format) = (&image.file, image.format);
    let path = file.path();
    let area = match format {
        Format::Luks => 0..u64::MAX,
        Format::Qcow2 => {
            let parsed = parse(worker, file, zebu_qcow2::Purpose::ReadWrite).await?;
            let area = luks_area(parsed.header()).filter(|_| parsed.header().encryption == Encryption::Luks);
            area.ok_or_else(|| not_luks(path))?
        }
        Format::Raw | Format::Foreign(_) => return Err(not_luks(path)),
    };
    let start = area.start;
    let limits = open.keys.limits();
    let header = LuksHeader::read(worker, file, area, &limits).await?;
    let parameter = if format == Format::Luks { "key-secret" } else { "encrypt.key-secret" };
    let opened_by = passphrase(worker, &open.keys, 0, path, "luks", parameter).await?;
    let rights = SlotRights { passphrase: &opened_by, guard, limits: &limits };
    slots::change(worker, file, start, header, change, rights).await
}

fn not_luks(path: &Path) -> Error {
    let message = "the image is not encrypted with LUKS: it has no key slots";
    Error::new(ErrorKind::Unsupported, message).on(path)
}
