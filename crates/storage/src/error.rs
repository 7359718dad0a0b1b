//! Errors below the engine.

use std::fmt;
use std::path::{Path, PathBuf};

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
    /// An earlier flush of this file failed, or a change of it was abandoned: what is durable is unknown until the file is
    /// opened again.
    FlushFailedBefore,
    /// Another program holds a lock that excludes this use.
    Locked,
    /// Writes of a program that is gone may still land: it holds a lock until they have.
    LockedByWrites,
    /// The file cannot do this (fallocate mode, resize of a device, O_DIRECT, ...).
    Unsupported,
    /// Not a regular file or block device.
    NotAFile,
    /// The name leads outside the directory that it is confined to.
    Escapes,
}

/// An error of storage: what was attempted, on which file and range.
///
/// Displayed as one line, for example
/// `could not read 4096 bytes at offset 65536 of "x.qcow2": Input/output error`.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct IoError {
    /// The operation that failed.
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

impl std::error::Error for IoError {}

impl IoError {
    /// An error about a whole file.
    pub fn of_file(op: Op, kind: IoErrorKind, path: impl Into<PathBuf>) -> Self {
        Self { op, kind, path: path.into(), offset: 0, len: 0, detail: None }
    }

    /// The same error with words that say more.
    #[must_use]
    pub fn with_detail(mut self, detail: impl Into<String>) -> Self {
        self.detail = Some(detail.into());
        self
    }

    /// Why it failed, in words: the message without what failed and on which file.
    pub fn reason(&self) -> String {
        match (&self.kind, &self.detail) {
            (IoErrorKind::Os(errno), None) => errno_text(*errno),
            (IoErrorKind::Os(errno), Some(detail)) => format!("{} ({detail})", errno_text(*errno)),
            (_, Some(detail)) => detail.clone(),
            (IoErrorKind::FlushFailedBefore, None) => {
                "an earlier flush failed or a change was given up, so what is on disk is unknown until it is opened again".to_owned()
            }
            (IoErrorKind::Locked, None) => "it is in use by another process".to_owned(),
            (IoErrorKind::LockedByWrites, None) => "writes of a process that is gone may still land".to_owned(),
            (IoErrorKind::Unsupported, None) => "the file does not support this".to_owned(),
            (IoErrorKind::NotAFile, None) => "not a regular file or block device".to_owned(),
            (IoErrorKind::Escapes, None) => {
                "the name leads outside the directory that it is confined to".to_owned()
            }
        }
    }

    /// The errno that the failure amounts to.
    pub fn errno(&self) -> i32 {
        match self.kind {
            IoErrorKind::Os(e) => e,
            IoErrorKind::FlushFailedBefore => libc::EIO,
            IoErrorKind::Locked | IoErrorKind::LockedByWrites => libc::EAGAIN,
            IoErrorKind::Unsupported => libc::EOPNOTSUPP,
            IoErrorKind::NotAFile => libc::EINVAL,
            IoErrorKind::Escapes => libc::EXDEV,
        }
    }
}

/// The system's words for an errno, without the number that the standard library appends.
pub(crate) fn errno_text(errno: i32) -> String {
    let text = std::io::Error::from_raw_os_error(errno).to_string();
    match text.rfind(" (os error ") {
        Some(end) => text[..end].to_owned(),
        None => text,
    }
}

/// A path in quotes, with whatever would break the line escaped.
struct Quoted<'a>(&'a Path);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.0, f)
    }
}

impl fmt::Display for IoError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { op, offset, len, .. } = self;
        let path = Quoted(&self.path);
        match op {
            Op::Open => write!(f, "could not open {path}")?,
            Op::Lock => write!(f, "could not lock {path}")?,
            Op::Read => write!(f, "could not read {len} bytes at offset {offset} of {path}")?,
            Op::Write => write!(f, "could not write {len} bytes at offset {offset} of {path}")?,
            Op::Flush => write!(f, "could not flush {path} to disk")?,
            Op::Punch => write!(f, "could not punch a hole of {len} bytes at offset {offset} of {path}")?,
            Op::ZeroRange => write!(f, "could not zero {len} bytes at offset {offset} of {path}")?,
            Op::Allocate => write!(f, "could not allocate {len} bytes at offset {offset} of {path}")?,
            Op::SetLen => write!(f, "could not set the length of {path} to {offset} bytes")?,
            Op::Seek => write!(f, "could not look for data at offset {offset} of {path}")?,
            Op::CopyRange => write!(f, "could not copy {len} bytes to offset {offset} of {path}")?,
            Op::Setup => write!(f, "could not set up an I/O worker")?,
        }
        write!(f, ": {}", self.reason())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_one_human_line() {
        let error = IoError {
            op: Op::Read,
            kind: IoErrorKind::Os(libc::ENOSPC),
            path: "x.qcow2".into(),
            offset: 65536,
            len: 4096,
            detail: None,
        };
        assert_eq!(
            error.to_string(),
            "could not read 4096 bytes at offset 65536 of \"x.qcow2\": No space left on device"
        );
        let hint = IoError::of_file(Op::Open, IoErrorKind::Os(libc::EINVAL), "a").with_detail("try buffered");
        assert_eq!(hint.to_string(), "could not open \"a\": Invalid argument (try buffered)");
        assert_eq!(
            IoError::of_file(Op::Open, IoErrorKind::NotAFile, "a")
                .with_detail("it is a directory")
                .to_string(),
            "could not open \"a\": it is a directory"
        );
    }
}
