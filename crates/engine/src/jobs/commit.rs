//! Writes what an image holds into an image below it.
//!
//! First the base, then the image: as long as the image is not emptied, it shows what it holds, whatever of it is in
//! the base already; it is emptied when all of it is durable there.

use super::convert::{ConvertOptions, ConvertTarget, TargetContent, convert};
use crate::open::open_split;
use crate::progress::JobControl;
use crate::{
    Access, BaseName, Error, ErrorKind, Format, Image, OpenOptions, Preallocation, Remedy, Result, Shrink,
};
use std::path::{Path, PathBuf};
use zebu_storage::{IoBuf, Worker, WorkerConfig};

/// The treatment of the image when its content is in the base.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum AfterCommit {
    /// It is emptied: the base shows everywhere.
    #[default]
    Empty,
    /// It stays as it is (`-d`).
    Keep,
}

/// How an image is committed.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct CommitOptions {
    /// The image below to commit to. The images
    /// in between no longer show what they did afterwards. The backing file of the image if `None`. Default: `None`.
    pub base: Option<PathBuf>,
    /// How `base` is read. Default: [`BaseName::FromEither`].
    pub base_name: BaseName,
    /// The treatment of the image; it stays as it is in any case if there are images between it and the base.
    /// Default: [`AfterCommit::Empty`].
    pub after: AfterCommit,
    /// Threads that copy, each with a worker of its own; the caller's is the first. At least 1. Default: 1.
    pub workers: usize,
    /// How the workers of further threads are made. Default: that of [`WorkerConfig`].
    pub worker_config: WorkerConfig,
    /// Pieces of work in flight, over all threads. At least 1; more than 1024 count as 1024. Default: 8.
    pub requests: usize,
    /// Most bytes of copy buffers, over all threads. At least 64 KiB. Default: 64 MiB.
    pub buffer_memory: usize,
    /// Watching, slowing and stopping. A commit that is stopped leaves the image as it was, and the base with a part
    /// of its content. Default: nobody watches, no limit.
    pub control: JobControl,
}

zebu_storage::option_setters!(CommitOptions {
    base: impl Into<Option<PathBuf>>,
    base_name: BaseName,
    after: AfterCommit,
    workers: usize,
    worker_config: WorkerConfig,
    requests: usize,
    buffer_memory: usize,
    control: JobControl,
});

impl Default for CommitOptions {
    fn default() -> Self {
        Self {
            base: None,
            base_name: BaseName::FromEither,
            after: AfterCommit::Empty,
            workers: 1,
            worker_config: WorkerConfig::default(),
            requests: 8,
            buffer_memory: 64 << 20,
            control: JobControl::default(),
        }
    }
}

/// The result of a commit. Figures in bytes of the virtual disk.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct CommitReport {
    /// The base.
    pub base: PathBuf,
    /// Of the disk of the image.
    pub total: u64,
    /// Moved into the base, in whatever way.
    pub moved: u64,
    /// Made zero in the base.
    pub zeroed: u64,
    /// The treatment of the image.
    pub after: AfterCommit,
}

/// Zeroes in the content are looked for in runs of so many bytes: smaller ones would only cut the base to pieces.
const SPARSE_SIZE: u64 = 64 << 10;

/// Commits the image at `path`. It and the base are opened for writing as `open` says, and closed; the base grows if it
/// is the smaller one.
///
/// # Errors
/// [`crate::ErrorKind::InvalidArgument`] if the image has no backing file, or the base is not below it, or is a LUKS disk that the
/// image calls raw ([`OpenOptions::backing`] with a format is taken at its word); what opening, reading
/// and writing fail with. The image shows what it did before, in any case; so does the base up to the point where it
/// was written.
pub async fn commit(
    worker: &Worker,
    path: &Path,
    open: &OpenOptions,
    options: &CommitOptions,
) -> Result<CommitReport> {
    let open = OpenOptions { access: Access::ReadWrite, ..open.clone() };
    let (top, base) = open_split(worker, path, options.base.as_deref(), options.base_name, &open).await?;
    let (top, base) = (Image(top), Image(base));
    let is_named = matches!(&open.backing, Some((_, Some(Format::Raw))));
    let done = if is_named { Ok(()) } else { refuse_headers(worker, &base).await };
    let done = match done {
        Ok(()) => commit_images(worker, &top, &base, options).await,
        Err(error) => Err(error),
    };
    let closed = top.close(worker).await;
    let base_closed = base.close(worker).await;
    let report = done?;
    closed.and(base_closed)?;
    Ok(report)
}

/// Refuses a base that an overlay calls raw, and that is an encrypted disk: its header would be overwritten, and all keys with it.
async fn refuse_headers(worker: &Worker, base: &Image) -> Result<()> {
    if base.format() != Format::Raw || base.virtual_size() < 512 {
        return Ok(());
    }
    let (read, bufs) = base.read(worker, 0, IoBuf::zeroed(512).into()).await;
    read?;
    let mut start = [0; 512];
    bufs.copy_to(0, &mut start);
    let is_luks = start.starts_with(b"LUKS\xba\xbe") || start.starts_with(b"SKUL\xba\xbe");
    // The field `crypt_method` (qcow2 specification, "Header").
    let is_encrypted_qcow2 = start.starts_with(b"QFI\xfb") && start[32..36] != [0; 4];
    if !is_luks && !is_encrypted_qcow2 {
        return Ok(());
    }
    let message = "the image calls its backing file raw, and it is an encrypted disk: its header would be overwritten, and nobody \
                   could read it again";
    let error = Error::new(ErrorKind::InvalidArgument, message).on(base.path());
    Err(error.with_remedy(Remedy::NameFormatOfBase))
}

/// Commits `top`, which was opened for writing without `base` or anything below it, to `base`, which was opened for
/// writing too. Both are to be closed afterwards.
///
/// # Errors
/// As [`commit`].
pub async fn commit_images(
    worker: &Worker,
    top: &Image,
    base: &Image,
    options: &CommitOptions,
) -> Result<CommitReport> {
    let qcow2 = top.qcow2("backing files")?;
    // The names of images between top and base are the user's to look after, as are their contents afterwards.
    let after = if top.backing().is_some() { AfterCommit::Keep } else { options.after };
    let (size, backup) = (top.virtual_size(), top.backup_id_above(base.backup_id().into()));
    if base.virtual_size() < size {
        base.resize(worker, size.next_multiple_of(512), Shrink::Refuse, Preallocation::Off).await?;
    }
    let convert_options = ConvertOptions {
        workers: options.workers,
        worker_config: options.worker_config.clone(),
        requests: options.requests,
        buffer_memory: options.buffer_memory,
        sparse_size: SPARSE_SIZE,
        control: options.control.clone(),
        ..ConvertOptions::default()
    };
    let target = ConvertTarget::Existing { image: base.clone(), content: TargetContent::Base };
    let copied = convert(worker, std::slice::from_ref(top), target, &convert_options).await?;
    if let Some(backup) = backup.filter(|_| base.virtual_size() == size) {
        // It holds what that backup does.
        base.flush(worker).await?;
        base.mark_as_backup(worker, backup, base.footing()).await?;
    }
    if after == AfterCommit::Empty {
        let qcow2 = qcow2.clone();
        top.alone(worker, async move |top, on| qcow2.make_empty(&top.0, on).await).await?;
    }
    Ok(CommitReport {
        base: base.path().to_owned(),
        total: size,
        moved: copied.written + copied.reflinked + copied.range_copied,
        zeroed: copied.zeroed,
        after,
    })
}
