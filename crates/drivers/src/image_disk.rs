//! An image of any format as the bottom of a stack of drivers: its guest's bytes.

use crate::call::{answer, take_bufs};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use zebu_engine::{Access, Durability, Image, Preallocation, Shrink, ZeroMode};
use zebu_storage::{
    Background, Completer, Engine, FileId, IoError, Storage, StorageAbilities, StorageDone, StorageOp, Worker,
};

/// Hears of an image that could not be closed.
type Hear = dyn Fn(&zebu_engine::Error) + Send + Sync;

/// An open image, on a worker of its own.
pub struct ImageDisk {
    image: Image,
    access: Access,
    identity: u64,
    worker: Arc<Background>,
    is_closed: AtomicBool,
    /// Hears why the image could not be closed; where there is nobody, the image belongs to somebody else.
    hear: Option<Box<Hear>>,
}

impl ImageDisk {
    /// Starts the worker. The image is closed by who opened it, after this is dropped, unless [`ImageDisk::closing`] says so.
    ///
    /// # Errors
    /// The system gives no thread or no descriptor.
    pub fn new(image: Image, access: Access, engine: Engine) -> Result<Self, IoError> {
        let worker = Arc::new(Background::small(engine)?);
        let identity = crate::fresh_identity();
        Ok(Self { image, access, identity, worker, is_closed: AtomicBool::new(false), hear: None })
    }

    /// The same, which closes its image when it is dropped, and tells `hear` if that fails.
    pub fn closing(mut self, hear: impl Fn(&zebu_engine::Error) + Send + Sync + 'static) -> Self {
        self.hear = Some(Box::new(hear));
        self
    }

    /// Closes the image, once. Later requests fail.
    ///
    /// # Errors
    /// What closing it failed at; the file is as after a crash then.
    pub fn close(&self) -> zebu_engine::Result<()> {
        if self.is_closed.swap(true, Ordering::Relaxed) {
            return Ok(());
        }
        let image = self.image.clone();
        // A worker that has ended drives no request, and nothing was promised that was not flushed.
        self.worker.run(move |worker| async move { image.close(&worker).await }).wait().unwrap_or(Ok(()))
    }

    /// The image.
    pub fn image(&self) -> &Image {
        &self.image
    }

    /// Its worker.
    pub(crate) fn worker(&self) -> &Arc<Background> {
        &self.worker
    }
}

async fn run(worker: &Worker, image: &Image, op: StorageOp, mut done: Completer) {
    let bufs = take_bufs(&mut done);
    let (result, bufs) = match op {
        StorageOp::Read { offset, len } => {
            let (result, bufs) = image.read(worker, offset, bufs).await;
            (result.map(|()| StorageDone::Moved(len)), bufs)
        }
        StorageOp::Write { offset, len } => {
            let (result, bufs) = image.write(worker, offset, bufs, Durability::Volatile).await;
            (result.map(|()| StorageDone::Moved(len)), bufs)
        }
        StorageOp::ExtentAt { offset } => {
            let left = image.virtual_size().saturating_sub(offset);
            let found = image.extent(worker, offset, left).await;
            (found.map(|extent| StorageDone::Extent { len: extent.len, hole: extent.is_zero() }), bufs)
        }
        op => {
            let result = match op {
                StorageOp::Flush => image.flush(worker).await,
                StorageOp::Punch { offset, len } => {
                    image.write_zeroes(worker, offset, len, ZeroMode::Unmap).await
                }
                StorageOp::ZeroRange { offset, len } => {
                    image.write_zeroes(worker, offset, len, ZeroMode::Keep).await
                }
                StorageOp::SetLen { len } => {
                    image.resize(worker, len, Shrink::Allow, Preallocation::Off).await
                }
                _ => return answer(done, bufs, Err(libc::EOPNOTSUPP)),
            };
            (result.map(|()| StorageDone::Done), bufs)
        }
    };
    answer(done, bufs, result.map_err(|error| error.errno()));
}

impl Drop for ImageDisk {
    fn drop(&mut self) {
        let Some(hear) = self.hear.take() else { return };
        if let Err(error) = self.close() {
            hear(&error);
        }
    }
}

impl Storage for ImageDisk {
    fn len(&self) -> u64 {
        self.image.virtual_size()
    }

    fn files(&self) -> Vec<FileId> {
        self.image.files()
    }

    fn identity(&self) -> u64 {
        self.identity
    }

    fn abilities(&self) -> StorageAbilities {
        match self.access {
            Access::ReadOnly => StorageAbilities::EXTENTS,
            Access::ReadWrite => StorageAbilities::all() - StorageAbilities::ALLOCATE,
        }
    }

    fn discard_granularity(&self) -> u64 {
        self.image.cluster_size().max(1)
    }

    fn submit(&self, op: StorageOp, done: Completer) {
        let image = self.image.clone();
        drop(self.worker.run(move |worker| async move { run(&worker, &image, op, done).await }));
    }
}
