//! Disks that are no local files: the seam by which a program brings the place of the bytes.
//!
//! A [`Storage`] takes each operation over at once and answers it later, from any thread, through the operation's
//! [`Completer`]. [`crate::File::from_storage`] makes a file of it, which every worker takes as it takes any other.
//!
//! ```
//! use std::sync::{Arc, Mutex};
//! use zebu_storage::{
//!     Completer, File, IoBuf, OpenFlags, Storage, StorageAbilities, StorageDone, StorageOp, Worker, WorkerConfig,
//! };
//!
//! /// A disk in memory.
//! struct Memory(Mutex<Vec<u8>>);
//!
//! impl Storage for Memory {
//!     fn len(&self) -> u64 {
//!         self.0.lock().unwrap().len() as u64
//!     }
//!     fn identity(&self) -> u64 {
//!         std::ptr::from_ref(self) as u64
//!     }
//!     fn abilities(&self) -> StorageAbilities {
//!         StorageAbilities::WRITE | StorageAbilities::SET_LEN
//!     }
//!     fn submit(&self, op: StorageOp, mut done: Completer) {
//!         let mut disk = self.0.lock().unwrap();
//!         let result = match op {
//!             StorageOp::Read { offset, len } => {
//!                 let from = offset as usize;
//!                 done.bufs_mut().copy_from(0, &disk[from..from + len as usize]);
//!                 Ok(StorageDone::Moved(len))
//!             }
//!             StorageOp::Write { offset, len } => {
//!                 let end = (offset + len) as usize;
//!                 if disk.len() < end {
//!                     disk.resize(end, 0);
//!                 }
//!                 done.bufs().copy_to(0, &mut disk[offset as usize..end]);
//!                 Ok(StorageDone::Moved(len))
//!             }
//!             StorageOp::SetLen { len } => {
//!                 disk.resize(len as usize, 0);
//!                 Ok(StorageDone::Done)
//!             }
//!             StorageOp::Flush => Ok(StorageDone::Done),
//!             _ => Err(95), // EOPNOTSUPP
//!         };
//!         drop(disk);
//!         done.finish(result);
//!     }
//! }
//!
//! let worker = Worker::new(&WorkerConfig::default())?;
//! let flags = OpenFlags::default().access(zebu_storage::Access::ReadWrite);
//! let file = File::from_storage(Arc::new(Memory(Mutex::default())), "a disk in memory", &flags)?;
//! worker.block_on(async {
//!     worker.write(&file, 512, IoBuf::copy_of(b"zebu").into()).await.0?;
//!     let (read, bufs) = worker.read(&file, 510, IoBuf::zeroed(8).into()).await;
//!     read?;
//!     assert_eq!(bufs.parts()[0].as_slice(), b"\0\0zebu\0\0");
//!     worker.flush(&file).await
//! })?;
//! # Ok::<(), zebu_storage::IoError>(())
//! ```

use crate::buf::IoBufs;
use crate::file_types::{Alignment, FileId};
use bitflags::bitflags;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

bitflags! {
    /// The operations that a [`Storage`] has beside reading and flushing. An operation that it has not is never submitted.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct StorageAbilities: u8 {
        /// [`StorageOp::Write`].
        const WRITE = 1 << 0;
        /// [`StorageOp::Punch`].
        const PUNCH = 1 << 1;
        /// [`StorageOp::ZeroRange`].
        const ZERO_RANGE = 1 << 2;
        /// [`StorageOp::Allocate`].
        const ALLOCATE = 1 << 3;
        /// [`StorageOp::SetLen`], and writes past the end. Without it, the length is fixed as that of a block device.
        const SET_LEN = 1 << 4;
        /// [`StorageOp::ExtentAt`]. Without it, everything counts as data.
        const EXTENTS = 1 << 5;
    }
}

/// An operation. Offsets and lengths are bytes, and keep to [`Storage::alignment`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
#[allow(missing_docs)] // offset and len say what they are
pub enum StorageOp {
    /// Fills all of [`Completer::bufs_mut`]. The range ends at [`Storage::len`] at most.
    Read { offset: u64, len: u64 },
    /// Writes all of [`Completer::bufs`].
    Write { offset: u64, len: u64 },
    /// Makes all writes that were answered before durable.
    Flush,
    /// The range reads as zero afterwards and may give its space back.
    Punch { offset: u64, len: u64 },
    /// The range reads as zero afterwards and keeps its space. It must be faster than writing zeroes.
    ZeroRange { offset: u64, len: u64 },
    /// The range has space. Its bytes stay; new ones are zero.
    Allocate { offset: u64, len: u64 },
    /// The length changes. New bytes are zero.
    SetLen { len: u64 },
    /// Looks for the run of data or hole that begins at `offset`.
    ExtentAt { offset: u64 },
}

/// The answer to a successful operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum StorageDone {
    /// Bytes that a [`StorageOp::Read`] or [`StorageOp::Write`] moved. Fewer than it asked for are EIO.
    Moved(u64),
    /// The success of every other operation but [`StorageOp::ExtentAt`].
    Done,
    /// The run that [`StorageOp::ExtentAt`] asked for.
    Extent {
        /// Bytes from the offset that was asked for; not 0.
        len: u64,
        /// Whether the run reads as zero.
        hole: bool,
    },
}

/// A place of bytes that a program brings: memory, a network, another library.
pub trait Storage: Send + Sync + 'static {
    /// Bytes. It is asked once, when the file is made; later the file counts by itself.
    fn len(&self) -> u64;

    /// Whether there are no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A number that two storages share only if they are the same disk. A chain refuses to have one disk twice.
    fn identity(&self) -> u64;

    /// Files that its bytes lie in, by which a program sees that it would write over what it reads. None by default.
    fn files(&self) -> Vec<FileId> {
        Vec::new()
    }

    /// The alignment that operations keep to; powers of two, in bytes. 1 by default.
    fn alignment(&self) -> Alignment {
        Alignment { memory: 1, offset: 1, length: 1 }
    }

    /// The operations that there are.
    fn abilities(&self) -> StorageAbilities;

    /// Takes an operation over. It must not wait for anything slow, because it runs on the worker's thread.
    ///
    /// It must not call the worker, either. The answer may come before this returns, or from any thread later.
    fn submit(&self, op: StorageOp, done: Completer);

    /// Bytes, a power of two, of which only whole pieces can be discarded. 1 by default.
    fn discard_granularity(&self) -> u64 {
        1
    }

    /// The next operation that the calling thread submits is for `purpose`, in the terms of the layer above; `metadata` is
    /// what has no better word there.
    ///
    /// Storages that make errors or wait on purpose want to know it; others need not listen.
    fn announce(&self, purpose: &'static str) {
        let _ = purpose;
    }

    /// Some operations are of a worker that ends ([`Completer::is_cancelled`]): the worker's end waits for their answers.
    /// A storage whose operations have no deadline of their own should answer these now.
    fn cancel(&self) {}
}

/// The end of an operation, as whoever began it wants to learn of it.
type End = Box<dyn FnOnce(IoBufs, Result<StorageDone, i32>) + Send>;

/// The way to answer one operation, with the operation's memory.
///
/// An operation can be answered once only, because answering consumes this. Dropping it is the answer EIO.
pub struct Completer {
    op: StorageOp,
    bufs: IoBufs,
    cancelled: Option<Arc<AtomicBool>>,
    end: Option<End>,
}

impl fmt::Debug for Completer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Completer").field("op", &self.op).finish_non_exhaustive()
    }
}

impl Completer {
    /// A way to answer `op` whose memory is `bufs`. It calls `end` once, with the memory and the answer or the errno.
    ///
    /// Workers make their own. This one is for programs that call a [`Storage`] themselves.
    pub fn new(
        op: StorageOp,
        bufs: IoBufs,
        end: impl FnOnce(IoBufs, Result<StorageDone, i32>) + Send + 'static,
    ) -> Self {
        Self { op, bufs, cancelled: None, end: Some(Box::new(end)) }
    }

    /// The same, of a worker that sets `cancelled` when it ends.
    pub(crate) fn cancelled_by(mut self, cancelled: Arc<AtomicBool>) -> Self {
        self.cancelled = Some(cancelled);
        self
    }

    /// The operation.
    pub fn op(&self) -> StorageOp {
        self.op
    }

    /// The bytes of a write.
    pub fn bufs(&self) -> &IoBufs {
        &self.bufs
    }

    /// The memory of a read.
    pub fn bufs_mut(&mut self) -> &mut IoBufs {
        &mut self.bufs
    }

    /// Whether the operation's worker is ending and waits for the answer.
    pub fn is_cancelled(&self) -> bool {
        self.cancelled.as_ref().is_some_and(|flag| flag.load(Ordering::Acquire))
    }

    /// Answers the operation; errors are errno values. An answer of the wrong kind, or a short one, counts as EIO.
    pub fn finish(mut self, result: Result<StorageDone, i32>) {
        let result = result.and_then(|done| {
            let fits = match (self.op, done) {
                (StorageOp::Read { len, .. } | StorageOp::Write { len, .. }, done) => {
                    done == StorageDone::Moved(len)
                }
                (StorageOp::ExtentAt { .. }, done) => matches!(done, StorageDone::Extent { len: 1.., .. }),
                (_, done) => done == StorageDone::Done,
            };
            if fits { Ok(done) } else { Err(libc::EIO) }
        });
        // An errno is positive; another number would be taken for success somewhere.
        self.end_with(result.map_err(|errno| if errno > 0 { errno } else { libc::EIO }));
    }

    fn end_with(&mut self, result: Result<StorageDone, i32>) {
        if let Some(end) = self.end.take() {
            end(std::mem::take(&mut self.bufs), result);
        }
    }
}

impl Drop for Completer {
    fn drop(&mut self) {
        self.end_with(Err(libc::EIO));
    }
}
