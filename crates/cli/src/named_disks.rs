//! Disks that the command line named and that are no local files, by the name under which the engine opens them.

use crate::graph::Node;
use crate::remote_disk::RemoteName;
use std::collections::HashMap;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use zebu::storage::Storage;
use zebu_remote::http::ServersWithoutRanges;
use zebu_remote::nbd::Endpoint;
use zebu_storage::sync::Mutex;

/// Names that the command line gave.
#[derive(Default)]
pub(crate) struct NamedDisks {
    names: Mutex<HashMap<PathBuf, Named>>,
    /// Whether the command can show what a bitmap marks in place of holes.
    shows_bitmaps: AtomicBool,
}

impl NamedDisks {
    /// Notes it; the name by which it is opened.
    ///
    /// # Errors
    /// The same disk was noted with other options.
    pub(crate) fn note_remote(&self, name: RemoteName) -> Result<PathBuf, String> {
        let shown = name.shown();
        let mut names = self.names.lock();
        let mut path = PathBuf::from(&shown);
        // URLs that differ in what is not shown have a number each.
        let mut number = 1;
        while let Some(before) = names.get(&path) {
            let Named::Remote(before) = before else {
                return Err(format!("'{shown}' is the name of another disk"));
            };
            if *before == name {
                return Ok(path);
            }
            if before.is_place_of(&name) {
                return Err(format!("'{shown}' is given twice, with different options"));
            }
            number += 1;
            path = PathBuf::from(format!("{shown}#{number}"));
        }
        names.insert(path.clone(), Named::Remote(name));
        Ok(path)
    }

    fn note(&self, path: PathBuf, named: Named) -> Result<PathBuf, String> {
        match self.names.lock().insert(path.clone(), named.clone()) {
            // A configuration may have changed since a name was opened first; servers and their options may not.
            Some(before) if before != named && matches!(before, Named::Remote(_)) => {
                Err(format!("'{}' is given twice, with different options", path.display()))
            }
            _ => Ok(path),
        }
    }

    /// Notes what lies below an image; the name by which it is opened.
    ///
    /// # Errors
    /// A disk over the network has this name.
    pub(crate) fn note_node(&self, path: PathBuf, node: Node) -> Result<PathBuf, String> {
        self.note(path, Named::Graph(node))
    }

    /// Lets files be read that were noted and whose servers have no ranges, once from the beginning to the end.
    pub(crate) fn allow_streams(&self) {
        for name in self.names.lock().values_mut() {
            if let Named::Remote(RemoteName::Http { options, .. }) = name {
                options.without_ranges = ServersWithoutRanges::Stream;
            }
        }
    }

    /// Says that the command shows bitmaps: a disk named with `x-dirty-bitmap` is refused otherwise.
    pub(crate) fn allow_bitmaps(&self) {
        self.shows_bitmaps.store(true, Ordering::Relaxed);
    }

    /// Whether a disk may be named with `x-dirty-bitmap`.
    pub(crate) fn bitmaps_are_allowed(&self) -> bool {
        self.shows_bitmaps.load(Ordering::Relaxed)
    }

    /// Whether the holes of this disk are what a bitmap marks.
    pub(crate) fn shows_bitmap(&self, path: &Path) -> bool {
        matches!(self.named(path), Some(Named::Remote(RemoteName::Nbd { options, .. })) if options.holes_from.is_some())
    }

    /// Notes a file without a name; `path` is what it is called from now on.
    ///
    /// # Errors
    /// A disk over the network has this name.
    pub(crate) fn note_open(&self, path: PathBuf, file: OwnedFd) -> Result<PathBuf, String> {
        self.note(path, Named::Open(OpenedFile(Arc::new(file))))
    }

    /// Notes an image that is open and verified; `path` is what it is called from now on.
    ///
    /// # Errors
    /// A disk over the network has this name.
    pub(crate) fn note_verified(&self, path: PathBuf, disk: Arc<dyn Storage>) -> Result<PathBuf, String> {
        self.note(path, Named::Verified(SharedDisk(disk)))
    }

    /// The disk of that name.
    pub(crate) fn named(&self, path: &Path) -> Option<Named> {
        self.names.lock().get(path).cloned()
    }

    /// Whether `path` is a disk that the command line named and that is no local file.
    pub(crate) fn is_remote(&self, path: &Path) -> bool {
        matches!(self.named(path), Some(Named::Remote(_) | Named::Graph(_)))
    }

    /// QEMU's name for the driver of a disk that the command line named and that is no local file.
    pub(crate) fn driver(&self, path: &Path) -> Option<&'static str> {
        match self.named(path)? {
            Named::Remote(name) => Some(name.driver()),
            Named::Graph(node) => Some(node.driver()),
            Named::Open(_) | Named::Verified(_) => None,
        }
    }

    /// The server of a disk that the command line named: the path of its socket, or host and port.
    pub(crate) fn server(&self, path: &Path) -> Option<String> {
        match self.named(path)? {
            Named::Graph(_)
            | Named::Open(_)
            | Named::Verified(_)
            | Named::Remote(
                RemoteName::Http { .. }
                | RemoteName::Object { .. }
                | RemoteName::Rbd { .. }
                | RemoteName::Oci { .. },
            ) => None,
            Named::Remote(RemoteName::Nbd { address, .. }) => match &address.endpoint {
                Endpoint::Unix(path) => Some(path.display().to_string()),
                Endpoint::Tcp { host, port } => Some(format!("{host}:{port}")),
                _ => None,
            },
        }
    }
}

/// A disk that is no local file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Named {
    Remote(RemoteName),
    Graph(Node),
    /// A file that is open already and has no name.
    Open(OpenedFile),
    /// An image that is open, as a manifest says.
    Verified(SharedDisk),
}

/// A disk, shared by all who open its name.
#[derive(Clone)]
pub(crate) struct SharedDisk(pub(crate) Arc<dyn Storage>);

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
pub(crate) struct OpenedFile(Arc<OwnedFd>);

impl OpenedFile {
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
