//! Places and doors that servers are less often used with, under the load of fio, which verifies what it reads: block devices,
//! sockets that were passed on, several mounts, all of them at once, on both engines.

use rustix::process::{Pid, Signal, kill_process};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use zebu_tests::device::Device;
use zebu_tests::program::{find, is_root, run_in, zebu_program};
use zebu_tests::qemu::Qemu;
use zebu_tests::scratch::Scratch;
use zebu_tests::server::{Server, end_of, wait_for_listener};

const MIB: u64 = 1 << 20;
const ENGINES: [&str; 2] = ["io_uring", "threads"];

fn has_fio_with_nbd() -> bool {
    let has = find("fio").is_some_and(|fio| {
        let engines = run_in(Path::new("/"), &fio, ["--enghelp=nbd"]);
        engines.code == Some(0) && !engines.stdout.contains("not found")
    });
    if !has {
        eprintln!("skipped: there is no fio with an nbd engine");
    }
    has
}

fn can_mount() -> bool {
    let can = is_root() && Path::new("/dev/fuse").exists();
    if !can {
        eprintln!("skipped: mounting needs root and /dev/fuse");
    }
    can
}

/// Writes all of `size`, in parts of many lengths, some of them again, and verifies them.
fn load(dir: &Path, place: &[&str], size: u64) -> Child {
    let mut fio = Command::new(find("fio").expect("fio"));
    fio.args(["--name=load", "--rw=randwrite", "--bsrange=4k-128k", "--iodepth=16", "--fsync=64"]);
    fio.args(["--verify=crc32c", "--verify_fatal=1", "--randseed=7", "--norandommap=0"]);
    fio.arg(format!("--size={size}")).args(place).current_dir(dir);
    fio.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("fio starts")
}

/// Verifies again what [`load`] wrote in the same place.
fn look(dir: &Path, place: &[&str], size: u64) {
    let mut fio = Command::new(find("fio").expect("fio"));
    fio.args(["--name=load", "--rw=randwrite", "--bsrange=4k-128k", "--iodepth=16", "--verify_only"]);
    fio.args(["--verify=crc32c", "--verify_fatal=1", "--randseed=7", "--norandommap=0"]);
    fio.arg(format!("--size={size}")).args(place).current_dir(dir);
    ends_well(fio.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("fio starts"));
}

#[track_caller]
fn ends_well(child: Child) {
    let out = child.wait_with_output().expect("fio ends");
    let (said, errors) = (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    assert!(out.status.success(), "{said}{errors}");
}

#[test]
fn block_devices_are_served_under_load() {
    let Some(qemu) = Qemu::find() else { return };
    if !has_fio_with_nbd() {
        return;
    }
    for engine in ENGINES {
        for format in ["raw", "qcow2"] {
            let Some(device) = Device::used(96 * MIB) else { return };
            let (dir, name) = (device.dir(), device.name());
            if format == "qcow2" {
                qemu.create(dir, name, "qcow2", "", 64 * MIB);
            }
            for cache in ["none", "writeback"] {
                let server =
                    Server::start(dir, &format!("--aio {engine} --queues 2 -t {cache} -f {format} {name}"));
                let uri = format!("--uri={}", server.uri(""));
                let parts = [["--offset=0", "--size=24M"], ["--offset=32M", "--size=24M"]];
                let places = parts.map(|[at, _]| ["--ioengine=nbd", &uri, at]);
                let loads = places.map(|place| load(dir, &place, 24 * MIB));
                loads.into_iter().for_each(ends_well);
                server.stop();
                let server = Server::start(dir, &format!("--aio {engine} -r -f {format} {name}"));
                let uri = format!("--uri={}", server.uri(""));
                for at in ["--offset=0", "--offset=32M"] {
                    look(dir, &["--ioengine=nbd", &uri, at], 24 * MIB);
                }
                server.stop();
            }
            if format == "qcow2" {
                qemu.check_clean(dir, name).unwrap();
            }
        }
    }
}

#[test]
fn several_files_are_mounted_and_served_over_nbd_at_once() {
    let Some(qemu) = Qemu::find() else { return };
    if !has_fio_with_nbd() || !can_mount() {
        return;
    }
    for engine in ENGINES {
        let scratch = Scratch::new("load");
        let dir = scratch.path();
        let names = ["a", "b", "c", "d"];
        for name in names {
            qemu.create(dir, &format!("{name}.qcow2"), "qcow2", "", 64 * MIB);
        }
        let options = format!(
            "--aio {engine} --queues 2 --fuse a.disk --fuse b.disk --fuse c.disk --fuse d.disk \
             -f qcow2 a.qcow2 b.qcow2 c.qcow2 d.qcow2"
        );
        let server = Server::start(dir, &options);
        let files = names.map(|name| format!("--filename={name}.disk"));
        let uris = names.map(|name| format!("--uri={}", server.uri(&format!("{name}.qcow2"))));
        // Each image by both doors, each with a part of its own.
        let mut loads = Vec::new();
        for (file, uri) in files.iter().zip(&uris) {
            loads.push(load(dir, &["--ioengine=psync", file, "--direct=1", "--offset=0"], 8 * MIB));
            loads.push(load(dir, &["--ioengine=nbd", uri, "--offset=32M"], 8 * MIB));
        }
        loads.into_iter().for_each(ends_well);
        // By the other door.
        for (file, uri) in files.iter().zip(&uris) {
            look(dir, &["--ioengine=psync", file, "--offset=32M"], 8 * MIB);
            look(dir, &["--ioengine=nbd", uri, "--offset=0"], 8 * MIB);
        }
        server.stop();
        for name in names {
            assert!(!dir.join(format!("{name}.disk")).exists(), "{engine}: a file is left behind");
            qemu.check_clean(dir, &format!("{name}.qcow2")).unwrap();
        }
    }
}

#[test]
fn sockets_that_were_passed_on_bear_load_and_a_signal() {
    let Some(qemu) = Qemu::find() else { return };
    let Some(activate) = find("systemd-socket-activate") else {
        eprintln!("skipped: there is no systemd-socket-activate");
        return;
    };
    if !has_fio_with_nbd() {
        return;
    }
    for engine in ENGINES {
        let scratch = Scratch::new("load");
        let dir = scratch.path();
        qemu.create(dir, "disk.qcow2", "qcow2", "", 64 * MIB);
        let (first, second) = (dir.join("first.sock"), dir.join("second.sock"));
        let start = || {
            let mut command = Command::new(&activate);
            command.arg("-l").arg(&first).arg("-l").arg(&second).arg(zebu_program());
            command.args([
                "serve",
                "--nbd",
                "systemd",
                "--aio",
                engine,
                "--queues",
                "2",
                "-f",
                "qcow2",
                "disk.qcow2",
            ]);
            command.stdout(Stdio::null()).stderr(Stdio::null()).current_dir(dir);
            let child = command.spawn().unwrap();
            for socket in [&first, &second] {
                wait_for_listener(socket);
            }
            child
        };
        let end = |mut server: Child| {
            kill_process(Pid::from_child(&server), Signal::TERM).unwrap();
            assert!(end_of(&mut server).success(), "{engine}");
            // The sockets are their maker's, not the server's.
            for socket in [&first, &second] {
                std::fs::remove_file(socket).unwrap();
            }
        };
        let uri = |socket: &Path| format!("--uri=nbd+unix:///?socket={}", socket.display());
        let server = start();
        let loads = [(&first, "--offset=0"), (&second, "--offset=32M")]
            .map(|(socket, at)| load(dir, &["--ioengine=nbd", &uri(socket), at], 16 * MIB));
        loads.into_iter().for_each(ends_well);
        end(server);
        let server = start();
        look(dir, &["--ioengine=nbd", &uri(&second), "--offset=0"], 16 * MIB);
        look(dir, &["--ioengine=nbd", &uri(&first), "--offset=32M"], 16 * MIB);
        end(server);
        qemu.check_clean(dir, "disk.qcow2").unwrap();
    }
}
