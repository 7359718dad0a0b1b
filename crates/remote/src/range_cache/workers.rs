//! Threads of a cache: some answer reads, one stores what was fetched.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};
use zebu_storage::sync::{Condvar, Mutex};

/// Threads that answer reads.
const READERS: usize = 3;

/// The longest that a fetch waits for the local disk.
const LONGEST_WAIT: Duration = Duration::from_secs(1);

pub(super) type Work = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Queues {
    reads: VecDeque<Work>,
    stores: VecDeque<(u64, Work)>,
    /// Bytes of `stores`, and of what is being stored.
    bytes: u64,
    /// Nothing was stored for a while.
    is_stuck: bool,
    is_closed: bool,
}

/// The threads, by what they wait for.
#[derive(Default)]
pub(super) struct Workers {
    queues: Mutex<Queues>,
    reads: Condvar,
    stores: Condvar,
    stored: Condvar,
}

impl Workers {
    pub(super) fn start() -> io::Result<Arc<Self>> {
        let workers = Arc::new(Self::default());
        for number in 0..=READERS {
            let shared = Arc::clone(&workers);
            let work = move || if number == 0 { shared.run_stores() } else { shared.run_reads() };
            if let Err(error) = std::thread::Builder::new().name("zebu-cache".to_owned()).spawn(work) {
                workers.close();
                return Err(error);
            }
        }
        Ok(workers)
    }

    /// Has a thread do something that does not take long.
    pub(super) fn read(&self, work: impl FnOnce() + Send + 'static) {
        let mut queues = self.queues.lock();
        if !queues.is_closed {
            queues.reads.push_back(Box::new(work));
            drop(queues);
            self.reads.notify_one();
        }
    }

    /// Has the storing thread do something that holds `bytes` of memory. If `most` are waiting, it is given back.
    pub(super) fn store(&self, bytes: u64, most: u64, work: Work) -> Result<(), Work> {
        let mut queues = self.queues.lock();
        if queues.is_closed || queues.bytes > 0 && queues.bytes + bytes > most {
            return Err(work);
        }
        queues.bytes += bytes;
        queues.stores.push_back((bytes, work));
        drop(queues);
        self.stores.notify_one();
        Ok(())
    }

    /// Waits until `bytes` more could be stored, for a while. Where the local disk stands still, nobody waits again.
    pub(super) fn wait_for_room(&self, bytes: u64, most: u64) {
        let mut queues = self.queues.lock();
        let until = Instant::now() + LONGEST_WAIT;
        while queues.bytes > 0 && queues.bytes + bytes > most && !queues.is_stuck && !queues.is_closed {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                queues.is_stuck = true;
                return;
            }
            queues = self.stored.wait_timeout(queues, left).0;
        }
    }

    /// Waits until all is stored, but not longer than `most`.
    pub(super) fn settle(&self, most: Duration) {
        let until = Instant::now() + most;
        let mut queues = self.queues.lock();
        while queues.bytes > 0 {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            queues = self.stored.wait_timeout(queues, left).0;
        }
    }

    /// Lets the threads end when they have done what there is.
    pub(super) fn close(&self) {
        self.queues.lock().is_closed = true;
        self.reads.notify_all();
        self.stores.notify_all();
    }

    fn run_reads(&self) {
        let mut queues = self.queues.lock();
        loop {
            if let Some(work) = queues.reads.pop_front() {
                drop(queues);
                work();
                queues = self.queues.lock();
            } else if queues.is_closed {
                return;
            } else {
                queues = self.reads.wait(queues);
            }
        }
    }

    fn run_stores(&self) {
        let mut queues = self.queues.lock();
        loop {
            if let Some((bytes, work)) = queues.stores.pop_front() {
                drop(queues);
                work();
                queues = self.queues.lock();
                queues.bytes -= bytes;
                queues.is_stuck = false;
                self.stored.notify_all();
            } else if queues.is_closed {
                return;
            } else {
                queues = self.stores.wait(queues);
            }
        }
    }
}
