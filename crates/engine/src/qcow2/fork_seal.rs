//! The seal of an image whose disk goes on in an overlay.

use crate::error::format_error;
use crate::qcow2::header::block::OnFailure;
use crate::qcow2::state::Qcow2;
use crate::{Error, ErrorKind, Remedy, Result};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use zebu_qcow2::header_edit::set_seal;
use zebu_qcow2::{ForkSeal, FormatError, SealState};
use zebu_storage::Worker;
use zebu_storage::sabotage::{self, Fault};

/// The path of the overlay that a seal names.
pub(crate) fn overlay_path(seal: &ForkSeal) -> PathBuf {
    PathBuf::from(OsStr::from_bytes(seal.overlay()))
}

/// The error of a change of a sealed image.
pub(crate) fn sealed_error(path: &Path, state: &SealState) -> Error {
    let named = match state {
        SealState::Sealed(seal) => {
            format!("its disk goes on in the overlay '{}'", String::from_utf8_lossy(seal.overlay()))
        }
        SealState::Open | SealState::Unreadable => {
            "its disk goes on in an overlay that can't be told, because the seal is of another version or damaged".to_owned()
        }
    };
    let message = format!(
        "the image is sealed and only read: {named}. Use that one; if it is given up, take the seal away"
    );
    Error::new(ErrorKind::ReadOnly, message).with_remedy(Remedy::Unseal).on(path)
}

impl Qcow2 {
    /// The seal, as the header says now.
    pub(crate) fn seal(&self) -> SealState {
        self.header.seal()
    }

    /// Fails if the header has no room for a seal.
    pub(crate) fn check_room_for(&self, seal: &ForkSeal) -> Result<()> {
        self.header.try_steps(|block| set_seal(block, Some(seal))).map_err(|error| self.no_seal(&error))
    }

    /// Writes the seal, or takes it away, durably. The caller is alone, and the disk is durable.
    pub(crate) async fn write_seal(&self, worker: &Worker, seal: Option<&ForkSeal>) -> Result<()> {
        let steps = |block: &[u8]| set_seal(block, seal).map_err(|error| self.no_seal(&error));
        if sabotage::is(Fault::SkipBarrierOfSeal) {
            return self.header.change_in_one_write(worker, OnFailure::Restore, steps).await;
        }
        self.header.change_in_steps(worker, OnFailure::Restore, steps).await
    }

    /// Writes all of the seal but its last step, which is what makes it one: the rest is a single write.
    pub(crate) async fn write_seal_ahead(&self, worker: &Worker, seal: &ForkSeal) -> Result<()> {
        let steps = |block: &[u8]| {
            let mut steps = set_seal(block, Some(seal)).map_err(|error| self.no_seal(&error))?;
            steps.pop();
            Ok(steps)
        };
        self.header.change_in_steps(worker, OnFailure::Restore, steps).await
    }

    fn no_seal(&self, error: &FormatError) -> Error {
        if matches!(error, FormatError::HeaderDoesNotFit { .. }) {
            let message = format!(
                "its header has no room for the {} bytes of a seal: a fork needs clusters of 2 KiB and more, and a short name of \
                 the backing file",
                ForkSeal::SIZE
            );
            return Error::new(ErrorKind::Unsupported, message).on(self.path());
        }
        format_error(self.path(), error)
    }
}
