//! The surface for event loops: submit requests, poll completions, wait on a descriptor.

mod builder;

pub use builder::{DetachedQueue, QueueBuilder};

use crate::image_worker::vanished;
use crate::options::{Durability, ZeroMode};
use crate::{Error, ErrorKind, Image, Result};
use std::any::Any;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use zebu_storage::{IoBufs, Worker};

/// A request to an image. Offsets and lengths in bytes.
#[derive(Debug)]
#[non_exhaustive]
pub enum Request {
    /// Fill the buffers.
    Read {
        /// Where.
        offset: u64,
        /// The buffers, given back with the completion.
        bufs: IoBufs,
    },
    /// Write the buffers.
    Write {
        /// Where.
        offset: u64,
        /// The buffers, given back with the completion.
        bufs: IoBufs,
        /// Whether it is durable when it completes.
        durability: Durability,
    },
    /// Make a range read as zero.
    WriteZeroes {
        /// Where.
        offset: u64,
        /// How much.
        len: u64,
        /// The treatment of the space.
        mode: ZeroMode,
    },
    /// Give a range up.
    Discard {
        /// Where.
        offset: u64,
        /// How much.
        len: u64,
    },
    /// Make what was completed before durable.
    Flush,
}

impl Request {
    /// The buffers, given back.
    fn into_bufs(self) -> IoBufs {
        match self {
            Self::Read { bufs, .. } | Self::Write { bufs, .. } => bufs,
            Self::WriteZeroes { .. } | Self::Discard { .. } | Self::Flush => IoBufs::new(),
        }
    }
}

/// A request that has ended.
#[derive(Debug)]
#[non_exhaustive]
pub struct Completion {
    /// As given to [`Queue::submit`].
    pub user_data: u64,
    /// How it ended.
    pub result: Result<()>,
    /// The buffers of a read or write. None after a panic.
    pub bufs: IoBufs,
}

/// Requests of one thread on an image. Requests may complete in any order.
///
/// A queue makes progress only in its methods but [`Queue::submit`] (and when the worker is polled by other means, after which
/// what has ended does not show in the descriptor).
///
/// Dropping it lets the requests under way run to their end; their buffers are kept until then. If the queue has a worker of
/// its own ([`QueueBuilder`]), or the last handle to it, the drop waits for this.
///
/// # Panics
/// A storage of the program's own that panics does so out of the method that drives the queue. Its request then completes with
/// [`ErrorKind::Panicked`] and without its buffers; the queue stays in use.
///
/// # Event loops
/// The loop registers the descriptor of the queue ([`AsFd`], [`AsRawFd`]) for reading, and calls [`Queue::poll`] when it is
/// readable and when the time of [`Queue::next_timer`] is over. `event_loop.rs` of the examples does so with epoll(7), the
/// last example here with poll(2). With tokio, the queue is in an `AsyncFd` on its thread:
///
/// ```
/// # use zebu_engine as zebu;
/// use tokio::io::Interest;
/// use tokio::io::unix::AsyncFd;
/// use zebu::storage::IoBuf;
/// use zebu::{CreateOptions, Disk, OpenOptions, Request};
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("disk.qcow2");
/// # Disk::create(&path, &CreateOptions::default().size(1 << 20))?;
/// let disk = Disk::open(&path, &OpenOptions::default())?;
/// let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
/// let result = runtime.block_on(async {
///     // Newer versions of tokio prefer `register`, which is unsafe.
///     #[allow(deprecated)]
///     let queue = AsyncFd::with_interest(disk.queue().build()?, Interest::READABLE)?;
///     queue.get_ref().submit(Request::Read { offset: 0, bufs: IoBuf::zeroed(4096).into() }, 1);
///     loop {
///         // Before the poll: what comes during it shows again.
///         queue.readable().await?.clear_ready();
///         if let Some(completion) = queue.get_ref().next_completion() {
///             return Ok::<_, Box<dyn std::error::Error>>(completion.result);
///         }
///     }
/// })?;
/// result?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Threads
/// A queue belongs to one thread. One that is made on another thread than uses it comes from a [`QueueBuilder`].
///
/// ```
/// # use zebu_engine as zebu;
/// use std::os::fd::AsFd;
/// use zebu::storage::{IoBuf, Worker, WorkerConfig};
/// use zebu::{Access, CreateOptions, Durability, Image, OpenOptions, Queue, Request};
///
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("disk.qcow2");
/// let worker = Worker::new(&WorkerConfig::default())?;
/// let image = worker.block_on(async {
///     let create = CreateOptions::default().size(1 << 20);
///     Image::create(&worker, &path, &create).await?;
///     let open = OpenOptions::default().access(Access::ReadWrite);
///     Image::open(&worker, &path, &open).await
/// })?;
/// let queue = Queue::new(&image, &worker);
/// let data = IoBuf::copy_of(&[7; 4096]).into();
/// queue.submit(Request::Write { offset: 8192, bufs: data, durability: Durability::Volatile }, 1);
///
/// // An event loop would wait for the descriptor together with its others.
/// let mut done = Vec::new();
/// while queue.pending() > 0 {
///     let mut fds = [rustix::event::PollFd::new(&queue, rustix::event::PollFlags::IN)];
///     rustix::event::poll(&mut fds, None)?;
///     queue.poll(&mut done);
/// }
/// assert_eq!(done[0].user_data, 1);
/// assert!(done[0].result.is_ok());
/// worker.block_on(image.close(&worker))?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Queue {
    worker: Worker,
    image: Image,
    shared: Rc<Shared>,
    polls: std::cell::Cell<u32>,
    /// Dropped after the worker, whose end lets the requests end.
    _open: Option<KeptOpen>,
}

/// Something that keeps the image open while it lives.
type KeptOpen = Arc<dyn Any + Send + Sync>;

/// One poll in so many looks at the clock for memory to give back.
const POLLS_PER_LOOK: u32 = 64;

#[derive(Default)]
struct Shared {
    done: RefCell<VecDeque<Completion>>,
    running: std::cell::Cell<usize>,
}

impl Queue {
    /// A queue for `image`, run by `worker`.
    pub fn new(image: &Image, worker: &Worker) -> Self {
        Self::keeping_open(image.clone(), worker.clone(), None)
    }

    fn keeping_open(image: Image, worker: Worker, open: Option<KeptOpen>) -> Self {
        Self { worker, image, shared: Rc::default(), polls: std::cell::Cell::new(0), _open: open }
    }

    /// The worker that runs it.
    pub fn worker(&self) -> &Worker {
        &self.worker
    }

    /// The image.
    pub fn image(&self) -> &Image {
        &self.image
    }

    /// Takes a request over. Its I/O starts with the next [`Queue::poll`], [`Queue::start`] or [`Queue::wait`], together with that of all
    /// requests since the last one: a batch is several calls of this, and one poll.
    ///
    /// In a child of fork(2) the request fails at once ([`ErrorKind::InvalidArgument`]).
    pub fn submit(&self, request: Request, user_data: u64) {
        if !self.worker.is_of_this_process() {
            let message = "the queue was made by the parent of this process; make one after fork()";
            let result = Err(Error::new(ErrorKind::InvalidArgument, message).on(self.image.path()));
            let bufs = request.into_bufs();
            self.shared.done.borrow_mut().push_back(Completion { user_data, result, bufs });
            return;
        }
        let (image, worker) = (self.image.clone(), self.worker.uncounted());
        self.shared.running.set(self.shared.running.get() + 1);
        let unanswered = Unanswered { shared: self.shared.clone(), image, worker, user_data, is_over: false };
        drop(self.worker.spawn(async move {
            let (result, bufs) = run(&unanswered.image, &unanswered.worker, request).await;
            unanswered.answer(result, bufs);
        }));
    }

    /// The descriptors of the queue and of the image's files, for lists of those that a jail keeps open. The worker of the
    /// image's own and its files have more, which are used by their own threads.
    pub fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        let mut all = self.image.descriptors();
        all.extend(self.worker.descriptors());
        all
    }

    /// Requests that were submitted and not handed back yet.
    pub fn pending(&self) -> usize {
        self.shared.running.get() + self.shared.done.borrow().len()
    }

    /// Does what can be done without waiting and appends what has ended; returns how many that are.
    pub fn poll(&self, done: &mut Vec<Completion>) -> usize {
        self.turn();
        let mut ended = self.shared.done.borrow_mut();
        let count = ended.len();
        done.extend(ended.drain(..));
        count
    }

    /// The next request that has ended, if there is one: does what can be done without waiting only if none was left by the
    /// last call. For loops that take completions one by one, until there is none.
    pub fn next_completion(&self) -> Option<Completion> {
        let left = self.shared.done.borrow_mut().pop_front();
        left.or_else(|| {
            self.turn();
            self.shared.done.borrow_mut().pop_front()
        })
    }

    /// Starts what was submitted, and leaves what has ended for later: the descriptor is readable then.
    pub fn start(&self) {
        self.turn();
        if !self.shared.done.borrow().is_empty() {
            self.worker.show();
        }
    }

    fn turn(&self) {
        if !self.worker.is_of_this_process() {
            return;
        }
        self.polls.set(self.polls.get().wrapping_add(1));
        if self.polls.get().is_multiple_of(POLLS_PER_LOOK) {
            self.image.tidy(std::time::Instant::now());
        }
        self.worker.poll();
    }

    /// How long until [`Queue::poll`] has something to do although the descriptor is not readable; `None`: it becomes readable
    /// then. An event loop takes it for its timeout. There are timers only while a request waits for another thread.
    pub fn next_timer(&self) -> Option<Duration> {
        self.worker.next_timer()
    }

    /// As [`Queue::poll`], but waits for the first completion, at most `timeout`.
    pub fn wait(&self, done: &mut Vec<Completion>, timeout: Option<Duration>) -> usize {
        let start = std::time::Instant::now();
        loop {
            let count = self.poll(done);
            if count > 0 || self.shared.running.get() == 0 || !self.worker.is_of_this_process() {
                return count;
            }
            let left = match timeout {
                Some(timeout) => match timeout.checked_sub(start.elapsed()) {
                    Some(left) => Some(left),
                    None => return 0,
                },
                None => None,
            };
            self.worker.wait(left);
        }
    }
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Queue")
            .field("image", &self.image.path())
            .field("pending", &self.pending())
            .finish_non_exhaustive()
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        if !self.worker.is_of_this_process() {
            // The image is the parent's, and its locks may be held by threads that are not here.
            std::mem::forget(self.image.clone());
        }
    }
}

impl AsFd for Queue {
    /// Readable when [`Queue::poll`] has something to do: the eventfd of [`QueueBuilder::event_fd`], if one was given. It is
    /// always the same, so an event loop registers it once, by level or by edge. It may be read, as an eventfd is, before
    /// [`Queue::poll`].
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.worker.as_fd()
    }
}

impl AsRawFd for Queue {
    /// The descriptor of [`Queue::as_fd`], for interfaces such as `AsyncFd` of tokio, which take a queue itself.
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

/// A request under way. One that vanishes in a panic is answered with an error, without its buffers.
struct Unanswered {
    shared: Rc<Shared>,
    image: Image,
    worker: Worker,
    user_data: u64,
    is_over: bool,
}

impl Unanswered {
    fn answer(mut self, result: Result<()>, bufs: IoBufs) {
        self.end(result, bufs);
    }

    fn end(&mut self, result: Result<()>, bufs: IoBufs) {
        self.is_over = true;
        self.shared.running.set(self.shared.running.get() - 1);
        let user_data = self.user_data;
        self.shared.done.borrow_mut().push_back(Completion { user_data, result, bufs });
    }
}

impl Drop for Unanswered {
    fn drop(&mut self) {
        if self.is_over {
            return;
        }
        self.end(Err(vanished(self.image.path())), IoBufs::new());
        // The panic leaves the poll that would hand it over.
        self.worker.show();
    }
}

async fn run(image: &Image, worker: &Worker, request: Request) -> (Result<()>, IoBufs) {
    match request {
        Request::Read { offset, bufs } => image.read(worker, offset, bufs).await,
        Request::Write { offset, bufs, durability } => image.write(worker, offset, bufs, durability).await,
        Request::WriteZeroes { offset, len, mode } => {
            (image.write_zeroes(worker, offset, len, mode).await, IoBufs::new())
        }
        Request::Discard { offset, len } => (image.discard(worker, offset, len).await, IoBufs::new()),
        Request::Flush => (image.flush(worker).await, IoBufs::new()),
    }
}
