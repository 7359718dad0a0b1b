//! The surface for programs that just want to wait.

use crate::options::{Durability, OpenOptions, Preallocation, Shrink, ZeroMode};
use crate::{Error, Image, Result};
use std::path::Path;
use std::time::Duration;
use zebu_storage::{IoBuf, Worker, WorkerConfig};

/// An image with a worker of its own, whose calls return when they are done. Belongs to one thread; several can share
/// an image through [`Blocking::image`].
///
/// ```
/// use std::path::Path;
/// use zebu::{Access, Blocking, CreateOptions, OpenOptions};
///
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("disk.qcow2");
/// Blocking::create(&path, &CreateOptions { size: Some(1 << 20), ..CreateOptions::default() })?;
/// let disk = Blocking::open(&path, &OpenOptions { access: Access::ReadWrite, ..OpenOptions::default() })?;
/// disk.write(4096, b"hello")?;
/// disk.flush()?;
/// let mut back = [0; 5];
/// disk.read(4096, &mut back)?;
/// assert_eq!(&back, b"hello");
/// disk.close()?;
/// # Ok::<(), zebu::Error>(())
/// ```
pub struct Blocking {
    worker: Worker,
    image: Image,
}

impl Blocking {
    /// Opens an image; see [`Image::open`].
    pub fn open(path: &Path, options: &OpenOptions) -> Result<Self> {
        let worker = worker(path)?;
        let image = worker.block_on(Image::open(&worker, path, options))?;
        Ok(Self { worker, image })
    }

    /// Creates an image; see [`Image::create`].
    pub fn create(path: &Path, options: &crate::CreateOptions) -> Result<()> {
        let worker = worker(path)?;
        worker.block_on(Image::create(&worker, path, options))
    }

    fn run<T>(&self, request: impl Future<Output = T>) -> T {
        let value = self.worker.block_on(request);
        // What was begun by the way, such as reading ahead, ends now: until the next call nobody polls the worker.
        self.worker.drain(Duration::ZERO);
        value
    }

    /// The image, for other workers.
    pub fn image(&self) -> &Image {
        &self.image
    }

    /// Fills `buf` from `offset` on.
    pub fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        let pooled = self.worker.buffer(buf.len());
        let (result, bufs) = self.run(self.image.read(&self.worker, offset, pooled.into()));
        result?;
        bufs.copy_to(0, buf);
        Ok(())
    }

    /// Writes `buf` at `offset`.
    pub fn write(&self, offset: u64, buf: &[u8]) -> Result<()> {
        let data = IoBuf::copy_of(buf).into();
        self.run(self.image.write(&self.worker, offset, data, Durability::Volatile)).0
    }

    /// See [`Image::write_zeroes`].
    pub fn write_zeroes(&self, offset: u64, len: u64, mode: ZeroMode) -> Result<()> {
        self.run(self.image.write_zeroes(&self.worker, offset, len, mode))
    }

    /// See [`Image::discard`].
    pub fn discard(&self, offset: u64, len: u64) -> Result<()> {
        self.run(self.image.discard(&self.worker, offset, len))
    }

    /// See [`Image::flush`].
    pub fn flush(&self) -> Result<()> {
        self.run(self.image.flush(&self.worker))
    }

    /// See [`Image::resize`].
    pub fn resize(&self, new_size: u64, shrink: Shrink) -> Result<()> {
        self.run(self.image.resize(&self.worker, new_size, shrink, Preallocation::Off))
    }

    /// See [`Image::close`].
    pub fn close(self) -> Result<()> {
        self.run(self.image.close(&self.worker))
    }
}

fn worker(path: &Path) -> Result<Worker> {
    Worker::new(&WorkerConfig::default()).map_err(|e| Error::from(e).on(path))
}
