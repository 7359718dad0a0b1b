//! Points of running disks of one moment, `zebu ctl backup-start --to`: what they show beside writers, and every way in which
//! making them ends.

use serde_json::Value;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use zebu_tests::encrypted::encrypt_options;
use zebu_tests::lanes::{change_until, content, lanes};
use zebu_tests::model::difference;
use zebu_tests::nbd_client::Client;
use zebu_tests::patience::{wait_for, wait_until};
use zebu_tests::program::{Finished, zebu, zebu_program};
use zebu_tests::scratch::Scratch;
use zebu_tests::server::{Server, kill_until_free};

const MIB: usize = 1 << 20;

fn ctl(dir: &Path, words: &[&str]) -> Finished {
    zebu(dir, [&["ctl", "ctl.sock"], words].concat())
}

fn json(finished: Finished) -> Value {
    serde_json::from_str(&finished.ok().stdout).unwrap()
}

/// The points that a command has made.
fn take(dir: &Path, words: &[&str]) -> Value {
    json(ctl(dir, &[&["backup-start", "--output", "json"], words].concat()))
}

fn serve(disks: &[&str], size: usize, options: &str) -> (Scratch, Server) {
    let scratch = Scratch::new("moment-points");
    let (mut names, mut images) = (String::new(), String::new());
    for disk in disks {
        let image = format!("{disk}.qcow2");
        zebu(scratch.path(), ["create", "-q", "-f", "qcow2", &image, &size.to_string()]).ok();
        names += &format!(" --export-name {disk}");
        images += &format!(" {image}");
    }
    let options = format!("--control ctl.sock {options}{names} -f qcow2{images}");
    let server = Server::start(scratch.path(), &options);
    (scratch, server)
}

/// The command in the background, so slow that it is caught in the middle.
fn begin(dir: &Path, rate: &str, words: &[&str]) -> Child {
    let mut command = Command::new(zebu_program());
    command.args(["ctl", "ctl.sock", "backup-start", "--rate", rate, "--speed", "full"]).args(words);
    command.current_dir(dir).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().unwrap()
}

/// The last checkpoint of a server, once it is in a state.
fn checkpoint(dir: &Path, status: &str) -> Value {
    wait_for(format_args!("a checkpoint that is {status}"), || {
        let all = json(ctl(dir, &["checkpoint-query"]));
        let last = all["checkpoints"].as_array().unwrap().last().cloned()?;
        (last["status"] == status).then_some(last)
    })
}

/// Waits until a checkpoint is read.
fn is_read(dir: &Path) {
    wait_until("the disks of the checkpoint are open", || {
        let state = checkpoint(dir, "running");
        state["exports"].as_array().unwrap().iter().all(|export| export["clients"].as_u64() > Some(0))
    });
}

fn points(dir: &Path, store: &str) -> Vec<Value> {
    let list = zebu(dir, ["points", "--output", "json", store]);
    let list: Value = serde_json::from_str(&list.stdout).unwrap_or_default();
    list["points"].as_array().cloned().unwrap_or_default()
}

fn restored(dir: &Path, point: &str) -> Vec<u8> {
    zebu(dir, ["restore", "-q", "--force", point, "restored.raw"]).ok();
    std::fs::read(dir.join("restored.raw")).unwrap()
}

fn number(disk: &[u8]) -> u64 {
    u64::from_le_bytes(disk[..8].try_into().unwrap())
}

#[test]
fn points_of_two_disks_agree_while_a_guest_writes_both() {
    let disks = ["root", "data"];
    let (scratch, server) = serve(&disks, 8 * MIB, "--queues 2");
    let dir = scratch.path();
    let (written, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    let rounds = 3;
    std::thread::scope(|scope| {
        let (server, written, stop) = (&server, &written, &stop);
        scope.spawn(move || {
            let mut clients = disks.map(|disk| Client::open(server.socket(), disk).unwrap());
            let mut next = 1u64;
            while !stop.load(SeqCst) {
                for client in &mut clients {
                    assert_eq!(client.write(0, 0, &next.to_le_bytes().repeat(64)).unwrap(), 0);
                }
                written.store(next, SeqCst);
                next += 1;
            }
        });
        for round in 0..rounds {
            let before = written.load(SeqCst);
            let report = take(dir, &["root", "data", "--to", "store:backups/vm"]);
            let after = written.load(SeqCst);
            let made = report["points"].as_array().unwrap();
            assert_eq!(made.len(), 2, "{report}");
            let shown = [0, 1].map(|at| {
                let point = &made[at];
                assert_eq!(point["export"], disks[at]);
                assert_eq!(point["store"], format!("store:backups/vm/{}", disks[at]));
                assert_eq!(point["way"], if round == 0 { "full" } else { "scan" }, "{report}");
                assert_eq!(
                    (&point["moment"], &point["time"]),
                    (&report["moment"], &report["time"]),
                    "{report}"
                );
                let name = format!("store:backups/vm/{}@{}", disks[at], point["point"].as_str().unwrap());
                number(&restored(dir, &name))
            });
            assert!(shown[0] >= shown[1] && shown[0] - shown[1] <= 1, "{shown:?} is no moment");
            assert!(before <= shown[1] && shown[0] <= after + 1, "{before} {shown:?} {after}");
            wait_until("the guest goes on", || written.load(SeqCst) > after + 3);
        }
        stop.store(true, SeqCst);
    });
    let listed = disks.map(|disk| points(dir, &format!("store:backups/vm/{disk}")));
    for (root, data) in listed[0].iter().zip(&listed[1]) {
        assert_eq!((&root["moment"], &root["time"]), (&data["moment"], &data["time"]));
        assert!(root["moment"].is_string());
    }
    assert_eq!(listed.map(|points| points.len()), [rounds, rounds]);
    assert_eq!(checkpoint(dir, "ended")["ended-by"], "command");
    // Rules hold for each disk.
    let report = take(dir, &["root", "data", "--to", "store:backups/vm", "--keep-last", "1"]);
    for point in report["points"].as_array().unwrap() {
        assert_eq!(point["forgotten"].as_array().unwrap().len(), rounds, "{report}");
    }
    server.stop();
}

#[test]
fn a_point_is_the_disk_at_its_moment_and_guests_go_on() {
    let size = 12 * MIB + 512;
    let (scratch, server) = serve(&["root"], size, "--queues 2");
    let dir = scratch.path();
    let mut clients = lanes(&server, size, 11);
    for round in 0..2 {
        for lane in &mut clients {
            (0..30).for_each(|_| lane.change());
        }
        let moment = content(&clients);
        let mut child = begin(dir, "4M", &["--to", "store:vm1", "--spill", "spill"]);
        is_read(dir);
        assert!(!dir.join("spill").exists());
        change_until(&mut clients, &AtomicBool::new(false), || {
            let status = child.wait().unwrap();
            assert!(status.success());
        });
        let all = points(dir, "store:vm1");
        assert_eq!(all.len(), round + 1);
        let name = format!("store:vm1@{}", all[round]["name"].as_str().unwrap());
        if let Some(text) = difference(0, &moment, &restored(dir, &name)) {
            panic!("{text}");
        }
    }
    drop(clients);
    server.stop();
}

#[test]
fn a_killed_command_leaves_no_point_and_no_checkpoint() {
    let (scratch, server) = serve(&["root", "data"], 4 * MIB, "");
    let dir = scratch.path();
    let mut client = Client::open(server.socket(), "root").unwrap();
    for at in 0..4 {
        assert_eq!(client.write(0, at * MIB as u64, &vec![7; MIB]).unwrap(), 0);
    }
    let words = ["root", "data", "--to", "store:backups/vm"];
    let mut child = begin(dir, "256k", &words);
    is_read(dir);
    kill_until_free(&mut child);
    assert_eq!(checkpoint(dir, "ended")["ended-by"], "idle");
    // A signal ends it in good order.
    let child = begin(dir, "256k", &words);
    is_read(dir);
    rustix::process::kill_process(rustix::process::Pid::from_child(&child), rustix::process::Signal::TERM)
        .unwrap();
    let ended = child.wait_with_output().unwrap();
    assert_eq!(ended.status.code(), Some(130), "{}", String::from_utf8_lossy(&ended.stderr));
    assert_eq!(checkpoint(dir, "ended")["ended-by"], "command");
    for disk in ["root", "data"] {
        assert!(points(dir, &format!("store:backups/vm/{disk}")).is_empty());
    }
    let report = take(dir, &words);
    for (disk, byte) in [("root", 7), ("data", 0)] {
        let store = format!("store:backups/vm/{disk}");
        assert!(restored(dir, &store).iter().all(|&found| found == byte), "{report}");
        zebu(dir, ["forget", "--prune", &store]).ok();
        for part in ["claims", "tmp"] {
            let left = std::fs::read_dir(dir.join(format!("backups/vm/{disk}/{part}"))).unwrap().count();
            assert_eq!(left, 0, "{disk}: {part}");
        }
    }
    drop(client);
    server.stop();
}

#[test]
fn what_fails_ends_the_checkpoint_and_publishes_nothing() {
    let (scratch, server) = serve(&["root", "data"], 4 * MIB, "");
    let dir = scratch.path();
    let mut client = Client::open(server.socket(), "root").unwrap();
    let mut fill = |byte: u8| {
        for at in 0..4 {
            assert_eq!(client.write(0, at * MIB as u64, &vec![byte; MIB]).unwrap(), 0);
        }
    };
    fill(1);
    // A store that can't be made: the layers of the others stay unpublished.
    std::fs::create_dir_all(dir.join("backups")).unwrap();
    std::os::unix::fs::symlink("/proc/no-folder", dir.join("backups/data")).unwrap();
    let failed = ctl(dir, &["backup-start", "root", "data", "--to", "store:backups"]).exits(1);
    assert!(failed.stderr.contains("store:backups/data"), "{failed}");
    assert_eq!(checkpoint(dir, "ended")["ended-by"], "command");
    assert!(points(dir, "store:backups/root").is_empty());
    assert_eq!(std::fs::read_dir(dir.join("backups/root/claims")).unwrap().count(), 0);
    // More is overwritten than may be kept: guests go on.
    let child = begin(dir, "256k", &["root", "--to", "store:other", "--limit", "1M"]);
    is_read(dir);
    fill(2);
    let ended = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert_eq!(ended.status.code(), Some(1), "{said}");
    assert!(said.contains("--limit") && said.contains("--spill"), "{said}");
    assert!(points(dir, "store:other").is_empty());
    // Its time is over.
    let child = begin(dir, "64k", &["root", "--to", "store:other", "--timeout", "1"]);
    let ended = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert!(ended.status.code() == Some(1) && said.contains("--timeout"), "{said}");
    take(dir, &["root", "--to", "store:other"]);
    assert!(restored(dir, "store:other").iter().all(|&byte| byte == 2));
    drop(client);
    server.stop();
}

#[test]
fn what_can_be_no_points_is_refused_by_name() {
    let (scratch, server) = serve(&["root", "a@b"], MIB, "");
    let dir = scratch.path();
    take(dir, &["root", "--to", "store:vm1"]);
    let cases: [(&[&str], &str); 12] = [
        (&["--to", "store:x"], "which export?"),
        (&["nosuch", "--to", "store:x"], "nosuch"),
        (&["root", "a@b", "--to", "store:x"], "can't name a store"),
        (&["root", "root", "--to", "store:x"], "twice"),
        (&["root", "--to", "store:x@p-1"], "whole store"),
        (&["root", "--to", "x"], "begins with store:"),
        (&["root", "--to", "store:x", "--bitmap", "b"], "--bitmap"),
        (&["root", "--to", "store:x", "--limit", "0"], "limit of 0"),
        (&["root", "--to", "store:x", "--nbd", "unix:no.sock"], "--nbd"),
        (&["root", "store:x"], "--to store:x"),
        (&["root", "x.qcow2", "--keep-last", "1"], "--to"),
        (&["root", "x.qcow2", "--spill", "x"], "--to"),
    ];
    for (words, expected) in cases {
        let refused = ctl(dir, &[&["backup-start"], words].concat());
        assert!(refused.code == Some(1) && refused.stderr.contains(expected), "{words:?}: {refused}");
    }
    assert!(!dir.join("x").exists() && !dir.join("x.qcow2").exists());
    // A store of one disk holds no others, and a name of several is no store.
    zebu(dir, ["ctl", "ctl.sock", "backup-start", "root", "--to", "store:several/root"]).ok();
    let refused = ctl(dir, &["backup-start", "root", "--to", "store:several"]).exits(1);
    assert!(refused.stderr.contains("'store:several/root' is probably meant"), "{refused}");
    server.stop();
    let server = Server::start(dir, "--control ctl.sock --read-only root.qcow2");
    let refused = ctl(dir, &["backup-start", "--to", "store:x"]).exits(1);
    assert!(refused.stderr.contains("read-only"), "{refused}");
    server.stop();
    let server = Server::start_vhost_user(dir, "--control ctl.sock -f qcow2 root.qcow2");
    let refused = ctl(dir, &["backup-start", "--to", "store:x"]).exits(1);
    assert!(refused.stderr.contains("nothing listens for NBD clients"), "{refused}");
    server.stop();
}

#[test]
fn several_disks_are_kept_out_of_a_store_of_one() {
    let (scratch, server) = serve(&["root", "data"], MIB, "");
    let dir = scratch.path();
    take(dir, &["root", "--to", "store:vm1"]);
    let refused = ctl(dir, &["backup-start", "root", "data", "--to", "store:vm1"]).exits(1);
    assert!(refused.stderr.contains("is a store of one disk"), "{refused}");
    assert!(!dir.join("vm1/root").exists());
    server.stop();
}

#[test]
fn no_plain_text_of_an_encrypted_disk_is_stored() {
    let scratch = Scratch::new("moment-points");
    let dir = scratch.path();
    std::fs::write(dir.join("key"), "secret").unwrap();
    let options = encrypt_options("format=luks", "encrypt.");
    let secret = "secret,id=one,file=key";
    let create = ["create", "-q", "-f", "qcow2", "--object", secret, "-o", &options, "e.qcow2", "1M"];
    zebu(dir, create).ok();
    let image = "driver=qcow2,encrypt.key-secret=one,file.driver=file,file.filename=e.qcow2";
    let server = Server::start(dir, &format!("--control ctl.sock --object {secret} --image-opts {image}"));
    let refused = ctl(dir, &["backup-start", "--to", "store:x"]).exits(1);
    assert!(refused.stderr.contains("encrypted"), "{refused}");
    assert!(!dir.join("x").exists());
    server.stop();
}
