//! Sources of `zebu backup`: block devices, snapshots, disks that can't be read in part; and how much memory it takes.

use serde_json::Value;
use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;
use std::time::Duration;
use zebu_tests::device::LoopDevice;
use zebu_tests::program::{zebu, zebu_interrupted};
use zebu_tests::qemu::Qemu;
use zebu_tests::random::Random;
use zebu_tests::recorder::{Failing, Recorder, can_record};
use zebu_tests::scratch::Scratch;
use zebu_tests::usage::run_measured;

const MIB: u64 = 1 << 20;
const BLOCK: usize = 4096;
/// The byte that can't be read.
const BAD: usize = (450 << 10) + 5000;

/// Noise, text and holes.
fn disk(file: &Path, mib: u64) -> Vec<u8> {
    let mut random = Random::new(mib);
    let mut bytes = vec![0; (mib * MIB) as usize];
    for (index, part) in bytes.chunks_mut(300_000).enumerate() {
        match index % 3 {
            0 => random.fill(part),
            1 => part.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at / 40) as u8),
            _ => {}
        }
    }
    std::fs::write(file, &bytes).unwrap();
    bytes
}

#[test]
fn a_block_device_is_backed_up() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("backup-sources");
    let bytes = disk(&scratch.file("disk.raw"), 24);
    let Some(device) = LoopDevice::over(&scratch.file("disk.raw")) else { return };
    let dir = scratch.path();
    zebu(dir, ["backup", "-f", "raw", device.name(), "full.qcow2", "--manifest", "full.manifest"]).ok();
    assert!(qemu.read_all(dir, "full.qcow2", None) == bytes);
    qemu.check_clean(dir, "full.qcow2").unwrap();
    // The increment of a device that was written.
    let mut written = bytes;
    written[5 << 20..6 << 20].fill(0x77);
    let mut file = File::options().write(true).open(device.name()).unwrap();
    file.seek(SeekFrom::Start(5 << 20)).unwrap();
    file.write_all(&written[5 << 20..6 << 20]).unwrap();
    file.sync_all().unwrap();
    let line = "backup -f raw --previous full.qcow2 --previous-manifest full.manifest --output json";
    let words = line.split(' ').chain([device.name(), "next.qcow2"]);
    let report: Value = serde_json::from_str(&zebu(dir, words).ok().stdout).unwrap();
    assert_eq!(report["written"], MIB, "{report}");
    assert!(qemu.read_all(dir, "next.qcow2", None) == written);
}

#[test]
fn a_snapshot_is_backed_up_as_it_was() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("backup-sources");
    let dir = scratch.path();
    qemu.create(dir, "base.qcow2", "qcow2", "", 16 * MIB);
    qemu.io(dir, "-f qcow2", "base.qcow2", &["write -P 9 9M 1M"]).ok();
    qemu.create(dir, "disk.qcow2", "qcow2", "backing_file=base.qcow2,backing_fmt=qcow2", 16 * MIB);
    qemu.io(dir, "-f qcow2", "disk.qcow2", &["write -P 1 1M 3M", "write -z 2M 64k"]).ok();
    qemu.img(dir, ["snapshot", "-c", "then", "disk.qcow2"]).ok();
    qemu.io(dir, "-f qcow2", "disk.qcow2", &["write -P 2 0 8M", "discard 1M 1M"]).ok();
    for compression in ["zlib", "zstd"] {
        let target = format!("{compression}.qcow2");
        zebu(dir, ["backup", "-l", "then", "--compression-type", compression, "disk.qcow2", &target]).ok();
        assert!(qemu.read_all(dir, &target, None) == qemu.read_all(dir, "disk.qcow2", Some("then")));
        qemu.check_clean(dir, &target).unwrap();
    }
    let out = zebu(dir, ["backup", "-l", "never", "disk.qcow2", "none.qcow2"]).exits(1);
    assert!(out.stderr.contains("never") && !dir.join("none.qcow2").exists(), "{out}");
}

#[test]
fn what_the_disk_can_not_read_ends_the_backup_or_is_listed() {
    let Some(qemu) = Qemu::find() else { return };
    if !can_record() {
        return;
    }
    let scratch = Scratch::new("backup-sources");
    let dir = scratch.path();
    let mut bytes = disk(&scratch.file("disk.raw"), 8);
    let source = Recorder::over(&scratch.file("disk.raw"), 512);
    source.fail(Some(Failing::ReadsAt(BAD as u64)));
    let out = zebu(dir, ["backup", "-f", "raw", "disk.raw", "full.qcow2"]).exits(1);
    assert!(out.stderr.contains("disk.raw") && out.stderr.contains("offset"), "{out}");
    assert!(!dir.join("full.qcow2").exists());
    let line = "backup -f raw --skip-errors --output json disk.raw full.qcow2";
    let out = zebu(dir, line.split(' ')).ok();
    let report: Value = serde_json::from_str(&out.stdout).unwrap();
    // No more is left out than the block that can't be read; it reads as zero.
    assert_eq!(report["unreadable"], BLOCK, "{out}");
    let range = &report["unreadable-ranges"][0];
    let start = BAD / BLOCK * BLOCK;
    assert_eq!((&range["start"], &range["length"]), (&start.into(), &BLOCK.into()), "{out}");
    assert!(source.failed() > 1);
    bytes[start..][..BLOCK].fill(0);
    assert!(qemu.read_all(dir, "full.qcow2", None) == bytes);
    qemu.check_clean(dir, "full.qcow2").unwrap();
}

#[test]
fn what_was_skipped_before_an_interruption_is_reported_after_it() {
    let Some(qemu) = Qemu::find() else { return };
    if !can_record() {
        return;
    }
    let scratch = Scratch::new("backup-sources");
    let dir = scratch.path();
    let mut bytes = disk(&scratch.file("disk.raw"), 8);
    let source = Recorder::over(&scratch.file("disk.raw"), 512);
    source.fail(Some(Failing::ReadsAt(BAD as u64)));
    let line = "backup -f raw --skip-errors -r 1M --manifest full.manifest disk.raw full.qcow2";
    // It lies in the first MiB.
    let words: Vec<&str> = line.split(' ').collect();
    zebu_interrupted(dir, &words, MIB).exits(130);
    let start = BAD / BLOCK * BLOCK;
    let noted = std::fs::read_to_string(dir.join(".full.qcow2.zebu-partial.manifest")).unwrap();
    assert!(noted.contains(&format!("\nunreadable {start} {BLOCK}\n")) && noted.contains("\ncheckpoint "));
    // Now that it can be read: it is not looked at again.
    source.fail(None);
    let line = "backup -f raw --resume --manifest full.manifest --output json disk.raw full.qcow2";
    let out = zebu(dir, line.split(' ')).ok();
    let report: Value = serde_json::from_str(&out.stdout).unwrap();
    assert!(report["resumed-at"].as_u64().unwrap() >= MIB, "{report}");
    assert_eq!(report["unreadable"], BLOCK, "{out}");
    let range = &report["unreadable-ranges"][0];
    assert_eq!((&range["start"], &range["length"]), (&start.into(), &BLOCK.into()), "{out}");
    assert!(report.get("unreadable-range-count").is_none() && out.stderr.contains("interrupted"), "{out}");
    bytes[start..][..BLOCK].fill(0);
    assert!(qemu.read_all(dir, "full.qcow2", None) == bytes);
    zebu(dir, ["verify", "--manifest", "full.manifest", "full.qcow2"]).ok();
}

/// Memory of a backup beside its buffers and the program's code (docs/guide/backup.md), KiB.
const BESIDE_BUFFERS_KIB: u64 = 20 << 10;

#[test]
fn memory_is_that_of_the_buffers_whatever_the_size_of_the_disk() {
    let scratch = Scratch::new("backup-sources");
    let dir = scratch.path();
    disk(&scratch.file("full.raw"), 192);
    let sparse = File::create(scratch.file("sparse.raw")).unwrap();
    sparse.set_len(100 << 30).unwrap();
    zebu(dir, ["create", "-q", "-f", "qcow2", "sparse.qcow2", "100G"]).ok();
    let measured = Path::new(env!("CARGO_BIN_EXE_measured"));
    for (number, (source, format)) in
        [("full.raw", "raw"), ("sparse.raw", "raw"), ("sparse.qcow2", "qcow2")].into_iter().enumerate()
    {
        for (memory, kib) in [("16M", 16 << 10), ("64M", 64 << 10)] {
            for compression in ["zlib", "zstd"] {
                let target = format!("{number}-{memory}-{compression}.qcow2");
                let line = format!(
                    "backup -f {format} --buffer-memory {memory} --compression-type {compression} --manifest \
                     {target}.manifest {source} {target}"
                );
                let words: Vec<&str> = line.split_whitespace().collect();
                let (out, peak_kib) = run_measured(measured, Duration::from_secs(120), dir, &words);
                out.ok();
                eprintln!("{source}, {memory}, {compression}: {peak_kib} KiB");
                assert!(peak_kib <= kib + BESIDE_BUFFERS_KIB, "{line}: {peak_kib} KiB resident");
            }
        }
    }
}

/// Memory of the highest levels' contexts for clusters of 2 MiB, KiB for each core (docs/guide/backup.md).
const LARGEST_CONTEXT_KIB: u64 = 32 << 10;

#[test]
fn memory_of_large_clusters_and_high_levels_is_what_is_stated() {
    let scratch = Scratch::new("backup-sources");
    let dir = scratch.path();
    disk(&scratch.file("full.raw"), 48);
    let measured = Path::new(env!("CARGO_BIN_EXE_measured"));
    let cores = std::thread::available_parallelism().expect("the system tells").get() as u64;
    for (compression, level) in [("zlib", "12"), ("zstd", "3"), ("zstd", "19")] {
        let target = format!("{compression}-{level}.qcow2");
        let line = format!(
            "backup -f raw --cluster-size 2M --compression-type {compression} --compression-level {level} full.raw {target}"
        );
        let words: Vec<&str> = line.split_whitespace().collect();
        let (out, peak_kib) = run_measured(measured, Duration::from_secs(300), dir, &words);
        out.ok();
        eprintln!("{compression}, level {level}: {peak_kib} KiB");
        let allowed = (64 << 10) + BESIDE_BUFFERS_KIB + cores * LARGEST_CONTEXT_KIB;
        assert!(peak_kib <= allowed, "{line}: {peak_kib} KiB resident");
    }
}
