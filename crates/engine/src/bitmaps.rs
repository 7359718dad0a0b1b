//! Persistent dirty bitmaps, as the public handle offers them.

use crate::node::Driver;
use crate::qcow2::bitmaps::{BitmapChange, Bits, CopiedBitmap, FirstBits, Recording};
use crate::status::BitmapInfo;
use crate::{Image, Result};
use std::ops::Range;
use std::sync::Arc;
use zebu_qcow2::BackupId;
use zebu_storage::Worker;

/// A bitmap to be added.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct NewBitmap {
    /// Its name, 1 to 1023 bytes, none of them zero, unique in the image.
    pub name: String,
    /// Bytes that a bit stands for, a power of two from 512 to 2 GiB; `None`: the cluster size, but 4 KiB to 64 KiB.
    pub granularity: Option<u64>,
    /// Whether it records writes.
    pub recording: BitmapRecording,
}

zebu_storage::option_setters!(NewBitmap {
    name: impl Into<String>,
    granularity: impl Into<Option<u64>>,
    recording: BitmapRecording,
});

impl NewBitmap {
    /// A bitmap of this name that records writes, with the usual granularity.
    pub fn named(name: impl Into<String>) -> Self {
        Self { name: name.into(), granularity: None, recording: BitmapRecording::On }
    }
}

/// Whether a bitmap records writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum BitmapRecording {
    /// Every change of the disk sets bits.
    On,
    /// It stays as it is.
    Off,
}

impl From<BitmapRecording> for Recording {
    fn from(recording: BitmapRecording) -> Self {
        match recording {
            BitmapRecording::On => Self::On,
            BitmapRecording::Off => Self::Off,
        }
    }
}

/// The bits of a bitmap of an open image. For a bitmap that records writes they change with the disk, until it is
/// cleared or the disk gets another size; then they stay as they were.
#[derive(Debug, Clone)]
pub struct DirtyBits(pub(crate) Arc<Bits>);

impl DirtyBits {
    /// Bytes that a bit stands for.
    pub fn granularity(&self) -> u64 {
        1 << self.0.granularity_bits()
    }

    /// Bytes of the disk.
    pub fn disk_size(&self) -> u64 {
        self.0.size()
    }

    /// Bytes that are dirty.
    pub fn dirty_bytes(&self) -> u64 {
        self.0.dirty_bytes()
    }

    /// The first run of dirty bytes from `offset` on.
    pub fn next_dirty(&self, offset: u64) -> Option<Range<u64>> {
        self.0.next_dirty(offset)
    }

    /// Whether the byte at `offset` is dirty, and where the run of bytes like it ends.
    pub fn run_at(&self, offset: u64) -> (bool, u64) {
        self.0.run_at(offset)
    }
}

/// Persistent dirty bitmaps. They are changed while other requests of the image are under way: changes of the disk
/// wait until the operation is done, reads go on. Each operation is durable when it returns; what a bitmap records
/// meanwhile is stored by [`Image::close`]. After a crash a record that went before the changes tells of them, in larger granules
/// ([`BitmapInfo::recovered`]). Without one the bitmap is inconsistent: it can only be removed.
impl Image {
    /// The bitmaps of the image. None for raw.
    pub fn bitmaps(&self) -> Vec<BitmapInfo> {
        match &self.0.driver {
            Driver::Qcow2(qcow2) => qcow2.bitmaps().info(),
            Driver::Raw(_) | Driver::Foreign(_) => Vec::new(),
        }
    }

    /// The image of the chain, from this one down, that has a bitmap of this name. Images whose disk has another size don't count.
    pub fn with_bitmap(&self, name: &str) -> Option<Self> {
        let mut next = Some(self.clone());
        while let Some(image) = next {
            let is_as_long = image.virtual_size() == self.virtual_size();
            if is_as_long && image.bitmaps().iter().any(|bitmap| bitmap.name == name) {
                return Some(image);
            }
            next = image.backing();
        }
        None
    }

    /// The bits of a bitmap.
    ///
    /// # Errors
    /// [`crate::ErrorKind::NotFound`]; [`crate::ErrorKind::InvalidArgument`] if the bitmap is inconsistent;
    /// [`crate::ErrorKind::Exists`] while a backup of the disk in use works with it;
    /// [`crate::ErrorKind::Unsupported`] if it would take too much memory; failures of the file.
    pub async fn bitmap_bits(&self, worker: &Worker, name: &str) -> Result<DirtyBits> {
        let (qcow2, name) = (self.qcow2("bitmaps")?.clone(), name.to_owned());
        self.on_own_worker(worker, move |_, on| async move { qcow2.bitmap_bits(&on, &name).await })
            .await
            .map(DirtyBits)
    }

    /// Marks all bitmaps as in use, as the first change does with those that record. A program that ends without closing the image
    /// leaves all of them inconsistent then.
    ///
    /// # Errors
    /// As of a change.
    pub async fn take_bitmaps_into_use(&self, worker: &Worker) -> Result<()> {
        let qcow2 = self.qcow2("bitmaps")?.clone();
        self.alone(worker, async move |me: &Self, on: &Worker| {
            me.0.check_open()?;
            qcow2.prepare_write(on).await?;
            qcow2.take_bitmaps_into_use(on).await
        })
        .await
    }

    /// Adds an empty bitmap.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Exists`]; [`crate::ErrorKind::InvalidArgument`] for a name or granularity that the format does not
    /// allow, or one that is too fine for the disk; [`crate::ErrorKind::Unsupported`] for raw and version 2, or if it would
    /// take too much memory; no space, in the header too. The image is as before then.
    pub async fn add_bitmap(&self, worker: &Worker, new: &NewBitmap) -> Result<()> {
        let (qcow2, new) = (self.qcow2("bitmaps")?.clone(), new.clone());
        self.alone(worker, async move |_, on| {
            let (recording, first) = (new.recording.into(), FirstBits::Clear);
            let (name, granularity) = (new.name.as_str(), new.granularity);
            qcow2.change_bitmaps(on, BitmapChange::Add { name, granularity, recording, first }).await
        })
        .await
    }

    /// Adds bitmaps of another image with a disk of the same size, with what they say. One that recorded writes there
    /// does so here.
    pub(crate) async fn copy_bitmaps(
        &self,
        worker: &Worker,
        from: &Self,
        which: &[BitmapInfo],
    ) -> Result<()> {
        let (qcow2, theirs, which) =
            (self.qcow2("bitmaps")?.clone(), from.qcow2("bitmaps")?.clone(), which.to_vec());
        self.on_own_worker(worker, move |me, on| async move {
            let names = which.iter().map(|bitmap| bitmap.name.as_str()).collect();
            let bits = theirs.bits_of_bitmaps(&on, &names).await?;
            let copies = which.iter().map(|BitmapInfo { name, auto, .. }| {
                let bits = bits.get(name).cloned().ok_or_else(|| theirs.no_bitmap(name))?;
                let recording = if *auto { Recording::On } else { Recording::Off };
                Ok(CopiedBitmap::new(name.clone(), recording, bits))
            });
            let copies = copies.collect::<Result<Vec<_>>>()?;
            let add = async || qcow2.change_bitmaps(&on, BitmapChange::AddCopies(&copies)).await;
            me.0.while_alone(&on, add).await
        })
        .await
    }

    /// Removes a bitmap, whatever its state.
    ///
    /// # Errors
    /// [`crate::ErrorKind::NotFound`]; failures of the file.
    pub async fn remove_bitmap(&self, worker: &Worker, name: &str) -> Result<()> {
        let (qcow2, name) = (self.qcow2("bitmaps")?.clone(), name.to_owned());
        self.alone(worker, async move |_, on| qcow2.change_bitmaps(on, BitmapChange::Remove(&name)).await)
            .await
    }

    /// Clears all bits of a bitmap.
    ///
    /// # Errors
    /// As [`Image::bitmap_bits`].
    pub async fn clear_bitmap(&self, worker: &Worker, name: &str) -> Result<()> {
        let (qcow2, name) = (self.qcow2("bitmaps")?.clone(), name.to_owned());
        self.alone(worker, async move |_, on| qcow2.change_bitmaps(on, BitmapChange::Clear(&name)).await)
            .await
    }

    /// Has a bitmap record writes from now on, or no longer.
    ///
    /// # Errors
    /// As [`Image::bitmap_bits`].
    pub async fn set_bitmap_recording(
        &self,
        worker: &Worker,
        name: &str,
        recording: BitmapRecording,
    ) -> Result<()> {
        let (qcow2, name) = (self.qcow2("bitmaps")?.clone(), name.to_owned());
        self.alone(worker, async move |_, on| {
            qcow2.change_bitmaps(on, BitmapChange::Record(&name, recording.into())).await
        })
        .await
    }

    /// Stores what the bitmaps that record writes know, durably, so that a crash finds no more than that and what was written since.
    /// Worth while when one of them has become emptier, as at the end of a backup. Does nothing before the first write.
    ///
    /// # Errors
    /// Failures of the file. A crash finds what it would have found before, then.
    pub async fn renew_bitmap_record(&self, worker: &Worker) -> Result<()> {
        let qcow2 = self.qcow2("bitmaps")?.clone();
        self.alone(worker, async move |me: &Self, on: &Worker| {
            me.0.check_open()?;
            qcow2.renew_record(on).await
        })
        .await
    }

    /// Notes that a bitmap knows of everything that was written since a backup.
    ///
    /// # Errors
    /// As [`Image::bitmap_bits`].
    pub(crate) async fn tie_bitmap(&self, worker: &Worker, name: &str, backup: BackupId) -> Result<()> {
        let (qcow2, name) = (self.qcow2("bitmaps")?.clone(), name.to_owned());
        self.alone(worker, async move |_, on| {
            qcow2.change_bitmaps(on, BitmapChange::Tie(&name, backup)).await
        })
        .await
    }

    /// Marks in a bitmap all that is dirty in `bits`, of this image or another with a disk of the same size.
    ///
    /// # Errors
    /// As [`Image::bitmap_bits`]; [`crate::ErrorKind::InvalidArgument`] for a disk of another size.
    pub async fn merge_bitmap(&self, worker: &Worker, name: &str, bits: &DirtyBits) -> Result<()> {
        let qcow2 = self.qcow2("bitmaps")?.clone();
        let (name, bits) = (name.to_owned(), bits.0.clone());
        self.alone(worker, async move |_, on| {
            qcow2.change_bitmaps(on, BitmapChange::Merge(&name, &bits)).await
        })
        .await
    }
}
