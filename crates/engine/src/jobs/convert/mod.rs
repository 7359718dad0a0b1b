//! Copies images into a new or an existing one, whatever the formats.

mod bitmaps;
mod compressed;
mod copy;
mod disk_order;
mod ending;
mod in_order;
mod job;
mod moves;
mod offload;
mod options;
mod piece;
mod sink;
mod sizing;
mod source_conflict;
mod source_end;
mod source_range;
mod target;
mod threads;
mod turns;
mod unreadable;
mod walk;

pub use options::{
    ConvertOptions, ConvertReport, ConvertTarget, CopyBitmaps, CopyMode, Identities, NewTarget, PlaceOrder,
    ReadErrors, SkippedRange, StreamedTarget, TablePlaces, TargetClusters, TargetContent,
};
pub use source_end::SourceEnd;

use crate::progress::Phase;
use crate::{BitmapInfo, Error, ErrorKind, Format, Image, Preallocation, Result};
use disk_order::Making;
use ending::Ending;
use job::{Job, Part};
use sink::Sink;
use sizing::Sizing;
use source_conflict::check_open_target;
use target::Made;
use zebu_storage::Worker;

/// How data is moved. Shared blocks are none that were set aside: to write one takes space that may not be there. And what
/// is shared is not read, so that nobody knows whether it can be.
fn copy_mode(options: &ConvertOptions, target: &ConvertTarget, compresses: bool) -> Result<CopyMode> {
    let wanted = options.copy;
    if matches!(target, ConvertTarget::Stream(_)) {
        return Ok(CopyMode::Buffers);
    }
    if let ConvertTarget::New(new) = target
        && matches!(new.create.format, Format::Foreign(_))
    {
        if wanted == CopyMode::Reflink {
            let message = "images of other programs are written through buffers: no reflink";
            return Err(Error::new(ErrorKind::Unsupported, message).on(&new.path));
        }
        return Ok(CopyMode::Buffers);
    }
    if options.read_errors == ReadErrors::Zero && matches!(wanted, CopyMode::Reflink | CopyMode::Range) {
        let message = "Cannot use copy offloading in salvaging mode: all has to be read";
        return Err(Error::new(ErrorKind::InvalidArgument, message));
    }
    let sets_aside = match target {
        ConvertTarget::New(new) => {
            matches!(new.create.preallocation, Preallocation::Falloc | Preallocation::Full)
        }
        ConvertTarget::Existing { .. } | ConvertTarget::Stream(_) => false,
    };
    let reads_all = compresses || options.read_errors == ReadErrors::Zero;
    Ok(if reads_all || wanted == CopyMode::Auto && sets_aside { CopyMode::Buffers } else { wanted })
}

/// Copies bitmaps into a target whose data is complete.
async fn copy_bitmaps(
    worker: &Worker,
    source: &Image,
    target: &Sink,
    made: Option<&Made>,
    bitmaps: &[BitmapInfo],
) -> Result<()> {
    match (target.image(), made) {
        (Some(image), _) => bitmaps::copy(worker, source, image, bitmaps).await,
        (None, Some(made)) => {
            target.finish(worker).await?;
            let image = made.open(worker).await?;
            let copied = bitmaps::copy(worker, source, &image, bitmaps).await;
            let closed = image.close(worker).await;
            copied.and(closed)
        }
        (None, None) => Ok(()),
    }
}

/// Copies `sources`, one behind the other, into `target`.
///
/// Ranges that the sources' mappings know to be zero are neither read nor scanned. Several pieces of work are in
/// flight at once, and are written as their reads complete; where, is said by [`ConvertOptions::order`].
///
/// A snapshot is converted by opening its image with [`crate::OpenOptions::snapshot`].
///
/// # Errors
/// [`crate::ErrorKind::InvalidArgument`] for options out of range and for a target that is too small or a file of a source,
/// [`crate::ErrorKind::Cancelled`], and whatever the images' requests fail with. After an error the content of an existing
/// target is undefined; of a new one nothing is left.
pub async fn convert(
    worker: &Worker,
    sources: &[Image],
    target: ConvertTarget,
    options: &ConvertOptions,
) -> Result<ConvertReport> {
    let compressed = compressed::cluster_size(options, &target)?;
    let mut sizing = Sizing::of(options, compressed, target.cluster_size())?;
    let ending = Ending::of(sources, &target, options)?;
    if target.is_stream() || ending != Ending::Known {
        sizing.threads = 1;
    }
    let parts = Part::list(sources, options.range.clone())?;
    let wanted = bitmaps::wanted(sources, options.bitmaps)?;
    if let (ConvertTarget::New(new), false) = (&target, wanted.is_empty())
        && matches!(new.create.format, Format::Foreign(_))
    {
        let message = format!("Format driver '{}' does not support bitmaps", new.create.format.name());
        return Err(Error::new(ErrorKind::Unsupported, message).on(&new.path));
    }
    if let (ConvertTarget::Stream(new), false) = (&target, wanted.is_empty()) {
        let message = "bitmaps can't be had in an image that is written in the order of its disk";
        return Err(Error::new(ErrorKind::Unsupported, message).on(new.file.path()));
    }
    let total = parts.last().map_or(0, Part::end);
    let copy = copy_mode(options, &target, compressed.is_some())?;
    let (sink, content, made) = match target {
        ConvertTarget::New(new) => {
            let making = Making { parts: &parts, options, sizing, copy };
            let (sink, content, made) = target::make(worker, sources, *new, total, making).await?;
            (sink, content, Some(made))
        }
        ConvertTarget::Stream(new) => {
            (target::begin_stream(worker, &parts, *new, total, options).await?, TargetContent::Zero, None)
        }
        ConvertTarget::Existing { image, content } => {
            check_open_target(sources, &image)?;
            let content = content.on(&image);
            (Sink::Image(image), content, None)
        }
    };
    if sink.is_stream() {
        sizing.threads = 1;
    }
    let job = Job::new(parts, sink, content, options, sizing, compressed, copy)?;
    let copied = threads::run(worker, &job, options).await;
    let copied = match copied {
        Ok(()) if ending == Ending::Cut => job.target.cut(worker, job.end()).await,
        copied => copied,
    };
    let copied = match (copied, sources.first(), &made) {
        // Last, so that what is written here is not recorded in them.
        (Ok(()), Some(source), made) if !wanted.is_empty() => {
            copy_bitmaps(worker, source, &job.target, made.as_ref(), &wanted).await
        }
        (copied, ..) => copied,
    };
    if copied.is_ok() {
        job.tracker.finish(Some(Phase::Finishing));
    }
    match (made, job.target.image()) {
        (Some(made), _) => made.finish(worker, &job.target, copied).await?,
        (None, Some(image)) => {
            copied?;
            image.flush(worker).await?;
        }
        (None, None) => {
            copied?;
            job.target.finish(worker).await?;
        }
    }
    let sector = target::logical_sector(sources);
    let lost_logical_sector = (sector > job.target.logical_sector()).then_some(sector);
    Ok(ConvertReport { lost_logical_sector, ..job.report() })
}
