//! Taking the seal of an image away, so that it may be written again.

use super::seals::{Overlay, find_overlay};
use crate::error::format_error;
use crate::open::flags;
use crate::qcow2::read_tables::read_bytes;
use crate::{Access, Error, ErrorKind, OpenOptions, Purpose, Remedy, Result};
use std::path::Path;
use zebu_qcow2::header_edit::{seal, set_seal};
use zebu_qcow2::{FormatError, Header};
use zebu_storage::{IoBuf, Worker};

/// Images whose seal is taken away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unsealing {
    /// An image whose overlay is gone, or stands on something else.
    Unused,
    /// Any image: an overlay that stands on the image is of no use once that is written.
    Force,
}

/// Takes the seal of the image at `path` away, durably. Nobody else may have it open.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`]: the image is not sealed, or not qcow2. [`ErrorKind::Exists`]: its overlay is there and stands on it,
/// without [`Unsealing::Force`]. [`ErrorKind::ReferenceRefused`]: the overlay may not be looked at, so nobody knows, without it. Failures of the file.
pub async fn unseal(worker: &Worker, path: &Path, open: &OpenOptions, how: Unsealing) -> Result<()> {
    let worker = &worker.uncounted();
    if how == Unsealing::Unused
        && let Some(Overlay::Found(overlay)) = find_overlay(worker, path, open).await?
    {
        let message = format!(
            "the overlay '{}' stands on it and would be of no use once it is written: use that one, or delete it first",
            overlay.display()
        );
        return Err(Error::new(ErrorKind::Exists, message).with_remedy(Remedy::Unseal).on(path));
    }
    let open = OpenOptions { access: Access::ReadWrite, purpose: Purpose::Io, ..open.clone() };
    let file = open.remote.open(path, &flags(&open)).map_err(|e| Error::from(e).on(path))?;
    let wrong = |error: FormatError| format_error(path, &error);
    let first = read_bytes(worker, &file, 0, 4096).await?;
    let cluster = Header::prefix(&first).map_err(wrong)?.cluster_size();
    let block = &first[..first.len().min(cluster as usize)];
    if !seal(block).is_sealed() {
        return Err(Error::new(ErrorKind::InvalidArgument, "the image is not sealed").on(path));
    }
    for step in set_seal(block, None).map_err(wrong)? {
        worker.write(&file, 0, IoBuf::copy_of(&step).into()).await.0.map_err(|e| Error::from(e).on(path))?;
        worker.flush(&file).await.map_err(|e| Error::from(e).on(path))?;
    }
    file.unlock().map_err(|e| Error::from(e).on(path))
}
