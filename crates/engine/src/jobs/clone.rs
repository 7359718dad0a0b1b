//! A writable copy of an image, at once.

use super::backing_name::backing_name;
use super::staging::{expect_copies, from_io, publish, reserve_temporary_name};
use crate::new_files::NewFiles;
use crate::{
    CacheMode, CreateOptions, Error, ErrorKind, Format, Image, Keys, NewEncryption, OpenOptions, RefPolicy,
    Remote, Result,
};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use zebu_storage::{Access, Create, File, FileKind, IoErrorKind, LockMode, OpenFlags, Worker};

/// Which way is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum CloneMode {
    /// A reflink where the file system can and the image stands alone, else an overlay.
    #[default]
    Auto,
    /// A reflink or an error.
    Reflink,
    /// An overlay.
    Overlay,
}

/// How a clone is made.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct CloneOptions {
    /// Which way. Default: [`CloneMode::Auto`].
    pub mode: CloneMode,
    /// Format of the source; probed if `None`. Default: `None`.
    pub format: Option<Format>,
    /// Cache mode for both files. Default: [`CacheMode::Writeback`].
    pub cache: CacheMode,
    /// Which files that the source names may be opened. Default: [`RefPolicy::Local`].
    pub refs: RefPolicy,
    /// The opener of a source that is no local file. Default: no opener.
    pub remote: Remote,
    /// The name of the source as an overlay names it; that of its local file if `None`. Default: `None`.
    pub backing_name: Option<String>,
    /// Passphrases of an encrypted source. An overlay is encrypted with that of the top image, whatever it stands on. Default: none.
    pub keys: Keys,
}

zebu_storage::option_setters!(CloneOptions {
    mode: CloneMode,
    format: impl Into<Option<Format>>,
    cache: CacheMode,
    refs: RefPolicy,
    remote: Remote,
    backing_name: impl Into<Option<String>>,
    keys: Keys,
});

/// Which way was taken.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum CloneMethod {
    /// The files share their blocks until one of them writes; they depend on each other in nothing.
    Reflink,
    /// The clone is an overlay: the source must not be written or moved as long as the clone is used.
    Overlay {
        /// The backing file as the clone names it.
        backing: PathBuf,
        /// Why it is not a reflink, in words.
        reason: String,
    },
}

/// The result of a clone.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct CloneReport {
    /// Which way was taken.
    pub method: CloneMethod,
    /// Format of the clone.
    pub format: Format,
    /// Bytes of its virtual disk.
    pub virtual_size: u64,
}

/// Makes `target`, which must not exist, a writable copy of the image `source`. The source is locked against
/// writers meanwhile, so the clone is one consistent state of it. The clone gets its name when it is complete and
/// durable; after an error nothing is left of it.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`] if the target exists, [`ErrorKind::Unsupported`] if only a reflink was wanted and
/// there is none to be had, [`ErrorKind::KeyMissing`] if an overlay would hold an encrypted disk's plain text, and what opening the source or making the clone fails with.
pub async fn clone_image(
    worker: &Worker,
    source: &Path,
    target: &Path,
    options: &CloneOptions,
) -> Result<CloneReport> {
    if std::fs::symlink_metadata(target).is_ok() {
        return Err(
            Error::new(ErrorKind::InvalidArgument, "the file exists; a clone needs a new name").on(target)
        );
    }
    let open = OpenOptions {
        format: options.format,
        cache: options.cache,
        refs: options.refs.clone(),
        remote: options.remote.clone(),
        keys: options.keys.clone(),
        ..OpenOptions::default()
    };
    let image = Image::open(worker, source, &open).await?;
    let done = clone_open_image(worker, &image, target, options).await;
    let closed = image.close(worker).await;
    let report = done?;
    closed?;
    Ok(report)
}

async fn clone_open_image(
    worker: &Worker,
    image: &Image,
    target: &Path,
    options: &CloneOptions,
) -> Result<CloneReport> {
    let refused = match options.mode {
        CloneMode::Overlay => "an overlay was asked for".to_owned(),
        CloneMode::Auto | CloneMode::Reflink => match reflink(worker, image, target).await? {
            None => {
                return Ok(CloneReport {
                    method: CloneMethod::Reflink,
                    format: image.format(),
                    virtual_size: image.virtual_size(),
                });
            }
            Some(reason) if options.mode == CloneMode::Reflink => {
                return Err(Error::new(
                    ErrorKind::Unsupported,
                    format!("can't be cloned by reflink: {reason}"),
                )
                .on(image.path()));
            }
            Some(reason) => reason,
        },
    };
    let backing = overlay(worker, image, target, options).await?;
    Ok(CloneReport {
        method: CloneMethod::Overlay { backing, reason: refused },
        format: Format::Qcow2,
        virtual_size: image.virtual_size(),
    })
}

/// Shares all blocks of the image's file with a new one. `Some`: why that can't be done, in words.
async fn reflink(worker: &Worker, image: &Image, target: &Path) -> Result<Option<String>> {
    let info = image.info()?;
    if !image.format().is_writable() {
        return Ok(Some(format!("images in the format {} can't be written", image.format().name())));
    }
    if info.backing_file.is_some() {
        return Ok(Some("the image has a backing file".into()));
    }
    if info.qcow2.as_ref().is_some_and(|qcow2| qcow2.data_file.is_some()) {
        return Ok(Some("its data lie in an external data file, which two images must not share".into()));
    }
    if image.is_sealed() {
        return Ok(Some("the image is sealed, and a copy would be, too".into()));
    }
    let Some(file) = image.data_file_at(0).filter(|file| file.kind() == FileKind::Regular) else {
        return Ok(Some("it does not lie in a regular file".into()));
    };
    // The copy is for no other eyes than the original, and its owner may write it.
    let mode =
        std::fs::metadata(file.path()).map_or(0o600, |found| found.permissions().mode() & 0o777 | 0o600);
    let temporary = reserve_temporary_name(target, mode)
        .map_err(|error| from_io(target, "can't make a file in the clone's directory", &error))?;
    let mut made = NewFiles::default();
    made.add(&temporary);
    let flags = OpenFlags::default().access(Access::ReadWrite).create(Create::No).lock(LockMode::Write);
    let copy = File::open(&temporary, &flags)?;
    expect_copies(&copy, file);
    if let Err(error) = worker.clone_range(file, 0, &copy, 0, file.len()).await {
        return match error.kind {
            IoErrorKind::Unsupported => {
                Ok(Some("the file system shares no blocks between these two places".into()))
            }
            _ => Err(error.into()),
        };
    }
    copy.unlock()?;
    drop(copy);
    let target = target.to_owned();
    worker.run_blocking(move || publish(&temporary, &target)).await?;
    made.keep();
    Ok(None)
}

/// Bytes of a cluster above a base that is no local file. It has 32 subclusters, so that a guest's write of whole pages copies
/// nothing of the base.
const CLUSTER_ABOVE_REMOTE: u64 = 64 << 10;

/// Makes an empty image on top of this one. Gives the name of the backing file as written into it.
async fn overlay(worker: &Worker, image: &Image, target: &Path, options: &CloneOptions) -> Result<PathBuf> {
    let backing = match &options.backing_name {
        Some(name) => name.clone(),
        None => backing_name(image.path(), target)?,
    };
    let encryption = match options.keys.known(0) {
        Some(passphrase) => Some(NewEncryption::new(passphrase)),
        None if image.is_chain_encrypted() => {
            let message =
                "the disk is encrypted, and an overlay of it would hold plain text: it needs a passphrase";
            return Err(Error::new(ErrorKind::KeyMissing, message).on(image.path()));
        }
        _ => None,
    };
    let temporary = reserve_temporary_name(target, 0o644)
        .map_err(|error| from_io(target, "can't make a file in the clone's directory", &error))?;
    let mut made = NewFiles::default();
    made.add(&temporary);
    // The rest of a cluster would have to come from the network first.
    let is_remote = image.data_file_at(0).is_some_and(File::is_foreign);
    let create = CreateOptions {
        format: Format::Qcow2,
        size: Some(image.virtual_size()),
        cluster_size: if is_remote { CLUSTER_ABOVE_REMOTE } else { image.cluster_size() },
        extended_l2: is_remote,
        backing: Some((backing.clone(), image.format())),
        cache: options.cache,
        refs: RefPolicy::All,
        encryption,
        ..CreateOptions::default()
    };
    Image::create(worker, &temporary, &create).await?;
    let target = target.to_owned();
    worker.run_blocking(move || publish(&temporary, &target)).await?;
    made.keep();
    Ok(backing.into())
}
