//! A worker on its way to its thread.
//!
//! All that a jail may refuse later (a ring, its registrations, eventfds) is made here, by any thread. The price is a ring
//! that the kernel does not know to have one submitter, which costs some percent of small requests.

use crate::error::IoError;
use crate::notify::Notifier;
use crate::ring::{Ring, Submitter, ring};
use crate::worker::{Worker, no_notifier};
use crate::worker_types::WorkerConfig;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// A worker that has no thread yet. It may be made on one thread and started on another.
///
/// ```
/// use zebu_storage::{DetachedWorker, WorkerConfig};
///
/// let detached = DetachedWorker::new(&WorkerConfig::default(), None)?;
/// std::thread::spawn(move || {
///     let worker = detached.attach();
///     assert_eq!(worker.block_on(async { 42 }), 42);
/// }).join().unwrap();
/// # Ok::<(), zebu_storage::IoError>(())
/// ```
pub struct DetachedWorker {
    ring: Option<Ring>,
    notifier: Arc<Notifier>,
    config: WorkerConfig,
    fallback_reason: Option<String>,
}

impl DetachedWorker {
    /// Makes all that a worker needs. `event` is the eventfd that shows event loops that the worker has something to do
    /// ([`Worker::as_fd`]); it gets one of its own if there is none. A given one does not block from then on, for its other
    /// holders neither.
    ///
    /// # Errors
    /// The system gives no descriptor, or not the engine that is asked for; `event` is no eventfd.
    pub fn new(config: &WorkerConfig, event: Option<OwnedFd>) -> Result<Self, IoError> {
        let notifier = match event {
            None => Notifier::new().map_err(|error| no_notifier(&error)),
            Some(event) => Notifier::with_foreign_signal(event).map_err(|error| {
                no_notifier(&error).with_detail("the given descriptor has to be one of eventfd(2)")
            }),
        };
        let notifier = Arc::new(notifier?);
        #[cfg_attr(not(feature = "io-uring"), expect(unused_mut))]
        let (mut ring, fallback_reason) = ring(config, &notifier, Submitter::Other)?;
        #[cfg(feature = "io-uring")]
        if let Some(ring) = &mut ring {
            ring.watch();
        }
        notifier.watch();
        Ok(Self { ring, notifier, config: config.clone(), fallback_reason })
    }

    /// The descriptors that the worker will have, for lists of those that a jail keeps open. Files are not among them.
    pub fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        #[cfg_attr(not(feature = "io-uring"), expect(unused_mut))]
        let mut all = self.notifier.descriptors().to_vec();
        #[cfg(feature = "io-uring")]
        // SAFETY: the ring is the worker's as long as it lives.
        all.extend(self.ring.iter().map(|ring| unsafe { BorrowedFd::borrow_raw(ring.descriptor()) }));
        all
    }

    /// The worker, which belongs to this thread from now on.
    pub fn attach(self) -> Worker {
        Worker::on_ring(self.ring, &self.config, self.notifier, self.fallback_reason)
    }
}

impl AsFd for DetachedWorker {
    /// The descriptor that [`Worker::as_fd`] will give.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.notifier.signal()
    }
}

impl fmt::Debug for DetachedWorker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DetachedWorker").field("config", &self.config).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::worker_types::Engine;
    use rustix::event::{EventfdFlags, eventfd};

    #[test]
    fn a_worker_runs_on_the_thread_where_it_lands_and_shows_in_the_given_event() {
        for engine in [Engine::Auto, Engine::Threads] {
            // One that would block.
            let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
            let ours = event.try_clone().unwrap();
            let config = WorkerConfig { engine, ..WorkerConfig::default() };
            // The thread that makes it ends first.
            let detached = std::thread::spawn(move || DetachedWorker::new(&config, Some(event)).unwrap())
                .join()
                .unwrap();
            let worker = detached.attach();
            let done = std::rc::Rc::new(std::cell::Cell::new(false));
            let over = done.clone();
            let task = worker.spawn_with(|on| async move {
                let value = on.run_blocking(|| 7).await;
                over.set(true);
                value
            });
            let mut polls = [rustix::event::PollFd::new(&ours, rustix::event::PollFlags::IN)];
            while !done.get() {
                rustix::io::retry_on_intr(|| rustix::event::poll(&mut polls, None)).unwrap();
                worker.poll();
            }
            assert_eq!(worker.block_on(task), 7);
        }
    }

    #[test]
    fn what_is_no_eventfd_is_refused() {
        let pipe = OwnedFd::from(std::io::pipe().unwrap().1);
        let error = DetachedWorker::new(&WorkerConfig::default(), Some(pipe)).unwrap_err();
        assert_eq!(error.errno(), libc::EINVAL);
    }
}
