//! The target that a conversion writes to: an open image, or one of another program that is being made.

use crate::image_stream::{ClusterBytes, ImageWriter, Packer};
use crate::new_foreign::{BlockWriter, Packed, StreamWriter, WritesUnderWay};
use crate::{Durability, Image, Result};
use std::path::{Path, PathBuf};
use zebu_storage::sync::Mutex;
use zebu_storage::{IoBufs, Worker};

/// A new image whose blocks come in order.
pub(super) enum DiskOrder {
    /// Of another program.
    Foreign(StreamWriter),
    /// A qcow2 image.
    Qcow2(Box<ImageWriter>),
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
            Self::Foreign(writer) => {
                let packed = blocks.into_iter().filter_map(|(index, bytes)| match bytes {
                    ClusterBytes::Packed(bytes) => Some((index, bytes)),
                    // Its way of packing has a form for everything.
                    ClusterBytes::Plain(_) => None,
                });
                writer.append(worker, &packed.collect::<Vec<Packed>>(), writes).await
            }
        }
    }

    async fn finish(self, worker: &Worker) -> Result<()> {
        match self {
            Self::Foreign(writer) => writer.finish(worker).await,
            Self::Qcow2(writer) => writer.finish(worker).await.map(drop),
        }
    }
}

/// The target of a conversion.
pub(super) enum Sink {
    /// An image that takes any request.
    Image(Image),
    /// A new image whose blocks are written in any order.
    Blocks(BlockWriter),
    /// A new image whose blocks are written in order, by the one task that has taken the writer.
    Stream { path: PathBuf, size: u64, packing: Packer, writer: Mutex<Option<DiskOrder>> },
}

impl Sink {
    pub(super) fn virtual_size(&self) -> u64 {
        match self {
            Self::Image(image) => image.virtual_size(),
            Self::Blocks(writer) => writer.virtual_size(),
            Self::Stream { size, .. } => *size,
        }
    }

    /// Bytes of a logical sector, as the image says.
    pub(super) fn logical_sector(&self) -> u32 {
        match self {
            Self::Image(image) => image.logical_sector_size(),
            Self::Blocks(writer) => writer.logical_block(),
            Self::Stream { .. } => 512,
        }
    }

    pub(super) fn path(&self) -> &Path {
        match self {
            Self::Image(image) => image.path(),
            Self::Blocks(writer) => writer.path(),
            Self::Stream { path, .. } => path,
        }
    }

    /// The image, if it is one that takes any request.
    pub(super) fn image(&self) -> Option<&Image> {
        match self {
            Self::Image(image) => Some(image),
            Self::Blocks(_) | Self::Stream { .. } => None,
        }
    }

    /// Whether it is written in the order of the disk.
    pub(super) fn is_stream(&self) -> bool {
        matches!(self, Self::Stream { .. })
    }

    /// Writes a part of the disk as it is.
    pub(super) async fn write(&self, worker: &Worker, offset: u64, bufs: IoBufs) -> (Result<()>, IoBufs) {
        match self {
            Self::Image(image) => image.write(worker, offset, bufs, Durability::Volatile).await,
            Self::Blocks(writer) => writer.write(worker, offset, bufs).await,
            Self::Stream { path, .. } => {
                let message =
                    "a part of a block can't be written: all sources but the last must have whole blocks";
                let error = crate::Error::new(crate::ErrorKind::Unsupported, message);
                (Err(error.on(path).at_guest(offset)), bufs)
            }
        }
    }

    /// Makes the image whole and durable, and closes it.
    pub(super) async fn finish(&self, worker: &Worker) -> Result<()> {
        match self {
            Self::Image(image) => image.close(worker).await,
            Self::Blocks(writer) => writer.finish(worker).await,
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
