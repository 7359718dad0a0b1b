//! Backups: a disk into a new compressed image, with O_DIRECT on both sides, in bounded memory.
//!
//! Chunks of the disk are read and written several at once, and dealt with in order: their hashes go into the manifest,
//! and every so often what lies before is made durable and noted there (a checkpoint), which is where an interrupted
//! backup can go on. Until it is complete the backup has a name that shows that it is not.

mod bitmap;
mod chunk;
mod claim;
mod leftovers;
mod options;
mod partial;
mod previous;
mod samples;
mod streamed;
mod unreadable;

pub use options::{
    BackupIdentity, BackupOptions, BackupReport, BitmapUse, Decryption, Interrupted, PreviousBackup,
    SourceErrors,
};
pub use streamed::{StreamedBackup, backup_streamed};

use super::manifest::{Coverage, Digest, ManifestReader, ManifestWriter, Preamble, Subject};
use super::origin::Origin;
use super::pace::Pace;
use super::pipeline::InOrder;
use super::zeros::zero_run;
use crate::progress::{Phase, Tracker};
use crate::{Error, ErrorKind, Image, Remedy, Result};
use bitmap::{Changed, Dirty};
use chunk::{Chunk, Done, do_chunk, leave_out, pass_over};
use claim::{Claim, check_place};
use leftovers::Leftovers;
use partial::Partial;
use samples::Samples;
use std::ops::RangeInclusive;
use unreadable::Unreadable;
use zebu_storage::Worker;

/// Bytes of unchanged disk whose digests are taken from the previous manifest at once.
const SPAN: u64 = 64 << 20;
/// Bytes of the disk between two checkpoints.
const CHECKPOINT: u64 = 256 << 20;
/// Bytes from a look that finds data to the next look for long zero runs. Behind zeroes the next look is at once: an
/// extent may end where a table does.
const LOOK: u64 = 64 << 20;
/// Bytes read at once, unless clusters are larger.
const CHUNK: u64 = 1 << 20;
/// Bytes that a cluster of the format may have.
const CLUSTER_SIZES: RangeInclusive<u64> = 512..=2 << 20;
/// Smallest memory for buffers.
const MIN_MEMORY: usize = 4 << 20;

/// How memory is divided: for chunks in flight, and for the packer.
fn divide(options: &BackupOptions) -> Result<(u64, usize, usize)> {
    if !options.cluster_size.is_power_of_two() || !CLUSTER_SIZES.contains(&options.cluster_size) {
        let message = "Cluster size must be a power of two between 512 and 2048k";
        return Err(Error::new(ErrorKind::InvalidArgument, message).on(&options.target));
    }
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
        && (options.bitmap.is_none() || options.bitmap_use == BitmapUse::Restart)
    {
        let message = "an increment needs a bitmap of the source, or the manifest of the previous backup";
        return Err(Error::new(ErrorKind::InvalidArgument, message).on(&base.image));
    }
    if options.manifest.is_some() && !options.knows_all_hashes() {
        let message =
            "the manifest of an increment needs that of the previous backup: most of the disk is not read";
        return Err(Error::new(ErrorKind::InvalidArgument, message).on(&options.target));
    }
    let decrypted = source.is_chain_encrypted();
    if decrypted && options.decryption == Decryption::Refuse {
        let message = "the disk is encrypted, and a backup of it would hold its plain text";
        let error = Error::new(ErrorKind::InvalidArgument, message).on(source.path());
        return Err(error.with_remedy(Remedy::AllowDecryption));
    }
    previous::check_name(source, options)?;
    check_place(&options.target, options.manifest.as_deref())?;
    let (claim, left) = Claim::take(&options.target, &options.lock_wait)?;
    let total = subject.virtual_size;
    let mut unreadable = Unreadable::new(total);
    let published =
        partial::finish_publishing(worker, source, options, subject, &claim, left, &mut unreadable).await?;
    if let Some((file_length, disk_hash)) = published {
        let mut report = BackupReport {
            decrypted,
            total,
            resumed_at: total,
            file_length,
            disk_hash,
            ..BackupReport::default()
        };
        unreadable.tell(&mut report);
        return Ok(report);
    }
    let mut dirty = Dirty::begin(worker, source, options).await?;
    let (mut previous, previous_hash) = previous::open(worker, options, subject).await?.unzip();
    let coverage = if options.knows_all_hashes() { Coverage::All } else { Coverage::Changes };
    let preamble = Preamble { origin: Some(Origin::of(source)), previous: previous_hash, coverage };
    let mut partial =
        Partial::begin(worker, source, options, subject, &preamble, gather, claim, left, &mut unreadable)
            .await?;
    let mut compared_bytes = 0;
    let compared = async {
        if partial.done > 0 && options.knows_all_hashes() {
            let cancel = &options.control.cancel;
            let samples = Samples::choose(&partial.claim.manifest, partial.done, cancel)?;
            samples.compare_source(worker, source, options, &unreadable).await?;
            samples.compare_partial(worker, &partial.image, cancel).await?;
        }
        let Some(dirty) = &mut dirty else { return Ok(()) };
        if let (Some(names), Some(base)) = (&options.previous, partial.image.backing()) {
            compared_bytes = dirty.compare(worker, source, &base, names, options).await?;
        }
        let done = partial.done;
        dirty.compare_done(worker, source, &partial.image, done, options, &mut unreadable).await
    }
    .await;
    if let Err(error) = compared {
        partial.leave(worker).await;
        return Err(error);
    }
    let tracker = Tracker::new(&options.control, Phase::Copying, total);
    let pace = Pace::new(options.speed, at_once);
    let mut report = BackupReport {
        decrypted,
        total,
        resumed_at: partial.done,
        compared: compared_bytes,
        ..BackupReport::default()
    };
    let copied = async {
        if let Some(previous) = &mut previous {
            previous.pass(partial.done / subject.cluster_size)?;
        }
        let dirty = dirty.as_ref();
        let mut job =
            Job { worker, source, options, subject, chunk, at_once, tracker: &tracker, pace: &pace, dirty };
        job.run(&mut partial, &mut previous, &mut report, &mut unreadable).await?;
        if let (Some(dirty), Some(holes)) = (dirty, unreadable.bits()) {
            dirty.mark(worker, source, holes).await?;
        }
        Ok(())
    }
    .await;
    if let Err(error) = copied {
        partial.leave(worker).await;
        return Err(error);
    }
    tracker.finish(Some(Phase::Finishing));
    let backup;
    (report.file_length, report.disk_hash, backup) = partial.complete(worker, options).await?;
    if let Some(dirty) = &dirty {
        dirty.restart(worker, source, unreadable.bits(), backup).await?;
        report.kept_bitmap = unreadable.bits().map(|_| dirty.name().to_owned());
    }
    unreadable.tell(&mut report);
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
    pace: &'a Pace,
    dirty: Option<&'a Dirty>,
}

impl Job<'_> {
    async fn run(
        &mut self,
        partial: &mut Partial,
        previous: &mut Option<ManifestReader>,
        report: &mut BackupReport,
        unreadable: &mut Unreadable,
    ) -> Result<()> {
        let total = self.subject.virtual_size;
        let mut under_way = InOrder::new(self.at_once);
        let (mut next, mut done) = (partial.done, partial.done);
        let mut checkpoint = partial.done + CHECKPOINT;
        let mut looked_to = next;
        // Something was, since the last checkpoint.
        let mut copied = false;
        self.tracker.advance(done);
        let mut failed = None;
        loop {
            while failed.is_none() && next < total && next < checkpoint && under_way.has_room() {
                if let Err(error) = self.tracker.check() {
                    failed = Some(error);
                    break;
                }
                let (mut part, mut len) = self.part(next, &partial.leftovers);
                if next >= looked_to {
                    let (zero, what) = match previous {
                        Some(previous) => {
                            let zero = self.zeroes_as_before(next, &partial.leftovers, previous).await;
                            (zero, Part::ZeroAsBefore)
                        }
                        None => (self.zeroes_to_leave_out(next, &partial.leftovers).await, Part::Zero),
                    };
                    looked_to = next + if zero > 0 { zero } else { LOOK };
                    if zero > 0 {
                        (part, len) = (what, zero);
                    }
                }
                match part {
                    Part::Copied => copied = true,
                    Part::Zero | Part::ZeroAsBefore if copied => checkpoint = checkpoint.max(next + len),
                    // What is passed over is no loss if it has to be done again.
                    Part::Unchanged | Part::Zero | Part::ZeroAsBefore => checkpoint += len,
                }
                let before = match (part, previous.as_mut()) {
                    (Part::ZeroAsBefore, Some(previous)) => {
                        previous.pass_zeroes(len / self.subject.cluster_size).map(|()| None)
                    }
                    _ => expected(previous, self.subject, len),
                };
                let before = match before {
                    Ok(before) => before,
                    Err(error) => {
                        failed = Some(error);
                        break;
                    }
                };
                let on_previous = self.options.previous.is_some();
                let leftovers = partial.leftovers.clone();
                let chunk = Chunk { offset: next, len, before, on_previous, leftovers };
                let image = partial.image.clone();
                let (worker, source, options) = (self.worker, self.source, self.options);
                let (tracker, pace) = (self.tracker, self.pace);
                under_way.begin(async move {
                    match part {
                        Part::Unchanged | Part::ZeroAsBefore => Ok(pass_over(chunk, options)),
                        Part::Zero => Ok(leave_out(&chunk, options)),
                        Part::Copied => {
                            do_chunk(worker, source, image, options, (tracker, pace), chunk).await
                        }
                    }
                });
                next += len;
            }
            match under_way.next().await {
                Some(Ok(chunk)) if failed.is_none() => {
                    done += chunk.len;
                    match account(report, unreadable, chunk, &mut partial.manifest) {
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
                    copied = false;
                }
            }
        }
    }
}

impl Job<'_> {
    /// Bytes from `at` on, in whole chunks, that are known to be zero and need not be written.
    async fn zeroes_to_leave_out(&self, at: u64, leftovers: &Leftovers) -> u64 {
        let end = leftovers.next(at).map_or(self.subject.virtual_size, |run| run.start);
        if self.options.previous.is_some() || end <= at {
            return 0;
        }
        zero_run(self.worker, self.source, at, end).await / self.chunk * self.chunk
    }

    /// How much of unchanged disk is passed over at once: all, where no digests are kept of it.
    fn pass_at_once(&self, len: u64) -> u64 {
        if self.options.knows_all_hashes() { len.min(SPAN) } else { len }
    }

    /// The same of an increment, where they are zero in the previous backup as well.
    async fn zeroes_as_before(&self, at: u64, leftovers: &Leftovers, previous: &ManifestReader) -> u64 {
        let expected = previous.zeroes_ahead().saturating_mul(self.subject.cluster_size);
        let end = leftovers.next(at).map_or(self.subject.virtual_size, |run| run.start);
        let end = end.min(at.saturating_add(expected));
        if end <= at {
            0
        } else {
            zero_run(self.worker, self.source, at, end).await / self.chunk * self.chunk
        }
    }

    /// The part that is dealt with at once from `at` on, and its bytes.
    fn part(&self, at: u64, leftovers: &Leftovers) -> (Part, u64) {
        let total = self.subject.virtual_size;
        match self.dirty.and_then(|dirty| dirty.span(at, total, self.subject.cluster_size)) {
            None => (Part::Copied, self.chunk.min(total - at)),
            Some((Changed::Yes, len)) => (Part::Copied, len.min(self.chunk)),
            // What is left over would hide the previous backup there.
            Some((Changed::No, len)) => match (self.pass_at_once(len), leftovers.next(at)) {
                (len, Some(run)) if run.start <= at => (Part::Copied, len.min(run.end - at).min(self.chunk)),
                (len, Some(run)) => (Part::Unchanged, len.min(run.start - at)),
                (len, None) => (Part::Unchanged, len),
            },
        }
    }
}

/// The treatment of a part of the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Copied,
    /// The previous backup has it.
    Unchanged,
    /// It is known to be zero, and so is the backup where nothing is written.
    Zero,
    /// It is known to be zero, and so is the previous backup.
    ZeroAsBefore,
}

/// The digests of the previous backup for the next `len` bytes.
fn expected(
    previous: &mut Option<ManifestReader>,
    subject: Subject,
    len: u64,
) -> Result<Option<Vec<Digest>>> {
    let Some(previous) = previous else { return Ok(None) };
    (0..len.div_ceil(subject.cluster_size)).map(|_| previous.next_digest()).collect::<Result<_>>().map(Some)
}

/// Adds what became of a chunk to report and manifest.
fn account(
    report: &mut BackupReport,
    unreadable: &mut Unreadable,
    done: Done,
    manifest: &mut ManifestWriter,
) -> Result<()> {
    report.read += done.read;
    report.written += done.written;
    report.zero += done.zero;
    report.unchanged += done.unchanged;
    for range in done.unreadable {
        manifest.add_unreadable(range.offset, range.len)?;
        unreadable.note(range);
    }
    if let Some(digests) = done.digests {
        return digests.into_iter().try_for_each(|digest| manifest.add(digest));
    }
    manifest.add_zeroes(done.clusters)
}
