//! An image that is being made in a file of the caller's, and that nobody takes for a whole one before it is.

use crate::node::Driver;
use crate::open::open_unfinished;
use crate::qcow2::header::block::{OnFailure, Patch};
use crate::qcow2::life::create;
use crate::{CreateOptions, Error, ErrorKind, Image, OpenOptions, Result};
use zebu_storage::sabotage::{self, Fault};
use zebu_storage::{File, FileKind, Worker};

/// Where the magic number lies in the header.
const MAGIC_AT: usize = 0;

/// A qcow2 image without its magic number. It is a file of unknown content to everybody else, whatever happens, until
/// [`UnfinishedImage::finish`].
#[derive(Debug)]
pub struct UnfinishedImage {
    image: Image,
    file: File,
}

impl UnfinishedImage {
    /// Makes an empty image in `file`; what is in it is lost. `create` has the size and no preallocation; what stands
    /// in `open` about names and locks does not apply. A backing file that `create` names is not opened: nothing of it may
    /// be needed, so whole clusters have to be written. The file never holds a header with the magic number before the end.
    ///
    /// # Errors
    /// As [`Image::create_in`] and [`Image::open_files`]; [`ErrorKind::Unsupported`]: an external data file.
    pub async fn create(
        worker: &Worker,
        file: File,
        create: &CreateOptions,
        open: &OpenOptions,
    ) -> Result<Self> {
        if create.data_file.is_some() {
            let message = "an image in a file that is given can't have an external data file";
            return Err(Error::new(ErrorKind::Unsupported, message).on(file.path()));
        }
        create::in_file(worker, &file, create, create::Magic::Withheld).await?;
        let image = Image(open_unfinished(worker, file.clone(), open).await?);
        if let (Driver::Qcow2(qcow2), true) = (&image.0.driver, create.backing.is_some()) {
            qcow2.expect_backing();
        }
        Ok(Self { image, file })
    }

    /// The image, to be written.
    pub fn image(&self) -> &Image {
        &self.image
    }

    /// Makes everything durable, then the magic number, and closes the image.
    ///
    /// # Errors
    /// It is given up then, as by [`UnfinishedImage::discard`].
    pub async fn finish(self, worker: &Worker) -> Result<()> {
        let finished = self.complete(worker).await;
        if finished.is_err() {
            // That this fails, too, adds nothing: without its magic number the file is no image.
            let _ = self.discard(worker).await;
        }
        finished
    }

    async fn complete(&self, worker: &Worker) -> Result<()> {
        if sabotage::is(Fault::MagicFirst) {
            self.write_magic(worker, zebu_qcow2::header::MAGIC).await?;
        }
        self.image.close(worker).await?;
        worker.flush(&self.file).await.map_err(|e| Error::from(e).on(self.file.path()))?;
        self.write_magic(worker, zebu_qcow2::header::MAGIC).await
    }

    /// Gives it up: a regular file is empty afterwards. No request on it is under way.
    ///
    /// # Errors
    /// The file can't be cut. It is no image in any case.
    pub async fn discard(self, worker: &Worker) -> Result<()> {
        if self.file.kind() == FileKind::Regular {
            worker.set_len(&self.file, 0).await.map_err(|e| Error::from(e).on(self.file.path()))?;
        }
        Ok(())
    }

    async fn write_magic(&self, worker: &Worker, magic: u32) -> Result<()> {
        if let Driver::Qcow2(qcow2) = &self.image.0.driver {
            qcow2.change_header(worker, &[Patch::U32(MAGIC_AT, magic)], OnFailure::Restore).await?;
        }
        worker.flush(&self.file).await.map_err(|e| Error::from(e).on(self.file.path()))
    }
}
