//! Disks below an image's format.

use crate::remote_disk::RemoteName;
use std::path::{Path, PathBuf};
use std::time::Duration;
use zebu::Format;
use zebu_drivers::{BlkdebugConfig, PreallocateConfig};

/// A disk below an image, as the command line describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Node {
    /// A file of the system.
    File(PathBuf),
    /// A disk over the network.
    Remote(RemoteName),
    /// A node that is only read (`read-only=on`).
    ReadOnly(Box<Node>),
    /// No bytes (`null-co`, `null-aio`).
    Null { size: u64, reads_zeroes: bool, latency: Duration },
    /// Errors on purpose.
    Blkdebug { config: BlkdebugConfig, image: Box<Node> },
    /// A disk beside a raw one that must stay the same.
    Blkverify { raw: Box<Node>, test: Box<Node> },
    /// Space ahead of what is written.
    Preallocate { config: PreallocateConfig, file: Box<Node> },
    /// A part of a disk.
    Part { offset: u64, size: Option<u64>, file: Box<Node> },
    /// The guest's disk of an image, with its backing files. The format is found out if it is not given.
    Image { format: Option<Format>, file: Box<Node> },
}

impl Node {
    /// QEMU's name for the driver on top.
    pub(crate) fn driver(&self) -> &'static str {
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
    pub(crate) fn local_file(&self) -> Option<&Path> {
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
