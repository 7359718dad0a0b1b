//! Why something can't be exported.

use std::io;
use std::path::PathBuf;

/// Why something can't be exported.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExportError {
    /// A thread or its worker can't be made.
    #[error("could not start a worker thread: {0}")]
    Thread(String),
    /// A socket, a mount point or a device can't be used.
    #[error("could not {doing}: {source}")]
    Socket {
        /// The attempted action, with its address or path.
        doing: String,
        /// Why it failed.
        source: io::Error,
    },
    /// A certificate or key can't be used.
    #[error("{}: {reason}", path.display())]
    Tls {
        /// The file.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
    /// Two exports have one name.
    #[error("two exports are named '{0}': give each another name")]
    DuplicateName(String),
    /// A name is too long.
    #[error("the export name '{0}' is longer than 4096 bytes")]
    LongName(String),
    /// A description is too long.
    #[error("the description of the export '{0}' is longer than 4096 bytes")]
    LongDescription(String),
    /// A zero byte, which the protocol's strings can't have.
    #[error("the name or the description of the export {0:?} has a zero byte")]
    ZeroByte(String),
}
