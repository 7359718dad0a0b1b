//! Exports: images under names.

use crate::log::{Level, Log};
use crate::metrics::{ExportMetrics, RequestKind};
use crate::stop::Stop;
use crate::throttle::{ExportThrottle, LimitGroup, Limits, ThrottleStats};
use std::sync::Weak;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use zebu_engine::storage::{IoBufs, Worker};
use zebu_engine::{Access, DirtyBits, Durability, Format, Image, ZeroMode};
use zebu_storage::sync::Mutex;

/// A server that tells clients of a new size.
pub(crate) trait SizeWatcher: std::fmt::Debug + Send + Sync {
    fn size_changed(&self);
}

/// Treatment of clients' requests to give space back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Discards {
    /// The image gives the space back.
    #[default]
    Unmap,
    /// The space stays allocated: a trim does nothing, and zeroing keeps it.
    Ignore,
}

/// An image under a name.
#[derive(Debug)]
pub struct Export {
    name: String,
    description: String,
    image: Image,
    access: Access,
    cache_is_of_use: bool,
    zeroes_fast: bool,
    bitmaps: Vec<String>,
    /// Bits of some of these, which are not those of the image.
    given_bits: Vec<(String, DirtyBits)>,
    discards: Discards,
    zero_detection: Option<ZeroMode>,
    copy_on_read: bool,
    /// Whether the next server may be asked to flush what this one has answered.
    keeps_answers: AtomicBool,
    /// Reads whose copy failed.
    failed_copies: AtomicU64,
    metrics: ExportMetrics,
    throttle: ExportThrottle,
    watchers: Mutex<Vec<Weak<dyn SizeWatcher>>>,
    /// Thrown when it is closed by a fault.
    closed: Stop,
    #[cfg(test)]
    fault: std::sync::atomic::AtomicUsize,
}

impl Export {
    /// Exports `image`, which must have been opened for writing if `access` is [`Access::ReadWrite`]. The caller closes
    /// it when nothing serves it any more.
    pub fn new(name: impl Into<String>, image: &Image, access: Access) -> Self {
        // Of version 2, zeroes can't be told from data without writing them. A raw file is punched, which all file
        // systems that matter can; devices write zeroes in their own time.
        let info = image.info().ok();
        let zeroes_fast = match image.format() {
            Format::Qcow2 => info.and_then(|info| info.qcow2).is_some_and(|qcow2| qcow2.version >= 3),
            Format::Raw => std::fs::metadata(image.path()).is_ok_and(|metadata| metadata.is_file()),
            _ => false,
        };
        Self {
            name: name.into(),
            description: String::new(),
            image: image.clone(),
            access,
            cache_is_of_use: true,
            zeroes_fast,
            bitmaps: Vec::new(),
            given_bits: Vec::new(),
            discards: Discards::Unmap,
            zero_detection: None,
            copy_on_read: false,
            keeps_answers: AtomicBool::new(false),
            failed_copies: AtomicU64::new(0),
            metrics: ExportMetrics::default(),
            throttle: ExportThrottle::default(),
            watchers: Mutex::default(),
            closed: Stop::default(),
            #[cfg(test)]
            fault: std::sync::atomic::AtomicUsize::new(0),
        }
    }

    /// With a description, which clients may ask for.
    pub fn with_description(mut self, description: impl Into<String>) -> Self {
        self.description = description.into();
        self
    }

    /// Says that reading ahead is of no use, since the image is open with O_DIRECT.
    pub fn without_page_cache(mut self) -> Self {
        self.cache_is_of_use = false;
        self
    }

    /// Has the log told of each wait that takes ten seconds.
    pub fn with_waits_told(self, log: &Log) -> Self {
        let log = log.clone();
        self.image.tell_long_waits(move |wait| log.write(Level::Warning, format_args!("{wait}")));
        self
    }

    /// With persistent dirty bitmaps of the image, which clients may look at.
    pub fn with_bitmaps(mut self, names: impl IntoIterator<Item = String>) -> Self {
        self.bitmaps = names.into_iter().collect();
        self
    }

    /// With the bits of a bitmap that the image has not itself, which clients may look at under this name.
    pub fn with_given_bits(mut self, name: impl Into<String>, bits: DirtyBits) -> Self {
        let name = name.into();
        self.bitmaps.push(name.clone());
        self.given_bits.push((name, bits));
        self
    }

    /// With this treatment of trims over NBD.
    pub fn with_discards(mut self, discards: Discards) -> Self {
        self.discards = discards;
        self
    }

    /// Has writes over NBD that consist of zeroes become zeroing, in this way.
    pub fn with_zero_detection(mut self, mode: ZeroMode) -> Self {
        self.zero_detection = Some(mode);
        self
    }

    /// Has what clients read from backing images copied into the image, which must be open for writing.
    pub fn with_copy_on_read(mut self) -> Self {
        self.copy_on_read = true;
        self
    }

    /// Reads of clients whose copy into the image failed; they got their bytes all the same.
    pub fn failed_copies(&self) -> u64 {
        self.failed_copies.load(Relaxed)
    }

    /// Reads for a client.
    pub(crate) async fn read(
        &self,
        worker: &Worker,
        offset: u64,
        bufs: IoBufs,
    ) -> (zebu_engine::Result<()>, IoBufs) {
        let image = self.image();
        // A copy that fails (for want of space) is no failure of the read: what is wrong with its range, the read finds.
        if self.copy_on_read
            && Box::pin(image.fill_from_backing(worker, offset, bufs.len() as u64)).await.is_err()
        {
            self.failed_copies.fetch_add(1, Relaxed);
        }
        image.read(worker, offset, bufs).await
    }

    /// The name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The description; empty if there is none.
    pub fn description(&self) -> &str {
        &self.description
    }

    /// The image in which the disk is now: after a fork, the overlay.
    pub fn image(&self) -> Image {
        #[cfg(test)]
        self.count_down();
        self.image.current()
    }

    /// The image in which the disk was before all forks, by which devices of the kernel know it.
    pub(crate) fn first_image(&self) -> Image {
        let mut first = self.image.clone();
        while let Some(base) = first.backing().filter(Image::is_sealed) {
            first = base;
        }
        first
    }

    /// Has the use of the image panic that is the `number`th from now on.
    #[cfg(test)]
    pub(crate) fn panic_at(&self, number: usize) {
        self.fault.store(number, std::sync::atomic::Ordering::SeqCst);
    }

    #[cfg(test)]
    fn count_down(&self) {
        use std::sync::atomic::Ordering::SeqCst;
        let left = self.fault.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1));
        assert!(left != Ok(1), "as intended, in a request");
    }

    /// Whether a fault of the server's own (a panic) closed it: nobody is served any more, what was flushed is safe.
    pub fn is_closed(&self) -> bool {
        self.closed.is_thrown()
    }

    /// Nobody knows what a request has left half-way that panicked: from now on nobody is served.
    pub(crate) fn close_if_panicking(&self) {
        if std::thread::panicking() {
            self.closed.throw();
        }
    }

    /// Thrown when it is closed.
    pub(crate) fn closed(&self) -> &Stop {
        &self.closed
    }

    /// Whether clients may write.
    pub fn access(&self) -> Access {
        self.access
    }

    /// Names of the bitmaps that clients may look at.
    pub fn bitmaps(&self) -> &[String] {
        &self.bitmaps
    }

    /// The bits of one of the bitmaps, by its place among them.
    pub(crate) async fn bits_of(&self, worker: &Worker, index: u32) -> zebu_engine::Result<DirtyBits> {
        let name = self.bitmaps.get(index as usize).map_or("", String::as_str);
        if let Some((_, bits)) = self.given_bits.iter().find(|(given, _)| given == name) {
            return Ok(bits.clone());
        }
        let owner = self.image().with_bitmap(name).unwrap_or_else(|| self.image());
        owner.bitmap_bits(worker, name).await
    }

    /// Treatment of trims.
    pub fn discards(&self) -> Discards {
        self.discards
    }

    /// How writes of zeroes are zeroed, if they are looked for.
    pub fn zero_detection(&self) -> Option<ZeroMode> {
        self.zero_detection
    }

    /// Counters of the clients' requests.
    pub fn metrics(&self) -> &ExportMetrics {
        &self.metrics
    }

    /// Limits of clients' requests, beside those of the group.
    pub fn limits(&self) -> Limits {
        self.throttle.limits()
    }

    /// Changes the limits. Requests that wait go on under the new ones.
    pub fn set_limits(&self, limits: &Limits) {
        self.throttle.set_limits(limits);
    }

    /// The group whose limits it shares with others, if it is in one.
    pub fn limit_group(&self) -> Option<LimitGroup> {
        self.throttle.group()
    }

    /// Has it share the limits of a group from now on, or of none. Requests that wait for those of an earlier group do so to the end.
    pub fn set_limit_group(&self, group: Option<&LimitGroup>) {
        self.throttle.set_group(group);
    }

    /// Requests that waited for limits.
    pub fn throttle_stats(&self) -> ThrottleStats {
        self.throttle.stats()
    }

    /// Lets all requests go that wait for limits, and all that come: it is about to end, and they are answered first.
    pub fn end_limits(&self) {
        self.throttle.release();
    }

    /// Waits until the limits let a request go. `bytes` count for reads and writes.
    pub(crate) async fn admit(&self, worker: &Worker, kind: RequestKind, bytes: u64) {
        self.throttle.pass(worker, kind, bytes).await;
    }

    /// Makes all durable that was written before, and counts that.
    ///
    /// # Errors
    /// Errors of the image's flush.
    pub async fn flush(&self, worker: &Worker) -> zebu_engine::Result<()> {
        let mark = self.metrics.mark();
        self.image().flush(worker).await?;
        self.metrics.is_durable(mark);
        Ok(())
    }

    /// Has changes outlive this process when they are answered: their client stays when the server is killed, and takes the next
    /// server's flush for one of all of them.
    pub(crate) fn keep_answers(&self) {
        self.keeps_answers.store(true, Relaxed);
    }

    /// Ends a change that has succeeded.
    pub(crate) async fn settle(&self, worker: &Worker, durability: Durability) -> zebu_engine::Result<()> {
        match durability {
            Durability::Durable => self.flush(worker).await,
            Durability::Volatile if self.keeps_answers.load(Relaxed) => self.image.write_back(worker).await,
            Durability::Volatile => Ok(()),
        }
    }

    /// Tells clients that can be told (guests over vhost-user-blk, the kernel by ublk) that the image has a new size. To be called after
    /// [`Image::resize`].
    pub fn announce_size(&self) {
        let watchers = self.watchers.lock().clone();
        for watcher in watchers.iter().filter_map(Weak::upgrade) {
            watcher.size_changed();
        }
    }

    /// Has somebody told of new sizes as long as it lives.
    #[cfg_attr(
        not(any(feature = "ublk", feature = "vhost-user")),
        expect(dead_code, reason = "other clients can't be told")
    )]
    pub(crate) fn watch_size(&self, watcher: Weak<dyn SizeWatcher>) {
        let mut watchers = self.watchers.lock();
        watchers.retain(|watcher| watcher.strong_count() > 0);
        watchers.push(watcher);
    }

    /// Whether what is read stays in the page cache.
    pub(crate) fn has_page_cache(&self) -> bool {
        self.cache_is_of_use
    }

    /// Whether zeroing is never as slow as writing.
    pub(crate) fn zeroes_fast(&self) -> bool {
        self.zeroes_fast
    }
}
