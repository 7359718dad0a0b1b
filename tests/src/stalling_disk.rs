//! A disk that stands still when a test says so: a loop device over a file of a FUSE file system that the test itself serves.
//!
//! Its requests are asynchronous down to the file system, so whoever has sent one to the disk need not live to see it end.
//! Needs root.

use crate::device::LoopDevice;
use crate::program::{finish, is_root};
use crate::scratch::Scratch;
use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation,
    INodeNo, InitFlags, KernelConfig, LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry,
    ReplyLock, ReplyOpen, ReplyWrite, Request, Session, WriteFlags,
};
use std::ffi::OsStr;
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, UNIX_EPOCH};

const NAME: &str = "disk";
const FILE: INodeNo = INodeNo(2);
/// How long a test waits for what must come.
const LONGEST: Duration = Duration::from_secs(120);

/// A write that was taken and has not happened.
struct Held {
    offset: u64,
    data: Vec<u8>,
    reply: ReplyWrite,
}

#[derive(Default)]
struct State {
    content: Vec<u8>,
    /// How many of the next writes are held.
    to_hold: usize,
    held: Vec<Held>,
}

impl State {
    fn land(&mut self, offset: u64, data: &[u8]) {
        let start = offset as usize;
        self.content[start..start + data.len()].copy_from_slice(data);
    }
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// Signalled when a write is held.
    more: Condvar,
}

impl Shared {
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
        let mut disk = Self::mounted(bytes, None)?;
        disk.device = Some(LoopDevice::directly_over(&disk.file())?);
        Some(disk)
    }

    /// The file alone, without a device over it, on a file system that answers so who asks for a lock.
    ///
    /// # Panics
    /// If the scratch folder can't be written.
    pub fn without_locks(bytes: usize, answer: Errno) -> Option<Self> {
        Self::mounted(bytes, Some(answer))
    }

    /// The file that the disk's bytes are in.
    pub fn file(&self) -> PathBuf {
        self.scratch.file("mnt").join(NAME)
    }

    fn mounted(bytes: usize, locks: Option<Errno>) -> Option<Self> {
        if !is_root() {
            eprintln!("skipped: a file system of its own needs root");
            return None;
        }
        let scratch = Scratch::new("stalling");
        let place = scratch.file("mnt");
        std::fs::create_dir(&place).expect("scratch is writable");
        let shared = Arc::new(Shared::default());
        shared.lock().content = vec![0; bytes];
        let files = Files { shared: Arc::clone(&shared), locks };
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
        self.shared.lock().to_hold += 1;
    }

    /// Counts the writes that are held.
    pub fn held(&self) -> usize {
        self.shared.lock().held.len()
    }

    /// Waits until a write is held.
    ///
    /// # Panics
    /// If none comes within two minutes.
    pub fn wait_for_held(&self) {
        let state = self.shared.lock();
        let (_state, wait) = self
            .shared
            .more
            .wait_timeout_while(state, LONGEST, |state| state.held.is_empty())
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        assert!(!wait.timed_out(), "no write came");
    }

    /// Lets the writes that are held land, and holds no more.
    pub fn release(&self) {
        let mut state = self.shared.lock();
        state.to_hold = 0;
        for Held { offset, data, reply } in std::mem::take(&mut state.held) {
            state.land(offset, &data);
            reply.written(data.len() as u32);
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

/// The file system: a folder with one file.
struct Files {
    shared: Arc<Shared>,
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
            Some(found) => reply.attr(&LONGEST, &found),
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
        let state = self.shared.lock();
        let start = (offset as usize).min(state.content.len());
        let end = (start + size as usize).min(state.content.len());
        reply.data(&state.content[start..end]);
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
        let mut state = self.shared.lock();
        if let Some(left) = state.to_hold.checked_sub(1) {
            state.to_hold = left;
            state.held.push(Held { offset, data: data.to_vec(), reply });
            self.shared.more.notify_all();
        } else {
            state.land(offset, data);
            reply.written(data.len() as u32);
        }
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
        reply.ok();
    }

    fn fallocate(&self, _: &Request, _: INodeNo, _: FileHandle, _: u64, _: u64, _: i32, reply: ReplyEmpty) {
        reply.error(Errno::EOPNOTSUPP);
    }
}
