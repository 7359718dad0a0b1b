#![doc = include_str!("../README.md")]
//!
//! # Images and workers
//! An [`Image`] is shared by any number of workers. A [`storage::Worker`] belongs to one thread, and runs requests on its own
//! completion queue when it is polled. A [`Disk`] and a [`Queue`] have one. Its thread may do so between the tasks of any
//! executor, as below. Work that needs no [`Disk`] is waited for by [`block_on`].
//!
//! Commits, releases of freed space, snapshots and changes of size run on a thread of the image's own, which the first change
//! starts. A worker that is not polled holds up the requests that need the end of its own, and nobody else.
//!
//! Options are filled in by setters, or field by field, from their default: more of them may come in any version.
//!
//! ```
//! # use zebu_engine as zebu;
//! use std::future::Future;
//! use std::pin::pin;
//! use std::task::{Context, Poll, Waker};
//! use zebu::storage::{IoBuf, Worker, WorkerConfig};
//! use zebu::{CreateOptions, Image, OpenOptions};
//!
//! /// The smallest executor: polls one future, and the worker in between.
//! fn run<T>(worker: &Worker, future: impl Future<Output = T>) -> T {
//!     let mut future = pin!(future);
//!     let mut context = Context::from_waker(Waker::noop());
//!     loop {
//!         if let Poll::Ready(value) = future.as_mut().poll(&mut context) {
//!             return value;
//!         }
//!         worker.wait(None);
//!     }
//! }
//!
//! # let dir = tempfile::tempdir().unwrap();
//! # let path = dir.path().join("disk.qcow2");
//! let worker = Worker::new(&WorkerConfig::default())?;
//! run(&worker, async {
//!     Image::create(&worker, &path, &CreateOptions::default().size(65536)).await?;
//!     let image = Image::open(&worker, &path, &OpenOptions::default()).await?;
//!     let (result, bufs) = image.read(&worker, 0, IoBuf::zeroed(512).into()).await;
//!     result?;
//!     assert!(bufs.is_zero());
//!     image.close(&worker).await
//! })?;
//! # Ok::<(), zebu::Error>(())
//! ```

mod backing;
mod backups;
mod before_change;
mod bitmaps;
mod chain;
pub mod check;
mod close;
mod compress;
mod continued;
mod create;
mod crypt;
mod disk;
mod error;
mod extents;
mod file_bytes;
mod file_pages;
mod foreign;
mod foreign_image;
mod forked;
mod image;
mod image_stream;
mod image_worker;
#[cfg(all(test, shuttle))]
mod interleavings;
pub mod jobs;
mod luks_create;
mod luks_disk;
mod new_files;
mod new_foreign;
mod no_disk;
mod node;
mod open;
mod open_above;
mod options;
mod over_chain;
mod packed_format;
mod parallels_directory;
mod progress;
mod qcow2;
mod queue;
mod rate_limit;
mod raw;
mod read_again;
mod refs;
mod remedy;
mod remote;
mod reservation;
mod same_file;
mod snapshots;
mod status;
mod sync;
mod transfer;
pub mod verdict;
mod vm_state;
mod write_back;

pub use backing::BackingReference;
pub use bitmaps::{BitmapRecording, DirtyBits, NewBitmap};
pub use compress::{CodecPool, CompressOptions, DeflateWindow};
pub use crypt::{
    EncryptionInfo, HeaderCosts, KeySlotChange, KeySlotGuard, Keys, LuksInfo, LuksSlotInfo, NewEncryption,
    NewKey, NewMethod, Passphrase, SlotChoice,
};
pub use disk::{Disk, DiskBuilder, DiskExtents, DiskJob};
pub use error::{Error, ErrorKind, Result};
pub use extents::Extents;
pub use foreign::looks_raw;
pub use image::Image;
pub use open::{probe, probe_by};
pub use options::*;
pub use packed_format::{PackedFormat, skippable_frame};
pub use queue::{Completion, DetachedQueue, Queue, QueueBuilder, Request};
pub use remedy::Remedy;
pub use remote::{OpenRemote, Remote, RemoteRefs};
pub use snapshots::{NewSnapshot, SnapshotRef};
pub use status::*;
pub use zebu_qcow2::BackupId;

/// Runs a future on a worker of its own, on this thread, and waits for its result. For work that needs no [`Disk`], such as
/// the functions of [`jobs`] that open images themselves.
///
/// ```
/// # use zebu_engine as zebu;
/// use zebu::{CreateOptions, Image};
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("disk.qcow2");
/// let create = CreateOptions::default().size(1 << 20);
/// zebu::block_on(async |worker| Image::create(&worker, &path, &create).await)?;
/// # Ok::<(), zebu::Error>(())
/// ```
///
/// # Errors
/// Errors of the work; the system gives no descriptor.
pub fn block_on<T>(work: impl AsyncFnOnce(storage::Worker) -> Result<T>) -> Result<T> {
    let worker = storage::Worker::new(&storage::WorkerConfig::default()).map_err(Error::from)?;
    worker.promise_to_drive();
    worker.block_on(work(worker.clone()))
}

/// Ciphers and hashes of encrypted images.
pub mod luks {
    pub use zebu_luks::{BlockCipher, CipherSpec, HashName, LuksError, Mode};
}

/// The crate that maps a guest's memory, in the version that [`storage::GuestBuffers`] takes.
#[cfg(feature = "vm-memory")]
pub use zebu_storage::vm_memory;

/// Workers, buffers and files: what is asked for, and given, wherever an image does I/O.
pub mod storage {
    #[cfg(feature = "vm-memory")]
    pub use zebu_storage::GuestBuffers;
    pub use zebu_storage::{
        Access, Alignment, Background, CacheChoice, CacheUse, Commands, Completer, Create, DetachedWorker,
        Engine, File, FileExtent, FileId, FileKind, FsKind, IoBuf, IoBufs, IoBufsIntoIter, IoError,
        IoErrorKind, IoMemory, IoStats, JoinHandle, LockMode, LockWait, LongWait, Op, OpenFlags, PAGE,
        Patience, Running, SYSTEM_CALLS, SYSTEM_CALLS_TO_REFUSE, Storage, StorageAbilities, StorageDone,
        StorageOp, Vanished, Worker, WorkerConfig, WorkerKind,
    };
}
