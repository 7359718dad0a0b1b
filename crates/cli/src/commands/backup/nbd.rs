//! `zebu backup` to a disk on an NBD server: written in order, as into an object.

use super::BackupArgs;
use crate::failure::Failure;
use crate::session::Session;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use zebu_disks::{Context, given_only};
use zebu_engine::Image;
use zebu_engine::jobs::{BackupOptions, BackupReport, backup_streamed};
use zebu_engine::storage::{Access, File, IoBuf, LockMode, OpenFlags};

/// Bytes at the beginning of the disk that must be zero. No image begins so.
const BEGINNING: usize = 512;

/// The disk on an NBD server that a target is; `None` if it is a local file.
///
/// # Errors
/// It is a disk on a server, and can't be written.
pub(super) fn disk_on_server(context: &Context, target: &OsStr) -> Result<Option<PathBuf>, Failure> {
    let path = context.new_image_path(target).map_err(|reason| Failure::creating_name(target, &reason))?;
    Ok(Some(path).filter(|path| context.disks.names.is_remote(path)))
}

/// Refuses what a backup on a server can't have, before anything is opened.
pub(super) fn check(args: &BackupArgs) -> Result<(), Failure> {
    let refused = [
        (args.previous.is_some(), "an earlier backup below it (--previous)"),
        (args.bitmap.is_some(), "a bitmap that says what changed (--bitmap)"),
        (args.target_cache.is_some(), "a cache mode (-t)"),
        (args.resume, "--resume"),
    ];
    match refused.iter().find(|(is_wanted, _)| *is_wanted) {
        None => Ok(()),
        Some((_, what)) => Err(Failure::usage(format!(
            "'{}': a backup that is a disk on a server can't have {what}",
            args.target.display()
        ))),
    }
}

/// Backs the image up onto the disk on a server. The first cluster comes last, so that before the end there is no image.
pub(super) fn back_up(
    session: &Session,
    image: &Image,
    disk: &Path,
    options: &BackupOptions,
) -> Result<BackupReport, Failure> {
    let flags = OpenFlags::default().access(Access::ReadWrite).lock(LockMode::None);
    let file = given_only(session.context())
        .open(disk, &flags)
        .map_err(|error| Failure::opening(session.context(), disk, &error.into()))?;
    check_blank(session, &file)?;
    let worker = session.worker();
    let failed = |error: zebu_engine::Error| match error.image() {
        Some(path) if path == image.path() => Failure::during("error while reading the source", &error),
        _ => Failure::during(&format!("error while making the backup '{}'", disk.display()), &error),
    };
    let done = worker.block_on(backup_streamed(worker, image, file, options)).map_err(failed)?;
    done.publish().map_err(failed)
}

/// Refuses a disk that may hold an image.
fn check_blank(session: &Session, file: &File) -> Result<(), Failure> {
    let worker = session.worker();
    let len = BEGINNING.min(usize::try_from(file.len()).unwrap_or(BEGINNING));
    let (read, bufs) = worker.block_on(worker.read(file, 0, IoBuf::zeroed(len).into()));
    read.map_err(|error| Failure::opening(session.context(), file.path(), &error.into()))?;
    let mut beginning = [0; BEGINNING];
    bufs.copy_to(0, &mut beginning[..len]);
    if beginning.iter().all(|byte| *byte == 0) {
        return Ok(());
    }
    Err(Failure::new(format!(
        "'{}' is not empty: zero its first {BEGINNING} bytes, or give another disk",
        file.path().display()
    )))
}
