//! Disks below an image's format.

use crate::remote_disk::RemoteName;
use std::path::{Path, PathBuf};
use std::time::Duration;
use zebu_drivers::{BlkdebugConfig, PreallocateConfig};
use zebu_engine::Format;

/// A disk below an image, as the command line describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Node {
    /// A file of the system.
    File(PathBuf),
    /// A disk over the network.
    Remote(RemoteName),
    /// A node that is only read (`read-only=on`).
    ReadOnly(Box<Node>),
    /// No bytes (`null-co`, `null-aio`).
    Null {
        /// Bytes of the disk.
        size: u64,
        /// Whether buffers are zeroed, or left as they are.
        reads_zeroes: bool,
        /// How long each request takes.
        latency: Duration,
    },
    /// Errors on purpose.
    Blkdebug {
        /// Which errors, and when.
        config: BlkdebugConfig,
        /// The disk below.
        image: Box<Node>,
    },
    /// A disk beside a raw one that must stay the same.
    Blkverify {
        /// The raw disk.
        raw: Box<Node>,
        /// The other.
        test: Box<Node>,
    },
    /// Space ahead of what is written.
    Preallocate {
        /// How much.
        config: PreallocateConfig,
        /// The disk below.
        file: Box<Node>,
    },
    /// A part of a disk.
    Part {
        /// Bytes before it.
        offset: u64,
        /// Its bytes; to the end of the disk if it is not given.
        size: Option<u64>,
        /// The whole disk.
        file: Box<Node>,
    },
    /// The guest's disk of an image, with its backing files. The format is found out if it is not given.
    Image {
        /// The format.
        format: Option<Format>,
        /// The file.
        file: Box<Node>,
    },
}

impl Node {
    /// QEMU's name for the driver on top.
    pub fn driver(&self) -> &'static str {
        match self {
            Self::File(_) => "file",
            Self::Remote(name) => name.driver(),
            Self::ReadOnly(node) => node.driver(),
            Self::Null { .. } => "null-co",
            Self::Blkdebug { .. } => "blkdebug",
            Self::Blkverify { .. } => "blkverify",
            Self::Preallocate { .. } => "preallocate",
            Self::Part { .. } => "raw",
            Self::Image { format, .. } => format.map_or("raw", Format::name),
        }
    }

    /// The file of the system that lies at the bottom, if there is one.
    pub fn local_file(&self) -> Option<&Path> {
        match self {
            Self::File(path) => Some(path),
            Self::Remote(_) | Self::Null { .. } => None,
            Self::ReadOnly(below)
            | Self::Blkdebug { image: below, .. }
            | Self::Blkverify { test: below, .. }
            | Self::Preallocate { file: below, .. }
            | Self::Part { file: below, .. }
            | Self::Image { file: below, .. } => below.local_file(),
        }
    }
}
