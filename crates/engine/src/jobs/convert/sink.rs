//! The target that a conversion writes to: an open image, or one of another program that is being made.

use super::moves::Moves;
use crate::image_stream::{ClusterBytes, ImageWriter, Packer, PipedWriter, PlacedImage};
use crate::new_foreign::{BlockWriter, FilePlace, GrowingFile, Packed, StreamWriter, WritesUnderWay};
use crate::{Durability, Error, ErrorKind, Image, Preallocation, Result, Shrink};
use std::ops::Range;
use std::path::{Path, PathBuf};
use zebu_storage::sync::Mutex;
use zebu_storage::{IoBufs, Worker};

/// A new image whose blocks come in order.
pub(super) enum DiskOrder {
    /// Of another program.
    Foreign(Box<StreamWriter>),
    /// A qcow2 image.
    Qcow2(Box<ImageWriter>),
    /// A qcow2 image that is written from its first byte to its last.
    Piped(Box<PipedWriter>),
}

impl DiskOrder {
    /// Appends blocks, which come in ascending order.
    pub(super) async fn append(
        &mut self,
        worker: &Worker,
        blocks: Vec<(u64, ClusterBytes)>,
        writes: &mut WritesUnderWay,
    ) -> Result<()> {
        match self {
            Self::Qcow2(writer) => writer.append(worker, &blocks, writes).await,
            Self::Piped(writer) => writer.append(worker, blocks, writes).await,
            Self::Foreign(writer) => {
                let packed = blocks.into_iter().filter_map(|(index, bytes)| match bytes {
                    ClusterBytes::Packed(bytes) => Some((index, bytes)),
                    // Its way of packing has a form for everything, and it reads as zero where nothing is written.
                    ClusterBytes::Plain(_) | ClusterBytes::Zero => None,
                });
                writer.append(worker, &packed.collect::<Vec<Packed>>(), writes).await
            }
        }
    }

    fn cut(&mut self, size: u64) -> Result<()> {
        match self {
            Self::Foreign(_) => Ok(()),
            Self::Qcow2(writer) => writer.cut(size),
            Self::Piped(writer) => writer.cut(),
        }
    }

    async fn finish(self, worker: &Worker) -> Result<()> {
        match self {
            Self::Foreign(writer) => writer.finish(worker).await,
            Self::Qcow2(writer) => writer.finish(worker).await.map(drop),
            Self::Piped(writer) => writer.finish(worker).await,
        }
    }
}

/// The target of a conversion.
pub(super) enum Sink {
    /// An image that takes any request.
    Image(Image),
    /// A new image of another program, whose blocks are written in any order.
    Blocks(BlockWriter),
    /// A new qcow2 image, whose clusters are written in any order.
    Clusters { writer: Box<PlacedImage>, moves: Moves },
    /// A new image whose blocks are written in order, by the one task that has taken the writer. `shown`: bytes of its backing
    /// file's disk.
    Stream { path: PathBuf, size: u64, shown: u64, packing: Packer, writer: Mutex<Option<DiskOrder>> },
}

impl Sink {
    pub(super) fn virtual_size(&self) -> u64 {
        match self {
            Self::Image(image) => image.virtual_size(),
            Self::Blocks(writer) => writer.virtual_size(),
            Self::Clusters { writer, .. } => writer.virtual_size(),
            Self::Stream { size, .. } => *size,
        }
    }

    /// Bytes of a logical sector, as the image says.
    pub(super) fn logical_sector(&self) -> u32 {
        match self {
            Self::Image(image) => image.logical_sector_size(),
            Self::Blocks(writer) => writer.logical_block(),
            Self::Clusters { .. } | Self::Stream { .. } => 512,
        }
    }

    pub(super) fn path(&self) -> &Path {
        match self {
            Self::Image(image) => image.path(),
            Self::Blocks(writer) => writer.path(),
            Self::Clusters { writer, .. } => writer.path(),
            Self::Stream { path, .. } => path,
        }
    }

    /// The image, if it is one that takes any request.
    pub(super) fn image(&self) -> Option<&Image> {
        match self {
            Self::Image(image) => Some(image),
            Self::Blocks(_) | Self::Clusters { .. } | Self::Stream { .. } => None,
        }
    }

    /// Bytes of the disk of its backing file.
    pub(super) fn backing_size(&self) -> u64 {
        match self {
            Self::Image(image) => image.backing().map_or(0, |backing| backing.virtual_size()),
            Self::Blocks(_) => 0,
            Self::Clusters { writer, .. } => writer.shown(),
            Self::Stream { shown, .. } => *shown,
        }
    }

    /// Whether it is written in the order of the disk.
    pub(super) fn is_stream(&self) -> bool {
        matches!(self, Self::Stream { .. })
    }

    /// The file whose places are chosen first and written afterwards.
    pub(super) fn placed_file(&self) -> Option<&GrowingFile> {
        match self {
            Self::Image(_) | Self::Stream { .. } => None,
            Self::Blocks(writer) => Some(writer.file()),
            Self::Clusters { writer, .. } => Some(writer.file()),
        }
    }

    /// Chooses the places of the `filled` parts of a range of the disk that begins at `offset`.
    pub(super) fn place(
        &self,
        offset: u64,
        filled: &[Range<usize>],
        places: &mut Vec<FilePlace>,
    ) -> Result<()> {
        match self {
            Self::Image(_) | Self::Stream { .. } => Ok(()),
            Self::Blocks(writer) => writer.place(offset, filled, places),
            Self::Clusters { writer, .. } => writer.place(offset, filled, places),
        }
    }

    /// Hides the backing file in whole clusters. Callers come in the order of the disk.
    pub(super) fn place_zeroes(&self, range: Range<u64>, places: &mut Vec<FilePlace>) -> Result<()> {
        match self {
            Self::Clusters { writer, .. } => writer.zero(range, places),
            Self::Image(_) | Self::Blocks(_) | Self::Stream { .. } => Ok(()),
        }
    }

    /// Writes a part of an image's disk as it is.
    pub(super) async fn write(&self, worker: &Worker, offset: u64, bufs: IoBufs) -> (Result<()>, IoBufs) {
        if let Some(image) = self.image() {
            return image.write(worker, offset, bufs, Durability::Volatile).await;
        }
        let error = Error::new(ErrorKind::Unsupported, "the target is no image before its end");
        (Err(error.on(self.path()).at_guest(offset)), bufs)
    }

    /// Makes the disk as long as the source turned out to be.
    pub(super) async fn cut(&self, worker: &Worker, size: u64) -> Result<()> {
        match self {
            Self::Image(image) => image.resize(worker, size, Shrink::Allow, Preallocation::Off).await,
            Self::Blocks(_) => Ok(()),
            Self::Clusters { writer, .. } => writer.cut(size),
            Self::Stream { writer, .. } => writer.lock().as_mut().map_or(Ok(()), |writer| writer.cut(size)),
        }
    }

    /// Makes the image whole and durable, and closes it.
    pub(super) async fn finish(&self, worker: &Worker) -> Result<()> {
        match self {
            Self::Image(image) => image.close(worker).await,
            Self::Blocks(writer) => writer.finish(worker).await,
            Self::Clusters { writer, .. } => writer.finish(worker).await,
            Self::Stream { writer, .. } => {
                let writer = writer.lock().take();
                match writer {
                    Some(writer) => writer.finish(worker).await,
                    None => Ok(()),
                }
            }
        }
    }
}
