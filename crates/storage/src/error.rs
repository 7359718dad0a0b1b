//! What can go wrong below the engine.

use std::path::PathBuf;

/// The operation that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Op {
    /// Opening or creating the file.
    Open,
    /// Locking the file.
    Lock,
    /// Reading.
    Read,
    /// Writing.
    Write,
    /// fdatasync.
    Flush,
    /// Punching a hole.
    Punch,
    /// Zeroing a range, space kept.
    ZeroRange,
    /// Allocating space.
    Allocate,
    /// Changing the length.
    SetLen,
    /// Looking for data or holes.
    Seek,
    /// Copying or cloning between files.
    CopyRange,
    /// Setting up a worker.
    Setup,
}

/// The kind of an [`IoError`], for code to match.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum IoErrorKind {
    /// The system call failed with this errno.
    Os(i32),
    /// An earlier flush of this file failed: what is durable is unknown until the file is opened again.
    FlushFailedBefore,
    /// Another program holds a lock that excludes this use.
    Locked,
    /// The file cannot do this (fallocate mode, resize of a device, O_DIRECT, ...).
    Unsupported,
    /// Not a regular file or block device.
    NotAFile,
    /// The name leads outside the directory that it is confined to.
    Escapes,
}

/// An error of storage: what was attempted, on which file and range.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{op:?} {path:?} at {offset}: {kind:?}")]
#[non_exhaustive]
pub struct IoError {
    /// What failed.
    pub op: Op,
    /// Why.
    pub kind: IoErrorKind,
    /// On which file.
    pub path: PathBuf,
    /// Offset in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
    /// Further detail in words (who holds the lock, what to try instead).
    pub detail: Option<String>,
}

impl IoError {
    /// The errno that the failure amounts to.
    pub fn errno(&self) -> i32 {
        match self.kind {
            IoErrorKind::Os(e) => e,
            IoErrorKind::FlushFailedBefore => libc::EIO,
            IoErrorKind::Locked => libc::EAGAIN,
            IoErrorKind::Unsupported => libc::EOPNOTSUPP,
            IoErrorKind::NotAFile => libc::EINVAL,
            IoErrorKind::Escapes => libc::EXDEV,
        }
    }
}
