//! Forks whose sealed images become points of stores: `zebu ctl fork --push`.

use serde_json::Value;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use zebu_tests::nbd_client::Client;
use zebu_tests::patience::wait_until;
use zebu_tests::program::{Finished, zebu};
use zebu_tests::scratch::Scratch;
use zebu_tests::server::Server;

const SIZE: usize = 8 << 20;
const MIB: usize = 1 << 20;

fn ctl(dir: &Path, words: &[&str]) -> Finished {
    zebu(dir, [&["ctl", "ctl.sock"], words].concat())
}

fn json(finished: Finished) -> Value {
    serde_json::from_str(&finished.ok().stdout).unwrap()
}

fn make(dir: &Path, name: &str) {
    zebu(dir, ["create", "-q", "-f", "qcow2", name, &SIZE.to_string()]).ok();
}

fn fill(client: &mut Client, mib: usize, byte: u8) {
    assert_eq!(client.write(0, (mib * MIB) as u64, &vec![byte; MIB]).unwrap(), 0);
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

#[test]
fn a_forked_disk_is_a_point_that_another_server_serves() {
    let scratch = Scratch::new("fork-pushes");
    let dir = scratch.path();
    make(dir, "disk.qcow2");
    let server = Server::start(dir, "--control ctl.sock -f qcow2 disk.qcow2");
    let mut client = Client::open(server.socket(), "").unwrap();
    for (round, way) in [(1, "full"), (2, "scan")] {
        fill(&mut client, round, round as u8);
        let overlay = format!("over-{round}.qcow2");
        let words = ["fork", "--to", &overlay, "--push", "store:vm1", "--rate", "64M", "-w"];
        let report = json(ctl(dir, &[&words[..], &["--output", "json"]].concat()));
        let point = &report["push"]["uploaded"][0];
        assert_eq!((&point["way"], &point["export"]), (&way.into(), &"".into()), "{report}");
        fill(&mut client, round, 99);
    }
    let points = points(dir, "store:vm1");
    assert_eq!(points.len(), 2);
    let [first, second] =
        [0, 1].map(|at: usize| format!("store:vm1@{}", points[at]["name"].as_str().unwrap()));
    let shown = |disk: &[u8]| [disk[0], disk[MIB], disk[2 * MIB]];
    assert_eq!(shown(&restored(dir, &first)), [0, 1, 0]);
    assert_eq!(shown(&restored(dir, &second)), [0, 99, 2]);
    drop(client);
    // The other host, whose guest writes into an overlay of its own.
    let there = dir.join("there");
    std::fs::create_dir(&there).unwrap();
    let second = second.replace("store:", "store:../");
    let other = Server::start(&there, &format!("--overlay own.qcow2 {second}"));
    let mut client = Client::open(other.socket(), "").unwrap();
    assert_eq!(client.read((2 * MIB) as u64, 512).unwrap(), [2; 512]);
    fill(&mut client, 3, 3);
    assert_eq!(client.read((3 * MIB) as u64, 512).unwrap(), [3; 512]);
    drop(client);
    other.stop_with_messages();
    server.stop();
}

#[test]
fn the_upload_goes_on_in_the_background() {
    let scratch = Scratch::new("fork-pushes");
    let dir = scratch.path();
    make(dir, "disk.qcow2");
    let server = Server::start(dir, "--control ctl.sock -f qcow2 disk.qcow2");
    let mut client = Client::open(server.socket(), "").unwrap();
    fill(&mut client, 1, 1);
    let report = json(ctl(dir, &["fork", "--to", "over.qcow2", "--push", "store:vm1", "--output", "json"]));
    let log = report["push"]["log"].as_str().unwrap().to_owned();
    assert!(report["push"]["process"].is_u64(), "{report}");
    fill(&mut client, 1, 2);
    let said = || std::fs::read_to_string(&log).unwrap();
    wait_until("the point is published", || said().contains("point "));
    assert_eq!(points(dir, "store:vm1").len(), 1, "{}", said());
    assert_eq!(restored(dir, "store:vm1")[MIB], 1);
    drop(client);
    server.stop();
}

#[test]
fn two_disks_become_points_of_one_moment() {
    let scratch = Scratch::new("fork-pushes");
    let dir = scratch.path();
    for name in ["a", "b"] {
        make(dir, &format!("{name}.qcow2"));
    }
    let server =
        Server::start(dir, "--control ctl.sock --export-name a --export-name b -f qcow2 a.qcow2 b.qcow2");
    let (written, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    let report = std::thread::scope(|scope| {
        let (server, written, stop) = (&server, &written, &stop);
        scope.spawn(move || {
            let mut clients = ["a", "b"].map(|name| Client::open(server.socket(), name).unwrap());
            let mut next = 1u64;
            while !stop.load(SeqCst) {
                for client in &mut clients {
                    assert_eq!(client.write(0, 0, &next.to_le_bytes().repeat(64)).unwrap(), 0);
                }
                written.store(next, SeqCst);
                next += 1;
            }
        });
        wait_until("the guest writes", || written.load(SeqCst) > 3);
        let words = ["fork", "a", "--to", "a2.qcow2", "--also", "b=b2.qcow2", "--push", "store:s/vm", "-w"];
        let report = json(ctl(dir, &[&words[..], &["--output", "json"]].concat()));
        let before = written.load(SeqCst);
        wait_until("the guest goes on", || written.load(SeqCst) > before + 3);
        stop.store(true, SeqCst);
        report
    });
    let numbers = ["a", "b"].map(|disk| {
        let disk = restored(dir, &format!("store:s/vm/{disk}"));
        u64::from_le_bytes(disk[..8].try_into().unwrap())
    });
    assert!(numbers[0] >= numbers[1] && numbers[0] - numbers[1] <= 1, "{numbers:?} is no moment");
    let uploaded = report["push"]["uploaded"].as_array().unwrap();
    assert_eq!(uploaded.len(), 2, "{report}");
    assert!(uploaded[0]["moment"].is_string(), "{report}");
    for key in ["moment", "time"] {
        assert_eq!(uploaded[0][key], uploaded[1][key], "{report}");
    }
    server.stop();
}

#[test]
fn a_fork_stands_whatever_becomes_of_its_upload() {
    let scratch = Scratch::new("fork-pushes");
    let dir = scratch.path();
    make(dir, "disk.qcow2");
    let server = Server::start(dir, "--control ctl.sock -f qcow2 disk.qcow2");
    let mut client = Client::open(server.socket(), "").unwrap();
    fill(&mut client, 1, 1);
    // No folder can be made there, which shows when the first is.
    std::os::unix::fs::symlink("/proc/no-folder", dir.join("vm1")).unwrap();
    let fork = ["fork", "--to", "over.qcow2", "--push", "store:vm1", "-w", "--output", "json"];
    let failed = ctl(dir, &fork).exits(3);
    assert!(failed.stderr.contains("the fork stands"), "{failed}");
    let report: Value = serde_json::from_str(&failed.stdout).unwrap();
    assert_eq!(report["disks"][0]["overlay"].as_str(), dir.join("over.qcow2").to_str());
    assert!(report["push"]["failed"].as_str().unwrap().contains("store:vm1"), "{report}");
    assert!(zebu(dir, ["info", "-U", "disk.qcow2"]).ok().stdout.contains("sealed by: "));
    fill(&mut client, 1, 2);
    // The command of the message does it.
    std::fs::remove_file(dir.join("vm1")).unwrap();
    let command = failed.stderr.split("once more: zebu ").nth(1).unwrap();
    let words: Vec<&str> = command.split_whitespace().collect();
    zebu(dir, &words).ok();
    assert_eq!(restored(dir, "store:vm1")[MIB], 1);
    assert!(points(dir, "store:vm1")[0]["moment"].is_string());
    // In the background, the log has it.
    std::os::unix::fs::symlink("/proc/no-folder", dir.join("vm2")).unwrap();
    ctl(dir, &["fork", "--to", "more.qcow2", "--push", "store:vm2"]).ok();
    let log = dir.join("more.qcow2.push.log");
    wait_until("the upload has failed", || {
        std::fs::read_to_string(&log).is_ok_and(|said| said.contains("once more: zebu backup"))
    });
    // What can be known before is no reason to fork.
    std::fs::write(dir.join("file"), "mine").unwrap();
    let cases: [(&[&str], &str); 5] = [
        (&["--push", "store:file/vm1"], "store:file/vm1"),
        (&["--push", "vm1"], "store:DIR/NAME"),
        (&["--push", "store:vm1@p-1"], "whole store"),
        (&["--push", "oci://registry"], "repository"),
        (&["--rate", "1M"], "--push"),
    ];
    for (words, expected) in cases {
        let refused = ctl(dir, &[&["fork", "--to", "next.qcow2"], words].concat());
        assert!(refused.code == Some(1) && refused.stderr.contains(expected), "{words:?}: {refused}");
        assert!(!dir.join("next.qcow2").exists());
    }
    drop(client);
    server.stop();
}
