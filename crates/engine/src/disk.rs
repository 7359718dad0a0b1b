//! The surface for programs that just want to wait: any thread may call. It does small requests itself; a thread of the disk's
//! own does the rest.

mod call;
mod changes;
mod job;

pub use changes::DiskExtents;
pub use job::DiskJob;

use crate::image_worker::vanished;
use crate::options::{CreateOptions, Format, OpenOptions, OpenedFile};
use crate::queue::QueueBuilder;
use crate::status::{ImageInfo, ImageStats};
use crate::{Error, Image, Result};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use zebu_storage::{Background, Engine, ForkMark, Worker, WorkerConfig};

/// An open image with a thread of its own, whose methods return when the work is done. Any number of threads may call them at
/// once; clones are the same disk.
///
/// ```
/// # use zebu_engine as zebu;
/// use zebu::{Access, CreateOptions, Disk, OpenOptions};
///
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("disk.qcow2");
/// Disk::create(&path, &CreateOptions::default().size(1 << 20))?;
/// let disk = Disk::open(&path, &OpenOptions::default().access(Access::ReadWrite))?;
/// disk.write(4096, b"hello")?;
/// disk.flush()?;
/// let mut back = [0; 5];
/// disk.read(4096, &mut back)?;
/// assert_eq!(&back, b"hello");
/// disk.close()?;
/// # Ok::<(), zebu::Error>(())
/// ```
///
/// # Threads
/// A read or a volatile write of at most 64 KiB is done by the thread that calls, with plain system calls such as preadv2(2):
/// many callers are served at once, and none pays for a hop to another thread. Such a thread keeps a few KiB for its next
/// request, and no descriptor. Everything else is done by the disk's thread, on which the parts of a large request go at once.
/// A seccomp filter of a thread that calls allows [`SYSTEM_CALLS`](crate::storage::SYSTEM_CALLS).
///
/// # The end
/// When the last clone goes, and with it the last [`Queue`](crate::Queue) made from it, the disk is flushed and closed, as by
/// [`Disk::close`]. Work that was begun with [`Disk::start`] keeps the disk open until it has ended. An error of the close is
/// told to the function of [`DiskBuilder::on_drop_error`]. Whoever needs to know calls `close`.
///
/// # Misuse
/// - After [`Disk::close`], each method that needs the image fails ([`ErrorKind::InvalidArgument`](crate::ErrorKind)).
/// - Work on the disk's own threads, such as a job or a function that reports progress, must not wait for the disk: its
///   methods fail there ([`ErrorKind::InvalidArgument`](crate::ErrorKind)). A job has the [`Image`] to await.
/// - In a child of fork(2) each method fails ([`ErrorKind::InvalidArgument`](crate::ErrorKind)), and dropping the disk does
///   nothing: the image, its locks and its threads are the parent's.
/// - A function of the caller that panics ends its job with an error ([`ErrorKind::Panicked`](crate::ErrorKind)); the disk
///   stays in use.
/// - While a function of the caller blocks the disk's thread, as a job's report of progress that does not return, small reads
///   and writes go on. A call that waits for the thread fails after half a minute ([`ErrorKind::Busy`](crate::ErrorKind)), with
///   nothing begun; what had begun, and the drop of the last handle, wait for that function.
/// - Snapshots, bitmaps, changes of size and closing fail ([`ErrorKind::Busy`](crate::ErrorKind)) if they need the end of a
///   request of a queue that nobody drives: it took no turn at 30 looks, a second apart. Reads and writes that overlap such a request wait until the
///   queue is driven or dropped.
#[derive(Clone)]
pub struct Disk(Arc<Shared>);

/// The image, its thread, and what is to be done at the end.
struct Shared {
    image: Image,
    own: Background,
    made_in: ForkMark,
    on_drop_error: Option<OnDropError>,
}

type OnDropError = Arc<dyn Fn(&Error) + Send + Sync>;

/// How a [`Disk`] is opened.
///
/// ```
/// # use zebu_engine as zebu;
/// use zebu::{CreateOptions, Disk, OpenOptions};
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("disk.qcow2");
/// # Disk::create(&path, &CreateOptions::default().size(1 << 20))?;
/// let disk = Disk::builder()
///     .on_drop_error(|error| eprintln!("not closed: {error}"))
///     .open(&path, &OpenOptions::default())?;
/// assert_eq!(disk.virtual_size(), 1 << 20);
/// # Ok::<(), zebu::Error>(())
/// ```
#[derive(Default)]
#[must_use]
pub struct DiskBuilder {
    worker: WorkerConfig,
    on_drop_error: Option<OnDropError>,
}

impl DiskBuilder {
    /// Which way to do I/O the disk's thread takes; io_uring where it can be had, if this is not called. Threads that do their
    /// requests themselves need none ("Threads" of [`Disk`]).
    pub fn engine(mut self, engine: Engine) -> Self {
        self.worker.engine = engine;
        self
    }

    /// Has `told` called with the error of the close by which the last handle ended ("The end" of [`Disk`]). It is called
    /// on the thread that dropped the handle; if that was one of the disk's own, on the disk's thread. If it panics, nobody is
    /// told.
    pub fn on_drop_error(mut self, told: impl Fn(&Error) + Send + Sync + 'static) -> Self {
        self.on_drop_error = Some(Arc::new(told));
        self
    }

    /// Opens an image; see [`Image::open`].
    ///
    /// # Errors
    /// As of [`Image::open`]; the system gives no thread.
    pub fn open(self, path: &Path, options: &OpenOptions) -> Result<Disk> {
        let (path, options) = (path.to_owned(), options.clone());
        let at = path.clone();
        self.start(&at, async move |worker| Image::open(&worker, &path, &options).await)
    }

    /// Opens a chain of files that the caller has opened; see [`Image::open_files`].
    ///
    /// # Errors
    /// As of [`Image::open_files`]; the system gives no thread.
    pub fn open_files(self, images: Vec<OpenedFile>, options: &OpenOptions) -> Result<Disk> {
        let options = options.clone();
        let at = images.first().map(|top| top.file.path().to_owned()).unwrap_or_default();
        self.start(&at, async move |worker| Image::open_files(&worker, images, &options).await)
    }

    fn start(
        self,
        path: &Path,
        open: impl AsyncFnOnce(Worker) -> Result<Image> + Send + 'static,
    ) -> Result<Disk> {
        let own = Background::start(&self.worker).map_err(|e| Error::from(e).on(path))?;
        let image = call::wait(&own, path, open)?;
        Ok(Disk(Arc::new(Shared {
            image,
            own,
            made_in: ForkMark::here(),
            on_drop_error: self.on_drop_error,
        })))
    }
}

impl Disk {
    /// Opens an image; see [`Image::open`].
    ///
    /// # Errors
    /// As of [`Image::open`]; the system gives no thread.
    pub fn open(path: &Path, options: &OpenOptions) -> Result<Self> {
        Self::builder().open(path, options)
    }

    /// Opens a chain of files that the caller has opened; see [`Image::open_files`].
    ///
    /// # Errors
    /// As of [`Image::open_files`]; the system gives no thread.
    pub fn open_files(images: Vec<OpenedFile>, options: &OpenOptions) -> Result<Self> {
        Self::builder().open_files(images, options)
    }

    /// Opens with other choices than usual.
    pub fn builder() -> DiskBuilder {
        DiskBuilder::default()
    }

    /// Creates an image, which is not open then; see [`Image::create`].
    ///
    /// # Errors
    /// As of [`Image::create`].
    pub fn create(path: &Path, options: &CreateOptions) -> Result<()> {
        crate::block_on(async |worker| Image::create(&worker, path, options).await).map_err(|e| e.on(path))
    }

    /// The image, for workers of the caller's own. It is closed with the disk, whoever has a handle.
    pub fn image(&self) -> &Image {
        &self.0.image
    }

    /// A builder of queues on this disk. A queue keeps the disk open.
    pub fn queue(&self) -> QueueBuilder {
        QueueBuilder::keeping_open(self.image(), Arc::clone(&self.0) as Arc<_>)
    }

    /// The file name it was opened by.
    pub fn path(&self) -> &Path {
        self.image().path()
    }

    /// Format.
    pub fn format(&self) -> Format {
        self.image().format()
    }

    /// Bytes of the virtual disk.
    pub fn virtual_size(&self) -> u64 {
        self.image().virtual_size()
    }

    /// Bytes of a logical block; see [`Image::logical_block_size`].
    pub fn logical_block_size(&self) -> u32 {
        self.image().logical_block_size()
    }

    /// Bytes of a cluster, the natural unit of work; see [`Image::cluster_size`].
    pub fn cluster_size(&self) -> u64 {
        self.image().cluster_size()
    }

    /// Everything that is known without guest data.
    ///
    /// # Errors
    /// The file system does not answer; misuse.
    pub fn info(&self) -> Result<ImageInfo> {
        self.0.check_usable()?;
        self.image().info()
    }

    /// Counters.
    pub fn stats(&self) -> ImageStats {
        self.image().stats()
    }

    /// Flushes and closes the image: returns space that was set aside, releases the locks. Work that was begun on any thread
    /// ends first. A second close has the result of the first.
    ///
    /// # Errors
    /// As of [`Image::close`]. After [`ErrorKind::Busy`](crate::ErrorKind) the disk is still open.
    pub fn close(&self) -> Result<()> {
        self.0.check_reachable()?;
        self.0.wait(async |image, worker| image.close(&worker).await)
    }
}

impl fmt::Debug for Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Disk").field("path", &self.path()).finish_non_exhaustive()
    }
}

impl fmt::Debug for DiskBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DiskBuilder").field("worker", &self.worker).finish_non_exhaustive()
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if !self.made_in.is_here() {
            // Nothing of it is touched: what it has below, such as locks, may be held by threads that are not here.
            std::mem::forget(self.image.clone());
            return;
        }
        if self.image.is_closed() {
            return;
        }
        let (image, told) = (self.image.clone(), self.on_drop_error.take());
        let close = async move |worker: Worker| image.close(&worker).await;
        if self.is_own_thread() {
            // The disk's thread ends after the close; nobody can wait for that here.
            drop(self.own.run(async move |worker: Worker| tell(close(worker).await, told)));
            self.own.leave();
            return;
        }
        let result = self.own.run(close).wait().unwrap_or_else(|_| Err(vanished(self.image.path())));
        tell(result, told);
    }
}

/// Tells of an error of the close by which the last handle ended.
fn tell(result: Result<()>, told: Option<OnDropError>) {
    if let (Err(error), Some(told)) = (result, told) {
        // A panic while another one is on its way would end the process.
        let _ = catch_unwind(AssertUnwindSafe(|| told(&error)));
    }
}
