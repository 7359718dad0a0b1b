//! An open image: the handle that everything else works on.

use crate::{
    CreateOptions, Durability, Extent, Format, ImageInfo, ImageStats, OpenOptions, Preallocation, Result,
    Shrink, ZeroMode,
};
use std::path::Path;
use std::sync::Arc;
use zebu_storage::{IoBufs, Worker};

/// An open image with its backing chain. Cheap to clone; shared by all workers.
#[derive(Clone)]
pub struct Image {
    _inner: Arc<()>,
}

impl Image {
    /// Opens an image.
    pub async fn open(worker: &Worker, path: &Path, options: &OpenOptions) -> Result<Self> {
        todo!("{:?}", (worker.id(), path, options))
    }
    /// Creates an image (cut to nothing first if the file exists). Does not leave it open.
    pub async fn create(worker: &Worker, path: &Path, options: &CreateOptions) -> Result<()> {
        todo!("{:?}", (worker.id(), path, options))
    }
    /// The file name it was opened by.
    pub fn path(&self) -> &Path {
        todo!()
    }
    /// Format.
    pub fn format(&self) -> Format {
        todo!()
    }
    /// Bytes of the virtual disk.
    pub fn virtual_size(&self) -> u64 {
        todo!()
    }
    /// Bytes of a cluster (for raw: 65536), the natural unit of work.
    pub fn cluster_size(&self) -> u64 {
        todo!()
    }
    /// The backing image, if open.
    pub fn backing(&self) -> Option<&Image> {
        todo!()
    }
    /// What `info` says.
    pub fn info(&self) -> Result<ImageInfo> {
        todo!()
    }
    /// Counters.
    pub fn stats(&self) -> ImageStats {
        todo!()
    }
    /// Reads; the whole range must lie on the disk.
    pub async fn read(&self, worker: &Worker, offset: u64, bufs: IoBufs) -> (Result<()>, IoBufs) {
        todo!("{:?}", (worker.id(), offset, bufs.len()))
    }
    /// Writes.
    pub async fn write(
        &self,
        worker: &Worker,
        offset: u64,
        bufs: IoBufs,
        durability: Durability,
    ) -> (Result<()>, IoBufs) {
        todo!("{:?}", (worker.id(), offset, bufs.len(), durability))
    }
    /// Makes a range read as zero.
    pub async fn write_zeroes(&self, worker: &Worker, offset: u64, len: u64, mode: ZeroMode) -> Result<()> {
        todo!("{:?}", (worker.id(), offset, len, mode))
    }
    /// Gives a range up: whole clusters (subclusters) in it read as zero afterwards, the rest stays as it is.
    pub async fn discard(&self, worker: &Worker, offset: u64, len: u64) -> Result<()> {
        todo!("{:?}", (worker.id(), offset, len))
    }
    /// Makes all writes that completed before the call durable.
    pub async fn flush(&self, worker: &Worker) -> Result<()> {
        todo!("{:?}", worker.id())
    }
    /// Changes the size of the virtual disk.
    pub async fn resize(
        &self,
        worker: &Worker,
        new_size: u64,
        shrink: Shrink,
        preallocation: Preallocation,
    ) -> Result<()> {
        todo!("{:?}", (worker.id(), new_size, shrink, preallocation))
    }
    /// The run of one kind that starts at `offset`, at most `len` bytes, through the whole chain.
    pub async fn extent(&self, worker: &Worker, offset: u64, len: u64) -> Result<Extent> {
        todo!("{:?}", (worker.id(), offset, len))
    }
    /// The file that extents of `depth` with a host offset lie in (image file or external data file), for reflink
    /// and copy_file_range.
    pub fn data_file_at(&self, depth: u32) -> Option<&zebu_storage::File> {
        todo!("{depth}")
    }
    /// Finishes all requests, commits, returns what the windows did not use, releases the locks.
    pub async fn close(&self, worker: &Worker) -> Result<()> {
        todo!("{:?}", worker.id())
    }
}
