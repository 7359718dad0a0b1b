//! A backup of the disk as it is at one moment, while guests go on to write.

mod copy_before_write;
mod frozen_bitmap;

pub use copy_before_write::OnCopyError;
pub use frozen_bitmap::{Copied, LiveBitmap};

use super::backup::Decryption;
use super::convert::TargetClusters;
use super::pace::{Pace, Speed};
use super::pipeline;
use super::queue::Queue;
use crate::progress::{JobControl, NAP, Phase, Tracker};
pub use crate::qcow2::bitmaps::BackupEnd;
use crate::{Error, ErrorKind, Format, Image, Result};
use copy_before_write::{CopyBeforeWrite, CopyFor, CopySetup};
use futures_util::future::{Either, select};
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use zebu_storage::{CacheUse, Worker};

/// How a live backup is made.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct LiveBackupOptions {
    /// How clusters of the target are written. Default: [`TargetClusters::Plain`].
    pub clusters: TargetClusters,
    /// The effect of a failure to copy on a guest's request that needs the copy. Default: [`OnCopyError::FailBackup`].
    pub on_copy_error: OnCopyError,
    /// A bitmap of the source that records what is written from the start on, for the next backup. Default: `None`.
    pub bitmap: Option<LiveBitmap>,
    /// Chunks that the backup copies at once, beside those that guests need. At least 1; more than 1024 count as 1024.
    /// Default: 4.
    pub requests: usize,
    /// Most bytes of buffers, guests' copies included; two chunks are used in any case. A bit for each chunk takes some 2 MiB
    /// more for each TiB of what was copied. Default: 32 MiB.
    pub buffer_memory: usize,
    /// Whether the target may hold in plain text what is encrypted in the source. Default: [`Decryption::Refuse`].
    pub decryption: Decryption,
    /// How fast it goes. What guests need is copied at once in any case. Default: [`Speed::Adaptive`].
    pub speed: Speed,
    /// Watching, slowing and stopping. What guests need is copied at once, whatever the limit.
    /// Default: nobody watches, no limit.
    pub control: JobControl,
}

zebu_storage::option_setters!(LiveBackupOptions {
    clusters: TargetClusters,
    on_copy_error: OnCopyError,
    bitmap: impl Into<Option<LiveBitmap>>,
    requests: usize,
    buffer_memory: usize,
    decryption: Decryption,
    speed: Speed,
    control: JobControl,
});

impl Default for LiveBackupOptions {
    fn default() -> Self {
        Self {
            clusters: TargetClusters::Plain,
            on_copy_error: OnCopyError::default(),
            bitmap: None,
            requests: 4,
            buffer_memory: 32 << 20,
            decryption: Decryption::default(),
            speed: Speed::default(),
            control: JobControl::default(),
        }
    }
}

/// The result of a live backup, in bytes of the virtual disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct LiveBackupReport {
    /// Of the disk.
    pub total: u64,
    /// Dealt with so far.
    pub done: u64,
    /// Copied because a guest was about to change it.
    pub copied_for_guests: u64,
}

/// A live backup that has begun. Dropped, it ends, and the target is of no use; a bitmap that it works with can't be
/// used any more and is inconsistent after the image was closed, unless [`LiveBackup::end`] was called.
#[derive(Debug)]
pub struct LiveBackup {
    copy: Arc<CopyBeforeWrite>,
    options: LiveBackupOptions,
}

/// Bytes of a chunk, unless a cluster of the target is larger.
const CHUNK: u64 = 64 << 10;
/// Chunks whose mapping is looked at in one go.
const SURVEY: u64 = 1024;

impl LiveBackup {
    /// Takes the disk of `source` as it is when all requests that change it and have begun are done: that is what
    /// `target` will hold. `target` was just made, with a disk of the same size, and opened for writing. From now on
    /// requests that change `source` wait for what they change to be copied; [`LiveBackup::run`] copies the rest.
    ///
    /// With [`LiveBackupOptions::bitmap`], the bitmap is empty at that moment. A target that is to hold only what it marks
    /// names its backing file and is opened without it ([`crate::Chain::TopOnly`]).
    ///
    /// # Errors
    /// [`ErrorKind::Exists`]: another one is under way; [`ErrorKind::InvalidArgument`]: the sizes differ, or the bitmap
    /// does not record writes, is inconsistent, or does not go on from the previous backup; [`ErrorKind::NotFound`]: there is no such
    /// bitmap;
    /// [`ErrorKind::Unsupported`]: the target can't hold compressed clusters, or the source no bitmaps;
    /// [`ErrorKind::ReadOnly`]: the bitmap can't be changed.
    pub async fn start(
        worker: &Worker,
        source: &Image,
        target: &Image,
        options: LiveBackupOptions,
    ) -> Result<Self> {
        let compressed = options.clusters == TargetClusters::Compressed;
        if compressed && target.format() != Format::Qcow2 {
            let message = "Compression not supported for this file format";
            return Err(Error::new(ErrorKind::Unsupported, message).on(target.path()));
        }
        if options.requests == 0 {
            let message = "a backup needs at least one request in flight";
            return Err(Error::new(ErrorKind::InvalidArgument, message));
        }
        if options.decryption == Decryption::Refuse && source.is_chain_encrypted() && !target.is_encrypted() {
            let message = "the disk is encrypted, and the target would hold its plain text: ask for that by name, or \
                           encrypt the target";
            return Err(Error::new(ErrorKind::InvalidArgument, message).on(target.path()));
        }
        let chunk = CHUNK.max(target.cluster_size());
        let setup = CopySetup {
            target: target.clone(),
            chunk,
            clusters: options.clusters,
            on_error: options.on_copy_error,
            most_copies: (options.buffer_memory as u64 / chunk).max(2) as usize,
            bitmap: options.bitmap.clone(),
            pace: Pace::new(options.speed, options.requests),
        };
        // A backup that nobody waits for any more ends at once, by its drop.
        source
            .on_own_worker(worker, move |source, on| async move {
                let copy = CopyBeforeWrite::start(&on, &source, setup).await?;
                Ok(Self { copy, options })
            })
            .await
    }

    /// How far it is.
    pub fn report(&self) -> LiveBackupReport {
        LiveBackupReport {
            total: self.copy.size,
            done: self.copy.done(),
            copied_for_guests: self.copy.copied_for_guests(),
        }
    }

    /// The way in which the source's own file is read: nothing of it stays in the page cache that was not there.
    pub fn source_cache_use(&self) -> CacheUse {
        self.copy.source.data_file().uncached_reads()
    }

    /// Copies everything that guests have not had copied. Afterwards the target, still to be closed, holds the whole
    /// disk; once that is durable, or given up, [`LiveBackup::end`] tells the bitmap.
    ///
    /// # Errors
    /// [`ErrorKind::Cancelled`]; what reading the source or writing the target fails with. The target is of no use then,
    /// and guests are not held up any more.
    pub async fn run(&self, worker: &Worker) -> Result<LiveBackupReport> {
        let total = self.copy.size;
        let tracker = Rc::new(Tracker::new(&self.options.control, Phase::Copying, total));
        let mover = |own: Worker, queue: Queue<u64>| {
            let (copy, tracker) = (self.copy.clone(), tracker.clone());
            async move {
                while let Some(chunk) = queue.pop().await {
                    if let Err(error) = copy_one(&own, &copy, &tracker, chunk).await {
                        copy.fail(error);
                    }
                }
            }
        };
        let walk = async |queue: &Queue<u64>| self.walk(worker, &tracker, queue).await;
        let copying = pin!(pipeline::run(worker, self.options.requests, mover, walk));
        let ending = pin!(self.until_end(worker, &tracker));
        // Guests are let go at once; the requests that are in flight come to their end.
        if let Either::Right(((), copying)) = select(copying, ending).await {
            copying.await;
        }
        let stopped = self.has_stopped(&tracker);
        let failure = self.copy.failure();
        self.copy.end();
        self.copy.idle().await;
        match failure {
            Some(error) => Err(error),
            None if stopped => Err(Error::new(ErrorKind::Cancelled, "cancelled")),
            None => {
                tracker.finish(Some(Phase::Finishing));
                self.copy.mark(worker).await?;
                Ok(self.report())
            }
        }
    }

    /// Queues the chunks that have to be copied, and ticks off those that are known to be zero.
    async fn walk(&self, worker: &Worker, tracker: &Tracker, queue: &Queue<u64>) {
        let mut next = 0;
        while next * self.copy.chunk < self.copy.size && !self.has_stopped(tracker) {
            match self.copy.survey(worker, next, SURVEY).await {
                Ok(survey) => {
                    tracker.advance(survey.settled);
                    for chunk in survey.wanted {
                        if self.has_stopped(tracker) {
                            break;
                        }
                        queue.push(chunk).await;
                    }
                    next = survey.behind;
                }
                Err(error) => self.copy.fail(error),
            }
        }
    }

    /// Waits until it is cancelled or fails, however long its target takes to answer.
    async fn until_end(&self, worker: &Worker, tracker: &Tracker) {
        while !self.has_stopped(tracker) {
            worker.sleep(NAP).await;
        }
    }

    /// Ends it. The bitmap keeps what was written since the start; if the backup was given up, what it held before is
    /// marked in it again.
    pub async fn end(self, outcome: BackupEnd) {
        self.copy.end();
        self.copy.give_back(outcome).await;
    }

    fn has_stopped(&self, tracker: &Tracker) -> bool {
        if let Err(cancelled) = tracker.check() {
            self.copy.fail(cancelled);
        }
        self.copy.has_ended()
    }
}

impl Drop for LiveBackup {
    fn drop(&mut self) {
        self.copy.end();
    }
}

async fn copy_one(worker: &Worker, copy: &Arc<CopyBeforeWrite>, tracker: &Tracker, chunk: u64) -> Result<()> {
    tracker.check()?;
    if copy.has_ended() {
        return Ok(());
    }
    tracker.keep_to_rate(worker, copy.chunk).await?;
    copy.copy_chunk(worker, chunk, CopyFor::Backup).await?;
    tracker.advance(copy.bytes_of(chunk..chunk + 1));
    Ok(())
}
