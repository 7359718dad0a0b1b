//! Snapshots of an open image as files of their own: all blocks are shared with it at one moment (a reflink).

use super::staging::{expect_copies, from_io, publish, reserve_temporary_name};
use crate::new_files::NewFiles;
use crate::node::Driver;
use crate::{Error, ErrorKind, Image, Result};
use std::path::{Path, PathBuf};
use zebu_qcow2::header::MAGIC;
use zebu_storage::{File, FileKind, IoBuf, IoErrorKind, Worker};

/// Where the incompatible features of a version 3 header lie, and the bit that says that refcounts may be wrong.
const FEATURES_AT: usize = 72;
const DIRTY: u64 = 1;
/// Bytes of a header that are looked at.
const HEADER: usize = 512;

/// A new file under a temporary name beside the one that it is to have. Dropped before [`NewFile::publish`], it goes.
pub struct NewFile {
    temporary: PathBuf,
    path: PathBuf,
    made: NewFiles,
}

impl std::fmt::Debug for NewFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NewFile").field("path", &self.path).finish_non_exhaustive()
    }
}

impl NewFile {
    /// Makes an empty file for `path`, which must not exist, that its owner alone may read and write; opened for both.
    ///
    /// # Errors
    /// [`ErrorKind::Exists`]: something has the name; no file can be made in its directory.
    pub fn reserve(path: &Path) -> Result<(Self, std::fs::File)> {
        if std::fs::symlink_metadata(path).is_ok() {
            return Err(
                Error::new(ErrorKind::Exists, "the file exists; a snapshot needs a new name").on(path)
            );
        }
        let temporary = reserve_temporary_name(path, 0o600)
            .map_err(|error| from_io(path, "can't make a file in the directory of the snapshot", &error))?;
        let mut made = NewFiles::default();
        made.add(&temporary);
        let file = std::fs::File::options()
            .read(true)
            .write(true)
            .open(&temporary)
            .map_err(|error| from_io(&temporary, "can't open the new file", &error))?;
        Ok((Self { temporary, path: path.to_owned(), made }, file))
    }

    /// Makes the file durable, gives it its name, and makes that durable.
    ///
    /// # Errors
    /// [`ErrorKind::Io`]: something took the name meanwhile, or the file system fails. The file goes then.
    pub fn publish(mut self) -> Result<()> {
        publish(&self.temporary, &self.path)?;
        self.made.keep();
        Ok(())
    }
}

/// Makes `copy`, an empty regular file that is open for writing, a copy of the image's own file as it is at one moment.
/// `path` is the name that the copy is to have. Requests that change the image wait meanwhile; for qcow2, everything is
/// committed before, so that the copy is as after a close. A bitmap that recorded changes is recovered in the copy. The
/// copy is durable when this returns.
///
/// # Errors
/// [`ErrorKind::Unsupported`]: the file system shares no blocks between the two places, the image does not lie in a
/// regular file, it has an external data file, or it names a backing file that the copy would not find. Errors of the
/// commit. The image is unharmed, and `copy` is of no use then.
pub async fn file_snapshot(worker: &Worker, image: &Image, copy: File, path: &Path) -> Result<()> {
    refuse_what_is_bound_to_its_place(image, path)?;
    let to = path.to_owned();
    let at = copy.clone();
    image.alone(worker, async move |image, on| share(on, image, &at, &to).await).await?;
    // What is only read was not committed here: if its file says that counts may be wrong, so does the copy.
    if let Driver::Qcow2(qcow2) = &image.0.driver
        && qcow2.is_writable()
    {
        clear_dirty(worker, &copy).await?;
    }
    worker.flush(&copy).await.map_err(|error| Error::from(error).on(path))
}

fn refuse_what_is_bound_to_its_place(image: &Image, path: &Path) -> Result<()> {
    let unsupported = |message: String| Err(Error::new(ErrorKind::Unsupported, message).on(image.path()));
    let info = image.info()?;
    if info.qcow2.as_ref().is_some_and(|qcow2| qcow2.data_file.is_some()) {
        return unsupported(
            "its data lie in an external data file, which two images must not share; make a backup instead"
                .into(),
        );
    }
    if !matches!(image.0.image_file().kind(), FileKind::Regular | FileKind::Simulated) {
        return unsupported("it does not lie in a regular file; make a backup instead".into());
    }
    let Some(backing) = info.backing_file else { return Ok(()) };
    let absolute = |path: &Path| std::path::absolute(path).ok();
    let directory = |path: &Path| absolute(path).and_then(|path| path.parent().map(Path::to_owned));
    let is_found = Path::new(&backing).is_absolute()
        || directory(path).is_some_and(|place| Some(place) == directory(image.path()));
    if is_found {
        return Ok(());
    }
    unsupported(format!(
        "it names its backing file '{backing}' by a relative name, which only files in its own directory find: make the \
         snapshot there"
    ))
}

/// Shares all blocks. The caller is alone with the image.
async fn share(worker: &Worker, image: &Image, copy: &File, path: &Path) -> Result<()> {
    match &image.0.driver {
        Driver::Qcow2(qcow2) if qcow2.is_writable() => qcow2.settle_as_closed(worker).await?,
        Driver::Raw(raw) if raw.file.is_writable() => {
            worker.flush(&raw.file).await.map_err(|error| Error::from(error).on(image.path()))?;
        }
        Driver::Qcow2(_) | Driver::Raw(_) | Driver::Foreign(_) => {}
    }
    let file = image.0.image_file();
    expect_copies(copy, file);
    worker.clone_range(file, 0, copy, 0, file.len()).await.map_err(|error| match error.kind {
        IoErrorKind::Unsupported => {
            let message = format!(
                "can't share blocks with '{}': that takes one file system of a kind with reflinks (XFS, btrfs); make a \
                 backup or an internal snapshot instead",
                image.path().display()
            );
            Error::new(ErrorKind::Unsupported, message).on(path)
        }
        _ => Error::from(error).on(path),
    })
}

/// Takes the mark from a copy that says that an image was not closed: all counts are right in it.
async fn clear_dirty(worker: &Worker, copy: &File) -> Result<()> {
    let (read, bufs) = worker.read(copy, 0, IoBuf::zeroed(HEADER).into()).await;
    read.map_err(|error| Error::from(error).on(copy.path()))?;
    let mut header = [0; HEADER];
    bufs.copy_to(0, &mut header);
    let number = |at: usize| u32::from_be_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
    let features = (u64::from(number(FEATURES_AT)) << 32) | u64::from(number(FEATURES_AT + 4));
    if number(0) != MAGIC || number(4) < 3 || features & DIRTY == 0 {
        return Ok(());
    }
    let cleared = IoBuf::copy_of(&(features & !DIRTY).to_be_bytes());
    let (written, _) = worker.write(copy, FEATURES_AT as u64, cleared.into()).await;
    written.map_err(|error| Error::from(error).on(copy.path()))
}
