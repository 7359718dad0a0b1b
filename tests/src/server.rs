//! A running `zebu serve`.

use crate::killed::{files_of, wait_for_writes_to};
use crate::program::{find, zebu_program};
use crate::vhost_guest::is_readable;
use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader, Read};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Variables by which the machine may name a proxy. The servers of tests are on the machine itself.
pub(crate) const PROXIES: [&str; 6] =
    ["http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"];

/// The first line of one to which clients can connect.
const READY: &str = "ready\n";

/// Waits for the end of a process.
///
/// # Panics
/// If it does not end within two minutes.
#[track_caller]
pub fn end_of(child: &mut Child) -> ExitStatus {
    let deadline = Instant::now() + Duration::from_secs(120);
    loop {
        if let Some(status) = child.try_wait().expect("our child") {
            return status;
        }
        if Instant::now() > deadline {
            let _ = child.kill();
            panic!("it does not end");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Waits until another program listens on a socket that it makes, without a connection: the first one may start a server.
///
/// # Panics
/// If it does not within a minute.
#[track_caller]
pub fn wait_for_listener(socket: &Path) {
    let place = format!(" {}", socket.display());
    // The fourth word has the flags: of a socket that listens `__SO_ACCEPTCON`.
    let listens = |line: &str| line.ends_with(&place) && line.split_whitespace().nth(3) == Some("00010000");
    let deadline = Instant::now() + Duration::from_secs(60);
    while !String::from_utf8_lossy(&std::fs::read("/proc/net/unix").expect("a list")).lines().any(listens) {
        assert!(Instant::now() < deadline, "nobody listens on {}", socket.display());
        std::thread::sleep(Duration::from_millis(10));
    }
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
        let socket = dir.join("nbd.sock");
        let mut command = Command::new(zebu_program());
        command.arg("serve").arg("--nbd").arg(format!("unix:{}", socket.display()));
        command.args(options.split_whitespace()).current_dir(dir);
        Self::spawn(command, socket)
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
        let line = format!("{command:?}");
        let mut server = Self::launch(command, socket);
        let said = server.first_words();
        if said != READY {
            let _ = server.child.kill();
            panic!("{line} is not ready: {said}{}", server.said());
        }
        server
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

    /// The first line of its standard output, or what there is of it within two minutes.
    fn first_words(&mut self) -> String {
        let mut line = String::new();
        let stdout = self.stdout.take().expect("not read yet");
        if is_readable(stdout.as_raw_fd(), Duration::from_secs(120)) {
            BufReader::new(stdout).read_line(&mut line).expect("readable");
        }
        line
    }

    /// Waits until clients can connect to one that was begun.
    ///
    /// # Panics
    /// If that does not come within two minutes.
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
        is_readable(self.stdout.as_ref().expect("not read yet").as_raw_fd(), Duration::ZERO)
    }

    fn heard(&self) -> String {
        String::from_utf8_lossy(&self.heard.lock().expect("nobody panics with it")).into_owned()
    }

    /// Waits until it has said this on its standard error.
    ///
    /// # Panics
    /// If it does not within a minute.
    pub fn wait_for_words(&self, words: &str) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !self.heard().contains(words) {
            assert!(Instant::now() < deadline, "not said: {words}; but: {}", self.heard());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Its standard error, once it has ended.
    fn said(&mut self) -> String {
        if let Some(listener) = self.listener.take() {
            listener.join().expect("it listens");
        }
        self.heard()
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
    /// If it does not exit with 0, or says anything.
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
    /// If it does not end within two minutes.
    #[track_caller]
    pub fn end_by(self, signal: Signal) -> (Option<i32>, String) {
        self.signal(signal);
        self.wait()
    }

    /// Waits until it has ended by itself or by a signal that was sent. Its exit code, `None` if a signal killed it, and what
    /// it wrote to standard error.
    ///
    /// # Panics
    /// If it does not end within two minutes.
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

    /// Kills it on the spot, and waits until its last write has landed.
    ///
    /// # Panics
    /// If that takes two minutes.
    #[track_caller]
    pub fn kill(self) {
        let files = files_of(self.pid());
        self.kill_amid_writes();
        files.iter().for_each(|file| wait_for_writes_to(file));
    }

    /// Kills it on the spot. What it has sent to the disk may be under way still.
    pub fn kill_amid_writes(mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
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
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
