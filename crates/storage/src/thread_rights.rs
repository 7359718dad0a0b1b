//! Landlock for all threads of the process. A thread gives up rights for itself and for the threads that it makes later;
//! those that exist already have to do it themselves. (Linux has a call for all of them since Landlock's ABI 8 only.)
//!
//! Each thread is sent a signal, whose handler makes the system call in it.

use crate::sync::Mutex;
use std::collections::HashSet;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

/// `IORING_REGISTER_*` of <linux/io_uring.h> that rings are asked for while they work: an eventfd, files, buffers.
pub const RING_REGISTRATIONS: [u8; 3] = [4, 6, 16];

/// How long a thread may take to handle the signal.
const PATIENCE: Duration = Duration::from_secs(10);
/// How often is looked whether it has.
const STEP: Duration = Duration::from_micros(50);

/// `LANDLOCK_CREATE_RULESET_VERSION` of <linux/landlock.h>.
const CREATE_RULESET_VERSION: libc::c_uint = 1;

/// The ruleset for the handler; -1 if there is none.
static RULESET: AtomicI32 = AtomicI32::new(-1);
/// The thread that has handled the signal, and what came of it: 0 or the errno.
static DONE: AtomicI32 = AtomicI32::new(0);
static OUTCOME: AtomicI32 = AtomicI32::new(0);

/// The version of Landlock that the kernel has; 0 if it has none.
pub fn landlock_version() -> u32 {
    // SAFETY: with this flag the kernel takes no attributes and returns a number.
    let version = unsafe {
        libc::syscall(libc::SYS_landlock_create_ruleset, ptr::null::<u8>(), 0usize, CREATE_RULESET_VERSION)
    };
    u32::try_from(version).unwrap_or(0)
}

/// Has all threads of the process keep to a ruleset of Landlock from now on, and those that they make. No thread can gain
/// rights by running programs any more, either.
///
/// # Errors
/// The kernel refuses that, the threads can't be listed (`/proc`), or one of them blocks all signals. Some may keep to the
/// rules then.
pub fn restrict_all_threads(ruleset: BorrowedFd<'_>) -> io::Result<()> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _held = ONE_AT_A_TIME.lock();
    install()?;
    RULESET.store(ruleset.as_raw_fd(), Ordering::Release);
    let result = restrict_others().and_then(|()| match restrict_this(ruleset.as_raw_fd()) {
        0 => Ok(()),
        errno => Err(io::Error::from_raw_os_error(errno)),
    });
    RULESET.store(-1, Ordering::Release);
    result
}

/// The first signal that is free for programs, and some further: libraries begin at the first.
fn signal() -> libc::c_int {
    libc::SIGRTMIN() + 7
}

/// The handler stays: with no ruleset it does nothing.
fn install() -> io::Result<()> {
    let handler: extern "C" fn(libc::c_int) = on_signal;
    // SAFETY: all zero is a valid sigaction: the default action, no mask, no flags.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handler as usize;
    action.sa_flags = libc::SA_RESTART | libc::SA_ONSTACK;
    // SAFETY: the handler takes what a handler without SA_SIGINFO takes, and makes system calls only.
    if unsafe { libc::sigaction(signal(), &raw const action, ptr::null_mut()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Other threads, until a look finds none that has not done it: threads of those that have keep to the rules.
fn restrict_others() -> io::Result<()> {
    let this = this_thread();
    let mut done = HashSet::from([this]);
    loop {
        let mut is_complete = true;
        for entry in fs::read_dir("/proc/self/task")? {
            let name = entry?.file_name();
            let Some(thread) = name.to_str().and_then(|name| name.parse().ok()) else { continue };
            if done.insert(thread) && !is_of_a_ring(thread) {
                is_complete = false;
                restrict_other(thread)?;
            }
        }
        if is_complete {
            return Ok(());
        }
    }
}

/// Whether it is a thread of the kernel that works for an io_uring. It handles no signals, and does each operation with the
/// rights that the thread had which asked for it, at that time.
fn is_of_a_ring(thread: libc::pid_t) -> bool {
    let name = fs::read_to_string(format!("/proc/self/task/{thread}/comm"));
    name.is_ok_and(|name| name.starts_with("iou-wrk-") || name.starts_with("iou-sqp-"))
}

fn restrict_other(thread: libc::pid_t) -> io::Result<()> {
    DONE.store(0, Ordering::Release);
    if !send(thread, signal()) {
        return Ok(());
    }
    let deadline = Instant::now() + PATIENCE;
    while DONE.load(Ordering::Acquire) != thread {
        if Instant::now() > deadline {
            return Err(io::Error::new(io::ErrorKind::TimedOut, format!("thread {thread} takes no signals")));
        }
        std::thread::sleep(STEP);
        if DONE.load(Ordering::Acquire) != thread && !send(thread, 0) {
            // It has ended.
            return Ok(());
        }
    }
    match OUTCOME.load(Ordering::Acquire) {
        0 => Ok(()),
        errno => Err(io::Error::from_raw_os_error(errno)),
    }
}

/// Sends a signal (0: none) to a thread of this process; false if it has ended.
fn send(thread: libc::pid_t, signal: libc::c_int) -> bool {
    // SAFETY: numbers only.
    unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, signal) == 0 }
}

fn this_thread() -> libc::pid_t {
    // SAFETY: no arguments, and it can't fail.
    unsafe { libc::syscall(libc::SYS_gettid) as libc::pid_t }
}

/// Makes system calls only; 0 or the errno.
fn restrict_this(ruleset: libc::c_int) -> i32 {
    // SAFETY: numbers only; the calls change nothing but the rights of this thread. The address of errno is this
    // thread's.
    unsafe {
        let errno = libc::__errno_location();
        if libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 {
            return *errno;
        }
        if libc::syscall(libc::SYS_landlock_restrict_self, ruleset, 0) != 0 {
            return *errno;
        }
    }
    0
}

extern "C" fn on_signal(_: libc::c_int) {
    let ruleset = RULESET.load(Ordering::Acquire);
    if ruleset < 0 {
        return;
    }
    // SAFETY: the address of this thread's errno, which what was interrupted may be about to read.
    let (errno, before) = unsafe { (libc::__errno_location(), *libc::__errno_location()) };
    OUTCOME.store(restrict_this(ruleset), Ordering::Release);
    DONE.store(this_thread(), Ordering::Release);
    // SAFETY: as above.
    unsafe { *errno = before };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Engine, Worker, WorkerConfig};
    use std::fs::File;
    use std::os::fd::{AsFd, FromRawFd, OwnedFd};
    use std::process::Command;
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;

    /// A ruleset by which no file can be opened for reading.
    fn ruleset() -> OwnedFd {
        let reading: u64 = 1 << 2;
        // SAFETY: the attributes have as many bytes as are said; a new descriptor comes back.
        unsafe {
            let fd = libc::syscall(libc::SYS_landlock_create_ruleset, &raw const reading, 8usize, 0);
            assert!(fd >= 0, "{}", io::Error::last_os_error());
            OwnedFd::from_raw_fd(fd as i32)
        }
    }

    fn is_refused() -> bool {
        File::open("/etc/passwd").is_err_and(|error| error.kind() == io::ErrorKind::PermissionDenied)
    }

    /// Not a test: what the next one runs in a process of its own, since there is no way back.
    #[test]
    #[ignore = "gives up the rights of the whole process"]
    fn gives_up_files_in_all_threads() {
        assert!(!is_refused());
        let is_over = Arc::new(AtomicBool::new(false));
        let mut threads = Vec::new();
        // One that waits in a system call, one that sleeps, one that is busy.
        let (mut reader, writer) = io::pipe().unwrap();
        threads.push(std::thread::spawn(move || {
            io::Read::read_exact(&mut reader, &mut [0]).unwrap();
            is_refused()
        }));
        for pause in [Duration::from_millis(1), Duration::ZERO] {
            let is_over = Arc::clone(&is_over);
            threads.push(std::thread::spawn(move || {
                while !is_over.load(Ordering::Acquire) {
                    std::thread::sleep(pause);
                }
                is_refused()
            }));
        }
        // Workers of both kinds, waiting.
        for engine in [Engine::Auto, Engine::Threads] {
            let is_over = Arc::clone(&is_over);
            threads.push(std::thread::spawn(move || {
                let worker = Worker::new(&WorkerConfig { engine, ..WorkerConfig::default() }).unwrap();
                worker.block_on(async {
                    while !is_over.load(Ordering::Acquire) {
                        worker.sleep(Duration::from_millis(300)).await;
                    }
                });
                is_refused()
            }));
        }
        // One that makes threads all the time, but not for ever: on a busy machine each look would find new ones.
        let over = Arc::clone(&is_over);
        threads.push(std::thread::spawn(move || {
            let mut made = Vec::new();
            while !over.load(Ordering::Acquire) && made.len() < 200 {
                let over = Arc::clone(&over);
                made.push(std::thread::spawn(move || {
                    while !over.load(Ordering::Acquire) {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    is_refused()
                }));
                std::thread::sleep(Duration::from_millis(1));
            }
            made.into_iter().all(|thread| thread.join().unwrap())
        }));
        std::thread::sleep(Duration::from_millis(20));
        let rules = ruleset();
        restrict_all_threads(rules.as_fd()).unwrap();
        assert!(is_refused());
        is_over.store(true, Ordering::Release);
        io::Write::write_all(&mut { writer }, b"x").unwrap();
        let refused: Vec<bool> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        assert_eq!(refused, [true; 6]);
    }

    #[test]
    fn no_thread_keeps_its_rights() {
        if landlock_version() == 0 {
            eprintln!("skipped: the kernel has no Landlock");
            return;
        }
        let mut command = Command::new(std::env::current_exe().unwrap());
        let name = "thread_rights::tests::gives_up_files_in_all_threads";
        let ended = command.args(["--exact", name, "--ignored"]).output().unwrap();
        assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stdout));
    }
}
