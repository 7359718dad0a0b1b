//! A temporary image over another one, for programs that may change a disk without keeping the changes (`-s`).

use crate::failure::Failure;
use crate::lock_patience::lock_wait;
use crate::temporary_directory::TemporaryDirectory;
use crate::values::format_argument;
use rustix::fs::{Mode, OFlags, open, unlink};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use zebu_disks::{Context, local_path};
use zebu_engine::storage::{Worker, WorkerConfig};
use zebu_engine::{CreateOptions, Format, Image, OpenOptions, RefPolicy};

/// An overlay without a name: its space is given back when nobody has it open any more, however the program ends.
pub(crate) struct TemporaryOverlay {
    path: PathBuf,
}

impl TemporaryOverlay {
    /// Makes an overlay over `file`, in the directory for temporary files.
    ///
    /// # Errors
    /// `file` is no image, or can't be opened; there is no place for the overlay.
    pub(crate) fn over(context: &Context, file: &OsStr, format: Option<&str>) -> Result<Self, Failure> {
        let base = local_path(file).map_err(|reason| Failure::opening_name(file, &reason))?;
        let format =
            format.map(|name| format_argument(context.dialect, name)).transpose().map_err(Failure::new)?;
        let worker = Worker::new(&WorkerConfig::default())?;
        let format = format_of(context, &worker, &base, format)?;
        let absolute = std::fs::canonicalize(&base)
            .map_err(|error| Failure::opening_name(base.as_os_str(), &error.to_string()))?;
        let Some(name) = absolute.to_str() else {
            return Err(Failure::opening_name(base.as_os_str(), "its path is not valid UTF-8"));
        };
        let private = TemporaryDirectory::new()?;
        let place = private.path().join("overlay");
        let options = CreateOptions::default().backing(Some((name.to_owned(), format))).refs(RefPolicy::All);
        let made = worker.block_on(Image::create(&worker, &place, &options));
        let opened = open(&place, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
        let removed = unlink(&place);
        drop(private);
        made.map_err(|error| Failure::creating(context, &place, &error))?;
        let file = opened
            .and_then(|file| removed.map(|()| file))
            .map_err(|error| Failure::new(format!("Could not open '{}': {error}", place.display())))?;
        Ok(Self { path: context.disks.names.note_open(place, file).map_err(Failure::new)? })
    }

    /// Name by which this process can open it.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

/// The format of the image below, which is probed if it is not given.
fn format_of(
    context: &Context,
    worker: &Worker,
    base: &Path,
    format: Option<Format>,
) -> Result<Format, Failure> {
    let options = OpenOptions::default()
        .format(format)
        .probe(context.dialect.probe())
        .refs(RefPolicy::All)
        .lock_wait(lock_wait(context.dialect));
    worker
        .block_on(async {
            let image = Image::open(worker, base, &options).await?;
            let format = image.format();
            image.close(worker).await?;
            Ok(format)
        })
        .map_err(|error| Failure::opening(context, base, &error))
}
