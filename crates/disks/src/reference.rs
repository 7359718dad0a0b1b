//! References: the meanings of names.

use crate::graph::Node;
use crate::remote_disk::RemoteName;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use zebu_engine::storage::Storage;

/// A disk, as its name describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reference {
    /// A local file.
    Local(PathBuf),
    /// A disk on a server: NBD, a web server, a store, a cluster of Ceph.
    Remote(RemoteName),
    /// A stack of drivers.
    Graph(Node),
    /// A file that is open already and has no name.
    Opened(OpenedFile),
    /// A disk that is open already, such as one that is compared with a manifest.
    Shared(SharedDisk),
}

impl Reference {
    /// The local file that it ends at, below whatever lies above it.
    pub(crate) fn local_file(&self) -> Option<&Path> {
        match self {
            Self::Local(path) => Some(path),
            Self::Graph(node) => node.local_file(),
            Self::Remote(_) | Self::Opened(_) | Self::Shared(_) => None,
        }
    }
}

/// A disk, shared by all who open its name.
#[derive(Clone)]
pub struct SharedDisk(pub(crate) Arc<dyn Storage>);

impl fmt::Debug for SharedDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SharedDisk")
    }
}

impl PartialEq for SharedDisk {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for SharedDisk {}

/// A descriptor, shared by all who open its file.
#[derive(Debug, Clone)]
pub struct OpenedFile(Arc<OwnedFd>);

impl OpenedFile {
    pub(crate) fn new(file: OwnedFd) -> Self {
        Self(Arc::new(file))
    }

    /// The descriptor.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl PartialEq for OpenedFile {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for OpenedFile {}
