//! Checkpoints that clients pull: full copies and increments of a disk in use, one moment of several disks, and every end of one.

use serde_json::Value;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use zebu_tests::lanes::{change_until, content, lanes};
use zebu_tests::model::difference;
use zebu_tests::nbd_client::{Client, command};
use zebu_tests::patience::{wait_for, wait_until};
use zebu_tests::program::{Finished, finish, required, run_in, zebu};
use zebu_tests::qemu::Qemu;
use zebu_tests::scratch::Scratch;
use zebu_tests::server::Server;

const MIB: usize = 1 << 20;

/// Applies what a bitmap of an export marks onto a raw copy: the URI, the bitmap and the copy come as `uri`, `bitmap`, `copy`.
const APPLY: &str = r#"
context = "qemu:dirty-bitmap:" + bitmap
h.add_meta_context(context)
h.add_meta_context("base:allocation")
h.connect_uri(uri)
assert h.is_read_only() and h.can_meta_context(context) and h.can_meta_context("base:allocation")
size, at, runs = h.get_size(), 0, []
while at < size:
    told = []
    h.block_status(min(size - at, 1 << 30), at, lambda *a: (a[0] == context and told.extend(a[2])) and 0 or 0)
    assert told, at
    for length, flags in zip(told[::2], told[1::2]):
        if flags & 1:
            runs.append((at, min(length, size - at)))
        at += length
with open(copy, "r+b") as target:
    target.truncate(size)
    for offset, length in runs:
        while length > 0:
            step = min(length, 1 << 20)
            target.seek(offset)
            target.write(h.pread(step, offset))
            offset, length = offset + step, length - step
print(sum(length for _, length in runs))
"#;

fn ctl(dir: &Path, words: &[&str]) -> Finished {
    zebu(dir, [&["ctl", "ctl.sock"], words].concat())
}

fn query(dir: &Path, name: &str) -> Value {
    serde_json::from_str(&ctl(dir, &["checkpoint-query", name]).ok().stdout).unwrap()
}

fn uri(server: &Server, export: &str) -> String {
    format!("nbd+unix:///{export}?socket={}", server.socket().display())
}

fn serve(images: &[&str], size: usize, options: &str) -> (Scratch, Server) {
    let scratch = Scratch::new("checkpoints");
    for image in images {
        zebu(scratch.path(), ["create", "-q", "-f", "qcow2", image, &size.to_string()]).ok();
    }
    let server = start(scratch.path(), images, options);
    (scratch, server)
}

fn start(dir: &Path, images: &[&str], options: &str) -> Server {
    let names: Vec<String> = images.iter().map(|image| format!("--export-name {}", &image[..1])).collect();
    let (names, images) = (names.join(" "), images.join(" "));
    Server::start(dir, &format!("--control ctl.sock {options} {names} -f qcow2 {images}"))
}

fn is_same(expected: &[u8], found: &[u8], what: &str) {
    if let Some(text) = difference(0, expected, found) {
        panic!("{what}: {text}");
    }
}

/// Applies the increment of an export onto `copy`; the bytes that were marked.
fn apply(dir: &Path, server: &Server, export: &str, bitmap: &str, copy: &str) -> u64 {
    let script = format!("uri, bitmap, copy = {:?}, {bitmap:?}, {copy:?}\n{APPLY}", uri(server, export));
    let mut command = Command::new(required("nbdsh"));
    // The distribution's Python has the module; another one that comes first may not.
    let path = std::env::var("PATH").unwrap_or_default();
    command.env("PATH", format!("/usr/bin:{path}")).current_dir(dir).args(["-c", &script]);
    finish(command).ok().stdout.trim().parse().unwrap()
}

#[test]
fn full_copies_and_increments_are_pulled_while_others_write() {
    let Some(qemu) = Qemu::find() else { return };
    let size = 24 * MIB + 512;
    let (scratch, server) = serve(&["root.qcow2"], size, "--queues 2");
    let dir = scratch.path();
    let mut clients = lanes(&server, size, 7);
    for lane in &mut clients {
        (0..40).for_each(|_| lane.change());
    }
    let moment = content(&clients);
    ctl(dir, &["checkpoint", "r", "--bitmap", "b", "--serve", "full", "--spill", "spill"]).ok();
    assert!(!dir.join("spill").exists());
    change_until(&mut clients, &AtomicBool::new(false), || {
        run_in(dir, &required("nbdcopy"), [uri(&server, "full").as_str(), "copy.raw"]).ok();
        let convert = format!("convert -f raw -O qcow2 {} copy.qcow2", uri(&server, "full"));
        qemu.img_line(dir, &convert).ok();
        let map = format!("map --output json -f raw {}", uri(&server, "full"));
        let map: Value = serde_json::from_str(&qemu.img_line(dir, &map).ok().stdout).unwrap();
        let told: u64 = map.as_array().unwrap().iter().map(|run| run["length"].as_u64().unwrap()).sum();
        assert_eq!(told, size as u64);
    });
    is_same(&moment, &std::fs::read(dir.join("copy.raw")).unwrap(), "nbdcopy");
    is_same(&moment, &qemu.read_all(dir, "copy.qcow2", None), "qemu-img convert");
    let state = query(dir, "full");
    assert_eq!((&state["status"], &state["bitmap"]), (&"running".into(), &"b".into()), "{state}");
    assert_eq!(state["exports"][0]["export"], "r");
    assert!(state["copied-for-clients"].as_u64() > Some(0), "{state}");
    let stats: Value = serde_json::from_str(&ctl(dir, &["stats"]).ok().stdout).unwrap();
    assert!(stats["checkpoints"][0]["spill"]["limit"].as_u64() > Some(0), "{stats}");
    ctl(dir, &["checkpoint-end", "full"]).ok();
    assert_eq!(query(dir, "full")["ended-by"], "command");
    // The bitmap goes on under its name, or another goes on.
    for (round, (from, bitmap)) in [("b", "b"), ("b", "b"), ("b", "c"), ("c", "c")].into_iter().enumerate() {
        for lane in &mut clients {
            (0..8).for_each(|_| lane.change());
        }
        let moment = content(&clients);
        let name = format!("pull{round}");
        ctl(dir, &["checkpoint", "--from", from, "--bitmap", bitmap, "--serve", &name]).ok();
        let mut marked = 0;
        change_until(&mut clients, &AtomicBool::new(false), || {
            marked = apply(dir, &server, &name, from, "copy.raw");
        });
        assert!(marked > 0);
        is_same(&moment, &std::fs::read(dir.join("copy.raw")).unwrap(), &name);
        ctl(dir, &["checkpoint-end", &name]).ok();
    }
    drop(clients);
    server.stop();
    qemu.check_clean(dir, "root.qcow2").unwrap();
}

#[test]
fn an_increment_that_was_not_pulled_comes_again() {
    let size = 4 * MIB;
    let (scratch, server) = serve(&["root.qcow2"], size, "");
    let dir = scratch.path();
    ctl(dir, &["bitmap-add", "r", "b"]).ok();
    let mut client = Client::open(server.socket(), "r").unwrap();
    let dirty = || {
        let told: Value = serde_json::from_str(&ctl(dir, &["bitmaps", "r"]).ok().stdout).unwrap();
        told["bitmaps"][0]["dirty-bytes"].as_u64()
    };
    assert_eq!(client.write(0, 0, &vec![1; 65536]).unwrap(), 0);
    for (options, expected) in [(&["--failed"][..], 2), (&[], 1)] {
        ctl(dir, &["checkpoint", "--from", "b", "--bitmap", "b", "--serve", "pull"]).ok();
        assert_eq!(dirty(), None);
        let refused = ctl(dir, &["checkpoint", "--from", "b", "--serve", "other"]).exits(1);
        assert!(refused.stderr.contains("bitmap 'b'"), "{refused}");
        assert_eq!(client.write(0, MIB as u64, &vec![1; 65536]).unwrap(), 0);
        ctl(dir, &[&["checkpoint-end", "pull"], options].concat()).ok();
        assert_eq!(dirty(), Some(expected << 16));
    }
    drop(client);
    server.stop();
}

#[test]
fn three_disks_are_shown_as_at_one_moment() {
    let names = ["a", "b", "c"];
    let (scratch, server) = serve(&["a.qcow2", "b.qcow2", "c.qcow2"], 4 * MIB, "--queues 2");
    let dir = scratch.path();
    let (acknowledged, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    let number = |bytes: &[u8]| u64::from_le_bytes(bytes[..8].try_into().unwrap());
    std::thread::scope(|scope| {
        let (server, acknowledged, stop) = (&server, &acknowledged, &stop);
        scope.spawn(move || {
            let mut disks = names.map(|name| Client::open(server.socket(), name).unwrap());
            let mut next = 1u64;
            while !stop.load(SeqCst) {
                for disk in &mut disks {
                    assert_eq!(disk.write(0, 0, &next.to_le_bytes().repeat(64)).unwrap(), 0);
                }
                acknowledged.store(next, SeqCst);
                next += 1;
            }
        });
        for round in 0..12 {
            let before = acknowledged.load(SeqCst);
            let name = format!("m{round}");
            ctl(dir, &["checkpoint", "a", "b", "c", "--bitmap", "now", "--serve", &name]).ok();
            let after = acknowledged.load(SeqCst);
            let shown = names.map(|disk| {
                let mut client = Client::open(server.socket(), &format!("{name}.{disk}")).unwrap();
                number(&client.read(0, 512).unwrap())
            });
            assert!(shown.is_sorted_by(|a, b| a >= b) && shown[0] - shown[2] <= 1, "{shown:?}");
            assert!(before <= shown[2] && shown[0] <= after + 1, "{before} {shown:?} {after}");
            wait_until("the writer goes on", || acknowledged.load(SeqCst) > after + 3);
            ctl(dir, &["checkpoint-end", &name]).ok();
        }
        stop.store(true, SeqCst);
    });
    server.stop();
}

#[test]
fn a_full_spill_ends_the_checkpoint_and_no_write() {
    let (scratch, server) = serve(&["root.qcow2"], 8 * MIB, "--metrics unix:metrics.sock");
    let dir = scratch.path();
    let mut client = Client::open(server.socket(), "r").unwrap();
    for at in 0..8 {
        assert_eq!(client.write(0, at * MIB as u64, &vec![1; MIB]).unwrap(), 0);
    }
    ctl(dir, &["checkpoint", "--serve", "pull", "--limit", "3M", "--spill", "spill"]).ok();
    let mut pulling = Client::open(server.socket(), "pull").unwrap();
    assert_eq!(pulling.read(7 * MIB as u64, 512).unwrap(), [1; 512]);
    for at in 0..8 {
        assert_eq!(client.write(0, at * MIB as u64, &vec![2; MIB]).unwrap(), 0);
    }
    // It has an error for an answer, and no new client comes in.
    assert!(pulling.read(7 * MIB as u64, 512).is_err());
    let failed = wait_for("the end of the checkpoint", || {
        let state = query(dir, "pull");
        (state["status"] == "failed").then_some(state)
    });
    let error = failed["error"].as_str().unwrap();
    assert!(error.contains("--limit") && error.contains("--spill"), "{error}");
    assert_eq!(failed["spill"]["limit"], 3 * MIB);
    assert!(Client::open(server.socket(), "pull").is_err());
    let ended = ctl(dir, &["checkpoint-end", "pull"]).exits(1);
    assert!(ended.stderr.contains("more than the spill"), "{ended}");
    // The name is free again.
    ctl(dir, &["checkpoint", "--serve", "pull"]).ok();
    assert_eq!(Client::open(server.socket(), "pull").unwrap().read(0, 512).unwrap(), [2; 512]);
    drop((client, pulling));
    server.stop();
}

/// Neither the list of those that have ended nor clients that stay keep what a checkpoint has kept.
#[test]
fn an_ended_checkpoint_holds_no_memory_and_no_spill() {
    let (scratch, server) = serve(&["root.qcow2"], 24 * MIB, "");
    let dir = scratch.path();
    let mut client = Client::open(server.socket(), "r").unwrap();
    let mut write = |byte: u8| {
        for at in 0..24 {
            assert_eq!(client.write(0, at * MIB as u64, &vec![byte; MIB]).unwrap(), 0);
        }
    };
    write(1);
    let before = server.resident_kib();
    let mut stay = Vec::new();
    for number in 0..8u8 {
        let name = format!("pull-{number}");
        let spill: &[&str] = if number % 2 == 0 { &["--spill", "spill"] } else { &[] };
        ctl(dir, &[&["checkpoint", "--serve", &name][..], spill].concat()).ok();
        let mut pulling = Client::open(server.socket(), &name).unwrap();
        write(number + 2);
        assert_eq!(pulling.read(0, 512).unwrap(), [number + 1; 512]);
        ctl(dir, &["checkpoint-end", &name]).ok();
        assert!(pulling.read(0, 512).is_err());
        stay.push(pulling);
    }
    wait_until("no spill is open", || {
        let open = std::fs::read_dir(format!("/proc/{}/fd", server.pid())).unwrap();
        let mut names = open.filter_map(|one| std::fs::read_link(one.ok()?.path()).ok());
        !names.any(|name| name.to_string_lossy().contains("spill"))
    });
    // All eight together have kept 192 MiB.
    let grown = server.resident_kib().saturating_sub(before);
    assert!(grown < 96 << 10, "{grown} KiB");
    let all: Value = serde_json::from_str(&ctl(dir, &["checkpoint-query"]).ok().stdout).unwrap();
    assert_eq!(all["checkpoints"].as_array().unwrap().len(), 8);
    drop((client, stay));
    server.stop();
}

#[test]
fn a_checkpoint_ends_by_time_and_when_its_clients_have_left() {
    let (scratch, server) = serve(&["root.qcow2", "data.qcow2"], 4 * MIB, "");
    let dir = scratch.path();
    ctl(dir, &["checkpoint", "r", "--serve", "brief", "--timeout", "1"]).ok();
    wait_until("its time is over", || query(dir, "brief")["ended-by"] == "timeout");
    ctl(dir, &["checkpoint", "r", "d", "--serve", "pull", "--until-idle"]).ok();
    let mut first = Client::open(server.socket(), "pull.r").unwrap();
    drop(Client::open(server.socket(), "pull.d").unwrap());
    assert_eq!(first.read(0, 512).unwrap(), [0; 512]);
    assert_eq!(query(dir, "pull")["status"], "running");
    drop(first);
    wait_until("the last client has left", || query(dir, "pull")["ended-by"] == "idle");
    let all: Value = serde_json::from_str(&ctl(dir, &["checkpoint-query"]).ok().stdout).unwrap();
    assert_eq!(all["checkpoints"].as_array().unwrap().len(), 2);
    server.stop();
}

#[test]
fn a_killed_server_leaves_a_sound_disk_and_no_spill() {
    let Some(qemu) = Qemu::find() else { return };
    let images = ["root.qcow2"];
    let (scratch, mut server) = serve(&images, 8 * MIB, "");
    let dir = scratch.path();
    for round in 0..4u8 {
        let mut client = Client::open(server.socket(), "r").unwrap();
        let bitmap = format!("b{round}");
        ctl(
            dir,
            &["checkpoint", "--bitmap", &bitmap, "--serve", "pull", "--limit", "4M", "--spill", "spill"],
        )
        .ok();
        for at in 0..3 {
            assert_eq!(client.write(0, at * MIB as u64, &vec![round + 1; MIB]).unwrap(), 0);
        }
        client.call(0, command::FLUSH, 0, 0).unwrap();
        drop(client);
        server.kill();
        assert_eq!(std::fs::read_dir(dir).unwrap().flatten().filter(|e| e.file_name() == "spill").count(), 0);
        server = start(dir, &images, "");
        let mut client = Client::open(server.socket(), "r").unwrap();
        assert_eq!(client.read(2 * MIB as u64, 512).unwrap(), [round + 1; 512]);
        drop(client);
    }
    server.stop();
    // A kill may leave leaks, and nothing worse.
    let out = qemu.on_image(dir, "check", &[], "root.qcow2", &[]);
    assert!(matches!(out.code, Some(0 | 3)), "{out}");
}

#[test]
fn what_can_not_be_a_checkpoint_is_refused_by_name() {
    let (scratch, server) = serve(&["root.qcow2", "data.qcow2"], 4 * MIB, "");
    let dir = scratch.path();
    std::fs::write(dir.join("mine"), b"kept").unwrap();
    let cases: [(&[&str], &str); 9] = [
        (&["--serve", "x"], "several exports"),
        (&["nosuch", "--serve", "x"], "nosuch"),
        (&["r", "r", "--serve", "x"], "twice"),
        (&["r", "--serve", "r"], "'r'"),
        (&["r", "--serve", ""], "not empty"),
        (&["r", "--serve", "x", "--limit", "0"], "limit of 0"),
        (&["r", "--serve", "x", "--from", "nosuch"], "nosuch"),
        (&["r", "--serve", "x", "--spill", "mine"], "mine"),
        (&["r", "--serve", "x", "--spill", "no/such"], "no/such"),
    ];
    for (words, expected) in cases {
        let refused = ctl(dir, &[&["checkpoint"], words].concat());
        assert!(refused.code == Some(1) && refused.stderr.contains(expected), "{words:?}: {refused}");
    }
    assert_eq!(std::fs::read(dir.join("mine")).unwrap(), b"kept");
    ctl(dir, &["checkpoint-end", "x"]).exits(1);
    ctl(dir, &["checkpoint", "r", "--serve", "x"]).ok();
    let refused = ctl(dir, &["checkpoint", "d", "--serve", "x"]).exits(1);
    assert!(refused.stderr.contains("checkpoint-end"), "{refused}");
    // Another one beside it, under another name.
    ctl(dir, &["checkpoint", "r", "--serve", "y"]).ok();
    let mut client = Client::open(server.socket(), "y").unwrap();
    assert_ne!(client.write(0, 0, &[1; 512]).unwrap(), 0);
    drop(client);
    server.stop();
    let server = start(dir, &["root.qcow2"], "--read-only");
    let refused = ctl(dir, &["checkpoint", "--serve", "x"]).exits(1);
    assert!(refused.stderr.contains("read-only"), "{refused}");
    server.stop();
}

#[test]
fn of_stopped_disks_a_bitmap_begins_in_all_or_none() {
    let scratch = Scratch::new("checkpoints");
    let dir = scratch.path();
    for image in ["a.qcow2", "b.qcow2"] {
        zebu(dir, ["create", "-q", "-f", "qcow2", image, "4M"]).ok();
    }
    let begin =
        |words: &[&str]| zebu(dir, [&["checkpoint", "--bitmap", "now", "--output", "json"], words].concat());
    let done = |words: &[&str]| {
        let told: Value = serde_json::from_str(&begin(words).ok().stdout).unwrap();
        told["files"]
            .as_array()
            .unwrap()
            .iter()
            .map(|file| file["bitmap"].as_str().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    let has = |image: &str| zebu(dir, ["info", image]).ok().stdout.contains("name: now");
    // One that can't be opened, or has no bitmaps: no other is changed.
    zebu(dir, ["create", "-q", "-f", "raw", "c.raw", "4M"]).ok();
    begin(&["a.qcow2", "b.qcow2", "nosuch.qcow2"]).exits(1);
    begin(&["a.qcow2", "b.qcow2", "c.raw"]).exits(1);
    begin(&["a.qcow2", "a.qcow2"]).exits(1);
    assert!(!has("a.qcow2") && !has("b.qcow2"));
    // As a crash leaves it.
    zebu(dir, ["bitmap", "--add", "a.qcow2", "now"]).ok();
    zebu(dir, ["io", "-f", "qcow2", "a.qcow2", "-c", "write 0 64k"]).ok();
    let said = begin(&["a.qcow2", "b.qcow2"]).ok();
    assert!(said.stderr.contains("'a.qcow2', and not in 'b.qcow2'"), "{said}");
    assert!(has("a.qcow2") && has("b.qcow2"));
    assert_eq!(done(&["a.qcow2", "b.qcow2"]), ["cleared", "cleared"]);
    // Another bitmap that can't begin is named, and nothing changes.
    zebu(dir, ["bitmap", "--disable", "b.qcow2", "now"]).ok();
    let refused = begin(&["a.qcow2", "b.qcow2"]).exits(1);
    assert!(refused.stderr.contains("b.qcow2") && refused.stderr.contains("disabled"), "{refused}");
}
