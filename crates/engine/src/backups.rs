//! Which backup an image is, and which one a bitmap goes on from.

use crate::node::Driver;
use crate::{Error, ErrorKind, Image, Result};
use std::path::Path;
use zebu_luks::{Random, SystemRandom};
use zebu_qcow2::{BackupId, BackupMark};
use zebu_storage::Worker;

/// An id for a backup that is being made.
pub(crate) fn new_backup_id() -> Result<BackupId> {
    let mut id = [0; BackupId::SIZE];
    SystemRandom.fill(&mut id).map_err(|error| Error::new(ErrorKind::Io, error.to_string()))?;
    Ok(BackupId(id))
}

/// The images below one, as far as a backup depends on them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Footing {
    /// Nothing: it names no backing file.
    Nothing,
    /// A backup that was not written since.
    Backup(BackupId),
    /// Nobody would notice if it changed.
    Unknown,
}

impl From<Option<BackupId>> for Footing {
    fn from(backup: Option<BackupId>) -> Self {
        backup.map_or(Self::Unknown, Self::Backup)
    }
}

impl Image {
    /// The backup that the image is, if it was made with a bitmap, and neither it nor what it stands on was written since. An image
    /// that was opened without its backing file is none.
    pub fn backup_id(&self) -> Option<BackupId> {
        let lowest = std::iter::successors(Some(self.clone()), Self::backing).last();
        self.backup_id_above(lowest.map_or(Footing::Unknown, |image| image.unopened()))
    }

    /// The same of an image whose chain was opened as far as there.
    pub(crate) fn backup_id_above(&self, beneath: Footing) -> Option<BackupId> {
        let chain: Vec<_> = std::iter::successors(Some(self.clone()), Self::backing).collect();
        match chain.iter().rev().fold(beneath, |beneath, image| image.footing_above(beneath)) {
            Footing::Backup(id) => Some(id),
            Footing::Nothing | Footing::Unknown => None,
        }
    }

    /// The images below this one.
    pub(crate) fn footing(&self) -> Footing {
        self.backing().map_or_else(|| self.unopened(), |backing| backing.backup_id().into())
    }

    /// The images below one that has no backing file open.
    pub(crate) fn unopened(&self) -> Footing {
        match &self.0.driver {
            Driver::Qcow2(qcow2) if qcow2.header().backing_file().is_none() => Footing::Nothing,
            _ => Footing::Unknown,
        }
    }

    /// The identity of the image for those that stand on it, if it stands on that itself.
    fn footing_above(&self, beneath: Footing) -> Footing {
        let Driver::Qcow2(qcow2) = &self.0.driver else { return Footing::Unknown };
        let Some(mark) = qcow2.backup_mark() else { return Footing::Unknown };
        let is_sound = match beneath {
            Footing::Nothing => mark.stands_on.is_none(),
            // What was committed is in both of them.
            Footing::Backup(id) => id == mark.id || Some(id) == mark.stands_on,
            Footing::Unknown => false,
        };
        if is_sound { Footing::Backup(mark.id) } else { Footing::Unknown }
    }

    /// Marks the image as a backup that stands on that, durably. `None`: it can't be marked.
    pub(crate) async fn mark_as_backup(
        &self,
        worker: &Worker,
        id: BackupId,
        beneath: Footing,
    ) -> Result<Option<BackupId>> {
        let Driver::Qcow2(qcow2) = &self.0.driver else { return Ok(None) };
        let stands_on = match beneath {
            Footing::Nothing => None,
            Footing::Backup(backup) => Some(backup),
            Footing::Unknown => return Ok(None),
        };
        let mark = BackupMark { id, stands_on };
        Ok(qcow2.mark_as_backup(worker, Some(mark)).await?.then_some(id))
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
        None => "is not marked as a backup that was made with a bitmap, or it was written since, or an image that it stands on was"
            .to_owned(),
    };
    let message = format!(
        "bitmap '{bitmap}' goes on from backup {base}, but '{previous}' {what}: name the backup that was made last with \
         this bitmap ('zebu info' tells its id), or make a full one"
    );
    Err(Error::new(ErrorKind::InvalidArgument, message).on(source))
}
