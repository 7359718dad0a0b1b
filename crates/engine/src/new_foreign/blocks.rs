//! Images whose blocks are written in any order.

use super::file::{FilePlace, GrowingFile};
use super::{NewFiles, check_regular, layout_error};
use crate::sync::Mutex;
use crate::{Error, ErrorKind, Result};
use std::ops::Range;
use std::path::Path;
use zebu_foreign::write::{Birth, BlockTable, Layout, NewImage};
use zebu_storage::Worker;

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

impl BlockWriter {
    /// Begins an image for a disk of `size` bytes in files that are empty. `name` is the last part of the file's final name.
    pub(crate) async fn new(
        worker: &Worker,
        files: NewFiles,
        new: &NewImage,
        size: u64,
        name: &str,
        birth: &Birth,
    ) -> Result<Self> {
        let NewFiles { image, flat } = files;
        check_regular(&image)?;
        let (file, image) = match flat {
            Some(flat) => (flat, Some(image)),
            None => (image, None),
        };
        check_regular(&file)?;
        let layout = Layout::new(new, size, name, birth).map_err(|e| layout_error(&file, &e))?;
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

    /// The file, in which places are written.
    pub(crate) fn file(&self) -> &GrowingFile {
        &self.file
    }

    /// Adds places for the bytes in `filled` (ranges of a buffer, in order) of a range of the disk that begins at `offset`, and for the
    /// marks of new blocks. Blocks lie in the order in which this is called. Requests at a time don't overlap.
    pub(crate) fn place(
        &self,
        offset: u64,
        filled: &[Range<usize>],
        places: &mut Vec<FilePlace>,
    ) -> Result<()> {
        let block = self.layout.block_size();
        let mark = self.layout.mark();
        let mut table = self.table.lock();
        for range in filled {
            let (start, end) = (offset + range.start as u64, offset.saturating_add(range.end as u64));
            if end > self.layout.virtual_size() {
                let message = "a write reaches past the end of the disk";
                return Err(Error::new(ErrorKind::OutOfRange, message).on(self.path()).at_guest(start));
            }
            if let Some(first) = self.layout.linear() {
                FilePlace::add_part(places, first + start, range.start, range.len());
                continue;
            }
            let mut at = start;
            while at < end {
                let (index, within) = (at / block, at % block);
                let until = end.min(at - within + block);
                let host = if let Some(host) = self.layout.find(&table, index) {
                    host
                } else {
                    let host = self.layout.allocate(&mut table, index);
                    let host = host.map_err(|e| layout_error(self.file.file(), &e))?;
                    if !mark.is_empty() {
                        let at = host - mark.len() as u64;
                        places.push(FilePlace::Table { host: at, bytes: mark.to_vec() });
                    }
                    host
                };
                FilePlace::add_part(places, host + within, (at - offset) as usize, (until - at) as usize);
                at = until;
            }
        }
        Ok(())
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
