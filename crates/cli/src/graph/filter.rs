//! A driver above an image.

use zebu_drivers::BlkdebugConfig;

/// A driver above an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Filter {
    /// Keeps in the image what is read from its backing files.
    CopyOnRead,
    /// Compresses what is written.
    Compress,
    /// Errors on purpose.
    Blkdebug(BlkdebugConfig),
}
