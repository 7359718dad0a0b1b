//! Failures on the way to an image: errnos and words, which get the name of the image where that is known.

use std::fmt;
use std::io;

/// A failure. Its words have no secrets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) errno: i32,
    pub(crate) reason: String,
}

impl Failure {
    pub(crate) fn new(errno: i32, reason: impl Into<String>) -> Self {
        Self { errno, reason: reason.into() }
    }

    /// A failure of what is read: it is not what it says that it is.
    pub(crate) fn wrong(reason: impl Into<String>) -> Self {
        Self::new(libc::EIO, reason)
    }

    /// A failure of something that is of a kind that is not taken.
    pub(crate) fn unsupported(reason: impl Into<String>) -> Self {
        Self::new(libc::EOPNOTSUPP, reason)
    }

    /// A file of this machine can't be used.
    pub(crate) fn of_file(what: &str, error: &io::Error) -> Self {
        Self::new(error.raw_os_error().unwrap_or(libc::EIO), format!("{what}: {error}"))
    }

    /// The same, of what was being done.
    pub(crate) fn during(self, what: impl fmt::Display) -> Self {
        Self { errno: self.errno, reason: format!("{what}: {}", self.reason) }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.reason)
    }
}

impl std::error::Error for Failure {}

/// A failure that goes through a reader.
impl From<Failure> for io::Error {
    fn from(failure: Failure) -> Self {
        Self::other(failure)
    }
}

/// The failure that went through a reader, or that of the reader.
impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        // A decoder may have wrapped it.
        let mut inner = error.get_ref().map(|inner| inner as &(dyn std::error::Error + 'static));
        while let Some(one) = inner {
            if let Some(failure) = one.downcast_ref::<Self>() {
                return failure.clone();
            }
            // Its `source` is that of what it has within.
            inner = match one.downcast_ref::<io::Error>() {
                Some(error) => error.get_ref().map(|inner| inner as &(dyn std::error::Error + 'static)),
                None => one.source(),
            };
        }
        Self::new(error.raw_os_error().unwrap_or(libc::EIO), error.to_string())
    }
}
