//! Why a disk can't be opened as it is described.

use crate::secrets_in_names::without_secrets;
use std::ffi::{OsStr, OsString};
use std::fmt;
use zebu_engine::storage::IoError;

/// Why a disk can't be opened as it is described.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum DiskError {
    /// The name can't be read, or leads to what can't be opened.
    Name {
        /// The name, which may have secrets in it.
        name: OsString,
        /// The fault in it.
        reason: String,
    },
    /// The caller's wishes contradict each other.
    Contradiction(String),
    /// The environment, or a file of the system, can't be read.
    Settings(String),
    /// The caller has cancelled it.
    Cancelled,
    /// The engine refuses it.
    Engine(zebu_engine::Error),
}

impl DiskError {
    /// A name that can't be opened.
    pub(crate) fn of_name(name: impl AsRef<OsStr>, reason: impl Into<String>) -> Self {
        Self::Name { name: name.as_ref().to_owned(), reason: reason.into() }
    }
}

impl fmt::Display for DiskError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name { name, reason } => write!(f, "Could not open '{}': {reason}", without_secrets(name)),
            Self::Contradiction(reason) | Self::Settings(reason) => f.write_str(reason),
            Self::Cancelled => f.write_str("interrupted"),
            Self::Engine(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for DiskError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        if let Self::Engine(error) = self { error.source() } else { None }
    }
}

impl From<zebu_engine::Error> for DiskError {
    fn from(error: zebu_engine::Error) -> Self {
        Self::Engine(error)
    }
}

impl From<IoError> for DiskError {
    fn from(error: IoError) -> Self {
        Self::Engine(error.into())
    }
}
