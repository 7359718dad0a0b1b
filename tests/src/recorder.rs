//! A real file that remembers everything that programs do to it, in order, and can fail on request: what the disk could
//! hold after a power failure or a kill is then made from the record. By FUSE, so that any program can be below it.

use fuser::{
    BackgroundSession, BsdFileFlags, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags,
    INodeNo, LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyLseek, ReplyOpen,
    ReplyStatfs, ReplyWrite, Request, Session, TimeOrNow, WriteFlags,
};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

/// The kernel may believe nothing that it was told of the file for longer: its size changes.
const TTL: Duration = Duration::ZERO;
/// fallocate's modes (fallocate(2)).
const KEEP_SIZE: i32 = 1;
const PUNCH_HOLE: i32 = 2;
const ZERO_RANGE: i32 = 16;
const SECTOR: usize = 512;

/// One thing that was done to the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Bytes were written.
    Write {
        /// Where.
        offset: u64,
        /// The bytes written.
        data: Vec<u8>,
    },
    /// The file got another length.
    Length(u64),
    /// Everything before was made durable. Syncs take no time here.
    Sync,
}

/// The operation that fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failing {
    /// Reads that touch the byte at this offset, with EIO.
    ReadsAt(u64),
    /// Writes that touch the byte at this offset, with EIO.
    WritesAt(u64),
}

#[derive(Debug, Default)]
struct Tape {
    start: Vec<u8>,
    bytes: Vec<u8>,
    events: Vec<Event>,
    failing: Option<Failing>,
    /// Requests that failed on request.
    failed: u64,
    alignment: u64,
}

/// A recorded file at a path. Gone when dropped.
pub struct Recorder {
    session: Option<BackgroundSession>,
    tape: Arc<Mutex<Tape>>,
    path: PathBuf,
}

/// Whether files can be recorded here; says so if not.
pub fn can_record() -> bool {
    let can = crate::program::is_root()
        && std::fs::OpenOptions::new().read(true).write(true).open("/dev/fuse").is_ok();
    if !can {
        eprintln!("skipped: recording needs root and /dev/fuse");
    }
    can
}

impl Recorder {
    /// Puts a recorded file with the content of `path` over it. Direct I/O is accepted in multiples of `alignment` only.
    ///
    /// # Panics
    /// If that can't be done.
    pub fn over(path: &Path, alignment: u64) -> Self {
        let start = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let tape = Tape { bytes: start.clone(), start, alignment, ..Tape::default() };
        let tape = Arc::new(Mutex::new(tape));
        let mut config = Config::default();
        config.mount_options = vec![MountOption::FSName("zebu-recorder".to_owned()), MountOption::RW];
        config.n_threads = Some(1);
        let session = Session::new(Layer { tape: Arc::clone(&tape) }, path, &config)
            .and_then(Session::spawn)
            .unwrap_or_else(|e| panic!("mount over {}: {e}", path.display()));
        Self { session: Some(session), tape, path: path.to_owned() }
    }

    fn tape(&self) -> MutexGuard<'_, Tape> {
        self.tape.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets requests fail from now on.
    pub fn fail(&self, failing: Option<Failing>) {
        self.tape().failing = failing;
    }

    /// Requests that failed on request so far.
    pub fn failed(&self) -> u64 {
        self.tape().failed
    }

    /// Events so far.
    pub fn position(&self) -> usize {
        self.tape().events.len()
    }

    /// The recording so far.
    pub fn recording(&self) -> Recording {
        let tape = self.tape();
        Recording { start: tape.start.clone(), events: tape.events.clone() }
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        // Its thread is not waited for: it serves on while a mount namespace that was made meanwhile, as of a container, has a copy.
        drop(self.session.take());
        let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        if mounts.lines().any(|mount| mount.split(' ').nth(1) == self.path.to_str()) {
            eprintln!("note: the mount {} stays behind", self.path.display());
        }
    }
}

/// The events of a file from a beginning on.
#[derive(Debug, Clone)]
pub struct Recording {
    start: Vec<u8>,
    events: Vec<Event>,
}

impl Recording {
    /// How many events there are.
    pub fn len(&self) -> usize {
        self.events.len()
    }

    /// Whether nothing happened.
    pub fn is_empty(&self) -> bool {
        self.events.is_empty()
    }

    /// The writes in order: the offset of each, and its bytes.
    pub fn writes(&self) -> impl Iterator<Item = (u64, &[u8])> {
        self.events.iter().filter_map(|event| match event {
            Event::Write { offset, data } => Some((*offset, data.as_slice())),
            Event::Length(_) | Event::Sync => None,
        })
    }

    /// Where the writes began, each place once.
    pub fn written(&self) -> Vec<u64> {
        let mut places: Vec<u64> = self
            .events
            .iter()
            .filter_map(|event| match event {
                Event::Write { offset, .. } => Some(*offset),
                Event::Length(_) | Event::Sync => None,
            })
            .collect();
        places.sort_unstable();
        places.dedup();
        places
    }

    /// The content of the file when a process is killed before the event `at`: all that was done, in order.
    pub fn killed(&self, at: usize) -> Vec<u8> {
        self.made(at, |_, _| true)
    }

    /// One state that a power failure before the event `at` may leave. What came before the last sync is there; of the
    /// rest, `lands` says of each sector of 512 bytes whether it is, by the event's number and the sector's. Lengths
    /// are as if each landed: a journal keeps their order.
    pub fn power_failed(&self, at: usize, lands: impl FnMut(usize, u64) -> bool) -> Vec<u8> {
        self.made(at, lands)
    }

    fn made(&self, at: usize, mut lands: impl FnMut(usize, u64) -> bool) -> Vec<u8> {
        let synced = self.events[..at].iter().rposition(|event| *event == Event::Sync).unwrap_or(0);
        let mut bytes = self.start.clone();
        for (number, event) in self.events[..at].iter().enumerate() {
            match event {
                Event::Sync => {}
                Event::Length(len) => bytes.resize(*len as usize, 0),
                Event::Write { offset, data } => {
                    let (start, end) = (*offset as usize, *offset as usize + data.len());
                    if bytes.len() < end {
                        bytes.resize(end, 0);
                    }
                    let mut from = start;
                    while from < end {
                        let sector = from / SECTOR;
                        let to = end.min((sector + 1) * SECTOR);
                        if number < synced || lands(number, sector as u64) {
                            bytes[from..to].copy_from_slice(&data[from - start..to - start]);
                        }
                        from = to;
                    }
                }
            }
        }
        bytes
    }
}

struct Layer {
    tape: Arc<Mutex<Tape>>,
}

impl Layer {
    fn tape(&self) -> MutexGuard<'_, Tape> {
        self.tape.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn attributes(&self) -> FileAttr {
        let size = self.tape().bytes.len() as u64;
        let time = SystemTime::UNIX_EPOCH;
        FileAttr {
            ino: INodeNo::ROOT,
            size,
            blocks: size.div_ceil(512),
            atime: time,
            mtime: time,
            ctime: time,
            crtime: time,
            kind: FileType::RegularFile,
            perm: 0o644,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        }
    }
}

impl Tape {
    fn fails(&mut self, fails: bool) -> bool {
        self.failed += u64::from(fails);
        fails
    }

    fn write(&mut self, offset: u64, data: Vec<u8>) {
        let end = offset as usize + data.len();
        if self.bytes.len() < end {
            self.bytes.resize(end, 0);
        }
        self.bytes[offset as usize..end].copy_from_slice(&data);
        self.events.push(Event::Write { offset, data });
    }
}

/// Whether the file was opened with O_DIRECT.
fn is_direct(flags: OpenFlags) -> bool {
    flags.0 & libc::O_DIRECT != 0
}

impl Filesystem for Layer {
    fn getattr(&self, _: &Request, _: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&TTL, &self.attributes());
    }

    fn setattr(
        &self,
        _: &Request,
        _: INodeNo,
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
        if let Some(size) = size {
            let mut tape = self.tape();
            tape.bytes.resize(size as usize, 0);
            tape.events.push(Event::Length(size));
        }
        reply.attr(&TTL, &self.attributes());
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        // Past the page cache: every write of a program is seen when the program makes it.
        reply.opened(FileHandle(0), FopenFlags::FOPEN_DIRECT_IO);
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        reply.statfs(1 << 30, 1 << 29, 1 << 29, 1, 0, 4096, 255, 4096);
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        flags: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let mut tape = self.tape();
        let wanted = offset..offset + u64::from(size);
        if is_direct(flags) && !(offset | u64::from(size)).is_multiple_of(tape.alignment) {
            return reply.error(Errno::EINVAL);
        }
        let fails = matches!(tape.failing, Some(Failing::ReadsAt(at)) if wanted.contains(&at));
        if tape.fails(fails) {
            return reply.error(Errno::EIO);
        }
        let len = tape.bytes.len();
        reply.data(&tape.bytes[(offset as usize).min(len)..(wanted.end as usize).min(len)]);
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        flags: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let mut tape = self.tape();
        if is_direct(flags) && !(offset | data.len() as u64).is_multiple_of(tape.alignment) {
            return reply.error(Errno::EINVAL);
        }
        let end = offset + data.len() as u64;
        let fails = matches!(tape.failing, Some(Failing::WritesAt(at)) if (offset..end).contains(&at));
        if tape.fails(fails) {
            return reply.error(Errno::EIO);
        }
        tape.write(offset, data.to_vec());
        reply.written(data.len() as u32);
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        // This is close(2), which makes nothing durable.
        reply.ok();
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        self.tape().events.push(Event::Sync);
        reply.ok();
    }

    fn fallocate(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let mut tape = self.tape();
        let (len, end) = (tape.bytes.len() as u64, offset + length);
        if mode & !KEEP_SIZE == 0 || mode & !KEEP_SIZE == ZERO_RANGE || mode == PUNCH_HOLE | KEEP_SIZE {
            if mode & KEEP_SIZE == 0 && end > len {
                tape.bytes.resize(end as usize, 0);
                tape.events.push(Event::Length(end));
            }
            let end = end.min(tape.bytes.len() as u64);
            if mode & !KEEP_SIZE != 0 && offset < end {
                tape.write(offset, vec![0; (end - offset) as usize]);
            }
            reply.ok();
        } else {
            reply.error(Errno::EOPNOTSUPP);
        }
    }

    fn lseek(&self, _: &Request, _: INodeNo, _: FileHandle, _: i64, _: i32, reply: ReplyLseek) {
        reply.error(Errno::ENOSYS);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_are_made_of_what_was_synced_and_what_landed() {
        let write = |offset: u64, byte: u8| Event::Write { offset, data: vec![byte; 1024] };
        let events = vec![write(0, 1), Event::Sync, write(512, 2), Event::Length(4096), write(2048, 3)];
        let recording = Recording { start: vec![9; 1024], events };
        assert_eq!(recording.killed(0), vec![9; 1024]);
        let all = recording.killed(5);
        assert_eq!((all.len(), all[0], all[512], all[1024], all[1536], all[2048]), (4096, 1, 2, 2, 0, 3));
        let none = recording.power_failed(5, |_, _| false);
        assert_eq!((none.len(), none[0], none[512], none[1024], none[2048]), (4096, 1, 1, 0, 0));
        let torn = recording.power_failed(5, |event, sector| event == 2 && sector == 2);
        assert_eq!((torn[512], torn[1024], torn[2048]), (1, 2, 0));
    }
}
