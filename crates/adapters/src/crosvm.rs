//! crosvm: a disk file that becomes an asynchronous disk on the thread of the block device.
//!
//! The main process opens a `DiskFile`, lists its descriptors for the jail, clones it for each worker thread, and moves the
//! clones there. Each thread makes an executor, turns its clone into an `AsyncDisk`, and runs a task for each request on it.
//! When the device is reset, the disk is turned back and returned. The traits are restated from `disk/src/disk.rs`, with
//! the futures that `async_trait(?Send)` makes written out.

use std::cell::Cell;
use std::fmt;
use std::future::Future;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::path::Path;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;
use vm_memory::{Bytes, VolatileSlice};
use zebu::storage::{DetachedWorker, Engine, IoBuf, IoBufs, IoMemory, Worker, WorkerConfig};
use zebu::{Disk, Durability, Image, OpenOptions, Shrink, ZeroMode};

/// A future of one thread.
pub type LocalFuture<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// The executor of a thread, as far as a disk needs it.
pub trait Executor {
    /// Runs a task beside the others of this thread, for as long as the executor lives.
    fn spawn_local(&self, task: LocalFuture<'static, ()>);
    /// Ends when the descriptor is readable.
    fn wait_readable<'a>(&'a self, descriptor: BorrowedFd<'a>) -> LocalFuture<'a, io::Result<()>>;
    /// Ends after this time.
    fn sleep(&self, time: Duration) -> LocalFuture<'_, io::Result<()>>;
}

/// A part of a [`BackingMemory`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemRegion {
    /// Bytes from its start.
    pub offset: u64,
    /// Bytes.
    pub len: usize,
}

/// Memory of a guest.
///
/// # Safety
/// What [`BackingMemory::get_volatile_slice`] gives stays mapped, readable and writable while the value lives.
pub unsafe trait BackingMemory: Send + Sync + 'static {
    /// A part of the memory.
    ///
    /// # Errors
    /// It does not lie in the memory.
    fn get_volatile_slice(&self, region: MemRegion) -> io::Result<VolatileSlice<'_>>;
}

/// The length of a disk.
pub trait DiskGetLen {
    /// Bytes.
    ///
    /// # Errors
    /// None here.
    fn get_len(&self) -> io::Result<u64>;
}

/// A disk whose length can be set.
pub trait FileSetLen {
    /// Sets the length in bytes.
    ///
    /// # Errors
    /// As of [`Disk::resize`]; it would become smaller.
    fn set_len(&self, len: u64) -> io::Result<()>;
}

/// A disk whose space can be set aside.
pub trait FileAllocate {
    /// Sets space aside for a range.
    ///
    /// # Errors
    /// The disk can't.
    fn allocate(&mut self, offset: u64, len: u64) -> io::Result<()>;
}

/// Reads and writes that wait.
pub trait FileReadWriteAtVolatile {
    /// Reads at most as many bytes as the memory has, and says how many.
    ///
    /// # Errors
    /// As of [`Disk::read`].
    fn read_at_volatile(&self, slice: VolatileSlice<'_>, offset: u64) -> io::Result<usize>;
    /// Writes at most as many bytes as the memory has, and says how many.
    ///
    /// # Errors
    /// As of [`Disk::write`].
    fn write_at_volatile(&self, slice: VolatileSlice<'_>, offset: u64) -> io::Result<usize>;
}

/// A value with descriptors that a jail must keep.
pub trait AsRawDescriptors {
    /// All of them.
    fn as_raw_descriptors(&self) -> Vec<RawFd>;
}

/// A disk as the main process has it.
pub trait DiskFile:
    FileSetLen + DiskGetLen + FileReadWriteAtVolatile + ToAsyncDisk + Send + AsRawDescriptors + fmt::Debug
{
    /// Another handle of the same disk.
    ///
    /// # Errors
    /// The system gives no descriptor.
    fn try_clone(&self) -> io::Result<Box<dyn DiskFile>>;
}

/// A disk that can be used by an executor.
pub trait ToAsyncDisk: AsRawDescriptors + DiskGetLen + Send {
    /// The disk for this thread, driven by its executor.
    ///
    /// # Errors
    /// The disk has been used by another thread.
    fn to_async_disk(self: Box<Self>, executor: Rc<dyn Executor>) -> io::Result<Box<dyn AsyncDisk>>;
}

/// A disk on the thread of a block device. Every request may be called beside others.
pub trait AsyncDisk: DiskGetLen + FileSetLen + FileAllocate {
    /// Turns the disk back, so that it can go to another thread.
    fn into_inner(self: Box<Self>) -> Box<dyn DiskFile>;
    /// Makes what has ended durable.
    fn fsync(&self) -> LocalFuture<'_, io::Result<()>>;
    /// The same.
    fn fdatasync(&self) -> LocalFuture<'_, io::Result<()>>;
    /// Reads into parts of the memory; gives the bytes.
    fn read_to_mem<'a>(
        &'a self,
        offset: u64,
        memory: Arc<dyn BackingMemory>,
        parts: &'a [MemRegion],
    ) -> LocalFuture<'a, io::Result<usize>>;
    /// Writes from parts of the memory; gives the bytes.
    fn write_from_mem<'a>(
        &'a self,
        offset: u64,
        memory: Arc<dyn BackingMemory>,
        parts: &'a [MemRegion],
    ) -> LocalFuture<'a, io::Result<usize>>;
    /// Gives a range up.
    fn punch_hole(&self, offset: u64, len: u64) -> LocalFuture<'_, io::Result<()>>;
    /// Makes a range zero.
    fn write_zeroes_at(&self, offset: u64, len: u64) -> LocalFuture<'_, io::Result<()>>;
}

/// A disk of zebu for crosvm's main process.
pub struct ZebuDisk {
    disk: Disk,
    engine: Engine,
    /// The worker of the thread that the disk goes to: its ring is made before the jail is entered.
    worker: Mutex<Option<DetachedWorker>>,
}

impl ZebuDisk {
    /// Opens an image.
    ///
    /// # Errors
    /// As of [`Disk::open`].
    pub fn open(path: &Path, options: &OpenOptions) -> io::Result<Self> {
        Self::open_on(Engine::Auto, path, options)
    }

    /// As [`ZebuDisk::open`], with a choice of the way to do I/O: monitors have an option for hosts without io_uring.
    ///
    /// # Errors
    /// As of [`Disk::open`]; the system does not give the engine.
    pub fn open_on(engine: Engine, path: &Path, options: &OpenOptions) -> io::Result<Self> {
        Self::of(Disk::builder().engine(engine).open(path, options)?, engine)
    }

    fn of(disk: Disk, engine: Engine) -> io::Result<Self> {
        let config = WorkerConfig::default().engine(engine);
        let worker = DetachedWorker::new(&config, None).map_err(zebu::Error::from)?;
        Ok(Self { disk, engine, worker: Mutex::new(Some(worker)) })
    }

    /// Bytes of a request that lie within the disk.
    fn within(&self, offset: u64, len: usize) -> usize {
        let left = self.disk.virtual_size().saturating_sub(offset);
        usize::try_from(left).unwrap_or(usize::MAX).min(len)
    }
}

impl fmt::Debug for ZebuDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ZebuDisk").field(&self.disk.path()).finish()
    }
}

impl DiskGetLen for ZebuDisk {
    fn get_len(&self) -> io::Result<u64> {
        Ok(self.disk.virtual_size())
    }
}

impl FileSetLen for ZebuDisk {
    fn set_len(&self, len: u64) -> io::Result<()> {
        Ok(self.disk.resize(len, Shrink::Refuse)?)
    }
}

impl FileReadWriteAtVolatile for ZebuDisk {
    fn read_at_volatile(&self, slice: VolatileSlice<'_>, offset: u64) -> io::Result<usize> {
        // The guest may change the memory meanwhile, so no Rust reference to it is made.
        let mut bytes = vec![0; self.within(offset, slice.len())];
        self.disk.read(offset, &mut bytes)?;
        slice.copy_from(&bytes);
        Ok(bytes.len())
    }

    fn write_at_volatile(&self, slice: VolatileSlice<'_>, offset: u64) -> io::Result<usize> {
        let mut bytes = vec![0; self.within(offset, slice.len())];
        slice.read_slice(&mut bytes, 0).map_err(io::Error::other)?;
        self.disk.write(offset, &bytes)?;
        Ok(bytes.len())
    }
}

impl AsRawDescriptors for ZebuDisk {
    fn as_raw_descriptors(&self) -> Vec<RawFd> {
        let worker = self.worker.lock().unwrap_or_else(PoisonError::into_inner);
        let of_worker = worker.iter().flat_map(DetachedWorker::descriptors);
        self.disk.image().descriptors().into_iter().chain(of_worker).map(|fd| fd.as_raw_fd()).collect()
    }
}

impl DiskFile for ZebuDisk {
    fn try_clone(&self) -> io::Result<Box<dyn DiskFile>> {
        Ok(Box::new(Self::of(self.disk.clone(), self.engine)?))
    }
}

impl ToAsyncDisk for ZebuDisk {
    fn to_async_disk(self: Box<Self>, executor: Rc<dyn Executor>) -> io::Result<Box<dyn AsyncDisk>> {
        let detached = self.worker.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(detached) = detached else { return Err(io::Error::other("the disk has no worker left")) };
        let worker = detached.attach();
        let driving = Rc::new(Cell::new(true));
        let driver = drive(executor.clone(), worker.clone(), driving.clone());
        executor.spawn_local(Box::pin(driver));
        let (image, engine) = (self.disk.image().clone(), self.engine);
        Ok(Box::new(ZebuAsyncDisk { disk: self.disk, engine, image, worker, driving }))
    }
}

/// Polls a worker whenever it has something to do: the one task that its futures need beside them.
async fn drive(executor: Rc<dyn Executor>, worker: Worker, driving: Rc<Cell<bool>>) {
    while driving.get() {
        let mut readable = pin!(executor.wait_readable(worker.as_fd()));
        let mut timer = worker.next_timer().map(|left| executor.sleep(left));
        std::future::poll_fn(|cx: &mut Context<'_>| {
            let timer = timer.as_mut().map_or(Poll::Pending, |timer| timer.as_mut().poll(cx));
            if timer.is_ready() || readable.as_mut().poll(cx).is_ready() {
                return Poll::Ready(());
            }
            Poll::Pending
        })
        .await;
        worker.poll();
    }
}

/// A disk of zebu on the thread of a block device.
struct ZebuAsyncDisk {
    disk: Disk,
    engine: Engine,
    image: Image,
    worker: Worker,
    /// Whether [`drive`] goes on.
    driving: Rc<Cell<bool>>,
}

/// Memory of a guest that stays mapped while I/O uses it.
struct Mapped(Arc<dyn BackingMemory>);

// SAFETY: the implementor of `BackingMemory` promises that the memory stays mapped, readable and writable.
unsafe impl IoMemory for Mapped {}

/// Parts of the memory as buffers.
fn buffers(memory: Arc<dyn BackingMemory>, parts: &[MemRegion]) -> io::Result<IoBufs> {
    let owner = Arc::new(Mapped(memory));
    let mut bufs = IoBufs::new();
    for part in parts {
        let slice = owner.0.get_volatile_slice(*part)?;
        let keeper = Arc::clone(&owner) as Arc<dyn IoMemory>;
        // SAFETY: the range is `keeper`'s, and the pointer is that of its mapping. It is memory that the guest may change
        // at any time; if it gives the same bytes to two requests, both find whatever the other left.
        bufs.push(unsafe { IoBuf::from_memory(keeper, slice.ptr_guard_mut().as_ptr(), slice.len()) });
    }
    Ok(bufs)
}

impl Drop for ZebuAsyncDisk {
    fn drop(&mut self) {
        self.driving.set(false);
        // So that the driver looks.
        self.worker.show();
    }
}

impl DiskGetLen for ZebuAsyncDisk {
    fn get_len(&self) -> io::Result<u64> {
        Ok(self.disk.virtual_size())
    }
}

impl FileSetLen for ZebuAsyncDisk {
    /// Waits on the disk's own thread. The device calls it when no request of its threads is under way, since a change of
    /// size waits for these.
    fn set_len(&self, len: u64) -> io::Result<()> {
        Ok(self.disk.resize(len, Shrink::Refuse)?)
    }
}

impl FileAllocate for ZebuAsyncDisk {
    fn allocate(&mut self, _: u64, _: u64) -> io::Result<()> {
        let why = "a range of an image has no space of its own before it is written";
        Err(io::Error::new(io::ErrorKind::Unsupported, why))
    }
}

impl AsyncDisk for ZebuAsyncDisk {
    fn into_inner(self: Box<Self>) -> Box<dyn DiskFile> {
        // A worker for the next thread. If the system gives none, the disk says so there.
        let config = WorkerConfig::default().engine(self.engine);
        let worker = DetachedWorker::new(&config, None).ok();
        Box::new(ZebuDisk { disk: self.disk.clone(), engine: self.engine, worker: Mutex::new(worker) })
    }

    fn fsync(&self) -> LocalFuture<'_, io::Result<()>> {
        Box::pin(async { Ok(self.image.flush(&self.worker).await?) })
    }

    fn fdatasync(&self) -> LocalFuture<'_, io::Result<()>> {
        self.fsync()
    }

    fn read_to_mem<'a>(
        &'a self,
        offset: u64,
        memory: Arc<dyn BackingMemory>,
        parts: &'a [MemRegion],
    ) -> LocalFuture<'a, io::Result<usize>> {
        Box::pin(async move {
            let bufs = buffers(memory, parts)?;
            let len = bufs.len();
            let (result, _) = self.image.read(&self.worker, offset, bufs).await;
            Ok(result.map(|()| len)?)
        })
    }

    fn write_from_mem<'a>(
        &'a self,
        offset: u64,
        memory: Arc<dyn BackingMemory>,
        parts: &'a [MemRegion],
    ) -> LocalFuture<'a, io::Result<usize>> {
        Box::pin(async move {
            let bufs = buffers(memory, parts)?;
            let len = bufs.len();
            let (result, _) = self.image.write(&self.worker, offset, bufs, Durability::Volatile).await;
            Ok(result.map(|()| len)?)
        })
    }

    fn punch_hole(&self, offset: u64, len: u64) -> LocalFuture<'_, io::Result<()>> {
        Box::pin(async move { Ok(self.image.discard(&self.worker, offset, len).await?) })
    }

    fn write_zeroes_at(&self, offset: u64, len: u64) -> LocalFuture<'_, io::Result<()>> {
        Box::pin(
            async move { Ok(self.image.write_zeroes(&self.worker, offset, len, ZeroMode::Unmap).await?) },
        )
    }
}

#[cfg(test)]
mod tests;
