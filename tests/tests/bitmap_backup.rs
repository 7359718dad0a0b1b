//! Incremental backups by a dirty bitmap: a chain of them shows what the disk was, and a bitmap that can't be trusted is
//! refused.

use serde_json::Value;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;
use zebu_tests::program::{zebu, zebu_program};
use zebu_tests::qemu::Qemu;
use zebu_tests::random::Random;
use zebu_tests::scratch::Scratch;

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
    let args = ["backup", "-r", "4M", "--bitmap", "b", "--previous", "0.qcow2", DISK, "1.qcow2"];
    for milliseconds in [1, 30, 200, 700] {
        let mut child = Command::new(zebu_program())
            .args(args)
            .current_dir(dir)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_millis(milliseconds));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!dir.join("1.qcow2").exists());
        assert!(std::fs::read(dir.join(DISK)).unwrap() == before, "the disk's image has changed");
    }
    let args = args.iter().filter(|arg| !matches!(**arg, "-r" | "4M"));
    zebu(dir, args).ok();
    same(&qemu, dir, "1.qcow2");
}

/// What was written after the interruption to a part that was copied before would be in no backup: the bitmap is cleared
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
        let slowly = [&args[..], &["-r", "200M"]].concat();
        let partial = dir.join(".1.qcow2.zebu-partial");
        let mut child = Command::new(zebu_program())
            .args(slowly)
            .current_dir(dir)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        // An interrupt lets it note what is done.
        std::thread::sleep(Duration::from_millis(900));
        let interrupted = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
        assert!(interrupted.success());
        child.wait().unwrap();
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
