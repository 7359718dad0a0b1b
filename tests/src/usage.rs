//! Running `zebu` with an eye on what it uses: memory by the kernel's account, time by a deadline.

use crate::program::{Finished, zebu_program};
use std::fs::File;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// How long a command may take.
const DEADLINE: Duration = Duration::from_secs(20);

/// Runs `zebu` in `dir`; returns how it ended, and the most memory that was resident, in KiB. A command that takes more
/// than 20 seconds is killed and has no exit code then.
///
/// # Panics
/// If it can't be started.
pub fn run_measured(dir: &Path, words: &[&str]) -> (Finished, u64) {
    let (out, err) = (dir.join("stdout"), dir.join("stderr"));
    let create = |path: &Path| File::create(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let mut command = Command::new(zebu_program());
    command.args(words).current_dir(dir);
    command.stdin(Stdio::null()).stdout(create(&out)).stderr(create(&err));
    #[expect(clippy::zombie_processes, reason = "wait4 below waits for it, and tells what it used")]
    let child = command.spawn().unwrap_or_else(|e| panic!("cannot run zebu: {e}"));
    let pid = child.id() as libc::pid_t;
    let started = Instant::now();
    let (mut status, mut usage) = (0, std::mem::MaybeUninit::<libc::rusage>::zeroed());
    loop {
        // SAFETY: the child is ours and is waited for here alone; both pointers are to live memory of their type.
        let waited = unsafe { libc::wait4(pid, &raw mut status, libc::WNOHANG, usage.as_mut_ptr()) };
        assert!(waited >= 0, "the child can be waited for");
        if waited == pid {
            break;
        }
        if started.elapsed() > DEADLINE {
            // SAFETY: the child has not been waited for, so the number is still its own.
            unsafe { libc::kill(pid, libc::SIGKILL) };
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    // SAFETY: all zeroes are a valid value, and the kernel has filled it in.
    let usage = unsafe { usage.assume_init() };
    let text = |path| String::from_utf8_lossy(&std::fs::read(path).unwrap_or_default()).into_owned();
    let finished = Finished {
        line: format!("zebu {}", words.join(" ")),
        code: libc::WIFEXITED(status).then(|| libc::WEXITSTATUS(status)),
        stdout: text(&out),
        stderr: text(&err),
    };
    (finished, usage.ru_maxrss as u64)
}
