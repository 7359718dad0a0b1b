//! Puts an image onto another backing file without a change of what it shows.
//!
//! What the image itself holds stays. Elsewhere the old chain and the new one are walked in step; where they do not
//! show the same bytes, those of the old one are written into the image. Then all of that is made durable, and only
//! then the header names the new backing file: a crash leaves an image that shows the same, on one chain or the other.

mod copy;
mod walk;

use super::convert::TargetClusters;
use super::progress::{JobControl, Phase, Tracker};
use super::queue::{CloseOnDrop, Queue};
use crate::{BackingReference, Error, ErrorKind, Image, Result};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use walk::Piece;
use zebu_qcow2::Version;
use zebu_storage::Worker;

/// How an image is rebased.
#[derive(Debug, Clone)]
pub struct RebaseOptions {
    /// Pieces of work in flight, at least 1.
    pub requests: usize,
    /// Most bytes of read buffers; two clusters are used in any case.
    pub buffer_memory: usize,
    /// How clusters are written into the image.
    pub clusters: TargetClusters,
    /// Watching, slowing and stopping. A rebase that is stopped leaves the image on its old backing file.
    pub control: JobControl,
}

impl Default for RebaseOptions {
    fn default() -> Self {
        Self {
            requests: 8,
            buffer_memory: 32 << 20,
            clusters: TargetClusters::Plain,
            control: JobControl::default(),
        }
    }
}

/// What a rebase did. All figures in bytes of the virtual disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct RebaseReport {
    /// Of the disk.
    pub total: u64,
    /// Held by the image itself, or known to be the same in both chains: not looked at.
    pub skipped: u64,
    /// Read from the chains and compared.
    pub compared: u64,
    /// Written into the image.
    pub written: u64,
    /// Made zero in the image.
    pub zeroed: u64,
}

/// Rebases `image`, which was opened for writing with its old chain, onto `new`, which was opened for reading with what
/// it stands on, and which `reference` names; onto nothing if that is `None`. Both must stay as they are meanwhile.
/// `image` is to be closed afterwards: what it reads still comes through the old chain.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`] if the new chain holds the image itself; what reading either chain, writing the image
/// and [`Image::set_backing`] fail with. The image then names its old backing file and shows what it showed.
pub async fn rebase(
    worker: &Worker,
    image: &Image,
    new: Option<(&Image, BackingReference)>,
    options: &RebaseOptions,
) -> Result<RebaseReport> {
    let qcow2 = image.qcow2("backing files")?;
    qcow2.check_writable()?;
    let compressed = options.clusters == TargetClusters::Compressed;
    if compressed && qcow2.geometry.external_data {
        let message = "an image with an external data file can't hold compressed clusters";
        return Err(Error::new(ErrorKind::Unsupported, message).on(image.path()));
    }
    let (backing, reference) = match new {
        Some((backing, reference)) => (Some(backing.clone()), Some(reference)),
        None => (None, None),
    };
    if let Some(backing) = &backing
        && backing.file_ids().contains(&image.file_ids()[0])
    {
        let message =
            format!("the backing chain of '{}' would contain the image itself", backing.path().display());
        return Err(Error::new(ErrorKind::InvalidArgument, message).on(image.path()));
    }
    if backing.is_some() {
        qcow2.expect_backing();
    }
    let cluster = qcow2.geometry.cluster_size();
    let unit = if compressed { cluster } else { qcow2.geometry.subcluster_size() };
    let (chunk, tasks) = sizing(options, unit)?;
    let total = image.virtual_size();
    let job = Rc::new(Job {
        new_size: backing.as_ref().map_or(0, Image::virtual_size).min(total),
        owners: [image.file_ids(), backing.as_ref().map(Image::file_ids).unwrap_or_default()],
        image: image.clone(),
        new: backing,
        total,
        unit,
        chunk,
        compressed,
        has_zero_clusters: qcow2.geometry.version == Version::V3,
        tracker: Tracker::new(&options.control, Phase::Copying, total),
        failure: RefCell::new(None),
        report: Cell::new(RebaseReport { total, ..RebaseReport::default() }),
    });
    let queue: Queue<Piece> = Queue::new(2 * tasks);
    let closer = CloseOnDrop(queue.clone());
    let movers: Vec<_> = (0..tasks)
        .map(|_| {
            let (job, own, queue) = (Rc::clone(&job), worker.clone(), queue.clone());
            worker.spawn(async move { job.copy_pieces(&own, &queue).await })
        })
        .collect();
    if let Err(error) = job.walk(worker, &queue).await {
        job.fail(error);
    }
    drop(closer);
    for mover in movers {
        mover.await;
    }
    if let Some(error) = job.failure.take() {
        return Err(error);
    }
    job.tracker.finish(Some(Phase::Finishing));
    image.flush(worker).await?;
    image.set_backing(worker, reference).await?;
    Ok(job.report.get())
}

/// Most bytes read at once from one chain, unless a cluster is larger.
const MAX_CHUNK: usize = 1 << 20;

/// Bytes of one buffer, and tasks with two of them each.
fn sizing(options: &RebaseOptions, unit: u64) -> Result<(usize, usize)> {
    if options.requests == 0 {
        return Err(Error::new(ErrorKind::InvalidArgument, "rebase needs at least one request in flight"));
    }
    let unit = (unit as usize).max(64 << 10);
    let chunk =
        (options.buffer_memory / (2 * options.requests) / unit * unit).clamp(unit, MAX_CHUNK.max(unit));
    Ok((chunk, options.requests.min(options.buffer_memory / (2 * chunk)).max(1)))
}

/// A running rebase, shared by its tasks.
struct Job {
    image: Image,
    new: Option<Image>,
    /// Bytes of the disk that the new chain reaches; 0 without one.
    new_size: u64,
    /// The files of the images of both chains, from the top down.
    owners: [Vec<zebu_storage::FileId>; 2],
    total: u64,
    /// Bytes that the image holds or doesn't hold as a whole: a subcluster, or a cluster.
    unit: u64,
    chunk: usize,
    compressed: bool,
    /// Ranges can be made zero without writing bytes.
    has_zero_clusters: bool,
    tracker: Tracker,
    failure: RefCell<Option<Error>>,
    report: Cell<RebaseReport>,
}

impl Job {
    fn fail(&self, error: Error) {
        self.failure.borrow_mut().get_or_insert(error);
    }

    fn is_stopped(&self) -> bool {
        if let Err(cancelled) = self.tracker.check() {
            self.fail(cancelled);
        }
        self.failure.borrow().is_some()
    }

    fn count(&self, add: impl FnOnce(&mut RebaseReport)) {
        let mut report = self.report.get();
        add(&mut report);
        self.report.set(report);
    }
}
