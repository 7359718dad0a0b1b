//! The thread-pool backend: each operation is done by system calls on a thread of a small pool, or *in place*, on the worker's
//! own, if the pool has no threads.

use crate::blocking;
use crate::completions::Completions;
use crate::notify::Notifier;
use crate::request::{Completion, Job, OpId, OpRequest};
use crate::sabotage::{self, Fault};
use crate::socket::SocketCompletion;
use crate::socket_poll::SocketPoll;
use crate::storage::Storage;
use crate::storage_request;
use crate::sync::{Condvar, Mutex};
use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// An idle thread ends after this time.
const IDLE: Duration = Duration::from_secs(10);

enum Work {
    Operation(OpId, Box<OpRequest>),
    Job(Job),
}

/// State that the worker and the pool's threads share.
struct Shared {
    queue: Mutex<Queue>,
    /// Signalled when there is work, or no more to come.
    more: Condvar,
    done: Arc<Completions>,
    notifier: Arc<Notifier>,
    /// Jobs that are not over.
    jobs: AtomicUsize,
    calls: AtomicU64,
}

#[derive(Default)]
struct Queue {
    work: VecDeque<Work>,
    threads: usize,
    idle: usize,
    closed: bool,
}

/// A pool of threads with one owner.
pub(crate) struct Threads {
    shared: Arc<Shared>,
    most_threads: usize,
    /// Taken over, not started.
    queued: Vec<Work>,
    /// Done in place, not reaped.
    done_in_place: Vec<Completion>,
    /// Operations without a completion.
    in_flight: usize,
    sockets: SocketPoll,
    start: Instant,
    /// Storages of programs that have operations of this worker.
    storages: Vec<Weak<dyn Storage>>,
    /// The worker ends.
    ending: Arc<AtomicBool>,
}

impl Threads {
    /// A pool of up to `most_threads` threads, made when they are needed.
    pub(crate) fn new(most_threads: usize, notifier: Arc<Notifier>) -> Self {
        Self::of(most_threads.max(1), notifier)
    }

    /// A pool without threads: the worker's own does the work where it would hand it over.
    pub(crate) fn in_place(notifier: Arc<Notifier>) -> Self {
        Self::of(0, notifier)
    }

    fn of(most_threads: usize, notifier: Arc<Notifier>) -> Self {
        Self {
            shared: Arc::new(Shared {
                queue: Mutex::default(),
                more: Condvar::new(),
                done: Arc::new(Completions::new(Arc::clone(&notifier))),
                notifier,
                jobs: AtomicUsize::new(0),
                calls: AtomicU64::new(0),
            }),
            most_threads,
            queued: Vec::new(),
            done_in_place: Vec::new(),
            in_flight: 0,
            sockets: SocketPoll::default(),
            start: Instant::now(),
            storages: Vec::new(),
            ending: Arc::default(),
        }
    }

    pub(crate) fn submit(&mut self, id: OpId, request: Box<OpRequest>) {
        self.in_flight += 1;
        self.queued.push(Work::Operation(id, request));
    }

    /// Hands a request to a storage that a program brought.
    pub(crate) fn submit_to_storage(&mut self, id: OpId, request: Box<OpRequest>) {
        let Some(storage) = request.file.storage().cloned() else {
            self.submit(id, request);
            return;
        };
        self.in_flight += 1;
        let storage_at = Arc::downgrade(&storage);
        if !self.storages.iter().any(|known| known.ptr_eq(&storage_at)) {
            self.storages.retain(|known| known.strong_count() > 0);
            self.storages.push(storage_at);
        }
        storage_request::submit(&*storage, id, request, &self.shared.done, &self.ending);
    }

    /// The worker ends: storages with operations under way are asked to answer them.
    pub(crate) fn cancel_storages(&mut self) {
        self.ending.store(true, Ordering::Release);
        if self.in_flight > 0 {
            for storage in self.storages.iter().filter_map(Weak::upgrade) {
                storage.cancel();
            }
        }
    }

    pub(crate) fn run_blocking(&mut self, job: Job) {
        self.shared.jobs.fetch_add(1, Ordering::AcqRel);
        self.queued.push(Work::Job(job));
    }

    pub(crate) fn submit_queued(&mut self) {
        if self.queued.is_empty() {
            return;
        }
        if self.most_threads == 0 {
            for work in self.queued.drain(..) {
                self.done_in_place.extend(do_work(&self.shared, work));
            }
            return;
        }
        let mut queue = self.shared.queue.lock();
        let added = self.queued.len();
        queue.work.extend(self.queued.drain(..));
        let wake = added.min(queue.idle);
        let mut spawn = (queue.work.len().saturating_sub(queue.idle)).min(self.most_threads - queue.threads);
        while spawn > 0 {
            let shared = Arc::clone(&self.shared);
            let thread = std::thread::Builder::new().name("zebu-io".to_owned());
            if thread.spawn(move || run_thread(&shared)).is_err() {
                break;
            }
            queue.threads += 1;
            spawn -= 1;
        }
        let alone = queue.threads == 0;
        drop(queue);
        for _ in 0..wake {
            self.shared.more.notify_one();
        }
        if alone {
            // The system has no thread to give: this one does the work.
            while let Some(work) = { self.shared.queue.lock().work.pop_front() } {
                if let Some(completion) = do_work(&self.shared, work) {
                    self.shared.done.push(completion);
                }
            }
        }
    }

    pub(crate) fn reap(&mut self, done: &mut Vec<Completion>) {
        self.in_flight -= self.done_in_place.len();
        done.append(&mut self.done_in_place);
        if self.in_flight > 0 {
            self.in_flight -= self.shared.done.take(done);
        }
    }

    pub(crate) fn wait(&mut self, timeout: Option<Duration>, done: &mut Vec<Completion>) {
        self.submit_queued();
        if !self.done_in_place.is_empty() && !sabotage::is(Fault::SleepOnDone) {
            // There is something.
        } else if self.sockets.is_idle() {
            self.shared.notifier.wait_notified(timeout);
        } else {
            self.sockets.wait(self.shared.notifier.as_fd(), timeout);
        }
        self.reap(done);
    }

    /// The socket operations, which this thread does itself. They do not show in the notifier's signal.
    pub(crate) fn sockets(&mut self) -> &mut SocketPoll {
        &mut self.sockets
    }

    pub(crate) fn reap_sockets(&mut self, done: &mut Vec<SocketCompletion>) {
        if !self.sockets.is_idle() {
            self.sockets.reap(self.shared.notifier.as_fd(), done);
        }
    }

    /// Whether [`Threads::reap`] would find something.
    pub(crate) fn has_completions(&self) -> bool {
        !self.done_in_place.is_empty() || self.in_flight > 0 && !self.shared.done.is_empty()
    }

    /// Ends a turn: what came during it and was not reaped must not be forgotten, although it was notified.
    pub(crate) fn signal_on(&self) {
        if self.has_completions() {
            self.shared.notifier.notify();
        }
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight + self.shared.jobs.load(Ordering::Acquire)
    }

    pub(crate) fn now(&self) -> Duration {
        self.start.elapsed()
    }

    pub(crate) fn syscalls(&self) -> u64 {
        self.shared.calls.load(Ordering::Relaxed)
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        // The threads finish what is queued; requests keep their buffers and files themselves.
        self.shared.queue.lock().closed = true;
        self.shared.more.notify_all();
    }
}

fn run_thread(shared: &Shared) {
    let mut queue = shared.queue.lock();
    loop {
        if let Some(work) = queue.work.pop_front() {
            drop(queue);
            if let Some(completion) = do_work(shared, work) {
                shared.done.push(completion);
            }
            queue = shared.queue.lock();
            continue;
        }
        if queue.closed {
            break;
        }
        queue.idle += 1;
        let is_over;
        (queue, is_over) = shared.more.wait_timeout(queue, IDLE);
        queue.idle -= 1;
        if is_over && queue.work.is_empty() {
            break;
        }
    }
    queue.threads -= 1;
}

/// Does a piece of work. The completion of an operation is the caller's to hand over.
fn do_work(shared: &Shared, work: Work) -> Option<Completion> {
    match work {
        Work::Operation(id, mut request) => {
            let mut calls = 0;
            let result = blocking::execute(&mut request, &mut calls);
            shared.calls.fetch_add(calls, Ordering::Relaxed);
            Some(Completion { id, request, result })
        }
        Work::Job(job) => {
            job();
            shared.jobs.fetch_sub(1, Ordering::AcqRel);
            shared.notifier.notify();
            None
        }
    }
}
