//! Serving an image over NBD: `zebu serve` beside `qemu-storage-daemon`, and both beside nbdkit on the raw file.

use super::lab::{Extent, Lab};
use crate::Outcome;
use crate::ab::{Metric, Sample, Side};
use crate::process::{find, output, run};
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Who serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Server {
    Zebu,
    Qemu,
    /// The raw file, which has no mapping at all. (It knows no O_DIRECT: it reads through the page cache and tells the
    /// kernel to forget.)
    Nbdkit,
}

/// What fio asks for.
#[derive(Debug, Clone, Copy)]
struct Ask {
    name: &'static str,
    rw: &'static str,
    block: &'static str,
    depth: u32,
    connections: u32,
}

const ASKS: [Ask; 8] = [
    Ask { name: "4 KiB random reads, depth 1", rw: "randread", block: "4k", depth: 1, connections: 1 },
    Ask { name: "4 KiB random reads, depth 32", rw: "randread", block: "4k", depth: 32, connections: 1 },
    Ask {
        name: "4 KiB random reads, 4 connections x 32",
        rw: "randread",
        block: "4k",
        depth: 32,
        connections: 4,
    },
    Ask { name: "4 KiB random writes, depth 1", rw: "randwrite", block: "4k", depth: 1, connections: 1 },
    Ask { name: "4 KiB random writes, depth 32", rw: "randwrite", block: "4k", depth: 32, connections: 1 },
    Ask {
        name: "4 KiB random writes, 4 connections x 32",
        rw: "randwrite",
        block: "4k",
        depth: 32,
        connections: 4,
    },
    Ask { name: "1 MiB sequential reads", rw: "read", block: "1M", depth: 4, connections: 1 },
    Ask { name: "1 MiB sequential writes", rw: "write", block: "1M", depth: 4, connections: 1 },
];

/// The table: requests per second, latencies, and what the server's CPUs do for each request.
pub(super) fn serving(lab: &Lab) -> Outcome {
    let (image, raw) = (lab.dir.join("served.qcow2"), lab.dir.join("served.raw"));
    let size = format!("{}G", lab.gib);
    run(lab.qemu_img().args(["create", "-q", "-f", "raw", "-o", "preallocation=full"]).arg(&raw).arg(&size))?;
    run(lab
        .qemu_img()
        .args(["create", "-q", "-f", "qcow2", "-o", "preallocation=full"])
        .arg(&image)
        .arg(&size))?;
    for ask in ASKS {
        let side = |server: Server, file: &Path| {
            let file = file.to_owned();
            Side { label: server.label().into(), run: Box::new(move || measure(lab, server, &file, ask)) }
        };
        lab.compare(
            &format!("serve: {}", ask.name),
            [side(Server::Zebu, &image), side(Server::Qemu, &image)],
        )?;
        if find("nbdkit").is_some() {
            let name = format!("serve, beside the raw file: {}", ask.name);
            lab.compare(&name, [side(Server::Zebu, &image), side(Server::Nbdkit, &raw)])?;
        }
    }
    for file in [image, raw] {
        fs::remove_file(&file).map_err(|e| format!("{}: {e}", file.display()))?;
    }
    Ok(())
}

impl Server {
    fn label(self) -> &'static str {
        match self {
            Server::Zebu => "zebu",
            Server::Qemu => "QEMU",
            Server::Nbdkit => "nbdkit",
        }
    }

    fn command(self, lab: &Lab, file: &Path, socket: &Path) -> Command {
        let (file, socket) = (file.display(), socket.display());
        match self {
            Server::Zebu => {
                let mut command = Command::new(&lab.zebu);
                command.args(["serve", "-t", "none", "-f", "qcow2", "--nbd", &format!("unix:{socket}")]);
                command.arg(file.to_string());
                command
            }
            Server::Qemu => {
                let mut command = Command::new("qemu-storage-daemon");
                let file = format!("driver=file,node-name=file,filename={file},aio=io_uring,cache.direct=on");
                command.args(["--blockdev", &file]);
                command.args(["--blockdev", "driver=qcow2,node-name=disk,file=file"]);
                command
                    .args(["--nbd-server", &format!("addr.type=unix,addr.path={socket},max-connections=16")]);
                command.args(["--export", "type=nbd,id=export,node-name=disk,name=,writable=on"]);
                command
            }
            Server::Nbdkit => {
                let mut command = Command::new("nbdkit");
                command.args(["--foreground", "--unix", &socket.to_string(), "file"]);
                command.args([&format!("file={file}"), "cache=none"]);
                command
            }
        }
    }
}

/// A server that runs; ended on drop.
struct Running {
    child: Child,
    socket: PathBuf,
}

impl Running {
    fn start(lab: &Lab, server: Server, file: &Path) -> Outcome<Self> {
        let socket = lab.dir.join("nbd.sock");
        // One that was killed leaves its socket behind.
        let _ = fs::remove_file(&socket);
        let mut command = server.command(lab, file, &socket);
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(|e| format!("{}: {e}", server.label()))?;
        if server == Server::Zebu
            && let Some(stdout) = child.stdout.take()
        {
            BufReader::new(stdout).read_line(&mut String::new()).map_err(|e| e.to_string())?;
        }
        let running = Self { child, socket };
        let deadline = Instant::now() + Duration::from_secs(10);
        while !running.socket.exists() {
            if Instant::now() > deadline {
                return Err(format!("{} does not listen", server.label()));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        // Between the binding and the listening.
        std::thread::sleep(Duration::from_millis(200));
        Ok(running)
    }

    /// Time that its threads have run, in user and kernel mode; those that ended, and the kernel's for its io_uring,
    /// count too (proc_pid_stat(5), fields 14 and 15).
    fn cpu(&self) -> Outcome<Duration> {
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

fn measure(lab: &Lab, server: Server, file: &Path, ask: Ask) -> Outcome<Sample> {
    let seconds = if lab.extent == Extent::Quick { 2 } else { 10 };
    let running = Running::start(lab, server, file)?;
    let before = running.cpu()?;
    let text = output(Command::new("fio").args([
        "--name=load",
        "--ioengine=nbd",
        &format!("--uri=nbd+unix:///?socket={}", running.socket.display()),
        &format!("--rw={}", ask.rw),
        &format!("--bs={}", ask.block),
        &format!("--iodepth={}", ask.depth),
        &format!("--numjobs={}", ask.connections),
        &format!("--size={}G", lab.gib),
        "--time_based",
        &format!("--runtime={seconds}"),
        "--randrepeat=0",
        "--group_reporting",
        "--output-format=json",
    ]))?;
    let cpu = running.cpu()?.saturating_sub(before);
    // fio may say something before its report.
    let start = text.find('{').ok_or("fio gives no report")?;
    let report: Value = serde_json::from_str(&text[start..]).map_err(|e| format!("fio's report: {e}"))?;
    let side = if ask.rw.ends_with("read") { "read" } else { "write" };
    let figures = &report["jobs"][0][side];
    let figure = |value: &Value| value.as_f64().ok_or("fio's report lacks a figure");
    let requests = figure(&figures["total_ios"])?;
    Ok(vec![
        (Metric::RequestsPerSecond, figure(&figures["iops"])?),
        (Metric::LatencyP99Micros, figure(&figures["clat_ns"]["percentile"]["99.000000"])? / 1000.0),
        (Metric::CpuMicrosPerRequest, cpu.as_secs_f64() * 1e6 / requests.max(1.0)),
    ])
}
