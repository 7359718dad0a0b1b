//! An image file in a chain: its driver, and the image that it stands on.

use crate::options::{CacheMode, Format};
use crate::qcow2::state::Qcow2;
use crate::turnstile::Turnstile;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Acquire};
use zebu_storage::File;

/// A raw image: the bytes of the disk.
#[derive(Debug)]
pub(crate) struct Raw {
    pub(crate) file: File,
    /// Bytes of the virtual disk.
    pub(crate) size: AtomicU64,
    pub(crate) cache_mode: CacheMode,
}

/// What understands the file.
#[derive(Debug)]
pub(crate) enum Driver {
    Qcow2(Arc<Qcow2>),
    Raw(Raw),
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) path: PathBuf,
    pub(crate) driver: Driver,
    pub(crate) backing: Option<Arc<Node>>,
    /// Requests that change the image enter; a resize is alone.
    pub(crate) changes: Turnstile,
}

impl Node {
    pub(crate) fn format(&self) -> Format {
        match &self.driver {
            Driver::Qcow2(_) => Format::Qcow2,
            Driver::Raw(_) => Format::Raw,
        }
    }

    /// Bytes of the virtual disk.
    pub(crate) fn virtual_size(&self) -> u64 {
        match &self.driver {
            Driver::Qcow2(qcow2) => qcow2.virtual_size(),
            Driver::Raw(raw) => raw.size.load(Acquire),
        }
    }

    /// The file that guest data lies in.
    pub(crate) fn data_file(&self) -> &File {
        match &self.driver {
            Driver::Qcow2(qcow2) => qcow2.data(),
            Driver::Raw(raw) => &raw.file,
        }
    }
}

impl Drop for Node {
    /// A chain may be a thousand images long: it is taken down in a loop, not in a recursion.
    fn drop(&mut self) {
        let mut next = self.backing.take();
        while let Some(node) = next {
            next = Arc::into_inner(node).and_then(|mut node| node.backing.take());
        }
    }
}
