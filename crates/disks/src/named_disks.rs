//! Disks that the command line named and that are no local files, by the name under which the engine opens them.

use crate::graph::Node;
use crate::reference::{OpenedFile, Reference, SharedDisk};
use crate::remote_disk::RemoteName;
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use zebu_engine::storage::Storage;
use zebu_remote::http::ServersWithoutRanges;
use zebu_remote::nbd::Endpoint;
use zebu_storage::sync::Mutex;

/// Names that the command line gave.
#[derive(Default)]
pub struct NamedDisks {
    names: Mutex<HashMap<PathBuf, Reference>>,
    /// Whether the command can show what a bitmap marks in place of holes.
    shows_bitmaps: AtomicBool,
}

impl NamedDisks {
    /// Notes it; the name by which it is opened.
    ///
    /// # Errors
    /// The same disk was noted with other options.
    pub fn note_remote(&self, name: RemoteName) -> Result<PathBuf, String> {
        let shown = name.shown();
        let mut names = self.names.lock();
        let mut path = PathBuf::from(&shown);
        // URLs that differ in what is not shown have a number each.
        let mut number = 1;
        while let Some(before) = names.get(&path) {
            let Reference::Remote(before) = before else {
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
        names.insert(path.clone(), Reference::Remote(name));
        Ok(path)
    }

    /// Notes what `name` leads to; the name by which it is opened. A local file needs no note.
    ///
    /// # Errors
    /// A disk over the network has this name, or the same disk was noted with other options.
    pub fn note_reference(&self, name: &Path, reference: Reference) -> Result<PathBuf, String> {
        match reference {
            Reference::Local(path) => Ok(path),
            Reference::Remote(remote) => self.note_remote(remote),
            other => self.note(name.to_owned(), other),
        }
    }

    fn note(&self, path: PathBuf, named: Reference) -> Result<PathBuf, String> {
        match self.names.lock().insert(path.clone(), named.clone()) {
            // A configuration may have changed since a name was opened first; servers and their options may not.
            Some(before) if before != named && matches!(before, Reference::Remote(_)) => {
                Err(format!("'{}' is given twice, with different options", path.display()))
            }
            _ => Ok(path),
        }
    }

    /// Notes what lies below an image; the name by which it is opened.
    ///
    /// # Errors
    /// A disk over the network has this name.
    pub fn note_node(&self, path: PathBuf, node: Node) -> Result<PathBuf, String> {
        self.note(path, Reference::Graph(node))
    }

    /// Lets files be read that were noted and whose servers have no ranges, once from the beginning to the end.
    pub fn allow_streams(&self) {
        for name in self.names.lock().values_mut() {
            if let Reference::Remote(RemoteName::Http { options, .. }) = name {
                options.without_ranges = ServersWithoutRanges::Stream;
            }
        }
    }

    /// Says that the command shows bitmaps: a disk named with `x-dirty-bitmap` is refused otherwise.
    pub fn allow_bitmaps(&self) {
        self.shows_bitmaps.store(true, Ordering::Relaxed);
    }

    /// Whether a disk may be named with `x-dirty-bitmap`.
    pub fn bitmaps_are_allowed(&self) -> bool {
        self.shows_bitmaps.load(Ordering::Relaxed)
    }

    /// Whether the holes of this disk are what a bitmap marks.
    pub fn shows_bitmap(&self, path: &Path) -> bool {
        matches!(self.named(path), Some(Reference::Remote(RemoteName::Nbd { options, .. })) if options.holes_from.is_some())
    }

    /// Notes a file without a name; `path` is what it is called from now on.
    ///
    /// # Errors
    /// A disk over the network has this name.
    pub fn note_open(&self, path: PathBuf, file: OwnedFd) -> Result<PathBuf, String> {
        self.note(path, Reference::Opened(OpenedFile::new(file)))
    }

    /// Notes an image that is open and verified; `path` is what it is called from now on.
    ///
    /// # Errors
    /// A disk over the network has this name.
    pub fn note_verified(&self, path: PathBuf, disk: Arc<dyn Storage>) -> Result<PathBuf, String> {
        self.note(path, Reference::Shared(SharedDisk(disk)))
    }

    /// The disk of that name.
    pub fn named(&self, path: &Path) -> Option<Reference> {
        self.names.lock().get(path).cloned()
    }

    /// Whether `path` is a disk that the command line named and that is no local file.
    pub fn is_remote(&self, path: &Path) -> bool {
        matches!(self.named(path), Some(Reference::Remote(_) | Reference::Graph(_)))
    }

    /// QEMU's name for the driver of a disk that the command line named and that is no local file.
    pub fn driver(&self, path: &Path) -> Option<&'static str> {
        match self.named(path)? {
            Reference::Remote(name) => Some(name.driver()),
            Reference::Graph(node) => Some(node.driver()),
            _ => None,
        }
    }

    /// The server of a disk that the command line named: the path of its socket, or host and port.
    pub fn server(&self, path: &Path) -> Option<String> {
        match self.named(path)? {
            Reference::Remote(RemoteName::Nbd { address, .. }) => match &address.endpoint {
                Endpoint::Unix(path) => Some(path.display().to_string()),
                Endpoint::Tcp { host, port } => Some(format!("{host}:{port}")),
                _ => None,
            },
            _ => None,
        }
    }
}
