//! Puts an image onto another backing file without a change of what it shows.
//!
//! The clusters that the image itself holds stay. Elsewhere the old chain and the new one are walked in step; where they do not
//! show the same bytes, those of the old one are written into the image. Then all of that is made durable, and only
//! then the header names the new backing file: a crash leaves an image that shows the same, on one chain or the other.

mod copy;
mod job;
mod options;
mod walk;

pub use options::{RebaseOptions, RebaseReport};

use super::convert::TargetClusters;
use super::pipeline;
use crate::backups::Footing;
use crate::compress::Bursts;
use crate::image::Clusters;
use crate::progress::{Phase, Tracker};
use crate::{BackingReference, Error, ErrorKind, Image, Result};
use job::{Job, owners};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use zebu_qcow2::Version;
use zebu_storage::Worker;

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
    let backup = image.backup_id();
    let qcow2 = image.qcow2("backing files")?;
    qcow2.check_writable()?;
    let compressed = options.clusters == TargetClusters::Compressed;
    if compressed && qcow2.geometry().external_data {
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
    let cluster = qcow2.geometry().cluster_size();
    let unit = if compressed { cluster } else { qcow2.geometry().subcluster_size() };
    let (chunk, tasks) = sizing(options, unit)?;
    let total = image.virtual_size();
    let job = Rc::new(Job {
        new_size: backing.as_ref().map_or(0, Image::virtual_size).min(total),
        owners: [owners(image), backing.as_ref().map(owners).unwrap_or_default()],
        image: image.clone(),
        new: backing,
        total,
        unit,
        chunk,
        clusters: if compressed { Clusters::Compressed(Bursts::Whole) } else { Clusters::Plain },
        has_zero_clusters: qcow2.geometry().version == Version::V3,
        tracker: Tracker::new(&options.control, Phase::Copying, total),
        failure: RefCell::new(None),
        report: Cell::new(RebaseReport { total, ..RebaseReport::default() }),
    });
    let mover = |own: Worker, queue| {
        let job = Rc::clone(&job);
        async move { job.copy_pieces(&own, &queue).await }
    };
    // Without a chain below it, before and after, nothing can show through.
    if image.backing().is_some() || job.new.is_some() {
        pipeline::run(worker, tasks, mover, async |queue| {
            if let Err(error) = job.walk(worker, queue).await {
                job.fail(error);
            }
        })
        .await;
    }
    if let Some(error) = job.failure.take() {
        return Err(error);
    }
    job.tracker.finish(Some(Phase::Finishing));
    image.flush(worker).await?;
    image.set_backing(worker, reference).await?;
    if let Some(backup) = backup {
        // It shows what it did.
        let beneath = job.new.as_ref().map_or(Footing::Nothing, |new| new.backup_id().into());
        image.mark_as_backup(worker, backup, beneath).await?;
    }
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
    let buffers = options.requests.saturating_mul(2);
    let chunk = (options.buffer_memory / buffers / unit * unit).clamp(unit, MAX_CHUNK.max(unit));
    Ok((chunk, options.requests.min(options.buffer_memory / (2 * chunk)).max(1)))
}
