//! Backups: a disk into a new compressed image, with O_DIRECT on both sides, in bounded memory.
//!
//! Chunks of the disk are read and written several at once, and dealt with in order: their hashes go into the manifest,
//! and every so often what lies before is made durable and noted there (a checkpoint), which is where an interrupted
//! backup can go on. Until it is complete the backup has a name that shows that it is not.

mod bitmap;
mod chunk;
mod options;
mod partial;
mod previous;

pub use options::{BackupOptions, BackupReport, Interrupted, PreviousBackup, SourceErrors};

use super::manifest::{Digest, ManifestReader, ManifestWriter, Subject};
use super::progress::{Phase, Tracker};
use crate::{Error, ErrorKind, Image, Result};
use bitmap::{Changed, Dirty};
use chunk::{Chunk, Done, do_chunk, pass_over};
use futures_util::stream::{FuturesOrdered, StreamExt};
use partial::Partial;
use zebu_storage::Worker;

/// Bytes of the disk between two checkpoints.
const CHECKPOINT: u64 = 256 << 20;
/// Bytes read at once, unless clusters are larger.
const CHUNK: u64 = 1 << 20;
/// Unreadable ranges that are reported one by one.
const MAX_REPORTED: usize = 1024;
/// Smallest memory for buffers.
const MIN_MEMORY: usize = 4 << 20;

/// Whether a range reads as zero, as far as the mapping knows.
pub(super) async fn is_known_zero(worker: &Worker, image: &Image, offset: u64, len: u64) -> Result<bool> {
    let mut at = offset;
    while at < offset + len {
        let extent = image.extent(worker, at, offset + len - at).await?;
        if !extent.is_zero() {
            return Ok(false);
        }
        at = extent.end();
    }
    Ok(true)
}

/// How memory is divided: for chunks in flight, and for the gatherer.
fn divide(options: &BackupOptions) -> Result<(u64, usize, usize)> {
    let chunk = CHUNK.max(options.cluster_size);
    let least = MIN_MEMORY.max(4 * chunk as usize);
    if options.buffer_memory < least {
        let message = format!("a backup needs at least {least} bytes of buffer memory");
        return Err(Error::new(ErrorKind::InvalidArgument, message).on(&options.target));
    }
    let gather = (options.buffer_memory / 4).min(16 << 20);
    let chunks = ((options.buffer_memory - gather) / chunk as usize).clamp(1, 32);
    Ok((chunk, chunks, gather))
}

/// Backs `source` up. A snapshot is backed up by opening its image with [`crate::OpenOptions::snapshot`].
///
/// # Errors
/// After an error (a cancellation included) there is no file of the target's name. What was written so far stays under
/// the partial name, for [`Interrupted::Resume`], unless nothing was durable yet.
pub async fn backup(worker: &Worker, source: &Image, options: &BackupOptions) -> Result<BackupReport> {
    let (chunk, at_once, gather) = divide(options)?;
    let subject = Subject { virtual_size: source.virtual_size(), cluster_size: options.cluster_size };
    if let Some(base) = &options.previous
        && base.manifest.is_none()
        && options.bitmap.is_none()
    {
        let message = "an increment needs a bitmap of the source, or the manifest of the previous backup";
        return Err(Error::new(ErrorKind::InvalidArgument, message).on(&base.image));
    }
    if options.manifest.is_some() && !options.knows_all_hashes() {
        let message =
            "the manifest of an increment needs that of the previous backup: most of the disk is not read";
        return Err(Error::new(ErrorKind::InvalidArgument, message).on(&options.target));
    }
    if let Some((file_length, disk_hash)) = partial::finish_publishing(worker, options, subject).await? {
        let total = subject.virtual_size;
        return Ok(BackupReport {
            total,
            resumed_at: total,
            file_length,
            disk_hash,
            ..BackupReport::default()
        });
    }
    let mut dirty = Dirty::begin(worker, source, options).await?;
    let mut previous = previous::open(worker, options, subject).await?;
    let mut partial = Partial::begin(worker, options, subject, gather).await?;
    let compared = async {
        let Some(dirty) = &mut dirty else { return Ok(()) };
        if let (Some(names), Some(base)) = (&options.previous, partial.image.backing()) {
            dirty.compare(worker, source, &base, names).await?;
        }
        dirty.compare_done(worker, source, &partial.image, partial.done, options).await
    }
    .await;
    if let Err(error) = compared {
        partial.leave(worker).await;
        return Err(error);
    }
    let tracker = Tracker::new(&options.control, Phase::Copying, subject.virtual_size);
    let mut report =
        BackupReport { total: subject.virtual_size, resumed_at: partial.done, ..BackupReport::default() };
    let copied = async {
        if let Some(previous) = &mut previous {
            for _ in 0..partial.done / subject.cluster_size {
                previous.next_digest()?;
            }
        }
        let dirty = dirty.as_ref();
        let mut job = Job { worker, source, options, subject, chunk, at_once, tracker: &tracker, dirty };
        job.run(&mut partial, &mut previous, &mut report).await
    }
    .await;
    if let Err(error) = copied {
        partial.leave(worker).await;
        return Err(error);
    }
    tracker.finish(Some(Phase::Finishing));
    (report.file_length, report.disk_hash) = partial.complete(worker, options).await?;
    if let Some(dirty) = &dirty {
        dirty.restart(worker, source).await?;
    }
    Ok(report)
}

struct Job<'a> {
    worker: &'a Worker,
    source: &'a Image,
    options: &'a BackupOptions,
    subject: Subject,
    chunk: u64,
    at_once: usize,
    tracker: &'a Tracker,
    dirty: Option<&'a Dirty>,
}

impl Job<'_> {
    async fn run(
        &mut self,
        partial: &mut Partial,
        previous: &mut Option<ManifestReader>,
        report: &mut BackupReport,
    ) -> Result<()> {
        let total = self.subject.virtual_size;
        let mut under_way = FuturesOrdered::new();
        let (mut next, mut done) = (partial.done, partial.done);
        let mut checkpoint = partial.done + CHECKPOINT;
        self.tracker.advance(done);
        let mut failed = None;
        loop {
            while failed.is_none() && next < total && next < checkpoint && under_way.len() < self.at_once {
                if let Err(error) = self.tracker.check() {
                    failed = Some(error);
                    break;
                }
                let span = self.dirty.and_then(|d| d.span(next, total, self.subject.cluster_size));
                let (changed, len) = match span {
                    Some((Changed::No, len)) => {
                        // What is passed over is no loss if it has to be done again.
                        checkpoint += len;
                        (Changed::No, len)
                    }
                    Some((Changed::Yes, len)) => (Changed::Yes, len.min(self.chunk)),
                    None => (Changed::Yes, self.chunk.min(total - next)),
                };
                let before = match expected(previous, self.subject, len) {
                    Ok(before) => before,
                    Err(error) => {
                        failed = Some(error);
                        break;
                    }
                };
                let on_previous = self.options.previous.is_some();
                let chunk = Chunk { offset: next, len, before, on_previous };
                let image = partial.image.clone();
                let (worker, source, options, tracker) =
                    (self.worker, self.source, self.options, self.tracker);
                under_way.push_back(async move {
                    match changed {
                        Changed::No => Ok(pass_over(chunk, options)),
                        Changed::Yes => do_chunk(worker, source, image, options, tracker, chunk).await,
                    }
                });
                next += len;
            }
            match under_way.next().await {
                Some(Ok(chunk)) if failed.is_none() => {
                    done += chunk.len;
                    match account(report, chunk, &mut partial.manifest) {
                        Ok(()) => {
                            self.tracker.advance(done - partial.done);
                            partial.done = done;
                        }
                        Err(error) => failed = Some(error),
                    }
                }
                // What is under way is waited for, so that nothing writes behind the back of what follows.
                Some(Ok(_)) => {}
                Some(Err(error)) => _ = failed.get_or_insert(error),
                None => {
                    if let Some(error) = failed {
                        return Err(error);
                    }
                    if done == total {
                        return Ok(());
                    }
                    partial.checkpoint(self.worker).await?;
                    checkpoint = done + CHECKPOINT;
                }
            }
        }
    }
}

/// What the previous backup holds in the next `len` bytes.
fn expected(
    previous: &mut Option<ManifestReader>,
    subject: Subject,
    len: u64,
) -> Result<Option<Vec<Digest>>> {
    let Some(previous) = previous else { return Ok(None) };
    (0..len.div_ceil(subject.cluster_size)).map(|_| previous.next_digest()).collect::<Result<_>>().map(Some)
}

/// Adds what became of a chunk to report and manifest.
fn account(report: &mut BackupReport, done: Done, manifest: &mut ManifestWriter) -> Result<()> {
    report.read += done.read;
    report.written += done.written;
    report.zero += done.zero;
    report.unchanged += done.unchanged;
    for range in done.unreadable {
        report.unreadable += range.len;
        if report.unreadable_ranges.len() < MAX_REPORTED {
            report.unreadable_ranges.push(range);
        }
    }
    if let Some(digests) = done.digests {
        return digests.into_iter().try_for_each(|digest| manifest.add(digest));
    }
    manifest.add_zeroes(done.clusters);
    Ok(())
}
