//! Incremental backups by a dirty bitmap: a chain of them shows what the disk was, and a bitmap that can't be trusted is
//! refused.

use serde_json::Value;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;
use zebu_tests::program::{zebu, zebu_interrupted, zebu_program};
use zebu_tests::qemu::Qemu;
use zebu_tests::random::Random;
use zebu_tests::recorder::{Failing, Recorder, can_record};
use zebu_tests::scratch::Scratch;
use zebu_tests::server::kill_until_free;

const DISK: &str = "disk.qcow2";
const MIB: u64 = 1 << 20;

fn write(qemu: &Qemu, dir: &Path, random: &mut Random, size: u64) {
    let commands: Vec<String> = (0..random.between(3, 10))
        .map(|_| {
            let offset = random.below(size / 512) * 512;
            let len = (512 * random.between(1, 3000)).min(size - offset);
            match random.below(6) {
                0 => format!("write -z {offset} {len}"),
                1 => format!("write -z -u {offset} {len}"),
                2 => format!("discard {offset} {len}"),
                _ => format!("write -P {} {offset} {len}", random.between(1, 255)),
            }
        })
        .collect();
    if random.chance(50) {
        qemu.io(dir, "-t writeback -f qcow2", DISK, &commands).ok();
    } else {
        let mut args: Vec<String> = ["io", "-f", "qcow2", "-t", "writeback"].map(String::from).into();
        args.extend(commands.iter().flat_map(|c| ["-c".to_owned(), c.clone()]));
        args.push(DISK.into());
        zebu(dir, &args).ok();
    }
}

fn same(qemu: &Qemu, dir: &Path, backup: &str) {
    qemu.img(dir, ["compare", "-f", "qcow2", "-F", "qcow2", DISK, backup]).ok();
    qemu.check_clean(dir, backup).unwrap();
}

#[test]
fn a_chain_of_increments_shows_the_disk() {
    let Some(qemu) = Qemu::find() else { return };
    for (seed, (options, size, backup)) in [
        ("cluster_size=64k", 40 * MIB + 3 * 512, ""),
        ("cluster_size=4k", 16 * MIB, "--cluster-size 4k --compression-type zstd"),
        ("cluster_size=64k", 120 * MIB, "--cluster-size 2M"),
    ]
    .into_iter()
    .enumerate()
    {
        let scratch = Scratch::new("increments");
        let dir = scratch.path();
        let mut random = Random::new(seed as u64 + 3);
        qemu.create(dir, DISK, "qcow2", options, size);
        write(&qemu, dir, &mut random, size);
        let run = |line: String| {
            let out = zebu(dir, line.split_whitespace()).ok();
            serde_json::from_str::<Value>(&out.stdout).unwrap()
        };
        run(format!("backup --output json --bitmap b {DISK} 0.qcow2 {backup}"));
        same(&qemu, dir, "0.qcow2");
        for n in 1..=3 {
            write(&qemu, dir, &mut random, size);
            write(&qemu, dir, &mut random, size);
            let grown = n == 2 && backup.is_empty();
            if grown {
                zebu(dir, ["resize", DISK, "+5M"]).ok();
            }
            let line = format!(
                "backup --output json --bitmap b --previous {}.qcow2 {DISK} {n}.qcow2 {backup}",
                n - 1
            );
            let report = run(line);
            same(&qemu, dir, &format!("{n}.qcow2"));
            assert!(report["unchanged"].as_u64().unwrap() > 0, "{report}");
            assert!(report["read"].as_u64().unwrap() < size, "{report}");
        }
        // Nothing was written since: nothing is read.
        let report =
            run(format!("backup --output json --bitmap b --previous 3.qcow2 {DISK} 4.qcow2 {backup}"));
        assert_eq!((&report["read"], &report["written"]), (&Value::from(0), &Value::from(0)));
        same(&qemu, dir, "4.qcow2");
        qemu.check_clean(dir, DISK).unwrap();
    }
}

#[test]
fn an_increment_with_manifests_has_one_too() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("increments");
    let dir = scratch.path();
    let mut random = Random::new(1);
    qemu.create(dir, DISK, "qcow2", "", 20 * MIB);
    write(&qemu, dir, &mut random, 20 * MIB);
    zebu(dir, ["backup", "--bitmap", "b", "--manifest", "0.m", DISK, "0.qcow2"]).ok();
    write(&qemu, dir, &mut random, 20 * MIB);
    let line = format!("backup --bitmap b --previous 0.qcow2 {DISK} 1.qcow2 --manifest 1.m");
    zebu(dir, line.split(' ')).exits(1);
    zebu(dir, format!("{line} --previous-manifest 0.m").split(' ')).ok();
    zebu(dir, ["verify", "--manifest", "1.m", "1.qcow2"]).ok();
    same(&qemu, dir, "1.qcow2");
}

#[test]
fn a_bitmap_that_does_not_tell_is_refused() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("increments");
    let dir = scratch.path();
    let size = 8 * MIB;
    qemu.create(dir, DISK, "qcow2", "", size);
    zebu(dir, ["io", "-c", "write -P 1 0 8M", DISK]).ok();
    let refused = |line: &str, why: &str| {
        let out = zebu(dir, line.split_whitespace()).exits(1);
        assert!(out.stderr.contains(why) && out.stderr.lines().count() <= 2, "{out}");
        assert!(!dir.join("next.qcow2").exists());
    };
    zebu(dir, ["backup", "--bitmap", "b", DISK, "0.qcow2"]).ok();
    let next = format!("backup --bitmap b --previous 0.qcow2 {DISK} next.qcow2");
    refused(&next.replace("--bitmap b", "--bitmap none"), "there is no bitmap 'none'");
    refused(&next.replace("--bitmap b", ""), "--bitmap");
    zebu(dir, ["bitmap", "--disable", DISK, "b"]).ok();
    refused(&next, "does not record writes");
    zebu(dir, ["io", "-c", "write -P 2 0 8M", DISK]).ok();
    zebu(dir, ["bitmap", "--enable", DISK, "b"]).ok();
    refused(&next, "does not belong");
    zebu(dir, ["bitmap", "--remove", DISK, "b"]).ok();
    zebu(dir, ["resize", "--shrink", DISK, "4M"]).ok();
    zebu(dir, ["bitmap", "--add", DISK, "b"]).ok();
    refused(&next, "full backup");
    zebu(dir, ["convert", "-O", "raw", DISK, "raw"]).ok();
    refused("backup --bitmap b -f raw raw next.qcow2", "no bitmaps");
}

#[test]
fn an_interrupted_backup_leaves_the_bitmap_as_it_was() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("increments");
    let dir = scratch.path();
    qemu.create(dir, DISK, "qcow2", "", 64 * MIB);
    zebu(dir, ["backup", "--bitmap", "b", DISK, "0.qcow2"]).ok();
    zebu(dir, ["io", "-c", "write -P 7 0 32M", DISK]).ok();
    let before = std::fs::read(dir.join(DISK)).unwrap();
    let args = ["backup", "-r", "256k", "--bitmap", "b", "--previous", "0.qcow2", DISK, "1.qcow2"];
    for milliseconds in [1, 30, 200, 700] {
        let mut child = Command::new(zebu_program())
            .args(args)
            .current_dir(dir)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_millis(milliseconds));
        kill_until_free(&mut child);
        assert!(!dir.join("1.qcow2").exists());
        assert!(std::fs::read(dir.join(DISK)).unwrap() == before, "the disk's image has changed");
    }
    let args = args.iter().filter(|arg| !matches!(**arg, "-r" | "256k"));
    zebu(dir, args).ok();
    same(&qemu, dir, "1.qcow2");
}

/// Data written after the interruption to a part that was copied before would be in no backup: the bitmap is cleared
/// at the end.
#[test]
fn a_backup_is_not_resumed_when_the_disk_was_written_since() {
    let Some(qemu) = Qemu::find() else { return };
    let size = 600 * MIB;
    for previous in [false, true] {
        let scratch = Scratch::new("increments");
        let dir = scratch.path();
        qemu.create(dir, DISK, "qcow2", "", size);
        zebu(dir, ["io", "-c", "write -P 3 0 1M", DISK]).ok();
        let mut args = vec!["backup", "--bitmap", "b", DISK];
        if previous {
            zebu(dir, ["backup", "--bitmap", "b", DISK, "0.qcow2"]).ok();
            args.extend(["--previous", "0.qcow2"]);
        }
        args.push("1.qcow2");
        // Checkpoints come after 256 MiB that are read.
        zebu(dir, ["io", "-c", "write -P 7 0 300M", DISK]).ok();
        zebu(dir, ["io", "-c", "write -P 8 400M 1M", DISK]).ok();
        let slowly = [&args[..], &["-r", "50M"]].concat();
        let partial = dir.join(".1.qcow2.zebu-partial");
        // An interrupt lets it note what is done.
        zebu_interrupted(dir, &slowly, 64 * MIB).exits(130);
        assert!(partial.exists() && !dir.join("1.qcow2").exists());
        let resume = [&args[..], &["--resume"]].concat();
        zebu(dir, ["io", "-c", "write -P 9 8k 4k", DISK]).ok();
        let refused = zebu(dir, &resume).exits(1);
        assert!(refused.stderr.contains("leave --resume out"), "{}", refused.stderr);
        // As it was when it was interrupted, it goes on.
        zebu(dir, ["io", "-c", "write -P 7 8k 4k", DISK]).ok();
        zebu(dir, &resume).ok();
        same(&qemu, dir, "1.qcow2");
    }
}

/// Where the file of the disk holds this byte of what the guest sees.
fn place(qemu: &Qemu, dir: &Path, guest: u64) -> u64 {
    let out = qemu.img(dir, ["map", "--output=json", "-f", "qcow2", DISK]).ok();
    let extents: Vec<Value> = serde_json::from_str(&out.stdout).unwrap();
    let number = |extent: &Value, key: &str| extent[key].as_u64().unwrap();
    let extent = extents
        .iter()
        .find(|extent| (0..number(extent, "length")).contains(&guest.wrapping_sub(number(extent, "start"))))
        .unwrap();
    number(extent, "offset") + guest - number(extent, "start")
}

fn report(dir: &Path, line: &str) -> Value {
    let out = zebu(dir, line.split_whitespace()).ok();
    serde_json::from_str(&out.stdout).unwrap()
}

/// The hole that a backup has where the disk could not be read is filled by the next one, though nothing was written
/// there.
#[test]
fn what_could_not_be_read_is_in_the_next_increment() {
    let Some(qemu) = Qemu::find() else { return };
    if !can_record() {
        return;
    }
    for (earlier, written, options) in [
        // A full backup that adds the bitmap, one that finds it, an increment; one in larger clusters than the next.
        (false, false, ""),
        (true, false, ""),
        (true, false, "--manifest 1.m"),
        (true, true, "--previous 0.qcow2"),
        (true, true, "--previous 0.qcow2 --cluster-size 1M"),
    ] {
        let scratch = Scratch::new("increments");
        let dir = scratch.path();
        qemu.create(dir, DISK, "qcow2", "", 8 * MIB);
        zebu(dir, ["io", "-c", "write -P 3 0 8M", DISK]).ok();
        let disk = Recorder::over(&dir.join(DISK), 512);
        if earlier {
            zebu(dir, ["backup", "--bitmap", "b", DISK, "0.qcow2"]).ok();
        }
        if written {
            // What can't be read is in the larger cluster, though it was not written itself.
            let written = if options.contains("1M") { "write -P 5 3600k 64k" } else { "write -P 6 3M 128k" };
            zebu(dir, ["io", "-c", written, DISK]).ok();
        }
        disk.fail(Some(Failing::ReadsAt(place(&qemu, dir, 3 * MIB + 70_000))));
        let line = format!("backup --output json --bitmap b --skip-errors {options} {DISK} 1.qcow2");
        let with_hole = report(dir, &line);
        assert_eq!(
            (&with_hole["unreadable"], &with_hole["kept-bitmap"]),
            (&4096.into(), &"b".into()),
            "{line}"
        );
        disk.fail(None);
        let next = report(dir, &format!("backup --output json --bitmap b --previous 1.qcow2 {DISK} 2.qcow2"));
        same(&qemu, dir, "2.qcow2");
        assert!(next["read"].as_u64().unwrap() <= MIB && next.get("kept-bitmap").is_none(), "{line}: {next}");
        // All is well again: the bitmap was cleared.
        let last = report(dir, &format!("backup --output json --bitmap b --previous 2.qcow2 {DISK} 3.qcow2"));
        assert_eq!(last["read"], 0, "{line}");
    }
}

/// Behind what is done, an interrupted backup has written more, which the guest may have changed since.
#[test]
fn what_was_written_behind_the_interruption_does_not_stay() {
    let Some(qemu) = Qemu::find() else { return };
    if !can_record() {
        return;
    }
    for options in ["", "--previous 0.qcow2", "--previous 0.qcow2 --previous-manifest 0.m --manifest 1.m"] {
        let scratch = Scratch::new("increments");
        let dir = scratch.path();
        qemu.create(dir, DISK, "qcow2", "", 12 * MIB);
        zebu(dir, ["io", "-c", "write -P 3 0 8M", DISK]).ok();
        let disk = Recorder::over(&dir.join(DISK), 512);
        zebu(dir, ["backup", "--bitmap", "b", "--manifest", "0.m", DISK, "0.qcow2"]).ok();
        zebu(dir, ["io", "-c", "write -P 7 0 8M", DISK]).ok();
        // All chunks are under way when the third one fails, and are waited for.
        disk.fail(Some(Failing::ReadsAt(place(&qemu, dir, 5 << 19))));
        let line = format!("backup --output json --bitmap b {options} {DISK} 1.qcow2");
        zebu(dir, line.split_whitespace()).exits(1);
        disk.fail(None);
        let behind = qemu.read_all(dir, ".1.qcow2.zebu-partial", None).split_off(3 * MIB as usize);
        assert!(behind[..5 * MIB as usize].iter().all(|byte| *byte == 7), "nothing was written behind");
        let commands =
            ["write -z 4M 1M", "discard 5M 1M", "write -P 3 6M 1M", "write -P 9 7M 512k", "write -P 8 9M 1M"];
        zebu(dir, ["io"].into_iter().chain(commands.iter().flat_map(|c| ["-c", *c])).chain([DISK])).ok();
        let resumed = report(dir, &format!("{line} --resume"));
        assert_eq!(resumed["resumed-at"], 2 * MIB, "{options}: {resumed}");
        same(&qemu, dir, "1.qcow2");
    }
}
