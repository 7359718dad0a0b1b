//! The threads of a conversion, and the tasks of each.

use super::copy::copy_pieces;
use super::in_order::pack_pieces;
use super::job::Job;
use super::options::ConvertOptions;
use super::walk::walk;
use crate::jobs::pipeline;
use crate::{Error, ErrorKind, Result};
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Poll, Waker};
use zebu_storage::sync::Mutex;
use zebu_storage::{Worker, WorkerConfig};

/// Does the whole job: the calling thread is one of its threads.
pub(super) async fn run(worker: &Worker, job: &Arc<Job>, options: &ConvertOptions) -> Result<()> {
    let abandoned = AbandonOnDrop(Some(Arc::clone(job)));
    let others = Arc::new(Others::default());
    for thread in 1..job.sizing.threads {
        start_thread(job, thread, worker, &options.worker_config, &others);
    }
    run_share(worker, job, 0).await;
    others.wait().await;
    abandoned.disarm();
    job.outcome()
}

/// Does the share of one thread: one task walks the mapping, the others move the data that it finds.
async fn run_share(worker: &Worker, job: &Arc<Job>, thread: usize) {
    let in_order = job.target.is_stream();
    let _failing = FailOnPanic(job);
    let mover = |own: Worker, queue| {
        let job = Arc::clone(job);
        async move {
            let _failing = FailOnPanic(&job);
            if in_order {
                pack_pieces(&own, &job, &queue).await;
            } else {
                copy_pieces(&own, &job, &queue).await;
            }
        }
    };
    // What is written in order is written by one task, which does several pieces at once.
    let movers = if in_order { 1 } else { job.sizing.tasks_of(thread) };
    pipeline::run(worker, movers, mover, async |queue| {
        if let Err(error) = walk(worker, job, queue).await {
            job.fail(error);
        }
    })
    .await;
}

/// Starts a thread whose reads treat the page cache as those of `first` do.
fn start_thread(job: &Arc<Job>, thread: usize, first: &Worker, config: &WorkerConfig, others: &Arc<Others>) {
    let reads_uncached = first.reads_uncached();
    let ticket = Others::enter(others, job);
    let (own_job, config) = (Arc::clone(job), config.clone());
    let body = move || {
        match Worker::new(&config) {
            Ok(worker) => {
                let reader = if reads_uncached { worker.reading_uncached() } else { worker.clone() };
                worker.block_on(run_share(&reader, &own_job, thread));
            }
            Err(error) => own_job.fail(error.into()),
        }
        drop(ticket);
    };
    if let Err(error) = std::thread::Builder::new().name(format!("zebu-convert-{thread}")).spawn(body) {
        job.fail(Error::new(ErrorKind::Io, format!("can't start a thread: {error}")));
    }
}

/// The threads other than the caller's that still run.
#[derive(Default)]
struct Others(Mutex<Running>);

#[derive(Default)]
struct Running {
    threads: usize,
    waiting: Option<Waker>,
}

impl Others {
    fn enter(others: &Arc<Self>, job: &Arc<Job>) -> Ticket {
        others.0.lock().threads += 1;
        Ticket { others: Arc::clone(others), job: Arc::clone(job) }
    }

    async fn wait(&self) {
        poll_fn(|context| {
            let mut running = self.0.lock();
            if running.threads == 0 {
                return Poll::Ready(());
            }
            running.waiting = Some(context.waker().clone());
            Poll::Pending
        })
        .await;
    }
}

/// A thread that runs, or is about to be started.
struct Ticket {
    others: Arc<Others>,
    job: Arc<Job>,
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.job.fail_if_panicking();
        let mut running = self.others.0.lock();
        running.threads -= 1;
        let waiting = running.waiting.take();
        drop(running);
        if let Some(waker) = waiting {
            waker.wake();
        }
    }
}

/// Stops the job if the task that holds this panics.
struct FailOnPanic<'a>(&'a Job);

impl Drop for FailOnPanic<'_> {
    fn drop(&mut self) {
        self.0.fail_if_panicking();
    }
}

/// Stops the job's tasks and threads if the future that waits for them is dropped.
struct AbandonOnDrop(Option<Arc<Job>>);

impl AbandonOnDrop {
    fn disarm(mut self) {
        self.0 = None;
    }
}

impl Drop for AbandonOnDrop {
    fn drop(&mut self) {
        if let Some(job) = &self.0 {
            job.abandon();
        }
    }
}
