//! Images whose blocks are written in any order.

use super::file::GrowingFile;
use super::{NewFiles, birth, check_regular, layout_error};
use crate::sync::Mutex;
use crate::{Error, ErrorKind, Result};
use std::path::Path;
use zebu_foreign::write::{BlockTable, Layout, NewImage};
use zebu_storage::{IoBufs, Worker};

/// An image that is being made in a file that was empty.
#[derive(Debug)]
pub(crate) struct BlockWriter {
    /// The file with the blocks.
    file: GrowingFile,
    /// The image file, if that is another: it holds a text alone.
    descriptor: Option<GrowingFile>,
    layout: Layout,
    logical_block: u32,
    table: Mutex<BlockTable>,
}

/// A range of the file, and whether it is the first that is written of its block.
struct BlockRange {
    host: u64,
    len: usize,
}

impl BlockWriter {
    /// Begins an image for a disk of `size` bytes in files that are empty. `name` is the last part of the file's final name.
    pub(crate) async fn new(
        worker: &Worker,
        files: NewFiles,
        new: &NewImage,
        size: u64,
        name: &str,
    ) -> Result<Self> {
        let NewFiles { image, flat } = files;
        check_regular(&image)?;
        let (file, image) = match flat {
            Some(flat) => (flat, Some(image)),
            None => (image, None),
        };
        check_regular(&file)?;
        let layout = Layout::new(new, size, name, &birth()).map_err(|e| layout_error(&file, &e))?;
        let table = layout.empty_table();
        let file = GrowingFile::new(file, layout.longest());
        if layout.linear().is_some() {
            file.set_len(worker, layout.file_len(&table)).await?;
        }
        let text_len = layout.descriptor().unwrap_or_default().len() as u64;
        let descriptor = image.map(|image| GrowingFile::new(image, text_len));
        let logical_block = new.logical_sector();
        Ok(Self { file, descriptor, layout, logical_block, table: Mutex::new(table) })
    }

    pub(crate) fn virtual_size(&self) -> u64 {
        self.layout.virtual_size()
    }

    /// Bytes of a logical block.
    pub(crate) fn logical_block(&self) -> u32 {
        self.logical_block
    }

    pub(crate) fn path(&self) -> &Path {
        self.descriptor.as_ref().unwrap_or(&self.file).file().path()
    }

    /// Writes a part of the disk. Requests at a time don't overlap.
    pub(crate) async fn write(&self, worker: &Worker, offset: u64, mut bufs: IoBufs) -> (Result<()>, IoBufs) {
        let (places, marks) = match self.places(offset, bufs.len()) {
            Ok(places) => places,
            Err(error) => return (Err(error), bufs),
        };
        for at in marks {
            if let Err(error) = self.file.write_bytes(worker, at, self.layout.mark()).await {
                return (Err(error), bufs);
            }
        }
        let mut done = IoBufs::new();
        let mut result = Ok(());
        for BlockRange { host, len } in places {
            let mut part = bufs.split_to(len);
            (result, part) = self.file.write(worker, host, part).await;
            done.append(part);
            if result.is_err() {
                break;
            }
        }
        done.append(bufs);
        (result, done)
    }

    /// The places of a range of the disk, joined where they follow each other, and where marks of new blocks belong.
    fn places(&self, offset: u64, len: usize) -> Result<(Vec<BlockRange>, Vec<u64>)> {
        let end = offset.saturating_add(len as u64);
        if end > self.layout.virtual_size() {
            let message = "a write reaches past the end of the disk";
            return Err(Error::new(ErrorKind::OutOfRange, message).on(self.path()).at_guest(offset));
        }
        if let Some(start) = self.layout.linear() {
            return Ok((vec![BlockRange { host: start + offset, len }], Vec::new()));
        }
        let block = self.layout.block_size();
        let mark = self.layout.mark().len() as u64;
        let (mut places, mut marks): (Vec<BlockRange>, Vec<u64>) = (Vec::new(), Vec::new());
        let mut table = self.table.lock();
        let mut at = offset;
        while at < end {
            let (index, within) = (at / block, at % block);
            let until = end.min(at - within + block);
            let start = if let Some(start) = self.layout.find(&table, index) {
                start
            } else {
                let start = self.layout.allocate(&mut table, index);
                let start = start.map_err(|e| layout_error(self.file.file(), &e))?;
                if mark > 0 {
                    marks.push(start - mark);
                }
                start
            };
            let (host, len) = (start + within, (until - at) as usize);
            match places.last_mut() {
                Some(last) if last.host + last.len as u64 == host => last.len += len,
                _ => places.push(BlockRange { host, len }),
            }
            at = until;
        }
        Ok((places, marks))
    }

    /// Writes tables and headers, and makes all durable. No write is under way.
    pub(crate) async fn finish(&self, worker: &Worker) -> Result<()> {
        let table = self.table.lock().clone();
        // Before anything is said of it: what was set aside beyond the end goes.
        self.file.set_len(worker, self.layout.file_len(&table)).await?;
        for part in self.layout.tables(&table) {
            self.file.write_bytes(worker, part.offset, &part.bytes).await?;
        }
        self.file.flush(worker).await?;
        for part in self.layout.headers(&table) {
            self.file.write_bytes(worker, part.offset, &part.bytes).await?;
        }
        self.file.flush(worker).await?;
        if let (Some(file), Some(text)) = (&self.descriptor, self.layout.descriptor()) {
            file.write_bytes(worker, 0, text).await?;
            file.flush(worker).await?;
        }
        Ok(())
    }
}
