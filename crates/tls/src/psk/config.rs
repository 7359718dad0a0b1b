//! One end's keys, from which its connections are made.

use super::PskError;
use super::connection::Connection;
use super::context::{Context, Secrets};
use super::keys::Keys;
use std::ffi::CString;
use std::path::Path;
use std::sync::Arc;

/// Keys whose clients a server takes. Cheap to clone.
#[derive(Debug, Clone)]
pub struct ServerConfig(Arc<Context>);

impl ServerConfig {
    /// Reads the keys of all clients ([`Keys::from_file`]), and loads OpenSSL unless it is there.
    ///
    /// # Errors
    /// Those of [`Keys::from_file`]; OpenSSL can't be loaded.
    pub fn from_file(path: &Path) -> Result<Self, PskError> {
        Context::new(Secrets::Server(Keys::from_file(path)?)).map(Self)
    }

    /// A server's side of a connection.
    ///
    /// # Errors
    /// OpenSSL has no memory.
    pub fn connection(&self) -> Result<Connection, PskError> {
        Connection::new(Arc::clone(&self.0))
    }
}

/// A client's identity and key. Cheap to clone.
#[derive(Debug, Clone)]
pub struct ClientConfig(Arc<Context>);

impl ClientConfig {
    /// Reads the key of `identity` from a file ([`Keys::from_file`]), and loads OpenSSL unless it is there.
    ///
    /// # Errors
    /// Those of [`Keys::from_file`]; the file has no such identity; OpenSSL can't be loaded.
    pub fn from_file(path: &Path, identity: &str) -> Result<Self, PskError> {
        let key = Keys::from_file(path)?.take(identity)?;
        let name = CString::new(identity).map_err(|_| PskError::NoKey { identity: identity.to_owned() })?;
        Context::new(Secrets::Client(name, key)).map(Self)
    }

    /// A client's side of a connection.
    ///
    /// # Errors
    /// OpenSSL has no memory.
    pub fn connection(&self) -> Result<Connection, PskError> {
        Connection::new(Arc::clone(&self.0))
    }
}
