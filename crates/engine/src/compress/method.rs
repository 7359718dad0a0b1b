//! The ways to compress a cluster, and those in which one may be packed.

use crate::{Error, ErrorKind, Result};
use zebu_qcow2::Compression;

/// How a unit of a disk is packed: clusters, and the grains, blocks and chunks of other formats.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Packing {
    /// As the clusters of a qcow2 image are.
    Cluster(Compression),
    /// Deflate in a zlib wrapper.
    Zlib,
    /// bzip2.
    Bzip2,
}

impl TryFrom<zebu_foreign::Packing> for Packing {
    type Error = Error;
    fn try_from(packing: zebu_foreign::Packing) -> Result<Self> {
        match packing {
            zebu_foreign::Packing::Deflate => Ok(Self::Cluster(Compression::Zlib)),
            zebu_foreign::Packing::Zlib => Ok(Self::Zlib),
            zebu_foreign::Packing::Bzip2 => Ok(Self::Bzip2),
            other => {
                let message = format!("data packed as {other:?} can't be read by this version");
                Err(Error::new(ErrorKind::Unsupported, message))
            }
        }
    }
}

/// How a cluster is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Method {
    /// Raw deflate, distances up to 32 KiB; levels 1 to 12.
    Deflate { level: u8 },
    /// Raw deflate, distances up to 4 KiB; levels 1 to 9.
    NarrowDeflate { level: u8 },
    /// Deflate in a zlib wrapper; levels 1 to 12. The stream may be longer than the cluster.
    Zlib { level: u8 },
    /// One zstd frame with content size and checksum; levels 1 to 22.
    #[cfg(feature = "zstd")]
    Zstd { level: u8 },
}
