//! The backup that an increment stands on: its manifest must be whole, of a disk like the source, and its own.

use super::options::BackupOptions;
use crate::jobs::manifest::{Digest, ManifestReader, Subject, hash_of_whole};
use crate::progress::Cancel;
use crate::same_file::FilePlace;
use crate::{Error, ErrorKind, Format, Image, OpenOptions, Result};
use std::path::Path;
use zebu_storage::{FileId, Worker};

/// Clusters of the previous backup that are compared with its manifest. To read all of them would take as long as a
/// full backup.
const SAMPLES: u64 = 256;

/// Refuses a previous backup that has one of `files` in common with the source's own image: the increment would change
/// with the disk. What the source stands on is not written, and may be the previous backup.
pub(super) fn check_independent(
    source: &Image,
    files: impl IntoIterator<Item = FileId>,
    options: &BackupOptions,
) -> Result<()> {
    let Some(base) = &options.previous else { return Ok(()) };
    let node = &source.0;
    let is_own = |id| {
        let files = [node.image_file(), node.data_file()].into_iter().chain(node.other_files());
        files.into_iter().any(|file| file.id() == id)
    };
    if !files.into_iter().any(is_own) {
        return Ok(());
    }
    let message = format!(
        "it is, or stands on, a file of the source '{}', with which the increment would change: name another previous \
         backup",
        source.path().display()
    );
    Err(Error::new(ErrorKind::InvalidArgument, message).on(&base.image))
}

/// The same by its name alone, before anything is read.
pub(super) fn check_name(source: &Image, options: &BackupOptions) -> Result<()> {
    match options.previous.as_ref().map(|base| FilePlace::of(&base.image)) {
        Some(FilePlace::File(id)) => check_independent(source, [id], options),
        Some(FilePlace::Nothing(_)) | None => Ok(()),
    }
}

/// Opens the manifest of the previous backup, if there is one; returns also its hash.
///
/// # Errors
/// The manifest is damaged, of another disk, or does not say what the previous backup holds (some clusters are looked
/// at, evenly spread).
pub(super) async fn open(
    worker: &Worker,
    options: &BackupOptions,
    subject: Subject,
) -> Result<Option<(ManifestReader, [u8; 32])>> {
    let Some(base) = &options.previous else { return Ok(None) };
    let Some(path) = base.manifest.as_deref() else { return Ok(None) };
    let manifest = path.to_owned();
    let unfit = move |found: Subject| {
        (found != subject).then(|| {
            format!(
                "the manifest does not fit: it is of a disk of {} bytes in clusters of {}, the source has {} bytes \
                 and the backup clusters of {}; make a full backup",
                found.virtual_size, found.cluster_size, subject.virtual_size, subject.cluster_size
            )
        })
    };
    let cancel = options.control.cancel.clone();
    let hash = worker.run_blocking(move || hash_of_whole(&manifest, &cancel, unfit)).await?;
    let mut below = base.given_below().into_iter();
    let open = OpenOptions {
        format: Some(Format::Qcow2),
        cache: options.cache,
        refs: options.refs.clone(),
        remote: base.remote.clone(),
        backing: below.next().flatten(),
        backing_below: below.collect(),
        ..OpenOptions::default()
    };
    let image = Image::open(worker, &base.image, &open).await?;
    let compared = compare(worker, &image, path, subject, &options.control.cancel).await;
    let closed = image.close(worker).await;
    compared?;
    closed?;
    ManifestReader::open(path, &options.control.cancel).map(|reader| Some((reader, hash)))
}

async fn compare(
    worker: &Worker,
    image: &Image,
    path: &Path,
    subject: Subject,
    cancel: &Cancel,
) -> Result<()> {
    let unfit = |why: String| Err(Error::new(ErrorKind::InvalidArgument, why).on(path));
    if image.virtual_size() != subject.virtual_size {
        return unfit(format!(
            "the manifest is not that of '{}', whose disk has {} bytes",
            image.path().display(),
            image.virtual_size()
        ));
    }
    let mut manifest = ManifestReader::open(path, cancel)?;
    let step = (subject.clusters() / SAMPLES).max(1);
    let mut passed = 0;
    for cluster in (0..subject.clusters()).step_by(usize::try_from(step).unwrap_or(usize::MAX)) {
        cancel.check()?;
        manifest.pass(cluster - passed)?;
        let expected = manifest.next_digest()?;
        passed = cluster + 1;
        let offset = cluster * subject.cluster_size;
        let len = subject.cluster_size.min(subject.virtual_size - offset) as usize;
        let (result, bufs) = image.read_source(worker, offset, worker.buffer(len).into()).await;
        result?;
        let mut bytes = vec![0; len];
        bufs.copy_to(0, &mut bytes);
        if Digest::of(&bytes) != expected {
            return unfit(format!(
                "the manifest is not that of '{}', which holds something else at guest offset {offset}",
                image.path().display()
            ));
        }
    }
    Ok(())
}
