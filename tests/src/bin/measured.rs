//! Runs a program, and writes its exit code (-1: it was killed) and the most memory of its own that was resident, in KiB, into a
//! file. Pages of files do not count: how many of the program's code the kernel maps at once depends on the state of its cache.
//! A program that takes more than so many seconds of processor time, or hangs, is killed: how long it takes by the clock
//! depends on what else the machine does.
//!
//! The kernel counts what the starting process has resident for the started one, too: so this one is small.

use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};
use zebu_tests::patience::LONGEST;

fn main() -> ExitCode {
    let mut words = std::env::args_os().skip(1);
    let result = words.next();
    let seconds = words.next().and_then(|word| word.to_str()?.parse().ok());
    let (Some(result), Some(seconds), Some(program)) = (result, seconds, words.next()) else {
        eprintln!("usage: measured RESULT SECONDS PROGRAM [ARGUMENT...]");
        return ExitCode::FAILURE;
    };
    let child = match Command::new(&program).args(words).spawn() {
        Ok(child) => child,
        Err(error) => {
            eprintln!("{}: {error}", program.display());
            return ExitCode::FAILURE;
        }
    };
    let pid = child.id() as libc::pid_t;
    let limit = libc::rlimit { rlim_cur: seconds, rlim_max: seconds };
    // SAFETY: the child is ours and has not been waited for; `limit` is read, nothing is written.
    let limited = unsafe { libc::prlimit(pid, libc::RLIMIT_CPU, &raw const limit, std::ptr::null_mut()) };
    assert_eq!(limited, 0, "a process of our own can be limited");
    let status_path = format!("/proc/{pid}/status");
    let (mut of_files, mut own) = (0, 0);
    let started = Instant::now();
    let (mut status, mut usage) = (0, std::mem::MaybeUninit::<libc::rusage>::zeroed());
    loop {
        // A look may miss the peak, which the kernel's account has together with the files' pages.
        if let Some(pages) = std::fs::read_to_string(&status_path).ok().as_deref().and_then(Pages::read) {
            of_files = pages.of_files;
            own = own.max(pages.own);
        }
        // SAFETY: the child is ours and is waited for here alone; both pointers are to live memory of their type.
        let waited = unsafe { libc::wait4(pid, &raw mut status, libc::WNOHANG, usage.as_mut_ptr()) };
        assert!(waited >= 0, "the child can be waited for");
        if waited == pid {
            break;
        }
        if started.elapsed() > LONGEST {
            // SAFETY: the child has not been waited for, so the number is still its own.
            unsafe { libc::kill(pid, libc::SIGKILL) };
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    // SAFETY: all zeroes are a valid value, and the kernel has filled it in.
    let usage = unsafe { usage.assume_init() };
    let code = if libc::WIFEXITED(status) { libc::WEXITSTATUS(status) } else { -1 };
    let own = own.max(usage.ru_maxrss as u64 - of_files.min(usage.ru_maxrss as u64));
    match std::fs::write(&result, format!("{code} {own}")) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{}: {error}", result.display());
            ExitCode::FAILURE
        }
    }
}

/// Resident pages of a process, in KiB.
struct Pages {
    of_files: u64,
    own: u64,
}

impl Pages {
    /// The pages that `/proc/PID/status` tells of; nothing of a process that has ended.
    fn read(status: &str) -> Option<Self> {
        let kib = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name))?;
            line.trim().trim_end_matches(" kB").parse::<u64>().ok()
        };
        Some(Self { of_files: kib("RssFile:")?, own: kib("RssAnon:")? + kib("RssShmem:")? })
    }
}
