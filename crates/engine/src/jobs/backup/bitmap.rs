//! Backups by a persistent dirty bitmap: which of the disk has changed since the previous one.

use super::options::{BackupOptions, BitmapUse, PreviousBackup, SourceErrors};
use super::unreadable::Unreadable;
use super::zero_run;
use crate::Remedy;
use crate::backups::{Belonging, check_base};
use crate::jobs::zeros::first_difference;
use crate::progress::{Phase, Tracker};
use crate::qcow2::bitmaps::Bits;
use crate::{BitmapRecording, DirtyBits, Error, ErrorKind, Image, NewBitmap, Result};
use std::ops::Range;
use std::sync::Arc;
use zebu_qcow2::BackupId;
use zebu_qcow2::limits::MAX_BITMAP_DATA_SIZE;
use zebu_storage::{IoBuf, IoBufs, Worker};

/// Places at which a bitmap is compared with the disks.
const SAMPLES: u64 = 64;
/// Bytes compared at a place.
const SAMPLE: u64 = 4096;
/// Bytes compared at once of what an interrupted backup holds.
const COMPARED: u64 = 1 << 20;
/// The same where some of it could not be read.
const COMPARED_BESIDE_HOLES: u64 = 4096;

/// The bitmap of a backup.
pub(super) struct Dirty {
    name: String,
    /// For an increment.
    bits: Option<DirtyBits>,
    /// Bytes of the previous backup's disk: what lies behind is not in it.
    previous_size: u64,
    /// The backup since which it knows of every write.
    base: Option<BackupId>,
}

impl Dirty {
    /// Looks at the bitmap that the options name, before anything is written.
    pub(super) async fn begin(
        worker: &Worker,
        source: &Image,
        options: &BackupOptions,
    ) -> Result<Option<Self>> {
        let Some(name) = &options.bitmap else { return Ok(None) };
        let refuse = |kind, message: String, remedy: Option<Remedy>| {
            let error = Error::new(kind, message).on(source.path());
            Err(remedy.into_iter().fold(error, Error::with_remedy))
        };
        match source.info()?.qcow2 {
            None => return refuse(ErrorKind::Unsupported, "the format raw has no bitmaps".to_owned(), None),
            Some(qcow2) if qcow2.version < 3 => {
                return refuse(ErrorKind::Unsupported, "version 2 of qcow2 has no bitmaps".to_owned(), None);
            }
            Some(_) => {}
        }
        let found = source.bitmaps().into_iter().find(|bitmap| bitmap.name == *name);
        let base = found.as_ref().and_then(|bitmap| bitmap.base);
        let dirty = |bits| Self { name: name.clone(), bits, previous_size: 0, base };
        if options.bitmap_use == BitmapUse::Restart
            && let Some(found) = &found
            && found.in_use
        {
            source.remove_bitmap(worker, name).await?;
            return Ok(Some(dirty(None)));
        }
        let Some(found) = found else {
            if options.previous.is_none() || options.bitmap_use == BitmapUse::Restart {
                return Ok(Some(dirty(None)));
            }
            let message = format!(
                "there is no bitmap '{name}', so what has changed since the previous backup is not known: make a full \
                 backup with this bitmap, which adds it"
            );
            return refuse(ErrorKind::NotFound, message, None);
        };
        if found.in_use {
            let message = format!(
                "bitmap '{name}' is inconsistent: it was not stored after the last writes. Remove it and \
                 make a full backup, or an increment by the manifest of the previous backup"
            );
            return refuse(ErrorKind::InvalidArgument, message, Some(Remedy::RemoveBitmap));
        }
        if !found.auto {
            let message = format!(
                "bitmap '{name}' does not record writes (it is disabled), so it does not tell what has changed: enable \
                 it and make a full backup"
            );
            return refuse(ErrorKind::InvalidArgument, message, Some(Remedy::EnableBitmap));
        }
        let bits = match (&options.previous, options.bitmap_use) {
            (Some(_), BitmapUse::Believe) => Some(source.bitmap_bits(worker, name).await?),
            _ => None,
        };
        Ok(Some(dirty(bits)))
    }

    /// Refuses a bitmap that is not of the time since the previous backup: the disk has become shorter, the bitmap goes on
    /// from another backup, or the disk differs where the bitmap says that nothing was written.
    ///
    /// The disks are compared in places. They are compared everywhere if the bitmap does not tell what it goes on from, or
    /// tells of a backup that the previous one stands on. Returns the bytes that were compared so.
    pub(super) async fn compare(
        &mut self,
        worker: &Worker,
        source: &Image,
        previous: &Image,
        names: &PreviousBackup,
        options: &BackupOptions,
    ) -> Result<u64> {
        let Some(bits) = &self.bits else { return Ok(0) };
        let size = source.virtual_size();
        self.previous_size = previous.virtual_size();
        if self.previous_size > size {
            let message = format!(
                "the disk has {size} bytes, that of the previous backup {}: make a full backup",
                self.previous_size
            );
            return Err(Error::new(ErrorKind::InvalidArgument, message).on(source.path()));
        }
        let belonging = match self.base {
            // A backup that was made without the bitmap, or whose bitmap a crash kept from being cleared.
            Some(base) if stands_on(previous, base) => Belonging::Unknown,
            base => check_base(source.path(), (&self.name, base), (&names.image, previous.backup_id()))?,
        };
        let unchanged =
            Unchanged { dirty: self, worker, source, previous, names, errors: options.source_errors };
        for index in 0..SAMPLES {
            let at = (self.previous_size / SAMPLES * index) & !511;
            // The next place that was not written.
            let (dirty, end) = bits.run_at(at);
            let at = if dirty { end } else { at };
            let (_, clean_to) = bits.run_at(at.min(size));
            let len = SAMPLE.min(clean_to.min(self.previous_size).saturating_sub(at));
            if len > 0 {
                unchanged.compare(at, len).await?;
            }
        }
        match belonging {
            Belonging::Known => Ok(0),
            // A place that can't be read may have changed, and nothing else would tell.
            Belonging::Unknown => {
                Unchanged { errors: SourceErrors::Stop, ..unchanged }.compare_all(bits, options).await
            }
        }
    }

    /// How much from `at` on has changed, or has not: which of them, and bytes, in whole clusters of the backup up to the
    /// end of the disk. `None`: it is a full backup.
    pub(super) fn span(&self, at: u64, total: u64, cluster: u64) -> Option<(Changed, u64)> {
        let bits = self.bits.as_ref()?;
        // A cluster that the previous disk does not fill counts as changed.
        let limit = if self.previous_size >= total { total } else { self.previous_size / cluster * cluster };
        if at >= limit {
            return Some((Changed::Yes, total - at));
        }
        let Some(run) = bits.next_dirty(at) else { return Some((Changed::No, limit - at)) };
        let start = (run.start / cluster * cluster).min(limit);
        if start > at {
            return Some((Changed::No, start - at));
        }
        let end = run.end.max(at + 1).next_multiple_of(cluster);
        Some((Changed::Yes, end.min(total) - at))
    }

    /// Refuses to go on with a backup whose source was written since it was interrupted: the bitmap does not tell that
    /// apart from what was written before, and clearing it would hide it from every later increment. `done` bytes of the
    /// disk are in `partial`, but for what could not be read.
    pub(super) async fn compare_done(
        &self,
        worker: &Worker,
        source: &Image,
        partial: &Image,
        done: u64,
        options: &BackupOptions,
        unreadable: &mut Unreadable,
    ) -> Result<()> {
        let cluster = partial.cluster_size();
        let mut at = 0;
        while at < done {
            options.control.cancel.check()?;
            let len = match self.span(at, done, cluster) {
                Some((Changed::No, len)) => {
                    at += len;
                    continue;
                }
                Some((Changed::Yes, len)) => len,
                None => done - at,
            };
            let zero = zero_run(worker, source, at, at + len).await;
            let zero = if zero == 0 { 0 } else { zero_run(worker, partial, at, at + zero).await };
            if zero > 0 {
                at += zero;
                continue;
            }
            let len = len.min(COMPARED);
            let end = at + len;
            if !is_as_copied(worker, source, partial, at, len, options.source_errors, unreadable).await? {
                let message = format!(
                    "the disk was written between {at} and {end} since the backup was interrupted: begin it anew"
                );
                return Err(Error::new(ErrorKind::InvalidArgument, message)
                    .on(source.path())
                    .with_remedy(Remedy::RestartBackup));
            }
            at = end;
        }
        Ok(())
    }

    fn exists(&self, source: &Image) -> bool {
        source.bitmaps().iter().any(|bitmap| bitmap.name == self.name)
    }

    /// The name of a bitmap that was not cleared.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Before a backup with holes gets its name: they become dirty. (A full backup copies what is clean, too, so the bitmap
    /// as it is would not do.) Then there is no moment in which the backup and a bitmap that hides them go together.
    pub(super) async fn mark(&self, worker: &Worker, source: &Image, holes: &Arc<Bits>) -> Result<()> {
        if !self.exists(source) {
            return Ok(());
        }
        self.merge(worker, source, holes).await.map_err(|error| {
            let message = format!(
                "what could not be read can't be marked in bitmap '{}': {}; make a full backup without it",
                self.name,
                error.message()
            );
            Error::new(error.kind(), message).on(source.path()).with_remedy(Remedy::BackupWithoutBitmap)
        })
    }

    async fn merge(&self, worker: &Worker, source: &Image, bits: &Arc<Bits>) -> Result<()> {
        source.merge_bitmap(worker, &self.name, &DirtyBits(bits.clone())).await
    }

    /// After a complete backup, which has its name: what is written from now on is dirty, and the holes are.
    pub(super) async fn restart(
        &self,
        worker: &Worker,
        source: &Image,
        holes: Option<&Arc<Bits>>,
        backup: Option<BackupId>,
    ) -> Result<()> {
        let (restarted, what) = match (self.exists(source), holes) {
            // It keeps what it has: to clear it and mark them again are two steps, and between them they would be hidden.
            (true, Some(_)) => (Ok(()), "kept"),
            (true, None) => (source.clear_bitmap(worker, &self.name).await, "cleared"),
            (false, holes) => (self.add(worker, source, holes).await, "added"),
        };
        let restarted = match (restarted, backup) {
            (Ok(()), Some(backup)) => source.tie_bitmap(worker, &self.name, backup).await,
            (restarted, _) => restarted,
        };
        restarted.map_err(|error| {
            let message = format!(
                "the backup is complete, but bitmap '{}' could not be {what}: {}; clear it before \
                 the disk is written, or make the next backup a full one",
                self.name,
                error.message()
            );
            Error::new(error.kind(), message).on(source.path()).with_remedy(Remedy::ClearBitmap)
        })
    }

    async fn add(&self, worker: &Worker, source: &Image, holes: Option<&Arc<Bits>>) -> Result<()> {
        let new = NewBitmap { granularity: granularity(source), ..NewBitmap::named(&self.name) };
        let Some(holes) = holes else { return source.add_bitmap(worker, &new).await };
        // Disabled until they are in it: an increment is refused by a disabled one.
        source.add_bitmap(worker, &NewBitmap { recording: BitmapRecording::Off, ..new }).await?;
        self.merge(worker, source, holes).await?;
        source.set_bitmap_recording(worker, &self.name, BitmapRecording::On).await
    }
}

/// Whether an image of the chain beneath `image` is that backup.
fn stands_on(image: &Image, backup: BackupId) -> bool {
    std::iter::successors(image.backing(), Image::backing).any(|image| image.backup_id() == Some(backup))
}

/// The granularity of a new bitmap where the usual one would make it larger than the format's users accept.
fn granularity(source: &Image) -> Option<u64> {
    let least = source.virtual_size().div_ceil(8 * MAX_BITMAP_DATA_SIZE).next_power_of_two();
    (least > source.cluster_size().clamp(4 << 10, 64 << 10)).then_some(least)
}

/// Parts of the disk that a bitmap calls unchanged since the previous backup, to be compared.
struct Unchanged<'a> {
    dirty: &'a Dirty,
    worker: &'a Worker,
    source: &'a Image,
    previous: &'a Image,
    names: &'a PreviousBackup,
    errors: SourceErrors,
}

impl Unchanged<'_> {
    /// Fails if a range differs. What can't be read of the disk is left out where the backup leaves it out.
    async fn compare(&self, at: u64, len: u64) -> Result<()> {
        let now = match read(self.worker, self.source, at, len).await {
            Ok(now) => now,
            Err(_) if self.errors == SourceErrors::Skip => return Ok(()),
            Err(error) => return Err(error),
        };
        let then = read(self.worker, self.previous, at, len).await?;
        let Some(place) = first_difference(&now, &then) else { return Ok(()) };
        let at = (at + place as u64) & !511;
        let message = format!(
            "bitmap '{}' does not belong to '{}': nothing was written at {at} since then, it says, but the disks differ \
             there; make a full backup",
            self.dirty.name,
            self.names.image.display()
        );
        Err(Error::new(ErrorKind::InvalidArgument, message).on(self.source.path()))
    }

    /// The same of everything that is clean in `bits`; its bytes.
    async fn compare_all(&self, bits: &DirtyBits, options: &BackupOptions) -> Result<u64> {
        let tracker = Tracker::new(&options.control, Phase::Comparing, self.dirty.previous_size);
        let (mut at, mut compared) = (0, 0);
        while at < self.dirty.previous_size {
            let (dirty, end) = bits.run_at(at);
            let end = end.min(self.dirty.previous_size);
            if dirty {
                tracker.advance(end - at);
            } else {
                self.compare_run(at..end, &tracker).await?;
                compared += end - at;
            }
            at = end;
        }
        Ok(compared)
    }

    async fn compare_run(&self, run: Range<u64>, tracker: &Tracker) -> Result<()> {
        let mut at = run.start;
        while at < run.end {
            tracker.check()?;
            let zero = zero_run(self.worker, self.source, at, run.end).await;
            let zero = if zero == 0 { 0 } else { zero_run(self.worker, self.previous, at, at + zero).await };
            let len = if zero > 0 { zero } else { (run.end - at).min(COMPARED) };
            if zero == 0 {
                tracker.keep_to_rate(self.worker, len).await?;
                self.compare(at, len).await?;
            }
            at += len;
            tracker.advance(len);
        }
        Ok(())
    }
}

/// Whether a part of the disk has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Changed {
    Yes,
    No,
}

async fn read(worker: &Worker, image: &Image, offset: u64, len: u64) -> Result<Vec<u8>> {
    let bufs: IoBufs = IoBuf::zeroed(len as usize).into();
    let (result, bufs) = image.read_source(worker, offset, bufs).await;
    result?;
    let mut bytes = vec![0; len as usize];
    bufs.copy_to(0, &mut bytes);
    Ok(bytes)
}

/// Whether the disk shows what was copied of it. What could not be read then counts as copied; what can't be read now is
/// noted, if that is no error.
async fn is_as_copied(
    worker: &Worker,
    source: &Image,
    partial: &Image,
    offset: u64,
    len: u64,
    errors: SourceErrors,
    unreadable: &mut Unreadable,
) -> Result<bool> {
    let copied = read(worker, partial, offset, len).await?;
    match read(worker, source, offset, len).await {
        Ok(now) if now == copied => return Ok(true),
        Ok(_) if !unreadable.touches(offset..offset + len) => return Ok(false),
        Err(error) if errors == SourceErrors::Stop => return Err(error),
        Ok(_) | Err(_) => {}
    }
    let mut at = offset;
    for part in copied.chunks(COMPARED_BESIDE_HOLES as usize) {
        let end = at + part.len() as u64;
        if !unreadable.touches(at..end) {
            match read(worker, source, at, part.len() as u64).await {
                Ok(now) if now == part => {}
                Ok(_) => return Ok(false),
                Err(error) if errors == SourceErrors::Stop => return Err(error),
                Err(_) => unreadable.doubt(at..end),
            }
        }
        at = end;
    }
    Ok(true)
}
