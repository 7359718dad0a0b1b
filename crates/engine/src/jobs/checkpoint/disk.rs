//! A disk of a checkpoint, as others read it.

use super::frozen::Frozen;
use crate::bitmaps::DirtyBits;
use crate::{Access, Error, Format, Image, OpenOptions, OpenedFile, Result};
use rustix::io::Errno;
use std::sync::Arc;
use zebu_storage::sabotage::{self, Fault};
use zebu_storage::{
    Completer, File, FileId, IoBufs, OpenFlags, Storage, StorageAbilities, StorageDone, StorageOp, Worker,
    fresh_number,
};

/// A disk as it was at the moment of a checkpoint. Cheap to clone. When the checkpoint has ended, nothing can be read any more.
#[derive(Debug, Clone)]
pub struct FrozenDisk {
    pub(super) frozen: Arc<Frozen>,
    pub(super) bitmap: Option<(String, DirtyBits)>,
}

impl FrozenDisk {
    /// Bytes of the disk at the moment.
    pub fn size(&self) -> u64 {
        self.frozen.size
    }

    /// The bitmap that ended at the moment, by its name.
    pub fn bitmap(&self) -> Option<(&str, &DirtyBits)> {
        self.bitmap.as_ref().map(|(name, bits)| (name.as_str(), bits))
    }

    /// Reads `bufs.len()` bytes at `offset`.
    ///
    /// # Errors
    /// [`crate::ErrorKind::OutOfRange`]; [`crate::ErrorKind::Cancelled`]: the checkpoint has ended; failures of the image or the spill.
    pub async fn read(&self, worker: &Worker, offset: u64, bufs: IoBufs) -> (Result<()>, IoBufs) {
        self.frozen.read(worker, offset, bufs).await
    }

    /// Bytes from `offset` on that are alike, at least one, and whether they read as zero.
    ///
    /// # Errors
    /// As [`FrozenDisk::read`].
    pub async fn extent(&self, worker: &Worker, offset: u64) -> Result<(u64, bool)> {
        self.frozen.extent(worker, offset).await
    }

    /// Opens it as an image that is only read, a raw one. Reads of it are done by the worker of the disk's own image.
    ///
    /// # Errors
    /// As [`Image::open_files`].
    pub async fn open(&self, worker: &Worker) -> Result<Image> {
        let storage = FrozenStorage { frozen: self.frozen.clone(), identity: (1 << 63) | fresh_number() };
        let path = &self.frozen.source.path;
        let file = File::from_storage(Arc::new(storage), &path.to_string_lossy(), &OpenFlags::default());
        let file = file.map_err(|error| Error::from(error).on(path))?;
        let options = OpenOptions::default().access(Access::ReadOnly);
        Image::open_files(worker, vec![OpenedFile::new(file, Format::Raw)], &options).await
    }
}

struct FrozenStorage {
    frozen: Arc<Frozen>,
    identity: u64,
}

async fn answer(frozen: &Frozen, worker: &Worker, op: StorageOp, mut done: Completer) {
    let result = match op {
        StorageOp::Read { offset, len } => {
            let (read, bufs) = frozen.read(worker, offset, std::mem::take(done.bufs_mut())).await;
            *done.bufs_mut() = bufs;
            read.map(|()| StorageDone::Moved(len)).map_err(|error| error.errno())
        }
        StorageOp::ExtentAt { offset } => {
            let extent = frozen.extent(worker, offset).await;
            extent.map(|(len, hole)| StorageDone::Extent { len, hole }).map_err(|error| error.errno())
        }
        StorageOp::Flush => Ok(StorageDone::Done),
        _ => Err(Errno::OPNOTSUPP.raw_os_error()),
    };
    done.finish(result);
}

impl Storage for FrozenStorage {
    fn len(&self) -> u64 {
        self.frozen.size
    }

    fn identity(&self) -> u64 {
        self.identity
    }

    fn files(&self) -> Vec<FileId> {
        Vec::new()
    }

    fn abilities(&self) -> StorageAbilities {
        StorageAbilities::EXTENTS
    }

    fn submit(&self, op: StorageOp, done: Completer) {
        if self.frozen.fate.has_ended() && !sabotage::is(Fault::ReadPastCheckpoint) {
            // Who goes on to ask does not keep the image's worker from coming to rest.
            return done.finish(Err(Errno::IO.raw_os_error()));
        }
        // It was started with the checkpoint. Without it, dropping `done` is the answer.
        let Some(worker) = self.frozen.source.own_worker().get() else { return };
        let frozen = self.frozen.clone();
        drop(worker.run(move |on| async move { answer(&frozen, &on, op, done).await }));
    }
}
