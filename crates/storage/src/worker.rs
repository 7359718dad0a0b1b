//! The worker: one thread's completion queue, buffers and executor.

use crate::{File, FileExtent, IoBuf, IoBufs, IoError};
use std::future::Future;
use std::os::fd::BorrowedFd;
use std::rc::Rc;
use std::time::Duration;

/// Which completion queue is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Engine {
    /// io_uring, or threads where the kernel or a seccomp filter refuses it.
    #[default]
    Auto,
    /// io_uring or an error.
    IoUring,
    /// Threads.
    Threads,
}

/// How a worker is made.
#[derive(Debug, Clone)]
pub struct WorkerConfig {
    /// The completion queue.
    pub engine: Engine,
    /// Entries of the ring; the most operations in flight before submission waits.
    pub depth: u32,
    /// Threads of the thread-pool worker.
    pub threads: usize,
    /// Bytes of free buffers that the pool keeps for reuse.
    pub pool_bytes: usize,
}

impl Default for WorkerConfig {
    fn default() -> Self {
        Self { engine: Engine::Auto, depth: 256, threads: 16, pool_bytes: 8 << 20 }
    }
}

/// Which completion queue a worker has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WorkerKind {
    /// io_uring.
    IoUring,
    /// Threads.
    Threads,
    /// A simulated disk.
    Simulated,
}

/// Counters of a worker since it was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct IoStats {
    /// Reads that went to the kernel.
    pub reads: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Writes that went to the kernel.
    pub writes: u64,
    /// Bytes written.
    pub write_bytes: u64,
    /// fdatasyncs.
    pub flushes: u64,
    /// fallocate calls of all modes.
    pub fallocates: u64,
    /// System calls made for I/O (io_uring_enter, or one per operation with threads).
    pub syscalls: u64,
    /// Requests that took a read-modify-write or a bounce buffer because of alignment.
    pub misaligned: u64,
}

/// A handle to the worker of this thread; cheap to clone, not `Send`.
#[derive(Clone)]
pub struct Worker {
    _inner: Rc<()>,
}

/// The value of a task spawned with [`Worker::spawn`]. Dropping it lets the task run on, detached.
pub struct JoinHandle<T> {
    _todo: std::marker::PhantomData<T>,
}

impl<T> Future for JoinHandle<T> {
    type Output = T;
    fn poll(self: std::pin::Pin<&mut Self>, _: &mut std::task::Context<'_>) -> std::task::Poll<T> {
        todo!()
    }
}

impl Worker {
    /// A worker for this thread.
    pub fn new(config: &WorkerConfig) -> Result<Self, IoError> {
        todo!("{config:?}")
    }
    /// Which completion queue it has.
    pub fn kind(&self) -> WorkerKind {
        todo!()
    }
    /// Why io_uring is not used although [`Engine::Auto`] would have preferred it.
    pub fn fallback_reason(&self) -> Option<String> {
        todo!()
    }
    /// A small number that differs between the workers of this process that are alive.
    pub fn id(&self) -> usize {
        todo!()
    }
    /// Runs `future` as a task of its own until it is done, whoever waits for it.
    pub fn spawn<T: 'static>(&self, future: impl Future<Output = T> + 'static) -> JoinHandle<T> {
        drop(future);
        todo!()
    }
    /// Runs `future` and all tasks until `future` is done.
    pub fn block_on<T>(&self, future: impl Future<Output = T>) -> T {
        drop(future);
        todo!()
    }
    /// Runs what can run without waiting: reaps completions, polls woken tasks, submits. True if anything ran.
    pub fn poll(&self) -> bool {
        todo!()
    }
    /// Like [`Worker::poll`], but first waits until there is something, at most `timeout`.
    pub fn wait(&self, timeout: Option<Duration>) -> bool {
        todo!("{timeout:?}")
    }
    /// A descriptor that is readable when [`Worker::poll`] has something to do.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        todo!()
    }
    /// Counters.
    pub fn stats(&self) -> IoStats {
        todo!()
    }
    /// A page-aligned buffer of `len` bytes from this worker's pool; its content is unspecified but initialised.
    pub fn buffer(&self, len: usize) -> IoBuf {
        IoBuf::zeroed(len)
    }
    /// Reads `bufs.len()` bytes at `offset`. What lies past the end of the file reads as zero.
    pub async fn read(&self, file: &File, offset: u64, bufs: IoBufs) -> (Result<(), IoError>, IoBufs) {
        todo!("{:?}", (file.len(), offset, bufs.len()))
    }
    /// Writes `bufs` at `offset`, all of it or an error. Unaligned parts under O_DIRECT are read-modify-write,
    /// serialised against every other write of the same blocks of this file in this process; if their read fails,
    /// nothing is written.
    pub async fn write(&self, file: &File, offset: u64, bufs: IoBufs) -> (Result<(), IoError>, IoBufs) {
        todo!("{:?}", (file.len(), offset, bufs.len()))
    }
    /// fdatasync. After one failed, every later one of this file fails too.
    pub async fn flush(&self, file: &File) -> Result<(), IoError> {
        todo!("{}", file.len())
    }
    /// Gives a range back to the file system; it reads as zero afterwards. The length of the file stays.
    /// `Unsupported` where it can't (remembered, not tried again).
    pub async fn punch_hole(&self, file: &File, offset: u64, len: u64) -> Result<(), IoError> {
        todo!("{:?}", (file.len(), offset, len))
    }
    /// Makes a range read as zero and keeps its space. The length of the file stays or grows to the range's end.
    /// `Unsupported` where it can't without writing zeroes.
    pub async fn zero_range(&self, file: &File, offset: u64, len: u64) -> Result<(), IoError> {
        todo!("{:?}", (file.len(), offset, len))
    }
    /// Reserves space for a range; bytes that were holes read as zero. Grows the file to the range's end.
    pub async fn allocate(&self, file: &File, offset: u64, len: u64) -> Result<(), IoError> {
        todo!("{:?}", (file.len(), offset, len))
    }
    /// Writes zero bytes (real writes, unaligned edges as [`Worker::write`]).
    pub async fn write_zero_bytes(&self, file: &File, offset: u64, len: u64) -> Result<(), IoError> {
        todo!("{:?}", (file.len(), offset, len))
    }
    /// Cuts or extends a regular file; what is new reads as zero.
    pub async fn set_len(&self, file: &File, len: u64) -> Result<(), IoError> {
        todo!("{:?}", (file.len(), len))
    }
    /// The run of data or hole at `offset` (SEEK_DATA, SEEK_HOLE), at most to the end of the file; where the file
    /// can't tell, everything is data. `offset` at or past the end: a hole of `u64::MAX - offset` bytes.
    pub async fn extent_at(&self, file: &File, offset: u64) -> Result<FileExtent, IoError> {
        todo!("{:?}", (file.len(), offset))
    }
    /// Copies between files in the kernel (copy_file_range). Returns the bytes copied, which may be fewer.
    pub async fn copy_range(
        &self,
        src: &File,
        src_offset: u64,
        dst: &File,
        dst_offset: u64,
        len: u64,
    ) -> Result<u64, IoError> {
        todo!("{:?}", (src.len(), src_offset, dst.len(), dst_offset, len))
    }
    /// Shares a block-aligned range between files of one file system (FICLONERANGE), all or an error.
    pub async fn clone_range(
        &self,
        src: &File,
        src_offset: u64,
        dst: &File,
        dst_offset: u64,
        len: u64,
    ) -> Result<(), IoError> {
        todo!("{:?}", (src.len(), src_offset, dst.len(), dst_offset, len))
    }
    /// Runs `work` (computation, or a system call that has no asynchronous form) off the queue where the worker has
    /// threads for it, else in place.
    pub async fn run_blocking<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> T {
        work()
    }
    /// Waits.
    pub async fn sleep(&self, duration: Duration) {
        todo!("{duration:?}")
    }
}
