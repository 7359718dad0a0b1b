//! A running `zebu serve`.

use crate::patience::{LONGEST, Patience, wait_for, wait_until};
use crate::program::{find, zebu_program};
use crate::vhost_guest::is_readable;
use rustix::process::{Pid, Signal, kill_process};
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

/// Variables by which the machine may name a proxy. The servers of tests are on the machine itself.
pub(crate) const PROXIES: [&str; 6] =
    ["http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"];

/// The first line of one to which clients can connect.
const READY: &str = "ready\n";

/// Waits for the end of a process.
///
/// # Panics
/// If it never ends.
#[track_caller]
pub fn end_of(child: &mut Child) -> ExitStatus {
    wait_for("the end of a process", || child.try_wait().expect("our child"))
}

/// Kills a process and waits until the kernel has given up what it held: its rings keep sockets and locks of files until
/// their last request is done.
///
/// # Panics
/// If the kernel never does.
#[track_caller]
pub fn kill_until_free(child: &mut Child) {
    if !matches!(child.try_wait(), Ok(None)) {
        return;
    }
    let (sockets, locks) = (sockets_of(child.id()), locks_of(child.id()));
    // Others may have the same locks, if they are shared.
    let all = all_locks();
    let count = |all: &[Lock], lock: &Lock| all.iter().filter(|other| *other == lock).count();
    let others: Vec<usize> = locks.iter().map(|lock| count(&all, lock).saturating_sub(1)).collect();
    let _ = child.kill();
    let _ = child.wait();
    wait_until("a killed process's sockets are closed", || {
        // The word of a line that is the inode.
        [("unix", 6), ("tcp", 9), ("tcp6", 9)].into_iter().all(|(name, word)| {
            let table = std::fs::read_to_string(format!("/proc/net/{name}")).unwrap_or_default();
            let mut inodes = table.lines().filter_map(|line| line.split_whitespace().nth(word));
            !inodes.any(|inode| sockets.iter().any(|own| own == inode))
        })
    });
    wait_until("a killed process's locks are gone", || {
        let all = all_locks();
        locks.iter().zip(&others).all(|(lock, others)| count(&all, lock) <= *others)
    });
}

/// The inodes of a process's sockets.
fn sockets_of(pid: u32) -> Vec<String> {
    let links = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let names = links.filter_map(|link| std::fs::read_link(link.path()).ok());
    names
        .filter_map(|name| Some(name.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned()))
        .collect()
}

/// A lock: its mode, its file's device and inode, and the range, as the kernel writes them.
type Lock = Vec<String>;

/// The locks of a process (proc_pid_fdinfo(5)).
fn locks_of(pid: u32) -> BTreeSet<Lock> {
    let infos = std::fs::read_dir(format!("/proc/{pid}/fdinfo")).into_iter().flatten().flatten();
    let texts = infos.filter_map(|info| std::fs::read_to_string(info.path()).ok());
    let lines =
        |text: String| text.lines().filter_map(|line| line.strip_prefix("lock:")).filter_map(lock).collect();
    texts.flat_map(|text| -> Vec<Lock> { lines(text) }).collect()
}

/// The locks of all processes (proc_locks(5)).
fn all_locks() -> Vec<Lock> {
    std::fs::read_to_string("/proc/locks").unwrap_or_default().lines().filter_map(lock).collect()
}

/// The lock of a line `1: OFDLCK ADVISORY READ -1 08:01:1234 100 100`; `None` for one that somebody waits for.
fn lock(line: &str) -> Option<Lock> {
    let words: Vec<_> = line.split_whitespace().map(str::to_owned).collect();
    (words.len() == 8).then(|| [&words[3..4], &words[5..]].concat())
}

/// Waits until another program listens on a socket that it makes, without a connection: the first one may start a server.
///
/// # Panics
/// If it never does.
#[track_caller]
pub fn wait_for_listener(socket: &Path) {
    wait_until(format_args!("somebody listens on {}", socket.display()), || is_listening(socket));
}

/// Whether a program listens on a socket, without a connection.
pub(crate) fn is_listening(socket: &Path) -> bool {
    let place = format!(" {}", socket.display());
    // The fourth word has the flags: of a socket that listens `__SO_ACCEPTCON`.
    let listens = |line: &str| line.ends_with(&place) && line.split_whitespace().nth(3) == Some("00010000");
    String::from_utf8_lossy(&std::fs::read("/proc/net/unix").expect("a list")).lines().any(listens)
}

/// A running `zebu serve`, with an NBD socket in its directory. Killed on drop.
#[derive(Debug)]
pub struct Server {
    child: Child,
    socket: PathBuf,
    /// Takes what it says, so that it never waits for that.
    listener: Option<JoinHandle<()>>,
    /// Its standard error as far as it has come.
    heard: Arc<Mutex<Vec<u8>>>,
    /// Its standard output, until its first line was read.
    stdout: Option<ChildStdout>,
}

impl Server {
    /// Starts a server on a Unix socket in `dir` and waits until it is ready. `options` are split at blanks.
    ///
    /// # Panics
    /// If it does not become ready.
    pub fn start(dir: &Path, options: &str) -> Self {
        Self::try_start(dir, options).unwrap_or_else(|said| panic!("{said}"))
    }

    /// As [`Server::start`], for one that may be refused.
    ///
    /// # Errors
    /// It does not become ready; what it said.
    pub fn try_start(dir: &Path, options: &str) -> Result<Self, String> {
        let socket = dir.join("nbd.sock");
        let mut command = Command::new(zebu_program());
        command.arg("serve").arg("--nbd").arg(format!("unix:{}", socket.display()));
        command.args(options.split_whitespace()).current_dir(dir);
        Self::try_spawn(command, socket)
    }

    /// As [`Server::start`], with another variable in its environment.
    ///
    /// # Panics
    /// If it does not become ready.
    pub fn start_with(dir: &Path, variable: (&str, &str), options: &str) -> Self {
        Self::start_with_all(dir, &[variable], options)
    }

    /// As [`Server::start`], with other variables in its environment.
    ///
    /// # Panics
    /// If it does not become ready.
    pub fn start_with_all(dir: &Path, variables: &[(&str, &str)], options: &str) -> Self {
        let socket = dir.join("nbd.sock");
        let mut command = Command::new(zebu_program());
        command.arg("serve").arg("--nbd").arg(format!("unix:{}", socket.display()));
        command.args(options.split_whitespace()).current_dir(dir).envs(variables.iter().copied());
        Self::spawn(command, socket)
    }

    /// As [`Server::start`], run by nohup(1): SIGHUP is ignored from the start.
    ///
    /// # Panics
    /// If it does not become ready.
    pub fn start_without_hangups(dir: &Path, options: &str) -> Self {
        let socket = dir.join("nbd.sock");
        let mut command = Command::new(find("nohup").expect("nohup"));
        command.arg(zebu_program()).arg("serve").arg("--nbd").arg(format!("unix:{}", socket.display()));
        command.args(options.split_whitespace()).current_dir(dir);
        Self::spawn(command, socket)
    }

    /// As [`Server::start`], run by timeout(1), which passes signals on.
    ///
    /// # Panics
    /// If it does not become ready.
    pub fn start_under_timeout(dir: &Path, options: &str) -> Self {
        let socket = dir.join("nbd.sock");
        let mut command = Command::new(find("timeout").expect("timeout"));
        command.arg(LONGEST.as_secs().to_string()).arg(zebu_program());
        command.arg("serve").arg("--nbd").arg(format!("unix:{}", socket.display()));
        command.args(options.split_whitespace()).current_dir(dir);
        Self::spawn(command, socket)
    }

    /// As [`Server::start`], as the leader of a session with a terminal.
    ///
    /// # Panics
    /// If it does not become ready.
    pub fn start_in_terminal(dir: &Path, options: &str) -> (Self, Terminal) {
        let socket = dir.join("nbd.sock");
        let mut command = Command::new(zebu_program());
        command.arg("serve").arg("--nbd").arg(format!("unix:{}", socket.display()));
        command.args(options.split_whitespace()).current_dir(dir);
        let (ours, theirs) = terminal();
        let number = theirs.as_raw_fd();
        let lead = move || {
            // SAFETY: both are system calls that a process may make between fork and exec; `number` is open there.
            let is_led = unsafe { libc::setsid() >= 0 && libc::ioctl(number, libc::TIOCSCTTY, 0) == 0 };
            if is_led { Ok(()) } else { Err(std::io::Error::last_os_error()) }
        };
        // SAFETY: `lead` makes system calls only.
        unsafe { command.pre_exec(lead) };
        let server = Self::spawn(command, socket);
        drop(theirs);
        (server, Terminal(ours))
    }

    /// As [`Server::start`], with a vhost-user-blk device instead.
    ///
    /// # Panics
    /// If it does not become ready.
    pub fn start_vhost_user(dir: &Path, options: &str) -> Self {
        let socket = dir.join("vhost.sock");
        let mut command = Command::new(zebu_program());
        command.arg("serve").arg("--vhost-user-blk").arg(&socket);
        command.args(options.split_whitespace()).current_dir(dir);
        Self::spawn(command, socket)
    }

    /// As [`Server::start`], without waiting: [`Server::becomes_ready`] does.
    pub fn begin(dir: &Path, options: &str) -> Self {
        let socket = dir.join("nbd.sock");
        let mut command = Command::new(zebu_program());
        command.arg("serve").arg("--nbd").arg(format!("unix:{}", socket.display()));
        command.args(options.split_whitespace()).current_dir(dir);
        Self::launch(command, socket)
    }

    fn spawn(command: Command, socket: PathBuf) -> Self {
        Self::try_spawn(command, socket).unwrap_or_else(|said| panic!("{said}"))
    }

    fn try_spawn(command: Command, socket: PathBuf) -> Result<Self, String> {
        let line = format!("{command:?}");
        let mut server = Self::launch(command, socket);
        let said = server.first_words();
        if said != READY {
            let _ = server.child.kill();
            let _ = server.child.wait();
            return Err(format!("{line} is not ready: {said}{}", server.said()));
        }
        Ok(server)
    }

    fn launch(mut command: Command, socket: PathBuf) -> Self {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        for variable in PROXIES {
            command.env_remove(variable);
        }
        let mut child = command.spawn().expect("zebu starts");
        let stdout = child.stdout.take();
        let mut stderr = child.stderr.take().expect("piped");
        let heard = Arc::new(Mutex::new(Vec::new()));
        let theirs = Arc::clone(&heard);
        let listener = std::thread::spawn(move || {
            let mut piece = [0; 4096];
            while let Ok(len @ 1..) = stderr.read(&mut piece) {
                theirs.lock().expect("nobody panics with it").extend_from_slice(&piece[..len]);
            }
        });
        Self { child, socket, listener: Some(listener), heard, stdout }
    }

    /// The first line of its standard output, or what there is of it.
    fn first_words(&mut self) -> String {
        let mut line = String::new();
        let stdout = self.stdout.take().expect("not read yet");
        if is_readable(stdout.as_raw_fd(), LONGEST) {
            BufReader::new(stdout).read_line(&mut line).expect("readable");
        }
        line
    }

    /// Waits until clients can connect to one that was begun.
    ///
    /// # Panics
    /// If that never comes.
    #[track_caller]
    pub fn becomes_ready(&mut self) {
        let said = self.first_words();
        assert_eq!(said, READY, "{}", self.heard());
    }

    /// Whether one that was begun has said anything yet: that clients can connect.
    ///
    /// # Panics
    /// If it was asked to be ready before.
    pub fn is_ready(&self) -> bool {
        is_readable(self.stdout.as_ref().expect("not read yet").as_raw_fd(), std::time::Duration::ZERO)
    }

    /// Its standard error as far as it has come.
    pub fn heard(&self) -> String {
        String::from_utf8_lossy(&self.heard.lock().expect("nobody panics with it")).into_owned()
    }

    /// Waits until it has said this on its standard error.
    ///
    /// # Panics
    /// If it never does.
    #[track_caller]
    pub fn wait_for_words(&self, words: &str) {
        let patience = Patience::begin();
        while !self.heard().contains(words) {
            patience.pause(format_args!("the words {words}; but: {}", self.heard()));
        }
    }

    /// Its standard error, once it has ended, but for what it says of a disk that is busy with others.
    fn said(&mut self) -> String {
        if let Some(listener) = self.listener.take() {
            listener.join().expect("it listens");
        }
        let heard = self.heard();
        heard.split_inclusive('\n').filter(|line| !line.contains("waits since ")).collect()
    }

    /// The socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// The URI of an export.
    pub fn uri(&self, export: &str) -> String {
        format!("nbd+unix:///{export}?socket={}", self.socket.display())
    }

    /// Number of the process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Descriptors that the process has open.
    pub fn descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.pid())).map_or(0, Iterator::count)
    }

    /// Sockets that the process has open.
    pub fn sockets(&self) -> usize {
        sockets_of(self.pid()).len()
    }

    /// The filters of each thread's system calls, as the kernel tells (proc_pid_status(5)): 2 if there are any.
    pub fn system_call_filters(&self) -> Vec<String> {
        let threads = std::fs::read_dir(format!("/proc/{}/task", self.pid())).unwrap();
        // One that ends meanwhile has none.
        let status =
            threads.filter_map(|thread| std::fs::read_to_string(thread.ok()?.path().join("status")).ok());
        let line = |text: String| text.lines().find(|line| line.starts_with("Seccomp:")).map(str::to_owned);
        status.filter_map(line).map(|line| line["Seccomp:".len()..].trim().to_owned()).collect()
    }

    /// Processes that it has started.
    pub fn children(&self) -> Vec<u32> {
        let threads = std::fs::read_dir(format!("/proc/{}/task", self.pid())).unwrap();
        let children =
            threads.filter_map(|thread| std::fs::read_to_string(thread.ok()?.path().join("children")).ok());
        children
            .flat_map(|list| list.split_whitespace().map(|pid| pid.parse().unwrap()).collect::<Vec<_>>())
            .collect()
    }

    /// Memory of the process, in KiB.
    pub fn resident_kib(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap_or_default();
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap_or_default();
        line.split_whitespace().nth(1).and_then(|kib| kib.parse().ok()).unwrap_or(0)
    }

    /// Names of its threads.
    ///
    /// # Panics
    /// If it is gone.
    pub fn threads(&self) -> Vec<String> {
        let threads = std::fs::read_dir(format!("/proc/{}/task", self.pid())).expect("it runs");
        let names =
            threads.filter_map(|thread| std::fs::read_to_string(thread.ok()?.path().join("comm")).ok());
        names.map(|name| name.trim().to_owned()).collect()
    }

    /// Time of the processor that it has used, in clock ticks (proc_pid_stat(5), fields 14 and 15).
    ///
    /// # Panics
    /// If it is gone.
    pub fn processor_ticks(&self) -> u64 {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid())).expect("it runs");
        let behind_name = stat.rsplit_once(')').expect("a name").1;
        behind_name
            .split_whitespace()
            .skip(11)
            .take(2)
            .map(|ticks| ticks.parse::<u64>().expect("a number"))
            .sum()
    }

    /// Asks it to end, and waits for that.
    ///
    /// # Panics
    /// If it does not exit with 0, or says anything but that a busy disk has it wait.
    #[track_caller]
    pub fn stop(self) {
        let stderr = self.stop_with_messages();
        assert!(stderr.is_empty(), "{stderr}");
    }

    /// Asks it to end, and waits for that. What it wrote to standard error.
    ///
    /// # Panics
    /// If it does not exit with 0.
    #[track_caller]
    pub fn stop_with_messages(self) -> String {
        self.stop_by(Signal::TERM)
    }

    /// As [`Server::stop_with_messages`], by this signal.
    ///
    /// # Panics
    /// If it does not exit with 0.
    #[track_caller]
    pub fn stop_by(mut self, signal: Signal) -> String {
        self.signal(signal);
        let status = end_of(&mut self.child);
        let stderr = self.said();
        assert!(status.success(), "{status}: {stderr}");
        assert!(!self.socket.exists(), "the socket is left behind");
        stderr
    }

    /// Sends a signal, and waits as [`Server::wait`] does.
    ///
    /// # Panics
    /// If it never ends.
    #[track_caller]
    pub fn end_by(self, signal: Signal) -> (Option<i32>, String) {
        self.signal(signal);
        self.wait()
    }

    /// Waits until it has ended by itself or by a signal that was sent. Its exit code, `None` if a signal killed it, and what
    /// it wrote to standard error.
    ///
    /// # Panics
    /// If it never ends.
    #[track_caller]
    pub fn wait(mut self) -> (Option<i32>, String) {
        let status = end_of(&mut self.child);
        (status.code(), self.said())
    }

    /// Its exit code and what it wrote to standard error, if it has ended; `None` for a code if a signal killed it.
    ///
    /// # Panics
    /// If the system does not tell.
    pub fn has_ended(&mut self) -> Option<(Option<i32>, String)> {
        let status = self.child.try_wait().expect("our child")?;
        Some((status.code(), self.said()))
    }

    /// Kills it on the spot, and waits until the kernel has given up all that it held.
    ///
    /// # Panics
    /// If the kernel never does.
    #[track_caller]
    pub fn kill(mut self) {
        kill_until_free(&mut self.child);
    }

    /// Kills it on the spot. What it has sent to the disk may be under way still, and its rings hold its sockets and its locks for a
    /// while.
    pub fn kill_amid_writes(mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Stops all its threads where they are, until SIGCONT.
    ///
    /// # Panics
    /// If one never stops.
    #[track_caller]
    pub fn freeze(&self) {
        self.signal(Signal::STOP);
        let tasks = format!("/proc/{}/task", self.pid());
        // The state follows the name, which is in parentheses.
        let is_stopped = |stat: String| {
            stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with(['T', 't']))
        };
        wait_until("all threads stand still", || {
            let mut threads = std::fs::read_dir(&tasks).expect("it runs");
            threads.all(|thread| {
                let stat = thread.and_then(|thread| std::fs::read_to_string(thread.path().join("stat")));
                stat.map_or(true, is_stopped)
            })
        });
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("our child");
    }
}

/// The terminal of a server.
#[derive(Debug)]
pub struct Terminal(OwnedFd);

impl Terminal {
    /// Closes it, as a window or a connection that ends does.
    pub fn close(self) {
        drop(self.0);
    }
}

/// A terminal, from both sides.
fn terminal() -> (OwnedFd, OwnedFd) {
    let (mut ours, mut theirs) = (-1, -1);
    // SAFETY: two places for descriptors; the others may be null.
    let made = unsafe {
        libc::openpty(
            &raw mut ours,
            &raw mut theirs,
            std::ptr::null_mut(),
            std::ptr::null(),
            std::ptr::null(),
        )
    };
    assert_eq!(made, 0, "no terminal: {}", std::io::Error::last_os_error());
    // SAFETY: they were made just now, and are nobody else's.
    let [ours, theirs] = [ours, theirs].map(|fd| unsafe { OwnedFd::from_raw_fd(fd) });
    // The server must not hold our side open.
    rustix::io::fcntl_setfd(&ours, rustix::io::FdFlags::CLOEXEC).expect("ours");
    (ours, theirs)
}

impl Drop for Server {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        } else {
            kill_until_free(&mut self.child);
        }
    }
}
