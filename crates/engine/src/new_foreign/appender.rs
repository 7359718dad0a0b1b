//! A file that is written once, from its beginning to its end, in long writes.

use super::file::GrowingFile;
use crate::Result;
use std::collections::VecDeque;
use zebu_storage::{File, IoBufs, JoinHandle, Worker};

/// Bytes of one write.
const WRITE: usize = 1 << 20;
/// Writes under way at once, beside the packing of what comes next.
const UNDER_WAY: usize = 2;

/// A file that is appended to.
#[derive(Debug)]
pub(crate) struct FileAppender {
    file: GrowingFile,
    /// Bytes that are not written yet, those in buffers first, and where they belong.
    buffers: IoBufs,
    gathered: Vec<u8>,
    at: u64,
}

/// Writes under way. They belong to the thread of the one task that appends.
#[derive(Default)]
pub(crate) struct WritesUnderWay(VecDeque<JoinHandle<Result<()>>>);

impl WritesUnderWay {
    /// Waits until another may begin.
    pub(crate) async fn wait_for_room(&mut self) -> Result<()> {
        self.wait(UNDER_WAY - 1).await
    }

    /// Adds one that has begun.
    pub(crate) fn begin(&mut self, write: JoinHandle<Result<()>>) {
        self.0.push_back(write);
    }

    /// Waits until at most `most` are under way.
    pub(crate) async fn wait(&mut self, most: usize) -> Result<()> {
        while self.0.len() > most
            && let Some(first) = self.0.pop_front()
        {
            first.await?;
        }
        Ok(())
    }
}

impl FileAppender {
    /// Appends from `at` on.
    pub(crate) fn new(file: File, at: u64) -> Self {
        Self { file: GrowingFile::new(file, u64::MAX), buffers: IoBufs::new(), gathered: Vec::new(), at }
    }

    /// The file.
    pub(crate) fn file(&self) -> &File {
        self.file.file()
    }

    /// Bytes to be written, to add more to.
    pub(crate) fn gathered(&mut self) -> &mut Vec<u8> {
        &mut self.gathered
    }

    /// Adds bytes that are in buffers already.
    pub(crate) fn push(&mut self, worker: &Worker, bytes: IoBufs) {
        if !self.gathered.is_empty() {
            let mut buffer = worker.buffer(self.gathered.len());
            buffer.as_mut_slice().copy_from_slice(&self.gathered);
            self.gathered.clear();
            self.buffers.push_part(buffer);
        }
        self.buffers.append(bytes);
    }

    /// Begins to write what makes long writes.
    pub(crate) async fn write_whole(&mut self, worker: &Worker, writes: &mut WritesUnderWay) -> Result<()> {
        if self.buffers.len() >= WRITE || self.gathered.len() >= WRITE {
            self.write_buffers(worker, writes).await?;
        }
        let whole = self.gathered.len() / WRITE * WRITE;
        self.write(worker, whole, writes).await
    }

    async fn write_buffers(&mut self, worker: &Worker, writes: &mut WritesUnderWay) -> Result<()> {
        let bytes = std::mem::take(&mut self.buffers);
        if bytes.is_empty() {
            return Ok(());
        }
        writes.wait_for_room().await?;
        let (file, own, at) = (self.file.clone(), worker.clone(), self.at);
        self.at += bytes.len() as u64;
        writes.begin(worker.spawn(async move { file.write(&own, at, bytes).await.0 }));
        Ok(())
    }

    async fn write(&mut self, worker: &Worker, len: usize, writes: &mut WritesUnderWay) -> Result<()> {
        for bytes in self.gathered.get(..len).unwrap_or_default().chunks(WRITE) {
            writes.wait_for_room().await?;
            let mut buffer = worker.buffer(bytes.len());
            buffer.as_mut_slice().copy_from_slice(bytes);
            let (file, own, at) = (self.file.clone(), worker.clone(), self.at);
            writes.begin(worker.spawn(async move { file.write(&own, at, buffer.into()).await.0 }));
            self.at += bytes.len() as u64;
        }
        self.gathered.drain(..len);
        Ok(())
    }

    /// Writes what is left, and ends the file there.
    pub(crate) async fn write_rest(&mut self, worker: &Worker) -> Result<&GrowingFile> {
        let mut writes = WritesUnderWay::default();
        self.write_buffers(worker, &mut writes).await?;
        self.write(worker, self.gathered.len(), &mut writes).await?;
        writes.wait(0).await?;
        self.file.set_len(worker, self.at).await?;
        Ok(&self.file)
    }

    /// Bytes of the file, but for those that are still gathered.
    pub(crate) fn len(&self) -> u64 {
        self.at
    }
}
