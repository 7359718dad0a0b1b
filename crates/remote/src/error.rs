//! Why a disk over the network can't be opened.

use std::fmt;
use zebu_storage::{IoError, IoErrorKind, Op};

/// The failure to open a disk: its name without secrets, an errno, and the reason in words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemoteError {
    name: String,
    errno: i32,
    reason: String,
    remedy: Option<RemoteRemedy>,
}

/// A choice of the caller that would let a refused disk be opened. The reason says it in plain words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum RemoteRemedy {
    /// [`Redirects::Any`](crate::http::Redirects::Any).
    FollowAnyRedirect,
}

impl RemoteError {
    /// A failure to open `name`, which must have no secrets in it.
    pub fn new(name: &str, errno: i32, reason: impl Into<String>) -> Self {
        Self { name: name.to_owned(), errno, reason: reason.into(), remedy: None }
    }

    #[cfg_attr(not(feature = "http"), expect(dead_code))]
    pub(crate) fn with_remedy(self, remedy: Option<RemoteRemedy>) -> Self {
        Self { remedy, ..self }
    }

    /// The disk, without secrets.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The choice that would let it be opened, if it was refused for want of one.
    pub fn remedy(&self) -> Option<RemoteRemedy> {
        self.remedy
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

impl fmt::Display for RemoteError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "could not open \"{}\": {}", self.name, self.reason)
    }
}

impl std::error::Error for RemoteError {}

impl From<RemoteError> for IoError {
    fn from(error: RemoteError) -> Self {
        let plain = IoError::of_file(Op::Open, IoErrorKind::Os(error.errno), error.name);
        if plain.reason() == error.reason { plain } else { plain.with_detail(error.reason) }
    }
}
