//! The loop that sends requests: on each queue, `depth` tasks that wait for nothing but their own request.

use super::histogram::Histogram;
use super::plan::{Direction, Drain, FlushEvery, Offsets, Plan};
use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};
use zebu_engine::jobs::Cancel;
use zebu_engine::storage::{IoBufs, IoStats, Worker, WorkerConfig};
use zebu_engine::{Durability, Image, Result};

/// How long work that goes on without a request is waited for at the end, if nothing comes of it.
const DRAIN_PATIENCE: Duration = Duration::from_secs(5);

/// Measurements, over all queues.
#[derive(Clone, Default)]
pub(crate) struct Measured {
    /// Requests that completed.
    pub(crate) requests: u64,
    /// Flushes among them.
    pub(crate) flushes: u64,
    /// From the first request sent to the last one completed.
    pub(crate) elapsed: Duration,
    /// CPU time of the process, kernel included, within that time.
    pub(crate) cpu: Duration,
    /// Latencies in nanoseconds.
    pub(crate) latency: Histogram,
    /// The workers' counters within that time.
    pub(crate) io: IoStats,
}

/// Runs `plan` on `image`. The first queue runs on `worker`, each further one on a thread with a worker of its own.
pub(crate) fn run(
    plan: &Plan,
    image: &Image,
    worker: &Worker,
    config: &WorkerConfig,
    cancel: &Cancel,
) -> Result<Measured> {
    let size = image.virtual_size();
    let queues = plan.queues as usize;
    // Threads set their workers up before the clock starts; those that fail still come to the barrier.
    let barrier = Barrier::new(queues);
    let failed = Arc::new(AtomicBool::new(false));
    let mut measured = Measured::default();
    let (started, cpu_before, results) = std::thread::scope(|scope| {
        let threads: Vec<_> = (1..plan.queues)
            .map(|index| {
                let (barrier, failed) = (&barrier, Arc::clone(&failed));
                scope.spawn(move || {
                    let worker = Worker::new(config);
                    barrier.wait();
                    run_queue(plan, index, size, image, &worker?, cancel, failed)
                })
            })
            .collect();
        barrier.wait();
        let cpu_before = process_cpu();
        let started = Instant::now();
        let mut results = vec![run_queue(plan, 0, size, image, worker, cancel, failed)];
        for thread in threads {
            results.push(thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
        (started, cpu_before, results)
    });
    measured.elapsed = started.elapsed();
    measured.cpu = process_cpu().saturating_sub(cpu_before);
    for result in results {
        let part = result?;
        measured.requests += part.requests;
        measured.flushes += part.flushes;
        measured.latency.merge(&part.latency);
        add_stats(&mut measured.io, &part.io);
    }
    Ok(measured)
}

/// Runs one queue to its end on the worker of this thread.
fn run_queue(
    plan: &Plan,
    index: u32,
    size: u64,
    image: &Image,
    worker: &Worker,
    cancel: &Cancel,
    failed: Arc<AtomicBool>,
) -> Result<Measured> {
    let Some(offsets) = plan.offsets(index, size) else {
        return Err(zebu_engine::Error::new(
            zebu_engine::ErrorKind::OutOfRange,
            format!(
                "no request of {} bytes fits on the disk of {size} bytes behind offset {}",
                plan.buffer_size, plan.offset
            ),
        )
        .on(image.path()));
    };
    let before = worker.stats();
    let queue = Rc::new(Queue {
        image: image.clone(),
        worker: worker.clone(),
        offsets: RefCell::new(offsets),
        direction: plan.direction,
        deadline: plan.runtime.map(|runtime| Instant::now() + runtime),
        flush: plan.flush,
        since_flush: Cell::new(0),
        in_flight: Cell::new(0),
        flushing: Cell::new(false),
        waiting: RefCell::new(Vec::new()),
        latency: RefCell::new(Histogram::default()),
        requests: Cell::new(0),
        flushes: Cell::new(0),
        error: RefCell::new(None),
        cancel: cancel.clone(),
        failed,
    });
    let tasks: Vec<_> = (0..plan.depth)
        .map(|_| {
            let mut buffer = worker.buffer(plan.buffer_offset + plan.buffer_size);
            if plan.buffer_offset > 0 {
                drop(buffer.split_to(plan.buffer_offset));
            }
            if let Direction::Write { pattern } = plan.direction {
                buffer.as_mut_slice().fill(pattern);
            }
            worker.spawn(Rc::clone(&queue).requests(IoBufs::from(buffer)))
        })
        .collect();
    worker.promise_to_drive();
    worker.block_on(async {
        for task in tasks {
            task.await;
        }
    });
    // What goes on without a request, a commit for example, ends before this thread waits for others.
    worker.drain(DRAIN_PATIENCE);
    if let Some(error) = queue.error.take() {
        return Err(error);
    }
    Ok(Measured {
        requests: queue.requests.get(),
        flushes: queue.flushes.get(),
        latency: queue.latency.take(),
        io: difference(&worker.stats(), &before),
        ..Measured::default()
    })
}

/// State that the tasks of one queue share. All of them run on one thread.
struct Queue {
    image: Image,
    worker: Worker,
    offsets: RefCell<Offsets>,
    direction: Direction,
    deadline: Option<Instant>,
    flush: Option<FlushEvery>,
    /// Requests sent since the last flush.
    since_flush: Cell<u64>,
    in_flight: Cell<u32>,
    flushing: Cell<bool>,
    /// Tasks that wait for a flush to begin or to end.
    waiting: RefCell<Vec<Waker>>,
    latency: RefCell<Histogram>,
    requests: Cell<u64>,
    flushes: Cell<u64>,
    error: RefCell<Option<zebu_engine::Error>>,
    cancel: Cancel,
    /// Another queue failed.
    failed: Arc<AtomicBool>,
}

impl Queue {
    /// One task: a request after the other, until there are none. The time at which one completes is the time at
    /// which the next one is sent, so that a request costs one look at the clock.
    async fn requests(self: Rc<Self>, mut bufs: IoBufs) {
        let mut sent = Instant::now();
        while let Some(offset) = self.next_request(&mut sent).await {
            let result;
            (result, bufs) = match self.direction {
                Direction::Read => self.image.read(&self.worker, offset, bufs).await,
                Direction::Write { .. } => {
                    self.image.write(&self.worker, offset, bufs, Durability::Volatile).await
                }
            };
            let done = Instant::now();
            if self.flush.is_some() {
                self.in_flight.set(self.in_flight.get() - 1);
                self.wake_waiting();
            }
            if let Err(error) = result {
                self.fail(error);
                return;
            }
            self.latency.borrow_mut().add(done.duration_since(sent).as_nanos() as u64);
            self.requests.set(self.requests.get() + 1);
            if self.deadline.is_some_and(|deadline| done >= deadline) {
                return;
            }
            sent = done;
        }
    }

    /// Where the next request goes, after the flush that may be due before it.
    #[inline]
    async fn next_request(&self, sent: &mut Instant) -> Option<u64> {
        if self.failed.load(Ordering::Relaxed) || self.cancel.is_cancelled() {
            return None;
        }
        let offset = self.offsets.borrow_mut().next_offset()?;
        if let Some(flush) = self.flush {
            self.flush_if_due(flush, sent).await?;
        }
        Some(offset)
    }

    /// Counts a request that is about to be sent, with a flush before it if enough others were sent since the last
    /// one. `None` if the flush failed.
    async fn flush_if_due(&self, flush: FlushEvery, sent: &mut Instant) -> Option<()> {
        while self.since_flush.get() >= flush.requests {
            if self.flushing.get() {
                self.wait_for(|queue| !queue.flushing.get()).await;
                continue;
            }
            self.flushing.set(true);
            match flush.drain {
                Drain::Wait => self.wait_for(|queue| queue.in_flight.get() == 0).await,
                Drain::Overlap => self.since_flush.set(0),
            }
            let result = self.image.flush(&self.worker).await;
            self.flushing.set(false);
            if flush.drain == Drain::Wait {
                self.since_flush.set(0);
            }
            self.flushes.set(self.flushes.get() + 1);
            self.wake_waiting();
            *sent = Instant::now();
            if let Err(error) = result {
                self.fail(error);
                return None;
            }
        }
        self.since_flush.set(self.since_flush.get() + 1);
        self.in_flight.set(self.in_flight.get() + 1);
        Some(())
    }

    async fn wait_for(&self, condition: impl Fn(&Self) -> bool) {
        poll_fn(|context| {
            if condition(self) {
                return Poll::Ready(());
            }
            self.waiting.borrow_mut().push(context.waker().clone());
            Poll::Pending
        })
        .await;
    }

    fn wake_waiting(&self) {
        for waker in self.waiting.take() {
            waker.wake();
        }
    }

    fn fail(&self, error: zebu_engine::Error) {
        self.failed.store(true, Ordering::Relaxed);
        self.error.borrow_mut().get_or_insert(error);
    }
}

fn process_cpu() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn add_stats(sum: &mut IoStats, part: &IoStats) {
    sum.reads += part.reads;
    sum.read_bytes += part.read_bytes;
    sum.writes += part.writes;
    sum.write_bytes += part.write_bytes;
    sum.flushes += part.flushes;
    sum.fallocates += part.fallocates;
    sum.syscalls += part.syscalls;
    sum.misaligned += part.misaligned;
}

fn difference(after: &IoStats, before: &IoStats) -> IoStats {
    let mut stats = *after;
    stats.reads -= before.reads;
    stats.read_bytes -= before.read_bytes;
    stats.writes -= before.writes;
    stats.write_bytes -= before.write_bytes;
    stats.flushes -= before.flushes;
    stats.fallocates -= before.fallocates;
    stats.syscalls -= before.syscalls;
    stats.misaligned -= before.misaligned;
    stats
}
