//! QEMU's image locks, so that a running QEMU and this program exclude each other.
//!
//! Locks are open-file-description locks of one byte each, always shared ones (fcntl(2), `F_OFD_SETLK`). Byte
//! `100 + i` is locked by whoever uses the image in way `i`, byte `200 + i` by whoever does not let others do so.
//! To find a conflict, one asks (`F_OFD_GETLK`) whether an *exclusive* lock would be refused: on `200 + i` for each
//! way of one's own, on `100 + i` for each way that one denies others. One takes one's locks first and asks then, so
//! of two openers at the same time at least one sees the other.
//!
//! The locks belong to an open file of their own, which no ring ever has: the kernel takes a ring apart some time after
//! its process has ended, 50 to 200 ms when it was killed with I/O in flight, and keeps the files in it until then. An
//! open file that only the process has ends with the process, and so do its locks. It is opened by the descriptor, not
//! by the name, which may lead elsewhere by now. Where it can't be had (a sandbox, no `/proc`, no right to read), or
//! where who handed the descriptor over has locked it already, the locks are those of the file itself.

use crate::error::{IoError, IoErrorKind, Op};
use crate::file_types::LockMode;
use crate::fork_mark::ForkMark;
use crate::sync::Mutex;
use rustix::fs::{CWD, Mode, OFlags};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Ways to use an image, by bit, with QEMU's names. (Bit 2 is "write unchanged", which nothing here uses.)
const WAYS: [(u8, &str); 3] = [(0, "consistent read"), (1, "write"), (3, "resize")];

const CONSISTENT_READ: u8 = 1 << 0;
const WRITE: u8 = 1 << 1;
const RESIZE: u8 = 1 << 3;

/// First byte of the locks of ways in use.
const USED: i64 = 100;
/// First byte of the locks of ways denied to others.
const DENIED: i64 = 200;

/// How long an opener tries: another may be about to close, and where a lock belongs to a file that is in a ring, it
/// outlives a process that was killed for up to 200 ms.
const PATIENCE: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(20);

/// Bits of ways in use and of ways denied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Ways {
    used: u8,
    denied: u8,
}

impl Ways {
    fn of(mode: LockMode) -> Self {
        match mode {
            LockMode::None => Self::default(),
            LockMode::Inspect => Self { used: 0, denied: WRITE | RESIZE },
            LockMode::Read => Self { used: CONSISTENT_READ, denied: WRITE | RESIZE },
            LockMode::Write => Self { used: CONSISTENT_READ | WRITE | RESIZE, denied: WRITE | RESIZE },
        }
    }
    fn without(self, other: Self) -> Self {
        Self { used: self.used & !other.used, denied: self.denied & !other.denied }
    }
    /// The bytes to lock.
    fn bytes(self) -> impl Iterator<Item = i64> {
        let of = |base: i64, bits: u8| (0..8).filter(move |i| bits & (1 << i) != 0).map(move |i| base + i);
        of(USED, self.used).chain(of(DENIED, self.denied))
    }
}

/// Why a lock was not got.
enum Refusal {
    /// Somebody uses the image in a way that excludes this; in QEMU's words.
    Conflict(String),
    Os(i32),
}

/// The locks held on one file.
pub(crate) struct FileLock {
    held: Mutex<Ways>,
    /// The open file that the locks belong to, from the first lock on; `None`: the file itself.
    own: OnceLock<Option<OwnedFd>>,
    /// A child of fork(2) shares the open file, and so the locks, with its parent, whose they are.
    made_in: ForkMark,
}

impl Default for FileLock {
    fn default() -> Self {
        Self { held: Mutex::default(), own: OnceLock::new(), made_in: ForkMark::here() }
    }
}

impl FileLock {
    /// The descriptor of the open file that the locks belong to, if that is another one.
    pub(crate) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.own.get()?.as_ref().map(AsFd::as_fd)
    }

    /// Changes to the locks of `mode`; if that fails, the old ones are still held. Tries for up to a second.
    pub(crate) fn set(&self, file: BorrowedFd<'_>, path: &Path, mode: LockMode) -> Result<(), IoError> {
        let mut held = self.held.lock();
        let wanted = Ways::of(mode);
        if wanted == *held {
            return Ok(());
        }
        let own =
            self.own.get_or_init(|| open_again(file).filter(|own| !is_locked_itself(file, own.as_fd())));
        let fd = own.as_ref().map_or(file, AsFd::as_fd);
        let start = Instant::now();
        loop {
            match change(fd, *held, wanted) {
                Ok(()) => {
                    *held = wanted;
                    return Ok(());
                }
                Err(Refusal::Os(errno)) => {
                    return Err(IoError::of_file(Op::Lock, IoErrorKind::Os(errno), path));
                }
                Err(Refusal::Conflict(what)) if start.elapsed() >= PATIENCE => {
                    let hint = format!("{what}: Is another process using the image [{}]?", path.display());
                    return Err(IoError::of_file(Op::Lock, IoErrorKind::Locked, path).with_detail(hint));
                }
                Err(Refusal::Conflict(_)) => std::thread::sleep(PAUSE),
            }
        }
    }

    /// Gives up all locks; in a child of the process that has them, nothing.
    pub(crate) fn release(&self, file: BorrowedFd<'_>) -> Result<(), i32> {
        if !self.made_in.is_here() {
            return Ok(());
        }
        let mut held = self.held.lock();
        let fd = self.own.get().and_then(Option::as_ref).map_or(file, AsFd::as_fd);
        let ways = std::mem::take(&mut *held);
        ways.bytes().try_for_each(|byte| set_byte(fd, byte, libc::F_UNLCK))
    }
}

/// Another open file of the same file. For reading is enough: all locks are shared ones.
fn open_again(file: BorrowedFd<'_>) -> Option<OwnedFd> {
    let link = format!("/proc/thread-self/fd/{}", file.as_raw_fd());
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
    let own = rustix::fs::openat(CWD, link, flags, Mode::empty()).ok()?;
    let (file, same) = (rustix::fs::fstat(file).ok()?, rustix::fs::fstat(&own).ok()?);
    ((file.st_dev, file.st_ino) == (same.st_dev, same.st_ino)).then_some(own)
}

/// Whether the file itself, by whoever opened it, has locks that would keep another open file out.
fn is_locked_itself(file: BorrowedFd<'_>, own: BorrowedFd<'_>) -> bool {
    // A lock that others see and the file itself does not is its own.
    let is_its_own = |byte| is_locked(own, byte) == Ok(true) && is_locked(file, byte) == Ok(false);
    WAYS.iter().any(|&(bit, _)| is_its_own(USED + i64::from(bit)) || is_its_own(DENIED + i64::from(bit)))
}

fn change(fd: BorrowedFd<'_>, held: Ways, wanted: Ways) -> Result<(), Refusal> {
    let new = wanted.without(held);
    let taken = new
        .bytes()
        .try_for_each(|byte| set_byte(fd, byte, libc::F_RDLCK))
        .map_err(|errno| match errno {
            // Only an exclusive lock can refuse a shared one; QEMU takes none, but others may.
            libc::EAGAIN | libc::EACCES => Refusal::Conflict("Failed to lock a byte".to_owned()),
            errno => Refusal::Os(errno),
        })
        .and_then(|()| find_conflict(fd, wanted));
    let surplus = if taken.is_ok() { held.without(wanted) } else { new };
    for byte in surplus.bytes() {
        // To unlock needs no memory and no other's leave; what can't be unlocked now ends with the descriptor.
        let _ = set_byte(fd, byte, libc::F_UNLCK);
    }
    taken
}

fn find_conflict(fd: BorrowedFd<'_>, wanted: Ways) -> Result<(), Refusal> {
    for (bit, name) in WAYS {
        if wanted.used & (1 << bit) != 0 && is_locked(fd, DENIED + i64::from(bit)).map_err(Refusal::Os)? {
            return Err(Refusal::Conflict(format!("Failed to get \"{name}\" lock")));
        }
    }
    for (bit, name) in WAYS {
        if wanted.denied & (1 << bit) != 0 && is_locked(fd, USED + i64::from(bit)).map_err(Refusal::Os)? {
            return Err(Refusal::Conflict(format!("Failed to get shared \"{name}\" lock")));
        }
    }
    Ok(())
}

/// Whether another open file has a lock on the byte.
fn is_locked(fd: BorrowedFd<'_>, byte: i64) -> Result<bool, i32> {
    let mut lock = one_byte(byte, libc::F_WRLCK);
    fcntl(fd, libc::F_OFD_GETLK, &mut lock)?;
    Ok(lock.l_type != libc::F_UNLCK as libc::c_short)
}

fn set_byte(fd: BorrowedFd<'_>, byte: i64, kind: libc::c_int) -> Result<(), i32> {
    fcntl(fd, libc::F_OFD_SETLK, &mut one_byte(byte, kind))
}

fn one_byte(byte: i64, kind: libc::c_int) -> libc::flock {
    // SAFETY: a structure of integers, for which zero is valid; it has padding on some systems.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    lock.l_start = byte;
    lock.l_len = 1;
    lock
}

fn fcntl(fd: BorrowedFd<'_>, command: libc::c_int, lock: &mut libc::flock) -> Result<(), i32> {
    loop {
        // SAFETY: both commands take a pointer to one `flock`.
        if unsafe { libc::fcntl(fd.as_raw_fd(), command, std::ptr::from_mut(lock)) } == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error.raw_os_error().unwrap_or(libc::EIO));
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::error::IoErrorKind;
    use crate::file::File;
    use crate::file_types::{Access, LockMode, OpenFlags};

    #[test]
    fn a_child_that_gives_a_file_up_leaves_the_locks_to_its_parent() {
        let path = tempfile::NamedTempFile::new().unwrap().into_temp_path();
        let flags = OpenFlags { access: Access::ReadWrite, lock: LockMode::Write, ..OpenFlags::default() };
        let file = File::open(&path, &flags).unwrap();
        // SAFETY: the child drops a file, which is this test's matter, and ends by `_exit`. Its allocator is usable after a
        // fork (glibc, musl). An alarm ends a child that hangs.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: as above.
            unsafe { libc::alarm(60) };
            let unlocked = file.unlock();
            drop(file);
            // SAFETY: as above.
            unsafe { libc::_exit(i32::from(unlocked.is_err())) };
        }
        let mut status = -1;
        // SAFETY: plain system call with a place for the result.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
        let refused = File::open(&path, &flags).err().map(|error| error.kind);
        assert!(matches!(refused, Some(IoErrorKind::Locked)), "{refused:?}");
        drop(file);
        assert!(File::open(&path, &flags).is_ok());
    }
}
