//! A driver above an image.

use zebu_drivers::BlkdebugConfig;

/// A driver above an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Filter {
    /// Keeps in the image what is read from its backing files.
    CopyOnRead,
    /// Compresses what is written.
    Compress,
    /// Errors on purpose.
    Blkdebug(BlkdebugConfig),
}

impl Filter {
    /// QEMU's name for the driver.
    pub fn driver(&self) -> &'static str {
        match self {
            Self::CopyOnRead => "copy-on-read",
            Self::Compress => "compress",
            Self::Blkdebug(_) => "blkdebug",
        }
    }

    /// The name by which the driver has the node below it.
    pub fn child(&self) -> &'static str {
        if matches!(self, Self::Blkdebug(_)) { "image" } else { "file" }
    }
}
