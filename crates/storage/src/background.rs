//! A worker on a thread of its own, to which other threads send work.
//!
//! Work that belongs to something that several workers share, and not to a request of one of them, runs here: the caller
//! may stop polling, drop its worker, or end its thread. In a simulated world it is one more worker of that world.
//!
//! A process that is about to give up the right to make rings starts some *ahead*: such a worker serves one [`Background`]
//! after the other.

use crate::error::{IoError, IoErrorKind, Op};
use crate::fork_mark::ForkMark;
use crate::sync::{Condvar, Mutex, MutexGuard, WaitList};
use crate::worker::Worker;
use crate::worker_types::{Commands, Engine, WorkerConfig, WorkerKind};
use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::mpsc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{JoinHandle, Thread, ThreadId};
use std::time::{Duration, Instant};

/// Operations in the ring of a background worker.
const DEPTH: u32 = 64;
/// Threads of one without io_uring.
const THREADS: usize = 2;
/// Bytes of free buffers that it keeps.
const POOL_BYTES: usize = 1 << 20;

/// How long a worker that was started ahead waits for what its last [`Background`] left behind.
const PATIENCE: Duration = Duration::from_secs(5);

type Job = Box<dyn FnOnce(&Worker) + Send>;

/// Workers that were started ahead and serve nobody now.
static IDLE: Mutex<Vec<Ahead>> = Mutex::new(Vec::new());

/// A worker that runs what it is sent. Dropped, it ends when all of that is done, and the drop waits for this (not on its
/// own thread).
pub struct Background {
    shared: Arc<Shared>,
    runs_on: RunsOn,
    made_in: ForkMark,
}

/// The thread of a background worker.
enum RunsOn {
    /// Driven by a simulated world.
    World,
    /// On a thread that ends with it.
    Own(JoinHandle<()>),
    /// On a thread that was started ahead.
    Ahead(ThreadId),
}

/// A worker that was started ahead.
#[derive(Clone)]
struct Ahead {
    thread: ThreadId,
    kind: WorkerKind,
    next: Arc<Mutex<Next>>,
}

/// The [`Background`] that it serves next.
#[derive(Default)]
struct Next {
    shared: Option<Arc<Shared>>,
    waker: Option<Waker>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// For threads that wait until nothing is under way, or until a worker that was started ahead has left.
    quiet: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    /// Of the task that takes jobs.
    taker: Option<Waker>,
    /// Jobs that were sent and whose tasks are not gone.
    under_way: usize,
    waiting: WaitList,
    /// No more jobs will come.
    is_closed: bool,
    /// No more jobs are taken.
    has_ended: bool,
    /// A worker that was started ahead has nothing left of this.
    has_left: bool,
}

/// The task of a job is gone without a result: it panicked, or its worker ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Vanished;

/// Why there is no result of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Undone {
    /// As [`Vanished`].
    Vanished,
    /// It had not begun in time, and never will.
    TakenBack,
}

impl Background {
    fn at(runs_on: RunsOn, shared: Arc<Shared>) -> Self {
        Self { shared, runs_on, made_in: ForkMark::here() }
    }

    /// Starts a worker of the same kind as `worker`.
    ///
    /// # Errors
    /// The system gives no thread or no descriptor.
    pub fn beside(worker: &Worker) -> Result<Self, IoError> {
        let shared = Arc::new(Shared::default());
        if let Some(own) = worker.simulated_sibling() {
            own.promise_to_drive();
            let (on, taken) = (own.clone(), Arc::clone(&shared));
            drop(own.spawn(async move { taken.take_jobs(&on).await }));
            return Ok(Self::at(RunsOn::World, shared));
        }
        if let Some(ahead) = Ahead::take(worker.kind()) {
            ahead.give(Arc::clone(&shared));
            return Ok(Self::at(RunsOn::Ahead(ahead.thread), shared));
        }
        let taken = Arc::clone(&shared);
        let thread = start_thread(&config_beside(worker.kind()), move |own| taken.serve(&own))?;
        Ok(Self::at(RunsOn::Own(thread), shared))
    }

    /// Starts a worker of a small kind, for whoever has none to start it beside.
    ///
    /// # Errors
    /// As of [`Background::start`].
    pub fn small(engine: Engine) -> Result<Self, IoError> {
        Self::start(&WorkerConfig {
            engine,
            depth: DEPTH,
            threads: THREADS,
            pool_bytes: POOL_BYTES,
            commands: Commands::Refused,
        })
    }

    /// Starts a worker, for whoever has none to start it beside.
    ///
    /// # Errors
    /// The system gives no thread or no descriptor, or not the engine that is asked for.
    pub fn start(config: &WorkerConfig) -> Result<Self, IoError> {
        let shared = Arc::new(Shared::default());
        let taken = Arc::clone(&shared);
        let thread = start_thread(config, move |own| taken.serve(&own))?;
        Ok(Self::at(RunsOn::Own(thread), shared))
    }

    /// Starts `count` workers of the same kind as `worker` that are used, one after the other, before others are started.
    /// They stay to the end of the process.
    ///
    /// # Errors
    /// As of [`Background::beside`].
    pub fn start_ahead(worker: &Worker, count: usize) -> Result<(), IoError> {
        for _ in 0..count {
            // The thread stays; nobody waits for its end.
            drop(start_thread(&config_beside(worker.kind()), |own| Ahead::of(&own).run(&own))?);
        }
        Ok(())
    }

    /// Has `work` called on the background worker, and its future run there until it is done, whoever waits for it.
    pub fn run<T, F>(&self, work: impl FnOnce(Worker) -> F + Send + 'static) -> Running<T>
    where
        T: Send + 'static,
        F: Future<Output = T> + 'static,
    {
        let result = Arc::new(Mutex::new(Outcome::Awaited(None)));
        let sender = Sender(Arc::clone(&result));
        let offer = Arc::new(Mutex::new(Some(work)));
        let running = Running { result, offer: Arc::clone(&offer) as _ };
        let count = Count::new(&self.shared);
        let job: Job = Box::new(move |worker| {
            let on = worker.uncounted();
            drop(worker.spawn(async move {
                // In this order: what the work held is gone when its result is known, and then it is no longer counted.
                let _count = count;
                let Some(work) = offer.lock().take() else { return };
                let value = work(on).await;
                sender.send(value);
            }));
        });
        let mut state = self.shared.lock();
        if state.has_ended {
            drop(state);
            drop(job);
            return running;
        }
        state.jobs.push_back(job);
        let taker = state.taker.take();
        drop(state);
        if let Some(taker) = taker {
            taker.wake();
        }
        running
    }

    /// Waits until nothing that was sent is under way.
    pub async fn idle(&self) {
        poll_fn(|cx| {
            let mut state = self.shared.lock();
            if state.under_way == 0 {
                return Poll::Ready(());
            }
            state.waiting.add(cx.waker());
            Poll::Pending
        })
        .await;
    }
}

impl Background {
    /// Blocks the thread until nothing that was sent is under way, for `patience` at most: what is left may wait for a
    /// request of this very thread. On the background thread, in a simulated world, and in a child of the process that made
    /// it, it returns at once.
    pub fn block_until_idle(&self, patience: Duration) {
        if !self.made_in.is_here() {
            return;
        }
        if self.thread().is_none_or(|thread| thread == std::thread::current().id()) {
            return;
        }
        let is_busy = |state: &mut State| state.under_way > 0;
        drop(self.shared.quiet.wait_timeout_while(self.shared.lock(), patience, is_busy));
    }

    /// Whether the caller is the background thread itself.
    pub fn is_this_thread(&self) -> bool {
        self.thread() == Some(std::thread::current().id())
    }

    /// Has the drop not wait for what is under way, for whoever would be waited for in turn.
    pub fn leave(&mut self) {
        // Its thread ends by itself, or serves the next, when all is done.
        self.runs_on = RunsOn::World;
    }

    fn thread(&self) -> Option<ThreadId> {
        match &self.runs_on {
            RunsOn::World => None,
            RunsOn::Own(thread) => Some(thread.thread().id()),
            RunsOn::Ahead(thread) => Some(*thread),
        }
    }
}

/// The configuration of one beside a worker of a kind.
fn config_beside(kind: WorkerKind) -> WorkerConfig {
    let engine = match kind {
        WorkerKind::Threads => Engine::Threads,
        WorkerKind::IoUring | WorkerKind::Simulated => Engine::Auto,
    };
    WorkerConfig {
        engine,
        depth: DEPTH,
        threads: THREADS,
        pool_bytes: POOL_BYTES,
        commands: Commands::Refused,
    }
}

/// Starts a thread with a worker, and waits until the worker is there.
fn start_thread(
    config: &WorkerConfig,
    body: impl FnOnce(Worker) + Send + 'static,
) -> Result<JoinHandle<()>, IoError> {
    let config = config.clone();
    let (ready, is_ready) = mpsc::channel();
    let body = move || match Worker::new(&config) {
        Ok(own) => {
            own.promise_to_drive();
            let _ = ready.send(Ok(()));
            drop(ready);
            body(own);
        }
        Err(error) => drop(ready.send(Err(error))),
    };
    let no_thread = |errno: i32| IoError::of_file(Op::Setup, IoErrorKind::Os(errno), "");
    let thread = std::thread::Builder::new()
        .name("zebu-image".to_owned())
        .spawn(body)
        .map_err(|error| no_thread(error.raw_os_error().unwrap_or(libc::EAGAIN)))?;
    is_ready.recv().map_err(|_| no_thread(libc::EAGAIN))??;
    Ok(thread)
}

impl Ahead {
    /// The worker of this thread.
    fn of(own: &Worker) -> Self {
        Self { thread: std::thread::current().id(), kind: own.kind(), next: Arc::default() }
    }

    /// One that serves nobody.
    fn take(kind: WorkerKind) -> Option<Self> {
        let mut idle = Self::idle();
        let found = idle.iter().position(|ahead| ahead.kind == kind)?;
        Some(idle.swap_remove(found))
    }

    fn idle() -> MutexGuard<'static, Vec<Self>> {
        IDLE.lock()
    }

    fn next(&self) -> MutexGuard<'_, Next> {
        self.next.lock()
    }

    fn give(&self, shared: Arc<Shared>) {
        let waker = {
            let mut next = self.next();
            next.shared = Some(shared);
            next.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Serves whoever comes. The worker waits in between: it gives up files that were closed.
    fn run(&self, own: &Worker) {
        Self::idle().push(self.clone());
        loop {
            let shared = own.block_on(poll_fn(|cx| {
                let mut next = self.next();
                next.waker = Some(cx.waker().clone());
                next.shared.take().map_or(Poll::Pending, Poll::Ready)
            }));
            shared.serve(own);
            while catch_unwind(AssertUnwindSafe(|| own.drain(PATIENCE))).is_err() {}
            Self::idle().push(self.clone());
            shared.lock().has_left = true;
            shared.quiet.notify_all();
        }
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        if !self.made_in.is_here() {
            // The thread is the parent's.
            std::mem::forget(std::mem::replace(&mut self.runs_on, RunsOn::World));
            std::mem::forget(Arc::clone(&self.shared));
            return;
        }
        let taker = {
            let mut state = self.shared.lock();
            state.is_closed = true;
            state.taker.take()
        };
        if let Some(taker) = taker {
            taker.wake();
        }
        if self.thread().is_none_or(|thread| thread == std::thread::current().id()) {
            return;
        }
        match std::mem::replace(&mut self.runs_on, RunsOn::World) {
            RunsOn::World => {}
            RunsOn::Own(thread) => drop(thread.join()),
            RunsOn::Ahead(_) => {
                drop(self.shared.quiet.wait_while(self.shared.lock(), |state| !state.has_left));
            }
        }
    }
}

impl std::fmt::Debug for Background {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Background").field("under_way", &self.shared.lock().under_way).finish_non_exhaustive()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Has the worker of this thread run jobs to their end.
    fn serve(self: &Arc<Self>, own: &Worker) {
        // A job that panics ends alone.
        while catch_unwind(AssertUnwindSafe(|| own.block_on(self.take_jobs(own)))).is_err() {}
    }

    /// Runs jobs until no more will come and those that came are done.
    async fn take_jobs(&self, worker: &Worker) {
        poll_fn(|cx| {
            loop {
                let mut state = self.lock();
                let Some(job) = state.jobs.pop_front() else {
                    if state.is_closed && state.under_way == 0 {
                        state.has_ended = true;
                        return Poll::Ready(());
                    }
                    state.taker = Some(cx.waker().clone());
                    return Poll::Pending;
                };
                drop(state);
                job(worker);
            }
        })
        .await;
    }
}

/// A job that is under way, from its sending to the end of its task.
struct Count(Arc<Shared>);

impl Count {
    fn new(shared: &Arc<Shared>) -> Self {
        shared.lock().under_way += 1;
        Self(Arc::clone(shared))
    }
}

impl Drop for Count {
    fn drop(&mut self) {
        let (waiting, taker) = {
            let mut state = self.0.lock();
            state.under_way -= 1;
            if state.under_way > 0 {
                return;
            }
            (state.waiting.take(), state.taker.take())
        };
        self.0.quiet.notify_all();
        waiting.wake();
        if let Some(taker) = taker {
            taker.wake();
        }
    }
}

enum Outcome<T> {
    Awaited(Option<Waker>),
    Over(T),
    Vanished,
}

/// The task's end of a result; dropped without one, the task has vanished.
struct Sender<T>(Arc<Mutex<Outcome<T>>>);

impl<T> Sender<T> {
    fn send(self, value: T) {
        self.end(Outcome::Over(value));
    }

    fn end(&self, outcome: Outcome<T>) {
        let mut result = self.0.lock();
        let Outcome::Awaited(waker) = &mut *result else { return };
        let waker = waker.take();
        *result = outcome;
        drop(result);
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        self.end(Outcome::Vanished);
    }
}

/// Work that was sent to a [`Background`]; as a future, its result. Dropping it changes nothing for the work.
#[must_use = "dropping it is fine; then nobody learns the result"]
pub struct Running<T> {
    result: Arc<Mutex<Outcome<T>>>,
    offer: Arc<dyn Offer>,
}

/// Work that may not have begun.
trait Offer: Send + Sync {
    /// Drops it, unless it has begun.
    fn take_back(&self) -> bool;
}

impl<W: Send> Offer for Mutex<Option<W>> {
    fn take_back(&self) -> bool {
        let work = self.lock().take();
        work.is_some()
    }
}

impl<T> Running<T> {
    /// Blocks the thread until the result is there.
    ///
    /// # Errors
    /// [`Vanished`].
    pub fn wait(self) -> Result<T, Vanished> {
        self.block(None).map_err(|_| Vanished)
    }

    /// As [`Running::wait`], but takes work back that has not begun after so many `turns` of `patience`: its thread is blocked
    /// by other work. While the whole process is stopped, one turn passes at most.
    ///
    /// # Errors
    /// [`Undone`].
    pub fn wait_if_begun(self, turns: u32, patience: Duration) -> Result<T, Undone> {
        self.block(Some((turns, patience)))
    }

    fn block(mut self, mut turns: Option<(u32, Duration)>) -> Result<T, Undone> {
        let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
        let mut context = Context::from_waker(&waker);
        let mut began = Instant::now();
        loop {
            if let Poll::Ready(result) = Pin::new(&mut self).poll(&mut context) {
                return result.map_err(|Vanished| Undone::Vanished);
            }
            match turns {
                None => std::thread::park(),
                Some((0, _)) if self.offer.take_back() => return Err(Undone::TakenBack),
                // It has begun.
                Some((0, _)) => turns = None,
                Some((left, patience)) => match patience.saturating_sub(began.elapsed()) {
                    Duration::ZERO => (turns, began) = (Some((left - 1, patience)), Instant::now()),
                    rest => std::thread::park_timeout(rest),
                },
            }
        }
    }

    /// Whether the result is there, or never will be.
    pub fn is_over(&self) -> bool {
        !matches!(*self.result.lock(), Outcome::Awaited(_))
    }
}

/// Wakes a thread that waits for a result.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

impl<T> Future for Running<T> {
    type Output = Result<T, Vanished>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut result = self.result.lock();
        match &mut *result {
            Outcome::Awaited(waker) => {
                *waker = Some(cx.waker().clone());
                Poll::Pending
            }
            Outcome::Over(_) | Outcome::Vanished => {
                match std::mem::replace(&mut *result, Outcome::Vanished) {
                    Outcome::Over(value) => Poll::Ready(Ok(value)),
                    Outcome::Awaited(_) | Outcome::Vanished => Poll::Ready(Err(Vanished)),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

    fn worker() -> Worker {
        Worker::new(&WorkerConfig::default()).unwrap()
    }

    #[test]
    fn work_runs_although_its_sender_does_not() {
        let worker = worker();
        let background = Background::beside(&worker).unwrap();
        let done = Arc::new(AtomicUsize::new(0));
        for _ in 0..100 {
            let done = Arc::clone(&done);
            drop(background.run(move |on| async move {
                on.sleep(std::time::Duration::from_millis(1)).await;
                done.fetch_add(1, SeqCst);
            }));
        }
        assert_eq!(worker.block_on(background.run(|_| async { 7 })), Ok(7));
        drop(background);
        assert_eq!(done.load(SeqCst), 100);
    }

    #[test]
    fn what_panics_has_vanished_and_the_rest_goes_on() {
        let worker = worker();
        let background = Background::beside(&worker).unwrap();
        let gone = background.run(|_| async { panic!("as intended") });
        let other = background.run(|_| async { 1 });
        assert_eq!(worker.block_on(gone), Err::<(), _>(Vanished));
        assert_eq!(worker.block_on(other), Ok(1));
        worker.block_on(background.idle());
    }

    #[test]
    fn work_that_cannot_begin_is_taken_back() {
        let background = Background::start(&WorkerConfig::default()).unwrap();
        let (begun, has_begun) = mpsc::channel();
        let (go, went) = mpsc::channel::<()>();
        let blocks = background.run(move |_| async move {
            begun.send(()).unwrap();
            went.recv().is_ok()
        });
        has_begun.recv().unwrap();
        let done = Arc::new(AtomicUsize::new(0));
        let counts = || {
            let done = Arc::clone(&done);
            background.run(move |_| async move { done.fetch_add(1, SeqCst) })
        };
        let kept = counts();
        assert_eq!(counts().wait_if_begun(3, Duration::from_millis(10)), Err(Undone::TakenBack));
        go.send(()).unwrap();
        // What has begun is waited for.
        assert_eq!(blocks.wait_if_begun(0, Duration::ZERO), Ok(true));
        assert_eq!(kept.wait(), Ok(0));
        drop(background);
        assert_eq!(done.load(SeqCst), 1);
    }

    #[test]
    fn the_last_owner_may_be_a_job_of_its_own() {
        let worker = worker();
        let background = Arc::new(Background::beside(&worker).unwrap());
        let (held, (go, went)) = (Arc::clone(&background), mpsc::channel::<()>());
        let running = background.run(move |_| async move {
            let _ = went.recv();
            drop(held);
        });
        drop(background);
        go.send(()).unwrap();
        assert_eq!(worker.block_on(running), Ok(()));
    }

    #[test]
    fn workers_that_were_started_ahead_serve_one_after_the_other() {
        let worker = worker();
        Background::start_ahead(&worker, 1).unwrap();
        let this = || std::thread::current().id();
        // Other tests of this process may have taken it.
        let serves =
            |background: &Background| worker.block_on(background.run(move |_| async move { this() }));
        let mut threads = Vec::new();
        for round in 0..50 {
            let background = Background::beside(&worker).unwrap();
            if let RunsOn::Ahead(thread) = background.runs_on {
                assert_eq!(serves(&background), Ok(thread));
                threads.push(thread);
            }
            if round % 2 == 1 {
                drop(background.run(|_| async { panic!("as intended") }));
            }
            drop(background.run(|on| async move {
                on.spawn_with(|on| async move { on.sleep(Duration::from_millis(1)).await });
            }));
        }
        assert!(!threads.is_empty());
        assert!(threads.iter().all(|thread| *thread == threads[0]));
    }
}
