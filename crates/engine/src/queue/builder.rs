//! Queues that are made on one thread and used on another.

use super::{KeptOpen, Queue};
use crate::{Error, Image, Result};
use std::fmt;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::Path;
use zebu_storage::{DetachedWorker, Engine, IoError, Worker, WorkerConfig};

/// Makes queues that have a worker of their own. It is `Send`: a queue belongs to the thread that calls
/// [`QueueBuilder::build`] or [`DetachedQueue::attach`].
///
/// ```
/// # use zebu_engine as zebu;
/// use zebu::{CreateOptions, Disk, OpenOptions, Request};
/// use zebu::storage::IoBuf;
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("disk.qcow2");
/// # Disk::create(&path, &CreateOptions::default().size(1 << 20))?;
/// let disk = Disk::open(&path, &OpenOptions::default())?;
/// // Made here, with its ring and its descriptors, and used there.
/// let detached = disk.queue().depth(64).detached()?;
/// std::thread::spawn(move || {
///     let queue = detached.attach();
///     queue.submit(Request::Read { offset: 0, bufs: IoBuf::zeroed(512).into() }, 7);
///     let mut done = Vec::new();
///     queue.wait(&mut done, None);
///     assert_eq!(done[0].user_data, 7);
/// }).join().unwrap();
/// # Ok::<(), zebu::Error>(())
/// ```
#[must_use]
pub struct QueueBuilder {
    image: Image,
    open: Option<KeptOpen>,
    worker: WorkerConfig,
    event: Option<OwnedFd>,
    promise: Promise,
}

/// Whether the thread of a queue promises to drive it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Promise {
    None,
    ToDrive,
}

impl QueueBuilder {
    /// A builder of a queue on an image, which is not kept open by it.
    pub fn new(image: &Image) -> Self {
        Self {
            image: image.clone(),
            open: None,
            worker: WorkerConfig::default(),
            event: None,
            promise: Promise::None,
        }
    }

    pub(crate) fn keeping_open(image: &Image, open: KeptOpen) -> Self {
        Self { open: Some(open), ..Self::new(image) }
    }

    /// Operations of the file that are in flight at once; others wait. 256, if this is not called. Fewer than 8 count as 8,
    /// more than 16,384 as 16,384.
    pub fn depth(mut self, operations: u32) -> Self {
        self.worker.depth = operations;
        self
    }

    /// Which way to do I/O it takes; io_uring where it can be had, if this is not called.
    pub fn engine(mut self, engine: Engine) -> Self {
        self.worker.engine = engine;
        self
    }

    /// Threads that do I/O where it has no io_uring, each started when it is needed. 16, if this is not called; 0 counts as 1.
    pub fn threads(mut self, threads: usize) -> Self {
        self.worker.threads = threads;
        self
    }

    /// The eventfd that is to become readable when [`Queue::poll`] has something to do, instead of one of the queue's own. It
    /// does not block from then on, for its other holders neither.
    pub fn event_fd(mut self, event: OwnedFd) -> Self {
        self.event = Some(event);
        self
    }

    /// Promises that the thread of the queue polls it whenever its descriptor is readable, and does not block otherwise;
    /// see [`Worker::promise_to_drive`]. Flushes are faster then.
    pub fn promise_to_drive(mut self) -> Self {
        self.promise = Promise::ToDrive;
        self
    }

    /// The queue, for this thread.
    ///
    /// # Errors
    /// The system gives no descriptor, or not the engine that is asked for; the given event is no eventfd.
    pub fn build(self) -> Result<Queue> {
        if self.event.is_some() {
            return Ok(self.detached()?.attach());
        }
        let worker = Worker::new(&self.worker).map_err(|e| no_worker(e, self.image.path()))?;
        Ok(attach(self.image, worker, self.promise, self.open))
    }

    /// The queue, for a thread that is not known yet. Its ring and its descriptors are made here, and not where a jail may
    /// refuse that. Small requests cost some percent more than with [`QueueBuilder::build`].
    ///
    /// # Errors
    /// As of [`QueueBuilder::build`].
    pub fn detached(self) -> Result<DetachedQueue> {
        if self.image.0.is_writable() {
            // The first change would start it, in the jail.
            let own = self.image.0.own_worker();
            own.start_ahead(self.worker.engine).map_err(|e| e.on(self.image.path()))?;
        }
        let worker = DetachedWorker::new(&self.worker, self.event);
        let worker = worker.map_err(|e| no_worker(e, self.image.path()))?;
        Ok(DetachedQueue { worker, image: self.image, promise: self.promise, open: self.open })
    }
}

fn no_worker(error: IoError, path: &Path) -> Error {
    Error::from(error).on(path)
}

fn attach(image: Image, worker: Worker, promise: Promise, open: Option<KeptOpen>) -> Queue {
    if promise == Promise::ToDrive {
        worker.promise_to_drive();
    }
    Queue::keeping_open(image, worker, open)
}

impl fmt::Debug for QueueBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QueueBuilder")
            .field("image", &self.image.path())
            .field("worker", &self.worker)
            .finish_non_exhaustive()
    }
}

/// A queue on its way to its thread ([`QueueBuilder::detached`]).
#[must_use]
pub struct DetachedQueue {
    worker: DetachedWorker,
    image: Image,
    promise: Promise,
    open: Option<KeptOpen>,
}

impl fmt::Debug for DetachedQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DetachedQueue").field("image", &self.image.path()).finish_non_exhaustive()
    }
}

impl DetachedQueue {
    /// The queue, which belongs to this thread from now on.
    pub fn attach(self) -> Queue {
        attach(self.image, self.worker.attach(), self.promise, self.open)
    }
}

impl AsFd for DetachedQueue {
    /// The descriptor that the queue will have.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.worker.as_fd()
    }
}

impl AsRawFd for DetachedQueue {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}
