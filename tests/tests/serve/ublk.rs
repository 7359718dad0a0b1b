//! Block devices of a kernel, in a guest whose kernel has them.

use rustix::process::{Pid, Signal, kill_process_group};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use zebu_storage::sabotage::Fault;
use zebu_tests::device_guest::DeviceGuest;
use zebu_tests::program::{finish, required};
use zebu_tests::qemu::Qemu;
use zebu_tests::random::Random;
use zebu_tests::scratch::{Scratch, cache};

/// Kills of a server whose device is in use; `ZEBU_KILLS` has another number.
const KILLS: &str = "12";

/// How often a guest is cut off; `ZEBU_CUTS` has another number.
const CUTS: &str = "3";

fn prepare(scratch: &Scratch) -> DeviceGuest {
    let program = Path::new(env!("CARGO_BIN_EXE_in_guest"));
    DeviceGuest::prepare(&cache("device-guest"), scratch.path(), program)
        .unwrap_or_else(|missing| panic!("{missing}"))
}

/// Boots a guest that does what these words say.
fn guest_does(words: &[&str]) {
    if Qemu::find().is_none() {
        return;
    }
    let scratch = Scratch::new("ublk");
    let guest = prepare(&scratch);
    let said = guest.run(words, None).unwrap_or_else(|what| panic!("{what}"));
    eprintln!("{said}");
}

#[test]
fn a_device_is_made_used_and_removed() {
    guest_does(&["devices"]);
}

#[test]
fn a_file_system_survives_the_kills_of_its_server() {
    let kills = std::env::var("ZEBU_KILLS").unwrap_or_else(|_| KILLS.to_owned());
    guest_does(&["recovery", "ublk", &kills]);
}

#[test]
fn an_answer_before_the_data_is_caught() {
    is_caught(Fault::AnswerBeforeData, &["recovery", "ublk", KILLS]);
}

/// Boots a guest whose servers have a fault, which must be seen in its files: those words pass without it.
fn is_caught(fault: Fault, words: &[&str]) {
    if Qemu::find().is_none() {
        return;
    }
    let scratch = Scratch::new("ublk-fault");
    let fault = format!("{fault:?}");
    let words = [words, &[&fault]].concat();
    let said = prepare(&scratch).run(&words, None).expect_err("nobody has missed anything");
    eprintln!("{said}");
    let signs = ["was flushed", "is torn", "e2fsck", "EXT4-fs error"];
    assert!(signs.iter().any(|sign| said.contains(sign)), "{said}");
}

#[test]
fn a_device_of_nbd_is_connected_used_and_disconnected() {
    guest_does(&["nbd"]);
}

#[test]
fn a_file_system_on_nbd_survives_the_kills_of_its_server() {
    // Requests of a killed server wait for half a minute.
    guest_does(&["recovery", "nbd", "2"]);
}

/// Boots a guest that writes, cuts it off, and boots it again. What was flushed on the device is on the disk below.
#[test]
fn what_was_flushed_survives_the_end_of_the_machine() {
    if Qemu::find().is_none() {
        return;
    }
    let scratch = Scratch::new("ublk-cut");
    let guest = prepare(&scratch);
    let disk = scratch.file("disk");
    File::create(&disk).and_then(|file| file.set_len(256 << 20)).expect("a disk");
    let mut mkfs = Command::new(required("mkfs.ext4"));
    finish({
        mkfs.arg("-q").arg(&disk);
        mkfs
    })
    .ok();
    let (mut flushed, mut random) = (0, Random::new(3));
    let cuts = std::env::var("ZEBU_CUTS").unwrap_or_else(|_| CUTS.to_owned()).parse().expect("a number");
    for cut in 0..cuts {
        // Through the page cache of the machine that is cut off, too.
        let cache = if cut % 2 == 0 { "writeback" } else { "none" };
        let mut boot = guest.command(&["go-on", cache, &flushed.to_string()], Some(&disk)).expect("QEMU");
        let mut child = boot.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().expect("it boots");
        let mut lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
        let mut said = String::new();
        for _ in 0..random.between(3, 12) {
            let version = loop {
                let line =
                    lines.next().unwrap_or_else(|| panic!("the guest has ended: {said}")).expect("text");
                said += &format!("{line}\n");
                if let Some(version) = line.trim().strip_prefix("flushed ") {
                    break version.parse().expect("a number");
                }
            };
            flushed = version;
        }
        // It has a group of its own, which QEMU is in.
        kill_process_group(Pid::from_child(&child), Signal::KILL).expect("a process");
        child.wait().expect("a process");
    }
    let said = guest.run(&["look", "writeback", &flushed.to_string()], Some(&disk));
    said.unwrap_or_else(|what| panic!("{what}"));
}
