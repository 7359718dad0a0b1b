//! The servers that are measured: how they are started, what their CPUs do, how they end.

use super::lab::Lab;
use crate::Outcome;
use crate::process::run;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Who serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Server {
    Zebu,
    Qemu,
    /// The raw file, which has no mapping at all. (It knows no O_DIRECT: it reads through the page cache and tells the
    /// kernel to forget.)
    Nbdkit,
}

/// How clients come in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Door {
    Nbd,
    /// With so many rings.
    VhostUser(u8),
    Fuse,
}

impl Door {
    fn is_open(self, path: &Path, device: u64) -> bool {
        fs::metadata(path).is_ok_and(|found| match self {
            Door::Nbd | Door::VhostUser(_) => found.file_type().is_socket(),
            // Mounted over the file that was there.
            Door::Fuse => found.dev() != device,
        })
    }
}

impl Server {
    pub(super) fn label(self) -> &'static str {
        match self {
            Server::Zebu => "zebu",
            Server::Qemu => "QEMU",
            Server::Nbdkit => "nbdkit",
        }
    }

    fn command(self, lab: &Lab, door: Door, file: &Path, path: &Path) -> Command {
        let (file, path) = (file.display(), path.display());
        match self {
            Server::Zebu => {
                let mut command = Command::new(&lab.zebu);
                command.args(["serve", "-t", "none", "-f", "qcow2"]);
                match door {
                    Door::Nbd => command.args(["--nbd", &format!("unix:{path}")]),
                    Door::VhostUser(rings) => {
                        command.args(["--queues", &rings.to_string(), "--vhost-user-blk", &path.to_string()])
                    }
                    Door::Fuse => command.args(["--fuse", &path.to_string()]),
                };
                command.arg(file.to_string());
                command
            }
            Server::Qemu => {
                let mut command = Command::new("qemu-storage-daemon");
                let file = format!("driver=file,node-name=file,filename={file},aio=io_uring,cache.direct=on");
                command.args(["--blockdev", &file]);
                command.args(["--blockdev", "driver=qcow2,node-name=disk,file=file"]);
                let export = match door {
                    Door::Nbd => {
                        let server = format!("addr.type=unix,addr.path={path},max-connections=16");
                        command.args(["--nbd-server", &server]);
                        "type=nbd,name=".to_owned()
                    }
                    Door::VhostUser(rings) => {
                        format!("type=vhost-user-blk,addr.type=unix,addr.path={path},num-queues={rings}")
                    }
                    Door::Fuse => format!("type=fuse,mountpoint={path}"),
                };
                command.args(["--export", &format!("{export},id=export,node-name=disk,writable=on")]);
                command
            }
            Server::Nbdkit => {
                let mut command = Command::new("nbdkit");
                command.args(["--foreground", "--unix", &path.to_string(), "file"]);
                command.args([&format!("file={file}"), "cache=none"]);
                command
            }
        }
    }
}

/// A server that runs; ended on drop.
pub(super) struct Running {
    child: Child,
    /// Its socket, or the file that it mounts over.
    path: PathBuf,
}

impl Running {
    pub(super) fn start(lab: &Lab, server: Server, door: Door, file: &Path) -> Outcome<Self> {
        let path = Self::place(lab);
        Self::of(server, server.command(lab, door, file, &path), door, path)
    }

    /// Where a server's door is.
    pub(super) fn place(lab: &Lab) -> PathBuf {
        lab.dir.join("door")
    }

    /// Runs the command of a server whose door is to be at `path`.
    pub(super) fn of(server: Server, mut command: Command, door: Door, path: PathBuf) -> Outcome<Self> {
        // One that was killed leaves its socket behind.
        let _ = fs::remove_file(&path);
        let said = |e: std::io::Error| format!("{}: {e}", path.display());
        if door == Door::Fuse {
            fs::write(&path, "").map_err(said)?;
        }
        let device = fs::metadata(path.parent().unwrap_or(Path::new("."))).map_err(said)?.dev();
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(|e| format!("{}: {e}", server.label()))?;
        if server == Server::Zebu
            && let Some(stdout) = child.stdout.take()
        {
            BufReader::new(stdout).read_line(&mut String::new()).map_err(|e| e.to_string())?;
        }
        let running = Self { child, path };
        let deadline = Instant::now() + Duration::from_secs(10);
        while !door.is_open(&running.path, device) {
            if Instant::now() > deadline {
                return Err(format!("{} does not serve", server.label()));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        // Between the binding and the listening.
        std::thread::sleep(Duration::from_millis(200));
        Ok(running)
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Time that its threads have run, in user and kernel mode; those that ended, and the kernel's for its io_uring,
    /// count too (proc_pid_stat(5), fields 14 and 15).
    pub(super) fn cpu(&self) -> Outcome<Duration> {
        let path = format!("/proc/{}/stat", self.child.id());
        let text = fs::read_to_string(&path).map_err(|e| format!("{path}: {e}"))?;
        let fields = text.rsplit_once(')').map_or("", |(_, fields)| fields).split_whitespace();
        let ticks: u64 = fields.skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum();
        // SAFETY: takes a number, touches no memory.
        let per_second = unsafe { libc::sysconf(libc::_SC_CLK_TCK) }.max(1);
        Ok(Duration::from_secs_f64(ticks as f64 / per_second as f64))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // In good order: a killed one may hold its locks for moments.
        if run(Command::new("kill").arg(self.child.id().to_string())).is_err() {
            let _ = self.child.kill();
        }
        let _ = self.child.wait();
    }
}
