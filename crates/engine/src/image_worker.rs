//! The worker of an image's own: commits, releases, parts of packed streams, refills of windows, and operations that are
//! alone with the image run here.
//!
//! Others wait for all of these, so none of them may depend on whether the worker that happened to start it is polled. A
//! request's own reads and writes stay on its own worker: who stops polling that one holds up the requests that overlap
//! its own, and operations that have to wait until it has ended.
//!
//! The cost is a hop to another thread and back for each operation alone; a window or a table is made once for many
//! requests. A commit is started for each flush, where the hop counts (a fifth of the flushes a second at depth 1). So a
//! commit stays on the worker that asks for it if the thread of that worker has promised to drive it
//! ([`Worker::promise_to_drive`]), as the threads of servers do.

use crate::qcow2::files::ImageFiles;
use crate::sync::{Mutex, OnceLock};
use crate::{Error, ErrorKind, Result};
use std::future::Future;
use std::path::Path;
use zebu_storage::drive::{BETWEEN_LOOKS, LOOKS};
use zebu_storage::{Background, Engine, IoError, Running, Undone, Worker};

/// A worker of the image's own. It starts with the first change of an opening.
#[derive(Debug, Default)]
pub(crate) struct ImageWorker {
    started: OnceLock<Background>,
    starting: Mutex<()>,
}

impl ImageWorker {
    /// The worker, started beside `worker` if it is not there yet.
    pub(crate) fn start(&self, worker: &Worker) -> Result<&Background> {
        self.start_as(|| Background::beside(worker))
    }

    /// The worker, started while the caller may still do so.
    pub(crate) fn start_ahead(&self, engine: Engine) -> Result<()> {
        self.start_as(|| Background::small(engine)).map(drop)
    }

    fn start_as(&self, start: impl FnOnce() -> Result<Background, IoError>) -> Result<&Background> {
        if let Some(started) = self.started.get() {
            return Ok(started);
        }
        let _one = self.starting.lock();
        if self.started.get().is_none() {
            let started = start().map_err(Error::from)?;
            let _ = self.started.set(started);
        }
        self.started.get().ok_or_else(|| Error::new(ErrorKind::Io, "the image's worker did not start"))
    }

    /// The worker, if something was changed.
    pub(crate) fn get(&self) -> Option<&Background> {
        self.started.get()
    }

    /// Waits until nothing that was begun here is under way.
    pub(crate) async fn idle(&self) {
        if let Some(started) = self.started.get() {
            started.idle().await;
        }
    }

    /// Runs `work` here, to its end whoever waits for it.
    ///
    /// # Errors
    /// The worker can't be started, or the work panicked.
    pub(crate) async fn run<T, F>(
        &self,
        worker: &Worker,
        path: &Path,
        work: impl FnOnce(Worker) -> F + Send + 'static,
    ) -> Result<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T>> + 'static,
    {
        self.start(worker).map_err(|e| e.on(path))?.run(work).await.unwrap_or_else(|_| Err(vanished(path)))
    }
}

/// Blocks the thread until there is a result of `running`.
pub(crate) fn wait<T>(running: Running<Result<T>>, path: &Path) -> Result<T> {
    running.wait_if_begun(LOOKS, BETWEEN_LOOKS).unwrap_or_else(|undone| match undone {
        Undone::Vanished => Err(vanished(path)),
        Undone::TakenBack => {
            let message = "nothing was begun, because the disk's thread was blocked for half a minute: a function that it \
                           called, or work that it was given, has to return";
            Err(Error::new(ErrorKind::Busy, message).on(path))
        }
    })
}

/// The duty to come to an end. If the work vanishes before that (it panicked, or its thread has ended), memory and disk may
/// disagree, so nothing is written any more.
#[derive(Debug)]
pub(crate) struct MustEnd<'a>(Option<&'a ImageFiles>);

impl<'a> MustEnd<'a> {
    pub(crate) fn or_poison(files: &'a ImageFiles) -> Self {
        Self(Some(files))
    }

    pub(crate) fn end(mut self) {
        self.0 = None;
    }
}

impl Drop for MustEnd<'_> {
    fn drop(&mut self) {
        if let Some(files) = self.0 {
            files.poison(&vanished(files.path()));
        }
    }
}

/// Why something has no result.
pub(crate) fn vanished(path: &Path) -> Error {
    Error::new(
        ErrorKind::Panicked,
        "an operation of the image ended without a result: it panicked, or its thread has ended",
    )
    .on(path)
}
