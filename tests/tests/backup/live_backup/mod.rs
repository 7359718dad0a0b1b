//! Backups and snapshots of a disk while clients write to it, through the control socket.

mod file_snapshots;
mod kills;
mod page_cache;

use rustix::process::Signal;
use serde_json::Value;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering::SeqCst};
use zebu_tests::lanes::{change_until, content, lanes};
use zebu_tests::model::difference;
use zebu_tests::nbd_client::{Client, command};
use zebu_tests::patience::{wait_for, wait_until};
use zebu_tests::program::{Finished, zebu, zebu_program};
use zebu_tests::qemu::Qemu;
use zebu_tests::random::Random;
use zebu_tests::scratch::Scratch;
use zebu_tests::server::Server;

const IMAGE: &str = "disk.qcow2";
const TARGET: &str = "backup.qcow2";
const MIB: usize = 1 << 20;
const SIZE: usize = 24 * MIB + 512;

fn ctl(dir: &Path, words: &[&str]) -> Finished {
    zebu(dir, [&["ctl", "ctl.sock"], words].concat())
}

fn query(dir: &Path) -> Value {
    serde_json::from_str(&ctl(dir, &["backup-query", ""]).ok().stdout).unwrap()
}

/// Waits until the backup is over; what is said of it then.
fn wait(dir: &Path) -> Value {
    wait_for("the end of the backup", || Some(query(dir)).filter(|state| state["status"] != "running"))
}

/// An answer of the control socket, without a program that has to start.
fn ask(dir: &Path, line: &str) -> Value {
    let mut stream = UnixStream::connect(dir.join("ctl.sock")).unwrap();
    stream.write_all(format!("{line}\n").as_bytes()).unwrap();
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer).unwrap();
    serde_json::from_str(&answer).unwrap()
}

fn make(dir: &Path, options: &str) {
    let size = SIZE.to_string();
    let mut args = vec!["create", "-q", "-f", "qcow2"];
    if !options.is_empty() {
        args.extend(["-o", options]);
    }
    args.extend([IMAGE, &size]);
    zebu(dir, args).ok();
}

fn serve(dir: &Path, options: &str) -> Server {
    Server::start(dir, &format!("--control ctl.sock {options} -f qcow2 {IMAGE}"))
}

/// Backups while all lanes are changed: each target holds what the disk held at its start. The bytes that were copied
/// early, for clients.
fn case(qemu: &Qemu, seed: u64) -> u64 {
    let mut random = Random::new(seed);
    let scratch = Scratch::new("live-backup");
    let dir = scratch.path();
    let shape = *random.pick(&["", "extended_l2=on", "cluster_size=4k", "compat=0.10", "cluster_size=1M"]);
    make(dir, shape);
    let cache = *random.pick(&["writeback", "none"]);
    let engine = ["io_uring", "threads"][(seed % 2) as usize];
    let server = serve(dir, &format!("--aio {engine} -t {cache} --queues {}", random.between(1, 2)));
    let mut lanes = lanes(&server, SIZE, seed);
    for lane in &mut lanes {
        for _ in 0..12 {
            lane.change();
        }
    }
    let mut copied = 0;
    for round in 0..2 {
        let before = content(&lanes);
        let target = format!("{round}-{TARGET}");
        let mut words = vec!["backup-start", "", &target, "-r", "20M"];
        words.extend(*random.pick(&[
            &[][..],
            &["--compression-type", "zlib"],
            &["--compression-type", "zstd", "--cluster-size", "128k"],
        ]));
        ctl(dir, &words).ok();
        let mut ended = Value::Null;
        change_until(&mut lanes, &AtomicBool::new(false), || ended = wait(dir));
        let what = format!("seed {seed}, {engine}, {shape}, {words:?}");
        assert_eq!(ended["status"], "completed", "{what}: {ended}");
        assert_eq!(ended["done"], ended["total"], "{what}: {ended}");
        copied += ended["copied-for-clients"].as_u64().unwrap();
        qemu.check_clean(dir, &target).unwrap_or_else(|e| panic!("{what}: {e}"));
        let copy = qemu.read_all(dir, &target, None);
        if let Some(text) = difference(0, &before, &copy) {
            panic!("{what}: {text}");
        }
    }
    let last = content(&lanes);
    server.stop();
    qemu.check_clean(dir, IMAGE).unwrap();
    assert!(qemu.read_all(dir, IMAGE, None) == last, "seed {seed}: the disk itself");
    copied
}

#[test]
fn a_backup_holds_the_disk_as_it_was_at_its_start() {
    let Some(qemu) = Qemu::find() else { return };
    let seeds = std::env::var("ZEBU_LIVE_BACKUP_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(3);
    let copied: u64 = (0..seeds).map(|seed| case(&qemu, seed)).sum();
    assert!(copied > 0, "no client was in the way of any backup");
}

/// Each write is in the backup as a whole or not at all, also one that was under way at the start.
#[test]
fn requests_under_way_at_the_start_are_not_torn() {
    const BLOCK: usize = 256 << 10;
    const BLOCKS: usize = 16;
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("live-backup");
    let dir = scratch.path();
    make(dir, "");
    let server = serve(dir, "--queues 2");
    let sent: Vec<AtomicU8> = (0..BLOCKS).map(|_| AtomicU8::new(0)).collect();
    let done: Vec<AtomicU8> = (0..BLOCKS).map(|_| AtomicU8::new(0)).collect();
    let stop = AtomicBool::new(false);
    let ready = Barrier::new(5);
    std::thread::scope(|scope| {
        for lane in 0..4 {
            let (sent, done, stop, ready) = (&sent, &done, &stop, &ready);
            let mut client = Client::open(server.socket(), "").unwrap();
            scope.spawn(move || {
                ready.wait();
                let mut value = 0;
                while !stop.load(SeqCst) {
                    value += 1;
                    for block in (lane..BLOCKS).step_by(4) {
                        sent[block].store(value, SeqCst);
                        assert_eq!(client.write(0, (block * BLOCK) as u64, &vec![value; BLOCK]).unwrap(), 0);
                        done[block].store(value, SeqCst);
                    }
                    if value == 250 {
                        break;
                    }
                }
            });
        }
        ready.wait();
        wait_until("everybody writes", || done.iter().all(|value| value.load(SeqCst) > 0));
        let least: Vec<u8> = done.iter().map(|value| value.load(SeqCst)).collect();
        ctl(dir, &["backup-start", "", TARGET]).ok();
        let most: Vec<u8> = sent.iter().map(|value| value.load(SeqCst)).collect();
        let ended = wait(dir);
        stop.store(true, SeqCst);
        assert_eq!(ended["status"], "completed", "{ended}");
        let copy = qemu.read_all(dir, TARGET, None);
        for (block, bytes) in copy.chunks(BLOCK).take(BLOCKS).enumerate() {
            assert!(bytes.iter().all(|byte| *byte == bytes[0]), "block {block} is torn");
            assert!((least[block]..=most[block]).contains(&bytes[0]), "block {block} holds {}", bytes[0]);
        }
    });
    server.stop();
}

#[test]
fn a_cancelled_backup_leaves_no_image() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("live-backup");
    let dir = scratch.path();
    make(dir, "");
    let server = serve(dir, "");
    let mut lanes = lanes(&server, SIZE, 1);
    lanes[0].client.write(0, 0, &vec![7; 4 * MIB]).unwrap();
    lanes[0].model[..4 * MIB].fill(7);
    let out = ctl(dir, &["backup-query", ""]).exits(1);
    assert!(out.stderr.contains("no backup"), "{out}");
    ctl(dir, &["backup-start", "", TARGET, "-r", "16k"]).ok();
    assert_eq!(query(dir)["status"], "running");
    // Nobody takes it for an image yet.
    zebu(dir, ["info", "-U", "-f", "qcow2", TARGET]).exits(1);
    let out = ctl(dir, &["backup-start", "", "another.qcow2"]).exits(1);
    assert!(out.stderr.contains("under way") && !dir.join("another.qcow2").exists(), "{out}");
    let out = ctl(dir, &["backup-start", "", TARGET]).exits(1);
    assert!(out.stderr.contains(TARGET) && out.stderr.contains("exists"), "{out}");
    for lane in &mut lanes {
        lane.change();
    }
    ctl(dir, &["backup-cancel", ""]).ok();
    assert_eq!(query(dir)["status"], "cancelled");
    assert_eq!(std::fs::metadata(dir.join(TARGET)).unwrap().len(), 0);
    // The next one is complete.
    let before = content(&lanes);
    ctl(dir, &["backup-start", "-w", "", "second.qcow2"]).ok();
    assert!(qemu.read_all(dir, "second.qcow2", None) == before);
    // One that is under way does not keep the server from ending, nor clients from their answers.
    ctl(dir, &["backup-start", "", "third.qcow2", "-r", "16k"]).ok();
    for lane in &mut lanes {
        lane.change();
    }
    let last = content(&lanes);
    server.stop();
    assert_eq!(std::fs::metadata(dir.join("third.qcow2")).unwrap().len(), 0);
    qemu.check_clean(dir, IMAGE).unwrap();
    assert!(qemu.read_all(dir, IMAGE, None) == last);
}

/// A client that waits for a backup learns what became of that one, although another was begun before it looked again.
#[test]
fn a_backup_that_is_waited_for_is_not_taken_for_a_later_one() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("live-backup");
    let dir = scratch.path();
    make(dir, "");
    let server = serve(dir, "");
    let mut lanes = lanes(&server, SIZE, 1);
    for lane in &mut lanes {
        (0..20).for_each(|_| lane.change());
    }
    let before = content(&lanes);
    let last = || ask(dir, r#"{"command":"backup-query","export":""}"#)["result"].clone();
    let begin = |target: &str, rate: &str| {
        let before = last();
        let mut command = Command::new(zebu_program());
        command.current_dir(dir).args(["ctl", "ctl.sock", "backup-start", "-w", "", target, "-r", rate]);
        let waiting = command.spawn().unwrap();
        let pid = rustix::process::Pid::from_child(&waiting);
        let state = wait_for(format_args!("the beginning of {target}"), || {
            Some(last()).filter(|state| state["backup"] != before["backup"])
        });
        assert_eq!(state["status"], "running", "{target} is over too early: {state}");
        rustix::process::kill_process(pid, Signal::STOP).unwrap();
        (waiting, pid)
    };
    // It completes, and one after it can't begin.
    let (mut waiting, pid) = begin("first.qcow2", "1M");
    assert_eq!(wait(dir)["status"], "completed");
    ctl(dir, &["backup-start", "--bitmap", "none", "--previous", "first.qcow2", "", "second.qcow2"]).exits(1);
    rustix::process::kill_process(pid, Signal::CONT).unwrap();
    assert!(waiting.wait().unwrap().success());
    assert!(qemu.read_all(dir, "first.qcow2", None) == before);
    // It is cancelled, and one after it completes.
    let (mut waiting, pid) = begin("third.qcow2", "16k");
    ctl(dir, &["backup-cancel", ""]).ok();
    ctl(dir, &["backup-start", "-w", "", "fourth.qcow2"]).ok();
    rustix::process::kill_process(pid, Signal::CONT).unwrap();
    assert!(!waiting.wait().unwrap().success());
    assert!(!dir.join("third.qcow2").exists());
    assert!(qemu.read_all(dir, "fourth.qcow2", None) == before);
    server.stop();
}

#[test]
fn a_killed_server_leaves_the_disk_whole_and_no_backup() {
    let Some(qemu) = Qemu::find() else { return };
    for (seed, cache) in (0..).zip(["none", "dontcache", "writeback"]) {
        let scratch = Scratch::new("live-backup");
        let dir = scratch.path();
        make(dir, "");
        let server = serve(dir, "");
        let mut lanes = lanes(&server, SIZE, seed);
        for lane in &mut lanes {
            (0..20).for_each(|_| lane.change());
        }
        let words = ["backup-start", "", TARGET, "-r", "16k", "--compression-type", "zlib", "-t", cache];
        ctl(dir, &words).ok();
        for lane in &mut lanes {
            (0..20).for_each(|_| lane.change());
            assert_eq!(lane.client.call(0, command::FLUSH, 0, 0).unwrap().error, 0);
        }
        let flushed = content(&lanes);
        server.kill();
        let out = qemu.img(dir, ["check", "-f", "qcow2", IMAGE]);
        assert!(matches!(out.code, Some(0 | 3)), "seed {seed}: {out}");
        assert!(qemu.read_all(dir, IMAGE, None) == flushed, "seed {seed}");
        qemu.img(dir, ["info", "-f", "qcow2", TARGET]).exits(1);
    }
}

#[test]
fn snapshots_are_taken_while_clients_write() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("live-backup");
    let dir = scratch.path();
    make(dir, "");
    let server = serve(dir, "--queues 2");
    let mut lanes = lanes(&server, SIZE, 5);
    let mut taken: Vec<(String, Vec<u8>)> = Vec::new();
    for round in 0..4 {
        for lane in &mut lanes {
            (0..6).for_each(|_| lane.change());
        }
        let name = format!("round-{round}");
        taken.push((name.clone(), content(&lanes)));
        ctl(dir, &["snapshot-create", "", &name]).ok();
        // And some while others write, of which nobody can say what they hold, but that nothing breaks.
        change_until(&mut lanes, &AtomicBool::new(false), || {
            ctl(dir, &["snapshot-create", "", "passing"]).ok();
            ctl(dir, &["snapshot-delete", "", "passing"]).ok();
        });
    }
    ctl(dir, &["snapshot-delete", "", "round-1"]).ok();
    taken.remove(1);
    let out = ctl(dir, &["snapshot-delete", "", "round-1"]).exits(1);
    assert!(out.stderr.contains("not found"), "{out}");
    let list = ctl(dir, &["snapshot-list", "", "--output", "json"]).ok().stdout;
    let list: Value = serde_json::from_str(&list).unwrap();
    let names: Vec<&str> = list.as_array().unwrap().iter().map(|s| s["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["round-0", "round-2", "round-3"]);
    assert!(ctl(dir, &["snapshot-list", ""]).ok().stdout.contains("round-2"));
    let last = content(&lanes);
    server.stop();
    qemu.check_clean(dir, IMAGE).unwrap();
    assert!(qemu.read_all(dir, IMAGE, None) == last);
    for (name, content) in taken {
        assert!(qemu.read_all(dir, IMAGE, Some(&name)) == content, "{name}");
    }
}

#[test]
fn what_a_read_only_export_can_do() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("live-backup");
    let dir = scratch.path();
    make(dir, "");
    qemu.io(dir, "", IMAGE, &["write -P 3 1M 1M"]).ok();
    let server = serve(dir, "--read-only");
    for words in [&["snapshot-create", "", "x"][..], &["snapshot-delete", "", "x"]] {
        let out = ctl(dir, words).exits(1);
        assert!(out.stderr.contains("read-only"), "{out}");
    }
    ctl(dir, &["backup-start", "-w", "", TARGET]).ok();
    let ended = query(dir);
    assert_eq!((&ended["done"], &ended["copied-for-clients"]), (&ended["total"], &0.into()));
    server.stop();
    qemu.check_clean(dir, TARGET).unwrap();
    assert!(qemu.read_all(dir, TARGET, None) == qemu.read_all(dir, IMAGE, None));
}

#[test]
fn names_with_a_protocol_are_no_targets() {
    let scratch = Scratch::new("live-backup");
    let dir = scratch.path();
    make(dir, "");
    let server = serve(dir, "");
    for (words, reason) in [
        (&["backup-start", "", "nbd:host"][..], "a disk on a server"),
        (&["backup-start", "--bitmap", "b", "--previous", "ssh:x", "", TARGET], "Unknown protocol"),
    ] {
        let refused = ctl(dir, words).exits(1);
        assert!(refused.stderr.contains(reason), "{refused}");
    }
    assert!(!dir.join("nbd:host").exists() && !dir.join(TARGET).exists());
    ctl(dir, &["backup-start", "-w", "", "file:a:b.qcow2"]).ok();
    zebu(dir, ["check", "-q", "./a:b.qcow2"]).ok();
    server.stop();
}

/// Requests of a program that does not speak as zebu does: paths, descriptors of the wrong kind, none at all.
#[test]
fn targets_that_can_not_be_written_are_refused() {
    let scratch = Scratch::new("live-backup");
    let dir = scratch.path();
    make(dir, "");
    let server = serve(dir, "--no-sandbox");
    let path = |name: &str| dir.join(name).display().to_string();
    for (line, word) in [
        (format!(r#"{{"command":"backup-start","export":"","target":"{}"}}"#, path(IMAGE)), "exists"),
        (
            format!(r#"{{"command":"backup-start","export":"","target":"{}"}}"#, path("no/such")),
            "No such file",
        ),
        (format!(r#"{{"command":"backup-start","export":"x","target":"{}"}}"#, path("t")), "no export"),
        (
            format!(
                r#"{{"command":"backup-start","export":"","target":"{}","cluster-size":1000}}"#,
                path("t1")
            ),
            "Cluster size",
        ),
        (r#"{"command":"backup-cancel","export":""}"#.to_owned(), "no backup"),
        (r#"{"command":"backup-start","export":""}"#.to_owned(), "target"),
    ] {
        let answer = ask(dir, &line);
        let message = answer["error"]["message"].as_str().unwrap_or_default();
        // What failed to begin is told as such.
        assert!(message.contains(word) || word == "no backup", "{line}: {answer}");
    }
    let answer =
        ask(dir, &format!(r#"{{"command":"backup-start","export":"","target":"{}"}}"#, path("made.qcow2")));
    assert!(answer["result"]["target-cache"].is_string(), "{answer}");
    assert_eq!(wait(dir)["status"], "completed");
    zebu(dir, ["check", "made.qcow2"]).ok();
    server.stop();
}
