//! Running other programs, with what they cost.

use crate::Outcome;
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A command line in one line of text, for messages.
pub fn shown(command: &Command) -> String {
    std::iter::once(command.get_program()).chain(command.get_args()).map(quoted).collect::<Vec<_>>().join(" ")
}

fn quoted(word: &OsStr) -> String {
    let text = word.to_string_lossy();
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,+@%".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        text.into_owned()
    } else {
        format!("'{}'", text.replace('\'', "'\\''"))
    }
}

/// Runs a command with its output shown; anything but success is an error.
pub fn run(command: &mut Command) -> Outcome {
    let status = command.status().map_err(|e| format!("cannot run {}: {e}", shown(command)))?;
    if status.success() { Ok(()) } else { Err(format!("{}: {status}", shown(command))) }
}

/// Runs a command and returns what it printed; on failure the error holds what it said.
pub fn output(command: &mut Command) -> Outcome<String> {
    let out =
        command.stdin(Stdio::null()).output().map_err(|e| format!("cannot run {}: {e}", shown(command)))?;
    if out.status.success() {
        Ok(String::from_utf8_lossy(&out.stdout).into_owned())
    } else {
        let said = String::from_utf8_lossy(&out.stderr);
        Err(format!("{}: {}: {}", shown(command), out.status, said.trim()))
    }
}

/// The program `name` on the PATH (and where administrators' programs live, which a user's PATH may lack).
pub fn find(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin".into(), "/sbin".into()])
        .map(|dir| dir.join(name))
        .find(|file| file.is_file())
}

/// The first line of `qemu-img --version`, if it is installed.
pub fn qemu_version() -> Option<String> {
    let text = output(Command::new(find("qemu-img")?).arg("--version")).ok()?;
    text.lines().next().map(String::from)
}

/// Whether this process is root.
pub fn is_root() -> bool {
    // SAFETY: takes nothing, touches no memory, can't fail.
    unsafe { libc::geteuid() == 0 }
}

/// The cost of a finished command.
#[derive(Debug, Clone)]
pub struct Usage {
    /// From start to exit.
    pub wall: Duration,
    /// User and system time of it and of the children that it waited for.
    pub cpu: Duration,
    /// Times that one of its threads gave the processor up because it had to wait.
    pub waits: u64,
    /// Largest resident set, in bytes (`VmHWM` of proc_pid_status(5)). The figure of `wait4` includes the program that
    /// started it.
    pub max_rss: u64,
    /// Standard output.
    pub stdout: String,
    /// Exit code; `None` if a signal ended it.
    pub code: Option<i32>,
}

/// Runs a command to its end and measures it. Standard output is kept (through a file, so that a full pipe never
/// holds the command up); standard error is shown.
pub fn measure(command: &mut Command) -> Outcome<Usage> {
    measure_until(command, None)
}

/// The same; a command that has not ended after `limit` is killed, which is an error.
fn measure_until(command: &mut Command, limit: Option<Duration>) -> Outcome<Usage> {
    let said = |e: io::Error, c: &Command| format!("cannot run {}: {e}", shown(c));
    let mut out = tempfile::tempfile().map_err(|e| said(e, command))?;
    let for_child = out.try_clone().map_err(|e| said(e, command))?;
    command.stdin(Stdio::null()).stdout(for_child);
    let start = Instant::now();
    let mut child = command.spawn().map_err(|e| said(e, command))?;
    let peak = Peak::watch(child.id());
    if let Some(limit) = limit
        && !ends_within(child.id(), limit).map_err(|e| said(e, command))?
    {
        child.kill().and_then(|()| wait4(child.id())).map_err(|e| said(e, command))?;
        peak.end();
        return Err(format!("no answer within {} s: {}", limit.as_secs(), shown(command)));
    }
    let (status, rusage) = wait4(child.id()).map_err(|e| said(e, command))?;
    let wall = start.elapsed();
    let max_rss = peak.end();
    let mut stdout = String::new();
    io::Seek::rewind(&mut out)
        .and_then(|()| io::Read::read_to_string(&mut out, &mut stdout))
        .map_err(|e| said(e, command))?;
    let cpu = duration(rusage.ru_utime) + duration(rusage.ru_stime);
    let code = libc::WIFEXITED(status).then(|| libc::WEXITSTATUS(status));
    let waits = rusage.ru_nvcsw as u64;
    Ok(Usage { wall, cpu, waits, max_rss, stdout, code })
}

/// Looks at the largest resident set of a process while it runs.
struct Peak {
    stop: mpsc::Sender<()>,
    thread: JoinHandle<u64>,
}

impl Peak {
    fn watch(pid: u32) -> Self {
        let (stop, stopped) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            let mut peak = 0;
            loop {
                peak = peak.max(resident_peak(pid).unwrap_or(0));
                if stopped.recv_timeout(Duration::from_millis(10)) != Err(RecvTimeoutError::Timeout) {
                    return peak;
                }
            }
        });
        Self { stop, thread }
    }

    fn end(self) -> u64 {
        drop(self.stop);
        self.thread.join().unwrap_or(0)
    }
}

/// As [`measure`]; an exit code other than 0 is an error.
pub fn measure_ok(command: &mut Command) -> Outcome<Usage> {
    measure_ok_until(command, None)
}

/// The same; a command that has not ended after `limit` is killed, which is an error too.
pub fn measure_ok_within(command: &mut Command, limit: Duration) -> Outcome<Usage> {
    measure_ok_until(command, Some(limit))
}

fn measure_ok_until(command: &mut Command, limit: Option<Duration>) -> Outcome<Usage> {
    let said = |e: io::Error, c: &Command| format!("cannot run {}: {e}", shown(c));
    let mut err = tempfile::tempfile().map_err(|e| said(e, command))?;
    let for_child = err.try_clone().map_err(|e| said(e, command))?;
    let usage = measure_until(command.stderr(for_child), limit)?;
    match usage.code {
        Some(0) => Ok(usage),
        Some(code) => {
            let mut bytes = Vec::new();
            io::Seek::rewind(&mut err)
                .and_then(|()| io::Read::read_to_end(&mut err, &mut bytes))
                .map_err(|e| said(e, command))?;
            let text = String::from_utf8_lossy(&bytes);
            // A panic ends with a note on backtraces.
            let says_why = |line: &&str| !line.trim().is_empty() && !line.starts_with("note:");
            let last = text.lines().rfind(says_why).unwrap_or("it does not say why");
            Err(format!("{}: exit code {code}: {last}", shown(command)))
        }
        None => Err(format!("{}: ended by a signal", shown(command))),
    }
}

/// Runs a command whose output nobody wants and returns the largest resident set of its own, in bytes, to the very end. The
/// command is stopped when it ends, so that its figure can be read; so its time means nothing.
///
/// # Errors
/// It does not run, or ends otherwise than with exit code 0.
pub fn peak_memory(command: &mut Command) -> Outcome<u64> {
    use std::os::unix::process::CommandExt;
    let trace = || {
        // SAFETY: asks to be traced by the parent; takes no memory.
        match unsafe { libc::ptrace(libc::PTRACE_TRACEME) } {
            -1 => Err(io::Error::last_os_error()),
            _ => Ok(()),
        }
    };
    // SAFETY: between fork and exec there is one system call, and no allocation.
    unsafe { command.pre_exec(trace) };
    command.stdin(Stdio::null()).stdout(Stdio::null());
    let text = shown(command);
    let said = |e: io::Error| format!("cannot trace {text}: {e}");
    let pid = command.spawn().map_err(said)?.id();
    let mut peak = None;
    let mut is_first = true;
    loop {
        let (status, _) = wait4(pid).map_err(said)?;
        if libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0 {
            return peak.ok_or_else(|| format!("{text}: its memory could not be read"));
        }
        if !libc::WIFSTOPPED(status) {
            return Err(format!("{text}: it failed while it was traced (status {status:#x})"));
        }
        let signal = libc::WSTOPSIG(status);
        let is_end = status >> 16 == libc::PTRACE_EVENT_EXIT;
        if is_end {
            peak = resident_peak(pid);
        }
        if is_first {
            let options = libc::PTRACE_O_TRACEEXIT | libc::PTRACE_O_EXITKILL;
            // SAFETY: the traced process is stopped; takes no memory.
            unsafe { libc::ptrace(libc::PTRACE_SETOPTIONS, pid as libc::pid_t, 0, options) };
        }
        // The stops of the tracing itself are no signals of the command.
        let passed_on = if is_first || is_end { 0 } else { signal };
        is_first = false;
        // SAFETY: the same.
        if unsafe { libc::ptrace(libc::PTRACE_CONT, pid as libc::pid_t, 0, passed_on) } == -1 {
            return Err(said(io::Error::last_os_error()));
        }
    }
}

/// The largest resident set that a process has had, in bytes.
pub(crate) fn resident_peak(pid: u32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.trim().strip_suffix(" kB")?.parse::<u64>().ok()? * 1024)
}

fn duration(t: libc::timeval) -> Duration {
    Duration::new(t.tv_sec as u64, t.tv_usec as u32 * 1000)
}

/// Waits until a child has ended, for `limit` at most. Whether it has; it is not reaped.
fn ends_within(pid: u32, limit: Duration) -> io::Result<bool> {
    // SAFETY: takes no memory; gives a new descriptor, or -1.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid as libc::pid_t, 0) };
    let fd = libc::c_int::try_from(fd).ok().filter(|fd| *fd >= 0).ok_or_else(io::Error::last_os_error)?;
    // SAFETY: the descriptor is open, and nobody else's.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    let mut asked = libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    let begin = Instant::now();
    loop {
        let left = limit.saturating_sub(begin.elapsed()).as_millis();
        let left = libc::c_int::try_from(left).unwrap_or(libc::c_int::MAX);
        // SAFETY: `asked` is one live value of the type that poll wants.
        match unsafe { libc::poll(&raw mut asked, 1, left) } {
            0 => return Ok(false),
            1 => return Ok(true),
            _ => {}
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

fn wait4(pid: u32) -> io::Result<(libc::c_int, libc::rusage)> {
    let mut status = 0;
    let mut rusage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    loop {
        // SAFETY: both pointers are to live, writable values of the types that wait4 wants.
        let got = unsafe { libc::wait4(pid as libc::pid_t, &raw mut status, 0, rusage.as_mut_ptr()) };
        if got == pid as libc::pid_t {
            // SAFETY: zeroed is a valid rusage already, and wait4 filled it in.
            return Ok((status, unsafe { rusage.assume_init() }));
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// Writes `path`'s data to the disk and drops it from the page cache, so that a measurement starts cold.
pub fn evict(path: &Path) -> Outcome {
    let said = |e: io::Error| format!("{}: {e}", path.display());
    let file = File::open(path).map_err(said)?;
    file.sync_all().and_then(|()| advise(&file, libc::POSIX_FADV_DONTNEED)).map_err(said)
}

/// Advice about all of a file (`POSIX_FADV_*`).
pub(crate) fn advise(file: &File, advice: libc::c_int) -> io::Result<()> {
    // SAFETY: the descriptor is open for the whole call; the call touches no memory of ours.
    match unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, advice) } {
        0 => Ok(()),
        errno => Err(io::Error::from_raw_os_error(errno)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measures_exit_code_output_and_cpu() {
        let measured = || {
            let script = "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done; echo hi; exit 3";
            let usage = measure(Command::new("sh").args(["-c", script])).expect("sh runs");
            assert_eq!(usage.code, Some(3));
            assert_eq!(usage.stdout, "hi\n");
            assert!(usage.cpu > Duration::ZERO && usage.cpu <= usage.wall * 2);
            usage.max_rss
        };
        // Who looks at the memory may come after the end now and then.
        assert!((0..20).any(|_| measured() > 100 * 1024));
        assert!(measure_ok(&mut Command::new("false")).is_err());
    }

    #[test]
    fn a_command_that_stands_still_is_ended_and_told() {
        let still =
            measure_ok_within(Command::new("sleep").arg("100000"), Duration::from_secs(1)).unwrap_err();
        assert_eq!(still, "no answer within 1 s: sleep 100000");
        let ended = measure_ok_within(Command::new("echo").arg("x"), Duration::from_secs(600)).unwrap();
        assert_eq!(ended.stdout, "x\n");
    }

    #[test]
    fn the_peak_of_a_short_command_is_its_own() {
        // A child that is made by a copy of this process has its memory for a moment.
        let own = std::hint::black_box(vec![1u8; 64 << 20]);
        let peak = peak_memory(&mut Command::new("true")).unwrap();
        assert!((100 << 10..32 << 20).contains(&peak), "{peak}");
        let mut command = Command::new("sh");
        let large =
            peak_memory(command.args(["-c", "x=$(head -c 20000000 /dev/zero | tr '\\0' x)"])).unwrap();
        assert!(large > 20_000_000, "{large}");
        assert!(peak_memory(&mut Command::new("false")).is_err());
        drop(own);
    }

    #[test]
    fn quotes_only_what_a_shell_would_split() {
        let mut command = Command::new("zebu");
        command.args(["io", "-c", "read 0 4k", "it's"]);
        assert_eq!(shown(&command), r"zebu io -c 'read 0 4k' 'it'\''s'");
    }
}
