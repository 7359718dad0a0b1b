//! Forks of disks in use: the image becomes one that is only read, and the disk goes on in a new overlay above it
//! (docs/design/forks.md).

use crate::node::Driver;
use crate::open::check_room_above;
use crate::open_above::open_above;
use crate::qcow2::fork_seal::sealed_error;
use crate::qcow2::life::create;
use crate::qcow2::state::Qcow2;
use crate::{CreateOptions, Error, ErrorKind, Format, Image, OpenOptions, Result};
use futures_util::future::join_all;
use std::iter::successors;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};
use zebu_qcow2::{ForkSeal, SealState};
use zebu_storage::sabotage::{self, Fault};
use zebu_storage::{File, FileKind, LockMode, Worker};

/// Flushes while guests still write, so that the last one has little to do.
const EARLY_FLUSHES: usize = 3;

/// A disk that is to be forked.
#[derive(Debug)]
pub struct ForkDisk {
    image: Image,
    overlay: File,
    path: PathBuf,
    options: OpenOptions,
}

impl ForkDisk {
    /// Has the disk of `image` go on in `overlay`, an empty file that is open for writing and locked. Its name, the absolute path
    /// `path`, is durable. Of `options`, those that the image was opened with, the overlay has the cache mode and the like.
    pub fn new(image: &Image, overlay: File, path: impl Into<PathBuf>, options: &OpenOptions) -> Self {
        Self { image: image.current(), overlay, path: path.into(), options: options.clone() }
    }
}

/// The result of a fork.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ForkReport {
    /// The time for which changes of the disks waited.
    pub gap: Duration,
}

/// A fork that was not made: each disk goes on in the image in which it was.
#[derive(Debug, Clone)]
pub struct ForkError {
    /// The reason.
    pub error: Error,
    /// The overlays, without content of their own, that a seal may still name: the seals could not be taken away.
    pub named: Vec<PathBuf>,
}

impl std::fmt::Display for ForkError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.error)?;
        for overlay in &self.named {
            write!(
                f,
                "; the image may be sealed all the same, and name the overlay '{}', which holds nothing: take the seal away once \
                 the server has ended",
                overlay.display()
            )?;
        }
        Ok(())
    }
}

impl std::error::Error for ForkError {}

impl From<Error> for ForkError {
    fn from(error: Error) -> Self {
        Self { error, named: Vec::new() }
    }
}

/// A disk whose overlay is ready.
struct Ready {
    base: Image,
    qcow2: Arc<Qcow2>,
    overlay: Image,
    seal: ForkSeal,
    path: PathBuf,
}

/// Has each disk go on in its overlay from one moment on, which is the same for all of them. Requests under way end before it, later
/// changes wait for it. The image becomes sealed, is durable to its last byte, and stays open as what the overlay stands on.
/// [`Image::current`] leads to the overlay.
///
/// The seal, which says which file is current, is durable before the first change goes to an overlay. So is every seal before the
/// first change of any of the disks.
///
/// # Errors
/// All disks go on as they were. [`ErrorKind::Unsupported`]: an image that is not qcow2, is encrypted or stands on what is, has an
/// external data file, a bitmap that records, a header without room for the seal, or a chain as long as one may be.
/// [`ErrorKind::Exists`]: a backup is under way, or an overlay is not empty. [`ErrorKind::ReadOnly`]: an image is only read. Failures
/// of the files.
pub async fn fork(worker: &Worker, disks: Vec<ForkDisk>) -> Result<ForkReport, ForkError> {
    let Some(first) = disks.first().map(|disk| disk.image.clone()) else {
        return Err(Error::new(ErrorKind::InvalidArgument, "a fork needs a disk").into());
    };
    for (at, disk) in disks.iter().enumerate() {
        refuse(disk)?;
        if disks[..at].iter().any(|other| Arc::ptr_eq(&other.image.0, &disk.image.0)) {
            let message = "one disk can't be forked twice at one moment";
            return Err(Error::new(ErrorKind::InvalidArgument, message).on(disk.image.path()).into());
        }
    }
    let mut all = Vec::with_capacity(disks.len());
    for disk in disks {
        all.push(ready(worker, disk).await?);
    }
    // As of checkpoints: two of these never wait for each other's gates.
    all.sort_by_key(|disk| Arc::as_ptr(&disk.base.0).addr());
    for _ in 0..EARLY_FLUSHES {
        for flushed in join_all(all.iter().map(|disk| disk.base.flush(worker))).await {
            flushed?;
        }
    }
    for disk in &all {
        disk.qcow2.write_seal_ahead(worker, &disk.seal).await?;
    }
    let named = all.iter().map(|disk| disk.path.clone()).collect::<Vec<_>>();
    let done = first.on_own_worker(worker, move |_, on| async move {
        let ended = at_one_moment(&on, &all, &all).await;
        if ended.is_ok() {
            for disk in &all {
                seal_late(&on, disk).await?;
                // Others may read it from now on. Where that can't be said, it stays locked.
                let _ = disk.qcow2.file().set_lock(LockMode::Read);
            }
        }
        Ok(ended)
    });
    match done.await {
        Ok(ended) => ended,
        // It vanished: nobody knows how far it came.
        Err(error) => Err(ForkError { error, named }),
    }
}

/// Refuses what can't be forked, before anything is written.
fn refuse(disk: &ForkDisk) -> Result<()> {
    let image = &disk.image;
    let unsupported = |what: &str| Err(Error::new(ErrorKind::Unsupported, what).on(image.path()));
    let Driver::Qcow2(qcow2) = &image.0.driver else {
        return unsupported(
            "only a qcow2 image can be forked: one of this format has no place for the seal that names the overlay",
        );
    };
    qcow2.check_writable()?;
    // The overlay could not be opened again.
    check_room_above(successors(Some(&image.0), |node| node.backing.as_ref()).count(), image.path())?;
    image.check_nothing_is_copied("goes on in an overlay")?;
    if qcow2.data_file().is_some() {
        return unsupported(
            "an image with an external data file can't be forked: the seal would not guard that file",
        );
    }
    if image.is_chain_encrypted() {
        return unsupported(
            "an encrypted image can't be forked yet: the overlay would need a key of its own",
        );
    }
    if let Some(recording) = image.bitmaps().iter().find(|bitmap| bitmap.auto) {
        return unsupported(&format!(
            "the bitmap '{}' records changes, which would go on in the overlay without it: stop or remove it first",
            recording.name
        ));
    }
    if !matches!(disk.overlay.kind(), FileKind::Regular | FileKind::Simulated) || !disk.overlay.is_empty() {
        let message = "the overlay has to be a new, empty file";
        return Err(Error::new(ErrorKind::Exists, message).on(&disk.path));
    }
    if !disk.path.is_absolute() {
        let message = "the overlay has to be named by an absolute path";
        return Err(Error::new(ErrorKind::InvalidArgument, message).on(&disk.path));
    }
    Ok(())
}

/// The name of the base for an overlay at `target`: relative if it lies in or below the overlay's directory.
fn base_name(base: &Path, target: &Path) -> Result<String> {
    let whole = std::path::absolute(base).unwrap_or_else(|_| base.to_owned());
    let directory = target.parent().unwrap_or(Path::new("/"));
    let name = whole.strip_prefix(directory).unwrap_or(&whole).to_str().ok_or_else(|| {
        let message = "the name is not UTF-8, so an image can't refer to it";
        Error::new(ErrorKind::Unsupported, message).on(base)
    })?;
    Ok(if name.contains(':') && !name.starts_with('/') { format!("./{name}") } else { name.to_owned() })
}

/// Makes the overlay, durably, and opens it above the image.
async fn ready(worker: &Worker, disk: ForkDisk) -> Result<Ready> {
    let base = disk.image;
    let qcow2 = base.qcow2("overlays")?.clone();
    let seal = ForkSeal::new(disk.path.as_os_str().as_bytes()).ok_or_else(|| {
        let message =
            format!("the path has more than the {} bytes that a seal has room for", ForkSeal::MAX_NAME);
        Error::new(ErrorKind::Unsupported, message).on(&disk.path)
    })?;
    qcow2.check_room_for(&seal)?;
    let geometry = qcow2.geometry();
    let create = CreateOptions::default()
        .size(Some(base.virtual_size()))
        .cluster_size(geometry.cluster_size())
        .extended_l2(geometry.extended_l2)
        .compression(qcow2.header().compression())
        .backing(Some((base_name(base.path(), &disk.path)?, Format::Qcow2)));
    create::in_file(worker, &disk.overlay, &create, create::Magic::Written).await?;
    let overlay = Image(open_above(worker, disk.overlay, &base.0, &disk.options).await?);
    // The guest's first change would have to wait for it.
    overlay.qcow2("overlays")?.prepare_write(worker).await?;
    overlay.flush(worker).await?;
    Ok(Ready { base, qcow2, overlay, seal, path: disk.path })
}

/// Closes the gates of the disks that are left, one after the other, and forks all.
fn at_one_moment<'a>(
    worker: &'a Worker,
    all: &'a [Ready],
    left: &'a [Ready],
) -> Pin<Box<dyn Future<Output = Result<ForkReport, ForkError>> + 'a>> {
    Box::pin(async move {
        let Some((next, left)) = left.split_first() else { return switch(worker, all).await };
        if sabotage::is(Fault::ForkBesideWrites) {
            return at_one_moment(worker, all, left).await;
        }
        let mut result = None;
        let alone = next.base.0.while_alone(worker, async || {
            let start = Instant::now();
            let done = at_one_moment(worker, all, left).await;
            result = Some(done.map(|_| ForkReport { gap: start.elapsed() }));
            Ok(())
        });
        alone.await?;
        result.unwrap_or_else(|| Err(next.base.0.went_on().into()))
    })
}

/// Makes the images durable, seals them, and has the disks go on in their overlays. All gates are closed.
async fn switch(worker: &Worker, all: &[Ready]) -> Result<ForkReport, ForkError> {
    for disk in all {
        disk.base.0.check_open()?;
        refuse_late(disk)?;
    }
    for settled in join_all(all.iter().map(|disk| disk.qcow2.settle_as_closed(worker))).await {
        settled?;
    }
    if !sabotage::is(Fault::SealAfterGate) {
        let sealed = join_all(all.iter().map(|disk| disk.qcow2.write_seal(worker, Some(&disk.seal)))).await;
        if let Some(error) = sealed.into_iter().find_map(Result::err) {
            return Err(take_back(worker, all, error).await);
        }
    }
    for disk in all {
        disk.base.0.continued.set(disk.overlay.0.clone());
        if let Some(view) = &disk.base.0.view {
            // Nobody looks there any more, and its memory is the overlay's as well.
            view.map.clear();
        }
        if !sabotage::is(Fault::WriteSealed) {
            let error = sealed_error(disk.base.path(), &SealState::Sealed(disk.seal.clone()));
            disk.qcow2.files().refuse_changes(error);
        }
    }
    Ok(ForkReport { gap: Duration::ZERO })
}

/// Refuses what came while the overlay was made.
fn refuse_late(disk: &Ready) -> Result<()> {
    disk.base.check_nothing_is_copied("goes on in an overlay")?;
    if disk.base.0.continued.get().is_some() {
        return Err(disk.base.0.went_on());
    }
    if disk.base.bitmaps().iter().any(|bitmap| bitmap.auto) {
        let message = "a bitmap that records changes was added meanwhile";
        return Err(Error::new(ErrorKind::Unsupported, message).on(disk.base.path()));
    }
    if disk.base.virtual_size() != disk.overlay.virtual_size() {
        let message = "the size of the disk was changed meanwhile: fork it again";
        return Err(Error::new(ErrorKind::Busy, message).on(disk.base.path()));
    }
    Ok(())
}

/// Takes all seals away again, since one of them failed with `error`.
async fn take_back(worker: &Worker, all: &[Ready], error: Error) -> ForkError {
    let mut named = Vec::new();
    for disk in all {
        if disk.qcow2.seal().is_sealed() && !sabotage::is(Fault::KeepOtherSeals) {
            // What comes of it, the next look tells.
            let _ = disk.qcow2.write_seal(worker, None).await;
        }
        if disk.qcow2.seal().is_sealed() || disk.qcow2.check_writable().is_err() {
            named.push(disk.path.clone());
        }
    }
    ForkError { error, named }
}

/// Seals the image behind an open gate: only under a deliberate fault.
async fn seal_late(worker: &Worker, disk: &Ready) -> Result<()> {
    if sabotage::is(Fault::SealAfterGate) {
        disk.qcow2.write_seal(worker, Some(&disk.seal)).await?;
    }
    Ok(())
}
