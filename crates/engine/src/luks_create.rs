//! Making a disk behind a LUKS header in a file of its own.

use crate::crypt::new_header::{NewEncryption, NewMethod};
use crate::options::Preallocation;
use crate::progress::JobControl;
use crate::{Error, ErrorKind, Result, raw};
use zebu_storage::{File, FileKind, IoBuf, Worker};

/// Sets an empty file up as an encrypted disk of `size` bytes. What is not written of it reads as noise.
pub(crate) async fn create(
    worker: &Worker,
    file: &File,
    size: u64,
    encryption: &NewEncryption,
    preallocation: Preallocation,
    control: &JobControl,
) -> Result<()> {
    let on = |e: zebu_storage::IoError| Error::from(e).on(file.path());
    if preallocation == Preallocation::Metadata {
        let message = "LUKS disks have no metadata to preallocate; use preallocation=falloc or full";
        return Err(Error::new(ErrorKind::InvalidArgument, message).on(file.path()));
    }
    if encryption.method != NewMethod::Luks1 {
        let message = "a file by itself is encrypted with LUKS alone";
        return Err(Error::new(ErrorKind::InvalidArgument, message).on(file.path()));
    }
    let len = encryption.header_len().checked_add(size).ok_or_else(|| {
        Error::new(ErrorKind::InvalidArgument, "the image size is too large").on(file.path())
    })?;
    let made = encryption.make(worker, file.path()).await?;
    raw::create(worker, file, len, preallocation, control).await?;
    if file.kind() == FileKind::BlockDevice {
        // A header that was there before must not outlive its keys.
        worker.write_zero_bytes(file, 0, encryption.header_len()).await.map_err(on)?;
        worker.flush(file).await.map_err(on)?;
    }
    // The key material first: without the header, nobody takes it for anything.
    let (header, material) = made.bytes.split_at(4096.min(made.bytes.len()));
    let at = header.len() as u64;
    worker.write(file, at, IoBuf::copy_of(material).into()).await.0.map_err(on)?;
    worker.flush(file).await.map_err(on)?;
    worker.write(file, 0, IoBuf::copy_of(header).into()).await.0.map_err(on)?;
    worker.flush(file).await.map_err(on)
}
