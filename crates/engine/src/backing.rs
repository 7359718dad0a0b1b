//! The backing file that an image names, as the public handle changes it.

use crate::image::SECTOR;
use crate::qcow2::map::active_map::L1;
use crate::qcow2::state::Qcow2;
use crate::{Error, ErrorKind, Image, Result};
use std::sync::Arc;
use zebu_qcow2::{Autoclear, Header};
use zebu_storage::Worker;

/// A backing file as an image names it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct BackingReference {
    /// The name, at most 1023 bytes: relative to the directory of the image that holds it.
    pub name: String,
    /// The name of its format, at most 15 bytes. Without one it would have to be guessed.
    pub format: String,
}

impl BackingReference {
    /// A backing file by its name and that of its format.
    pub fn new(name: impl Into<String>, format: impl Into<String>) -> Self {
        Self { name: name.into(), format: format.into() }
    }
}

impl Image {
    /// Makes the image name another backing file, or none. What was written before is durable before the name changes,
    /// and the change is durable when this returns; a crash leaves the old name or the new one. Nothing is copied, and
    /// this handle goes on to read through the chain that it was opened with: close it and open the image again.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`]: a raw image; [`ErrorKind::InvalidArgument`]: a name that is too long, or a raw
    /// external data file, which excludes a backing file; [`ErrorKind::NoSpace`]: the header has no room for the name.
    pub async fn set_backing(&self, worker: &Worker, backing: Option<BackingReference>) -> Result<()> {
        let qcow2 = self.qcow2("backing files")?.clone();
        self.alone(worker, async move |_, on| {
            // Another backing file may hold something else where nothing was written.
            qcow2.forget_bases();
            qcow2.renew_record(on).await?;
            let rewritten = qcow2.rewrite_header(on, |header| {
                header.forget_backup_mark();
                change(header, &qcow2, backing)
            });
            rewritten.await
        })
        .await
    }

    /// The mapping of the disk, which another one takes the place of when a snapshot is applied.
    ///
    /// # Errors
    /// The image has no mapping.
    pub(crate) fn mapping_in_use(&self) -> Result<Arc<L1>> {
        Ok(self.qcow2("backing files")?.active_map().l1())
    }

    /// Fails if snapshots show parts of the backing file.
    pub(crate) fn refuse_to_drop_backing(&self) -> Result<()> {
        let message = if !self.snapshots().is_empty() {
            "internal snapshots of the image show parts of the backing file: delete them first, or keep it"
        } else if self.backing().is_some_and(|backing| backing.is_sealed()) {
            "the backing file is sealed, and leads to the image as long as that stands on it: take the seal away first, or keep \
             the backing file"
        } else if self.logical_sector_size() > SECTOR {
            "its partition table counts in the sectors that the backing file tells of, and qcow2 has no place for their size: keep \
             the backing file, or convert the image to VHDX"
        } else {
            return Ok(());
        };
        Err(Error::new(ErrorKind::Unsupported, message).on(self.path()))
    }

    /// Makes the image name no backing file, if its disk still has the mapping that was found to hold all of it; whether it
    /// has.
    ///
    /// # Errors
    /// As [`Image::set_backing`]; snapshots show parts of the backing file.
    pub(crate) async fn drop_backing(&self, worker: &Worker, mapping: Arc<L1>) -> Result<bool> {
        let qcow2 = self.qcow2("backing files")?.clone();
        self.alone(worker, async move |me, on| {
            // Snapshots may have been made, and gone back to, since then.
            me.refuse_to_drop_backing()?;
            if !Arc::ptr_eq(&mapping, &qcow2.active_map().l1()) {
                return Ok(false);
            }
            qcow2.rewrite_header(on, |header| change(header, &qcow2, None)).await?;
            Ok(true)
        })
        .await
    }
}

fn change(header: &mut Header, qcow2: &Qcow2, backing: Option<BackingReference>) -> Result<()> {
    let invalid = |message: String| Error::new(ErrorKind::InvalidArgument, message).on(qcow2.path());
    if backing.is_some() && header.autoclear.contains(Autoclear::RAW_EXTERNAL_DATA) {
        let message = "an image whose external data file is raw can't have a backing file";
        return Err(invalid(message.to_owned()));
    }
    let (name, format) = match &backing {
        Some(BackingReference { name, format }) => (Some(name.as_bytes()), Some(format.as_bytes())),
        None => (None, None),
    };
    header.set_backing_file(name).map_err(|e| invalid(e.to_string()))?;
    header.set_backing_format(format).map_err(|e| invalid(e.to_string()))
}
