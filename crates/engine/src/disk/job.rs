//! Long work on a disk's thread.

use super::Disk;
use crate::image_worker::{self, vanished};
use crate::{Image, Result};
use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};
use zebu_storage::{Running, Worker};

/// Jobs and other futures of the crate, on the disk's thread. Requests of other threads go on beside them.
impl Disk {
    /// Runs a future on the disk's thread and waits for its result. Jobs take their progress, cancelling and rate in their
    /// options ([`JobControl`](crate::jobs::JobControl)).
    ///
    /// ```
    /// # use zebu_engine as zebu;
    /// use zebu::jobs::{BackupOptions, backup};
    /// use zebu::{CreateOptions, Disk, OpenOptions};
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let path = dir.path().join("disk.qcow2");
    /// # Disk::create(&path, &CreateOptions::default().size(1 << 20))?;
    /// let disk = Disk::open(&path, &OpenOptions::default())?;
    /// let options = BackupOptions::new(dir.path().join("copy.qcow2"));
    /// let report = disk.run(async move |image, worker| backup(&worker, &image, &options).await)?;
    /// # let _ = report;
    /// # Ok::<(), zebu::Error>(())
    /// ```
    ///
    /// # Errors
    /// Errors of the work; misuse ("Misuse" of [`Disk`]).
    pub fn run<T: Send + 'static>(
        &self,
        work: impl AsyncFnOnce(Image, Worker) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.0.run(work)
    }

    /// Runs a future on the disk's thread, whether somebody waits for it or not. The disk stays open until it has ended; after
    /// [`Disk::close`] this fails.
    ///
    /// # Errors
    /// Misuse ("Misuse" of [`Disk`]).
    pub fn start<T: Send + 'static>(
        &self,
        work: impl AsyncFnOnce(Image, Worker) -> Result<T> + Send + 'static,
    ) -> Result<DiskJob<T>> {
        self.0.check_usable()?;
        let disk = self.clone();
        let running = self.0.own.run(move |worker| async move { work(disk.image().clone(), worker).await });
        Ok(DiskJob { disk: self.clone(), running })
    }
}

/// Work that [`Disk::start`] began. Dropping it changes nothing for the work. It keeps the disk open.
///
/// A thread may wait for it ([`DiskJob::wait`]), and any executor may await it, on any thread: the disk's thread wakes the
/// task when the work has ended. It is to be awaited once. Progress and cancelling are those of the options of the work
/// ([`JobControl`](crate::jobs::JobControl)).
///
/// ```
/// # use zebu_engine as zebu;
/// use zebu::storage::IoBuf;
/// use zebu::{CreateOptions, Disk, OpenOptions};
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("disk.qcow2");
/// # Disk::create(&path, &CreateOptions::default().size(1 << 20))?;
/// let disk = Disk::open(&path, &OpenOptions::default())?;
/// let runtime = tokio::runtime::Builder::new_multi_thread().build().unwrap();
/// let bufs = runtime.block_on(async {
///     let read = async |image: zebu::Image, worker| {
///         let (result, bufs) = image.read(&worker, 0, IoBuf::zeroed(4096).into()).await;
///         result.map(|()| bufs)
///     };
///     disk.start(read)?.await
/// })?;
/// assert!(bufs.is_zero());
/// # Ok::<(), zebu::Error>(())
/// ```
#[must_use = "dropping it is fine; then nobody learns the result"]
pub struct DiskJob<T> {
    disk: Disk,
    running: Running<Result<T>>,
}

impl<T> DiskJob<T> {
    /// Whether it is over.
    pub fn is_over(&self) -> bool {
        self.running.is_over()
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// Errors of the work; misuse ("Misuse" of [`Disk`]).
    pub fn wait(self) -> Result<T> {
        self.disk.0.check_reachable()?;
        image_worker::wait(self.running, self.disk.path())
    }
}

impl<T> Future for DiskJob<T> {
    type Output = Result<T>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        if let Err(error) = this.disk.0.check_reachable() {
            return Poll::Ready(Err(error));
        }
        Pin::new(&mut this.running)
            .poll(cx)
            .map(|ended| ended.unwrap_or_else(|_| Err(vanished(this.disk.path()))))
    }
}

impl<T> fmt::Debug for DiskJob<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DiskJob")
            .field("disk", &self.disk)
            .field("is_over", &self.is_over())
            .finish_non_exhaustive()
    }
}
