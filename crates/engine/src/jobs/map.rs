//! What each range of a virtual disk is made of, adjacent equal ranges merged, as `qemu-img map` shows it.

use crate::{Image, Result};
use std::path::Path;
use zebu_storage::Worker;

/// Which part of the disk is mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MapOptions {
    /// First byte (`-s`).
    pub start: u64,
    /// Most bytes (`-l`); to the end of the disk if `None`.
    pub max_length: Option<u64>,
}

/// A range of the disk of one kind. The fields have the meaning of the JSON keys of `qemu-img map`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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

/// Walks a disk from [`MapOptions::start`] on.
pub struct Mapper {
    image: Image,
    options: MapOptions,
}

impl Mapper {
    /// A walk over `image`.
    pub fn new(image: &Image, options: MapOptions) -> Self {
        Self { image: image.clone(), options }
    }
    /// The next entry, `None` at the end.
    pub async fn map_next(&mut self, worker: &Worker) -> Result<Option<MapEntry>> {
        todo!("{:?}", (worker.id(), self.options))
    }
    /// The file that offsets of entries of this depth lie in: the image's own, or its external data file.
    pub fn file(&self, depth: u32) -> Option<&Path> {
        self.image.data_file_at(depth).map(zebu_storage::File::path)
    }
}
