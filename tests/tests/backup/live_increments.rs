//! Backups by a bitmap while clients write: every increment shows the disk as it was at its start, and nothing is lost
//! from the bitmap when one comes to nothing.

use serde_json::Value;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use zebu_tests::lanes::{Lane, change_until, content, lanes};
use zebu_tests::model::difference;
use zebu_tests::nbd_client::command;
use zebu_tests::patience::wait_for;
use zebu_tests::program::{Finished, zebu};
use zebu_tests::qemu::Qemu;
use zebu_tests::random::Random;
use zebu_tests::scratch::Scratch;
use zebu_tests::server::Server;

const IMAGE: &str = "disk.qcow2";
const MIB: usize = 1 << 20;

fn ctl(dir: &Path, words: &[&str]) -> Finished {
    zebu(dir, [&["ctl", "ctl.sock"], words].concat())
}

fn wait(dir: &Path) -> Value {
    wait_for("the end of the backup", || {
        let said = ctl(dir, &["backup-query", ""]).ok().stdout;
        let state: Value = serde_json::from_str(&said).unwrap();
        (state["status"] != "running").then_some(state)
    })
}

fn serve(dir: &Path, options: &str) -> Server {
    Server::start(dir, &format!("--control ctl.sock {options} -f qcow2 {IMAGE}"))
}

fn make(dir: &Path, options: &str, size: usize) {
    zebu(dir, ["create", "-q", "-f", "qcow2", "-o", options, IMAGE, &size.to_string()]).ok();
}

fn dirty_bytes(dir: &Path) -> u64 {
    let said: Value = serde_json::from_str(&ctl(dir, &["bitmaps", ""]).ok().stdout).unwrap();
    said["bitmaps"][0]["dirty-bytes"].as_u64().unwrap()
}

/// Checks that a backup is sound, and what QEMU reads from it.
fn holds(qemu: &Qemu, dir: &Path, backup: &str, expected: &[u8], what: &str) {
    qemu.check_clean(dir, backup).unwrap_or_else(|e| panic!("{what}: {e}"));
    if let Some(text) = difference(0, expected, &qemu.read_all(dir, backup, None)) {
        panic!("{what}, {backup}: {text}");
    }
}

/// A full backup and increments while all lanes are changed, some of them cancelled.
fn case(qemu: &Qemu, seed: u64) {
    let mut random = Random::new(seed);
    let scratch = Scratch::new("live-increments");
    let dir = scratch.path();
    let mut size = 24 * MIB + 512;
    let shape = *random.pick(&["compat=1.1", "extended_l2=on", "cluster_size=4k", "cluster_size=1M"]);
    make(dir, shape, size);
    let mut server = serve(dir, &format!("--queues {}", random.between(1, 2)));
    let mut clients = lanes(&server, size, seed);
    for lane in &mut clients {
        (0..12).for_each(|_| lane.change());
    }
    let mut made: Vec<(String, Vec<u8>)> = Vec::new();
    let (mut cancelled, mut begins_anew) = (0, false);
    while made.len() < 5 {
        let target = format!("{}-{cancelled}.qcow2", made.len());
        let mut words = vec!["backup-start", "", &target, "--bitmap", "b", "-r", "20M"];
        if let Some((previous, _)) = made.last().filter(|_| !begins_anew) {
            words.extend(["--previous", previous]);
        }
        words.extend(*random.pick(&[
            &[][..],
            &["--compression-type", "zlib"],
            &["--compression-type", "zstd", "--cluster-size", "128k"],
        ]));
        let what = format!("seed {seed}, {shape}, {words:?}");
        let give_up = random.chance(30);
        let before = content(&clients);
        ctl(dir, &words).ok();
        let mut ended = Value::Null;
        change_until(&mut clients, &AtomicBool::new(false), || {
            if give_up {
                ctl(dir, &["backup-cancel", ""]).ok();
            }
            ended = wait(dir);
        });
        if ended["status"] == "cancelled" {
            cancelled += 1;
            continue;
        }
        assert_eq!(ended["status"], "completed", "{what}: {ended}");
        assert_eq!(ended["done"], ended["total"], "{what}: {ended}");
        holds(qemu, dir, &target, &before, &what);
        made.push((target, before));
        begins_anew = false;
        match random.below(3) {
            // What was recorded is there after a clean end, in QEMU's eyes, too.
            0 => {
                drop(clients);
                server.stop();
                qemu.check_clean(dir, IMAGE).unwrap();
                let by_qemu = random.chance(50);
                if by_qemu {
                    qemu.io(dir, "-f qcow2", IMAGE, &["write -P 77 1M 70k"]).ok();
                }
                server = serve(dir, "");
                clients = lanes(&server, size, seed + 100);
                if by_qemu {
                    // It may have done anything to the bitmap: increments begin anew.
                    let previous = &made[made.len() - 1].0;
                    let words =
                        ["backup-start", "", "refused.qcow2", "--bitmap", "b", "--previous", previous];
                    let out = ctl(dir, &words).exits(1);
                    assert!(
                        out.stderr.contains("does not tell") && !dir.join("refused.qcow2").exists(),
                        "{out}"
                    );
                    begins_anew = true;
                }
            }
            // Increments follow a disk that grows.
            1 => {
                size += 3 * MIB + 1024;
                ctl(dir, &["resize", "", &size.to_string()]).ok();
                drop(clients);
                clients = lanes(&server, size, seed + 200);
            }
            _ => clients.iter_mut().for_each(Lane::change),
        }
    }
    server.stop();
    qemu.check_clean(dir, IMAGE).unwrap();
    for (backup, before) in &made {
        holds(qemu, dir, backup, before, &format!("seed {seed}, at the end"));
    }
}

#[test]
fn increments_hold_the_disk_as_it_was_at_their_start() {
    let Some(qemu) = Qemu::find() else { return };
    let seeds = std::env::var("ZEBU_LIVE_BACKUP_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(2);
    for seed in 0..seeds {
        case(&qemu, seed);
    }
}

/// An increment copies what was written, and no more.
#[test]
fn an_increment_is_as_large_as_what_was_written() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("live-increments");
    let dir = scratch.path();
    make(dir, "compat=1.1", 64 * MIB);
    qemu.io(dir, "-f qcow2", IMAGE, &["write -P 9 0 32M"]).ok();
    let server = serve(dir, "");
    let mut clients = lanes(&server, 64 * MIB, 1);
    ctl(dir, &["backup-start", "-w", "", "full.qcow2", "--bitmap", "b"]).ok();
    assert_eq!(dirty_bytes(dir), 0);
    let client = &mut clients[0].client;
    assert_eq!(client.write(0, 3 << 20, &[1; 512]).unwrap(), 0);
    // What is zero now hides what the previous backup holds there.
    assert_eq!(client.call(0, command::WRITE_ZEROES, 5 << 20, 128 << 10).unwrap().error, 0);
    assert_eq!(client.call(0, command::TRIM, 9 << 20, 1 << 20).unwrap().error, 0);
    assert_eq!(dirty_bytes(dir), (64 + 128 + 1024) << 10);
    ctl(dir, &["backup-start", "-w", "", "next.qcow2", "--bitmap", "b", "--previous", "full.qcow2"]).ok();
    assert_eq!(dirty_bytes(dir), 0);
    let now = qemu.read_all(dir, "next.qcow2", None);
    server.stop();
    assert!(now == qemu.read_all(dir, IMAGE, None));
    let map = qemu.img(dir, ["map", "--output=json", "-f", "qcow2", "next.qcow2"]).ok().stdout;
    let map: Vec<Value> = serde_json::from_str(&map).unwrap();
    let own = map.iter().filter(|extent| extent["depth"] == 0);
    let (data, zero): (Vec<&Value>, Vec<&Value>) = own.partition(|extent| extent["data"] == true);
    let sum = |extents: &[&Value]| extents.iter().map(|e| e["length"].as_u64().unwrap()).sum::<u64>();
    assert_eq!((sum(&data), sum(&zero)), (64 << 10, (128 + 1024) << 10), "{map:?}");
}

#[test]
fn nothing_is_lost_from_the_bitmap_of_a_backup_that_failed() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("live-increments");
    let dir = scratch.path();
    make(dir, "compat=1.1", 16 * MIB);
    let server = serve(dir, "");
    let mut clients = lanes(&server, 16 * MIB, 1);
    ctl(dir, &["backup-start", "-w", "", "full.qcow2", "--bitmap", "b"]).ok();
    assert_eq!(clients[0].client.write(0, 0, &vec![1; 4 * MIB]).unwrap(), 0);
    let increment =
        |name: &'static str| ["backup-start", "", name, "--bitmap", "b", "--previous", "full.qcow2"];
    ctl(dir, &[&increment("lost.qcow2")[..], &["-r", "16k"]].concat()).ok();
    assert_eq!(clients[0].client.write(0, 8 << 20, &vec![2; MIB]).unwrap(), 0);
    // Nobody takes the bitmap from the backup, or looks at a part of it.
    let said: Value = serde_json::from_str(&ctl(dir, &["bitmaps", ""]).ok().stdout).unwrap();
    let bitmap = &said["bitmaps"][0];
    assert_eq!((&bitmap["in-backup"], &bitmap["dirty-bytes"]), (&true.into(), &Value::Null), "{said}");
    for words in [&["bitmap-clear", "", "b"][..], &["bitmap-remove", "", "b"]] {
        let out = ctl(dir, words).exits(1);
        assert!(out.stderr.contains("a backup that is under way works with bitmap 'b'"), "{out}");
    }
    ctl(dir, &["backup-cancel", ""]).ok();
    assert_eq!(dirty_bytes(dir), 5 * MIB as u64);
    // Nor does the end of the server lose anything while a backup is under way.
    ctl(dir, &[&increment("cut.qcow2")[..], &["-r", "16k"]].concat()).ok();
    server.stop();
    let server = serve(dir, "");
    assert_eq!(dirty_bytes(dir), 5 * MIB as u64);
    ctl(dir, &[&increment("next.qcow2")[..], &["-w"]].concat()).ok();
    assert_eq!(dirty_bytes(dir), 0);
    server.stop();
    let now = qemu.read_all(dir, IMAGE, None);
    holds(&qemu, dir, "next.qcow2", &now, "the increment after two that failed");
}

#[test]
fn a_killed_server_leaves_a_bitmap_that_increments_go_on_from() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("live-increments");
    let dir = scratch.path();
    make(dir, "compat=1.1", 16 * MIB);
    let server = serve(dir, "");
    let mut clients = lanes(&server, 16 * MIB, 1);
    ctl(dir, &["backup-start", "-w", "", "full.qcow2", "--bitmap", "b"]).ok();
    assert_eq!(clients[0].client.write(0, 0, &vec![1; 4 * MIB]).unwrap(), 0);
    let start = ["backup-start", "", "next.qcow2", "--bitmap", "b", "--previous", "full.qcow2", "-r", "16k"];
    ctl(dir, &start).ok();
    assert_eq!(clients[0].client.call(0, command::FLUSH, 0, 0).unwrap().error, 0);
    server.kill();
    qemu.img(dir, ["info", "-f", "qcow2", "next.qcow2"]).exits(1);
    let server = serve(dir, "");
    let start = ["backup-start", "-w", "", "again.qcow2", "--bitmap", "b", "--previous", "full.qcow2"];
    ctl(dir, &start).ok();
    server.stop();
    let now = qemu.read_all(dir, IMAGE, None);
    holds(&qemu, dir, "again.qcow2", &now, "an increment after the kill");
    // QEMU has it open for writing: what it writes is in no record.
    let crash = ["write -P 9 0 64k", "flush", "sigraise 9"];
    assert_eq!(qemu.io(dir, "-f qcow2", IMAGE, &crash).code, None);
    let server = serve(dir, "");
    let start = ["backup-start", "", "none.qcow2", "--bitmap", "b", "--previous", "again.qcow2"];
    let out = ctl(dir, &start).exits(1);
    assert!(out.stderr.contains("inconsistent") && !dir.join("none.qcow2").exists(), "{out}");
    ctl(dir, &["bitmap-remove", "", "b"]).ok();
    ctl(dir, &["backup-start", "-w", "", "full-again.qcow2", "--bitmap", "b"]).ok();
    server.stop();
    let now = qemu.read_all(dir, IMAGE, None);
    holds(&qemu, dir, "full-again.qcow2", &now, "a full backup after the kill");
}

#[test]
fn increments_that_can_not_be_right_are_refused() {
    let scratch = Scratch::new("live-increments");
    let dir = scratch.path();
    make(dir, "compat=1.1", 16 * MIB);
    zebu(dir, ["create", "-q", "-f", "qcow2", "large.qcow2", "17M"]).ok();
    zebu(dir, ["create", "-q", "-f", "qcow2", "same.qcow2", "16M"]).ok();
    std::fs::write(dir.join("text"), "no image").unwrap();
    zebu(dir, ["bitmap", "--add", "--disable", IMAGE, "still"]).ok();
    let server = serve(dir, "");
    for (words, code, why) in [
        (&["--previous", "same.qcow2"][..], 1, "--bitmap"),
        (&["--previous", "same.qcow2", "--bitmap", "none"], 1, "there is no bitmap 'none'"),
        (&["--previous", "same.qcow2", "--bitmap", "still"], 1, "does not record writes"),
        (&["--bitmap", "still"], 1, "does not record writes"),
        (&["--previous", "large.qcow2", "--bitmap", "b"], 1, "make a full backup"),
        (&["--previous", "text", "--bitmap", "b"], 1, "text"),
        (&["--previous", "missing.qcow2", "--bitmap", "b"], 1, "missing.qcow2"),
    ] {
        let out = ctl(dir, &[&["backup-start", "", "target.qcow2"], words].concat());
        assert_eq!(out.code, Some(code), "{words:?}: {out}");
        assert!(out.stderr.contains(why), "{words:?}: {out}");
        assert!(!dir.join("target.qcow2").exists(), "{words:?}");
    }
    server.stop();
    // What can't be written has no bitmap that could go on.
    let server = serve(dir, "--read-only");
    ctl(dir, &["backup-start", "", "target.qcow2", "--bitmap", "b"]).exits(1);
    server.stop();
}

/// A qcow2 image does not say what sectors its disk has; the user hears of it.
#[test]
fn sectors_that_a_backup_can_not_tell_of_are_warned_of() {
    let scratch = Scratch::new("live-increments");
    let dir = scratch.path();
    zebu(dir, ["create", "-q", "-f", "vhdx", "-o", "logical_sector_size=4096", "base.vhdx", "4M"]).ok();
    zebu(dir, ["create", "-q", "-f", "qcow2", "-b", "base.vhdx", "-F", "vhdx", IMAGE]).ok();
    let server = serve(dir, "");
    let out = ctl(dir, &["backup-start", "-w", "", "out.qcow2"]).ok();
    assert!(
        out.stderr.contains("logical sectors of 4096 bytes") && out.stderr.contains("'out.qcow2'"),
        "{out}"
    );
    server.stop();
}
