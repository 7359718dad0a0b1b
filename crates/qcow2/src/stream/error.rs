//! Errors of images that are written in order.

use crate::error::FormatError;

/// Why an image can't be written in the order of its disk.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StreamError {
    /// Clusters come in descending order, or past the end of the disk.
    #[error("clusters come in another order than that of the disk")]
    OutOfOrder,
    /// The file would be longer than its tables can say.
    #[error("the image file becomes too large for its format")]
    TooLarge,
    /// A cluster's bytes are none, or more than a cluster.
    #[error("a cluster has {len} bytes")]
    Length {
        /// Bytes.
        len: usize,
    },
    /// A cluster was said to be empty before, and has data.
    #[error("guest cluster {cluster} has data now, and had none before")]
    Unexpected {
        /// Its number.
        cluster: u64,
    },
    /// The header can't be written.
    #[error(transparent)]
    Header(#[from] FormatError),
}
