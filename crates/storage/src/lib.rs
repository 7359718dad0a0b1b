//! Where bytes live.
//!
//! A [`Worker`] belongs to one thread: it owns a completion queue (an io_uring or a thread pool), the operations in flight with their buffers, a pool of page-aligned buffers, and a small local executor
//! on which the engine's plain `async fn`s run. A [`File`] is shared by all workers.
//! Its bytes are in a local file, on a block device, or wherever a [`Storage`] has them.
//!
//! # Features
//! - `io-uring` (default): without it, threads do all I/O.
//! - `vm-memory`: buffers in a guest's memory, `GuestBuffers`.
//! - `simulated` and `test-faults` are for zebu's own tests, and no part of what versions promise.
//!
//! # Event loops and other executors
//! A worker does nothing by itself: its thread calls [`Worker::block_on`], or [`Worker::poll`] whenever the descriptor
//! [`Worker::as_fd`] is readable. An event loop
//! - registers the descriptor once, for reading (by level or by edge);
//! - calls [`Worker::poll`] when the descriptor is readable, and when the time of [`Worker::next_timer`] is over.
//!
//! The descriptor is an eventfd that does not block, and [`Worker::poll`] empties it. Reading it is allowed and not needed.
//! Whoever has read it must call [`Worker::poll`] before the next wait: the poll finds everything, but the descriptor
//! may not become readable again before it.
//!
//! The futures of a worker may be polled by any executor on the worker's thread. What they begin between the calls of
//! [`Worker::poll`] makes the descriptor readable, and the next call starts it. So an executor needs one task beside its
//! others, which waits for the descriptor as the executor waits for any (`AsyncFd` and the like) and polls the worker.
//!
//! ```
//! use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
//! use rustix::event::{Timespec, eventfd, EventfdFlags};
//! use std::os::fd::OwnedFd;
//! use std::sync::Arc;
//! use std::task::{Context, Poll, Wake, Waker};
//! use zebu_storage::{Worker, WorkerConfig};
//!
//! /// Wakes the loop for a future of its own.
//! struct Woken(OwnedFd);
//! impl Wake for Woken {
//!     fn wake(self: Arc<Self>) {
//!         let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
//!     }
//! }
//!
//! let worker = Worker::new(&WorkerConfig::default())?;
//! let woken = Arc::new(Woken(eventfd(0, EventfdFlags::NONBLOCK)?));
//! let epoll = epoll::create(CreateFlags::CLOEXEC)?;
//! epoll::add(&epoll, worker.as_fd(), EventData::new_u64(0), EventFlags::IN)?;
//! epoll::add(&epoll, &woken.0, EventData::new_u64(1), EventFlags::IN)?;
//!
//! let mut future = Box::pin(worker.run_blocking(|| 6 * 7));
//! let waker = Waker::from(woken.clone());
//! waker.wake_by_ref();
//! let mut events = Vec::with_capacity(8);
//! let value = 'done: loop {
//!     let timer = worker.next_timer().and_then(|left| Timespec::try_from(left).ok());
//!     rustix::io::retry_on_intr(|| {
//!         epoll::wait(&epoll, rustix::buffer::spare_capacity(&mut events), timer.as_ref())
//!     })?;
//!     worker.poll();
//!     for event in events.drain(..) {
//!         if event.data.u64() == 1 {
//!             let _ = rustix::io::read(&woken.0, &mut [0; 8]);
//!             if let Poll::Ready(value) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
//!                 break 'done value;
//!             }
//!         }
//!     }
//! };
//! assert_eq!(value, 42);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
// The doors for a simulated disk, which are public with the feature only.
#![cfg_attr(not(feature = "simulated"), allow(unreachable_pub))]

mod align;
mod backend;
mod background;
mod blocking;
mod buf;
mod cache_use;
mod calling_thread;
#[cfg(feature = "io-uring")]
mod closed_files;
#[doc(hidden)]
pub mod commit_steps;
mod completions;
mod descriptor_passing;
mod detached_worker;
pub mod drive;
mod error;
mod executor;
mod fair_queue;
mod file;
mod file_types;
mod foreign_event;
mod fork_mark;
mod fresh_number;
#[cfg(debug_assertions)]
mod growth_check;
#[cfg(feature = "vm-memory")]
mod guest_memory;
mod lender;
mod lent;
mod lock;
mod lock_wait;
mod locked_memory;
mod long_waits;
mod mapping_guard;
mod memory;
mod notify;
mod operation;
mod option_setters;
mod os_file;
mod release;
mod request;
mod ring;
#[doc(hidden)]
pub mod sabotage;
mod shown_wait;
#[cfg(feature = "simulated")]
#[doc(hidden)]
pub mod simulated;
#[cfg(not(feature = "simulated"))]
mod simulated;
mod socket;
mod socket_ops;
mod socket_poll;
mod storage;
mod storage_request;
pub mod sync;
mod syncs;
mod system_calls;
mod thread_rights;
mod threads;
mod unaligned;
#[cfg(feature = "io-uring")]
mod uring;
#[cfg(feature = "io-uring")]
mod uring_rights;
#[cfg(feature = "io-uring")]
mod uring_sockets;
mod worker;
mod worker_id;
mod worker_io;
mod worker_sockets;
mod worker_types;
mod write_behind;
mod write_table;

pub use background::{Background, Running, Undone, Vanished};
pub use buf::{IoBuf, IoBufs, IoBufsIntoIter, IoMemory, PAGE};
pub use cache_use::{CacheChoice, CacheUse, cached_bytes};
pub use calling_thread::CallingThread;
pub use descriptor_passing::refuse_descriptors;
pub use detached_worker::DetachedWorker;
pub use error::{IoError, IoErrorKind, Op};
pub use executor::JoinHandle;
pub use file::File;
pub use file_types::{Access, Alignment, Create, FileExtent, FileId, FileKind, FsKind, LockMode, OpenFlags};
pub use foreign_event::{ForeignEvent, is_eventfd};
pub use fork_mark::ForkMark;
pub use fresh_number::fresh_number;
#[cfg(feature = "vm-memory")]
pub use guest_memory::GuestBuffers;
pub use lent::{lend, lend_mut};
pub use lock_wait::{LockWait, Patience};
pub use locked_memory::{LockedBox, LockedBytes, on_wiped_stack};
pub use long_waits::{LONG_WAIT, LongWait};
pub use mapping_guard::MappingGuard;
pub use os_file::file_system;
pub use release::release_free_memory;
pub use socket::{DeviceCommand, Socket};
pub use storage::{Completer, Storage, StorageAbilities, StorageDone, StorageOp};
pub use system_calls::{SYSTEM_CALLS, SYSTEM_CALLS_TO_REFUSE};
pub use thread_rights::{RING_REGISTRATIONS, landlock_version, restrict_all_threads};
/// The crate that maps a guest's memory, in the version of [`GuestBuffers`].
#[cfg(feature = "vm-memory")]
pub use vm_memory;
pub use worker::{AwaitedByOthers, Worker};
pub use worker_types::{Commands, Engine, IoStats, WorkerConfig, WorkerKind};
pub use write_table::{Hold, Ticket, WriteTable};
