//! Block devices of this machine, of either kind: their ends, their files, and the images that they are of.

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use zebu_engine::Image;

/// The fate of a device that is stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum WhenStopped {
    /// It was removed.
    Removed,
    /// It stays since it is in use (mounted, or a part of another device): its requests wait for the next server.
    Stays,
    /// It was gone before.
    WasGone,
}

/// A number for the file of an image, by which the next server finds that its image is the same; 0 if that can't be told.
pub(crate) fn mark_of(image: &Image) -> u64 {
    fs::metadata(image.path()).map_or(0, |file| file.dev().rotate_left(32) ^ file.ino())
}

/// Whether something has the device as its own: a mount, swap, a device above it. One that can't be asked counts as in use.
pub fn is_in_use(path: &Path) -> bool {
    let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NONBLOCK;
    match rustix::fs::open(path, flags, Mode::empty()) {
        Ok(_) | Err(Errno::NXIO | Errno::NODEV) => false,
        Err(_) => true,
    }
}
