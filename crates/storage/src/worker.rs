//! The worker: one thread's completion queue, buffers and executor.
//!
//! # How it goes round
//! A *turn* takes what other threads woke, reaps completions, fires timers, runs the tasks that are ready, and then
//! submits all that the tasks queued in one go; where there is nothing to do, the submission waits as well. The
//! worker knows its disk only through [`Backend`] (see there, and the documentation of the module `request`, for what a
//! backend has to do); operations are numbered, and the number's slot in `ops` says who waits for it.
//!
//! # The end
//! The last counted handle that is dropped drives all tasks and operations to their end first. Tasks have handles that do
//! not count ([`Worker::spawn_with`]), or no worker with a task would ever end. A task that holds a counted handle
//! keeps its worker alive; such a worker is driven to its end when its thread ends.

#[cfg(feature = "simulated")]
mod simulated;

use crate::backend::Backend;
use crate::buf::IoBuf;
use crate::drive::Drive;
use crate::error::{IoError, IoErrorKind, Op};
use crate::executor::{Executor, JoinHandle};
use crate::file::File;
use crate::fork_mark::ForkMark;
use crate::memory::FreeList;
use crate::notify::Notifier;
use crate::request::{Completion, Job, OpDone, OpId, OpKind, OpRequest};
use crate::ring::{Ring, Submitter, ring};
use crate::sabotage::{self, Fault};
use crate::socket::{SocketCompletion, SocketRequest};
use crate::socket_ops::SocketOps;
use crate::sync::Mutex;
use crate::threads::Threads;
use crate::worker_id::WorkerId;
use crate::worker_types::{IoStats, WorkerConfig, WorkerKind};
use slab::Slab;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::Future;
use std::os::fd::BorrowedFd;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

/// How long the end of a worker waits, with nothing of its own in flight, for tasks that wait for other threads.
const PATIENCE_AT_END: Duration = Duration::from_secs(5);

/// A handle to the worker of this thread; cheap to clone, not `Send`.
///
/// Dropping the last handle runs the tasks that are left and waits for the operations in flight. Tasks that wait
/// for something that no operation or timer of this worker will bring are given five seconds without any news, then they are
/// dropped; but not while one of them is a commit that others wait for. A task that goes on for ever must be told to end before.
///
/// Tasks get handles that do not count, from [`Worker::spawn_with`] or [`Worker::uncounted`]. A task that captures a
/// counted handle, from [`Clone`], puts the end of its worker off until the task is over or its thread ends.
#[derive(Clone)]
pub struct Worker {
    inner: Rc<Inner>,
    /// Whether reads through this handle leave no page in the page cache.
    reads_uncached: bool,
    /// Shared by the handles that count.
    _counted: Option<Rc<Counted>>,
}

/// Drives the worker to its end when the last handle that counts is dropped.
struct Counted {
    inner: Rc<Inner>,
}

impl Drop for Counted {
    fn drop(&mut self) {
        if !self.inner.made_in.is_here() {
            // What is in flight is the parent's. A lock may be held by a thread that is not here.
            std::mem::forget(Rc::clone(&self.inner));
            return;
        }
        // Within a turn, whoever makes the turn has a handle or goes on to the end by itself; and the task that dropped
        // this one could not end in here.
        if self.inner.turns.get() == 0 {
            self.inner.end();
        }
    }
}

/// While it lives, other workers wait for the task that holds it ([`Worker::awaited_by_others`]).
#[must_use]
pub struct AwaitedByOthers(Rc<Inner>);

impl Drop for AwaitedByOthers {
    fn drop(&mut self) {
        self.0.awaited.set(self.0.awaited.get() - 1);
    }
}

struct Inner {
    id: WorkerId,
    executor: Executor,
    notifier: Arc<Notifier>,
    backend: RefCell<Backend>,
    ops: RefCell<Slab<OpState>>,
    /// Completions on their way from the backend to `ops`; kept for its capacity.
    done: Cell<Vec<Completion>>,
    sockets: SocketOps,
    /// As `done`, of sockets.
    sockets_done: Cell<Vec<SocketCompletion>>,
    timers: RefCell<BTreeMap<TimerKey, Waker>>,
    timers_made: Cell<u64>,
    pool: Arc<FreeList>,
    stats: Cell<IoStats>,
    fallback_reason: Option<String>,
    /// Makes another worker of the same simulated world.
    sibling: Option<MakeWorker>,
    /// Turns within each other: more than 1 when a task calls `block_on` or `poll`.
    turns: Cell<u32>,
    /// Knowledge that others have of its being driven.
    drive: Arc<Drive>,
    /// Tasks that other workers wait for.
    awaited: Cell<u32>,
    /// The end has begun.
    ending: Cell<bool>,
    made_in: ForkMark,
}

/// When a timer fires, and a number that tells timers of the same time apart.
type TimerKey = (Duration, u64);

/// The state of an operation: who waits for it.
enum OpState {
    Waiting(Option<Waker>),
    Over(Completion),
    /// Nobody any more; its completion is thrown away.
    Abandoned,
}

/// The workers of a thread, to be driven to their end when the thread ends.
#[derive(Default)]
struct OfThread(RefCell<Vec<Weak<Inner>>>);

thread_local!(static OF_THREAD: OfThread = OfThread::default());

impl OfThread {
    fn add(inner: &Rc<Inner>) {
        // Fails only while the thread ends; such a worker has no second chance.
        let _ = OF_THREAD.try_with(|workers| {
            let mut workers = workers.0.borrow_mut();
            workers.retain(|worker| worker.strong_count() > 0);
            workers.push(Rc::downgrade(inner));
        });
    }
}

impl Drop for OfThread {
    fn drop(&mut self) {
        for worker in std::mem::take(&mut *self.0.borrow_mut()) {
            if let Some(worker) = worker.upgrade() {
                // The panic of a task was reported when it happened; there is nobody here to pass it on to.
                let _ = worker.finish();
            }
        }
    }
}

/// Makes a worker.
type MakeWorker = Box<dyn Fn() -> Worker>;

impl Worker {
    /// A worker for this thread.
    pub fn new(config: &WorkerConfig) -> Result<Self, IoError> {
        let notifier = Arc::new(Notifier::new().map_err(|error| no_notifier(&error))?);
        let (ring, fallback_reason) = ring(config, &notifier, Submitter::Maker)?;
        Ok(Self::on_ring(ring, config, notifier, fallback_reason))
    }

    /// A worker on a ring, or on threads if there is none.
    pub(crate) fn on_ring(
        ring: Option<Ring>,
        config: &WorkerConfig,
        notifier: Arc<Notifier>,
        fallback_reason: Option<String>,
    ) -> Self {
        let threads = || Backend::Threads(Threads::new(config.threads, Arc::clone(&notifier)));
        let backend = ring.map_or_else(threads, Backend::of_ring);
        Self::with_backend(backend, notifier, FreeList::new(config.pool_bytes), fallback_reason, None)
    }

    /// A worker without descriptors and threads, which does operations where it would start them. Event loops can't watch it.
    pub(crate) fn in_place(pool: Arc<FreeList>) -> Self {
        let notifier = Arc::new(Notifier::in_memory());
        let backend = Backend::Threads(Threads::in_place(Arc::clone(&notifier)));
        Self::with_backend(backend, notifier, pool, None, None)
    }

    /// Whether nothing that was begun is under way.
    pub(crate) fn is_idle(&self) -> bool {
        self.inner.executor.live_tasks() == 0 && self.inner.backend.borrow().in_flight() == 0
    }

    /// A worker on `backend`, which wakes it through `notifier`.
    fn with_backend(
        backend: Backend,
        notifier: Arc<Notifier>,
        pool: Arc<FreeList>,
        fallback_reason: Option<String>,
        sibling: Option<MakeWorker>,
    ) -> Self {
        let id = backend.simulated().map_or_else(WorkerId::take, |queue| WorkerId::of_world(queue.number()));
        let inner = Rc::new(Inner {
            drive: Drive::new(id.number, Arc::clone(&notifier)),
            id,
            executor: Executor::new(Arc::clone(&notifier)),
            notifier,
            backend: RefCell::new(backend),
            ops: RefCell::default(),
            done: Cell::default(),
            sockets: SocketOps::default(),
            sockets_done: Cell::default(),
            timers: RefCell::default(),
            timers_made: Cell::new(0),
            pool,
            stats: Cell::default(),
            fallback_reason,
            sibling,
            turns: Cell::new(0),
            awaited: Cell::new(0),
            ending: Cell::new(false),
            made_in: ForkMark::here(),
        });
        if inner.backend.borrow().kind() != WorkerKind::Simulated && !cfg!(all(test, shuttle)) {
            // A simulated one ends when its world says so, one under a chosen schedule with the schedule.
            OfThread::add(&inner);
        }
        let counted = Some(Rc::new(Counted { inner: Rc::clone(&inner) }));
        Self { inner, reads_uncached: false, _counted: counted }
    }

    /// Another worker of the same simulated world; none of a real one.
    pub(crate) fn simulated_sibling(&self) -> Option<Self> {
        self.inner.sibling.as_ref().map(|make| make())
    }

    /// Which completion queue it has.
    pub fn kind(&self) -> WorkerKind {
        self.inner.backend.borrow().kind()
    }

    /// Why io_uring is not used although [`Auto`](crate::Engine::Auto) would have preferred it.
    pub fn fallback_reason(&self) -> Option<String> {
        self.inner.fallback_reason.clone()
    }

    /// A small number that differs between the workers of this process that are alive; of a simulated worker, its
    /// number in its world.
    pub fn id(&self) -> usize {
        self.inner.id.number
    }

    /// A handle that does not count, for tasks of this worker; its clones do not count either. It can be used as long as
    /// it lives, but nobody drives what is begun with it after the last counted handle was dropped, but the thread's
    /// end.
    #[must_use]
    pub fn uncounted(&self) -> Self {
        Self { inner: Rc::clone(&self.inner), reads_uncached: self.reads_uncached, _counted: None }
    }

    /// A handle whose reads leave no page in the page cache that was not there before, its clones' and tasks' included.
    /// Where the kernel has no `RWF_DONTCACHE` (Linux 6.14) for the file, pages of what was read are dropped, also those
    /// that were there.
    #[must_use]
    pub fn reading_uncached(&self) -> Self {
        Self { reads_uncached: true, ..self.clone() }
    }

    /// Whether reads leave no page in the page cache ([`Worker::reading_uncached`]).
    pub fn reads_uncached(&self) -> bool {
        self.reads_uncached
    }

    /// Runs the future that `task` makes as a task of its own ([`Worker::spawn`]). `task` is called at once, with a
    /// handle that does not count.
    ///
    /// ```
    /// use zebu_storage::{Worker, WorkerConfig};
    ///
    /// let worker = Worker::new(&WorkerConfig::default())?;
    /// let task = worker.spawn_with(|on| async move { on.buffer(4096).len() });
    /// assert_eq!(worker.block_on(task), 4096);
    /// # Ok::<(), zebu_storage::IoError>(())
    /// ```
    pub fn spawn_with<F>(&self, task: impl FnOnce(Self) -> F) -> JoinHandle<F::Output>
    where
        F: Future<Output: 'static> + 'static,
    {
        self.spawn(task(self.uncounted()))
    }

    /// Runs `future` as a task of its own until it is done, whoever waits for it. It is first polled at the
    /// worker's next turn. A future that needs the worker is better given to [`Worker::spawn_with`].
    pub fn spawn<T: 'static>(&self, future: impl Future<Output = T> + 'static) -> JoinHandle<T> {
        self.inner.executor.spawn(future)
    }

    /// Promises that this thread drives the worker (by [`Worker::block_on`], [`Worker::poll`] or [`Worker::wait`]) whenever
    /// there is something to do, until all of its tasks are over ([`Worker::drain`]), and does not block in between.
    ///
    /// Work that others may wait for, such as the commit of an image, then runs here when a request of this worker asks for
    /// it. Otherwise it is handed to a thread of the image's own and back, which takes some ten microseconds more.
    /// A thread that breaks the promise holds up everybody who uses the same images: their flushes wait until it goes on.
    pub fn promise_to_drive(&self) {
        self.inner.drive.promise();
    }

    /// Knowledge that others have of its being driven.
    #[inline]
    pub fn drive(&self) -> &Arc<Drive> {
        &self.inner.drive
    }

    /// Marks the task that holds the result as one that other workers wait for. The end of this worker waits until it is over:
    /// it may wait for a slow disk on another thread.
    pub fn awaited_by_others(&self) -> AwaitedByOthers {
        self.inner.awaited.set(self.inner.awaited.get() + 1);
        AwaitedByOthers(Rc::clone(&self.inner))
    }

    /// Whether [`Worker::promise_to_drive`] was called.
    pub fn is_driven(&self) -> bool {
        self.inner.drive.has_promised()
    }

    /// Runs `future` and all tasks until `future` is done.
    pub fn block_on<T>(&self, future: impl Future<Output = T>) -> T {
        let inner = &*self.inner;
        let mut future = std::pin::pin!(future);
        let root = inner.executor.root();
        let _turn = inner.begin_turn();
        loop {
            if root.take_woken()
                && let Poll::Ready(value) = future.as_mut().poll(&mut Context::from_waker(root.waker()))
            {
                return value;
            }
            inner.step();
            if root.is_woken() {
                continue;
            }
            if inner.executor.has_ready() {
                inner.backend.borrow_mut().submit_queued();
            } else {
                inner.sleep(None);
            }
        }
    }

    /// Runs what can run without waiting: reaps completions, polls woken tasks, submits. True if anything ran.
    pub fn poll(&self) -> bool {
        let _turn = self.inner.begin_turn();
        self.inner.backend.borrow_mut().submit_queued();
        self.inner.step()
    }

    /// Like [`Worker::poll`], but first waits until there is something, at most `timeout`.
    pub fn wait(&self, timeout: Option<Duration>) -> bool {
        let _turn = self.inner.begin_turn();
        self.inner.backend.borrow_mut().submit_queued();
        if self.inner.step() {
            return true;
        }
        self.inner.sleep(timeout);
        self.inner.step()
    }

    /// Runs until no task and no operation is left, and returns true; or until all that is left waits for other
    /// threads and nothing came from them for `patience`, and returns false.
    pub fn drain(&self, patience: Duration) -> bool {
        self.inner.drain(patience)
    }

    /// A descriptor, always the same, that is readable when [`Worker::poll`] has something to do: see the
    /// documentation of the crate. Timers ([`Worker::sleep`]) do not show in it: see [`Worker::next_timer`]. Nor do
    /// operations on sockets, unless the worker has an io_uring and the socket is no eventfd.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        let inner = &*self.inner;
        let mut backend = inner.backend.borrow_mut();
        backend.submit_queued();
        backend.watch();
        drop(backend);
        inner.notifier.watch();
        inner.executor.show_ready();
        inner.notifier.signal()
    }

    /// Whether this is the process that made the worker, and not a child of it by fork(2), where it can't be used.
    pub fn is_of_this_process(&self) -> bool {
        self.inner.made_in.is_here()
    }

    /// The descriptors that the worker itself has, for lists of those that a jail keeps open. Files are not among them.
    pub fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        let mut all = self.inner.notifier.descriptors().to_vec();
        let ring = self.inner.backend.borrow().descriptor();
        // SAFETY: the ring is the worker's as long as it lives.
        all.extend(ring.map(|fd| unsafe { BorrowedFd::borrow_raw(fd) }));
        all
    }

    /// Makes the descriptor ([`Worker::as_fd`]) readable until the next [`Worker::poll`], for whoever has kept something back
    /// that the event loop is to look at.
    pub fn show(&self) {
        self.inner.notifier.raise_signal();
    }

    /// How long until the next timer fires, for an event loop's own timeout; `None` if there is no timer.
    pub fn next_timer(&self) -> Option<Duration> {
        self.inner.next_timer()
    }

    /// Counters.
    pub fn stats(&self) -> IoStats {
        IoStats { syscalls: self.inner.backend.borrow().syscalls(), ..self.inner.stats.get() }
    }

    /// Changes the counters.
    pub(crate) fn count(&self, change: impl FnOnce(&mut IoStats)) {
        let mut stats = self.inner.stats.get();
        change(&mut stats);
        self.inner.stats.set(stats);
    }

    /// A page-aligned buffer of `len` bytes from this worker's pool; its content is unspecified but initialised.
    pub fn buffer(&self, len: usize) -> IoBuf {
        if len == 0 {
            return IoBuf::empty();
        }
        let register = |start, len| self.inner.backend.borrow_mut().register_buffer(start, len);
        IoBuf::whole(self.inner.pool.take(len, register), len)
    }

    /// Hands an operation on `file` to the backend and waits for its completion. The operation is under way from this call
    /// on; dropping the future abandons it. No flush of the file succeeds after a change of it was abandoned.
    pub(crate) fn operate<'a>(&'a self, file: &'a File, request: Box<OpRequest>) -> Operation<'a> {
        assert!(
            !matches!(request.kind, OpKind::Read) || request.bufs.0.iter().all(|buf| !buf.is_read_only()),
            "nothing is read into bytes that were lent to be read"
        );
        let id = OpId(self.inner.ops.borrow_mut().insert(OpState::Waiting(None)));
        // If the storage of a program panics, nobody waits for the completion, which comes all the same.
        let changes =
            (!matches!(request.kind, OpKind::Read | OpKind::Flush | OpKind::ExtentAt)).then_some(file);
        let operation = Operation { inner: &self.inner, id: Some(id), changes };
        self.inner.backend.borrow_mut().submit(id, request);
        self.inner.notifier.notify_event_loop();
        operation
    }

    /// The socket operations.
    pub(crate) fn socket_ops(&self) -> &SocketOps {
        &self.inner.sockets
    }

    /// Hands a socket operation to the backend.
    pub(crate) fn submit_socket(&self, id: usize, request: SocketRequest) {
        let over = self.inner.backend.borrow_mut().submit_socket(id, request);
        if let Some(over) = over {
            self.inner.sockets.complete_one(over);
        }
        self.inner.notifier.notify_event_loop();
    }

    /// Somebody waits for a lazy send.
    pub(crate) fn hurry_sockets(&self) {
        self.inner.backend.borrow_mut().hurry_sockets();
    }

    /// Ends a socket operation that nobody waits for.
    pub(crate) fn cancel_socket(&self, id: usize) {
        self.inner.backend.borrow_mut().cancel_socket(id);
    }

    /// Runs `work` (computation, or a system call that has no asynchronous form) off the queue where the worker has
    /// threads for it, else in place. If `work` panics, so does the awaiting.
    pub async fn run_blocking<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> T {
        enum Outcome<T> {
            Running(Option<Waker>),
            Over(std::thread::Result<T>),
        }
        let outcome = Arc::new(Mutex::new(Outcome::Running(None)));
        let theirs = Arc::clone(&outcome);
        let job: Job = Box::new(move || {
            let result = catch_unwind(AssertUnwindSafe(work));
            let mut outcome = theirs.lock();
            let before = std::mem::replace(&mut *outcome, Outcome::Over(result));
            drop(outcome);
            if let Outcome::Running(Some(waker)) = before {
                waker.wake();
            }
        });
        self.inner.backend.borrow_mut().run_blocking(job);
        self.inner.notifier.notify_event_loop();
        let result = std::future::poll_fn(|cx| {
            let mut outcome = outcome.lock();
            match std::mem::replace(&mut *outcome, Outcome::Running(Some(cx.waker().clone()))) {
                Outcome::Running(_) => Poll::Pending,
                Outcome::Over(result) => Poll::Ready(result),
            }
        })
        .await;
        result.unwrap_or_else(|panic| resume_unwind(panic))
    }

    /// Waits.
    pub async fn sleep(&self, duration: Duration) {
        Timer { inner: &self.inner, deadline: self.inner.now().saturating_add(duration), key: None }.await;
    }
}

pub(crate) fn no_notifier(error: &std::io::Error) -> IoError {
    IoError::of_file(Op::Setup, IoErrorKind::Os(error.raw_os_error().unwrap_or(libc::EIO)), "")
}

impl Inner {
    fn now(&self) -> Duration {
        self.backend.borrow().now()
    }

    fn begin_turn(&self) -> Turn<'_> {
        assert!(self.made_in.is_here(), "a worker can't be used by a child of fork(): make another one");
        let depth = self.turns.get();
        if depth == 0 {
            self.backend.borrow_mut().signal_off();
            self.notifier.begin_turn();
            self.drive.begin_turn();
            self.executor.absorb_remote();
        }
        self.turns.set(depth + 1);
        Turn(self)
    }

    /// Everything that needs no waiting, but the submission. True if there was anything.
    fn step(&self) -> bool {
        if self.notifier.take_pending() {
            self.executor.absorb_remote();
        }
        let mut done = self.done.take();
        self.backend.borrow_mut().reap(&mut done);
        let mut any = self.complete(done);
        any |= self.fire_timers();
        any |= self.executor.run_ready();
        any
    }

    /// Submits, and waits for a completion, a wake-up, the next timer, or the timeout.
    fn sleep(&self, timeout: Option<Duration>) {
        if !self.notifier.fall_asleep() {
            return;
        }
        let timeout = match (timeout, self.next_timer()) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
        let mut done = self.done.take();
        self.backend.borrow_mut().wait(timeout, &mut done);
        self.notifier.begin_turn();
        self.executor.absorb_remote();
        self.complete(done);
    }

    /// Notes what the completions mean for their files and wakes who waits for them.
    fn complete(&self, mut done: Vec<Completion>) -> bool {
        let any = !done.is_empty() | self.complete_sockets();
        for mut completion in done.drain(..) {
            completion.note_in_file();
            completion.request.settle();
            let id = completion.id.0;
            let mut ops = self.ops.borrow_mut();
            let abandoned = match ops.get_mut(id) {
                Some(OpState::Waiting(waker)) => {
                    let waker = waker.take();
                    ops[id] = OpState::Over(completion);
                    drop(ops);
                    if let Some(waker) = waker {
                        waker.wake();
                    }
                    continue;
                }
                Some(OpState::Abandoned) => ops.try_remove(id),
                Some(OpState::Over(_)) | None => None,
            };
            drop(ops);
            // Buffers and files may have owners with destructors of their own.
            drop((abandoned, completion));
        }
        self.done.set(done);
        any
    }

    fn complete_sockets(&self) -> bool {
        if self.sockets.is_empty() {
            return false;
        }
        let mut done = self.sockets_done.take();
        self.backend.borrow_mut().reap_sockets(&mut done);
        let any = self.sockets.complete(&mut done);
        self.sockets_done.set(done);
        any
    }

    fn next_timer(&self) -> Option<Duration> {
        let (deadline, _) = *self.timers.borrow().first_key_value()?.0;
        Some(deadline.saturating_sub(self.now()))
    }

    fn fire_timers(&self) -> bool {
        let mut any = false;
        // Without timers, the clock isn't asked.
        while self.next_timer() == Some(Duration::ZERO) {
            let fired = self.timers.borrow_mut().pop_first();
            if let Some((_, waker)) = fired {
                waker.wake();
                any = true;
            }
        }
        any
    }

    /// Runs until nothing is left or nothing happens any more; true if nothing is left.
    fn drain(&self, patience: Duration) -> bool {
        let _turn = self.begin_turn();
        let mut quiet_since = Instant::now();
        loop {
            if self.step() {
                quiet_since = Instant::now();
                self.backend.borrow_mut().submit_queued();
                continue;
            }
            let in_flight = self.backend.borrow().in_flight();
            if in_flight == 0 && self.executor.live_tasks() == 0 {
                return true;
            }
            if self.ending.get() {
                self.backend.borrow_mut().cancel_storages();
            }
            let sure_to_come = in_flight > 0 || !self.timers.borrow().is_empty();
            if sure_to_come {
                self.sleep(None);
                quiet_since = Instant::now();
            } else {
                // What others wait for was handed to threads that are driven.
                let is_awaited = self.ending.get() && self.awaited.get() > 0 && !patience.is_zero();
                let left = patience.saturating_sub(quiet_since.elapsed());
                if left.is_zero() && !is_awaited {
                    return false;
                }
                self.sleep(Some(left).filter(|_| !is_awaited));
            }
        }
    }

    /// The end: all tasks and operations are over afterwards. A task that panics ends alone; its panic is returned.
    fn finish(&self) -> std::thread::Result<()> {
        if !self.made_in.is_here() {
            return Ok(());
        }
        let patience = match self.backend.borrow().kind() {
            // Its other workers run on this thread, if at all.
            WorkerKind::Simulated => Duration::ZERO,
            WorkerKind::IoUring | WorkerKind::Threads => PATIENCE_AT_END,
        };
        self.ending.set(true);
        let mut result = Ok(());
        loop {
            let drained = catch_unwind(AssertUnwindSafe(|| {
                if !self.drain(patience) {
                    self.executor.cancel_all();
                    self.timers.take();
                    self.drain(Duration::ZERO);
                }
            }));
            match drained {
                Ok(()) => {
                    self.drive.end_promise();
                    return result;
                }
                Err(panic) => result = Err(panic),
            }
        }
    }

    /// The same, for a destructor.
    fn end(&self) {
        if let Err(panic) = self.finish()
            && !std::thread::panicking()
        {
            resume_unwind(panic);
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.end();
        self.drive.end();
    }
}

/// While it lives, the worker is within a turn.
struct Turn<'a>(&'a Inner);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let depth = self.0.turns.get() - 1;
        self.0.turns.set(depth);
        if depth == 0 {
            let mut backend = self.0.backend.borrow_mut();
            backend.submit_queued();
            self.0.drive.end_turn();
            self.0.notifier.leave_turn();
            backend.signal_on();
            drop(backend);
            self.0.executor.show_ready();
        }
    }
}

/// An operation under way.
pub(crate) struct Operation<'a> {
    inner: &'a Inner,
    /// `None` when its value was taken.
    id: Option<OpId>,
    /// The file, if the operation changes it.
    changes: Option<&'a File>,
}

impl Future for Operation<'_> {
    type Output = (Box<OpRequest>, Result<OpDone, i32>);

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let inner = self.inner;
        let mut ops = inner.ops.borrow_mut();
        let id = self.id.expect("an operation is not polled after its end").0;
        if let Some(OpState::Waiting(waker)) = ops.get_mut(id) {
            if waker.as_ref().is_none_or(|waker| !waker.will_wake(cx.waker())) {
                *waker = Some(cx.waker().clone());
            }
            return Poll::Pending;
        }
        self.id = None;
        match ops.try_remove(id) {
            Some(OpState::Over(Completion { request, result, .. })) => Poll::Ready((request, result)),
            _ => unreachable!("the slot of an operation belongs to its future"),
        }
    }
}

impl Drop for Operation<'_> {
    fn drop(&mut self) {
        let Some(OpId(id)) = self.id else { return };
        let mut ops = self.inner.ops.borrow_mut();
        let old = match ops.get_mut(id) {
            Some(state @ OpState::Waiting(_)) => {
                // It may still land, over whatever is written there meanwhile.
                if let Some(file) = self.changes.filter(|_| !sabotage::is(Fault::LeaveFailedBatch)) {
                    file.note_abandoned_change();
                }
                Some(std::mem::replace(state, OpState::Abandoned))
            }
            _ => ops.try_remove(id),
        };
        drop(ops);
        // A waker or buffers, whose destructors may come back here.
        drop(old);
    }
}

/// Waits for a time of the worker's clock.
struct Timer<'a> {
    inner: &'a Inner,
    deadline: Duration,
    key: Option<TimerKey>,
}

impl Future for Timer<'_> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if self.inner.now() >= self.deadline {
            return Poll::Ready(());
        }
        let key = self.key.unwrap_or_else(|| {
            let number = self.inner.timers_made.get();
            self.inner.timers_made.set(number + 1);
            (self.deadline, number)
        });
        self.key = Some(key);
        self.inner.timers.borrow_mut().insert(key, cx.waker().clone());
        // The event loop has to look at the time again.
        self.inner.notifier.notify_event_loop();
        Poll::Pending
    }
}

impl Drop for Timer<'_> {
    fn drop(&mut self) {
        if let Some(key) = self.key {
            let waker = self.inner.timers.borrow_mut().remove(&key);
            drop(waker);
        }
    }
}
