//! Disk images as block devices for others: an NBD server, vhost-user-blk devices, files (FUSE) and devices of this machine's kernel
//! (ublk) that run on zebu's own workers.
//!
//! # Features
//! - `fuse` (default): images as files, `fuse::FuseMount`.
//! - `tls` (default): TLS of NBD connections, by rustls.
//! - `ublk` (default): block devices of the kernel, `ublk::UblkDevice`.
//! - `vhost-user` (default): vhost-user-blk devices, `vhost::VhostUserBlk`.
//! - `fuzzing` is for zebu's own fuzz targets, and no part of what versions promise.
//!
//! Nothing here needs an async runtime. A [`WorkerPool`] has threads with a [`zebu_engine::storage::Worker`] each; a
//! connection belongs to one of them, and its sockets are driven by the same completion queue as the image's files.
//!
//! ```
//! use std::os::unix::net::UnixListener;
//! use zebu_engine::storage::{Worker, WorkerConfig};
//! use zebu_engine::{Access, CreateOptions, Image, OpenOptions};
//! use zebu_export::nbd::{Listener, NbdConfig, NbdServer};
//! use zebu_export::{Export, Exports, PoolConfig, WorkerPool};
//!
//! # let dir = tempfile::tempdir()?;
//! # let (path, socket) = (dir.path().join("disk.qcow2"), dir.path().join("nbd.sock"));
//! let worker = Worker::new(&WorkerConfig::default())?;
//! let image = worker.block_on(async {
//!     let create = CreateOptions::default().size(1 << 20);
//!     Image::create(&worker, &path, &create).await?;
//!     let open = OpenOptions::default().access(Access::ReadWrite);
//!     Image::open(&worker, &path, &open).await
//! })?;
//!
//! let pool = WorkerPool::start(&PoolConfig::default())?;
//! let exports = Exports::new(vec![Export::new("disk", &image, Access::ReadWrite)])?;
//! let listener = Listener::unix(UnixListener::bind(&socket)?)?;
//! let server = NbdServer::start(&pool, exports, vec![listener], NbdConfig::default())?;
//!
//! // Clients come and go. In the end, requests in flight are finished, and the image is closed.
//! server.stop();
//! pool.join();
//! worker.block_on(image.close(&worker))?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod device_file;
mod error;
mod export;
mod exports;
#[cfg(feature = "fuse")]
pub mod fuse;
mod inflight_limit;
pub mod kernel_nbd;
mod log;
mod memory_budget;
pub mod metrics;
pub mod nbd;
mod pool;
mod prometheus;
mod stop;
#[cfg(test)]
mod test_wait;
mod throttle;
#[cfg(feature = "ublk")]
pub mod ublk;
#[cfg(feature = "vhost-user")]
pub mod vhost;

pub use device_file::{WhenStopped, is_in_use};
pub use error::ExportError;
pub use export::{Discards, Export};
pub use exports::Exports;
pub use log::{Level, Log};
pub use memory_budget::{DEFAULT_MEMORY, MIN_MEMORY, MemoryBudget, Reserved};
pub use pool::{PoolConfig, WorkerPool};
pub use prometheus::prometheus;
pub use throttle::{LimitGroup, Limits, ThrottleStats};
