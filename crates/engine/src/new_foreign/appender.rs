//! A file that is written once, from its beginning to its end, in long writes.

use super::file::GrowingFile;
use crate::Result;
use std::collections::VecDeque;
use zebu_storage::{File, JoinHandle, Worker};

/// Bytes of one write.
const WRITE: usize = 1 << 20;
/// Writes under way at once, beside the packing of what comes next.
const UNDER_WAY: usize = 2;

/// A file that is appended to.
#[derive(Debug)]
pub(crate) struct FileAppender {
    file: GrowingFile,
    /// Bytes that are not written yet, and where they belong.
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
        Self { file: GrowingFile::new(file, u64::MAX), gathered: Vec::new(), at }
    }

    /// The file.
    pub(crate) fn file(&self) -> &File {
        self.file.file()
    }

    /// Bytes to be written, to add more to.
    pub(crate) fn gathered(&mut self) -> &mut Vec<u8> {
        &mut self.gathered
    }

    /// Begins to write what makes long writes.
    pub(crate) async fn write_whole(&mut self, worker: &Worker, writes: &mut WritesUnderWay) -> Result<()> {
        let whole = self.gathered.len() / WRITE * WRITE;
        self.write(worker, whole, writes).await
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
