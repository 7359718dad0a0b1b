//! A backup that is not complete: its files beside the target, and how they get their names.

use super::options::{BackupOptions, Interrupted};
use crate::check::{CheckOptions, Repair, check};
use crate::jobs::manifest::{ManifestWriter, Subject, check_whole, has_checkpoint};
use crate::jobs::staging::{NewFiles, directory_of, from_io, publish};
use crate::jobs::verify::{VerifyOptions, verify};
use crate::{Access, CompressOptions, CreateOptions, Error, ErrorKind, Format, Image, OpenOptions, Result};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use zebu_storage::Worker;

/// See the module.
pub(super) struct Partial {
    pub(super) image: Image,
    pub(super) manifest: ManifestWriter,
    /// Bytes of the disk, from its start, that are dealt with.
    pub(super) done: u64,
    image_path: PathBuf,
    manifest_path: PathBuf,
    /// Something is there to go on from.
    resumable: bool,
}

/// `.NAME.zebu-partial` and the manifest that belongs to it.
fn names(target: &Path) -> Result<(PathBuf, PathBuf)> {
    let Some(name) = target.file_name() else {
        return Err(Error::new(ErrorKind::InvalidArgument, "the backup needs a file name").on(target));
    };
    let mut partial = OsString::from(".");
    partial.push(name);
    partial.push(".zebu-partial");
    let mut manifest = partial.clone();
    manifest.push(".manifest");
    let directory = directory_of(target);
    Ok((directory.join(partial), directory.join(manifest)))
}

fn exists(path: &Path) -> bool {
    std::fs::symlink_metadata(path).is_ok()
}

impl Partial {
    /// Makes the files, or takes those that an interrupted backup has left.
    pub(super) async fn begin(
        worker: &Worker,
        options: &BackupOptions,
        subject: Subject,
        gather_memory: usize,
    ) -> Result<Self> {
        for path in std::iter::once(&options.target).chain(&options.manifest) {
            if exists(path) {
                let message = "exists already: remove it first, or give another name";
                return Err(Error::new(ErrorKind::InvalidArgument, message).on(path));
            }
        }
        let (image_path, manifest_path) = names(&options.target)?;
        // Without a checkpoint there is nothing to go on from.
        let resumed = options.interrupted == Interrupted::Resume
            && exists(&image_path)
            && exists(&manifest_path)
            && has_checkpoint(&manifest_path, subject)?;
        let open = OpenOptions {
            format: Some(Format::Qcow2),
            access: Access::ReadWrite,
            cache: options.cache,
            refs: options.refs.clone(),
            backing: match &options.previous {
                Some(previous) => Some((absolute(&previous.image)?, Some(Format::Qcow2))),
                None => None,
            },
            compress: CompressOptions { gather_memory, ..options.compress.clone() },
            ..OpenOptions::default()
        };
        let backing = match &options.previous {
            Some(previous) => Some((backing_name(&options.target, &previous.image)?, Format::Qcow2)),
            None => None,
        };
        // What is made here goes again if the rest fails; another backup to the same target keeps its files.
        let mut made = NewFiles(Vec::new());
        if resumed {
            // What was under way when it was interrupted may have left clusters behind that nothing refers to.
            let repair =
                CheckOptions { repair: Repair::Leaks, cache: options.cache, ..CheckOptions::default() };
            check(worker, &image_path, &repair).await?;
        } else {
            let create = CreateOptions {
                size: Some(subject.virtual_size),
                cluster_size: options.cluster_size,
                compression: options.compression,
                cache: options.cache,
                backing: backing.clone(),
                ..CreateOptions::default()
            };
            // A manifest of an earlier attempt must never be found beside the image of this one.
            if exists(&manifest_path) {
                remove_durably(&manifest_path)?;
            }
            if exists(&image_path) {
                Image::create(worker, &image_path, &create).await?;
                made.0.push(image_path.clone());
            } else {
                made.0.push(image_path.clone());
                Image::create(worker, &image_path, &create).await?;
            }
            made.0.push(manifest_path.clone());
        }
        let image = Image::open(worker, &image_path, &open).await?;
        let recorded = image.info()?.backing_file;
        let message =
            if image.virtual_size() != subject.virtual_size || image.cluster_size() != subject.cluster_size {
                Some("the interrupted backup is of another disk, or has other clusters: leave --resume out")
            } else if recorded != backing.map(|(name, _)| name) {
                Some("the interrupted backup does not stand on the same previous backup: leave --resume out")
            } else {
                None
            };
        if let Some(message) = message {
            let _ = image.close(worker).await;
            return Err(Error::new(ErrorKind::InvalidArgument, message).on(&image_path));
        }
        let (manifest, done) = if resumed {
            ManifestWriter::resume(&manifest_path, subject)?
        } else {
            (ManifestWriter::begin(&manifest_path, subject)?, 0)
        };
        made.0.clear();
        Ok(Self { image, manifest, done, image_path, manifest_path, resumable: done > 0 })
    }

    /// Makes what is done durable, and notes it.
    pub(super) async fn checkpoint(&mut self, worker: &Worker) -> Result<()> {
        self.image.flush(worker).await?;
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
            let _ = std::fs::remove_file(&self.image_path);
            let _ = std::fs::remove_file(&self.manifest_path);
        }
    }

    /// Gives the complete backup its name; returns the length of its file and the hash of the disk.
    pub(super) async fn complete(
        mut self,
        worker: &Worker,
        options: &BackupOptions,
    ) -> Result<(u64, Option<String>)> {
        let closed = self.image.close(worker).await;
        let hash = closed.and_then(|()| self.manifest.finish()).inspect_err(|_| self.give_up())?;
        let length = std::fs::metadata(&self.image_path).map_or(0, |found| found.len());
        let (partial, target) = (self.image_path.clone(), options.target.clone());
        worker.run_blocking(move || publish(&partial, &target, None)).await?;
        match &options.manifest {
            Some(name) => {
                let (partial, name) = (self.manifest_path, name.clone());
                worker.run_blocking(move || publish(&partial, &name, None)).await?;
            }
            None => std::fs::remove_file(&self.manifest_path)
                .map_err(|e| from_io(&self.manifest_path, "can't remove the file", &e))?,
        }
        Ok((length, options.knows_all_hashes().then_some(hash)))
    }
}

/// Gives the manifest of a backup its name that was interrupted after the image had got its own: the length of the
/// image's file and the hash of the disk. `None`: that is not what is there.
///
/// # Errors
/// The image is not what the manifest says.
pub(super) async fn finish_publishing(
    worker: &Worker,
    options: &BackupOptions,
    subject: Subject,
) -> Result<Option<(u64, Option<String>)>> {
    let (image_path, manifest_path) = names(&options.target)?;
    let Some(name) = &options.manifest else { return Ok(None) };
    let is_that = options.interrupted == Interrupted::Resume
        && exists(&options.target)
        && exists(&manifest_path)
        && !exists(&image_path)
        && !exists(name)
        // With one, more is to be done than to give a name.
        && options.bitmap.is_none();
    if !is_that {
        return Ok(None);
    }
    let checked = manifest_path.clone();
    let unfit = move |found: Subject| (found != subject).then(|| "it is of another disk".to_owned());
    worker.run_blocking(move || check_whole(&checked, unfit)).await?;
    let open = OpenOptions {
        format: Some(Format::Qcow2),
        cache: options.cache,
        refs: options.refs.clone(),
        ..OpenOptions::default()
    };
    let image = Image::open(worker, &options.target, &open).await?;
    let verify_options = VerifyOptions { manifest: Some(manifest_path.clone()), ..VerifyOptions::default() };
    let verified = verify(worker, &image, &verify_options).await;
    let closed = image.close(worker).await;
    let hash = verified?.disk_hash;
    closed?;
    if hash.is_none() {
        let message = "the image is not what the manifest of the interrupted backup says: remove both";
        return Err(Error::new(ErrorKind::Corrupt, message).on(&options.target));
    }
    let length = std::fs::metadata(&options.target).map_or(0, |found| found.len());
    let name = name.clone();
    worker.run_blocking(move || publish(&manifest_path, &name, None)).await?;
    Ok(Some((length, hash)))
}

/// Removes a file so that it does not come back after a power failure.
fn remove_durably(path: &Path) -> Result<()> {
    let directory = directory_of(path);
    std::fs::remove_file(path)
        .and_then(|()| std::fs::File::open(directory)?.sync_all())
        .map_err(|e| from_io(path, "can't remove the file", &e))
}

fn absolute(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path).map_err(|e| from_io(path, "can't find the directory", &e))
}

/// The name by which an increment finds what it stands on: the file name alone if both lie in one directory.
fn backing_name(target: &Path, previous: &Path) -> Result<String> {
    let directory = |path: &Path| std::fs::canonicalize(directory_of(path));
    let beside = matches!((directory(target), directory(previous)), (Ok(a), Ok(b)) if a == b);
    let name = match previous.file_name() {
        Some(name) if beside => PathBuf::from(name),
        _ => absolute(previous)?,
    };
    name.into_os_string().into_string().map_err(|_| {
        Error::new(ErrorKind::InvalidArgument, "the name of the previous backup is not UTF-8").on(previous)
    })
}
