//! A backup that is not complete: its files beside the target, and how they get their names.

use super::claim::{Claim, Left, exists};
use super::leftovers::Leftovers;
use super::options::{BackupIdentity, BackupOptions, Interrupted, PreviousBackup};
use super::previous::check_independent;
use super::samples::Samples;
use super::unreadable::Unreadable;
use crate::Remedy;
use crate::backups::new_backup_id;
use crate::check::{CheckOptions, Repair, check};
use crate::jobs::backing_name::backing_name;
use crate::jobs::convert::SkippedRange;
use crate::jobs::manifest::{
    ManifestWriter, Preamble, Subject, check_whole, is_ended, last_checkpoint, preamble_of, unreadable_of,
};
use crate::jobs::origin::Origin;
use crate::jobs::staging::{from_io, publish, sync_files};
use crate::jobs::verify::{VerifyOptions, verify};
use crate::new_files::NewFiles;
use crate::{
    Access, CacheMode, CompressOptions, Compression, CreateOptions, Error, ErrorKind, Format, Image,
    OpenOptions, Result,
};
use std::ops::Range;
use std::path::{Path, PathBuf};
use zebu_qcow2::BackupId;
use zebu_storage::Worker;

/// An incomplete backup that is worked on.
pub(super) struct Partial {
    pub(super) image: Image,
    pub(super) manifest: ManifestWriter,
    /// Bytes of the disk, from its start, that are dealt with.
    pub(super) done: u64,
    pub(super) leftovers: Leftovers,
    pub(super) claim: Claim,
    image_syncs: ImageSyncs,
    /// Something is there to go on from.
    resumable: bool,
}

/// Whether a flush of the partial image makes its file durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ImageSyncs {
    AtFlush,
    Never,
}

/// A range that an earlier try left out, as far as that is known.
fn skipped_before(source: &Image, range: Range<u64>) -> SkippedRange {
    let (offset, len) = (range.start, range.end - range.start);
    let error = Error::new(ErrorKind::Io, "it could not be read before the backup was interrupted");
    SkippedRange { offset, len, error: error.on(source.path()).at_guest(offset) }
}

/// The error for a name that is taken. A complete backup of which only the rest was interrupted is to be kept.
fn taken(path: &Path, options: &BackupOptions, claim: &Claim, left: Left) -> Error {
    let is_complete = path == options.target
        && left == Left::Manifest
        && !exists(&claim.image)
        && is_ended(&claim.manifest);
    let manifest = claim.manifest.display();
    let message = match &options.bitmap {
        _ if !is_complete => "exists already: remove it first, or give another name".to_owned(),
        None => format!(
            "the backup is complete, but it was interrupted before '{manifest}' was dealt with: resume it, or keep it \
             and give another name"
        ),
        Some(bitmap) => format!(
            "the backup is complete, but it was interrupted before bitmap '{bitmap}' was restarted: keep it, remove \
             '{manifest}', and give the next backup another name and the same previous one"
        ),
    };
    Error::new(ErrorKind::InvalidArgument, message).on(path)
}

impl Partial {
    /// Makes the files, or takes those that an interrupted backup has left. What that could not read is noted.
    #[expect(clippy::too_many_arguments, reason = "what a backup is made of")]
    pub(super) async fn begin(
        worker: &Worker,
        source: &Image,
        options: &BackupOptions,
        subject: Subject,
        preamble: &Preamble,
        gather_memory: usize,
        claim: Claim,
        left: Left,
        unreadable: &mut Unreadable,
    ) -> Result<Self> {
        for path in std::iter::once(&options.target).chain(&options.manifest) {
            if exists(path) {
                return Err(taken(path, options, &claim, left));
            }
        }
        let (image_path, manifest_path) = (&claim.image, &claim.manifest);
        // Without a checkpoint there is nothing to go on from.
        let resumes = options.interrupted == Interrupted::Resume && left == Left::Manifest;
        let checkpoint =
            if resumes && exists(image_path) { last_checkpoint(manifest_path, subject)? } else { None };
        let checkpoint = match checkpoint {
            Some((done, begun)) => {
                check_preamble(&begun, preamble, source, image_path).map(|()| Some(done))?
            }
            None => None,
        };
        let open = OpenOptions {
            format: Some(Format::Qcow2),
            access: Access::ReadWrite,
            cache: options.cache,
            refs: options.refs.clone(),
            lock_wait: options.lock_wait.clone(),
            remote: options.previous.as_ref().map(|previous| previous.remote.clone()).unwrap_or_default(),
            backing: match &options.previous {
                Some(previous) => Some((place(previous)?, Some(Format::Qcow2))),
                None => None,
            },
            backing_below: options.previous.iter().flat_map(PreviousBackup::given_below).collect(),
            compress: CompressOptions { gather_memory, ..options.compress.clone() },
            ..OpenOptions::default()
        };
        let backing = match &options.previous {
            Some(PreviousBackup { name: Some(name), .. }) => Some((name.clone(), Format::Qcow2)),
            Some(previous) => Some((backing_name(&previous.image, &options.target)?, Format::Qcow2)),
            None => None,
        };
        // What is made here goes again if the rest fails; another backup to the same target keeps its files.
        let mut made = NewFiles::default();
        let mut leftovers = Leftovers::default();
        if let Some(done) = checkpoint {
            // What was under way when it was interrupted may have left clusters behind that nothing refers to.
            let repair = CheckOptions {
                repair: Repair::Leaks,
                cache: options.cache,
                lock_wait: options.lock_wait.clone(),
                ..CheckOptions::default()
            };
            let found = check(worker, image_path, &repair).await?;
            if found.counts.corruptions > 0 || found.counts.check_errors > 0 {
                let first =
                    found.findings.first().map_or_else(String::new, |finding| format!(" ({finding})"));
                let message = format!("the partial image is damaged{first}: begin the backup anew");
                return Err(Error::new(ErrorKind::Corrupt, message)
                    .on(image_path)
                    .with_remedy(Remedy::RestartBackup));
            }
            leftovers = Leftovers::find(worker, image_path, options, subject, done).await?;
        } else {
            let create = CreateOptions {
                size: Some(subject.virtual_size),
                cluster_size: options.cluster_size,
                compression: options.compression,
                cache: options.cache,
                lock_wait: options.lock_wait.clone(),
                backing: backing.clone(),
                ..CreateOptions::default()
            };
            // A manifest of an earlier attempt must never be found beside the image of this one.
            claim.forget_earlier(&options.lock_wait)?;
            if exists(image_path) {
                Image::create(worker, image_path, &create).await?;
                made.add(image_path);
            } else {
                made.add(image_path);
                Image::create(worker, image_path, &create).await?;
            }
            made.add(manifest_path);
        }
        let image = Image::open(worker, image_path, &open).await?;
        let fits = match check_image(&image, subject, backing, options.compression) {
            Ok(()) => check_independent(source, image.file_ids(), options),
            Err(error) => Err(error),
        };
        if let Err(error) = fits {
            let _ = image.close(worker).await;
            return Err(error);
        }
        let (manifest, done) = if checkpoint.is_some() {
            let note = |range| unreadable.note(skipped_before(source, range));
            ManifestWriter::resume(manifest_path, subject, preamble, &options.control.cancel, note)?
        } else {
            (ManifestWriter::begin(manifest_path, subject, preamble)?, 0)
        };
        made.keep();
        let image_syncs =
            if options.cache == CacheMode::Unsafe { ImageSyncs::Never } else { ImageSyncs::AtFlush };
        Ok(Self { image, manifest, done, leftovers, claim, image_syncs, resumable: done > 0 })
    }

    /// Makes what is done durable, and notes it.
    pub(super) async fn checkpoint(&mut self, worker: &Worker) -> Result<()> {
        self.image.flush(worker).await?;
        if self.image_syncs == ImageSyncs::Never {
            let image = self.claim.image.clone();
            worker.run_blocking(move || sync_files(&image, None)).await?;
        }
        self.manifest.checkpoint(self.done)?;
        self.resumable = true;
        Ok(())
    }

    /// Ends an incomplete backup: it stays, to be resumed, if there is anything to go on from.
    pub(super) async fn leave(mut self, worker: &Worker) {
        // The first error is what the caller is told; what fails here only means that less can be resumed.
        if self.done > 0 {
            let _ = self.checkpoint(worker).await;
        }
        let _ = self.image.close(worker).await;
        self.give_up();
    }

    /// Removes what nothing can go on from.
    fn give_up(&self) {
        if !self.resumable {
            let _ = std::fs::remove_file(&self.claim.image);
            let _ = std::fs::remove_file(&self.claim.manifest);
        }
    }

    /// Gives the complete backup its name; returns the length of its file, the hash of the disk, and the id by which a bitmap knows
    /// it.
    pub(super) async fn complete(
        mut self,
        worker: &Worker,
        options: &BackupOptions,
    ) -> Result<(u64, Option<String>, Option<BackupId>)> {
        let id = match (options.identity, &options.bitmap) {
            (BackupIdentity::WithBitmap, None) => None,
            (BackupIdentity::WithBitmap | BackupIdentity::New, _) => Some(new_backup_id()?),
            (BackupIdentity::Same(id), _) => Some(id),
        };
        let marked = match id {
            Some(id) => self.image.mark_as_backup(worker, id, self.image.footing()).await,
            None => Ok(None),
        };
        let closed = self.image.close(worker).await;
        let closed = marked.and_then(|backup| closed.map(|()| backup));
        let (hash, backup) = closed
            .and_then(|backup| Ok((self.manifest.finish()?, backup)))
            .inspect_err(|_| self.give_up())?;
        let length = std::fs::metadata(&self.claim.image).map_or(0, |found| found.len());
        let (partial, target) = (self.claim.image.clone(), options.target.clone());
        worker.run_blocking(move || publish(&partial, &target)).await?;
        dispose_of_manifest(worker, options, &self.claim).await?;
        Ok((length, options.knows_all_hashes().then_some(hash), backup))
    }
}

/// Gives the manifest of a complete backup its name, or removes it if it is to have none.
async fn dispose_of_manifest(worker: &Worker, options: &BackupOptions, claim: &Claim) -> Result<()> {
    let partial = claim.manifest.clone();
    match options.manifest.clone() {
        Some(name) => worker.run_blocking(move || publish(&partial, &name)).await,
        None => std::fs::remove_file(&partial).map_err(|e| from_io(&partial, "can't remove the file", &e)),
    }
}

/// Ends a backup that was interrupted after the image had got its name: the length of the image's file and the hash of
/// the disk. `None`: that is not what is there.
///
/// # Errors
/// The image is not what the manifest says.
pub(super) async fn finish_publishing(
    worker: &Worker,
    source: &Image,
    options: &BackupOptions,
    subject: Subject,
    claim: &Claim,
    left: Left,
    unreadable: &mut Unreadable,
) -> Result<Option<(u64, Option<String>)>> {
    let is_that = options.interrupted == Interrupted::Resume
        && exists(&options.target)
        && left == Left::Manifest
        && !exists(&claim.image)
        && match &options.manifest {
            Some(name) => !exists(name),
            None => is_ended(&claim.manifest),
        }
        // With one, more is to be done.
        && options.bitmap.is_none();
    if !is_that {
        return Ok(None);
    }
    let (manifest_path, checked) = (claim.manifest.clone(), claim.manifest.clone());
    let unfit = move |found: Subject| (found != subject).then(|| "it is of another disk".to_owned());
    let cancel = options.control.cancel.clone();
    worker.run_blocking(move || check_whole(&checked, &cancel, unfit)).await?;
    if let Some(origin) = preamble_of(&manifest_path)?.origin {
        origin.check(&Origin::of(source), source.path())?;
    }
    let open = OpenOptions {
        format: Some(Format::Qcow2),
        cache: options.cache,
        refs: options.refs.clone(),
        lock_wait: options.lock_wait.clone(),
        ..OpenOptions::default()
    };
    let image = Image::open(worker, &options.target, &open).await?;
    let verify_options = VerifyOptions {
        manifest: Some(manifest_path.clone()),
        control: options.control.clone(),
        ..VerifyOptions::default()
    };
    let verified = verify(worker, &image, &verify_options).await;
    let closed = image.close(worker).await;
    let hash = verified?.disk_hash;
    closed?;
    if hash.is_none() {
        let message = "the image is not what the manifest of the interrupted backup says: remove both";
        return Err(Error::new(ErrorKind::Corrupt, message).on(&options.target));
    }
    unreadable_of(&manifest_path, |range| unreadable.note(skipped_before(source, range)))?;
    let samples = Samples::choose(&manifest_path, subject.virtual_size, &options.control.cancel)?;
    samples.compare_source(worker, source, options, unreadable).await?;
    let length = std::fs::metadata(&options.target).map_or(0, |found| found.len());
    dispose_of_manifest(worker, options, claim).await?;
    Ok(Some((length, hash)))
}

/// Refuses to go on with a partial image that is not as the options ask.
fn check_image(
    image: &Image,
    subject: Subject,
    backing: Option<(String, Format)>,
    compression: Compression,
) -> Result<()> {
    let info = image.info()?;
    let packed = info.qcow2.map_or(compression, |qcow2| qcow2.compression);
    let message = if image.virtual_size() != subject.virtual_size
        || image.cluster_size() != subject.cluster_size
    {
        "the interrupted backup is of another disk, or has other clusters: begin it anew".to_owned()
    } else if info.backing_file != backing.map(|(name, _)| name) {
        "the interrupted backup does not stand on the same previous backup: begin it anew".to_owned()
    } else if packed != compression {
        let (packed, asked) = (packed.name(), compression.name());
        format!(
            "the interrupted backup is compressed with {packed}, not with {asked}: ask for {packed}, or begin it anew"
        )
    } else {
        return Ok(());
    };
    Err(Error::new(ErrorKind::InvalidArgument, message).on(image.path()).with_remedy(Remedy::RestartBackup))
}

/// Refuses to go on with what `begun` is of, if that is not what is backed up now; `partial` is its image.
fn check_preamble(begun: &Preamble, now: &Preamble, source: &Image, partial: &Path) -> Result<()> {
    let refuse = |path: &Path, message: &str| {
        Err(Error::new(ErrorKind::InvalidArgument, message).on(path).with_remedy(Remedy::RestartBackup))
    };
    if let (Some(origin), Some(now_origin)) = (&begun.origin, &now.origin) {
        origin.check(now_origin, source.path())?;
        if begun.coverage != now.coverage {
            let message = "the interrupted backup was made with another bitmap, or beside another manifest: give \
                           the same ones, or begin it anew";
            return refuse(source.path(), message);
        }
    }
    match (begun.previous, now.previous) {
        (begun, now) if begun == now => Ok(()),
        (None, _) => refuse(
            partial,
            "the interrupted backup does not say that it stands on this previous backup: begin it anew",
        ),
        (Some(_), _) => refuse(
            partial,
            "the interrupted backup stands on another previous backup, with another manifest: name that one, or begin \
             it anew",
        ),
    }
}

/// The path by which the previous backup is opened, whatever the directory of the one above.
fn place(previous: &PreviousBackup) -> Result<PathBuf> {
    match previous.below {
        // Its opener knows it by this name.
        Some(_) => Ok(previous.image.clone()),
        None => absolute(&previous.image),
    }
}

fn absolute(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path).map_err(|e| from_io(path, "can't find the directory", &e))
}
