//! The engine's error: a kind that code can match, and where it happened.

use crate::remedy::Remedy;
use std::fmt;
use std::path::{Path, PathBuf};
use zebu_qcow2::FormatError;
use zebu_qcow2::limits::MAX_CLUSTER_BITS;
use zebu_storage::{IoError, IoErrorKind};

/// The kind of a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The file below failed (see [`Error::errno`]).
    Io,
    /// No space left, in the file system or within the limits of the format.
    NoSpace,
    /// The image is not valid: its header or a table is damaged.
    Corrupt,
    /// The image is valid but uses something that is not implemented, named in the message.
    Unsupported,
    /// No format was given, and the file looks like one that can't be read, named in the message.
    ForeignFormat,
    /// Another program uses the image.
    Locked,
    /// A request is in the way that can't end: its queue or worker is not driven.
    Busy,
    /// An argument is out of range or contradicts another.
    InvalidArgument,
    /// The image names another file that may not be opened under the given policy.
    ReferenceRefused,
    /// The image, or the request on it, needs write access that was not given.
    ReadOnly,
    /// The request reaches past the end of the disk.
    OutOfRange,
    /// An earlier flush failed: nothing can be written until the image is opened again.
    Poisoned,
    /// A function of the caller, or code that the operation ran, panicked. The image stays in use, unless it was making
    /// something durable: then later errors are [`ErrorKind::Poisoned`].
    Panicked,
    /// The operation was cancelled.
    Cancelled,
    /// Something asked for by name (a snapshot, a bitmap) is not in the image.
    NotFound,
    /// A name that has to be new is taken.
    Exists,
    /// The image is encrypted, and no key was given for it.
    KeyMissing,
    /// No key slot of the image is opened by the key that was given.
    WrongKey,
}

/// A failed operation on an image.
#[derive(Debug, Clone)]
pub struct Error(Box<Inner>);

#[derive(Debug, Clone)]
struct Inner {
    kind: ErrorKind,
    message: String,
    image: Option<PathBuf>,
    guest_offset: Option<u64>,
    host_offset: Option<u64>,
    errno: i32,
    source: Option<IoError>,
    remedy: Option<Remedy>,
    damaged: Damaged,
}

/// The part of an image that an error of the kind [`ErrorKind::Corrupt`] is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Damaged {
    Metadata,
    GuestData,
}

/// Shorthand.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An error of `kind`, said in words that name the remedy where there is one.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        let errno = match kind {
            ErrorKind::NoSpace => errno::ENOSPC,
            ErrorKind::Unsupported | ErrorKind::ForeignFormat => errno::ENOTSUP,
            ErrorKind::Locked => errno::EAGAIN,
            ErrorKind::Busy => errno::EBUSY,
            ErrorKind::InvalidArgument => errno::EINVAL,
            ErrorKind::ReferenceRefused | ErrorKind::KeyMissing | ErrorKind::WrongKey => errno::EPERM,
            ErrorKind::ReadOnly => errno::EACCES,
            ErrorKind::Cancelled => errno::ECANCELED,
            ErrorKind::NotFound => errno::ENOENT,
            ErrorKind::Exists => errno::EEXIST,
            ErrorKind::Io
            | ErrorKind::Corrupt
            | ErrorKind::OutOfRange
            | ErrorKind::Poisoned
            | ErrorKind::Panicked => errno::EIO,
        };
        Self(Box::new(Inner {
            kind,
            message: message.into(),
            image: None,
            guest_offset: None,
            host_offset: None,
            errno,
            source: None,
            remedy: None,
            damaged: Damaged::Metadata,
        }))
    }

    /// Says that `undone` because of `unended`, which nobody drives: two parts of a sentence.
    pub(crate) fn undriven(undone: &str, unended: &str) -> Self {
        let message = format!(
            "{undone}, because {unended} does not end: its queue or worker is not driven; poll or drop it"
        );
        Self::new(ErrorKind::Busy, message)
    }

    /// Names the image, unless one is named already.
    pub fn on(mut self, image: &Path) -> Self {
        self.0.image.get_or_insert_with(|| image.to_owned());
        self
    }

    /// The same in other words, if the disk below is full: `told` makes them from those that say so.
    pub(crate) fn when_out_of_space(mut self, told: impl FnOnce(&str) -> String) -> Self {
        let below = match self.0.source.as_ref().map(|e| e.kind) {
            Some(IoErrorKind::Os(errno::ENOSPC)) => "the file system is full",
            Some(IoErrorKind::Os(errno::EDQUOT)) => "the disk quota is used up",
            _ => return self,
        };
        self.0.message = told(below);
        (self.0.guest_offset, self.0.host_offset) = (None, None);
        self
    }

    /// The same in other words, which `told` makes from its own: the change that was asked for is made, or may be, so that it
    /// can't be asked for again.
    pub(crate) fn after_the_change(mut self, told: impl FnOnce(&str) -> String) -> Self {
        self.0.message = told(&self.0.message);
        if self.is_retryable() {
            self.0.kind = ErrorKind::Io;
        }
        self
    }

    /// The same with something added to its words.
    pub(crate) fn adding(mut self, more: &str) -> Self {
        self.0.message.push_str(more);
        self
    }

    /// Names the offset on the virtual disk, in bytes, unless one is named already.
    pub fn at_guest(mut self, offset: u64) -> Self {
        self.0.guest_offset.get_or_insert(offset);
        self
    }

    /// Names the offset in the image file, in bytes, unless one is named already.
    pub fn at_host(mut self, offset: u64) -> Self {
        self.0.host_offset.get_or_insert(offset);
        self
    }

    /// Sets the errno that a guest or a caller of system calls would see.
    pub fn with_errno(mut self, errno: i32) -> Self {
        self.0.errno = errno;
        self
    }

    /// Names the remedy.
    pub(crate) fn with_remedy(mut self, remedy: Remedy) -> Self {
        self.0.remedy = Some(remedy);
        self
    }

    /// Says that it is data of the guest which is damaged.
    pub(crate) fn in_guest_data(mut self) -> Self {
        self.0.damaged = Damaged::GuestData;
        self
    }

    /// Whether the image's metadata is damaged.
    pub(crate) fn is_damaged_metadata(&self) -> bool {
        self.kind() == ErrorKind::Corrupt && self.0.damaged == Damaged::Metadata
    }

    /// Whether nothing was tried, because changes are refused: the image was closed, or is only read. Else something failed.
    pub(crate) fn is_refusal(&self) -> bool {
        matches!(self.kind(), ErrorKind::ReadOnly | ErrorKind::InvalidArgument)
    }

    /// A choice of the caller that would let the request succeed, where there is one.
    pub fn remedy(&self) -> Option<&Remedy> {
        self.0.remedy.as_ref()
    }

    /// The kind of failure.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }
    /// The errno that fits, positive.
    pub fn errno(&self) -> i32 {
        self.0.errno
    }
    /// The image, if known.
    pub fn image(&self) -> Option<&Path> {
        self.0.image.as_deref()
    }
    /// Offset on the virtual disk in bytes, if known.
    pub fn guest_offset(&self) -> Option<u64> {
        self.0.guest_offset
    }
    /// Offset in the image file in bytes, if known.
    pub fn host_offset(&self) -> Option<u64> {
        self.0.host_offset
    }
    /// Whether the same request may succeed later, when others have done something: [`ErrorKind::NoSpace`] (space was
    /// freed), [`ErrorKind::Locked`] (the other program has ended), [`ErrorKind::Busy`] (the request in the way has ended).
    /// No other kind is retryable.
    pub fn is_retryable(&self) -> bool {
        matches!(self.0.kind, ErrorKind::NoSpace | ErrorKind::Locked | ErrorKind::Busy)
    }
    /// Whether the image refuses all further writes until it is opened again.
    pub fn is_poisoned(&self) -> bool {
        self.0.kind == ErrorKind::Poisoned
    }
    /// The message alone, without file and offsets.
    pub fn message(&self) -> &str {
        &self.0.message
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(image) = &self.0.image {
            write!(f, "{}: ", image.display())?;
        }
        f.write_str(&self.0.message)?;
        if let Some(offset) = self.0.guest_offset {
            write!(f, " (guest offset {offset})")?;
        }
        if let Some(offset) = self.0.host_offset {
            write!(f, " (file offset {offset})")?;
        }
        Ok(())
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source.as_ref().map(|e| e as _)
    }
}

impl From<IoError> for Error {
    fn from(e: IoError) -> Self {
        let kind = match e.kind {
            IoErrorKind::Os(errno::ENOSPC | errno::EDQUOT | errno::EFBIG) => ErrorKind::NoSpace,
            IoErrorKind::FlushFailedBefore => ErrorKind::Poisoned,
            IoErrorKind::Locked | IoErrorKind::LockedByWrites => ErrorKind::Locked,
            IoErrorKind::Unsupported => ErrorKind::Unsupported,
            IoErrorKind::Escapes => ErrorKind::ReferenceRefused,
            _ => ErrorKind::Io,
        };
        let mut error = Error::new(kind, e.to_string()).with_errno(e.errno());
        if e.kind == IoErrorKind::LockedByWrites {
            error.0.remedy = Some(Remedy::WaitForWrites);
        }
        error.0.source = Some(e);
        error
    }
}

impl From<Error> for std::io::Error {
    /// An error of the kind that the errno stands for, with the whole message; `InvalidInput` for [`ErrorKind::OutOfRange`].
    /// It has no `raw_os_error`: the errno is that of the inner error ([`Error::errno`]).
    fn from(error: Error) -> Self {
        let kind = match error.kind() {
            ErrorKind::OutOfRange => std::io::ErrorKind::InvalidInput,
            _ => Self::from_raw_os_error(error.errno()).kind(),
        };
        Self::new(kind, error)
    }
}

/// The errno values that the engine needs, as Linux numbers them.
mod errno {
    pub(super) const EPERM: i32 = 1;
    pub(super) const ENOENT: i32 = 2;
    pub(super) const EEXIST: i32 = 17;
    pub(super) const EIO: i32 = 5;
    pub(super) const EAGAIN: i32 = 11;
    pub(super) const EBUSY: i32 = 16;
    pub(super) const EACCES: i32 = 13;
    pub(super) const EINVAL: i32 = 22;
    pub(super) const EFBIG: i32 = 27;
    pub(super) const ENOSPC: i32 = 28;
    pub(super) const ENOTSUP: i32 = 95;
    pub(super) const EDQUOT: i32 = 122;
    pub(super) const ECANCELED: i32 = 125;
}

/// The engine's error for one of the format. `Unsupported` is what the format document allows and zebu doesn't do;
/// what the document forbids is `Corrupt`. The errno is that of QEMU.
pub(crate) fn format_error(path: &Path, error: &FormatError) -> Error {
    let kind = match error {
        FormatError::UnsupportedVersion { .. }
        | FormatError::UnknownCompression { .. }
        | FormatError::UnsupportedFeatures { .. }
        | FormatError::UnsupportedEncryption { .. }
        | FormatError::AesEncrypted
        | FormatError::LuksEncrypted => ErrorKind::Unsupported,
        // Clusters have 512 bytes at least; that they have 2 MiB at most is a limit of programs.
        FormatError::UnsupportedClusterSize { cluster_bits } if *cluster_bits > MAX_CLUSTER_BITS => {
            ErrorKind::Unsupported
        }
        FormatError::CorruptImage => ErrorKind::ReadOnly,
        // What the caller asked for, and not what the image says.
        FormatError::SizeTooLarge { .. }
        | FormatError::DataFileRequired
        | FormatError::DataFileUnexpected => ErrorKind::InvalidArgument,
        _ => ErrorKind::Corrupt,
    };
    let translated = Error::new(kind, error.to_string()).with_errno(error.errno()).on(path);
    if error.hint().is_some() { translated.with_remedy(Remedy::Repair) } else { translated }
}
