//! Which backup an image is, and which one a bitmap goes on from.

use crate::node::Driver;
use crate::{Error, ErrorKind, Image, Result};
use std::path::Path;
use zebu_luks::{Random, SystemRandom};
use zebu_qcow2::BackupId;
use zebu_storage::Worker;

/// An id for a backup that is being made.
pub(crate) fn new_backup_id() -> Result<BackupId> {
    let mut id = [0; BackupId::SIZE];
    SystemRandom.fill(&mut id).map_err(|error| Error::new(ErrorKind::Io, error.to_string()))?;
    Ok(BackupId(id))
}

impl Image {
    /// The backup that the image is, if it was made with a bitmap and was not written since.
    pub fn backup_id(&self) -> Option<BackupId> {
        match &self.0.driver {
            Driver::Qcow2(qcow2) => qcow2.backup_id(),
            Driver::Raw(_) | Driver::Foreign(_) => None,
        }
    }

    /// Marks the image as a backup, durably. `None`: it can't be marked.
    pub(crate) async fn mark_as_backup(&self, worker: &Worker, id: BackupId) -> Result<Option<BackupId>> {
        let Driver::Qcow2(qcow2) = &self.0.driver else { return Ok(None) };
        Ok(qcow2.mark_as_backup(worker, Some(id)).await?.then_some(id))
    }
}

/// Facts known of a bitmap and the backup that an increment is to stand on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Belonging {
    /// The bitmap goes on from that backup.
    Known,
    /// The bitmap does not tell what it goes on from.
    Unknown,
}

/// Refuses a previous backup, the image at `previous`, that `bitmap` of `source` does not go on from.
pub(crate) fn check_base(
    source: &Path,
    (bitmap, base): (&str, Option<BackupId>),
    (previous, found): (&Path, Option<BackupId>),
) -> Result<Belonging> {
    let Some(base) = base else { return Ok(Belonging::Unknown) };
    let previous = previous.display();
    let what = match found {
        Some(found) if found == base => return Ok(Belonging::Known),
        Some(found) => format!("is backup {found}"),
        None => "is not marked as a backup that was made with a bitmap, or was written since".to_owned(),
    };
    let message = format!(
        "bitmap '{bitmap}' goes on from backup {base}, but '{previous}' {what}: name the backup that was made last with \
         this bitmap ('zebu info' tells its id), or make a full one"
    );
    Err(Error::new(ErrorKind::InvalidArgument, message).on(source))
}
