//! TLS 1.3 with pre-shared keys, by the system's OpenSSL.
//!
//! Both ends have a file of keys, as GnuTLS's `psktool` writes it. The client names one of them by its identity. Neither
//! end is let in with another key, and there are no certificates. The key exchange is an ephemeral Diffie-Hellman one, so
//! that a key that gets known later opens no earlier connection.

mod config;
mod connection;
mod context;
mod keys;
mod openssl;

pub use config::{ClientConfig, ServerConfig};
pub use connection::Connection;
pub use keys::Keys;

use std::path::PathBuf;

/// Keys can't be used.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum PskError {
    /// The file of keys can't be read, or has something else in it.
    #[error("{}: {reason}", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The reason, with the line.
        reason: String,
    },
    /// No key of the file has this identity.
    #[error("there is no key for '{identity}' in the file of keys")]
    NoKey {
        /// The identity.
        identity: String,
    },
    /// OpenSSL is not there, or refuses.
    #[error("TLS with pre-shared keys needs the system's OpenSSL (libssl.so.3): {0}")]
    OpenSsl(String),
}
