//! The place of a run of guest bytes.

use crate::files::FileIndex;

/// How a packed unit is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Packing {
    /// Deflate without a wrapper (RFC 1951).
    Deflate,
    /// Deflate in a zlib wrapper with a checksum (RFC 1950).
    Zlib,
    /// bzip2.
    Bzip2,
}

/// A compressed unit of the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packed {
    /// The file of the stream.
    pub file: FileIndex,
    /// Offset of the stream in that file, in bytes.
    pub offset: u64,
    /// Bytes of the stream, or of what holds it: more may follow its end.
    pub len: u64,
    /// How it is compressed.
    pub packing: Packing,
    /// Guest offset of the unit's first byte.
    pub start: u64,
    /// Bytes of the unit when inflated. The last unit of a disk may hold fewer, down to the end of the disk.
    pub unit: u64,
}

/// The place of guest bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Nothing here: the parent's bytes, or zeroes where there is no parent.
    Hole,
    /// Zeroes.
    Zero,
    /// In a file.
    Data {
        /// The file.
        file: FileIndex,
        /// Offset in it, in bytes.
        offset: u64,
    },
    /// Within a compressed unit.
    Packed(Packed),
}

impl Kind {
    /// Whether `next`, which follows `len` bytes of `self`, continues it.
    pub(crate) fn continues_with(self, len: u64, next: Self) -> bool {
        match (self, next) {
            (Self::Hole, Self::Hole) | (Self::Zero, Self::Zero) => true,
            (Self::Data { file: a, offset: start }, Self::Data { file: b, offset }) => {
                a == b && start.checked_add(len) == Some(offset)
            }
            _ => false,
        }
    }
}

/// A run of guest bytes of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// The place of the first byte.
    pub kind: Kind,
    /// Bytes, 1 at least.
    pub len: u64,
}
