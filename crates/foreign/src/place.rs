//! A file of an image, and a range of one.

/// A file of an image: the image file itself, or one that a descriptor names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileIndex(pub u32);

impl FileIndex {
    /// The image file itself.
    pub const IMAGE: Self = Self(0);
}

/// A range of a file that has to be read before a parser can go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Missing {
    /// The file.
    pub file: FileIndex,
    /// Offset in bytes.
    pub offset: u64,
    /// Bytes; the range lies within the file.
    pub len: usize,
}
