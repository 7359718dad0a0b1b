//! Disks over the network: converting from and to servers of this machine, and small reads through a slow link.

use crate::Outcome;
use crate::fio::{Ask, fio};
use crate::images::noise;
use crate::lab::{Lab, mib, remove};
use crate::metric::{Metric, Sample};
use crate::process::{measure_ok_within, resident_peak, run};
use crate::programs::{BOTH, FASTEST, Program};
use crate::run::{Side, sample};
use crate::web::{Daemon, Origin, link_program, slow_link, web_server};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Connections that each reader may have.
const CONNECTIONS: u32 = 32;
/// How long a conversion may take: QEMU's driver for web servers stands still at times, and never ends.
const ANSWER: Duration = Duration::from_secs(120);
/// qemu-nbd of a raw file.
fn nbd_server(lab: &Lab, file: &Path) -> Outcome<(Daemon, PathBuf)> {
    let socket = lab.file("nbd.sock");
    let _ = fs::remove_file(&socket);
    let mut command = Command::new("qemu-nbd");
    command.args(["-t", "--shared=16", "-f", "raw", "--cache=writeback", "-k"]).arg(&socket).arg(file);
    let running = Daemon::start(&mut command, || std::os::unix::net::UnixStream::connect(&socket).is_ok())?;
    Ok((running, socket))
}

/// Converting a raw disk of noise from nginx and from and to qemu-nbd. The server's pages are in memory.
pub(super) fn converts(lab: &Lab) -> Outcome {
    let files = lab.file("www");
    fs::create_dir_all(&files).map_err(|error| error.to_string())?;
    let source = files.join("data.raw");
    let gib = lab.gib();
    noise(&source, gib << 30)?;
    let (_web, port) = web_server(&lab.dir, Origin::Files(&files))?;
    let url = format!("http://127.0.0.1:{port}/data.raw");
    let mut cases = vec![(format!("convert raw from nginx, {gib} GiB"), url)];
    let target = lab.file("target.raw");
    run(lab.qemu_img().args(["create", "-q", "-f", "raw"]).arg(&target).arg((gib << 30).to_string()))?;
    let (nbd, socket) = nbd_server(lab, &source)?;
    let name = format!("convert raw from qemu-nbd, {gib} GiB");
    cases.push((name, format!("nbd+unix:///?socket={}", socket.display())));
    for (name, from) in &cases {
        lab.row(name, BOTH.map(|program| converted(lab, program, from.clone(), None, &source)));
    }
    drop(nbd);
    let (_nbd, socket) = nbd_server(lab, &target)?;
    let to = format!("nbd+unix:///?socket={}", socket.display());
    let name = format!("convert raw to qemu-nbd, {gib} GiB");
    let from = source.display().to_string();
    lab.row(&name, BOTH.map(|program| converted(lab, program, from.clone(), Some(to.clone()), &source)));
    remove(&source)
}

/// A convert by a program, to a new file unless `to` is another disk.
fn converted<'a>(
    lab: &'a Lab,
    program: Program,
    from: String,
    to: Option<String>,
    size: &'a Path,
) -> Side<'a> {
    Side::new(program.name(), move || {
        let file = lab.file(program.name());
        remove(&file)?;
        let mut command = program.img(lab);
        command.args(["convert", "-f", "raw", "-O", "raw"]);
        if program == Program::Qemu {
            command.args(FASTEST);
        }
        match &to {
            Some(to) => command.arg("-n").arg(&from).arg(to),
            None => command.arg(&from).arg(&file),
        };
        let usage = measure_ok_within(&mut command, ANSWER)?;
        remove(&file)?;
        let mut figures = vec![(Metric::MibPerSecond, mib(size)? / usage.wall.as_secs_f64())];
        figures.extend(sample(&usage));
        Ok(figures)
    })
}

/// Small reads of a web server's file through a link of 20 ms and 1 Gbit/s, by servers that know nothing of it before.
pub(super) fn reads(lab: &Lab) -> Outcome {
    let program = link_program()?;
    let files = lab.file("www");
    fs::create_dir_all(&files).map_err(|error| error.to_string())?;
    let rows = [
        (48, Keep::Usual, "48 MiB, which the cache holds"),
        (512, Keep::Usual, "512 MiB, of which the cache holds an eighth"),
        (512, Keep::Memory, "512 MiB, memory=640M"),
        (512, Keep::Directory, "512 MiB, --cache-dir"),
    ];
    for (mebibytes, keep, shown) in rows {
        let name = format!("4 KiB random reads at 20 ms and 1 Gbit/s, depth 32, {shown}");
        if !lab.wants(&name) {
            continue;
        }
        let source = files.join("data.raw");
        noise(&source, mebibytes << 20)?;
        let (_web, port) = web_server(&lab.dir, Origin::Files(&files))?;
        let (_link, port) = slow_link(&program, port)?;
        let url = format!("http://127.0.0.1:{port}/data.raw");
        let sides = ["zebu", "nbdkit", "QEMU"].map(|who| {
            let url = url.clone();
            Side::new(who, move || cold_reads(lab, who, keep, &url, mebibytes << 20))
        });
        lab.row(&name, sides);
        remove(&source)?;
    }
    Ok(())
}

/// Where zebu keeps what it read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Keep {
    /// In 64 MiB of memory, as without an option.
    Usual,
    Memory,
    Directory,
}

fn cold_reads(lab: &Lab, who: &str, keep: Keep, url: &str, size: u64) -> Outcome<Sample> {
    let socket = lab.file("reads.sock");
    let _ = fs::remove_file(&socket);
    let path = socket.display();
    let mut command = match who {
        "zebu" => {
            let mut command = lab.zebu();
            command.args(["serve", "--read-only", "--nbd", &format!("unix:{path}")]);
            if keep == Keep::Directory {
                let cache = lab.file("cache");
                let _ = fs::remove_dir_all(&cache);
                command.arg("--cache-dir").arg(cache);
            }
            let memory = if keep == Keep::Memory { ",memory=640M" } else { "" };
            command
                .args(["--image-opts", &format!("driver=http,url={url},connections={CONNECTIONS}{memory}")]);
            command
        }
        "nbdkit" => {
            let mut command = Command::new("nbdkit");
            command.args(["--foreground", "--readonly", "--threads", &CONNECTIONS.to_string()]);
            command.args(["--unix", &path.to_string(), "curl", url]);
            command
        }
        _ => {
            let mut command = Command::new("qemu-nbd");
            command.args(["-t", "-r", "--shared=4", "-k", &path.to_string(), "--image-opts"]);
            command.arg(format!("driver=http,url={url},timeout=60"));
            command
        }
    };
    let server = Daemon::start(&mut command, || std::os::unix::net::UnixStream::connect(&socket).is_ok())?;
    let target = ["--ioengine=nbd", &format!("--uri=nbd+unix:///?socket={path}")];
    let ask = match who {
        // It has a connection to the web server for each of its clients (newer versions: `connections=`).
        "nbdkit" => Ask { connections: CONNECTIONS, ..Ask::random("randread", 1) },
        _ => Ask::random("randread", 32),
    };
    let mut sample = fio(ask, size, lab.sized(5, 10), &target)?.sample();
    let peak = resident_peak(server.0.id()).ok_or("the server has ended")?;
    sample.push((Metric::MaxRssMib, peak as f64 / 1048576.0));
    Ok(sample)
}
