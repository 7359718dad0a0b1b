//! Copies images into a new or an existing one, whatever the formats.

mod bitmaps;
mod compressed;
mod copy;
mod ending;
mod in_order;
mod job;
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
mod unreadable;
mod walk;

pub use options::{
    ConvertOptions, ConvertReport, ConvertTarget, CopyBitmaps, CopyMode, NewTarget, ReadErrors, SkippedRange,
    StreamedTarget, TargetClusters, TargetContent,
};
pub use source_end::SourceEnd;

use crate::progress::Phase;
use crate::{Error, ErrorKind, Format, Image, Preallocation, Result, Shrink};
use ending::Ending;
use job::{Job, Part};
use sink::Sink;
use sizing::Sizing;
use source_conflict::check_open_target;
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

/// Copies `sources`, one behind the other, into `target`.
///
/// Ranges that the sources' mappings know to be zero are neither read nor scanned. Several pieces of work are in
/// flight at once, and are written in the order in which their reads complete.
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
            let (sink, content, made) = target::make(worker, sources, *new, total, &options.control).await?;
            (sink, content, Some(made))
        }
        ConvertTarget::Stream(new) => {
            (target::begin_stream(*new, total, options.clusters)?, TargetContent::Zero, None)
        }
        ConvertTarget::Existing { image, content } => {
            check_open_target(sources, &image)?;
            let content = content.on(&image);
            (Sink::Image(image), content, None)
        }
    };
    let job = Job::new(parts, sink, content, options, sizing, compressed, copy)?;
    let copied = threads::run(worker, &job, options).await;
    let copied = match (copied, sources.first(), job.target.image()) {
        // Last, so that what is written here is not recorded in them.
        (Ok(()), Some(source), Some(image)) => bitmaps::copy(worker, source, image, &wanted).await,
        (copied, ..) => copied,
    };
    let copied = match (copied, job.target.image()) {
        (Ok(()), Some(image)) if ending == Ending::Cut => {
            image.resize(worker, job.end(), Shrink::Allow, Preallocation::Off).await
        }
        (copied, _) => copied,
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
