//! Images whose blocks are packed, and written in the order of the disk.

use super::appender::{FileAppender, WritesUnderWay};
use super::{check_regular, layout_error};
use crate::Result;
use zebu_foreign::write::{Birth, NewVmdk, Stream};
use zebu_storage::{File, Worker};

/// A packed block and its number.
pub(crate) type Packed = (u64, Vec<u8>);

/// An image that is being made in a file that was empty.
pub(crate) struct StreamWriter {
    file: FileAppender,
    stream: Stream,
}

impl StreamWriter {
    /// Bytes of a block.
    pub(crate) const BLOCK: u64 = Stream::GRAIN;

    /// Begins an image for a disk of `size` bytes. `name` is the last part of the file's final name.
    pub(crate) fn new(file: File, new: &NewVmdk, size: u64, name: &str, birth: &Birth) -> Result<Self> {
        check_regular(&file)?;
        let mut stream = Stream::new(new, size, name, birth).map_err(|e| layout_error(&file, &e))?;
        let mut file = FileAppender::new(file, 0);
        stream.start(file.gathered());
        Ok(Self { file, stream })
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
            let appended = self.stream.grain(*index, packed, self.file.gathered());
            appended.map_err(|e| layout_error(self.file.file(), &e))?;
        }
        self.file.write_whole(worker, writes).await
    }

    /// Writes what comes behind the blocks, and makes all durable. A reader finds no image before the footer is there.
    pub(crate) async fn finish(mut self, worker: &Worker) -> Result<()> {
        self.stream.end(self.file.gathered()).map_err(|e| layout_error(self.file.file(), &e))?;
        self.file.write_rest(worker).await?.flush(worker).await
    }
}
