//! A file system of one file, which is its root.

use super::budget::{Budget, Share};
use super::extents::{Wanted, seek};
use crate::export::Export;
use crate::metrics::RequestKind;
use crate::pool::{PoolHandle, Seat};
use fuser::{
    BsdFileFlags, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, INodeNo, KernelConfig,
    LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite,
    Request, TimeOrNow, WriteFlags,
};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant, SystemTime};
use zebu::storage::IoBuf;
use zebu::{Access, Durability, ErrorKind, Format, Image, ZeroMode};

/// Bytes of one write of the kernel.
const MAX_WRITE: u32 = 1 << 20;
/// Bytes of data in flight; the kernel's further requests wait.
const MAX_BYTES: u64 = 64 << 20;
/// How long the kernel may believe what it was told of the file.
const TTL: Duration = Duration::from_secs(1);
/// fallocate's modes (fallocate(2)).
const KEEP_SIZE: i32 = 1;
const PUNCH_HOLE: i32 = 2;
const ZERO_RANGE: i32 = 16;
/// lseek's (lseek(2)).
const SEEK_DATA: i32 = 3;
const SEEK_HOLE: i32 = 4;

/// An image as a file.
pub(crate) struct ImageFile {
    export: Arc<Export>,
    pool: PoolHandle,
    threads: usize,
    next: AtomicUsize,
    budget: Budget,
    owner: (u32, u32),
    since: SystemTime,
}

impl ImageFile {
    pub(crate) fn new(export: &Arc<Export>, pool: &PoolHandle, threads: usize) -> Self {
        let owner = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
        Self {
            export: Arc::clone(export),
            pool: pool.clone(),
            threads,
            next: AtomicUsize::new(0),
            budget: Budget::new(MAX_BYTES),
            owner,
            since: SystemTime::now(),
        }
    }

    fn attributes(&self) -> FileAttr {
        let image = self.export.image();
        let size = image.virtual_size();
        let read_only = self.export.access() == Access::ReadOnly;
        FileAttr {
            ino: INodeNo::ROOT,
            size,
            blocks: allocated(image).min(size).div_ceil(512),
            atime: self.since,
            mtime: self.since,
            ctime: self.since,
            crtime: self.since,
            kind: FileType::RegularFile,
            perm: if read_only { 0o400 } else { 0o600 },
            nlink: 1,
            uid: self.owner.0,
            gid: self.owner.1,
            rdev: 0,
            blksize: u32::try_from(image.cluster_size()).unwrap_or(65536),
            flags: 0,
        }
    }

    /// Runs `work` on one of the workers. `bytes` of memory are taken for it.
    fn run<F: Future<Output = ()> + 'static>(
        &self,
        kind: RequestKind,
        bytes: u64,
        work: impl FnOnce(Job) -> F + Send + 'static,
    ) {
        let share = self.budget.take(bytes);
        let thread = self.next.fetch_add(1, Ordering::Relaxed) % self.threads;
        let (export, since) = (Arc::clone(&self.export), Instant::now());
        self.pool.spawn_on(thread, move |seat| {
            export.metrics().start(seat.thread);
            work(Job { export, seat, kind, since, _share: share })
        });
    }

    fn is_read_only(&self) -> bool {
        self.export.access() == Access::ReadOnly
    }
}

/// A request under way.
struct Job {
    export: Arc<Export>,
    seat: Seat,
    kind: RequestKind,
    since: Instant,
    _share: Share,
}

impl Job {
    fn image(&self) -> &Image {
        self.export.image()
    }

    /// Counts the request, and puts an error into the kernel's words.
    fn end<T>(&self, len: u64, result: zebu::Result<T>) -> Result<T, Errno> {
        self.export.metrics().end(self.seat.thread, self.kind, len, result.is_ok(), self.since.elapsed());
        result.map_err(|error| match error.kind() {
            ErrorKind::OutOfRange => Errno::ENOSPC,
            _ => Errno::from_i32(error.errno()),
        })
    }
}

/// Bytes of disk that the image takes.
fn allocated(image: &Image) -> u64 {
    let own = image.info().map_or(u64::MAX, |info| info.actual_size);
    // What comes from backing files counts as well; programs only look whether it is less than the size.
    match (image.format(), image.backing()) {
        (Format::Raw, _) | (Format::Qcow2, None) => own,
        (Format::Qcow2, Some(backing)) => {
            own.saturating_add(backing.info().map_or(u64::MAX, |i| i.actual_size))
        }
    }
}

impl Filesystem for ImageFile {
    fn init(&mut self, _req: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // Smaller limits of the kernel do as well.
        let _ = config.set_max_write(MAX_WRITE);
        let _ = config.set_max_background(256);
        Ok(())
    }

    fn getattr(&self, _req: &Request, _ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&TTL, &self.attributes());
    }

    fn setattr(
        &self,
        _req: &Request,
        _ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        _atime: Option<TimeOrNow>,
        _mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        _fh: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        // A disk keeps its size, and its owner; times come with every write and mean nothing.
        let changes_size = size.is_some_and(|size| size != self.export.image().virtual_size());
        if changes_size || mode.is_some() || uid.is_some() || gid.is_some() {
            reply.error(Errno::EPERM);
        } else {
            reply.attr(&TTL, &self.attributes());
        }
    }

    fn open(&self, _req: &Request, _ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        // Access mode: the lowest two bits.
        if self.is_read_only() && flags.0 & 3 != 0 {
            reply.error(Errno::EROFS);
            return;
        }
        // The page cache holds the image already, or is not wanted (O_DIRECT); other clients write, too.
        let flags = FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES;
        reply.opened(FileHandle(0), flags);
    }

    fn statfs(&self, _req: &Request, _ino: INodeNo, reply: ReplyStatfs) {
        let blocks = self.export.image().virtual_size().div_ceil(4096);
        reply.statfs(blocks, 0, 0, 1, 0, 4096, 255, 4096);
    }

    fn read(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let end = self.export.image().virtual_size();
        let len = u64::from(size).min(end.saturating_sub(offset));
        if len == 0 {
            reply.data(&[]);
            return;
        }
        self.run(RequestKind::Read, len, move |job| async move {
            let bufs = job.seat.worker.buffer(len as usize).into();
            let (result, bufs) = job.image().read(&job.seat.worker, offset, bufs).await;
            match (job.end(len, result), &bufs.0[..]) {
                (Ok(()), [buf]) => reply.data(buf.as_slice()),
                (Ok(()), parts) => {
                    let parts: Vec<&[u8]> = parts.iter().map(IoBuf::as_slice).collect();
                    reply.data(&parts.concat());
                }
                (Err(errno), _) => reply.error(errno),
            }
        });
    }

    fn write(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        if self.is_read_only() {
            reply.error(Errno::EROFS);
            return;
        }
        let len = data.len() as u64;
        let data = IoBuf::copy_of(data);
        self.run(RequestKind::Write, len, move |job| async move {
            let result =
                job.image().write(&job.seat.worker, offset, data.into(), Durability::Volatile).await.0;
            match job.end(len, result) {
                Ok(()) => reply.written(len as u32),
                Err(errno) => reply.error(errno),
            }
        });
    }

    fn flush(&self, _req: &Request, _ino: INodeNo, _fh: FileHandle, _owner: LockOwner, reply: ReplyEmpty) {
        // This is close(2), which makes nothing durable.
        reply.ok();
    }

    fn fsync(&self, _req: &Request, _ino: INodeNo, _fh: FileHandle, _datasync: bool, reply: ReplyEmpty) {
        self.run(RequestKind::Flush, 0, move |job| async move {
            let result = job.image().flush(&job.seat.worker).await;
            match job.end(0, result) {
                Ok(()) => reply.ok(),
                Err(errno) => reply.error(errno),
            }
        });
    }

    fn fallocate(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let size = self.export.image().virtual_size();
        let is_within = offset.checked_add(length).is_some_and(|end| end <= size);
        let (kind, zero_mode) = match mode {
            _ if self.is_read_only() => return reply.error(Errno::EROFS),
            m if m == PUNCH_HOLE | KEEP_SIZE => (RequestKind::Discard, ZeroMode::Unmap),
            m if m & !KEEP_SIZE == ZERO_RANGE => (RequestKind::WriteZeroes, ZeroMode::Keep),
            // To set space aside for data that is there already is nothing that an image can do.
            _ => return reply.error(Errno::EOPNOTSUPP),
        };
        // Holes past the end are there already; a disk does not grow.
        let length = match (is_within, mode & KEEP_SIZE != 0) {
            (true, _) => length,
            (false, true) => length.min(size.saturating_sub(offset)),
            (false, false) => return reply.error(Errno::ENOSPC),
        };
        if length == 0 {
            return reply.ok();
        }
        self.run(kind, 0, move |job| async move {
            let result = job.image().write_zeroes(&job.seat.worker, offset, length, zero_mode).await;
            match job.end(length, result) {
                Ok(()) => reply.ok(),
                Err(errno) => reply.error(errno),
            }
        });
    }

    fn lseek(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        let wanted = match whence {
            SEEK_DATA => Wanted::Data,
            SEEK_HOLE => Wanted::Hole,
            _ => return reply.error(Errno::EINVAL),
        };
        let Ok(offset) = u64::try_from(offset) else { return reply.error(Errno::ENXIO) };
        self.run(RequestKind::Other, 0, move |job| async move {
            let result = seek(job.image(), &job.seat.worker, offset, wanted).await;
            match job.end(0, result) {
                Ok(Some(at)) => reply.offset(i64::try_from(at).unwrap_or(i64::MAX)),
                Ok(None) => reply.error(Errno::ENXIO),
                Err(errno) => reply.error(errno),
            }
        });
    }
}
