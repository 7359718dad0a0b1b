//! An image file in a chain: its driver, and the image that it stands on.

use crate::before_change::BeforeChange;
use crate::chain::map::ChainMap;
use crate::continued::Continued;
use crate::crypt::protection::Protection;
use crate::foreign_image::ForeignImage;
use crate::image_worker::{ImageWorker, MustEnd};
use crate::luks_disk::LuksDisk;
use crate::options::{CacheMode, Format};
use crate::qcow2::cache::slice_cache::SliceCache;
use crate::qcow2::cache::slice_store::SliceStore;
use crate::qcow2::map::mapping::Run;
use crate::qcow2::state::Qcow2;
use crate::sync::atomic::{AtomicU64, Ordering::Acquire};
use crate::sync::{Alone, OnceLock, RequestBarrier};
use crate::{Error, ErrorKind, Result};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use zebu_storage::drive::OneOf;
use zebu_storage::sabotage::{self, Fault};
use zebu_storage::{File, ForkMark, Worker};

/// A raw image: the bytes of the disk.
#[derive(Debug)]
pub(crate) struct Raw {
    pub(crate) file: File,
    /// Bytes of the virtual disk.
    pub(crate) size: AtomicU64,
    pub(crate) cache_mode: CacheMode,
    /// The header before the disk's bytes, which are encrypted then.
    pub(crate) luks: Option<Box<LuksDisk>>,
    /// Runs operations that are alone with the image.
    pub(crate) own_worker: ImageWorker,
}

impl Raw {
    /// Byte of the file at which the byte `guest` of the disk lies.
    #[inline]
    pub(crate) fn host_of(&self, guest: u64) -> u64 {
        self.luks.as_ref().map_or(guest, |luks| luks.offset.saturating_add(guest))
    }

    /// The protection of the disk's bytes.
    #[inline]
    pub(crate) fn protection(&self) -> &Protection {
        self.luks.as_ref().map_or(&Protection::None, |luks| &luks.protection)
    }
}

/// The driver of the file.
#[derive(Debug)]
pub(crate) enum Driver {
    Qcow2(Arc<Qcow2>),
    Raw(Raw),
    Foreign(Box<ForeignImage>),
}

/// An open file of a chain, with its driver.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) path: PathBuf,
    pub(crate) driver: Driver,
    pub(crate) backing: Option<Arc<Node>>,
    /// Requests that change the image enter; a resize or a snapshot operation is alone.
    pub(crate) changes: RequestBarrier,
    /// The result of the close, once the image was closed through this handle or a clone of it.
    pub(crate) closed: OnceLock<Result<()>>,
    /// The hook that requests wait for before they change the image.
    pub(crate) before_change: BeforeChange,
    /// The image in which the disk goes on after a fork.
    pub(crate) continued: Continued<Node>,
    /// The view of the chain as a whole, if this is its top.
    pub(crate) view: Option<ChainView>,
    /// A child of fork(2) has none of the threads that work on the image, and writes under its parent's locks.
    pub(crate) made_in: ForkMark,
}

/// A chain as seen from its top.
#[derive(Debug)]
pub(crate) struct ChainView {
    pub(crate) map: Arc<ChainMap>,
    /// Merged slices, where there is a backing chain.
    pub(crate) merged: Option<SliceCache>,
    /// The images below the top, so that each is reached in one step.
    pub(crate) members: Box<[Arc<Node>]>,
}

impl Node {
    pub(crate) fn format(&self) -> Format {
        match &self.driver {
            Driver::Qcow2(_) => Format::Qcow2,
            Driver::Raw(Raw { luks: None, .. }) => Format::Raw,
            Driver::Raw(Raw { luks: Some(_), .. }) => Format::Luks,
            Driver::Foreign(foreign) => Format::Foreign(foreign.disk().format()),
        }
    }

    /// Bytes of the virtual disk.
    pub(crate) fn virtual_size(&self) -> u64 {
        match &self.driver {
            Driver::Qcow2(qcow2) => qcow2.virtual_size(),
            Driver::Raw(raw) => raw.size.load(Acquire),
            Driver::Foreign(foreign) => foreign.disk().virtual_size(),
        }
    }

    /// Bytes of the virtual disk that requests may use: while it grows, those that it had before.
    pub(crate) fn visible_size(&self) -> u64 {
        match &self.driver {
            Driver::Qcow2(qcow2) => qcow2.visible_size(),
            Driver::Raw(_) | Driver::Foreign(_) => self.virtual_size(),
        }
    }

    /// The image at `depth` of the chain of which this is the top.
    pub(crate) fn at_depth(&self, depth: u32) -> Option<&Node> {
        let Some(before) = depth.checked_sub(1) else { return Some(self) };
        if let Some(view) = &self.view {
            return view.members.get(before as usize).map(|node| &**node);
        }
        let mut node = self.backing.as_deref()?;
        for _ in 0..before {
            node = node.backing.as_deref()?;
        }
        Some(node)
    }

    /// Maps this image alone for `guest`, at most `max_len` bytes; past its end everything is unallocated.
    pub(crate) async fn map(&self, worker: &Worker, guest: u64, max_len: u64) -> Result<(Run, u64)> {
        let size = self.virtual_size();
        if guest >= size {
            return Ok((Run::Unallocated, max_len));
        }
        let max_len = max_len.min(size - guest);
        match &self.driver {
            Driver::Qcow2(qcow2) => qcow2.map(worker, guest, max_len).await,
            Driver::Raw(raw) => Ok((Run::Data { host: raw.host_of(guest) }, max_len)),
            Driver::Foreign(foreign) => foreign.map(worker, guest, max_len).await,
        }
    }

    /// The worker of the image's own.
    pub(crate) fn own_worker(&self) -> &ImageWorker {
        match &self.driver {
            Driver::Qcow2(qcow2) => qcow2.own_worker(),
            Driver::Raw(raw) => &raw.own_worker,
            Driver::Foreign(foreign) => foreign.own_worker(),
        }
    }

    /// Whether a change needs no worker of the image's own that is not there yet.
    pub(crate) fn changes_start_nothing(&self) -> bool {
        match &self.driver {
            Driver::Qcow2(qcow2) => qcow2.own_worker().get().is_some(),
            Driver::Raw(_) | Driver::Foreign(_) => true,
        }
    }

    /// Waits until no request that changes the image is under way, and keeps new ones out. What the operation will have
    /// to wait for, as reads that hold space back, is waited for before that.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`]: nobody drives the worker of one of these.
    async fn alone(&self, worker: &Worker) -> Result<Alone<'_>> {
        let reads = async || {
            if let Driver::Qcow2(qcow2) = &self.driver {
                qcow2.readers().wait(worker).await;
            }
        };
        let alone = self.changes.alone(worker, || self.reads_awaited(), reads);
        let alone =
            worker.shown(self.data_file(), "requests that have to end before an operation", alone).await;
        let undone = "the operation, which has to be alone with the image, can't begin";
        alone.ok_or_else(|| Error::undriven(undone, "a request").on(&self.path))
    }

    /// The files of the node.
    pub(crate) fn files(&self) -> impl Iterator<Item = &File> {
        let of_image = match &self.driver {
            Driver::Qcow2(qcow2) if qcow2.data_file().is_some() => Some(qcow2.file()),
            _ => None,
        };
        of_image.into_iter().chain([self.data_file()]).chain(self.other_files())
    }

    /// The workers of reads under way.
    pub(crate) fn reads_awaited(&self) -> Vec<OneOf> {
        match &self.driver {
            Driver::Qcow2(qcow2) => qcow2.readers().awaited(),
            Driver::Raw(_) | Driver::Foreign(_) => Vec::new(),
        }
    }

    /// Runs `work` alone with the image ([`Node::alone`]). If it vanishes, nothing is written any more before others are let in.
    ///
    /// # Errors
    /// As [`Node::alone`]; [`ErrorKind::ReadOnly`]: the disk goes on in an overlay since a fork.
    pub(crate) async fn while_alone<T>(
        &self,
        worker: &Worker,
        work: impl AsyncFnOnce() -> Result<T>,
    ) -> Result<T> {
        let mut alone = Some(self.alone(worker).await?);
        if self.continued.get().is_some() {
            return Err(self.went_on());
        }
        let unended = self.must_end();
        // Dropped before the duty to end.
        let _let_in_first = alone.take_if(|_| sabotage::is(Fault::LetInFirst));
        let result = work().await;
        if let Some(unended) = unended {
            unended.end();
        }
        result
    }

    /// The duty of an operation that changes the image to come to an end.
    pub(crate) fn must_end(&self) -> Option<MustEnd<'_>> {
        match &self.driver {
            Driver::Qcow2(qcow2) => Some(MustEnd::or_poison(qcow2.files())),
            Driver::Raw(_) | Driver::Foreign(_) => None,
        }
    }

    /// Whether a change of one of its own files vanished while it was under way: it may still land.
    pub(crate) fn has_abandoned_changes(&self) -> bool {
        self.image_file().has_abandoned_changes() || self.data_file().has_abandoned_changes()
    }

    /// Says that nothing may be changed any more, because the image was closed with `result`.
    pub(crate) fn note_closed(&self, result: Result<()>) {
        let _ = self.closed.set(result);
        if let Driver::Qcow2(qcow2) = &self.driver {
            qcow2.files().refuse_changes(self.closed_error());
        }
    }

    /// The result of the close, if the image was closed.
    pub(crate) fn closed(&self) -> Option<&Result<()>> {
        self.closed.get().filter(|_| !sabotage::is(Fault::CloseBesideRequests))
    }

    fn closed_error(&self) -> Error {
        Error::new(ErrorKind::InvalidArgument, "the image was closed; open it again").on(&self.path)
    }

    /// The error of a change of an image whose disk goes on in another.
    pub(crate) fn went_on(&self) -> Error {
        let message = "the disk goes on in an overlay since a fork: ask for its current image";
        Error::new(ErrorKind::ReadOnly, message).on(&self.path)
    }

    /// Fails in a child of the process that opened the image.
    pub(crate) fn check_here(&self) -> Result<()> {
        if self.made_in.is_here() {
            return Ok(());
        }
        let message = "the image was opened by the parent of this process; open it after fork()";
        Err(Error::new(ErrorKind::InvalidArgument, message).on(&self.path))
    }

    /// Fails if the image was closed, or is another process's.
    pub(crate) fn check_open(&self) -> Result<()> {
        self.check_here()?;
        if self.closed().is_some() { Err(self.closed_error()) } else { Ok(()) }
    }

    /// Whether the image was opened for writing.
    pub(crate) fn is_writable(&self) -> bool {
        match &self.driver {
            Driver::Qcow2(qcow2) => qcow2.is_writable(),
            Driver::Raw(raw) => raw.file.is_writable(),
            Driver::Foreign(_) => false,
        }
    }

    /// The image file itself.
    pub(crate) fn image_file(&self) -> &File {
        match &self.driver {
            Driver::Qcow2(qcow2) => qcow2.file(),
            Driver::Raw(raw) => &raw.file,
            Driver::Foreign(foreign) => foreign.file(0),
        }
    }

    /// The files that the image consists of beside the image file, if it is of a format of another program.
    pub(crate) fn other_files(&self) -> &[File] {
        match &self.driver {
            Driver::Foreign(foreign) => foreign.other_files(),
            Driver::Qcow2(_) | Driver::Raw(_) => &[],
        }
    }

    /// One of these files: 1 is the first.
    pub(crate) fn file(&self, number: u32) -> Option<&File> {
        self.other_files().get((number as usize).checked_sub(1)?)
    }

    /// The protection of the guest's data in it.
    #[inline]
    pub(crate) fn protection(&self) -> &Protection {
        match &self.driver {
            Driver::Qcow2(qcow2) => qcow2.protection(),
            Driver::Raw(raw) => raw.protection(),
            Driver::Foreign(_) => &Protection::None,
        }
    }

    /// The file that guest data lies in.
    pub(crate) fn data_file(&self) -> &File {
        match &self.driver {
            Driver::Qcow2(qcow2) => qcow2.data(),
            Driver::Raw(raw) => &raw.file,
            Driver::Foreign(foreign) => foreign.file(0),
        }
    }
}

impl Node {
    /// The store that the chain's mapping is cached in; none for a raw image that stands alone.
    fn store(&self) -> Option<&Arc<SliceStore>> {
        let mut node = Some(self);
        while let Some(this) = node {
            if let Driver::Qcow2(qcow2) = &this.driver {
                return Some(qcow2.active_map().store());
            }
            node = this.backing.as_deref();
        }
        None
    }

    /// The least budget that the chain can be used with: its tables, and a slice for each queue, two at least.
    pub(crate) fn cache_minimum(&self) -> u64 {
        let (mut tables, mut slice, mut node) = (0, 0, Some(self));
        while let Some(this) = node {
            if let Driver::Qcow2(qcow2) = &this.driver {
                tables += qcow2.tables_for_writing();
                slice = slice.max(qcow2.active_map().slices().slice_cost());
            }
            node = this.backing.as_deref();
        }
        self.store().map_or(0, |store| store.budget().tables() + tables + store.least_slices() * slice)
    }

    /// Sets the budget of the chain's mapping, in bytes.
    pub(crate) fn set_cache_size(&self, bytes: u64) -> Result<()> {
        let Some(store) = self.store() else { return Ok(()) };
        let minimum = self.cache_minimum();
        if bytes < minimum {
            let message = format!(
                "a cache of {bytes} bytes is too small for this image: at least {minimum} are needed (its tables \
                 and {} slices; smaller slices need less)",
                store.least_slices()
            );
            return Err(Error::new(ErrorKind::InvalidArgument, message).on(&self.path));
        }
        store.budget().set_limit(bytes);
        let extents = self.view.as_ref().is_some_and(|view| view.map.extents().shrink_to_budget());
        let slices = store.shrink_to_budget();
        // Looks through all memory of the process: an image that is just opened has given nothing up.
        if slices || extents {
            zebu_storage::release_free_memory();
        }
        Ok(())
    }

    /// Gives cached mapping up that was not used for the interval set at open, if it is time to look.
    pub(crate) fn tidy(&self, now: Instant) {
        let Some(store) = self.store() else { return };
        let slices = store.tidy(now);
        let extents = self.view.as_ref().is_some_and(|view| view.map.extents().tidy(now));
        if slices || extents {
            zebu_storage::release_free_memory();
        }
    }
}

/// How long the end of the last handle waits for what the image's worker has under way.
const PATIENCE_AT_END: Duration = Duration::from_secs(5);

impl Drop for Node {
    /// Unlocks the file before the next opening, unless the disk does not answer. A chain may be a thousand images long: it is
    /// closed in a loop, not in a recursion.
    fn drop(&mut self) {
        if let Some(own) = self.own_worker().get() {
            own.block_until_idle(PATIENCE_AT_END);
        }
        let mut next = self.backing.take();
        while let Some(node) = next {
            next = Arc::into_inner(node).and_then(|mut node| node.backing.take());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Access, CreateOptions, Image, OpenOptions};
    use std::future::Future;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::pin::{Pin, pin};
    use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
    use std::task::{Context, Wake, Waker};
    use zebu_storage::sabotage::under;
    use zebu_storage::{IoBuf, WorkerConfig};

    fn image(worker: &Worker, dir: &std::path::Path) -> Image {
        let path = dir.join("image");
        let made = async {
            Image::create(worker, &path, &CreateOptions::default().size(1 << 20)).await?;
            Image::open(worker, &path, &OpenOptions::default().access(Access::ReadWrite)).await
        };
        worker.block_on(made).unwrap()
    }

    fn poll_once<T>(future: Pin<&mut (impl Future<Output = T> + ?Sized)>, waker: &Waker) -> bool {
        future.poll(&mut Context::from_waker(waker)).is_ready()
    }

    /// Notes how often it was woken while the image could be written.
    struct Look {
        image: Image,
        woken: AtomicU32,
        while_writable: AtomicU32,
    }

    impl Wake for Look {
        fn wake(self: Arc<Self>) {
            self.woken.fetch_add(1, SeqCst);
            let qcow2 = self.image.qcow2("").unwrap();
            self.while_writable.fetch_add(u32::from(qcow2.files().check_not_poisoned().is_ok()), SeqCst);
        }
    }

    /// Counts how often a request that waits for an operation that vanishes is woken while the image can still be written.
    fn woken_while_writable() -> u32 {
        let (worker, dir) = (Worker::new(&WorkerConfig::default()).unwrap(), tempfile::tempdir().unwrap());
        let image = image(&worker, dir.path());
        let look = Arc::new(Look { image: image.clone(), woken: 0.into(), while_writable: 0.into() });
        let waker = Waker::from(look.clone());
        let other = crate::sync::drive(1);
        let mut waiting = pin!(image.0.changes.enter(&other));
        let vanished = catch_unwind(AssertUnwindSafe(|| {
            worker.block_on(image.0.while_alone(&worker, async || -> Result<()> {
                assert!(!poll_once(waiting.as_mut(), &waker), "it is alone");
                panic!("as intended");
            }))
        }));
        assert!(vanished.is_err());
        assert!(look.woken.load(SeqCst) > 0);
        assert!(poll_once(waiting.as_mut(), &waker), "nobody is alone any more");
        look.while_writable.load(SeqCst)
    }

    /// Requests that wait for an operation that vanishes are let in when nothing is written any more, not before.
    #[test]
    fn writing_stops_before_others_are_let_in() {
        assert_eq!(woken_while_writable(), 0);
        let (woken, _) = under(Some(Fault::LetInFirst), woken_while_writable);
        assert_ne!(woken, 0, "the order does not matter");
    }

    /// A write that nobody waits for may land later: no other program gets the image before that.
    #[test]
    fn an_image_with_an_abandoned_write_is_not_unlocked() {
        assert_eq!(opened_beside_an_abandoned_write(), Err(ErrorKind::Locked));
        let (opened, _) = under(Some(Fault::UnlockBesideAbandoned), opened_beside_an_abandoned_write);
        assert_eq!(opened, Ok(()), "the locks stay anyway");
    }

    /// Opens an image again that was closed beside an abandoned write.
    fn opened_beside_an_abandoned_write() -> Result<(), ErrorKind> {
        let (worker, dir) = (Worker::new(&WorkerConfig::default()).unwrap(), tempfile::tempdir().unwrap());
        let image = image(&worker, dir.path());
        {
            let file = image.0.image_file();
            let mut write = pin!(worker.write(file, 1 << 20, IoBuf::zeroed(4096).into()));
            assert!(!poll_once(write.as_mut(), Waker::noop()), "it is under way");
        }
        let _ = worker.block_on(image.close(&worker));
        let open = || {
            let options = OpenOptions::default().access(Access::ReadWrite);
            worker.block_on(Image::open(&worker, &dir.path().join("image"), &options))
        };
        let opened = open().map(drop).map_err(|error| error.kind());
        drop(image);
        // The write holds the file open until it has ended.
        let has_ended = (0..10_000).any(|_| {
            worker.block_on(worker.sleep(Duration::from_millis(1)));
            open().is_ok()
        });
        assert!(has_ended);
        opened
    }
}
