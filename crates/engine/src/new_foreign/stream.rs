//! Images whose blocks are packed, and written in the order of the disk.

use super::file::GrowingFile;
use super::{birth, check_regular, layout_error};
use crate::Result;
use std::collections::VecDeque;
use zebu_foreign::write::{NewVmdk, Stream};
use zebu_storage::{File, JoinHandle, Worker};

/// Bytes of one write.
const WRITE: usize = 1 << 20;
/// Writes under way at once, beside the packing of what comes next.
const UNDER_WAY: usize = 2;

/// A packed block and its number.
pub(crate) type Packed = (u64, Vec<u8>);

/// An image that is being made in a file that was empty.
pub(crate) struct StreamWriter {
    file: GrowingFile,
    stream: Stream,
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

impl StreamWriter {
    /// Bytes of a block.
    pub(crate) const BLOCK: u64 = Stream::GRAIN;

    /// Begins an image for a disk of `size` bytes. `name` is the last part of the file's final name.
    pub(crate) fn new(file: File, new: &NewVmdk, size: u64, name: &str) -> Result<Self> {
        check_regular(&file)?;
        let mut stream = Stream::new(new, size, name, &birth()).map_err(|e| layout_error(&file, &e))?;
        let mut gathered = Vec::with_capacity(2 * WRITE);
        stream.start(&mut gathered);
        let file = GrowingFile::new(file, u64::MAX);
        Ok(Self { file, stream, gathered, at: 0 })
    }

    pub(crate) fn virtual_size(&self) -> u64 {
        self.stream.virtual_size()
    }

    /// Appends packed blocks, which come in ascending order.
    pub(crate) async fn append(
        &mut self,
        worker: &Worker,
        blocks: &[Packed],
        writes: &mut WritesUnderWay,
    ) -> Result<()> {
        for (index, packed) in blocks {
            let appended = self.stream.grain(*index, packed, &mut self.gathered);
            appended.map_err(|e| layout_error(self.file.file(), &e))?;
        }
        let whole = self.gathered.len() / WRITE * WRITE;
        self.write_gathered(worker, whole, writes).await
    }

    /// Writes the first `len` bytes of what was gathered, soon.
    async fn write_gathered(
        &mut self,
        worker: &Worker,
        len: usize,
        writes: &mut WritesUnderWay,
    ) -> Result<()> {
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

    /// Writes what comes behind the blocks, and makes all durable. A reader finds no image before the footer is there.
    pub(crate) async fn finish(mut self, worker: &Worker) -> Result<()> {
        self.stream.end(&mut self.gathered).map_err(|e| layout_error(self.file.file(), &e))?;
        let len = self.gathered.len();
        let mut writes = WritesUnderWay::default();
        self.write_gathered(worker, len, &mut writes).await?;
        writes.wait(0).await?;
        self.file.set_len(worker, self.at).await?;
        self.file.flush(worker).await
    }
}
