//! `zebu backup` and `zebu verify`.

use crate::common::{Background, Scratch, noise, qemu, send, wait_for, wait_until_landed, words};
use rustix::process::Signal;
use std::io::{Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Stdio};

const MIB: u64 = 1 << 20;
/// The first bytes of a zstd frame (RFC 8878).
const ZSTD_MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];

/// A raw disk of some MiB whose first and last parts hold data, half of it noise.
fn disk(scratch: &Scratch, name: &str, mib: u64) {
    let mut file = std::fs::File::create(scratch.file(name)).unwrap();
    file.set_len(mib * MIB + 512).unwrap();
    let mut data = noise(11, 6 << 20);
    for piece in data.chunks_mut(50_000).step_by(2) {
        piece.iter_mut().enumerate().for_each(|(i, byte)| *byte = (i / 11) as u8);
    }
    file.write_all(&data).unwrap();
    file.seek(SeekFrom::End(-(data.len() as i64))).unwrap();
    file.write_all(&data).unwrap();
}

fn change(scratch: &Scratch, name: &str, offset: u64, bytes: &[u8]) {
    let mut file = std::fs::File::options().write(true).open(scratch.file(name)).unwrap();
    file.seek(SeekFrom::Start(offset)).unwrap();
    file.write_all(bytes).unwrap();
}

/// Pages of a file in the page cache.
fn cached_pages(path: &Path) -> u64 {
    let output = Command::new("fincore").args(["-n", "-o", "PAGES"]).arg(path).output().unwrap();
    String::from_utf8_lossy(&output.stdout).trim().parse().unwrap()
}

fn names(scratch: &Scratch) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(scratch.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn a_backup_and_an_increment_are_what_the_disk_was() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    disk(&scratch, "disk", 40);
    for (name, options) in [
        ("zlib", ""),
        ("zstd", "--compression-type zstd --cluster-size 2M"),
        ("small", "--cluster-size 4k --strict-deflate"),
    ] {
        let line = format!("backup -f raw disk {name}.qcow2 --manifest {name}.manifest {options}");
        let report = scratch.zebu(&words(&format!("{line} --output json"))).ok().json();
        assert_eq!(report["total"], 40 * MIB + 512);
        scratch.qemu_img(&words(&format!("compare -f raw disk {name}.qcow2"))).ok();
        scratch.qemu_img(&words(&format!("check {name}.qcow2"))).ok();
        let verify = format!("verify --manifest {name}.manifest {name}.qcow2 --output json");
        let verified = scratch.zebu(&words(&verify)).ok().json();
        assert_eq!(verified["disk-hash"], report["disk-hash"]);
        assert_eq!(verified["bad"], 0);
    }
    std::fs::copy(scratch.file("disk"), scratch.file("before")).unwrap();
    change(&scratch, "disk", 100_000, &vec![0; 300_000]);
    change(&scratch, "disk", 20 * MIB, b"where there was a hole");
    let line = "backup -f raw disk next.qcow2 --manifest next.manifest --previous zlib.qcow2 \
                --previous-manifest zlib.manifest --output json";
    let report = scratch.zebu(&words(line)).ok().json();
    let written = report["written"].as_u64().unwrap();
    assert!((300_000..=7 * 65536).contains(&written), "{report:#}");
    scratch.qemu_img(&words("compare -f raw disk next.qcow2")).ok();
    scratch.qemu_img(&words("compare -f raw before zlib.qcow2")).ok();
    scratch.qemu_img(&words("check next.qcow2")).ok();
    scratch.zebu(&words("verify --manifest next.manifest next.qcow2")).ok();
    // The content is another, so the manifest of the first backup does not fit the second.
    let ran = scratch.zebu(&words("verify --manifest zlib.manifest next.qcow2"));
    assert_eq!(ran.code, Some(2), "{ran:#?}");
    assert!(ran.stderr.contains("offset 131072"), "{ran:#?}");
    assert!(names(&scratch).iter().all(|name| !name.contains("partial")), "{:?}", names(&scratch));
}

#[test]
fn nothing_stays_in_the_page_cache() {
    let scratch = Scratch::new();
    disk(&scratch, "disk", 64);
    let source = scratch.file("disk");
    // What making it has left there goes with a direct read only where nothing is dirty.
    assert!(Command::new("sync").arg(&source).status().unwrap().success());
    let dropped = Command::new("dd")
        .arg(format!("of={}", source.display()))
        .args(["if=/dev/null", "oflag=nocache", "conv=notrunc,fdatasync", "count=0", "status=none"])
        .status()
        .unwrap();
    assert!(dropped.success());
    if cached_pages(&source) > 0 {
        eprintln!("skipped: the source's pages don't go");
        return;
    }
    scratch.zebu(&words("backup -q -f raw disk out.qcow2 --cluster-size 4k --manifest out.manifest")).ok();
    let line = "backup -q -f raw disk next.qcow2 --cluster-size 4k --manifest next.manifest --previous out.qcow2 \
                --previous-manifest out.manifest";
    scratch.zebu(&words(line)).ok();
    scratch.zebu(&words("verify -q --manifest next.manifest next.qcow2")).ok();
    for name in ["disk", "out.qcow2", "out.manifest", "next.qcow2", "next.manifest"] {
        assert_eq!(cached_pages(&scratch.file(name)), 0, "pages of {name}");
    }
}

#[test]
fn an_interrupted_backup_is_none_and_can_be_resumed() {
    if !qemu() {
        return;
    }
    for signal in [Signal::TERM, Signal::KILL] {
        let scratch = Scratch::new();
        // The first checkpoint comes after 256 MiB; what lies behind takes long.
        disk(&scratch, "disk", 300);
        let line = "backup -q -f raw disk out.qcow2 --manifest out.manifest";
        interrupt(&scratch, line, signal);
        let left = [".out.qcow2.zebu-partial", ".out.qcow2.zebu-partial.manifest", "disk"];
        assert_eq!(names(&scratch), left, "{signal:?}");

        let line = "backup -f raw disk out.qcow2 --manifest out.manifest --resume --output json";
        let report = scratch.zebu(&words(line)).ok().json();
        assert!(report["resumed-at"].as_u64().unwrap() >= 256 * MIB, "{signal:?}: {report:#}");
        scratch.qemu_img(&words("compare -f raw disk out.qcow2")).ok();
        scratch.qemu_img(&words("check out.qcow2")).ok();
        scratch.zebu(&words("verify --manifest out.manifest out.qcow2")).ok();
        // The manifest is that of a backup in one go.
        let again = scratch.zebu(&words("backup -f raw disk whole.qcow2 --output json")).ok().json();
        assert_eq!(again["disk-hash"], report["disk-hash"]);
        assert_eq!(names(&scratch), ["disk", "out.manifest", "out.qcow2", "whole.qcow2"]);
    }
}

/// An extent of zeroes ends where a table of the image does, which is no reason to read what comes behind.
#[test]
fn zeroes_are_passed_over_without_checkpoints() {
    let scratch = Scratch::new();
    scratch.zebu(&words("create -q -f qcow2 base 2G")).ok();
    scratch.zebu(&words("create -q -f qcow2 -b base -F qcow2 disk")).ok();
    scratch.zebu(&["io", "-f", "qcow2", "-c", "write -n -z 0 2G", "disk"]).ok();
    let report = scratch.zebu(&words("backup disk out.qcow2 --manifest manifest --output json")).ok().json();
    assert_eq!(report["zero"].as_u64(), Some(2048 * MIB), "{report:#}");
    let manifest = String::from_utf8(scratch.read("manifest")).unwrap();
    assert!(!manifest.contains("checkpoint"), "{manifest}");
}

/// Starts a backup and stops it when its first checkpoint is there, which is after 256 MiB of disk.
fn interrupt(scratch: &Scratch, line: &str, signal: Signal) {
    let line = format!("{line} --rate-limit 3M");
    let mut command = scratch.command(env!("CARGO_BIN_EXE_zebu"), &words(&line));
    let mut child = Background::start(command.stderr(Stdio::null()));
    let manifest = scratch.file(".out.qcow2.zebu-partial.manifest");
    wait_for("a checkpoint", || {
        std::fs::read_to_string(&manifest).is_ok_and(|text| text.contains("checkpoint"))
    });
    send(&child, signal);
    assert!(!child.wait().unwrap().success());
    wait_until_landed(&scratch.file(".out.qcow2.zebu-partial"));
}

/// Makes the manifest that was left one of the first version, which does not tell what it is of.
fn forget_source(scratch: &Scratch) {
    let name = ".out.qcow2.zebu-partial.manifest";
    let text = String::from_utf8(scratch.read(name)).unwrap();
    let old: String = text.split_inclusive('\n').filter(|line| !line.starts_with("source ")).collect();
    assert_ne!(old, text);
    scratch.write(name, old.replacen("zebu-manifest 2", "zebu-manifest 1", 1).as_bytes());
}

#[test]
fn a_backup_does_not_go_on_with_another_disk() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    disk(&scratch, "disk", 300);
    disk(&scratch, "other", 300);
    // As far as the checkpoint they differ in one part of several.
    change(&scratch, "other", 2 * MIB, &noise(5, 1 << 20));
    let line = "backup -q -f raw DISK out.qcow2 --manifest out.manifest";
    let on = |disk: &str| line.replace("DISK", disk);
    let resume = |disk: &str| scratch.zebu(&words(&format!("{} --resume", on(disk))));
    interrupt(&scratch, &on("disk"), Signal::KILL);
    let left = names(&scratch);
    resume("other").fails_naming(1, &["other", "of another image", "leave --resume out"]);
    assert_eq!(names(&scratch), left);

    // The name is no proof, and a manifest of the first version has none.
    std::fs::rename(scratch.file("disk"), scratch.file("right")).unwrap();
    std::fs::rename(scratch.file("other"), scratch.file("disk")).unwrap();
    let elsewhere = ["disk", "holds something else", "leave --resume out"];
    resume("disk").fails_naming(1, &elsewhere);
    forget_source(&scratch);
    resume("disk").fails_naming(1, &elsewhere);

    // The disk that it is of may be renamed.
    resume("right").ok();
    scratch.qemu_img(&words("compare -f raw right out.qcow2")).ok();
    scratch.zebu(&words("verify -q --manifest out.manifest out.qcow2")).ok();

    // Nor does one that is complete but for the name of its manifest go to another disk.
    std::fs::rename(scratch.file("out.manifest"), scratch.file(".out.qcow2.zebu-partial.manifest")).unwrap();
    resume("disk").fails_naming(1, &elsewhere);
    resume("right").ok();
}

#[test]
fn a_backup_does_not_go_on_with_another_snapshot() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    disk(&scratch, "disk", 300);
    scratch.qemu_img(&words("convert -f raw -O qcow2 disk d.qcow2")).ok();
    for name in ["one", "two"] {
        scratch.qemu_img(&["snapshot", "-c", name, "d.qcow2"]).ok();
    }
    let line = "backup -q -f qcow2 d.qcow2 out.qcow2";
    interrupt(&scratch, &format!("{line} -l one"), Signal::KILL);
    for other in ["-l two", ""] {
        let ran = scratch.zebu(&words(&format!("{line} {other} --resume")));
        ran.fails_naming(1, &["d.qcow2", "another snapshot"]);
    }
    // The image may be written meanwhile.
    scratch.qemu_io(&["-c", "write -P 9 0 8M", "d.qcow2"]).ok();
    scratch.zebu(&words(&format!("{line} -l one --resume"))).ok();
    scratch.qemu_img(&words("compare -f raw disk out.qcow2")).ok();
}

/// Another previous backup may have got the name of the first, and its manifest that of the first one's.
#[test]
fn an_increment_does_not_go_on_over_another_previous_backup() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    disk(&scratch, "disk", 300);
    scratch.write("other", &scratch.read("disk"));
    change(&scratch, "other", 4 * MIB, &noise(7, 1 << 20));
    scratch.zebu(&words("backup -q -f raw disk before.qcow2 --manifest before.manifest")).ok();
    scratch.zebu(&words("backup -q -f raw other other.qcow2 --manifest other.manifest")).ok();
    change(&scratch, "disk", MIB, &noise(5, 1 << 20));
    let line = "backup -q -f raw disk out.qcow2 --manifest out.manifest --previous before.qcow2 \
                --previous-manifest before.manifest";
    interrupt(&scratch, line, Signal::KILL);
    let swap = || {
        for kind in ["qcow2", "manifest"] {
            let (before, other) = (format!("before.{kind}"), format!("other.{kind}"));
            std::fs::rename(scratch.file(&before), scratch.file("kept")).unwrap();
            std::fs::rename(scratch.file(&other), scratch.file(&before)).unwrap();
            std::fs::rename(scratch.file("kept"), scratch.file(&other)).unwrap();
        }
    };
    let resume = || scratch.zebu(&words(&format!("{line} --resume")));
    let left = names(&scratch);
    swap();
    let named = ["out.qcow2", "on another previous backup", "leave --resume out"];
    resume().fails_naming(1, &named);
    assert_eq!(names(&scratch), left);
    swap();

    // A manifest of before there was such a line does not tell.
    let manifest = ".out.qcow2.zebu-partial.manifest";
    let whole = scratch.read(manifest);
    let text = String::from_utf8(whole.clone()).unwrap();
    let old: String = text.split_inclusive('\n').filter(|line| !line.starts_with("previous ")).collect();
    assert_ne!(old, text);
    scratch.write(manifest, old.as_bytes());
    resume().fails_naming(1, &["out.qcow2", "does not say", "leave --resume out"]);
    scratch.write(manifest, &whole);

    resume().ok();
    scratch.qemu_img(&words("compare -f raw disk out.qcow2")).ok();
    scratch.zebu(&words("verify -q --manifest out.manifest out.qcow2")).ok();
}

/// Damage of a partial image is found when it is gone on with.
#[test]
fn a_backup_does_not_go_on_with_a_damaged_image() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    disk(&scratch, "disk", 300);
    // What can't be packed lies in the file as it is.
    change(&scratch, "disk", 2 * MIB, &noise(5, 1 << 20));
    let line = "backup -q -f raw disk out.qcow2 --manifest out.manifest";
    interrupt(&scratch, line, Signal::KILL);
    let (image, manifest) = (".out.qcow2.zebu-partial", ".out.qcow2.zebu-partial.manifest");
    let (whole, noted) = (scratch.read(image), scratch.read(manifest));
    let map = scratch.qemu_img(&["map", "--output", "json", "-f", "qcow2", image]).ok().json();
    let plain = map.as_array().unwrap().iter().find_map(|extent| extent["offset"].as_u64());
    let mut changed = whole.clone();
    changed[plain.unwrap() as usize + 70] ^= 1;
    // Where what is referred to ends, in whole clusters.
    scratch.write("copy", &whole);
    scratch.qemu_img(&words("check -q -r leaks -f qcow2 copy")).ok();
    let checked = scratch.qemu_img(&words("check --output json -f qcow2 copy")).ok().json();
    std::fs::remove_file(scratch.file("copy")).unwrap();
    let end = checked["image-end-offset"].as_u64().unwrap() as usize;
    let cases = [
        // A table or data, by chance.
        (whole[..end / 2].to_vec(), ["the partial image is damaged", "the partial image was cut short"]),
        (
            whole[..end - 100_000].to_vec(),
            ["the partial image is damaged", "the partial image was cut short"],
        ),
        (whole[..end - 65536 + 600].to_vec(), ["the partial image was cut short"; 2]),
        (changed, ["the partial image does not hold"; 2]),
    ];
    let resume = || scratch.zebu(&words(&format!("{line} --resume")));
    for (bytes, why) in cases {
        scratch.write(image, &bytes);
        scratch.write(manifest, &noted);
        let ran = resume();
        assert_eq!(ran.code, Some(1), "{why:?}: {} of {} bytes, {ran:?}", bytes.len(), whole.len());
        let why = why.into_iter().find(|why| ran.stderr.contains(why)).expect(&ran.stderr);
        ran.fails_naming(1, &[image, why, "leave --resume out"]);
        assert_eq!(names(&scratch), [image, manifest, "disk"]);
    }
    scratch.write(image, &whole);
    scratch.write(manifest, &noted);
    resume().ok();
    scratch.qemu_img(&words("compare -f raw disk out.qcow2")).ok();
}

/// The cache mode that never syncs is no excuse for a checkpoint of what is not durable.
#[test]
fn a_checkpoint_comes_after_its_data_where_nothing_is_synced() {
    let scratch = Scratch::new();
    disk(&scratch, "disk", 300);
    let mut traced = words("-f -y -qq -o trace -e trace=fsync,fdatasync");
    traced.push(env!("CARGO_BIN_EXE_zebu"));
    traced.extend(words("backup -q -f raw -t unsafe disk out.qcow2"));
    let status = scratch.command("strace", &traced).status();
    assert!(status.expect("strace is missing: `cargo xtask setup` installs it").success());
    let trace = String::from_utf8(scratch.read("trace")).unwrap();
    let first =
        |call: &str, file: &str| trace.lines().position(|line| line.contains(call) && line.contains(file));
    let data = first("sync(", ".zebu-partial>");
    let noted = first("fdatasync(", ".zebu-partial.manifest>");
    assert!(data.is_some() && noted.is_some() && data < noted, "{trace}");
}

#[test]
fn an_interrupted_backup_keeps_its_compression() {
    let scratch = Scratch::new();
    disk(&scratch, "disk", 300);
    let line = "backup -q -f raw disk out.qcow2 --compression-type";
    interrupt(&scratch, &format!("{line} zstd"), Signal::KILL);
    let left = names(&scratch);
    let named = ["out.qcow2", "zstd", "zlib", "leave --resume out"];
    scratch.zebu(&words(&format!("{line} zlib --resume"))).fails_naming(1, &named);
    assert_eq!(names(&scratch), left);
    scratch.zebu(&words(&format!("{line} zstd --resume"))).ok();
}

/// Between the name of the image and that of the manifest, or its end, the image is complete.
#[test]
fn a_complete_backup_whose_manifest_is_left_is_not_to_be_removed() {
    let scratch = Scratch::new();
    disk(&scratch, "raw", 13);
    scratch.zebu(&words("convert -q -f raw -O qcow2 raw disk")).ok();
    let left = ".out.qcow2.zebu-partial.manifest";
    scratch.zebu(&words("backup -q disk out.qcow2 --manifest out.manifest")).ok();
    std::fs::rename(scratch.file("out.manifest"), scratch.file(left)).unwrap();
    let before = names(&scratch);
    let line = "backup -q disk out.qcow2";
    scratch.zebu(&words(line)).fails_naming(1, &["out.qcow2", "the backup is complete", left, "resume it"]);
    let by_bitmap = scratch.zebu(&words(&format!("{line} --bitmap b --resume")));
    by_bitmap.fails_naming(1, &["out.qcow2", "the backup is complete", "bitmap 'b'", left, "keep it"]);
    assert_eq!(names(&scratch), before);
    // One that has no end says nothing of a file that somebody else has made.
    let whole = scratch.read(left);
    scratch.write(left, &whole[..whole.len() - 70]);
    scratch.zebu(&words(&format!("{line} --resume"))).fails_naming(1, &["out.qcow2", "exists already"]);
    scratch.write(left, &whole);
    scratch.zebu(&words(&format!("{line} --resume"))).ok();
    assert_eq!(names(&scratch), ["disk", "out.qcow2", "raw"]);
}

/// An increment whose backing file is the disk itself would show whatever is written later.
#[test]
fn an_increment_does_not_stand_on_its_source() {
    let scratch = Scratch::new();
    disk(&scratch, "raw", 13);
    scratch.zebu(&words("convert -q -f raw -O qcow2 raw disk")).ok();
    std::fs::hard_link(scratch.file("disk"), scratch.file("hard")).unwrap();
    scratch.zebu(&words("create -q -f qcow2 -b disk -F qcow2 over")).ok();
    scratch.zebu(&words("backup -q disk full.qcow2 --manifest full.manifest")).ok();
    let before = names(&scratch);
    for previous in ["disk", "hard", "over"] {
        let line = format!(
            "backup -q disk out.qcow2 --manifest out.manifest --previous {previous} --previous-manifest \
             full.manifest"
        );
        let named = [previous, "'disk'", "name another previous backup"];
        scratch.zebu(&words(&line)).fails_naming(1, &named);
        assert_eq!(names(&scratch), before);
    }
    // A disk that stands on the previous backup, as after a quick restoration, is no trouble.
    scratch.zebu(&words("create -q -f qcow2 -b full.qcow2 -F qcow2 restored")).ok();
    scratch
        .zebu(&words("backup -q restored out.qcow2 --previous full.qcow2 --previous-manifest full.manifest"))
        .ok();
}

#[test]
fn an_increment_that_knows_changes_only_does_not_become_one_with_hashes() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    disk(&scratch, "disk", 300);
    scratch.qemu_img(&words("convert -f raw -O qcow2 disk d.qcow2")).ok();
    scratch.zebu(&words("backup -q d.qcow2 full.qcow2 --manifest full.manifest --bitmap b")).ok();
    // What is made zero is passed at once; the rest takes longer than the checkpoint.
    scratch.qemu_io(&["-c", "write -z 0 280M", "-c", "write -P 5 290M 10M", "d.qcow2"]).ok();
    let line = "backup -q d.qcow2 out.qcow2 --previous full.qcow2";
    interrupt(&scratch, &format!("{line} --bitmap b"), Signal::KILL);
    let with_hashes = format!("{line} --resume --previous-manifest full.manifest --manifest out.manifest");
    scratch.zebu(&words(&with_hashes)).fails_naming(1, &["d.qcow2", "with another bitmap"]);
    scratch.zebu(&words(&format!("{line} --bitmap b --resume"))).ok();
    scratch.qemu_img(&words("compare d.qcow2 out.qcow2")).ok();
}

#[test]
fn zeroes_cost_nothing_however_many_they_are() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    // 60 PiB: one step for each of its clusters would take minutes, one for each MiB hours.
    scratch.qemu_img(&words("create -q -f qcow2 -o cluster_size=2M huge.qcow2 60P")).ok();
    let fill = |pattern: u8, place: &str| {
        let write = format!("write -P {pattern} {place} 64k");
        scratch.qemu_io(&["-f", "qcow2", "-c", &write, "huge.qcow2"]).ok();
    };
    fill(3, "1M");
    fill(4, "30P");
    let options = "--cluster-size 2M --bitmap b";
    scratch.zebu(&words(&format!("backup -q huge.qcow2 a.qcow2 --manifest a.manifest {options}"))).ok();
    fill(5, "50P");
    fill(6, "30P");
    let on = "--previous a.qcow2 --previous-manifest a.manifest --cluster-size 2M";
    scratch.zebu(&words(&format!("backup -q huge.qcow2 b.qcow2 --manifest b.manifest {on}"))).ok();
    let by_bitmap = "--previous a.qcow2 --cluster-size 2M --bitmap b";
    scratch.zebu(&words(&format!("backup -q huge.qcow2 c.qcow2 {by_bitmap}"))).ok();
    for (image, expected) in [("a", [3, 4, 0]), ("b", [3, 6, 5]), ("c", [3, 6, 5])] {
        let image = format!("{image}.qcow2");
        for (pattern, place) in expected.into_iter().zip(["1M", "30P", "50P"]) {
            let read = format!("read -P {pattern} {place} 64k");
            let ran = scratch.qemu_io(&["-f", "qcow2", "-c", &read, &image]).ok();
            assert!(!ran.stdout.contains("verification failed"), "{image} {place}: {ran:#?}");
        }
    }
    for image in ["a", "b"] {
        scratch.zebu(&words(&format!("verify -q --manifest {image}.manifest {image}.qcow2"))).ok();
    }
    assert_eq!(scratch.zebu(&words("verify -q --manifest a.manifest b.qcow2")).code, Some(2));
}

/// A directory that no file of the scratch directory can be renamed to, if there is one.
fn another_file_system(scratch: &Scratch) -> Option<tempfile::TempDir> {
    let device = |path: &Path| path.metadata().map(|found| found.dev()).ok();
    let shared = Path::new("/dev/shm");
    if device(shared).is_none_or(|dev| Some(dev) == device(scratch.path())) {
        eprintln!("skipped: a manifest on another file system, since /dev/shm is none");
        return None;
    }
    tempfile::Builder::new().prefix("zebu-cli-").tempdir_in(shared).ok()
}

#[test]
fn a_second_backup_to_the_same_target_is_refused_and_takes_nothing_from_the_first() {
    let scratch = Scratch::new();
    disk(&scratch, "disk", 24);
    let line = "backup -q -f raw disk out.qcow2 --manifest out.manifest";
    let mut slow = scratch.command(env!("CARGO_BIN_EXE_zebu"), &words(&format!("{line} --rate-limit 4M")));
    let mut first = Background::start(&mut slow);
    wait_for("the first backup", || scratch.file(".out.qcow2.zebu-partial").exists());
    // A busy machine may take longer to start the others than it takes.
    send(&first, Signal::STOP);
    for more in ["", "--resume"] {
        scratch.zebu(&words(&format!("{line} {more}"))).fails_naming(1, &["out.qcow2", "under way"]);
    }
    assert!(first.try_wait().unwrap().is_none(), "the first backup is over already");
    send(&first, Signal::CONT);
    assert!(first.wait().unwrap().success());
    scratch.zebu(&words("verify --manifest out.manifest out.qcow2")).ok();
    assert_eq!(names(&scratch), ["disk", "out.manifest", "out.qcow2"]);
}

#[test]
fn what_can_not_be_is_refused_and_leaves_nothing() {
    let scratch = Scratch::new();
    disk(&scratch, "disk", 13);
    disk(&scratch, "larger", 14);
    scratch.zebu(&words("backup -q -f raw disk a.qcow2 --manifest a.manifest")).ok();
    let text = std::fs::read_to_string(scratch.file("a.manifest")).unwrap();
    std::fs::write(scratch.file("changed"), text.replacen("\n0 ", "\n0 0", 1)).unwrap();
    std::fs::write(scratch.file("cut"), &text[..text.len() / 2]).unwrap();
    scratch.write("noise", &noise(1, 5000));
    // The same size, but for some bytes the same content.
    std::fs::copy(scratch.file("disk"), scratch.file("other")).unwrap();
    change(&scratch, "other", 5 * MIB, b"something else");
    scratch.zebu(&words("backup -q -f raw other other.qcow2 --manifest other.manifest")).ok();
    let before = names(&scratch);
    let elsewhere = another_file_system(&scratch);
    let on_another = elsewhere.as_ref().map(|dir| {
        let manifest = dir.path().join("b.manifest");
        format!("backup -f raw disk b.qcow2 --manifest {}", manifest.display())
    });
    for (line, named) in [
        ("backup -f raw disk a.qcow2", "exists already"),
        ("backup -f raw disk b.qcow2 --manifest a.manifest", "a.manifest"),
        ("backup -f raw disk b.qcow2 --manifest no/b.manifest", "no directory 'no': make it first"),
        ("backup -f raw disk b.qcow2 --manifest disk/b.manifest", "disk/b.manifest"),
        ("backup -f raw disk b.qcow2 --manifest b.qcow2", "give the manifest another"),
        ("backup -f raw disk b.qcow2 --manifest ./.b.qcow2.zebu-partial", "give the manifest another"),
        ("backup -f raw missing b.qcow2", "missing"),
        ("backup -f raw disk no/b.qcow2", "no/"),
        ("backup -f raw disk b.qcow2 --cluster-size 3k", "luster size"),
        ("backup -f raw disk b.qcow2 --cluster-size 7E", "luster size"),
        ("backup -f raw disk b.qcow2 --compression-level 99", "level 99"),
        ("backup -f raw disk b.qcow2 --buffer-memory 1M", "buffer memory"),
        ("backup -f raw disk b.qcow2 --previous a.qcow2", "--previous-manifest"),
        (
            "backup -f raw larger b.qcow2 --previous a.qcow2 --previous-manifest a.manifest",
            "make a full backup",
        ),
        (
            "backup -f raw disk b.qcow2 --cluster-size 4k --previous a.qcow2 --previous-manifest a.manifest",
            "make a full backup",
        ),
        (
            "backup -f raw disk b.qcow2 --previous a.qcow2 --previous-manifest other.manifest",
            "guest offset 5242880",
        ),
        ("backup -f raw disk b.qcow2 --previous a.qcow2 --previous-manifest changed", "changed"),
        ("backup -f raw disk b.qcow2 --previous a.qcow2 --previous-manifest cut", "cut"),
        ("backup -f raw disk b.qcow2 --previous a.qcow2 --previous-manifest noise", "noise"),
        ("verify a.qcow2 --manifest cut", "cut"),
        ("verify a.qcow2 --manifest missing", "missing"),
        ("verify -f raw larger --manifest a.manifest", "another disk"),
    ]
    .into_iter()
    .chain(on_another.as_deref().map(|line| (line, "on the file system of the backup")))
    {
        scratch.zebu(&words(line)).fails_naming(1, &[named]);
        assert_eq!(names(&scratch), before, "{line}");
    }
}

#[test]
fn damage_is_found_and_can_be_skipped() {
    let scratch = Scratch::new();
    disk(&scratch, "disk", 13);
    scratch.zebu(&words("backup -q -f raw disk a.qcow2 --manifest a.manifest --compression-type zstd")).ok();
    // The magic number of a stream: whatever is behind it, without it there is none.
    let mut bytes = scratch.read("a.qcow2");
    let half = bytes.len() / 2;
    let at = half + bytes[half..].windows(4).position(|four| four == ZSTD_MAGIC).expect("a stream");
    bytes[at] ^= 0x40;
    scratch.write("a.qcow2", &bytes);
    let ran = scratch.zebu(&words("verify --manifest a.manifest a.qcow2 --output json"));
    assert_eq!(ran.code, Some(2), "{ran:#?}");
    let bad = ran.json()["bad"].as_u64().unwrap();
    assert_eq!(bad, 65536, "{ran:#?}");
    assert!(ran.stderr.contains("decompressed"), "{ran:#?}");
    // The backup stops, or goes on without the cluster.
    scratch.zebu(&words("backup a.qcow2 b.qcow2")).fails_naming(1, &["decompressed", "guest offset"]);
    assert!(!scratch.file("b.qcow2").exists());
    let report = scratch.zebu(&words("backup a.qcow2 b.qcow2 --skip-errors --output json")).ok();
    assert_eq!(report.json()["unreadable"], bad, "{report:#?}");
    assert!(report.stderr.contains("error while reading"), "{report:#?}");
    scratch.zebu(&words("verify b.qcow2")).ok();
}

/// Clusters behind the end of the file read as zero, which is not what was written. QEMU says of which cuts that is so.
#[test]
fn an_image_that_was_cut_short_is_not_well() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    let mut bytes = noise(5, 2 << 20);
    bytes[1 << 20..(1 << 20) + 300_000].fill(0);
    scratch.write("disk", &bytes);
    let mut seen = [false; 2];
    for cluster in [4096, 65536] {
        let line = format!("convert -f raw -O qcow2 -o cluster_size={cluster} disk whole.qcow2");
        scratch.qemu_img(&words(&line)).ok();
        let whole = scratch.read("whole.qcow2");
        for cut in [1, 100, cluster - 1, cluster, cluster + 1, 200_000, 1_000_000] {
            scratch.write("cut.qcow2", &whole[..whole.len() - cut]);
            let overlay =
                format!("create -q -f qcow2 -o cluster_size={cluster} -b cut.qcow2 -F qcow2 top.qcow2");
            scratch.qemu_img(&words(&overlay)).ok();
            // An image that has its own clusters and an overlay that has none are read alike.
            for name in ["cut.qcow2", "top.qcow2"] {
                let judged = scratch.qemu_img(&words("check --output json cut.qcow2"));
                let is_whole = judged.json()["corruptions"].is_null();
                let ran = scratch.zebu(&words(&format!("verify --output json {name}")));
                let what = format!("{cut} bytes of clusters of {cluster} missing: {ran:?}");
                assert_eq!(ran.code, Some(if is_whole { 0 } else { 2 }), "{what}");
                let bad = ran.json()["bad"].as_u64().unwrap();
                let missing = cut / cluster * cluster;
                assert_eq!(bad, missing as u64, "{what}");
                seen[usize::from(is_whole)] = true;
            }
        }
        std::fs::remove_file(scratch.file("whole.qcow2")).unwrap();
    }
    assert_eq!(seen, [true; 2]);
}
