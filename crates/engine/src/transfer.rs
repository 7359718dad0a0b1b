//! Moving bytes between files without bringing them into this process.

use crate::{Error, ErrorKind, Result};
use zebu_storage::{File, Worker};

/// How the kernel moves bytes from one file to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Transfer {
    /// Both files share the blocks until one of them is written (FICLONERANGE). Whole blocks only.
    Share,
    /// It copies them (copy_file_range).
    Copy,
}

/// A range of a file.
#[derive(Debug, Clone)]
pub(crate) struct FileRange {
    pub(crate) file: File,
    /// Bytes.
    pub(crate) offset: u64,
    /// Bytes.
    pub(crate) len: u64,
}

impl FileRange {
    /// The rest behind the first `skip` bytes.
    pub(crate) fn from(&self, skip: u64) -> Self {
        let skip = skip.min(self.len);
        Self { file: self.file.clone(), offset: self.offset + skip, len: self.len - skip }
    }

    /// The first `len` bytes.
    pub(crate) fn first(&self, len: u64) -> Self {
        Self { file: self.file.clone(), offset: self.offset, len: len.min(self.len) }
    }
}

/// Moves all of `source` to `offset` of `target`.
pub(crate) async fn transfer(
    worker: &Worker,
    how: Transfer,
    source: &FileRange,
    target: &File,
    offset: u64,
) -> Result<()> {
    let FileRange { file, offset: from, len } = source;
    match how {
        Transfer::Share => Ok(worker.clone_range(file, *from, target, offset, *len).await?),
        Transfer::Copy => {
            let mut done = 0;
            while done < *len {
                let copied = worker.copy_range(file, from + done, target, offset + done, len - done).await?;
                if copied == 0 {
                    let message = "the file became shorter while it was copied";
                    return Err(Error::new(ErrorKind::Io, message).on(file.path()).at_host(from + done));
                }
                done += copied;
            }
            Ok(())
        }
    }
}
