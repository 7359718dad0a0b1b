//! QEMU's image locks, so that a running QEMU and this program exclude each other. `docs/design/locks.md` has the whole
//! of it.
//!
//! Locks are open-file-description locks of one byte each, always shared ones (fcntl(2), `F_OFD_SETLK`). Byte
//! `100 + i` is locked by whoever uses the image in way `i`, byte `200 + i` by whoever does not let others do so.
//! To find a conflict, one asks (`F_OFD_GETLK`) whether an *exclusive* lock would be refused: on `200 + i` for each
//! way of one's own, on `100 + i` for each way that one denies others. One takes one's locks first and asks then, so
//! of two openers at the same time at least one sees the other.
//!
//! The locks belong to an open file of their own, which no ring ever has, so they end with the process. It is opened by
//! the descriptor, not by the name, which may lead elsewhere by now. Where it can't be had (a sandbox, no `/proc`, no right
//! to read), or where who handed the descriptor over has locked it already, the locks are those of the file itself.
//!
//! Writes may outlive the process: those of a ring under O_DIRECT are with the disk, and no thread waits for them. Whoever
//! writes has [`LANDING`] locked as well, by the file that the ring has. The kernel gives that up when the last request has
//! ended. An opener that finds [`MARK`] taken and [`HOLDER`] free has the writes of a dead program before it, and waits
//! (`lock_wait.rs`).

use crate::error::{IoError, IoErrorKind, Op};
use crate::file_types::LockMode;
use crate::fork_mark::ForkMark;
use crate::lock_wait::LockWait;
use crate::sabotage::{self, Fault};
use crate::sync::Mutex;
use rustix::fs::{CWD, FileType, Mode, OFlags};
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

/// The byte that says that [`LANDING`] is locked: QEMU has no use for it.
const MARK: i64 = 99;
/// The bytes of the file that the ring has, as long as writes may land: [`MARK`], and those by which QEMU takes it for a
/// writer that lets no other in.
const LANDING: [i64; 3] = [MARK, USED + 1, DENIED + 1];
/// The byte that a program which writes has locked as long as it lives ("resize" is in use).
const HOLDER: i64 = USED + 3;

/// How long an opener tries while another has the image: it may be about to close.
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

/// The holders of an open file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Holders {
    /// This process alone: with it go all but the requests that are under way.
    ThisProcess,
    /// Also the program that handed the descriptor over, which may keep it after the end of this process.
    Others,
}

/// The locks held on one file.
pub(crate) struct FileLock {
    held: Mutex<Ways>,
    /// The holders of the file itself.
    holders: Holders,
    /// The open file that the locks belong to, from the first lock on; `None`: the file itself.
    own: OnceLock<Option<OwnedFd>>,
    /// A child of fork(2) shares the open file, and so the locks, with its parent, whose they are.
    made_in: ForkMark,
}

impl FileLock {
    pub(crate) fn new(holders: Holders) -> Self {
        Self { held: Mutex::default(), holders, own: OnceLock::new(), made_in: ForkMark::here() }
    }

    /// The descriptor of the open file that the locks belong to, if that is another one.
    pub(crate) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.own.get()?.as_ref().map(AsFd::as_fd)
    }

    /// Changes to the locks of `mode`; if that fails, the old ones are still held. Tries for up to a second, and waits for the
    /// writes of a program that is gone as `wait` says. On a file system without locks there is nothing to hold; `wait` tells.
    pub(crate) fn set(
        &self,
        file: BorrowedFd<'_>,
        path: &Path,
        mode: LockMode,
        wait: &LockWait,
    ) -> Result<(), IoError> {
        let mut held = self.held.lock();
        let wanted = Ways::of(mode);
        if wanted == *held {
            return Ok(());
        }
        let own = self.own.get_or_init(|| {
            let is_for_locks =
                |own: &OwnedFd| self.holders == Holders::ThisProcess || !is_locked_itself(file, own.as_fd());
            open_again(file).filter(is_for_locks)
        });
        let fd = own.as_ref().map_or(file, AsFd::as_fd);
        if self.has_landing(*held) {
            // The one here must not find it in its own way.
            unlock(file, LANDING)
                .map_err(|errno| IoError::of_file(Op::Lock, IoErrorKind::Os(errno), path))?;
        }
        let result = change_with_patience(fd, path, (*held, wanted), wait);
        if result.as_ref().is_err_and(|error| is_for_want_of_locks(fd, error)) {
            wait.tell_without_locks(path);
            return Ok(());
        }
        if result.is_ok() {
            *held = wanted;
        }
        if self.has_landing(*held) {
            let landing = LANDING.into_iter().try_for_each(|byte| set_byte(file, byte, libc::F_RDLCK));
            if let Err(errno) = landing {
                // Without it no write may begin: nothing is held rather than half of it.
                let ways = std::mem::take(&mut *held);
                let _ = unlock(file, LANDING).and(unlock(fd, ways.bytes()));
                return Err(IoError::of_file(Op::Lock, IoErrorKind::Os(errno), path));
            }
        }
        result
    }

    /// Whether [`LANDING`] is locked with these ways in use.
    fn has_landing(&self, held: Ways) -> bool {
        held.used & WRITE != 0
            && self.holders == Holders::ThisProcess
            && self.descriptor().is_some()
            && !sabotage::is(Fault::LockWithProcess)
    }

    /// Gives up all locks; in a child of the process that has them, nothing.
    pub(crate) fn release(&self, file: BorrowedFd<'_>) -> Result<(), i32> {
        if !self.made_in.is_here() {
            return Ok(());
        }
        let mut held = self.held.lock();
        let ways = std::mem::take(&mut *held);
        // First: who finds it without its holder takes that for dead.
        let landing = if self.has_landing(ways) { unlock(file, LANDING) } else { Ok(()) };
        let fd = self.descriptor().unwrap_or(file);
        landing.and(unlock(fd, ways.bytes()))
    }
}

/// Another open file of the same file. For reading is enough: all locks are shared ones.
fn open_again(file: BorrowedFd<'_>) -> Option<OwnedFd> {
    open_same(file, OFlags::RDONLY)
}

/// Another open file of the same file, with the access and the flags of `status`, for the requests of this process alone; `None`
/// where it can't be had, or where somebody has locked the first one and would keep it out.
pub(crate) fn open_alone(file: BorrowedFd<'_>, status: OFlags) -> Option<OwnedFd> {
    let kind = FileType::from_raw_mode(rustix::fs::fstat(file).ok()?.st_mode);
    if !matches!(kind, FileType::RegularFile | FileType::BlockDevice) {
        return None;
    }
    let kept = OFlags::RWMODE | OFlags::DIRECT | OFlags::DSYNC | OFlags::SYNC | OFlags::NOATIME;
    open_same(file, status & kept).filter(|own| !is_locked_itself(file, own.as_fd()))
}

fn open_same(file: BorrowedFd<'_>, flags: OFlags) -> Option<OwnedFd> {
    let link = format!("/proc/thread-self/fd/{}", file.as_raw_fd());
    let flags = flags | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
    let own = rustix::fs::openat(CWD, link, flags, Mode::empty()).ok()?;
    let (file, same) = (rustix::fs::fstat(file).ok()?, rustix::fs::fstat(&own).ok()?);
    ((file.st_dev, file.st_ino) == (same.st_dev, same.st_ino)).then_some(own)
}

/// Whether the file itself, by whoever opened it, has locks that would keep another open file out.
fn is_locked_itself(file: BorrowedFd<'_>, own: BorrowedFd<'_>) -> bool {
    let is_seen_by = |fd, byte| is_locked(fd, byte) == Ok(true);
    // A lock that others see and the file itself does not is its own; unless it was given up just now.
    let is_its_own =
        |byte| is_seen_by(own, byte) && is_locked(file, byte) == Ok(false) && is_seen_by(own, byte);
    WAYS.iter().any(|&(bit, _)| is_its_own(USED + i64::from(bit)) || is_its_own(DENIED + i64::from(bit)))
}

/// Changes from the first of `ways` to the second, and waits for others.
fn change_with_patience(
    fd: BorrowedFd<'_>,
    path: &Path,
    (held, wanted): (Ways, Ways),
    wait: &LockWait,
) -> Result<(), IoError> {
    let fail = |errno| IoError::of_file(Op::Lock, IoErrorKind::Os(errno), path);
    let mut start = Instant::now();
    loop {
        let what = match change(fd, held, wanted) {
            Ok(()) => return Ok(()),
            Err(Refusal::Os(errno)) => return Err(fail(errno)),
            Err(Refusal::Conflict(what)) => what,
        };
        if is_left_by_the_dead(fd).map_err(fail)? {
            // No lock is tried meanwhile: another that waits would take it for one that lives.
            wait.until(path, &what, || is_left_by_the_dead(fd).map(|is_left| !is_left).map_err(fail))?;
            start = Instant::now();
        } else if start.elapsed() >= PATIENCE {
            let hint = format!("{what}: Is another process using the image [{}]?", path.display());
            return Err(IoError::of_file(Op::Lock, IoErrorKind::Locked, path).with_detail(hint));
        } else {
            std::thread::sleep(PAUSE);
        }
    }
}

/// Whether writes of a program that is gone may still land. `fd` has neither of both bytes locked.
fn is_left_by_the_dead(fd: BorrowedFd<'_>) -> Result<bool, i32> {
    Ok(is_locked(fd, MARK)? && !is_locked(fd, HOLDER)?)
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

/// Whether the file system has no locks. One that has them may be out of them, but answers questions about them.
fn is_for_want_of_locks(fd: BorrowedFd<'_>, error: &IoError) -> bool {
    let is_for_want = |errno| matches!(errno, libc::ENOLCK | libc::EOPNOTSUPP | libc::ENOSYS);
    matches!(error.kind, IoErrorKind::Os(errno) if is_for_want(errno))
        && is_locked(fd, MARK).is_err_and(is_for_want)
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

fn unlock(fd: BorrowedFd<'_>, bytes: impl IntoIterator<Item = i64>) -> Result<(), i32> {
    bytes.into_iter().try_for_each(|byte| set_byte(fd, byte, libc::F_UNLCK))
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
    use super::{FileLock, Holders};
    use crate::error::{IoError, IoErrorKind};
    use crate::file::File;
    use crate::file_types::{Access, LockMode, OpenFlags};
    use crate::lock_wait::{LockWait, Patience};
    #[cfg(feature = "test-faults")]
    use crate::sabotage::{self, under};
    use crate::sync::Mutex;
    use std::ops::ControlFlow;
    use std::os::fd::AsFd;
    use std::path::Path;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    fn writable(path: &Path) -> std::fs::File {
        std::fs::OpenOptions::new().read(true).write(true).open(path).unwrap()
    }

    /// Has the last writes of a program that is gone land when an opener waits for the third time.
    #[derive(Default)]
    struct LandsLater {
        writes: Mutex<Option<std::fs::File>>,
        waits: AtomicUsize,
    }

    impl Patience for Arc<LandsLater> {
        fn begin(&self, _: &Path) -> Box<dyn FnMut(Duration) -> ControlFlow<()>> {
            let this = Self::clone(self);
            Box::new(move |_| {
                if this.waits.fetch_add(1, Ordering::Relaxed) == 2 {
                    *this.writes.lock() = None;
                }
                ControlFlow::Continue(())
            })
        }
    }

    /// A file as a killed program leaves it: the ring has it still, the program's own files are closed.
    fn left_by_the_dead(path: &Path) -> std::fs::File {
        let ring = writable(path);
        let mut lock = FileLock::new(Holders::ThisProcess);
        lock.set(ring.as_fd(), path, LockMode::Write, &LockWait::default()).unwrap();
        drop(lock.own.take().flatten().unwrap());
        ring
    }

    /// Opens what a dead program has left: how often it waited, and whether the writes had landed by then.
    fn opened_after_the_dead(path: &Path, mode: LockMode) -> Result<(usize, bool), IoError> {
        let lands = Arc::new(LandsLater::default());
        *lands.writes.lock() = Some(left_by_the_dead(path));
        let access = if mode == LockMode::Write { Access::ReadWrite } else { Access::ReadOnly };
        let wait = LockWait::with(Arc::new(Arc::clone(&lands)));
        let flags = OpenFlags::default().access(access).lock(mode).lock_wait(wait);
        File::open(path, &flags).map(drop)?;
        let has_landed = lands.writes.lock().is_none();
        Ok((lands.waits.load(Ordering::Relaxed), has_landed))
    }

    #[test]
    fn an_opener_waits_for_the_writes_of_the_dead() {
        let path = tempfile::NamedTempFile::new().unwrap().into_temp_path();
        for mode in [LockMode::Write, LockMode::Read, LockMode::Inspect] {
            let (waits, has_landed) = opened_after_the_dead(&path, mode).unwrap();
            assert!(waits >= 3 && has_landed, "{mode:?}: {waits}");
        }
        assert_eq!(opened_after_the_dead(&path, LockMode::None).unwrap(), (0, false));
    }

    #[cfg(feature = "test-faults")]
    #[test]
    fn locks_that_go_with_the_process_are_noticed() {
        let path = tempfile::NamedTempFile::new().unwrap().into_temp_path();
        let (opened, felt) =
            under(Some(sabotage::Fault::LockWithProcess), || opened_after_the_dead(&path, LockMode::Write));
        assert!(felt > 0 && opened.unwrap() == (0, false));
    }

    #[test]
    fn who_has_no_patience_is_told_what_is_in_the_way() {
        let path = tempfile::NamedTempFile::new().unwrap().into_temp_path();
        let ring = left_by_the_dead(&path);
        let flags = OpenFlags { access: Access::ReadWrite, lock: LockMode::Write, ..OpenFlags::default() };
        let error = File::open(&path, &flags).unwrap_err();
        assert_eq!(error.kind, IoErrorKind::LockedByWrites);
        let text = error.to_string();
        assert!(text.contains("writes of a process that is gone may still land"), "{text}");
        drop(ring);
        drop(File::open(&path, &flags).unwrap());
    }

    #[test]
    fn one_that_lives_is_not_waited_for_with_patience() {
        let path = tempfile::NamedTempFile::new().unwrap().into_temp_path();
        let lands = Arc::new(LandsLater::default());
        let wait = LockWait::with(Arc::new(Arc::clone(&lands)));
        let flags = OpenFlags::default().access(Access::ReadWrite).lock(LockMode::Write).lock_wait(wait);
        let holder = File::open(&path, &flags).unwrap();
        assert_eq!(File::open(&path, &flags).unwrap_err().kind, IoErrorKind::Locked);
        // Its own are not in its way, whatever it changes to.
        for mode in [LockMode::Read, LockMode::Write, LockMode::None, LockMode::Write] {
            holder.set_lock(mode).unwrap();
        }
        drop(holder);
        drop(File::open(&path, &flags).unwrap());
        assert_eq!(lands.waits.load(Ordering::Relaxed), 0);
    }

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
