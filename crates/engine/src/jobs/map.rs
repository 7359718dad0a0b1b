//! The kinds of the ranges of a virtual disk, adjacent equal ranges merged, as `qemu-img map` shows them.

use super::status::{Layer, Status, depth_of};
use crate::{Extents, Image, Result};
use std::path::Path;
use zebu_storage::Worker;

/// Which part of the disk is mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct MapOptions {
    /// First byte (`-s`). Default: 0.
    pub start: u64,
    /// Most bytes (`-l`); to the end of the disk if `None`. Default: `None`.
    pub max_length: Option<u64>,
}

zebu_storage::option_setters!(MapOptions {
    start: u64,
    max_length: impl Into<Option<u64>>,
});

/// A range of the disk of one kind. The fields have the meaning of the JSON keys of `qemu-img map`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct MapEntry {
    /// Offset in bytes on the virtual disk.
    pub start: u64,
    /// Bytes.
    pub length: u64,
    /// Image of the chain that decides what is read here: 0 is the opened one.
    pub depth: u32,
    /// Some image of the chain holds it: as data or as zeroes.
    pub present: bool,
    /// Reads as zero.
    pub zero: bool,
    /// Its bytes are stored.
    pub data: bool,
    /// Stored compressed.
    pub compressed: bool,
    /// Offset in bytes in the file of that image, where there is one.
    pub offset: Option<u64>,
}

impl MapEntry {
    fn status(&self) -> Status {
        Status {
            present: self.present,
            zero: self.zero,
            data: self.data,
            compressed: self.compressed,
            offset: self.offset,
        }
    }
}

/// Walks a disk from [`MapOptions::start`] on.
pub struct Mapper {
    image: Image,
    /// The images of the chain; read when the walk begins.
    chain: Vec<Layer>,
    /// The next one begins at the end of `pending`, if there is one.
    extents: Extents,
    /// Found, and perhaps to be continued by the next extent.
    pending: Option<MapEntry>,
}

impl Mapper {
    /// A walk over `image`.
    pub fn new(image: &Image, options: MapOptions) -> Self {
        let size = image.virtual_size();
        let end = options.max_length.map_or(size, |most| options.start.saturating_add(most).min(size));
        Self {
            extents: image.extents(options.start..end),
            image: image.clone(),
            chain: Vec::new(),
            pending: None,
        }
    }

    /// The next entry, `None` at the end. After an error the walk may be continued: it looks at the same place again.
    pub async fn map_next(&mut self, worker: &Worker) -> Result<Option<MapEntry>> {
        if self.chain.is_empty() {
            self.chain = Layer::chain(&self.image)?;
        }
        while let Some(extent) = self.extents.next(worker).await? {
            let status = Status::of(&extent, &self.chain);
            let found = MapEntry {
                start: extent.offset,
                length: extent.len,
                depth: depth_of(&extent, &self.chain),
                present: status.present,
                zero: status.zero,
                data: status.data,
                compressed: status.compressed,
                offset: status.offset,
            };
            match &mut self.pending {
                Some(last)
                    if last.depth == found.depth && last.status().continues_with(last.length, &status) =>
                {
                    last.length += found.length;
                }
                pending => {
                    if let Some(complete) = pending.replace(found) {
                        return Ok(Some(complete));
                    }
                }
            }
        }
        Ok(self.pending.take())
    }

    /// The file that offsets of entries of this depth lie in: the image's own, or its external data file.
    pub fn file(&self, depth: u32) -> Option<&Path> {
        self.image.data_file_at(depth).map(zebu_storage::File::path)
    }
}
