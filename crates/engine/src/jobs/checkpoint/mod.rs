//! Checkpoints: disks as they are at one moment, to be read while guests go on to write.

mod disk;
mod frozen;
mod moment;
mod moment_bitmaps;
mod source;
mod spill;

pub use disk::FrozenDisk;
pub use source::CheckpointSource;

use crate::jobs::fate::Fate;
use crate::node::Node;
use crate::qcow2::bitmaps::BackupEnd;
use crate::{Error, ErrorKind, Image, Result};
use frozen::Frozen;
use moment::while_all_alone;
use moment_bitmaps::MomentBitmaps;
use spill::Spill;
use std::sync::Arc;
use std::time::Duration;
use zebu_storage::sabotage::{self, Fault};
use zebu_storage::{File, Worker};

/// How a checkpoint is made.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct CheckpointOptions {
    /// Most bytes of memory for what guests overwrite. Some 4 MiB more are used on the way there. Default: 64 MiB.
    pub memory: u64,
    /// A file, empty and open for writing, that takes what memory does not. Default: `None`.
    pub spill: Option<File>,
    /// Most bytes of what guests overwrite, in memory and in the file; zeroes cost nothing. Default: no other limit.
    pub limit: u64,
}

zebu_storage::option_setters!(CheckpointOptions {
    memory: u64,
    spill: impl Into<Option<File>>,
    limit: u64,
});

impl Default for CheckpointOptions {
    fn default() -> Self {
        Self { memory: 64 << 20, spill: None, limit: u64::MAX }
    }
}

/// Figures of a checkpoint, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct CheckpointReport {
    /// Of the disks.
    pub total: u64,
    /// Kept before guests changed them, zeroes included.
    pub copied_for_guests: u64,
    /// In the spill's memory.
    pub spill_memory: u64,
    /// In the spill's file.
    pub spill_file: u64,
    /// Most bytes of both.
    pub spill_limit: u64,
}

/// A checkpoint: disks as they were at one moment. Dropped, it ends, and a bitmap that it both shows and begins can't be used any more,
/// unless [`Checkpoint::end`] was called.
#[derive(Debug)]
pub struct Checkpoint {
    disks: Vec<FrozenDisk>,
    bitmaps: Vec<MomentBitmaps>,
    spill: Arc<Spill>,
    fate: Arc<Fate>,
}

impl Checkpoint {
    /// Takes the disks as they are when all requests that change one of them and have begun are done. From then on, requests that
    /// change one wait until what they change is kept.
    ///
    /// All bitmaps end and begin at the same moment. If something fails, there is no checkpoint, and bitmaps are as before.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: there is no disk, one is named twice, or a bitmap does not record writes or is inconsistent;
    /// [`ErrorKind::ReadOnly`]: an image is not open for writing; [`ErrorKind::NotFound`]: there is no such bitmap;
    /// [`ErrorKind::Exists`]: a backup or another checkpoint works with it; [`ErrorKind::Unsupported`]: the format has no bitmaps;
    /// failures of the image.
    pub async fn start(
        worker: &Worker,
        sources: Vec<CheckpointSource>,
        options: CheckpointOptions,
    ) -> Result<Self> {
        let Some(first) = sources.first().map(|source| source.image.clone()) else {
            return Err(Error::new(ErrorKind::InvalidArgument, "a checkpoint needs at least one disk"));
        };
        for (index, source) in sources.iter().enumerate() {
            let image = &source.image;
            image.0.check_open()?;
            if !image.0.is_writable() {
                let message =
                    "an image that is only read does not change: read it as it is, without a checkpoint";
                return Err(Error::new(ErrorKind::ReadOnly, message).on(image.path()));
            }
            if sources[..index].iter().any(|other| Arc::ptr_eq(&other.image.0, &image.0)) {
                let message = "the image is named twice for one checkpoint";
                return Err(Error::new(ErrorKind::InvalidArgument, message).on(image.path()));
            }
        }
        // A checkpoint that nobody waits for any more ends at once, by its drop.
        first.on_own_worker(worker, move |_, on| async move { begin(&on, &sources, options).await }).await
    }

    /// The disks, in the order of the sources.
    pub fn disks(&self) -> &[FrozenDisk] {
        &self.disks
    }

    /// Why it has ended by itself: the spill is full or has failed, or the image could not be read.
    pub fn failure(&self) -> Option<Error> {
        self.fate.failure()
    }

    /// Its figures now.
    pub fn report(&self) -> CheckpointReport {
        let used = self.spill.used();
        CheckpointReport {
            total: self.disks.iter().map(FrozenDisk::size).sum(),
            copied_for_guests: self.disks.iter().map(|disk| disk.frozen.copied()).sum(),
            spill_memory: used.in_memory,
            spill_file: used.in_file,
            spill_limit: self.spill.limit(),
        }
    }

    /// Ends it: reads of its disks fail from now on, and guests wait for nothing. A bitmap that it both shows and begins keeps what was
    /// written since the moment; with [`BackupEnd::GivenUp`], what the checkpoint has shown is marked in it again.
    pub async fn end(mut self, outcome: BackupEnd) {
        self.let_go();
        for bitmaps in &mut self.bitmaps {
            bitmaps.give_back(outcome).await;
        }
    }

    fn let_go(&self) {
        self.fate.end();
        self.disks.iter().for_each(|disk| disk.frozen.let_go());
        self.spill.end();
    }
}

impl Drop for Checkpoint {
    fn drop(&mut self) {
        self.let_go();
    }
}

async fn begin(
    worker: &Worker,
    sources: &[CheckpointSource],
    options: CheckpointOptions,
) -> Result<Checkpoint> {
    let spill = Arc::new(Spill::new(options.spill, options.memory, options.limit));
    let fate = Arc::new(Fate::default());
    let (mut bitmaps, mut frozen) = (Vec::with_capacity(sources.len()), Vec::with_capacity(sources.len()));
    let take = |image: &Image| Frozen::take(image, &spill, &fate);
    match make(worker, sources, &mut bitmaps, &mut frozen, take).await {
        Ok(()) => {
            let mut disks = Vec::with_capacity(frozen.len());
            for (frozen, bitmaps) in frozen.into_iter().zip(&mut bitmaps) {
                bitmaps.keep().await;
                disks.push(FrozenDisk { frozen, bitmap: bitmaps.ended() });
            }
            Ok(Checkpoint { disks, bitmaps, spill, fate })
        }
        Err(error) => {
            fate.end();
            for disk in &frozen {
                disk.let_go();
            }
            for bitmaps in &mut bitmaps {
                bitmaps.undo(worker).await;
            }
            Err(error)
        }
    }
}

async fn make(
    worker: &Worker,
    sources: &[CheckpointSource],
    bitmaps: &mut Vec<MomentBitmaps>,
    frozen: &mut Vec<Arc<Frozen>>,
    take: impl Fn(&Image) -> Arc<Frozen>,
) -> Result<()> {
    for source in sources {
        source.image.0.own_worker().start(worker).map_err(|error| error.on(source.image.path()))?;
        bitmaps.push(MomentBitmaps::prepare(worker, source).await?);
    }
    let nodes: Vec<Arc<Node>> = sources.iter().map(|source| source.image.0.clone()).collect();
    let is_late = sabotage::is(Fault::BeginBitmapLate);
    let freeze = async || {
        for (source, bitmaps) in sources.iter().zip(bitmaps.iter_mut()) {
            source.image.0.check_open()?;
            if !is_late {
                bitmaps.take(worker).await?;
            }
            frozen.push(take(&source.image));
        }
        Ok(())
    };
    while_all_alone(worker, nodes, freeze).await?;
    if is_late {
        worker.sleep(Duration::from_millis(1)).await;
        for bitmaps in bitmaps.iter_mut() {
            bitmaps.take(worker).await?;
        }
    }
    Ok(())
}
