//! Where bytes live.
//!
//! A [`Worker`] belongs to one thread: it owns a completion queue (an io_uring, a thread pool, or a simulated
//! disk), the operations in flight with their buffers, a pool of page-aligned buffers, and a small local executor
//! on which the engine's plain `async fn`s run. A [`File`] is shared by all workers.

mod buf;
mod error;
mod file;
mod worker;

pub use buf::{IoBuf, IoBufs, IoMemory, PAGE};
pub use error::{IoError, IoErrorKind, Op};
pub use file::{Access, Alignment, Create, File, FileExtent, FileId, FileKind, FsKind, LockMode, OpenFlags};
pub use worker::{Engine, IoStats, JoinHandle, Worker, WorkerConfig, WorkerKind};
