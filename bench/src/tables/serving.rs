//! Serving an image over NBD, vhost-user-blk and FUSE: `zebu serve` beside `qemu-storage-daemon`, and over NBD beside
//! nbdkit on the raw file. Where more than one request is in flight, fio on the raw file says what the disk can do.

use crate::Outcome;
use crate::fio::{Ask, Found, figure, fio};
use crate::lab::Lab;
use crate::process::{output, run};
use crate::programs::{CLUSTER, LARGE};
use crate::run::Side;
use crate::servers::{Disk, Door, Running, Server};
use crate::workspace::{cargo, target_dir};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;

const fn several(rw: &'static str) -> Ask {
    Ask { connections: 4, ..Ask::random(rw, 32) }
}

pub(super) const fn in_order(rw: &'static str) -> Ask {
    Ask { rw, block: LARGE, align: LARGE, depth: 4, connections: 1, apart: 0 }
}

/// Loads, with their names; the plural of what stands for a connection is put into them.
const ASKS: [(&str, Ask); 8] = [
    ("4 KiB random reads, depth 1", Ask::random("randread", 1)),
    ("4 KiB random reads, depth 32", Ask::random("randread", 32)),
    ("4 KiB random reads, 4 {} x 32", several("randread")),
    ("4 KiB random writes, depth 1", Ask::random("randwrite", 1)),
    ("4 KiB random writes, depth 32", Ask::random("randwrite", 32)),
    ("4 KiB random writes, 4 {} x 32", several("randwrite")),
    ("1 MiB sequential reads", in_order("read")),
    ("1 MiB sequential writes", in_order("write")),
];

/// An image and a raw file whose clusters are all there.
fn disks(lab: &Lab) -> Outcome<(PathBuf, PathBuf)> {
    let (image, raw, size) = (lab.file("served.qcow2"), lab.file("served.raw"), lab.gib() << 30);
    lab.create(&image, &format!("cluster_size={CLUSTER},preallocation=full"), size)?;
    let mut create = lab.qemu_img();
    create.args(["create", "-q", "-f", "raw", "-o", "preallocation=full"]);
    run(create.arg(&raw).arg(size.to_string()))?;
    Ok((image, raw))
}

/// A load on a server of a disk.
pub(super) fn served<'a>(
    lab: &'a Lab,
    server: Server,
    door: Door,
    disk: Disk<'a>,
    load: impl Fn(&Path) -> Outcome<Found> + 'a,
) -> Side<'a> {
    Side::new(server.name(), move || Running::start(lab, server, door, &disk)?.measured(&load))
}

/// The same load on the raw file, without a server, where there is more than one request in flight.
fn disk<'a>(lab: &'a Lab, ask: Ask, raw: &'a Path) -> Option<Side<'a>> {
    let run = move || {
        let file = format!("--filename={}", raw.display());
        Ok(on(lab, ask, &["--ioengine=io_uring", "--direct=1", &file])?.sample())
    };
    (ask.depth > 1).then(|| Side::new("fio, raw file", run))
}

/// fio on the whole of a disk.
fn on(lab: &Lab, ask: Ask, target: &[&str]) -> Outcome<Found> {
    fio(ask, lab.gib() << 30, seconds(lab, ask), target)
}

/// How long a load lasts: the CPU time of a server is known in hundredths of a second, and with one request in flight it
/// needs little.
fn seconds(lab: &Lab, ask: Ask) -> u32 {
    lab.sized(1, if ask.depth == 1 { 2 } else { 1 })
}

/// fio as an NBD client.
pub(super) fn over_nbd(lab: &Lab, ask: Ask) -> impl Fn(&Path) -> Outcome<Found> {
    move |socket| {
        on(lab, ask, &["--ioengine=nbd", &format!("--uri=nbd+unix:///?socket={}", socket.display())])
    }
}

/// Over NBD.
pub(super) fn nbd(lab: &Lab) -> Outcome {
    let (image, raw) = disks(lab)?;
    for (name, ask) in ASKS {
        let side = |server, file, format| {
            served(lab, server, Door::Nbd, Disk::new(file, format), over_nbd(lab, ask))
        };
        let sides = [
            side(Server::Zebu, &image, "qcow2"),
            side(Server::Qemu, &image, "qcow2"),
            side(Server::Nbdkit, &raw, "raw"),
        ];
        let name = format!("serve: {}", name.replace("{}", "connections"));
        lab.row(&name, sides.into_iter().chain(disk(lab, ask, &raw)));
    }
    Ok(())
}

/// Over vhost-user-blk, with a front end of our own; a ring stands for a connection.
pub(super) fn vhost_user(lab: &Lab) -> Outcome {
    let program = "vhost_load";
    let build = ["build", "--quiet", "--release", "--locked", "--package", "zebu-tests", "--bin", program];
    run(cargo().args(build))?;
    let program = target_dir()?.join("release").join(program);
    let (image, raw) = disks(lab)?;
    for (name, ask) in ASKS {
        let side = |server| {
            let (door, program) = (Door::VhostUser(ask.connections), program.clone());
            let load = move |socket: &Path| rings(lab, ask, &program, socket);
            served(lab, server, door, Disk::new(&image, "qcow2"), load)
        };
        let name = format!("serve over vhost-user-blk: {}", name.replace("{}", "rings"));
        lab.row(&name, [side(Server::Zebu), side(Server::Qemu)].into_iter().chain(disk(lab, ask, &raw)));
    }
    Ok(())
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

/// As a file: fio on what is mounted.
pub(super) fn fuse(lab: &Lab) -> Outcome {
    let (image, _) = disks(lab)?;
    for (name, ask) in ASKS {
        let load = move |file: &Path| {
            let file = format!("--filename={}", file.display());
            on(lab, ask, &["--ioengine=io_uring", "--direct=1", &file])
        };
        let side = |server| served(lab, server, Door::Fuse, Disk::new(&image, "qcow2"), load);
        let name = format!("serve over FUSE: {}", name.replace("{}", "programs"));
        lab.row(&name, [side(Server::Zebu), side(Server::Qemu)]);
    }
    Ok(())
}
