//! The backing file that an image names, as the public handle changes it.

use crate::qcow2::state::Qcow2;
use crate::{Error, ErrorKind, Image, Result};
use zebu_qcow2::{Autoclear, Header};
use zebu_storage::Worker;

/// A backing file as an image names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BackingReference {
    /// The name, at most 1023 bytes: relative to the directory of the image that holds it.
    pub name: String,
    /// The name of its format, at most 15 bytes. Without one it would have to be guessed.
    pub format: String,
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
            qcow2.rewrite_header(on, |header| change(header, &qcow2, backing)).await
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
