//! The thread-pool backend: each operation is done by system calls on a thread of a small pool, or *in place*, on the worker's
//! own, if the pool has no threads. No disk has all threads, as it may stand still (see the module `fair_queue`).

use crate::blocking;
use crate::completions::Completions;
use crate::fair_queue::{FairQueue, NO_DISK, disk_of};
use crate::file_types::FileId;
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

impl Work {
    fn disk(&self) -> FileId {
        match self {
            Self::Operation(_, request) => disk_of(&request.file),
            Self::Job(_) => NO_DISK,
        }
    }
}

/// State that the worker and the pool's threads share.
struct Shared {
    /// Twice as many as one disk has.
    most_threads: usize,
    queue: Mutex<Queue>,
    /// Signalled when there is work, or no more to come.
    more: Condvar,
    done: Arc<Completions>,
    notifier: Arc<Notifier>,
    /// Jobs that are not over.
    jobs: AtomicUsize,
    calls: AtomicU64,
}

struct Queue {
    /// A place for each thread, and work that waits for one.
    places: FairQueue<Work>,
    /// Work that has a place, and waits for a thread.
    ready: VecDeque<(FileId, Work)>,
    threads: usize,
    idle: usize,
    closed: bool,
}

impl Queue {
    /// Gives places to work that waits for one. So much is ready now that was not.
    fn give_places(&mut self) -> usize {
        let before = self.ready.len();
        while let Some((disk, work)) = self.places.next() {
            let entered = self.places.enter(disk);
            debug_assert!(entered, "it was found to have a place");
            self.ready.push_back((disk, work));
        }
        self.ready.len() - before
    }
}

/// A pool of threads with one owner.
pub(crate) struct Threads {
    shared: Arc<Shared>,
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
    /// A pool of up to `for_a_disk` threads for one disk, and twice as many for several, made when they are needed.
    pub(crate) fn new(for_a_disk: usize, notifier: Arc<Notifier>) -> Self {
        Self::of(for_a_disk.max(1).saturating_mul(2), notifier)
    }

    /// A pool without threads: the worker's own does the work where it would hand it over.
    pub(crate) fn in_place(notifier: Arc<Notifier>) -> Self {
        Self::of(0, notifier)
    }

    fn of(most_threads: usize, notifier: Arc<Notifier>) -> Self {
        Self {
            shared: Arc::new(Shared {
                most_threads,
                queue: Mutex::new(Queue {
                    places: FairQueue::new(most_threads),
                    ready: VecDeque::new(),
                    threads: 0,
                    idle: 0,
                    closed: false,
                }),
                more: Condvar::new(),
                done: Arc::new(Completions::new(Arc::clone(&notifier))),
                notifier,
                jobs: AtomicUsize::new(0),
                calls: AtomicU64::new(0),
            }),
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
        if self.shared.most_threads == 0 {
            for work in self.queued.drain(..) {
                self.done_in_place.extend(do_work(&self.shared, work));
            }
            return;
        }
        let mut queue = self.shared.queue.lock();
        for work in self.queued.drain(..) {
            queue.places.wait(work.disk(), work);
        }
        let wake = hand_out(&self.shared, &mut queue, 0);
        let alone = queue.threads == 0;
        if alone {
            // The system has no thread to give: this one does the work.
            while let Some((disk, work)) = queue.ready.pop_front() {
                drop(queue);
                if let Some(completion) = do_work(&self.shared, work) {
                    self.shared.done.push(completion);
                }
                queue = self.shared.queue.lock();
                queue.places.leave(disk);
                queue.give_places();
            }
        }
        drop(queue);
        wake_threads(&self.shared, wake);
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

/// Gives places to work that waits for one, and starts threads for it, beside the idle ones and `looking` others that look for
/// work next. So many of the idle ones are to be woken.
fn hand_out(shared: &Arc<Shared>, queue: &mut Queue, looking: usize) -> usize {
    let added = queue.give_places();
    let wake = added.saturating_sub(looking).min(queue.idle);
    let without = queue.ready.len().saturating_sub(queue.idle + looking);
    for _ in 0..without.min(shared.most_threads - queue.threads) {
        let shared = Arc::clone(shared);
        let thread = std::thread::Builder::new().name("zebu-io".to_owned());
        if thread.spawn(move || run_thread(&shared)).is_err() {
            break;
        }
        queue.threads += 1;
    }
    wake
}

fn wake_threads(shared: &Shared, count: usize) {
    for _ in 0..count {
        shared.more.notify_one();
    }
}

fn run_thread(shared: &Arc<Shared>) {
    let mut queue = shared.queue.lock();
    loop {
        if let Some((disk, work)) = queue.ready.pop_front() {
            drop(queue);
            if let Some(completion) = do_work(shared, work) {
                shared.done.push(completion);
            }
            queue = shared.queue.lock();
            queue.places.leave(disk);
            let wake = hand_out(shared, &mut queue, 1);
            if wake > 0 {
                drop(queue);
                wake_threads(shared, wake);
                queue = shared.queue.lock();
            }
            continue;
        }
        if queue.closed {
            break;
        }
        queue.idle += 1;
        let is_over;
        (queue, is_over) = shared.more.wait_timeout(queue, IDLE);
        queue.idle -= 1;
        if is_over && queue.ready.is_empty() {
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
