//! An open image: the handle that everything else works on.

use crate::before_change::HookOf;
use crate::chain::{self, CutOff};
use crate::compress::{Bursts, Hurry};
use crate::foreign_image::{convert_first, vmdk_info};
use crate::node::{Driver, Node, Raw};
use crate::open::{look_down, open_chain, open_given};
use crate::options::*;
use crate::progress::JobControl;
use crate::qcow2::life::info::qcow2_info;
use crate::qcow2::state::Qcow2;
use crate::qcow2::text::text;
use crate::reservation::no_room;
use crate::status::{ChainInfo, Extent, ForeignInfo, ImageInfo, ImageStats};
use crate::sync::Inside;
use crate::sync::atomic::Ordering::Release;
use crate::transfer::{FileRange, Transfer, transfer};
use crate::{Error, ErrorKind, Result, raw, refs};
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;
use zebu_storage::sabotage::{self, Fault};
use zebu_storage::{File, FileId, IoBufs, LongWait, Worker};

/// An open image with its backing chain. Cheap to clone; shared by all workers.
///
/// Requests run to their end once they are started: dropping the future of one only means that nobody learns how it
/// ended. Requests that overlap have no order: a write whose future was dropped may land after a later one that has
/// returned.
///
/// Before the last handle is dropped, [`Image::close`] has to be awaited. Nothing is flushed otherwise: what was written
/// since the last flush is lost, and space that was set aside may stay allocated (a check reports it as leaked).
#[derive(Debug, Clone)]
pub struct Image(pub(crate) Arc<Node>);

/// Bytes of a logical block of almost every disk.
pub(crate) const SECTOR: u32 = 512;

/// How clusters are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Clusters {
    Plain,
    Compressed(Bursts),
}

fn check_range(node: &Node, offset: u64, len: u64) -> Result<()> {
    node.check_open()?;
    let size = node.visible_size();
    if offset.checked_add(len).is_some_and(|end| end <= size) {
        return Ok(());
    }
    let message = format!("{len} bytes reach past the end of the disk at {size}");
    Err(Error::new(ErrorKind::OutOfRange, message).on(&node.path).at_guest(offset))
}

impl Image {
    /// Opens an image.
    ///
    /// # Errors
    /// The file can't be opened or locked, is damaged, uses what zebu doesn't implement, or names a file that the
    /// policy doesn't allow.
    pub async fn open(worker: &Worker, path: &Path, options: &OpenOptions) -> Result<Self> {
        open_chain(&worker.uncounted(), path, options).await.map(Self)
    }

    /// Looks at an image and at what it stands on, each by its header alone, as far as the policy of `options` allows and files can be opened.
    ///
    /// # Errors
    /// As [`Image::open`], of the image itself. What is wrong further down is [`ChainInfo::end`].
    pub async fn look_down(worker: &Worker, path: &Path, options: &OpenOptions) -> Result<ChainInfo> {
        let worker = &worker.uncounted();
        let (nodes, end) = look_down(worker, path, options).await?;
        let mut images = Vec::with_capacity(nodes.len());
        for image in nodes.into_iter().map(Self) {
            images.push(image.info()?);
            image.close(worker).await?;
        }
        Ok(ChainInfo { images, end })
    }

    /// Opens a chain of files that the caller has opened: the top first, then what it stands on. No other file is
    /// opened, whatever the images name; `format`, `backing`, `data_file`, `refs` and `sharing` of the options don't
    /// apply.
    ///
    /// # Errors
    /// As [`Image::open`].
    pub async fn open_files(worker: &Worker, images: Vec<OpenedFile>, options: &OpenOptions) -> Result<Self> {
        open_given(&worker.uncounted(), images, options).await.map(Self)
    }

    /// The file name it was opened by.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// Identities of the files that the image and what it stands on lie in.
    pub fn files(&self) -> Vec<FileId> {
        std::iter::successors(Some(&*self.0), |node| node.backing.as_deref())
            .flat_map(|node| [node.image_file(), node.data_file()].into_iter().chain(node.other_files()))
            .flat_map(File::files)
            .collect()
    }

    /// Format.
    pub fn format(&self) -> Format {
        self.0.format()
    }

    /// Bytes of the virtual disk.
    pub fn virtual_size(&self) -> u64 {
        self.0.visible_size()
    }

    /// Bytes of a cluster (for raw: 65536), the natural unit of work.
    pub fn cluster_size(&self) -> u64 {
        match &self.0.driver {
            Driver::Qcow2(qcow2) => qcow2.geometry().cluster_size(),
            Driver::Raw(_) => 65536,
            Driver::Foreign(foreign) => foreign.unit_of_work(),
        }
    }

    /// Bytes of a logical block, the unit that a guest may take for written as a whole: the larger one of the sector of its
    /// cipher (LUKS2 has sectors of up to 4096) and [`Image::logical_sector_size`]. Requests may be smaller. A write of a part
    /// of a sector writes the sector anew, and after a crash its other parts can be lost: servers tell their clients to ask
    /// for whole blocks.
    pub fn logical_block_size(&self) -> u32 {
        let of_cipher = match &self.0.driver {
            Driver::Raw(Raw { luks: Some(luks), .. }) => luks.sector_size(),
            _ => SECTOR,
        };
        of_cipher.max(self.logical_sector_size())
    }

    /// Bytes of a logical sector, in which the partition table of the disk counts: 512, or 4096 if a VHDX in the chain says
    /// so. The sector of a cipher is none.
    pub fn logical_sector_size(&self) -> u32 {
        std::iter::successors(Some(&*self.0), |node| node.backing.as_deref())
            .filter_map(|node| match &node.driver {
                Driver::Foreign(foreign) => Some(foreign.disk().logical_sector()),
                Driver::Qcow2(_) | Driver::Raw(_) => None,
            })
            .fold(SECTOR, u32::max)
    }

    /// Whether this image is encrypted. Those that it stands on may be, or not.
    pub fn is_encrypted(&self) -> bool {
        !self.0.protection().is_none()
    }

    /// Whether any image of the chain is encrypted.
    pub fn is_chain_encrypted(&self) -> bool {
        let mut next = Some(&self.0);
        while let Some(node) = next {
            if !node.protection().is_none() {
                return true;
            }
            next = node.backing.as_ref();
        }
        false
    }

    /// The backing image, if open.
    pub fn backing(&self) -> Option<Image> {
        self.0.backing.clone().map(Self)
    }

    /// Everything that `info` tells.
    ///
    /// # Errors
    /// The file system does not answer.
    pub fn info(&self) -> Result<ImageInfo> {
        let node = &self.0;
        let file = self.0.image_file();
        let mut info = ImageInfo {
            filename: node.path.clone(),
            format: node.format(),
            virtual_size: node.virtual_size(),
            logical_sector_size: self.logical_sector_size(),
            file_length: file.len(),
            actual_size: file.disk_usage().map_err(|e| Error::from(e).on(&node.path))?,
            backing_file: None,
            backing_path: None,
            backing_format: None,
            extent_size_hint: file.extent_size_hint(),
            qcow2: None,
            foreign: None,
            encryption: None,
        };
        if let Driver::Raw(Raw { luks: Some(luks), .. }) = &node.driver {
            info.encryption = Some(luks.info.clone());
        }
        if let Driver::Foreign(foreign) = &node.driver {
            let disk = foreign.disk();
            let name = disk.parent().map(|parent| parent.name.clone());
            info.backing_file = name.filter(|name| !name.is_empty());
            let told = info.backing_file.as_deref().map(|name| refs::resolve(&node.path, name));
            info.backing_path = node.backing.as_ref().map(|below| below.path.clone()).or(told);
            info.backing_format = disk.parent().and_then(|parent| match parent.format {
                zebu_foreign::ParentFormat::Same => Some(disk.format().name().to_owned()),
                zebu_foreign::ParentFormat::Raw => Some("raw".to_owned()),
                _ => None,
            });
            let unit = Some(disk.unit()).filter(|unit| *unit > 0);
            let vmdk = disk.vmdk().map(|facts| vmdk_info(facts, &node.path));
            info.foreign = Some(ForeignInfo { variant: disk.variant(), unit, vmdk });
        }
        if let Driver::Qcow2(qcow2) = &node.driver {
            info.backing_file = qcow2.header().backing_file().map(text);
            info.backing_path = info.backing_file.as_deref().map(|name| refs::resolve(&node.path, name));
            info.backing_format = qcow2.header().backing_format().map(text);
            info.encryption = qcow2.encryption().cloned();
            info.qcow2 = Some(qcow2_info(
                qcow2.header(),
                qcow2.snapshots().entries(),
                qcow2.bitmaps().info(),
                qcow2.backup_mark(),
                &qcow2.seal(),
            ));
        }
        Ok(info)
    }

    /// Sets the bytes that the mapping of the image and its whole backing chain may take in memory. Larger ones are
    /// filled by use; for a smaller one, what was used least goes at once.
    ///
    /// # Errors
    /// It is less than the tables that are held in any case, and a slice for each of [`OpenOptions::queues`] (two at
    /// least); the message names the minimum. Nothing is changed then.
    pub fn set_cache_size(&self, bytes: u64) -> Result<()> {
        self.0.set_cache_size(bytes)
    }

    /// The least that [`Image::set_cache_size`] accepts now, in bytes.
    pub fn min_cache_size(&self) -> u64 {
        self.0.cache_minimum()
    }

    /// Gives memory back that the mapping has not used for [`OpenOptions::cache_clean_interval`], if it is time to
    /// look at `now`. Requests and [`crate::Queue::poll`] do so by the way; only who lets an image lie idle without
    /// polling it has a reason to call this.
    pub fn tidy(&self, now: Instant) {
        self.0.tidy(now);
    }

    /// Counters.
    pub fn stats(&self) -> ImageStats {
        match &self.0.driver {
            Driver::Qcow2(qcow2) => qcow2.stats(),
            Driver::Raw(_) | Driver::Foreign(_) => ImageStats::default(),
        }
    }

    /// The waits for the files of the chain that have taken ten seconds and more.
    pub fn long_waits(&self) -> Vec<LongWait> {
        self.chain_files().flat_map(File::long_waits).collect()
    }

    /// Has `tell` called for each wait for a file of the chain, once, when it has taken ten seconds. It must not wait itself.
    /// The first such function stays.
    pub fn tell_long_waits(&self, tell: impl Fn(&LongWait) + Send + Sync + 'static) {
        let tell: Arc<dyn Fn(&LongWait) + Send + Sync> = Arc::new(tell);
        self.chain_files().for_each(|file| file.tell_long_waits(tell.clone()));
    }

    fn chain_files(&self) -> impl Iterator<Item = &File> {
        std::iter::successors(Some(&*self.0), |node| node.backing.as_deref()).flat_map(Node::files)
    }

    fn check_range(&self, offset: u64, len: u64) -> Result<()> {
        check_range(&self.0, offset, len)
    }

    /// Runs an operation that is alone with the image by the worker of the image's own: requests wait for its end, which
    /// must not depend on whether the caller's worker is polled.
    pub(crate) async fn on_own_worker<T, F>(
        &self,
        worker: &Worker,
        work: impl FnOnce(Self, Worker) -> F + Send + 'static,
    ) -> Result<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T>> + 'static,
    {
        self.0.check_here()?;
        let me = self.clone();
        if !self.0.is_writable() {
            let on = worker.uncounted();
            return worker.spawn(async move { work(me, on).await }).await;
        }
        let work = move |on| async move {
            let unended = me.0.must_end();
            let result = work(me.clone(), on).await;
            if let Some(unended) = unended {
                unended.end();
            }
            result
        };
        self.0.own_worker().run(worker, &self.0.path, work).await
    }

    /// Runs an operation on the image's own worker while no request that changes the image is under way.
    pub(crate) async fn alone<T: Send + 'static>(
        &self,
        worker: &Worker,
        work: impl AsyncFnOnce(&Self, &Worker) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.on_own_worker(worker, move |me, on| async move {
            me.0.while_alone(&on, async || work(&me, &on).await).await
        })
        .await
    }

    /// The driver, if the image is of the format qcow2.
    pub(crate) fn qcow2(&self, what: &str) -> Result<&Arc<Qcow2>> {
        match &self.0.driver {
            Driver::Qcow2(qcow2) => Ok(qcow2),
            Driver::Raw(_) | Driver::Foreign(_) => {
                let message = format!("the format {} has no {what}", self.format().name());
                Err(Error::new(ErrorKind::Unsupported, message).on(&self.0.path))
            }
        }
    }

    /// Reads `bufs.len()` bytes at `offset`; the whole range must lie on the disk.
    ///
    /// # Errors
    /// The buffers' content is unspecified then.
    pub async fn read(&self, worker: &Worker, offset: u64, bufs: IoBufs) -> (Result<()>, IoBufs) {
        self.read_with(worker, offset, bufs, CutOff::ReadsAsZero).await
    }

    /// Reads as [`Image::read`], for a job: what the file is too short for is an error.
    pub(crate) async fn read_source(
        &self,
        worker: &Worker,
        offset: u64,
        bufs: IoBufs,
    ) -> (Result<()>, IoBufs) {
        self.read_with(worker, offset, bufs, CutOff::Fails).await
    }

    async fn read_with(
        &self,
        worker: &Worker,
        offset: u64,
        bufs: IoBufs,
        cut_off: CutOff,
    ) -> (Result<()>, IoBufs) {
        let node = self.current().0;
        if let Err(error) = check_range(&node, offset, bufs.len() as u64) {
            return (Err(error), bufs);
        }
        let on = worker.uncounted();
        worker
            .spawn(async move {
                let _inside = match &node.driver {
                    Driver::Qcow2(qcow2) => Some(qcow2.readers().begin(&on).await),
                    Driver::Raw(_) | Driver::Foreign(_) => None,
                };
                // The disk may have become shorter before the read began.
                if let Err(error) = check_range(&node, offset, bufs.len() as u64) {
                    return (Err(error), bufs);
                }
                chain::read(&node, &on, offset, bufs, cut_off).await
            })
            .await
    }

    /// Fails if images of this format are only read.
    fn check_writable_format(&self) -> Result<()> {
        let format = self.format();
        if format.is_writable() { Ok(()) } else { Err(convert_first(format).on(self.path())) }
    }

    /// Begins a change of the range: waits while somebody is alone with the image, has a backup copy what it wants of
    /// the range, does what must be done before the first change of an opening, and notes the range in the bitmaps that
    /// record changes. The guard is held until the change is linked.
    async fn begin_change(&self, worker: &Worker, offset: u64, len: u64) -> Result<Inside<'_>> {
        self.check_writable_format()?;
        let inside = self.0.changes.enter(worker.drive()).await;
        self.0.check_open()?;
        if self.moved_to().is_some() {
            return Err(self.0.went_on());
        }
        // Again: the disk may have become shorter meanwhile.
        self.check_range(offset, len)?;
        self.before_change(worker, offset, len).await?;
        if let Driver::Qcow2(qcow2) = &self.0.driver {
            qcow2.prepare_write(worker).await?;
            qcow2.note_change(worker, offset, len).await?;
        }
        Ok(inside)
    }

    /// Writes `bufs` at `offset`.
    ///
    /// # Errors
    /// A part may have been written then; what was there before is readable everywhere else.
    pub async fn write(
        &self,
        worker: &Worker,
        offset: u64,
        bufs: IoBufs,
        durability: Durability,
    ) -> (Result<()>, IoBufs) {
        self.write_as(worker, Clusters::Plain, offset, bufs, durability).await
    }

    /// Writes `bufs` at `offset` as compressed clusters; those that don't become shorter are written plain, those that
    /// are zero become zero clusters. What was there before may be of any kind.
    ///
    /// Streams are packed in memory ([`crate::CompressOptions::gather_memory`]) and written a host cluster or more at
    /// a time: a write that has completed is in the file after the next [`Image::flush`] at the latest, and an error
    /// of the file may come with that flush. Reads see it at once.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: the range does not consist of whole clusters (the disk's end may cut the last
    /// one short). [`ErrorKind::Unsupported`]: the image can't hold compressed clusters. Otherwise as for
    /// [`Image::write`].
    pub async fn write_compressed(
        &self,
        worker: &Worker,
        offset: u64,
        bufs: IoBufs,
        durability: Durability,
    ) -> (Result<()>, IoBufs) {
        self.write_as(worker, Clusters::Compressed(Bursts::Whole), offset, bufs, durability).await
    }

    /// Has clusters that are compressed in short bursts done without further sleep, as long as the result lives.
    pub(crate) fn hurry_compression(&self) -> Option<Hurry> {
        match &self.0.driver {
            Driver::Qcow2(qcow2) => Some(qcow2.hurry_compression()),
            Driver::Raw(_) | Driver::Foreign(_) => None,
        }
    }

    /// Writes `bufs` at `offset` as clusters of one kind.
    pub(crate) async fn write_as(
        &self,
        worker: &Worker,
        clusters: Clusters,
        offset: u64,
        bufs: IoBufs,
        durability: Durability,
    ) -> (Result<()>, IoBufs) {
        let (me, on) = (self.current(), worker.uncounted());
        if let Err(error) = me.check_range(offset, bufs.len() as u64) {
            return (Err(error), bufs);
        }
        worker
            .spawn(async move {
                let inside = match (me.begin_change(&on, offset, bufs.len() as u64).await, me.moved_to()) {
                    (Ok(inside), _) => inside,
                    (Err(_), Some(next)) => {
                        return Box::pin(next.write_as(&on, clusters, offset, bufs, durability)).await;
                    }
                    (Err(error), None) => return (Err(error), bufs),
                };
                let (result, bufs) = match (&me.0.driver, clusters) {
                    (Driver::Qcow2(qcow2), Clusters::Plain) => qcow2.write(&me.0, &on, offset, bufs).await,
                    (Driver::Qcow2(qcow2), Clusters::Compressed(bursts)) => {
                        qcow2.write_compressed(&me.0, &on, bursts, offset, bufs).await
                    }
                    (Driver::Raw(raw), Clusters::Plain) => raw::write(raw, &on, offset, bufs).await,
                    (Driver::Foreign(_), _) => (Err(convert_first(me.format()).on(me.path())), bufs),
                    (Driver::Raw(_), Clusters::Compressed(_)) => {
                        let message = "an image of this format can't hold compressed clusters";
                        (Err(Error::new(ErrorKind::Unsupported, message).on(me.path())), bufs)
                    }
                };
                if let Err(error) = &result {
                    me.note_damage(&on, error).await;
                }
                drop(inside);
                let result = match result {
                    Ok(()) => me.settle(&on, durability).await,
                    error => error,
                };
                (result, bufs)
            })
            .await
    }

    /// Makes `offset..offset + len` read as zero, down to the byte.
    ///
    /// # Errors
    /// A part may read as zero then.
    pub async fn write_zeroes(&self, worker: &Worker, offset: u64, len: u64, mode: ZeroMode) -> Result<()> {
        let (me, on) = (self.current(), worker.uncounted());
        me.check_range(offset, len)?;
        worker
            .spawn(async move {
                let inside = match (me.begin_change(&on, offset, len).await, me.moved_to()) {
                    (Ok(inside), _) => inside,
                    (Err(_), Some(next)) => return Box::pin(next.write_zeroes(&on, offset, len, mode)).await,
                    (Err(error), None) => return Err(error),
                };
                let result = match &me.0.driver {
                    Driver::Qcow2(qcow2) => qcow2.write_zeroes(&me.0, &on, offset, len, mode).await,
                    Driver::Raw(raw) => raw::write_zeroes(raw, &on, offset, len, mode).await,
                    Driver::Foreign(_) => Err(convert_first(me.format()).on(me.path())),
                };
                if let Err(error) = &result {
                    me.note_damage(&on, error).await;
                }
                drop(inside);
                result?;
                me.settle(&on, Durability::Volatile).await
            })
            .await
    }

    /// Copies into the image what its backing images show in a range, as far as it has nothing there itself; bytes that
    /// were copied. The disk shows the same afterwards. Whole clusters around the range are filled, but for what reads as
    /// zero; with subclusters of less than 64 KiB, so many bytes of a larger cluster.
    ///
    /// Requests beside it may change the range: what they write stays.
    ///
    /// # Errors
    /// The image is not qcow2, or is only read; the backing image can't be read, or its file was cut short; there is no space. A
    /// part may be filled then.
    pub async fn fill_from_backing(&self, worker: &Worker, offset: u64, len: u64) -> Result<u64> {
        self.check_range(offset, len)?;
        let (me, on) = (self.clone(), worker.uncounted());
        worker
            .spawn(async move {
                let qcow2 = me.qcow2("clusters of its own above a backing image")?;
                let range = offset..offset + len;
                if me.0.backing.is_none() || !qcow2.has_gaps(&me.0, &on, range.clone()).await? {
                    return Ok(0);
                }
                if !me.0.is_writable() {
                    let message = "an image that is only read can't be filled";
                    return Err(Error::new(ErrorKind::InvalidArgument, message).on(me.path()));
                }
                let _inside = me.0.changes.enter(on.drive()).await;
                me.0.check_open()?;
                if me.moved_to().is_some() {
                    // What it has is read through the overlay; the overlay is filled by those who ask it.
                    return Ok(0);
                }
                me.check_range(offset, len)?;
                qcow2.prepare_write(&on).await?;
                let result = qcow2.fill_from_backing(&me.0, &on, range).await;
                if let Err(error) = &result {
                    me.note_damage(&on, error).await;
                }
                result
            })
            .await
    }

    /// Gives a range up: whole clusters (subclusters) in it read as zero afterwards, the rest stays as it is.
    ///
    /// # Errors
    /// A part may read as zero then.
    pub async fn discard(&self, worker: &Worker, offset: u64, len: u64) -> Result<()> {
        let (me, on) = (self.current(), worker.uncounted());
        me.check_range(offset, len)?;
        worker
            .spawn(async move {
                let inside = match (me.begin_change(&on, offset, len).await, me.moved_to()) {
                    (Ok(inside), _) => inside,
                    (Err(_), Some(next)) => return Box::pin(next.discard(&on, offset, len)).await,
                    (Err(error), None) => return Err(error),
                };
                let result = match &me.0.driver {
                    Driver::Qcow2(qcow2) => qcow2.discard(&me.0, &on, offset, len).await,
                    Driver::Raw(raw) => raw::discard(raw, &on, offset, len).await,
                    Driver::Foreign(_) => Err(convert_first(me.format()).on(me.path())),
                };
                if let Err(error) = &result {
                    me.note_damage(&on, error).await;
                }
                drop(inside);
                result?;
                me.settle(&on, Durability::Volatile).await
            })
            .await
    }

    /// Waits for backups and checkpoints that want the range as it is.
    #[inline]
    async fn before_change(&self, worker: &Worker, offset: u64, len: u64) -> Result<()> {
        let Some(hooks) = self.0.before_change.get() else { return Ok(()) };
        for hook in &*hooks {
            hook.wait(worker.uncounted(), offset..offset + len).await.map_err(|e| e.on(self.path()))?;
        }
        Ok(())
    }

    /// Fails while a backup or a checkpoint wants the disk as it is.
    pub(crate) fn check_nothing_is_copied(&self, change: &str) -> Result<()> {
        let message = match self.0.before_change.first() {
            None => return Ok(()),
            Some(HookOf::Backup) => format!("a backup is under way: cancel it before the disk {change}"),
            Some(HookOf::Checkpoint) => {
                format!("a checkpoint of the disk is there: end it before the disk {change}")
            }
        };
        Err(Error::new(ErrorKind::Exists, message).on(self.path()))
    }

    /// Marks the image if `error` says that its metadata is damaged ([`OpenOptions::damage`]).
    async fn note_damage(&self, worker: &Worker, error: &Error) {
        if let Driver::Qcow2(qcow2) = &self.0.driver {
            Box::pin(qcow2.mark_if_corrupt(worker, error)).await;
        }
    }

    /// Flushes after a completed change, if the cache mode or the caller asks for it.
    async fn settle(&self, worker: &Worker, durability: Durability) -> Result<()> {
        let writethrough = match &self.0.driver {
            Driver::Qcow2(qcow2) => qcow2.cache_mode().is_writethrough(),
            Driver::Raw(raw) => raw.cache_mode.is_writethrough(),
            Driver::Foreign(_) => false,
        };
        if durability == Durability::Durable || writethrough {
            Box::pin(self.flush_or_closed(worker)).await
        } else {
            Ok(())
        }
    }

    /// Makes all writes that completed before the call durable.
    ///
    /// # Errors
    /// Nothing is known to be durable. An error of the disk's flush itself is final for writing until the image is
    /// opened again; out of space is not.
    pub async fn flush(&self, worker: &Worker) -> Result<()> {
        // The commit is a task of its own.
        let worker = &worker.uncounted();
        let me = self.current();
        me.tidy(Instant::now());
        me.0.check_open()?;
        me.flush_or_closed(worker).await
    }

    /// Flushes what completed before the call. A close that comes first or meanwhile makes it durable as well.
    async fn flush_or_closed(&self, worker: &Worker) -> Result<()> {
        let flushed = match &self.0.driver {
            Driver::Qcow2(qcow2) if qcow2.is_writable() => qcow2.flush(worker).await,
            Driver::Raw(raw) if raw.file.is_writable() => {
                worker.flush(&raw.file).await.map_err(|e| Error::from(e).on(&self.0.path))
            }
            Driver::Qcow2(_) | Driver::Raw(_) | Driver::Foreign(_) => Ok(()),
        };
        self.answer_of_flush(flushed)
    }

    /// The answer to a flush: that of the close, or success of the fork, that took place meanwhile and made the same writes durable,
    /// if the flush came too late to do anything. One that failed by itself has failed.
    pub(crate) fn answer_of_flush(&self, flushed: Result<()>) -> Result<()> {
        match (&flushed, self.0.closed()) {
            (Err(error), Some(closed)) if error.is_refusal() => closed.clone(),
            (Err(error), None) if error.is_refusal() && self.moved_to().is_some() => Ok(()),
            _ => flushed,
        }
    }

    /// Fills whole clusters from another file, within the kernel. Returns how many bytes were moved, from the start of
    /// the source on, and if not all, why not: the caller may move the rest in another way.
    pub(crate) async fn transfer_from(
        &self,
        worker: &Worker,
        how: Transfer,
        source: FileRange,
        offset: u64,
    ) -> Result<(u64, Option<Error>)> {
        self.check_range(offset, source.len)?;
        let (me, on) = (self.clone(), worker.uncounted());
        worker
            .spawn(async move {
                let _inside = me.begin_change(&on, offset, source.len).await?;
                if !me.0.protection().is_none() {
                    let message = "the kernel can't move data into an encrypted image";
                    return Ok((0, Some(Error::new(ErrorKind::Unsupported, message).on(me.path()))));
                }
                match &me.0.driver {
                    Driver::Qcow2(qcow2) => {
                        qcow2.transfer_from(&on, how, &source, offset..offset + source.len).await
                    }
                    Driver::Raw(raw) => match transfer(&on, how, &source, &raw.file, offset).await {
                        Ok(()) => Ok((source.len, None)),
                        Err(refusal) => Ok((0, Some(refusal))),
                    },
                    Driver::Foreign(_) => Err(convert_first(me.format()).on(me.path())),
                }
            })
            .await
    }

    /// Changes the size of the virtual disk to `new_size` bytes, for qcow2 a multiple of 512. A raw image gets exactly this
    /// length; its disk ends at the next multiple of 512. Requests that change the image and have begun end first; later
    /// ones wait until it is over. Reads and flushes go on.
    ///
    /// # Errors
    /// The size is as before, unless the last write of the header fails, or a data file can't be cut to a smaller disk.
    pub async fn resize(
        &self,
        worker: &Worker,
        new_size: u64,
        shrink: Shrink,
        preallocation: Preallocation,
    ) -> Result<()> {
        self.resize_controlled(worker, new_size, shrink, preallocation, &JobControl::default()).await
    }

    /// The same, watched and stopped by `control`: setting space aside takes long ([`Phase::Reserving`]).
    ///
    /// [`Phase::Reserving`]: crate::jobs::Phase::Reserving
    ///
    /// # Errors
    /// As [`Image::resize`], or [`ErrorKind::Cancelled`].
    pub async fn resize_controlled(
        &self,
        worker: &Worker,
        new_size: u64,
        shrink: Shrink,
        preallocation: Preallocation,
        control: &JobControl,
    ) -> Result<()> {
        let refuse = |message: &str| Error::new(ErrorKind::InvalidArgument, message).on(&self.0.path);
        let disk_size =
            new_size.checked_next_multiple_of(512).ok_or_else(|| refuse("the image size is too large"))?;
        if self.format() == Format::Qcow2 && new_size != disk_size {
            return Err(refuse("The new size must be a multiple of 512"));
        }
        let control = control.clone();
        self.on_own_worker(worker, move |me, on| async move {
            let resize = async || {
                me.0.check_open()?;
                if disk_size < me.virtual_size() {
                    me.check_nothing_is_copied("becomes smaller")?;
                }
                match &me.0.driver {
                    Driver::Qcow2(qcow2) => {
                        qcow2.prepare_write(&on).await?;
                        qcow2.resize(&me.0, &on, new_size, shrink, preallocation, &control).await
                    }
                    Driver::Raw(raw) => {
                        raw::resize(raw, &on, new_size, shrink, preallocation, &control).await?;
                        raw.size.store(disk_size, Release);
                        Ok(())
                    }
                    Driver::Foreign(_) => Err(convert_first(me.format()).on(me.path())),
                }
            };
            if sabotage::is(Fault::ResizeBesideWrites) {
                return resize().await;
            }
            me.0.while_alone(&on, resize).await
        })
        .await
        .map_err(|e| no_room(e, preallocation, self.format()))
    }

    /// The run of one kind that starts at `offset`, at most `len` bytes and at least one, through the whole chain; data is
    /// looked up in its file for holes.
    ///
    /// # Errors
    /// A table can't be read or is damaged; [`ErrorKind::OutOfRange`]; [`ErrorKind::InvalidArgument`]: `len` is 0.
    pub async fn extent(&self, worker: &Worker, offset: u64, len: u64) -> Result<Extent> {
        self.extent_with(worker, offset, len, CutOff::ReadsAsZero).await
    }

    /// Looks up an extent as [`Image::extent`], for a job: an error where the file is too short for it, which ends the extent
    /// before.
    pub(crate) async fn source_extent(&self, worker: &Worker, offset: u64, len: u64) -> Result<Extent> {
        self.extent_with(worker, offset, len, CutOff::Fails).await
    }

    /// Looks up an extent; `cut_off` says what lies past the end of a file.
    pub(crate) async fn extent_with(
        &self,
        worker: &Worker,
        offset: u64,
        len: u64,
        cut_off: CutOff,
    ) -> Result<Extent> {
        let (me, on) = (self.current(), worker.uncounted());
        worker
            .spawn(async move {
                let _inside = match &me.0.driver {
                    Driver::Qcow2(qcow2) => Some(qcow2.readers().begin(&on).await),
                    Driver::Raw(_) | Driver::Foreign(_) => None,
                };
                me.check_range(offset, len)?;
                if len == 0 {
                    let message = "an extent has at least one byte";
                    return Err(Error::new(ErrorKind::InvalidArgument, message)
                        .on(&me.0.path)
                        .at_guest(offset));
                }
                chain::extent(&me.0, &on, offset, len, cut_off).await
            })
            .await
    }

    /// The descriptors of the files of the whole chain, for lists of those that a jail keeps open.
    pub fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        let mut files = Vec::new();
        let mut next = Some(&self.0);
        while let Some(node) = next {
            files.push(node.image_file());
            if !std::ptr::eq(node.data_file(), node.image_file()) {
                files.push(node.data_file());
            }
            next = node.backing.as_ref();
        }
        files.into_iter().flat_map(File::descriptors).collect()
    }

    /// The file that extents of `depth` with a host offset lie in (image file or external data file), for reflink
    /// and copy_file_range.
    pub fn data_file_at(&self, depth: u32) -> Option<&File> {
        self.0.at_depth(depth).map(Node::data_file)
    }

    /// The files of the images of the chain, from the top down.
    pub(crate) fn file_ids(&self) -> Vec<FileId> {
        let mut ids = Vec::new();
        let mut next = Some(&self.0);
        while let Some(node) = next {
            ids.push(node.image_file().id());
            next = node.backing.as_ref();
        }
        ids
    }
}
