//! Why an image can't be opened.

use std::fmt;
use zebu_storage::{IoError, IoErrorKind, Op};

/// The failure to open or make an image: its name, an errno, and the reason in words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RbdError {
    name: String,
    errno: i32,
    reason: String,
}

impl RbdError {
    pub(crate) fn new(name: &str, errno: i32, reason: impl Into<String>) -> Self {
        Self { name: name.to_owned(), errno, reason: reason.into() }
    }

    /// The image.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The errno that the failure amounts to.
    pub fn errno(&self) -> i32 {
        self.errno
    }

    /// The reason in words, without the name.
    pub fn reason(&self) -> &str {
        &self.reason
    }
}

impl fmt::Display for RbdError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "could not open \"{}\": {}", self.name, self.reason)
    }
}

impl std::error::Error for RbdError {}

impl From<RbdError> for IoError {
    fn from(error: RbdError) -> Self {
        let plain = IoError::of_file(Op::Open, IoErrorKind::Os(error.errno), error.name);
        if plain.reason() == error.reason { plain } else { plain.with_detail(error.reason) }
    }
}
