//! Clients of others: libnbd's tools and Python, QEMU, fio.

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::path::Path;
use zebu_tests::program::{Finished, find, finish, run_in, zebu};
use zebu_tests::qemu::Qemu;
use zebu_tests::random::Random;
use zebu_tests::scratch::Scratch;
use zebu_tests::server::{Server, end_of, wait_for_listener};

const IMAGE: &str = "disk.qcow2";
const MIB: u64 = 1 << 20;

/// A program of another package.
fn tool(name: &str) -> std::path::PathBuf {
    find(name).unwrap_or_else(|| panic!("{name} is missing: `cargo xtask setup` installs it"))
}

fn run<const N: usize>(dir: &Path, name: &str, args: [&str; N]) -> Finished {
    run_in(dir, &tool(name), args)
}

/// A raw file of 64 MiB, a quarter of it data, at odd places.
fn sparse_raw(dir: &Path, name: &str) -> Vec<u8> {
    let mut random = Random::new(11);
    let mut bytes = vec![0; 64 << 20];
    for part in bytes.chunks_mut(MIB as usize).step_by(4) {
        let start = random.below(300_000) as usize;
        random.fill(&mut part[start..]);
    }
    std::fs::write(dir.join(name), &bytes).unwrap();
    bytes
}

fn json(finished: &Finished) -> Value {
    serde_json::from_str(&finished.stdout).unwrap_or_else(|e| panic!("{e}: {finished}"))
}

#[test]
fn nbdinfo_sees_what_there_is() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("nbd");
    let dir = scratch.path();
    qemu.create(dir, "base.qcow2", "qcow2", "", 8 * MIB);
    qemu.io(dir, "-f qcow2", "base.qcow2", &["write -P 1 1M 1M"]).ok();
    qemu.create(dir, IMAGE, "qcow2", "backing_file=base.qcow2,backing_fmt=qcow2", 8 * MIB);
    qemu.io(dir, "-f qcow2", IMAGE, &["write -P 2 2M 1M", "write -z 3M 1M"]).ok();
    let server = Server::start(
        dir,
        &format!("--export-name a --export-name b -f qcow2 {IMAGE} base.qcow2 --read-only"),
    );
    let list = json(&run(dir, "nbdinfo", ["--json", "--list", &server.uri("")]).ok());
    let exports = list["exports"].as_array().unwrap();
    let names: Vec<_> = exports.iter().map(|export| export["export-name"].as_str().unwrap()).collect();
    assert_eq!(names, ["a", "b"]);
    let export = &exports[0];
    assert_eq!(export["export-size"], 8 * MIB);
    assert_eq!(export["is_read_only"], true);
    assert_eq!(export["can_multi_conn"], true);
    assert_eq!(export["can_trim"], false);
    assert_eq!(export["block_size_maximum"], 32 * MIB);
    // The same as a server of QEMU says of the chain.
    let map = |context: &str, uri: &str| {
        let runs = json(&run(dir, "nbdinfo", ["--json", &format!("--map={context}"), uri]).ok());
        let states = runs.as_array().unwrap().iter();
        states
            .map(|run| {
                (
                    run["offset"].as_u64().unwrap(),
                    run["length"].as_u64().unwrap(),
                    run["type"].as_u64().unwrap(),
                )
            })
            .collect::<Vec<_>>()
    };
    assert_eq!(
        map("base:allocation", &server.uri("a")),
        [(0, MIB, 3), (MIB, 2 * MIB, 0), (3 * MIB, 5 * MIB, 3)]
    );
    assert_eq!(
        map("qemu:allocation-depth", &server.uri("a")),
        [(0, MIB, 0), (MIB, MIB, 2), (2 * MIB, 2 * MIB, 1), (4 * MIB, 4 * MIB, 0)]
    );
    // The whole of it in one option.
    run(dir, "nbdinfo", ["--is", "readonly", &server.uri("b")]).ok();
    run(dir, "nbdinfo", ["--size", &server.uri("nosuch")]).exits(1);
    server.stop();
}

#[test]
fn nbdcopy_keeps_holes_both_ways() {
    let Some(qemu) = Qemu::find() else { return };
    for options in ["", "--queues 2 -t none", "--aio threads"] {
        let scratch = Scratch::new("nbd");
        let dir = scratch.path();
        let bytes = sparse_raw(dir, "source.raw");
        qemu.create(dir, IMAGE, "qcow2", "", 64 * MIB);
        let server = Server::start(dir, &format!("{options} -f qcow2 {IMAGE}"));
        run(dir, "nbdcopy", ["--flush", "source.raw", &server.uri("")]).ok();
        run(dir, "nbdcopy", [&server.uri(""), "back.raw"]).ok();
        server.stop();
        assert!(std::fs::read(dir.join("back.raw")).unwrap() == bytes, "{options}");
        qemu.same_content(dir, "source.raw", IMAGE).unwrap();
        qemu.check_clean(dir, IMAGE).unwrap();
        for name in [IMAGE, "back.raw"] {
            let blocks = std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(dir.join(name)).unwrap());
            assert!(blocks * 512 < 24 * MIB, "{options}: {name} takes {} bytes", blocks * 512);
        }
    }
}

#[test]
fn tcp_is_served_as_unix_sockets_are() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("nbd");
    let dir = scratch.path();
    let bytes = sparse_raw(dir, "disk.raw");
    qemu.create(dir, IMAGE, "qcow2", "", 64 * MIB);
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = free.local_addr().unwrap();
    drop(free);
    let server = Server::start(dir, &format!("--nbd {address} --queues 2 -f qcow2 {IMAGE}"));
    let uri = format!("nbd://{address}");
    run(dir, "nbdcopy", ["--flush", "disk.raw", &uri]).ok();
    run(dir, "nbdcopy", [&server.uri(""), "copy.raw"]).ok();
    run(dir, "nbdcopy", [&uri, "copy2.raw"]).ok();
    for copy in ["copy.raw", "copy2.raw"] {
        assert!(std::fs::read(dir.join(copy)).unwrap() == bytes, "{copy}");
    }
    // One disk, whichever way it is reached.
    qemu.io(dir, "-f raw", &uri, &["write -P 7 5M 64k", "flush"]).ok();
    let out = qemu.io(dir, "-r -f raw", &server.uri(""), &["read -P 7 5M 64k"]).ok();
    assert!(!out.stdout.contains("failed"), "{out}");
    server.stop();
    qemu.check_clean(dir, IMAGE).unwrap();
}

#[test]
fn qemu_img_and_qemu_io_are_served() {
    let Some(qemu) = Qemu::find() else { return };
    for options in ["-t none --queues 2", "-t writethrough", "--aio threads"] {
        let scratch = Scratch::new("nbd");
        let dir = scratch.path();
        sparse_raw(dir, "source.raw");
        qemu.create(dir, IMAGE, "qcow2", "", 64 * MIB);
        let server = Server::start(dir, &format!("{options} -f qcow2 {IMAGE}"));
        let uri = server.uri("");
        qemu.img(dir, ["convert", "-n", "-f", "raw", "-O", "raw", "-W", "-m", "16", "source.raw", &uri]).ok();
        qemu.img(dir, ["compare", "-f", "raw", "-F", "raw", "source.raw", &uri]).ok();
        let commands = [
            "write -P 9 1M 8M",
            "write -f -P 10 1000001 17",
            "write -z 2M 1M",
            "write -z -u 3M 1M",
            "discard 4M 1M",
            "read -P 10 1000001 17",
            "read -P 9 1M 1M",
            "read -P 0 2M 2M",
            "read -P 9 5M 4M",
            "flush",
        ];
        let out = qemu.io(dir, "-f raw", &uri, &commands).ok();
        assert!(!out.stdout.contains("failed"), "{out}");
        server.stop();
        qemu.check_clean(dir, IMAGE).unwrap();
        let out = qemu.io(dir, "-f qcow2", IMAGE, &["read -P 10 1000001 17", "read -P 0 2M 2M"]).ok();
        assert!(!out.stdout.contains("failed"), "{out}");
    }
}

/// Runs a script with the handle `h`, connected to the export, from `before` on not yet.
fn nbdsh(dir: &Path, server: &Server, before: &str, script: &str) {
    let uri = server.uri("");
    let connect = format!("h.connect_uri('{uri}')");
    let mut command = std::process::Command::new(tool("nbdsh"));
    // The distribution's Python has the module; another one that comes first may not.
    let path = std::env::var("PATH").unwrap_or_default();
    command.env("PATH", format!("/usr/bin:{path}")).current_dir(dir);
    command.args(["-c", before, "-c", &connect, "-c", script]);
    finish(command).ok();
}

#[test]
fn nbdsh_scripts_go_through() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("nbd");
    let dir = scratch.path();
    qemu.create(dir, IMAGE, "qcow2", "", 64 * MIB);
    let server = Server::start(dir, &format!("--queues 2 -f qcow2 {IMAGE}"));
    let before = "h.add_meta_context('base:allocation')\nh.set_handshake_flags(3)";
    nbdsh(
        dir,
        &server,
        before,
        r"
import errno
assert h.get_size() == 64 << 20
assert h.can_df() and h.can_fast_zero() and h.can_cache() and h.can_fua() and h.can_multi_conn()
h.pwrite(b'\x05' * 1000000, 12345, nbd.CMD_FLAG_FUA)
assert h.pread(1000000, 12345) == b'\x05' * 1000000
assert h.pread(12345, 0) == bytes(12345)
h.zero(100000, 50000, nbd.CMD_FLAG_FAST_ZERO)
h.zero(65536, 1 << 20, nbd.CMD_FLAG_NO_HOLE)
assert h.pread(100000, 50000) == bytes(100000)
h.trim(1 << 20, 2 << 20, nbd.CMD_FLAG_FUA)
h.cache(1 << 20, 0)
h.flush()
entries = []
h.block_status(64 << 20, 0, lambda *a: entries.extend(a[2]) or 0)
assert sum(entries[::2]) == 64 << 20, entries
one = []
h.block_status(64 << 20, 0, lambda *a: one.extend(a[2]) or 0, nbd.CMD_FLAG_REQ_ONE)
assert len(one) == 2, one
h.set_strict_mode(0)
for call in [lambda: h.pread(512, 64 << 20), lambda: h.pread(512, (64 << 20) - 1), lambda: h.trim(0, 1 << 60, 1 << 9)]:
    try:
        call()
        assert False, 'no error'
    except nbd.Error as ex:
        assert ex.errnum == errno.EINVAL, ex
try:
    h.pwrite(bytes(512), 64 << 20)
    assert False, 'no error'
except nbd.Error as ex:
    assert ex.errnum == errno.ENOSPC, ex
assert h.pread(16, 0) == bytes(16)
",
    );
    // Without structured replies, and with the oldest way to choose an export.
    nbdsh(
        dir,
        &server,
        "h.set_request_structured_replies(False)\nh.set_handshake_flags(0)",
        r"
assert not h.can_df()
h.pwrite(b'\x06' * 4096, 0)
assert h.pread(4096, 0) == b'\x06' * 4096
h.set_strict_mode(0)
try:
    h.pread(512, 64 << 20)
    assert False, 'no error'
except nbd.Error as ex:
    pass
assert h.pread(512, 4096) == bytes(512)
",
    );
    // What one connection flushes, others wrote; many requests at once, completed in any order.
    let socket = server.socket().display().to_string();
    nbdsh(
        dir,
        &server,
        "",
        &format!(
            r"
others = [nbd.NBD() for _ in range(4)]
for at, other in enumerate(others):
    other.connect_unix('{socket}')
    cookies = [other.aio_pwrite(bytes([at + 1]) * 65536, (at * 100 + i) * 65536) for i in range(64)]
    left = set(cookies)
    while left:
        other.poll(-1)
        left = {{cookie for cookie in left if not other.aio_command_completed(cookie)}}
h.flush()
for at in range(4):
    assert h.pread(64 * 65536, at * 100 * 65536) == bytes([at + 1]) * (64 * 65536)
"
        ),
    );
    server.stop();
    qemu.check_clean(dir, IMAGE).unwrap();
}

#[test]
fn libnbd_negotiates_step_by_step() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("nbd");
    let dir = scratch.path();
    for name in ["a.qcow2", "b.qcow2"] {
        qemu.create(dir, name, "qcow2", "", if name == "a.qcow2" { 8 * MIB } else { 16 * MIB });
    }
    let server = Server::start(dir, "-f qcow2 a.qcow2 b.qcow2");
    let socket = server.socket().display().to_string();
    let script = |lines: &str| {
        let path = std::env::var("PATH").unwrap_or_default();
        let mut command = std::process::Command::new(tool("nbdsh"));
        command.env("PATH", format!("/usr/bin:{path}")).current_dir(dir);
        command.args(["-c", &lines.replace("SOCKET", &socket)]);
        finish(command).ok();
    };
    // Looking at exports before one is chosen; those that are not there; contexts that are not there.
    script(
        r"
h.set_opt_mode(True)
h.connect_unix('SOCKET')
assert h.get_protocol() == 'newstyle-fixed' and h.get_structured_replies_negotiated()
names = []
assert h.opt_list(lambda name, text: names.append(name)) == 2 and names == ['a.qcow2', 'b.qcow2'], names
h.set_full_info(True)
for name, size in (('a.qcow2', 8), ('b.qcow2', 16), ('', 8)):
    h.set_export_name(name)
    h.opt_info()
    assert h.get_size() == size << 20
    assert h.get_block_size(nbd.SIZE_PREFERRED) == 4096
h.set_export_name('c.qcow2')
for call in (h.opt_info, h.opt_go):
    try:
        call()
        assert False, 'no error'
    except nbd.Error:
        pass
h.set_export_name('b.qcow2')
offered = []
h.add_meta_context('base:')
h.opt_list_meta_context(lambda name: offered.append(name))
assert offered == ['base:allocation'], offered
h.clear_meta_contexts()
h.add_meta_context('no:such')
h.add_meta_context('qemu:allocation-depth')
h.add_meta_context('base:allocation')
h.opt_go()
assert not h.can_meta_context('no:such')
assert h.can_meta_context('qemu:allocation-depth') and h.can_meta_context('base:allocation')
seen = set()
h.block_status(16 << 20, 0, lambda name, *rest: seen.add(name) or 0)
assert seen == {'qemu:allocation-depth', 'base:allocation'}, seen
h.shutdown()
",
    );
    // Nothing chosen in the end.
    script("h.set_opt_mode(True)\nh.connect_unix('SOCKET')\nh.opt_abort()\n");
    // Many connections, many requests; and one request at a time.
    let bytes = sparse_raw(dir, "source.raw");
    zebu(dir, ["create", "-q", "-f", "qcow2", "c.qcow2", "64M"]).ok();
    server.stop();
    let server = Server::start(dir, "--queues 2 -f qcow2 c.qcow2");
    let uri = server.uri("");
    run(dir, "nbdcopy", ["--connections=8", "--requests=128", "--flush", "source.raw", &uri]).ok();
    run(dir, "nbdcopy", ["--synchronous", "--no-extents", &uri, "back.raw"]).ok();
    assert!(std::fs::read(dir.join("back.raw")).unwrap() == bytes);
    server.stop();
    qemu.check_clean(dir, "c.qcow2").unwrap();
}

#[test]
fn fio_verifies_over_connections_with_trims_and_flushes() {
    let Some(qemu) = Qemu::find() else { return };
    let engines = run_in(Path::new("/"), &tool("fio"), ["--enghelp=nbd"]);
    if engines.stdout.contains("not found") || engines.code != Some(0) {
        eprintln!("skipped: this fio has no nbd engine");
        return;
    }
    let scratch = Scratch::new("nbd");
    let dir = scratch.path();
    qemu.create(dir, IMAGE, "qcow2", "", 512 * MIB);
    let server = Server::start(dir, &format!("--queues 2 -t none -f qcow2 {IMAGE}"));
    let uri = format!("--uri={}", server.uri(""));
    // Eight connections verify what they write; between their parts of the disk eight others trim and write. (Jobs of
    // fio that verify and trim fail in fio itself.)
    run_in(
        dir,
        &tool("fio"),
        [
            "--ioengine=nbd",
            &uri,
            "--iodepth=32",
            "--size=32M",
            "--offset_increment=64M",
            "--numjobs=8",
            "--fsync=64",
            "--group_reporting",
            "--name=verify",
            "--rw=randwrite",
            "--bsrange=4k-64k",
            "--verify=crc32c",
            "--verify_fatal=1",
            "--name=trim",
            "--rw=randtrimwrite",
            "--bs=4k",
            "--offset=32M",
        ],
    )
    .ok();
    server.stop();
    qemu.check_clean(dir, IMAGE).unwrap();
}

#[test]
fn a_snapshot_is_served_and_not_written() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("nbd");
    let dir = scratch.path();
    qemu.create(dir, IMAGE, "qcow2", "", 8 * MIB);
    qemu.io(dir, "-f qcow2", IMAGE, &["write -P 1 0 1M"]).ok();
    qemu.img(dir, ["snapshot", "-c", "before", IMAGE]).ok();
    qemu.io(dir, "-f qcow2", IMAGE, &["write -P 2 0 1M"]).ok();
    for snapshot in ["--snapshot before", "-l snapshot.name=before", "-l snapshot.id=1"] {
        let server = Server::start(dir, &format!("{snapshot} -f qcow2 {IMAGE}"));
        let out = qemu.io(dir, "-r -f raw", &server.uri(""), &["read -P 1 0 1M"]).ok();
        assert!(!out.stdout.contains("failed"), "{out}");
        qemu.io(dir, "-f raw", &server.uri(""), &["write 0 1M"]).exits(1);
        server.stop();
    }
}

#[test]
fn wrong_command_lines_say_what_is_wrong() {
    let scratch = Scratch::new("nbd");
    let dir = scratch.path();
    zebu(dir, ["create", "-q", "-f", "qcow2", IMAGE, "1M"]).ok();
    std::fs::write(dir.join("disk.raw"), [0; 512]).unwrap();
    for (words, expected) in [
        (vec!["serve", IMAGE], "--nbd"),
        (vec!["serve", "--nbd", "nowhere", IMAGE], "unix:PATH"),
        (vec!["serve", "--nbd", "unix:/nonexistent/sock", IMAGE], "/nonexistent/sock"),
        (
            vec!["serve", "--nbd", "unix:s", "--export-name", "a", "--export-name", "b", IMAGE],
            "--export-name",
        ),
        (vec!["serve", "--nbd", "unix:s", "--export-name", "a", IMAGE, IMAGE], IMAGE),
        (vec!["serve", "--nbd", "unix:s", "disk.raw"], "raw"),
        (vec!["serve", "--nbd", "unix:s", "nosuch.qcow2"], "nosuch.qcow2"),
        (vec!["serve", "--nbd", "unix:s", "--snapshot", "none", IMAGE], "none"),
    ] {
        let out = zebu(dir, &words).exits(1);
        assert!(out.stderr.contains(expected), "{expected} is not named: {out}");
        assert!(!dir.join("s").exists(), "{out}");
    }
}

#[test]
fn sockets_that_were_passed_on_are_served() {
    let Some(systemd_activate) = find("systemd-socket-activate") else {
        eprintln!("skipped: there is no systemd-socket-activate");
        return;
    };
    let scratch = Scratch::new("nbd");
    let dir = scratch.path();
    zebu(dir, ["create", "-q", "-f", "qcow2", IMAGE, "1M"]).ok();
    let socket = dir.join("passed.sock");
    let mut command = std::process::Command::new(systemd_activate);
    command.arg("-l").arg(&socket).arg(zebu_tests::program::zebu_program());
    command.args(["serve", "--nbd", "systemd", "-f", "qcow2", IMAGE]).current_dir(dir);
    let mut server =
        command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null()).spawn().unwrap();
    wait_for_listener(&socket);
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    let out = run(dir, "nbdinfo", ["--size", &uri]);
    // The program was replaced by zebu when the first client came.
    kill_process(Pid::from_child(&server), Signal::TERM).unwrap();
    let status = end_of(&mut server);
    assert_eq!(out.ok().stdout, "1048576\n");
    assert!(status.success(), "{status}");
    zebu(dir, ["serve", "--nbd", "systemd", "-f", "qcow2", IMAGE]).exits(1);
}
