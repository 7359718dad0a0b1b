//! A writable copy of an image, at once.

use crate::{CacheMode, Format, RefPolicy, Result};
use std::path::{Path, PathBuf};
use zebu_storage::Worker;

/// Which way is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CloneMode {
    /// A reflink where the file system can and the image stands alone, else an overlay.
    #[default]
    Auto,
    /// A reflink or an error.
    Reflink,
    /// An overlay.
    Overlay,
}

/// How a clone is made.
#[derive(Debug, Clone, Default)]
pub struct CloneOptions {
    /// Which way.
    pub mode: CloneMode,
    /// Format of the source; probed if `None` (but an overlay over a raw image wants it given).
    pub format: Option<Format>,
    /// Cache mode for both files.
    pub cache: CacheMode,
    /// Which files that the source names may be opened.
    pub refs: RefPolicy,
}

/// Which way was taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CloneMethod {
    /// The files share their blocks until one of them writes; they depend on each other in nothing.
    Reflink,
    /// The clone is an overlay: the source must not be written or moved as long as the clone is used.
    Overlay {
        /// The backing file as the clone names it.
        backing: PathBuf,
        /// Why it is not a reflink, in words.
        reason: String,
    },
}

/// The result of a clone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CloneReport {
    /// Which way was taken.
    pub method: CloneMethod,
    /// Format of the clone.
    pub format: Format,
    /// Bytes of its virtual disk.
    pub virtual_size: u64,
}

/// Makes `target`, which must not exist, a writable copy of the image `source`. The source is locked against
/// writers meanwhile, so the clone is one consistent state of it.
pub async fn clone_image(
    worker: &Worker,
    source: &Path,
    target: &Path,
    options: &CloneOptions,
) -> Result<CloneReport> {
    todo!("{:?}", (worker.id(), source, target, options))
}
