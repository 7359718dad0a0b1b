//! Servers that are measured: how they are started, what their processors do, how they end.

use crate::Outcome;
use crate::fio::Found;
use crate::lab::Lab;
use crate::metric::{Metric, Sample};
use crate::process::run;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A program that serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Server {
    Zebu,
    Qemu,
    /// Of the raw file, which has no mapping at all. (It knows no O_DIRECT: it reads through the page cache and tells the
    /// kernel to forget.)
    Nbdkit,
}

/// The way in for clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Door {
    Nbd,
    /// With so many rings.
    VhostUser(u32),
    Fuse,
}

/// A disk, and how it is opened.
#[derive(Debug, Clone)]
pub(crate) struct Disk<'a> {
    pub(crate) file: &'a Path,
    pub(crate) format: &'static str,
    /// More image options.
    pub(crate) options: String,
    /// The passphrase that these name, as `--object` has it.
    pub(crate) secret: Option<&'static str>,
    /// QEMU's way to do I/O.
    pub(crate) aio: &'static str,
    /// Socket for commands to the running server: `zebu ctl`, or QEMU's monitor.
    pub(crate) control: Option<&'a Path>,
}

impl<'a> Disk<'a> {
    pub(crate) fn new(file: &'a Path, format: &'static str) -> Self {
        Self { file, format, options: String::new(), secret: None, aio: "io_uring", control: None }
    }
}

impl Server {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Server::Zebu => "zebu",
            Server::Qemu => "QEMU",
            Server::Nbdkit => "nbdkit",
        }
    }

    fn command(self, lab: &Lab, door: Door, disk: &Disk<'_>, path: &Path) -> Command {
        let Disk { format, options, aio, .. } = disk;
        let (file, path) = (disk.file.display(), path.display());
        match self {
            Server::Zebu => {
                let mut command = lab.zebu();
                command.args(["serve", "-t", "none", "-i", "io_uring"]);
                match door {
                    Door::Nbd => command.args(["--nbd", &format!("unix:{path}")]),
                    Door::VhostUser(rings) => {
                        command.args(["--queues", &rings.to_string(), "--vhost-user-blk", &path.to_string()])
                    }
                    Door::Fuse => command.args(["--fuse", &path.to_string()]),
                };
                if let Some(control) = disk.control {
                    command.arg("--control").arg(control);
                }
                if let Some(secret) = disk.secret {
                    command.args(["--allow-secret-data", "--object", secret]);
                }
                command.arg("--image-opts").arg(format!("driver={format},file.filename={file}{options}"));
                command
            }
            Server::Qemu => {
                let mut command = Command::new("qemu-storage-daemon");
                command.args(disk.secret.into_iter().flat_map(|secret| ["--object", secret]));
                if let Some(control) = disk.control {
                    let socket = format!("socket,id=control,path={},server=on,wait=off", control.display());
                    command.args(["--chardev", &socket, "--monitor", "chardev=control"]);
                }
                command
                    .arg("--blockdev")
                    .arg(format!("driver=file,node-name=file,filename={file},aio={aio},cache.direct=on"));
                command.arg("--blockdev");
                command.arg(format!("driver={format},node-name=disk,file=file{options}"));
                let export = match door {
                    Door::Nbd => {
                        let server = format!("addr.type=unix,addr.path={path},max-connections=40");
                        command.args(["--nbd-server", &server]);
                        "type=nbd,name=".to_owned()
                    }
                    Door::VhostUser(rings) => {
                        format!("type=vhost-user-blk,addr.type=unix,addr.path={path},num-queues={rings}")
                    }
                    Door::Fuse => format!("type=fuse,mountpoint={path}"),
                };
                command.arg("--export").arg(format!("{export},id=export,node-name=disk,writable=on"));
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
pub(crate) struct Running {
    child: Child,
    /// Its socket, or the file that it mounts over.
    path: PathBuf,
}

impl Running {
    pub(crate) fn start(lab: &Lab, server: Server, door: Door, disk: &Disk<'_>) -> Outcome<Self> {
        let path = lab.file("door");
        // One that was killed leaves its socket behind.
        let _ = fs::remove_file(&path);
        let said = |e: std::io::Error| format!("{}: {e}", path.display());
        if door == Door::Fuse {
            fs::write(&path, "").map_err(said)?;
        }
        let device = fs::metadata(&lab.dir).map_err(said)?.dev();
        let mut command = server.command(lab, door, disk, &path);
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(|e| format!("{}: {e}", server.name()))?;
        if server == Server::Zebu
            && let Some(stdout) = child.stdout.take()
        {
            BufReader::new(stdout).read_line(&mut String::new()).map_err(|e| e.to_string())?;
        }
        let running = Self { child, path };
        let is_open = || {
            fs::metadata(&running.path).is_ok_and(|found| match door {
                Door::Nbd | Door::VhostUser(_) => found.file_type().is_socket(),
                // Mounted over the file that was there.
                Door::Fuse => found.dev() != device,
            })
        };
        let deadline = Instant::now() + Duration::from_secs(10);
        while !is_open() {
            if Instant::now() > deadline {
                return Err(format!("{} does not serve", server.name()));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        // Between the binding and the listening.
        std::thread::sleep(Duration::from_millis(200));
        Ok(running)
    }

    /// Puts a load on it, and looks at its processors before and after.
    pub(crate) fn measured(&self, load: impl FnOnce(&Path) -> Outcome<Found>) -> Outcome<Sample> {
        with_cpu(&self.child, || load(&self.path))
    }

    /// The socket of its disk, or the file.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Seconds that its processors have worked for it.
    pub(crate) fn cpu_seconds(&self) -> Outcome<f64> {
        Ok(cpu(&self.child)?.as_secs_f64())
    }
}

/// Puts a load on a server, and looks at its processors before and after.
pub(crate) fn with_cpu(server: &Child, load: impl FnOnce() -> Outcome<Found>) -> Outcome<Sample> {
    let before = cpu(server)?;
    let found = load()?;
    let cpu = cpu(server)?.saturating_sub(before).as_secs_f64();
    let mut sample = found.sample();
    sample.push((Metric::CpuMicrosPerRequest, cpu * 1e6 / found.requests.max(1.0)));
    Ok(sample)
}

/// Time that a process's threads have run, in user and kernel mode; those that ended, and the kernel's for its io_uring,
/// count too (proc_pid_stat(5), fields 14 and 15).
fn cpu(server: &Child) -> Outcome<Duration> {
    let path = format!("/proc/{}/stat", server.id());
    let text = fs::read_to_string(&path).map_err(|e| format!("{path}: {e}"))?;
    let fields = text.rsplit_once(')').map_or("", |(_, fields)| fields).split_whitespace();
    let ticks: u64 = fields.skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum();
    // SAFETY: takes a number, touches no memory.
    let per_second = unsafe { libc::sysconf(libc::_SC_CLK_TCK) }.max(1);
    Ok(Duration::from_secs_f64(ticks as f64 / per_second as f64))
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
