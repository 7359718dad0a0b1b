//! The qcow2 on-disk format as pure data.
#![forbid(unsafe_code)]

/// How compressed clusters are encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Compression {
    /// Raw deflate.
    #[default]
    Zlib,
    /// zstd frames.
    Zstd,
}
