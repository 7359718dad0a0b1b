//! The target that a conversion writes to: an open image, or one of another program that is being made.

use crate::compress::{CodecPool, Method};
use crate::new_foreign::{BlockWriter, StreamWriter};
use crate::{Durability, Image, Result};
use std::path::{Path, PathBuf};
use zebu_storage::sync::Mutex;
use zebu_storage::{IoBufs, Worker};

/// How blocks are packed.
#[derive(Debug, Clone)]
pub(super) struct Packing {
    pub(super) method: Method,
    pub(super) pool: CodecPool,
}

/// The target of a conversion.
pub(super) enum Sink {
    /// An image that takes any request.
    Image(Image),
    /// A new image whose blocks are written in any order.
    Blocks(BlockWriter),
    /// A new image whose blocks are written in order, by the one task that has taken the writer.
    Stream { path: PathBuf, size: u64, packing: Packing, writer: Mutex<Option<StreamWriter>> },
}

impl Sink {
    pub(super) fn virtual_size(&self) -> u64 {
        match self {
            Self::Image(image) => image.virtual_size(),
            Self::Blocks(writer) => writer.virtual_size(),
            Self::Stream { size, .. } => *size,
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
