//! How a command opens one image.

use crate::values::{Aio, Discard};
use std::path::PathBuf;
use zebu::OpenOptions;

/// How a command opens one image, once everything on the command line has been looked at.
#[derive(Debug, Clone)]
pub(crate) struct ImageSpec {
    /// The file.
    pub(crate) path: PathBuf,
    /// How it is opened.
    pub(crate) options: OpenOptions,
    /// What the image options say about the engine of the I/O.
    pub(crate) aio: Option<Aio>,
    /// What the image options say about discards.
    pub(crate) discard: Option<Discard>,
}
