//! An open image: the handle that everything else works on.

use crate::chain;
use crate::jobs::JobControl;
use crate::node::{Driver, Node};
use crate::open::{open_chain, open_given, size_lookup};
use crate::options::*;
use crate::qcow2::create;
use crate::qcow2::info::{qcow2_info, text};
use crate::qcow2::space::Content;
use crate::reservation::no_room;
use crate::status::{Extent, ImageInfo, ImageStats};
use crate::transfer::{FileRange, Transfer, transfer};
use crate::turnstile::Inside;
use crate::{Error, ErrorKind, Result, raw, refs};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::Release;
use std::time::Instant;
use zebu_storage::sabotage::{self, Fault};
use zebu_storage::{
    Create, File, FileId, FileKind, FsKind, IoBufs, IoErrorKind, LockMode, OpenFlags, Worker,
};

/// An open image with its backing chain. Cheap to clone; shared by all workers.
///
/// Requests run to their end once they are started: dropping the future of one only means that nobody learns how it
/// ended. Before the last handle is dropped, [`Image::close`] should be awaited; otherwise space that was set aside
/// stays allocated (a check reports it as leaked).
#[derive(Debug, Clone)]
pub struct Image(pub(crate) Arc<Node>);

fn check_range(node: &Node, offset: u64, len: u64) -> Result<()> {
    let size = node.virtual_size();
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
        open_chain(worker, path, options).await.map(Self)
    }

    /// Opens a chain of files that the caller has opened: the top first, then what it stands on. No other file is
    /// opened, whatever the images name; `format`, `backing`, `data_file`, `refs` and `sharing` of the options don't
    /// apply.
    ///
    /// # Errors
    /// As [`Image::open`].
    pub async fn open_files(worker: &Worker, images: Vec<OpenedFile>, options: &OpenOptions) -> Result<Self> {
        open_given(worker, images, options).await.map(Self)
    }

    /// Makes an empty qcow2 image in a file that the caller has opened; what is in it is lost. `size` must be given;
    /// no preallocation.
    ///
    /// # Errors
    /// As [`Image::create`].
    pub async fn create_in(worker: &Worker, file: &File, options: &CreateOptions) -> Result<()> {
        create::in_file(worker, file, options, create::Magic::Written).await
    }

    /// Creates an image (a file that exists is cut to nothing first). Does not leave it open.
    ///
    /// # Errors
    /// No file is left then that was not there before. Options that contradict each other, no space, or the file system
    /// can't do what `preallocation` asks.
    pub async fn create(worker: &Worker, path: &Path, options: &CreateOptions) -> Result<()> {
        Self::create_controlled(worker, path, options, &JobControl::default()).await
    }

    /// The same, watched and stopped by `control`: setting space aside takes long ([`Phase::Reserving`]).
    ///
    /// [`Phase::Reserving`]: crate::jobs::Phase::Reserving
    ///
    /// # Errors
    /// As [`Image::create`], or [`ErrorKind::Cancelled`].
    pub async fn create_controlled(
        worker: &Worker,
        path: &Path,
        options: &CreateOptions,
        control: &JobControl,
    ) -> Result<()> {
        let size = match (options.size, &options.backing) {
            (Some(size), _) => size,
            (None, Some((name, format))) => {
                let backing_path = refs::resolve(path, name);
                let backing = Self::open(worker, &backing_path, &size_lookup(&options.refs, *format)).await?;
                backing.virtual_size()
            }
            (None, None) => {
                return Err(
                    Error::new(ErrorKind::InvalidArgument, "Image creation needs a size parameter").on(path)
                );
            }
        };
        let size = size
            .checked_next_multiple_of(512)
            .ok_or_else(|| Error::new(ErrorKind::InvalidArgument, "the image size is too large").on(path))?;
        let header = match options.format {
            Format::Raw => None,
            Format::Qcow2 => Some(create::new_header(options, size).map_err(|e| e.on(path))?),
        };
        let mut made = Vec::new();
        let created = Self::create_files(worker, path, options, size, header, control, &mut made).await;
        if created.is_err() {
            // What is left would look like an image. Files that were there before stay.
            for path in made {
                let _ = std::fs::remove_file(path);
            }
        }
        created.map_err(|e| no_room(e, options.preallocation, options.format))
    }

    /// Makes the files of a new image; those that were not there before are noted in `made`.
    async fn create_files(
        worker: &Worker,
        path: &Path,
        options: &CreateOptions,
        size: u64,
        header: Option<zebu_qcow2::Header>,
        control: &JobControl,
        made: &mut Vec<PathBuf>,
    ) -> Result<()> {
        let mut new_file = |path: &Path| {
            let flags = OpenFlags {
                access: zebu_storage::Access::ReadWrite,
                direct: options.cache.is_direct(),
                create: Create::Truncate,
                lock: LockMode::Write,
                no_flush: options.cache == CacheMode::Unsafe,
            };
            let was_there = path.symlink_metadata().is_ok();
            let file = File::open(path, &flags).map_err(|e| Error::from(e).on(path))?;
            if !was_there {
                made.push(path.to_owned());
            }
            set_attributes(&file, options).map(|()| file)
        };
        let file = new_file(path)?;
        let Some(header) = header else {
            raw::create(worker, &file, size, options.preallocation, control).await?;
            return unlock(&file);
        };
        if let Some(name) = &options.data_file {
            let data_path = refs::resolve(path, name);
            let data_file = new_file(&data_path)?;
            raw::create(worker, &data_file, size, Preallocation::Off, control).await?;
            unlock(&data_file)?;
        }
        create::write_empty(worker, &file, header, create::Magic::Written).await?;
        unlock(&file)?;
        drop(file);
        let preallocation = match options.preallocation {
            // A raw data file has every cluster at its own place from the start.
            Preallocation::Off if options.data_file_raw => Preallocation::Metadata,
            other => other,
        };
        if preallocation == Preallocation::Off {
            return Ok(());
        }
        let open = OpenOptions {
            format: Some(Format::Qcow2),
            access: Access::ReadWrite,
            cache: options.cache,
            refs: RefPolicy::All,
            ..OpenOptions::default()
        };
        let image = Self::open(worker, path, &open).await?;
        let Driver::Qcow2(qcow2) = &image.0.driver else { return Ok(()) };
        qcow2.before_write(worker).await?;
        // A data file was cut to nothing above; a device can't be.
        let external = match qcow2.data().kind() {
            FileKind::BlockDevice => Content::Recycled,
            _ => Content::Fresh,
        };
        qcow2.preallocate(&image.0, worker, 0..size, preallocation, external, control).await?;
        image.close(worker).await
    }

    /// The file name it was opened by.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// Format.
    pub fn format(&self) -> Format {
        self.0.format()
    }

    /// Bytes of the virtual disk.
    pub fn virtual_size(&self) -> u64 {
        self.0.virtual_size()
    }

    /// Bytes of a cluster (for raw: 65536), the natural unit of work.
    pub fn cluster_size(&self) -> u64 {
        match &self.0.driver {
            Driver::Qcow2(qcow2) => qcow2.geometry.cluster_size(),
            Driver::Raw(_) => 65536,
        }
    }

    /// The backing image, if open.
    pub fn backing(&self) -> Option<Image> {
        self.0.backing.clone().map(Self)
    }

    /// What `info` says.
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
            file_length: file.len(),
            actual_size: file.disk_usage().map_err(|e| Error::from(e).on(&node.path))?,
            backing_file: None,
            backing_path: None,
            backing_format: None,
            extent_size_hint: file.extent_size_hint(),
            qcow2: None,
        };
        if let Driver::Qcow2(qcow2) = &node.driver {
            info.backing_file = qcow2.header.backing_file().map(text);
            info.backing_path = info.backing_file.as_deref().map(|name| refs::resolve(&node.path, name));
            info.backing_format = qcow2.header.backing_format().map(text);
            info.qcow2 = Some(qcow2_info(&qcow2.header, &qcow2.snapshots().entries, qcow2.bitmaps.info()));
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
            Driver::Raw(_) => ImageStats::default(),
        }
    }

    fn check_range(&self, offset: u64, len: u64) -> Result<()> {
        check_range(&self.0, offset, len)
    }

    /// Reads `bufs.len()` bytes at `offset`; the whole range must lie on the disk.
    ///
    /// # Errors
    /// The buffers' content is unspecified then.
    pub async fn read(&self, worker: &Worker, offset: u64, bufs: IoBufs) -> (Result<()>, IoBufs) {
        if let Err(error) = self.check_range(offset, bufs.len() as u64) {
            return (Err(error), bufs);
        }
        let (node, on) = (self.0.clone(), worker.clone());
        worker
            .spawn(async move {
                let _inside = match &node.driver {
                    Driver::Qcow2(qcow2) => Some(qcow2.begin_read(&on).await),
                    Driver::Raw(_) => None,
                };
                // The disk may have become shorter before the read began.
                if let Err(error) = check_range(&node, offset, bufs.len() as u64) {
                    return (Err(error), bufs);
                }
                chain::read(&node, &on, offset, bufs).await
            })
            .await
    }

    /// Begins a change of the range: waits while somebody is alone with the image, has a backup copy what it wants of
    /// the range, does what must be done before the first change of an opening, and notes the range in the bitmaps that
    /// record changes. The guard is held until the change is linked.
    async fn begin_change(&self, worker: &Worker, offset: u64, len: u64) -> Result<Inside<'_>> {
        let inside = self.0.changes.enter(worker.id()).await;
        // Again: the disk may have become shorter meanwhile.
        self.check_range(offset, len)?;
        self.before_change(worker, offset, len).await?;
        if let Driver::Qcow2(qcow2) = &self.0.driver {
            qcow2.before_write(worker).await?;
            qcow2.bitmaps.mark(offset, len);
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
        if let Err(error) = self.check_range(offset, bufs.len() as u64) {
            return (Err(error), bufs);
        }
        let (me, on) = (self.clone(), worker.clone());
        worker
            .spawn(async move {
                let inside = match me.begin_change(&on, offset, bufs.len() as u64).await {
                    Ok(inside) => inside,
                    Err(error) => return (Err(error), bufs),
                };
                let (result, bufs) = match &me.0.driver {
                    Driver::Qcow2(qcow2) => qcow2.write(&me.0, &on, offset, bufs).await,
                    Driver::Raw(raw) => raw::write(raw, &on, offset, bufs).await,
                };
                drop(inside);
                let result = match result {
                    Ok(()) => me.settle(&on, durability).await,
                    error => error,
                };
                (result, bufs)
            })
            .await
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
        if let Err(error) = self.check_range(offset, bufs.len() as u64) {
            return (Err(error), bufs);
        }
        let (me, on) = (self.clone(), worker.clone());
        worker
            .spawn(async move {
                let inside = match me.begin_change(&on, offset, bufs.len() as u64).await {
                    Ok(inside) => inside,
                    Err(error) => return (Err(error), bufs),
                };
                let (result, bufs) = match &me.0.driver {
                    Driver::Qcow2(qcow2) => qcow2.write_compressed(&me.0, &on, offset, bufs).await,
                    Driver::Raw(_) => {
                        let message = "a raw image can't hold compressed clusters";
                        (Err(Error::new(ErrorKind::Unsupported, message).on(me.path())), bufs)
                    }
                };
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
        self.check_range(offset, len)?;
        let (me, on) = (self.clone(), worker.clone());
        worker
            .spawn(async move {
                let inside = me.begin_change(&on, offset, len).await?;
                match &me.0.driver {
                    Driver::Qcow2(qcow2) => qcow2.write_zeroes(&me.0, &on, offset, len, mode).await?,
                    Driver::Raw(raw) => raw::write_zeroes(raw, &on, offset, len, mode).await?,
                }
                drop(inside);
                me.settle(&on, Durability::Volatile).await
            })
            .await
    }

    /// Gives a range up: whole clusters (subclusters) in it read as zero afterwards, the rest stays as it is.
    ///
    /// # Errors
    /// A part may read as zero then.
    pub async fn discard(&self, worker: &Worker, offset: u64, len: u64) -> Result<()> {
        self.check_range(offset, len)?;
        let (me, on) = (self.clone(), worker.clone());
        worker
            .spawn(async move {
                let inside = me.begin_change(&on, offset, len).await?;
                match &me.0.driver {
                    Driver::Qcow2(qcow2) => qcow2.discard(&me.0, &on, offset, len).await?,
                    Driver::Raw(raw) => raw::discard(raw, &on, offset, len).await?,
                }
                drop(inside);
                me.settle(&on, Durability::Volatile).await
            })
            .await
    }

    /// What a change must wait for: a backup that wants the range as it is.
    #[inline]
    async fn before_change(&self, worker: &Worker, offset: u64, len: u64) -> Result<()> {
        match self.0.before_change.get() {
            None => Ok(()),
            Some(copy) => {
                Box::pin(copy.protect(worker, offset..offset + len)).await.map_err(|e| e.on(self.path()))
            }
        }
    }

    /// Fails while a backup wants the disk as it is.
    pub(crate) fn check_nothing_is_copied(&self, change: &str) -> Result<()> {
        if self.0.before_change.get().is_none() {
            return Ok(());
        }
        let message = format!("a backup is under way: cancel it before the disk {change}");
        Err(Error::new(ErrorKind::Exists, message).on(self.path()))
    }

    /// What a completed change owes the cache mode or the caller.
    async fn settle(&self, worker: &Worker, durability: Durability) -> Result<()> {
        let writethrough = match &self.0.driver {
            Driver::Qcow2(qcow2) => qcow2.cache_mode.is_writethrough(),
            Driver::Raw(raw) => raw.cache_mode.is_writethrough(),
        };
        if durability == Durability::Durable || writethrough {
            Box::pin(self.flush(worker)).await
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
        self.tidy(Instant::now());
        match &self.0.driver {
            Driver::Qcow2(qcow2) if qcow2.writable => qcow2.flush(worker).await,
            Driver::Raw(raw) if raw.file.is_writable() => {
                worker.flush(&raw.file).await.map_err(|e| Error::from(e).on(&self.0.path))
            }
            Driver::Qcow2(_) | Driver::Raw(_) => Ok(()),
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
        let (me, on) = (self.clone(), worker.clone());
        worker
            .spawn(async move {
                let _inside = me.begin_change(&on, offset, source.len).await?;
                match &me.0.driver {
                    Driver::Qcow2(qcow2) => {
                        qcow2.transfer_from(&on, how, &source, offset..offset + source.len).await
                    }
                    Driver::Raw(raw) => match transfer(&on, how, &source, &raw.file, offset).await {
                        Ok(()) => Ok((source.len, None)),
                        Err(refusal) => Ok((0, Some(refusal))),
                    },
                }
            })
            .await
    }

    /// Changes the size of the virtual disk to `new_size` bytes (rounded up to 512). Requests that change the image
    /// and have begun end first; later ones wait until it is over. Reads and flushes go on.
    ///
    /// # Errors
    /// The size is as before, unless the last write of the header fails.
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
        let new_size = new_size.checked_next_multiple_of(512).ok_or_else(|| {
            Error::new(ErrorKind::InvalidArgument, "the image size is too large").on(&self.0.path)
        })?;
        let (me, on, control) = (self.clone(), worker.clone(), control.clone());
        worker
            .spawn(async move {
                let _alone = if sabotage::is(Fault::ResizeBesideWrites) {
                    None
                } else {
                    Some(me.0.changes.alone().await)
                };
                if new_size < me.virtual_size() {
                    me.check_nothing_is_copied("becomes smaller")?;
                }
                match &me.0.driver {
                    Driver::Qcow2(qcow2) => {
                        qcow2.before_write(&on).await?;
                        qcow2.resize(&me.0, &on, new_size, shrink, preallocation, &control).await
                    }
                    Driver::Raw(raw) => {
                        raw::resize(raw, &on, new_size, shrink, preallocation, &control).await?;
                        raw.size.store(new_size, Release);
                        Ok(())
                    }
                }
            })
            .await
            .map_err(|e| no_room(e, preallocation, self.format()))
    }

    /// The run of one kind that starts at `offset`, at most `len` bytes, through the whole chain; data is looked up
    /// in its file for holes.
    ///
    /// # Errors
    /// A table can't be read or is damaged.
    pub async fn extent(&self, worker: &Worker, offset: u64, len: u64) -> Result<Extent> {
        let _inside = match &self.0.driver {
            Driver::Qcow2(qcow2) => Some(qcow2.begin_read(worker).await),
            Driver::Raw(_) => None,
        };
        self.check_range(offset, len)?;
        chain::extent(&self.0, worker, offset, len).await
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

    /// Commits, returns what the windows did not use, releases the locks. The caller has no request under way.
    ///
    /// # Errors
    /// As [`Image::flush`].
    pub async fn close(&self, worker: &Worker) -> Result<()> {
        let result = match &self.0.driver {
            Driver::Qcow2(qcow2) => qcow2.close(worker).await,
            Driver::Raw(raw) => raw::close(raw, worker).await,
        };
        let mut node = Some(&self.0);
        while let Some(this) = node {
            if let Driver::Qcow2(qcow2) = &this.driver {
                let _ = qcow2.file.unlock();
            }
            let _ = this.data_file().unlock();
            node = this.backing.as_ref();
        }
        result
    }
}

fn unlock(file: &File) -> Result<()> {
    file.unlock().map_err(|e| Error::from(e).on(file.path()))
}

/// Sets what file systems know of a file and the image does not.
fn set_attributes(file: &File, options: &CreateOptions) -> Result<()> {
    const DEFAULT_HINT: u32 = 1 << 20;
    match (options.extent_size_hint, file.fs()) {
        // Where it can't be had, the image is as good as any.
        (None, _) => drop(file.set_extent_size_hint(DEFAULT_HINT)),
        (Some(0), fs) if fs != FsKind::Xfs => {}
        (Some(hint), _) => file.set_extent_size_hint(hint).map_err(|e| {
            if e.kind == IoErrorKind::Unsupported {
                let message = "there is no extent size hint but on XFS; leave it out";
                return Error::new(ErrorKind::Unsupported, message).on(file.path());
            }
            let message = format!(
                "XFS takes no extent size hint of {hint} bytes ({}); it must be a multiple of the file system's block \
                 size and fit into half an allocation group",
                e.reason()
            );
            Error::new(ErrorKind::InvalidArgument, message).on(file.path())
        })?,
    }
    // As QEMU has it, nocow asks for nothing where no file is copied on write.
    if options.nocow && file.fs() == FsKind::Btrfs {
        file.set_nocow().map_err(|e| {
            let message = format!("could not turn copy-on-write off ({}); leave nocow out", e.reason());
            Error::new(ErrorKind::Io, message).on(file.path())
        })?;
    }
    Ok(())
}
