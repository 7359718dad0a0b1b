//! Brings into an image in use what it lacks of its disk, so that it needs its backing images no more.

use super::pipeline::InOrder;
use crate::node::Driver;
use crate::progress::{JobControl, Phase, Tracker};
use crate::{Error, ErrorKind, Extent, Image, Result};
use std::collections::BTreeSet;
use zebu_storage::Worker;

/// Bytes that are copied at once.
const AT_ONCE: u64 = 1 << 20;
/// Bytes of tables that are read at once.
const TABLES_AT_ONCE: u64 = 1 << 20;
/// Reads of tables under way at once.
const READS: usize = 8;

/// The backing file when all of the disk is in the image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum AfterHydration {
    /// The image still names it.
    #[default]
    KeepBacking,
    /// The image names none any more.
    DropBacking,
}

/// How an image is hydrated.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct HydrateOptions {
    /// The backing file at the end. Default: [`AfterHydration::KeepBacking`].
    pub after: AfterHydration,
    /// Copies under way at once, of up to 1 MiB each; not 0, and more than 1024 count as 1024. Default: 8.
    pub requests: usize,
    /// Watching, slowing and stopping. Default: nobody watches, no limit.
    pub control: JobControl,
}

zebu_storage::option_setters!(HydrateOptions { after: AfterHydration, requests: usize, control: JobControl });

impl Default for HydrateOptions {
    fn default() -> Self {
        Self { after: AfterHydration::KeepBacking, requests: 8, control: JobControl::default() }
    }
}

/// The result of a hydration.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct HydrateReport {
    /// Bytes of the virtual disk.
    pub total: u64,
    /// Bytes that were copied; the rest was there, or is zero.
    pub copied: u64,
}

/// Copies into `image` all that only its backing images hold, while others use it. It is durable when this returns. The
/// backing file can be dropped then, as the options say.
///
/// Copies that were made before an error or a cancellation stay, and are not made again.
///
/// # Errors
/// As [`Image::fill_from_backing`]; [`ErrorKind::Cancelled`]; [`ErrorKind::Unsupported`]: the backing file is to be
/// dropped, and internal snapshots show parts of it.
pub async fn hydrate(worker: &Worker, image: &Image, options: &HydrateOptions) -> Result<HydrateReport> {
    image.qcow2("backing files")?.check_writable()?;
    if options.requests == 0 {
        let message = "a hydration needs at least one request in flight";
        return Err(Error::new(ErrorKind::InvalidArgument, message).on(image.path()));
    }
    let drops = options.after == AfterHydration::DropBacking;
    if drops {
        image.refuse_to_drop_backing()?;
    }
    let tracker = Tracker::new(&options.control, Phase::Copying, image.virtual_size());
    let mut copied = 0;
    loop {
        let mapping = image.mapping_in_use()?;
        let mut fills = InOrder::new(options.requests);
        let filled = fill_all(worker, image, &tracker, &mut fills).await;
        // Whoever closes the image has no request under way.
        fills.idle().await;
        copied += filled?;
        tracker.finish(Some(Phase::Finishing));
        image.flush(worker).await?;
        if !drops || image.drop_backing(worker, mapping).await? {
            return Ok(HydrateReport { total: image.virtual_size(), copied });
        }
    }
}

/// Whether the image lacks what an extent shows.
fn is_lacking(extent: &Extent) -> bool {
    extent.depth > 0 && !extent.is_zero()
}

async fn fill_all<'a>(
    worker: &'a Worker,
    image: &'a Image,
    tracker: &'a Tracker,
    fills: &mut InOrder<'a, u64>,
) -> Result<u64> {
    let (mut at, mut copied) = (0, 0);
    loop {
        while fills.has_room() {
            tracker.check()?;
            let total = image.virtual_size();
            if at >= total {
                break;
            }
            let extent = image.source_extent(worker, at, total - at).await?;
            if !is_lacking(&extent) {
                tracker.advance(extent.len);
                at = extent.end();
                continue;
            }
            let (offset, len) = (at, extent.len.min(AT_ONCE));
            tracker.keep_to_rate(worker, len).await?;
            fills.begin(async move {
                let copied = image.fill_from_backing(worker, offset, len).await?;
                tracker.advance(len);
                Ok(copied)
            });
            at += len;
        }
        match fills.next().await {
            Some(result) => copied += result?,
            None => return Ok(copied),
        }
    }
}

/// Reads the L2 tables of the images below `image` that lie on no local file, so that a cache in front of such a file has
/// them. Reads at most `most` bytes; returns how many.
///
/// # Errors
/// A file can't be read.
pub async fn read_tables_ahead(worker: &Worker, image: &Image, most: u64) -> Result<u64> {
    let mut left = most;
    let mut next = Some(&image.0);
    while let Some(node) = next {
        next = node.backing.as_ref();
        let Driver::Qcow2(qcow2) = &node.driver else { continue };
        let file = qcow2.file();
        if file.descriptors().next().is_some() {
            continue;
        }
        let cluster = qcow2.geometry().cluster_size();
        let table = qcow2.active_map().l1();
        let places = table.table().iter_set().filter_map(|(_, entry)| zebu_qcow2::L1Entry(entry).table());
        // In the order of the file, each once.
        let places: BTreeSet<u64> = places.map(|place| place.0).collect();
        let mut runs: Vec<(u64, u64)> = Vec::new();
        for place in places {
            let len = cluster.min(left).min(file.len().saturating_sub(place));
            left -= len;
            match runs.last_mut() {
                Some((start, run)) if *start + *run == place && *run < TABLES_AT_ONCE => *run += len,
                _ if len > 0 => runs.push((place, len)),
                _ => {}
            }
        }
        let mut reads = InOrder::new(READS);
        for (offset, len) in runs {
            if !reads.has_room() {
                reads.next().await.transpose()?;
            }
            reads.begin(async move {
                let (result, _) = worker.read(file, offset, worker.buffer(len as usize).into()).await;
                result.map_err(Error::from)
            });
        }
        while let Some(result) = reads.next().await {
            result?;
        }
    }
    Ok(most - left)
}
