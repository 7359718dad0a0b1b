//! The persistent bitmap of a live backup: while the copy of the disk is made, the copy has its bits.

use crate::qcow2::bitmaps::{BackupEnd, BitmapChange, Bits, FirstBits, Recording};
use crate::qcow2::state::Qcow2;
use crate::{Error, ErrorKind, Image, Result};
use std::sync::Arc;
use zebu_storage::Worker;

/// The persistent bitmap that the copy works with.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct LiveBitmap {
    /// Its name. It records writes.
    pub name: String,
    /// The part of the disk that is copied.
    pub copied: Copied,
}

impl LiveBitmap {
    /// The bitmap of this name.
    pub fn new(name: impl Into<String>, copied: Copied) -> Self {
        Self { name: name.into(), copied }
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
}

impl FrozenBitmap {
    /// Takes the bits of a bitmap of `source`, adding one that is missing where that is allowed. Nobody changes the disk.
    pub(super) async fn take(worker: &Worker, source: &Image, bitmap: LiveBitmap) -> Result<Self> {
        let qcow2 = source.qcow2("bitmaps")?;
        let LiveBitmap { name, copied } = bitmap;
        let exists = source.bitmaps().iter().any(|found| found.name == name);
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
        let bits = qcow2.lend_bits(worker, &name).await?;
        Ok(Self { qcow2: qcow2.clone(), name, bits })
    }

    pub(super) fn bits(&self) -> &Bits {
        &self.bits
    }

    /// Tells the bitmap what became of the copy, which has ended.
    pub(super) async fn give_back(&self, outcome: BackupEnd) {
        self.qcow2.take_bits_back(&self.name, &self.bits, outcome).await;
    }
}
