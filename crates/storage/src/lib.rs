//! Where bytes live.
//!
//! A [`Worker`] belongs to one thread: it owns a completion queue (an io_uring, a thread pool, or a simulated
//! disk), the operations in flight with their buffers, a pool of page-aligned buffers, and a small local executor
//! on which the engine's plain `async fn`s run. A [`File`] is shared by all workers.

mod align;
mod backend;
mod blocking;
mod buf;
#[cfg(feature = "io-uring")]
mod closed_files;
#[doc(hidden)]
pub mod commit_steps;
mod error;
mod executor;
mod file;
mod file_types;
#[cfg(debug_assertions)]
mod growth_check;
mod lock;
mod memory;
mod notify;
mod operation;
mod os_file;
mod release;
mod request;
#[doc(hidden)]
pub mod sabotage;
pub mod sim;
mod socket;
mod socket_poll;
mod threads;
mod unaligned;
#[cfg(feature = "io-uring")]
mod uring;
#[cfg(feature = "io-uring")]
mod uring_sockets;
mod worker;
mod worker_io;
mod worker_sockets;
mod worker_types;
mod write_table;

pub use buf::{IoBuf, IoBufs, IoMemory, PAGE};
pub use error::{IoError, IoErrorKind, Op};
pub use executor::JoinHandle;
pub use file::File;
pub use file_types::{Access, Alignment, Create, FileExtent, FileId, FileKind, FsKind, LockMode, OpenFlags};
pub use release::release_free_memory;
pub use socket::Socket;
pub use worker::Worker;
pub use worker_types::{Engine, IoStats, WorkerConfig, WorkerKind};
