//! Serving an image over NBD, vhost-user-blk and FUSE: `zebu serve` beside `qemu-storage-daemon`, and over NBD beside
//! nbdkit on the raw file. Where more than one request is in flight, fio on the raw file itself says what the disk can do.

use super::fio::{Ask, Found, figure, fio};
use super::lab::Lab;
use super::servers::{Door, Running, Server};
use crate::Outcome;
use crate::ab::{Metric, Sample, Side};
use crate::process::{output, run};
use crate::toolchain::{cargo, target_dir};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const ASKS: [Ask; 8] = [
    Ask {
        name: "4 KiB random reads, depth 1",
        rw: "randread",
        block: 4096,
        align: 4096,
        depth: 1,
        connections: 1,
        apart: 0,
    },
    Ask {
        name: "4 KiB random reads, depth 32",
        rw: "randread",
        block: 4096,
        align: 4096,
        depth: 32,
        connections: 1,
        apart: 0,
    },
    Ask {
        name: "4 KiB random reads, 4 connections x 32",
        rw: "randread",
        block: 4096,
        align: 4096,
        depth: 32,
        connections: 4,
        apart: 0,
    },
    Ask {
        name: "4 KiB random writes, depth 1",
        rw: "randwrite",
        block: 4096,
        align: 4096,
        depth: 1,
        connections: 1,
        apart: 0,
    },
    Ask {
        name: "4 KiB random writes, depth 32",
        rw: "randwrite",
        block: 4096,
        align: 4096,
        depth: 32,
        connections: 1,
        apart: 0,
    },
    Ask {
        name: "4 KiB random writes, 4 connections x 32",
        rw: "randwrite",
        block: 4096,
        align: 4096,
        depth: 32,
        connections: 4,
        apart: 0,
    },
    Ask {
        name: "1 MiB sequential reads",
        rw: "read",
        block: 1 << 20,
        align: 1 << 20,
        depth: 4,
        connections: 1,
        apart: 0,
    },
    Ask {
        name: "1 MiB sequential writes",
        rw: "write",
        block: 1 << 20,
        align: 1 << 20,
        depth: 4,
        connections: 1,
        apart: 0,
    },
];

/// The table of NBD: requests per second, latencies, and what the server's CPUs do for each request.
pub(super) fn serving(lab: &Lab) -> Outcome {
    let (image, raw) = (image(lab)?, raw(lab)?);
    for ask in ASKS {
        let side = |server: Server, file: &Path| {
            let file = file.to_owned();
            let run = move || {
                let running = Running::start(lab, server, Door::Nbd, &file)?;
                let uri = format!("--uri=nbd+unix:///?socket={}", running.path().display());
                measured(&running, || on(lab, ask, &["--ioengine=nbd", &uri]))
            };
            Side { label: server.label().into(), run: Box::new(run) }
        };
        let mut others = vec![
            (format!("serve: {}", ask.name), side(Server::Qemu, &image)),
            (format!("serve, beside nbdkit on the raw file: {}", ask.name), side(Server::Nbdkit, &raw)),
        ];
        if ask.depth > 1 {
            others.push((format!("serve, beside the disk: {}", ask.name), disk(lab, ask, &raw)));
        }
        lab.compare_each(side(Server::Zebu, &image), others)?;
    }
    for file in [image, raw] {
        fs::remove_file(&file).map_err(|e| format!("{}: {e}", file.display()))?;
    }
    Ok(())
}

/// The table of vhost-user-blk, with a front end of our own; a ring stands for a connection.
pub(super) fn vhost_user(lab: &Lab) -> Outcome {
    let program = "vhost_load";
    let build = ["build", "--quiet", "--release", "--locked", "--package", "zebu-tests", "--bin", program];
    run(cargo().args(build))?;
    let load = target_dir()?.join("release").join(program);
    let (image, raw) = (image(lab)?, raw(lab)?);
    for ask in ASKS {
        let side = |server: Server| {
            let (image, load) = (image.clone(), load.clone());
            let run = move || {
                let running = Running::start(lab, server, Door::VhostUser(ask.connections as u8), &image)?;
                measured(&running, || rings(lab, ask, &load, running.path()))
            };
            Side { label: server.label().into(), run: Box::new(run) }
        };
        let what = ask.name.replace("connections", "rings");
        let mut others = vec![(format!("serve over vhost-user-blk: {what}"), side(Server::Qemu))];
        if ask.depth > 1 {
            let name = format!("serve over vhost-user-blk, beside the disk: {what}");
            others.push((name, disk(lab, ask, &raw)));
        }
        lab.compare_each(side(Server::Zebu), others)?;
    }
    for file in [image, raw] {
        fs::remove_file(&file).map_err(|e| format!("{}: {e}", file.display()))?;
    }
    Ok(())
}

/// The table of FUSE: fio on the mounted file.
pub(super) fn fuse(lab: &Lab) -> Outcome {
    let image = image(lab)?;
    for ask in ASKS {
        let side = |server: Server| {
            let image = image.clone();
            let run = move || {
                let running = Running::start(lab, server, Door::Fuse, &image)?;
                let file = format!("--filename={}", running.path().display());
                measured(&running, || on(lab, ask, &["--ioengine=io_uring", "--direct=1", &file]))
            };
            Side { label: server.label().into(), run: Box::new(run) }
        };
        let name = format!("serve over FUSE: {}", ask.name.replace("connections", "programs"));
        lab.compare(&name, [side(Server::Zebu), side(Server::Qemu)])?;
    }
    fs::remove_file(&image).map_err(|e| format!("{}: {e}", image.display()))
}

/// An image whose clusters are all there.
fn image(lab: &Lab) -> Outcome<PathBuf> {
    let image = lab.dir.join("served.qcow2");
    let size = format!("{}G", lab.gib);
    let mut create = lab.qemu_img();
    run(create.args(["create", "-q", "-f", "qcow2", "-o", "preallocation=full"]).arg(&image).arg(&size))?;
    Ok(image)
}

/// A raw file that is all there.
fn raw(lab: &Lab) -> Outcome<PathBuf> {
    let (raw, size) = (lab.dir.join("served.raw"), format!("{}G", lab.gib));
    run(lab.qemu_img().args(["create", "-q", "-f", "raw", "-o", "preallocation=full"]).arg(&raw).arg(&size))?;
    Ok(raw)
}

/// The same load on the raw file, without a server.
fn disk<'a>(lab: &'a Lab, ask: Ask, raw: &Path) -> Side<'a> {
    let file = format!("--filename={}", raw.display());
    let run = move || {
        let found = on(lab, ask, &["--ioengine=io_uring", "--direct=1", &file])?;
        Ok(vec![
            (Metric::RequestsPerSecond, found.iops),
            (Metric::LatencyP99Micros, found.p99_nanoseconds / 1000.0),
        ])
    };
    Side { label: "fio, raw file".to_owned(), run: Box::new(run) }
}

/// fio on the whole of a disk.
fn on(lab: &Lab, ask: Ask, target: &[&str]) -> Outcome<Found> {
    fio(ask, lab.gib << 30, seconds(lab, ask), target)
}

/// How long a load lasts, in seconds: the CPU time of a server is known in hundredths of one, and with one request in flight
/// it needs little.
fn seconds(lab: &Lab, ask: Ask) -> u32 {
    lab.sized(1, if ask.depth == 1 { 2 } else { 1 })
}

/// Puts a load on a server, and looks at its CPUs before and after.
fn measured(running: &Running, load: impl FnOnce() -> Outcome<Found>) -> Outcome<Sample> {
    let before = running.cpu()?;
    let found = load()?;
    let cpu = running.cpu()?.saturating_sub(before);
    Ok(vec![
        (Metric::RequestsPerSecond, found.iops),
        (Metric::LatencyP99Micros, found.p99_nanoseconds / 1000.0),
        (Metric::CpuMicrosPerRequest, cpu.as_secs_f64() * 1e6 / found.requests.max(1.0)),
    ])
}

fn rings(lab: &Lab, ask: Ask, program: &Path, socket: &Path) -> Outcome<Found> {
    let text = output(Command::new(program).arg(socket).args([
        &format!("--rw={}", ask.rw),
        &format!("--block={}", ask.block),
        &format!("--depth={}", ask.depth),
        &format!("--queues={}", ask.connections),
        &format!("--runtime={}", seconds(lab, ask)),
    ]))?;
    let report: Value = serde_json::from_str(&text).map_err(|e| format!("the load's report: {e}"))?;
    Ok(Found {
        requests: figure(&report["requests"])?,
        iops: figure(&report["iops"])?,
        p99_nanoseconds: figure(&report["p99-ns"])?,
    })
}
