//! A file that grows ahead of the writes to it.

use crate::sync::AsyncMutex;
use crate::{Error, ErrorKind, Result};
use std::sync::Arc;
use zebu_storage::{File, FileKind, IoBuf, IoBufs, Worker};

/// Bytes by which the file grows at once: holes, which the end takes back. It grows to its greatest length at most, and without
/// them where the system allows no such length.
const STEP: u64 = 64 << 20;

/// A regular file, or a device. Several writes at a time may go beyond its end; it is made longer first, because no two requests may
/// extend a file at once. Clones are the same one.
#[derive(Debug, Clone)]
pub(crate) struct GrowingFile {
    file: File,
    /// Bytes that it ever needs.
    most: u64,
    growing: Arc<AsyncMutex>,
}

impl GrowingFile {
    pub(crate) fn new(file: File, most: u64) -> Self {
        Self { file, most, growing: Arc::default() }
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    pub(crate) async fn write(&self, worker: &Worker, offset: u64, bufs: IoBufs) -> (Result<()>, IoBufs) {
        if let Err(error) = self.reserve(worker, offset.saturating_add(bufs.len() as u64)).await {
            return (Err(error), bufs);
        }
        let (written, bufs) = worker.write(&self.file, offset, bufs).await;
        (written.map_err(|e| Error::from(e).on(self.file.path())), bufs)
    }

    pub(crate) async fn write_bytes(&self, worker: &Worker, offset: u64, bytes: &[u8]) -> Result<()> {
        let mut buffer = worker.buffer(bytes.len());
        buffer.as_mut_slice().copy_from_slice(bytes);
        self.write(worker, offset, IoBuf::into(buffer)).await.0
    }

    async fn reserve(&self, worker: &Worker, end: u64) -> Result<()> {
        if end <= self.file.len() {
            return Ok(());
        }
        let _growing = self.growing.lock().await;
        if end > self.file.len() {
            let ahead = end.saturating_add(STEP).min(self.most);
            if ahead <= end || self.set_len(worker, ahead).await.is_err() {
                self.set_len(worker, end).await?;
            }
        }
        Ok(())
    }

    /// Cuts the file, or makes it longer. No write is under way beyond that length. A device stays as long as it is.
    pub(crate) async fn set_len(&self, worker: &Worker, len: u64) -> Result<()> {
        if self.file.kind() == FileKind::BlockDevice {
            if len <= self.file.len() {
                return Ok(());
            }
            let message = format!("the device holds {} bytes, and more are needed", self.file.len());
            return Err(Error::new(ErrorKind::NoSpace, message).on(self.file.path()));
        }
        worker.set_len(&self.file, len).await.map_err(|e| Error::from(e).on(self.file.path()))
    }

    pub(crate) async fn flush(&self, worker: &Worker) -> Result<()> {
        worker.flush(&self.file).await.map_err(|e| Error::from(e).on(self.file.path()))
    }
}
