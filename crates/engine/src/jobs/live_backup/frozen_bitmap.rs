//! The persistent bitmap of a live backup: while the copy of the disk is made, the copy has its bits.

use crate::backups::{Belonging, Footing, check_base, new_backup_id};
use crate::qcow2::bitmaps::{BackupEnd, BitmapChange, Bits, FirstBits, Recording};
use crate::qcow2::state::Qcow2;
use crate::sync::Mutex;
use crate::{BitmapInfo, Error, ErrorKind, Image, Result};
use std::path::Path;
use std::sync::Arc;
use zebu_qcow2::BackupId;
use zebu_storage::Worker;

/// The persistent bitmap that the copy works with.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct LiveBitmap {
    /// Its name. It records writes.
    pub name: String,
    /// The part of the disk that is copied.
    pub copied: Copied,
    /// The backup that the target names as its backing file ([`Image::backup_id`]). An increment is refused if the bitmap does not go
    /// on from it. Default: `None`.
    pub previous: Option<BackupId>,
}

zebu_storage::option_setters!(LiveBitmap { previous: impl Into<Option<BackupId>> });

impl LiveBitmap {
    /// The bitmap of this name.
    pub fn new(name: impl Into<String>, copied: Copied) -> Self {
        Self { name: name.into(), copied, previous: None }
    }
}

/// The part of a disk that is copied, with respect to a bitmap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Copied {
    /// Everything. If there is no such bitmap, it is added.
    All,
    /// The clusters that the bitmap marks. The target names the image as its backing file that held the disk when the bitmap was last
    /// empty.
    Marked,
}

/// A bitmap whose bits a copy has.
pub(super) struct FrozenBitmap {
    qcow2: Arc<Qcow2>,
    name: String,
    bits: Arc<Bits>,
    /// The backup that the copy stands on.
    previous: Option<BackupId>,
    /// The mark of the copy, once it is complete.
    backup: Mutex<Option<BackupId>>,
}

impl FrozenBitmap {
    /// Takes the bits of a bitmap of `source` for a copy into `target`, adding a bitmap that is missing where that is allowed.
    /// Nobody changes the disk.
    pub(super) async fn take(
        worker: &Worker,
        source: &Image,
        target: &Image,
        bitmap: LiveBitmap,
    ) -> Result<Self> {
        let qcow2 = source.qcow2("bitmaps")?;
        let LiveBitmap { name, copied, previous } = bitmap;
        let found = source.bitmaps().into_iter().find(|found| found.name == name);
        let exists = found.is_some();
        if !exists && copied == Copied::Marked {
            let message = format!(
                "there is no bitmap '{name}', so what has changed since the previous backup is not known: make a full backup \
                 with this bitmap, which adds it"
            );
            return Err(Error::new(ErrorKind::NotFound, message).on(source.path()));
        }
        if !exists {
            // Nothing holds the disk as it was: if this copy fails, all of it has changed.
            let (recording, first) = (Recording::On, FirstBits::Set);
            let change = BitmapChange::Add { name: &name, granularity: None, recording, first };
            qcow2.change_bitmaps(worker, change).await?;
        }
        if let (Some(found), Copied::Marked) = (&found, copied) {
            check_previous(source, target, found, previous)?;
        }
        let bits = qcow2.lend_bits(worker, &name).await?;
        Ok(Self { qcow2: qcow2.clone(), name, bits, previous, backup: Mutex::new(None) })
    }

    pub(super) fn bits(&self) -> &Bits {
        &self.bits
    }

    /// Marks the copy, which is complete, as a backup that the bitmap goes on from.
    pub(super) async fn mark(&self, worker: &Worker, target: &Image) -> Result<()> {
        let beneath = match (target.unopened(), self.previous) {
            (Footing::Unknown, previous) => previous.into(),
            (known, _) => known,
        };
        let backup = target.mark_as_backup(worker, new_backup_id()?, beneath).await?;
        *self.backup.lock() = backup;
        Ok(())
    }

    /// Tells the bitmap what became of the copy, which has ended.
    pub(super) async fn give_back(&self, outcome: BackupEnd) {
        let backup = *self.backup.lock();
        self.qcow2.take_bits_back(&self.name, &self.bits, outcome, backup).await;
    }
}

/// Refuses an increment on what a bitmap can't be known to go on from. Nothing can be compared while guests write.
fn check_previous(
    source: &Image,
    target: &Image,
    bitmap: &BitmapInfo,
    previous: Option<BackupId>,
) -> Result<()> {
    if bitmap.in_use || !bitmap.auto {
        // That is refused in its own words.
        return Ok(());
    }
    let named = target.info()?.backing_file.unwrap_or_default();
    let (name, path) = (bitmap.name.as_str(), source.path());
    match check_base(path, (name, bitmap.base), (Path::new(&named), previous))? {
        Belonging::Known => Ok(()),
        Belonging::Unknown => {
            let message = format!(
                "bitmap '{name}' does not tell which backup it goes on from, so it may not be '{named}': it was cleared or \
                 disabled, the image has another backing file, or another program has written it. Make a full backup with this \
                 bitmap"
            );
            Err(Error::new(ErrorKind::InvalidArgument, message).on(path))
        }
    }
}
