//! A node of the graph below an image, as `info` shows it.

use zebu_engine::ImageInfo;

/// A node: an image, a file, or a driver.
#[derive(Debug)]
pub(crate) struct InfoNode {
    /// Its name, as it would be opened.
    pub(crate) filename: String,
    /// The format or the driver.
    pub(crate) format: &'static str,
    /// Bytes of its disk.
    pub(crate) virtual_size: u64,
    /// Bytes that it takes where it is kept, if that is known.
    pub(crate) actual_size: Option<u64>,
    /// Bytes of a cluster, if it has some.
    pub(crate) cluster_size: Option<u64>,
    /// Whether it was left without being closed, if the driver knows.
    pub(crate) dirty: Option<bool>,
    /// Everything else that is known.
    pub(crate) kind: Kind,
    /// Nodes below it with their names, in QEMU's order.
    pub(crate) children: Vec<(String, InfoNode)>,
}

/// Everything else that is known of a node.
#[derive(Debug)]
pub(crate) enum Kind {
    /// An image.
    Image(Box<ImageInfo>),
    /// A file of the system.
    File {
        /// Extent size hint in bytes, if the file has one.
        extent_size_hint: Option<u32>,
    },
    /// A driver.
    Driver,
}

impl InfoNode {
    /// Everything about the image, if it is one.
    pub(crate) fn image(&self) -> Option<&ImageInfo> {
        if let Kind::Image(info) = &self.kind { Some(info) } else { None }
    }
}

/// Bytes of the sectors that a file takes: the length that QEMU tells.
pub(crate) fn whole_sectors(length: u64) -> u64 {
    length.checked_next_multiple_of(512).unwrap_or(length)
}
