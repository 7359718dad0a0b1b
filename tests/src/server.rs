//! A running `zebu serve`.

use crate::program::{find, zebu_program};
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// A running `zebu serve`, with an NBD socket in its directory. Killed on drop.
#[derive(Debug)]
pub struct Server {
    child: Child,
    socket: PathBuf,
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

    fn spawn(mut command: Command, socket: PathBuf) -> Self {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("zebu starts");
        let mut line = String::new();
        let stdout = child.stdout.take().expect("piped");
        BufReader::new(stdout).read_line(&mut line).expect("readable");
        if line != "ready\n" {
            let _ = child.kill();
            let mut stderr = String::new();
            let _ = child.stderr.take().expect("piped").read_to_string(&mut stderr);
            panic!("{command:?} is not ready: {line}{stderr}");
        }
        Self { child, socket }
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

    /// What the kernel says of the filters of each thread's system calls (proc_pid_status(5)): 2 if there are any.
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
        self.stop_by("TERM")
    }

    /// As [`Server::stop_with_messages`], by this signal.
    ///
    /// # Panics
    /// If it does not exit with 0.
    #[track_caller]
    pub fn stop_by(mut self, signal: &str) -> String {
        self.signal(signal);
        let status = self.child.wait().expect("our child");
        let mut stderr = String::new();
        let _ = self.child.stderr.take().expect("piped").read_to_string(&mut stderr);
        assert!(status.success(), "{status}: {stderr}");
        assert!(!self.socket.exists(), "the socket is left behind");
        stderr
    }

    /// Kills it on the spot.
    pub fn kill(mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Sends a signal.
    pub fn signal(&self, name: &str) {
        let pid = self.pid().to_string();
        let sent = Command::new(find("kill").expect("kill")).args(["-s", name, &pid]).status();
        assert!(sent.expect("kill runs").success());
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
