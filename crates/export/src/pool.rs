//! Threads with a worker each, and tasks sent to them.

use crate::error::ExportError;
use crate::stop::Stop;
use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Poll, Waker};
use std::thread::JoinHandle;
use zebu_engine::storage::{Worker, WorkerConfig};
use zebu_storage::sync::Mutex;

/// How a pool is made.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct PoolConfig {
    /// Threads, at least one.
    pub threads: usize,
    /// The worker of each.
    pub worker: WorkerConfig,
}

zebu_storage::option_setters!(PoolConfig { threads: usize, worker: WorkerConfig });

impl Default for PoolConfig {
    fn default() -> Self {
        Self { threads: 1, worker: WorkerConfig::default() }
    }
}

type LocalTask = Pin<Box<dyn Future<Output = ()>>>;
type Start = Box<dyn FnOnce(Seat) -> LocalTask + Send>;

/// A task that was sent and not begun.
struct Job {
    start: Start,
    weight: usize,
}

/// Tasks that serve a client count where the next client goes; those that wait for clients do not.
const SERVING: usize = 1;
const WAITING: usize = 0;

/// Where a task runs.
#[derive(Clone)]
pub(crate) struct Seat {
    pub(crate) worker: Worker,
    /// Number of the thread in its pool.
    pub(crate) thread: usize,
}

/// State that a thread shares with those who send it tasks.
#[derive(Default)]
struct Mailbox {
    state: Mutex<Mail>,
    /// Tasks that were sent, serve somebody, and are not over.
    load: AtomicUsize,
}

#[derive(Default)]
struct Mail {
    jobs: Vec<Job>,
    waker: Option<Waker>,
}

/// Sends tasks to the threads of a pool. Cheap to clone.
#[derive(Clone)]
pub(crate) struct PoolHandle(Arc<[Mailbox]>);

impl PoolHandle {
    /// Runs a task that serves somebody on the thread `thread` (modulo their number). `task` is called there.
    pub(crate) fn spawn_on<F: Future<Output = ()> + 'static>(
        &self,
        thread: usize,
        task: impl FnOnce(Seat) -> F + Send + 'static,
    ) {
        self.send(thread, SERVING, Box::new(move |seat| Box::pin(task(seat))));
    }

    /// Runs a task that waits for clients or looks after them. It makes its thread no busier for
    /// [`PoolHandle::least_loaded`].
    pub(crate) fn spawn_waiting<F: Future<Output = ()> + 'static>(
        &self,
        thread: usize,
        task: impl FnOnce(Seat) -> F + Send + 'static,
    ) {
        self.send(thread, WAITING, Box::new(move |seat| Box::pin(task(seat))));
    }

    fn send(&self, thread: usize, weight: usize, start: Start) {
        let mailbox = &self.0[thread % self.0.len()];
        mailbox.load.fetch_add(weight, Ordering::Relaxed);
        let mut mail = mailbox.state.lock();
        mail.jobs.push(Job { start, weight });
        let waker = mail.waker.take();
        drop(mail);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// The thread that serves the fewest.
    pub(crate) fn least_loaded(&self) -> usize {
        let loads = self.0.iter().map(|mailbox| mailbox.load.load(Ordering::Relaxed)).enumerate();
        loads.min_by_key(|&(_, load)| load).map_or(0, |(thread, _)| thread)
    }
}

/// Threads with a worker each.
pub struct WorkerPool {
    handle: PoolHandle,
    stop: Stop,
    threads: Vec<JoinHandle<()>>,
}

impl WorkerPool {
    /// Starts the threads.
    ///
    /// # Errors
    /// The system gives no thread or no worker.
    pub fn start(config: &PoolConfig) -> Result<Self, ExportError> {
        let count = config.threads.max(1);
        let mailboxes: Arc<[Mailbox]> = (0..count).map(|_| Mailbox::default()).collect();
        let mut pool = Self { handle: PoolHandle(mailboxes), stop: Stop::default(), threads: Vec::new() };
        let (ready, started) = std::sync::mpsc::channel();
        for thread in 0..count {
            let (handle, stop, config) = (pool.handle.clone(), pool.stop.clone(), config.worker.clone());
            let ready = ready.clone();
            let builder = std::thread::Builder::new().name(format!("zebu-serve-{thread}"));
            let spawned = builder.spawn(move || {
                let worker = Worker::new(&config);
                let _ = ready.send(worker.as_ref().map(drop).map_err(ToString::to_string));
                if let Ok(worker) = worker {
                    worker.promise_to_drive();
                    let (seat, running) = (Seat { worker: worker.uncounted(), thread }, Running::default());
                    // A task that panics ends alone.
                    let serve = || worker.block_on(run(&seat, &handle, &stop, &running));
                    while catch_unwind(AssertUnwindSafe(serve)).is_err() {}
                }
            });
            pool.threads.push(spawned.map_err(|error| ExportError::Thread(error.to_string()))?);
        }
        for _ in 0..count {
            started
                .recv()
                .map_err(|error| ExportError::Thread(error.to_string()))?
                .map_err(ExportError::Thread)?;
        }
        Ok(pool)
    }

    /// Number of threads.
    pub fn threads(&self) -> usize {
        self.threads.len()
    }

    pub(crate) fn handle(&self) -> PoolHandle {
        self.handle.clone()
    }

    /// Waits until each thread has taken a turn. A disk that is slow holds none of them up.
    pub async fn turn(&self) {
        for thread in 0..self.threads() {
            let taken = Stop::default();
            let there = taken.clone();
            self.handle.spawn_waiting(thread, |_| async move { there.throw() });
            taken.wait().await;
        }
    }

    /// Waits until all tasks are over, and ends the threads. (Servers on the pool must have been told to stop.)
    pub fn join(mut self) {
        self.end();
    }

    fn end(&mut self) {
        self.stop.throw();
        for thread in self.threads.drain(..) {
            // The panic of a task was reported when it happened.
            let _ = thread.join();
        }
    }
}

impl Drop for WorkerPool {
    fn drop(&mut self) {
        self.end();
    }
}

/// Tasks of a thread that are not over, and who waits for their end.
type Running = Rc<(Cell<usize>, Cell<Option<Waker>>)>;

/// A thread: takes its mail until the pool ends and no task is left.
async fn run(seat: &Seat, handle: &PoolHandle, stop: &Stop, running: &Running) {
    let mailbox = &handle.0[seat.thread];
    let mut stopped = std::pin::pin!(stop.wait());
    let mut is_stopped = false;
    poll_fn(|cx| {
        let mut mail = mailbox.state.lock();
        let jobs = std::mem::take(&mut mail.jobs);
        mail.waker = Some(cx.waker().clone());
        drop(mail);
        for job in jobs {
            running.0.set(running.0.get() + 1);
            let (handle, running) = (handle.clone(), Rc::clone(running));
            let ended = Ended { handle, thread: seat.thread, weight: job.weight, running };
            let seat_of_task = seat.clone();
            drop(seat.worker.spawn(async move {
                let _ended = ended;
                (job.start)(seat_of_task).await;
            }));
        }
        is_stopped = is_stopped || stopped.as_mut().poll(cx).is_ready();
        if is_stopped && running.0.get() == 0 {
            return Poll::Ready(());
        }
        running.1.set(Some(cx.waker().clone()));
        Poll::Pending
    })
    .await;
}

/// Counts a task's end, whichever way it ends.
struct Ended {
    handle: PoolHandle,
    thread: usize,
    weight: usize,
    running: Running,
}

impl Drop for Ended {
    fn drop(&mut self) {
        self.handle.0[self.thread].load.fetch_sub(self.weight, Ordering::Relaxed);
        let (count, waker) = &*self.running;
        count.set(count.get() - 1);
        if let Some(waker) = waker.take() {
            waker.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_task_that_panics_ends_alone() {
        let pool = WorkerPool::start(&PoolConfig::default()).unwrap();
        let (handle, stop) = (pool.handle(), Stop::default());
        let (sender, receiver) = std::sync::mpsc::channel();
        let (before, waits) = (sender.clone(), stop.clone());
        handle.spawn_on(0, move |_| async move {
            waits.wait().await;
            before.send("was there").unwrap();
        });
        handle.spawn_on(0, |_| async { panic!("as intended, in a task") });
        let start: fn(Seat) -> std::future::Ready<()> = |_| panic!("as intended, while it starts");
        handle.spawn_on(0, start);
        handle.spawn_on(0, move |_| async move { sender.send("came later").unwrap() });
        assert_eq!(receiver.recv(), Ok("came later"));
        stop.throw();
        assert_eq!(receiver.recv(), Ok("was there"));
        pool.join();
        assert_eq!(handle.0[0].load.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn clients_are_spread_over_all_threads_from_the_first_one_on() {
        let pool = WorkerPool::start(&PoolConfig { threads: 2, ..PoolConfig::default() }).unwrap();
        let (handle, stop) = (pool.handle(), Stop::default());
        // A listener and the watch, as every server has them.
        for _ in 0..2 {
            let stop = stop.clone();
            handle.spawn_waiting(0, move |_| async move { stop.wait().await });
        }
        let taken = [(); 4].map(|()| {
            let (thread, stop) = (handle.least_loaded(), stop.clone());
            handle.spawn_on(thread, move |_| async move { stop.wait().await });
            thread
        });
        // First, or a pool that is dropped by a panic waits for ever.
        stop.throw();
        pool.join();
        assert_eq!(taken, [0, 1, 0, 1]);
        assert!(handle.0.iter().all(|mailbox| mailbox.load.load(Ordering::Relaxed) == 0));
    }
}
