//! Bitmaps at the moment of a checkpoint: one that ends there, one that begins there.
//!
//! All that needs the disk is done before: at the moment, bits change hands in memory.

use super::source::CheckpointSource;
use crate::bitmaps::{DirtyBits, NewBitmap};
use crate::qcow2::bitmaps::{BackupEnd, Bits};
use crate::qcow2::state::Qcow2;
use crate::{Error, ErrorKind, Image, Remedy, Result};
use std::sync::Arc;
use zebu_storage::Worker;

/// The bitmaps of one disk.
#[derive(Debug)]
pub(super) struct MomentBitmaps {
    image: Image,
    from: Option<String>,
    begun: Option<String>,
    /// Whether the one that begins was added for it.
    is_added: bool,
    lent: Option<Lent>,
    /// The bits of the one that ends at the moment.
    ended: Option<Arc<Bits>>,
}

/// The bits that a bitmap had until the moment.
#[derive(Debug)]
struct Lent {
    qcow2: Arc<Qcow2>,
    name: String,
    bits: Arc<Bits>,
}

impl MomentBitmaps {
    /// Adds what is missing, and reads what is needed at the moment.
    pub(super) async fn prepare(worker: &Worker, source: &CheckpointSource) -> Result<Self> {
        let image = source.image.clone();
        let (from, begun) = (source.from.clone(), source.bitmap.clone());
        let mut bitmaps = Self { image, from, begun, is_added: false, lent: None, ended: None };
        let image = &bitmaps.image;
        if let Some(name) = &bitmaps.from {
            check_from(image, name)?;
            image.bitmap_bits(worker, name).await?;
        }
        if let Some(name) = &bitmaps.begun {
            if !has(image, name) {
                image.add_bitmap(worker, &NewBitmap::named(name)).await?;
                bitmaps.is_added = true;
            } else if bitmaps.from.as_ref() != Some(name) {
                image.bitmap_bits(worker, name).await?;
            }
            let qcow2 = image.qcow2("bitmaps")?.clone();
            let prepare = async move |_: &Image, on: &Worker| {
                qcow2.prepare_write(on).await?;
                // A crash finds what was written since now, and what is not known to be in a backup.
                qcow2.renew_record(on).await
            };
            let prepared = image.alone(worker, prepare).await;
            if let Err(error) = prepared {
                bitmaps.undo(worker).await;
                return Err(error);
            }
        }
        Ok(bitmaps)
    }

    /// Ends the one and begins the other. Nobody changes the disk.
    pub(super) async fn take(&mut self, worker: &Worker) -> Result<()> {
        if let Some(name) = &self.begun {
            let qcow2 = self.image.qcow2("bitmaps")?;
            let bits = qcow2.lend_bits(worker, name).await?;
            self.lent = Some(Lent { qcow2: qcow2.clone(), name: name.clone(), bits });
        }
        let Some(from) = &self.from else { return Ok(()) };
        self.ended = Some(match &self.lent {
            Some(lent) if lent.name == *from => lent.bits.clone(),
            _ => {
                let bits = self.image.qcow2("bitmaps")?.bitmap_bits(worker, from).await?;
                let copy = Bits::new(bits.size(), bits.granularity_bits());
                copy.merge(&bits);
                Arc::new(copy)
            }
        });
        Ok(())
    }

    /// The checkpoint is there: bits that it does not show are of no use any more.
    pub(super) async fn keep(&mut self) {
        if self.begun != self.from {
            self.give_back(BackupEnd::Complete).await;
        }
    }

    /// Tells the bitmap that goes on what became of the bits that the checkpoint shows.
    pub(super) async fn give_back(&mut self, outcome: BackupEnd) {
        if let Some(Lent { qcow2, name, bits }) = self.lent.take() {
            qcow2.take_bits_back(&name, &bits, outcome, None).await;
        }
    }

    /// There is no checkpoint: all is as before.
    pub(super) async fn undo(&mut self, worker: &Worker) {
        self.give_back(BackupEnd::GivenUp).await;
        if let (true, Some(name)) = (self.is_added, &self.begun) {
            // It is empty, and nothing goes on from it: that it stays does no harm.
            let _ = self.image.remove_bitmap(worker, name).await;
            self.is_added = false;
        }
    }

    /// The name and the bits of the bitmap that ended at the moment.
    pub(super) fn ended(&self) -> Option<(String, DirtyBits)> {
        Some((self.from.clone()?, DirtyBits(self.ended.clone()?)))
    }
}

fn has(image: &Image, name: &str) -> bool {
    image.bitmaps().iter().any(|bitmap| bitmap.name == name)
}

/// Refuses a bitmap that does not tell what has changed.
fn check_from(image: &Image, name: &str) -> Result<()> {
    let bitmaps = image.bitmaps();
    let Some(found) = bitmaps.iter().find(|bitmap| bitmap.name == name) else {
        let message = format!(
            "there is no bitmap '{name}', so what has changed is not known: make a full backup of a checkpoint that begins it"
        );
        return Err(Error::new(ErrorKind::NotFound, message).on(image.path()));
    };
    if !found.auto && !found.in_use {
        let message = format!(
            "bitmap '{name}' does not record writes (it is disabled), so it does not tell what has changed: enable it and make \
             a full backup"
        );
        let error = Error::new(ErrorKind::InvalidArgument, message).on(image.path());
        return Err(error.with_remedy(Remedy::EnableBitmap));
    }
    Ok(())
}
