//! The bytes of files, as a caller gives them.

use crate::bytes;
use crate::error::{Error, Result};
pub use crate::place::{FileIndex, Missing};

/// The files of an image.
pub trait Files {
    /// Bytes of a file; 0 for one that there is not.
    fn len(&self, file: FileIndex) -> u64;

    /// Fills `out` from `offset` on. The range lies within the file.
    ///
    /// # Errors
    /// The bytes have to be read first; the range that is reported need not be the whole of what was asked for.
    fn read(&self, file: FileIndex, offset: u64, out: &mut [u8]) -> Result<(), Missing>;

    /// Whether there are no bytes in the image file.
    fn is_empty(&self) -> bool {
        self.len(FileIndex::IMAGE) == 0
    }
}

/// One file of several.
#[derive(Clone, Copy)]
pub(crate) struct Source<'a> {
    files: &'a dyn Files,
    file: FileIndex,
}

impl<'a> Source<'a> {
    pub(crate) fn new(files: &'a dyn Files, file: FileIndex) -> Self {
        Self { files, file }
    }

    pub(crate) fn image(files: &'a dyn Files) -> Self {
        Self::new(files, FileIndex::IMAGE)
    }

    pub(crate) fn len(self) -> u64 {
        self.files.len(self.file)
    }

    /// Whether a range lies within the file.
    pub(crate) fn holds(self, offset: u64, len: u64) -> bool {
        offset.checked_add(len).is_some_and(|end| end <= self.len())
    }

    /// Fails unless a range lies within the file. `what` is the name of the thing in it.
    pub(crate) fn check(self, offset: u64, len: u64, what: &str) -> Result<()> {
        if self.holds(offset, len) {
            return Ok(());
        }
        let message = format!(
            "{what} of {len} bytes reaches past the end of the file at {}; the file is cut off or damaged",
            self.len()
        );
        Err(Error::damaged(message).at(self.file, offset))
    }

    /// Fills `out`.
    pub(crate) fn fill(self, offset: u64, out: &mut [u8], what: &str) -> Result<()> {
        self.check(offset, out.len() as u64, what)?;
        Ok(self.files.read(self.file, offset, out)?)
    }

    /// Reads a structure of a fixed size.
    pub(crate) fn array<const N: usize>(self, offset: u64, what: &str) -> Result<[u8; N]> {
        let mut out = [0; N];
        self.fill(offset, &mut out, what)?;
        Ok(out)
    }

    /// Reads `len` bytes; the caller has compared `len` with a limit.
    pub(crate) fn vec(self, offset: u64, len: u64, what: &str) -> Result<Vec<u8>> {
        self.check(offset, len, what)?;
        let len = usize::try_from(len).map_err(|_| Error::damaged(format!("{what} is too large")))?;
        let mut out = vec![0; len];
        self.files.read(self.file, offset, &mut out)?;
        Ok(out)
    }

    pub(crate) fn le32(self, offset: u64, what: &str) -> Result<u32> {
        self.array::<4>(offset, what).map(|bytes| bytes::le32(&bytes, 0))
    }
    pub(crate) fn le64(self, offset: u64, what: &str) -> Result<u64> {
        self.array::<8>(offset, what).map(|bytes| bytes::le64(&bytes, 0))
    }
    pub(crate) fn be32(self, offset: u64, what: &str) -> Result<u32> {
        self.array::<4>(offset, what).map(|bytes| bytes::be32(&bytes, 0))
    }
    pub(crate) fn be64(self, offset: u64, what: &str) -> Result<u64> {
        self.array::<8>(offset, what).map(|bytes| bytes::be64(&bytes, 0))
    }
}
