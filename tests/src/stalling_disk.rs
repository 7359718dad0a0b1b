//! A disk that stands still when a test says so: a loop device over a file of a FUSE file system that the test itself serves.
//!
//! Its requests are asynchronous down to the file system, so whoever has sent one to the disk need not live to see it end.
//! Needs root.

use crate::device::LoopDevice;
use crate::patience::LONGEST;
use crate::program::{finish, is_root};
use crate::scratch::Scratch;
use fuser::{
    BackgroundSession, BsdFileFlags, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags,
    Generation, INodeNo, InitFlags, KernelConfig, LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty,
    ReplyEntry, ReplyLock, ReplyOpen, ReplyWrite, Request, Session, TimeOrNow, WriteFlags,
};
use std::ffi::OsStr;
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const NAME: &str = "disk";
const FILE: INodeNo = INodeNo(2);

/// A kind of operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Reads.
    Read,
    /// Writes.
    Write,
    /// Syncs.
    Sync,
    /// Changes of ranges by the file system: holes and zeroes.
    Punch,
}

/// An operation that was taken and has not happened.
enum Held {
    Read { offset: u64, size: u32, reply: ReplyData },
    Write { offset: u64, data: Vec<u8>, reply: ReplyWrite },
    Sync(ReplyEmpty),
    Punch { offset: u64, len: u64, mode: i32, reply: ReplyEmpty },
}

impl Held {
    fn kind(&self) -> Kind {
        match self {
            Self::Read { .. } => Kind::Read,
            Self::Write { .. } => Kind::Write,
            Self::Sync(_) => Kind::Sync,
            Self::Punch { .. } => Kind::Punch,
        }
    }
}

/// Operations that are to be held.
#[derive(Debug, Clone, Copy, Default)]
enum Hold {
    #[default]
    Nothing,
    /// So many writes.
    Writes(usize),
    /// The first one of a kind.
    First(Kind),
    /// All.
    All,
}

#[derive(Default)]
struct State {
    content: Vec<u8>,
    hold: Hold,
    held: Vec<Held>,
}

impl State {
    fn is_held(&mut self, kind: Kind) -> bool {
        match self.hold {
            Hold::Writes(left) if kind == Kind::Write => {
                self.hold = if left > 1 { Hold::Writes(left - 1) } else { Hold::Nothing };
                true
            }
            Hold::First(wanted) if kind == wanted => {
                self.hold = Hold::Nothing;
                true
            }
            Hold::All => true,
            _ => false,
        }
    }

    /// Does an operation.
    fn land(&mut self, operation: Held) {
        match operation {
            Held::Read { offset, size, reply } => {
                let start = (offset as usize).min(self.content.len());
                let end = (start + size as usize).min(self.content.len());
                reply.data(&self.content[start..end]);
            }
            Held::Write { offset, data, reply } => {
                let start = offset as usize;
                self.reach(start + data.len());
                self.content[start..start + data.len()].copy_from_slice(&data);
                reply.written(data.len() as u32);
            }
            Held::Sync(reply) => reply.ok(),
            Held::Punch { offset, len, mode, reply } => {
                let end = (offset + len) as usize;
                if mode & libc::FALLOC_FL_KEEP_SIZE == 0 {
                    self.reach(end);
                }
                if mode & (libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_ZERO_RANGE) != 0 {
                    let end = end.min(self.content.len());
                    self.content[(offset as usize).min(end)..end].fill(0);
                }
                reply.ok();
            }
        }
    }

    /// Makes the file at least so long.
    fn reach(&mut self, len: usize) {
        if self.content.len() < len {
            self.content.resize(len, 0);
        }
    }
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// Signalled when a write is held.
    more: Condvar,
}

impl Shared {
    /// Does an operation, or holds it.
    fn take(&self, operation: Held) {
        let mut state = self.lock();
        if state.is_held(operation.kind()) {
            state.held.push(operation);
            self.more.notify_all();
        } else {
            state.land(operation);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// The disk; gone when dropped.
pub struct StallingDisk {
    // Dropped in this order.
    device: Option<LoopDevice>,
    session: Option<BackgroundSession>,
    shared: Arc<Shared>,
    scratch: Scratch,
}

impl fmt::Debug for StallingDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StallingDisk").field("device", &self.device).finish_non_exhaustive()
    }
}

impl StallingDisk {
    /// One of `bytes` zeroes; `None` where it can't be had, with a note.
    ///
    /// # Panics
    /// If the scratch folder can't be written.
    pub fn new(bytes: usize) -> Option<Self> {
        let mut disk = Self::mounted(bytes, None, Changes::None)?;
        disk.device = Some(LoopDevice::directly_over(&disk.file())?);
        Some(disk)
    }

    /// The file alone, without a device over it, on a file system that answers so who asks for a lock.
    ///
    /// # Panics
    /// If the scratch folder can't be written.
    pub fn without_locks(bytes: usize, answer: Errno) -> Option<Self> {
        Self::mounted(bytes, Some(answer), Changes::None)
    }

    /// The file alone, which may grow.
    ///
    /// # Panics
    /// If the scratch folder can't be written.
    pub fn file_alone() -> Option<Self> {
        Self::mounted(0, None, Changes::OfRanges)
    }

    /// The file that the disk's bytes are in.
    pub fn file(&self) -> PathBuf {
        self.scratch.file("mnt").join(NAME)
    }

    fn mounted(bytes: usize, locks: Option<Errno>, changes: Changes) -> Option<Self> {
        if !is_root() {
            eprintln!("skipped: a file system of its own needs root");
            return None;
        }
        let scratch = Scratch::new("stalling");
        let place = scratch.file("mnt");
        std::fs::create_dir(&place).expect("scratch is writable");
        let shared = Arc::new(Shared::default());
        shared.lock().content = vec![0; bytes];
        let files = Files { shared: Arc::clone(&shared), changes, locks };
        let session = match Session::new(files, &place, &Config::default()).and_then(Session::spawn) {
            Ok(session) => session,
            Err(error) => {
                eprintln!("skipped: no file system of its own: {error}");
                return None;
            }
        };
        Some(Self { device: None, session: Some(session), shared, scratch })
    }

    /// The name of the device.
    pub fn name(&self) -> &str {
        self.device.as_ref().map_or("", LoopDevice::name)
    }

    /// A folder for other files.
    pub fn dir(&self) -> &std::path::Path {
        self.scratch.path()
    }

    /// Holds the next write that comes, until [`StallingDisk::release`].
    pub fn hold_next_write(&self) {
        let mut state = self.shared.lock();
        state.hold = match state.hold {
            Hold::Writes(more) => Hold::Writes(more + 1),
            _ => Hold::Writes(1),
        };
    }

    /// Holds the next operation of a kind that comes, or all operations if none is named, until [`StallingDisk::release`].
    pub fn hold(&self, kind: Option<Kind>) {
        self.shared.lock().hold = kind.map_or(Hold::All, Hold::First);
    }

    /// Counts the operations that are held.
    pub fn held(&self) -> usize {
        self.shared.lock().held.len()
    }

    /// Counts the operations of a kind that are held.
    pub fn held_of(&self, kind: Kind) -> usize {
        self.shared.lock().held.iter().filter(|held| held.kind() == kind).count()
    }

    /// Waits until an operation is held.
    ///
    /// # Panics
    /// If none ever comes.
    pub fn wait_for_held(&self) {
        let state = self.shared.lock();
        let (_state, wait) = self
            .shared
            .more
            .wait_timeout_while(state, LONGEST, |state| state.held.is_empty())
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        assert!(!wait.timed_out(), "no write came");
    }

    /// Lets what is held happen, and holds no more.
    pub fn release(&self) {
        let mut state = self.shared.lock();
        state.hold = Hold::Nothing;
        for operation in std::mem::take(&mut state.held) {
            state.land(operation);
        }
    }
}

impl Drop for StallingDisk {
    fn drop(&mut self) {
        self.release();
        self.device = None;
        // The kernel may have the device still.
        let mut umount = Command::new("umount");
        finish({
            umount.arg("--lazy").arg(self.scratch.file("mnt"));
            umount
        });
        drop(self.session.take());
    }
}

/// Whether the file system makes holes and zeroes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Changes {
    OfRanges,
    None,
}

/// The file system: a folder with one file.
struct Files {
    shared: Arc<Shared>,
    changes: Changes,
    /// The answer to who asks for a lock; without one, the kernel has locks.
    locks: Option<Errno>,
}

impl Files {
    fn attributes(&self, ino: INodeNo) -> Option<FileAttr> {
        let size = self.shared.lock().content.len() as u64;
        let (kind, perm, size) = match ino {
            INodeNo::ROOT => (FileType::Directory, 0o700, 0),
            FILE => (FileType::RegularFile, 0o600, size),
            _ => return None,
        };
        Some(FileAttr {
            ino,
            size,
            blocks: size / 512,
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind,
            perm,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        })
    }
}

impl Filesystem for Files {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // Without it a request would hold up those behind it.
        let _ = config.add_capabilities(InitFlags::FUSE_ASYNC_DIO);
        if self.locks.is_some() {
            let _ = config.add_capabilities(InitFlags::FUSE_POSIX_LOCKS);
        }
        Ok(())
    }

    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match self.attributes(FILE).filter(|_| name == NAME) {
            Some(found) => reply.entry(&LONGEST, &found, Generation(0)),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match self.attributes(ino) {
            Some(found) => reply.attr(&Duration::ZERO, &found),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn setattr(
        &self,
        _: &Request,
        ino: INodeNo,
        _: Option<u32>,
        _: Option<u32>,
        _: Option<u32>,
        size: Option<u64>,
        _: Option<TimeOrNow>,
        _: Option<TimeOrNow>,
        _: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        if let Some(size) = size.filter(|_| ino == FILE) {
            self.shared.lock().content.resize(size as usize, 0);
        }
        match self.attributes(ino) {
            Some(found) => reply.attr(&Duration::ZERO, &found),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(0), FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES);
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        self.shared.take(Held::Read { offset, size, reply });
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        self.shared.take(Held::Write { offset, data: data.to_vec(), reply });
    }

    fn getlk(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: LockOwner,
        _: u64,
        _: u64,
        _: i32,
        _: u32,
        reply: ReplyLock,
    ) {
        reply.error(self.locks.unwrap_or(Errno::ENOSYS));
    }

    fn setlk(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: LockOwner,
        _: u64,
        _: u64,
        _: i32,
        _: u32,
        _: bool,
        reply: ReplyEmpty,
    ) {
        reply.error(self.locks.unwrap_or(Errno::ENOSYS));
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        self.shared.take(Held::Sync(reply));
    }

    fn fallocate(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        len: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        match self.changes {
            Changes::OfRanges => self.shared.take(Held::Punch { offset, len, mode, reply }),
            Changes::None => reply.error(Errno::EOPNOTSUPP),
        }
    }
}
