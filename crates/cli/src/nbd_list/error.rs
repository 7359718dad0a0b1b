//! Why exports can't be listed.

use std::{fmt, io};

/// Why exports can't be listed.
#[derive(Debug)]
pub(super) enum ListError {
    /// The connection or the handshake of TLS has failed.
    Connection(io::Error),
    /// The server has refused something, or sent what it must not send.
    Server(String),
}

impl fmt::Display for ListError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ListError::Connection(error) => write!(f, "Failed to list exports: {error}"),
            ListError::Server(reason) => f.write_str(reason),
        }
    }
}

impl std::error::Error for ListError {}

impl From<io::Error> for ListError {
    fn from(error: io::Error) -> Self {
        ListError::Connection(error)
    }
}

/// A fault of the server.
pub(super) fn fault<T>(reason: impl Into<String>) -> Result<T, ListError> {
    Err(ListError::Server(reason.into()))
}
