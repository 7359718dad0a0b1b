//! The ways to compress a cluster.

/// How a cluster is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Method {
    /// Raw deflate, distances up to 32 KiB; levels 1 to 12.
    Deflate { level: u8 },
    /// Raw deflate, distances up to 4 KiB; levels 1 to 9.
    NarrowDeflate { level: u8 },
    /// One zstd frame with content size and checksum; levels 1 to 22.
    #[cfg(feature = "zstd")]
    Zstd { level: u8 },
}
