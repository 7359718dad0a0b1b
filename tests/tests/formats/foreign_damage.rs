//! Images of other programs that are cut off, or that declare more than they hold: what is there is read, and the rest ends in
//! bounded time and memory.

use std::fmt::Write;
use std::path::Path;
use std::time::Duration;
use zebu_tests::hostile::foreign_samples::{self, put};
use zebu_tests::program::zebu;
use zebu_tests::scratch::Scratch;
use zebu_tests::usage::run_measured;

const MIB: usize = 1 << 20;

fn measured(dir: &Path, line: &str, seconds: u64) -> (zebu_tests::program::Finished, u64) {
    let words: Vec<&str> = line.split(' ').collect();
    run_measured(Path::new(env!("CARGO_BIN_EXE_measured")), Duration::from_secs(seconds), dir, &words)
}

/// An extent file that lost its end loses that alone.
#[test]
fn salvage_keeps_what_is_there_of_a_flat_vmdk() {
    let scratch = Scratch::new("cut");
    let dir = scratch.path();
    let disk: Vec<u8> = (0..3 * MIB).map(|i| (i / 512 % 251) as u8 + 1).collect();
    let text = foreign_samples::vmware::descriptor(
        "twoGbMaxExtentFlat",
        "",
        "RW 2048 FLAT \"one\" 0\nRW 4096 FLAT \"two\" 0",
    );
    std::fs::write(dir.join("image.vmdk"), text).unwrap();
    std::fs::write(dir.join("one"), &disk[..MIB]).unwrap();
    // Three sectors and a part of one are missing.
    std::fs::write(dir.join("two"), &disk[MIB..3 * MIB - 3 * 512 - 100]).unwrap();
    let out = zebu(dir, ["convert", "-O", "raw", "image.vmdk", "out"]).exits(1);
    assert!(out.stderr.contains("past the end of the file"), "{out}");
    let out = zebu(dir, ["convert", "--salvage", "-O", "raw", "image.vmdk", "out"]).ok();
    assert!(out.stderr.contains("two") && out.stderr.contains("past the end of the file"), "{out}");
    let found = std::fs::read(dir.join("out")).unwrap();
    let kept = 3 * MIB - 4 * 512;
    assert!(found[..kept] == disk[..kept]);
    assert!(found.len() == disk.len() && found[kept..].iter().all(|byte| *byte == 0));
}

/// A small file with a disk of 8 EiB: few lines, or a refusal that tells the size.
#[test]
fn a_disk_of_8_eib_in_a_small_file_ends_soon() {
    const SECTORS: u64 = i64::MAX as u64 / 512;
    let scratch = Scratch::new("huge");
    let dir = scratch.path();
    let mut parallels = vec![0; MIB];
    for (at, value) in [(16, 2u32), (28, 2048), (32, 4)] {
        put(&mut parallels, at, &value.to_le_bytes());
    }
    put(&mut parallels, 0, b"WithouFreSpacExt");
    put(&mut parallels, 36, &SECTORS.to_le_bytes());
    std::fs::write(dir.join("image.hdd"), parallels).unwrap();
    let mut delta = foreign_samples::se_sparse().files.remove(1).1;
    put(&mut delta, 16, &SECTORS.to_le_bytes());
    std::fs::write(dir.join("delta"), delta).unwrap();
    let text =
        foreign_samples::vmware::descriptor("seSparse", "", &format!("RW {SECTORS} SESPARSE \"delta\""));
    std::fs::write(dir.join("image.vmdk"), text).unwrap();
    for image in ["image.hdd", "image.vmdk"] {
        for (line, code) in [
            ("map --output=json IMAGE", 0),
            ("measure -O raw IMAGE", 0),
            ("compare IMAGE IMAGE", 0),
            ("convert -O raw IMAGE out", 1),
            ("convert -O qcow2 IMAGE out", 1),
            ("convert --salvage -O qcow2 IMAGE out", 1),
        ] {
            let (out, peak_kib) = measured(dir, &line.replace("IMAGE", image), 20);
            assert_eq!(out.code, Some(code), "{out}");
            assert!(peak_kib < 112 << 10 && out.stdout.len() < 10_000, "{peak_kib} KiB: {out}");
            assert!(code == 0 || out.stderr.contains("too large"), "{out}");
        }
    }
}

/// A descriptor of 20 MB with as many extents as fit in it, and one with as long a name.
#[test]
fn a_long_vmdk_descriptor_is_refused_soon() {
    let scratch = Scratch::new("long");
    let dir = scratch.path();
    let head = "# Disk DescriptorFile\nversion=1\nCID=1\nparentCID=ffffffff\ncreateType=\"vmfs\"\n";
    let mut names = head.to_owned();
    let mut extents = head.to_owned();
    while names.len() < 19 * MIB {
        // Few names, of which the last ones are asked for again and again.
        let _ = writeln!(names, "RW 1 FLAT \"./{:0>60}\" 0", names.len() % 4000);
        let _ = writeln!(extents, "RW 1 ZERO");
    }
    std::fs::write(dir.join("names.vmdk"), names).unwrap();
    std::fs::write(dir.join("extents.vmdk"), extents).unwrap();
    let long = "x".repeat(19 * MIB);
    std::fs::write(dir.join("name.vmdk"), format!("{head}RW 8 FLAT \"{long}\" 0\n")).unwrap();
    std::fs::write(dir.join("line.vmdk"), format!("{head}RW 8 {long}\n")).unwrap();
    for (image, message) in [
        ("names.vmdk", "extents"),
        ("extents.vmdk", "extents"),
        ("name.vmdk", "Invalid extent line"),
        ("line.vmdk", "Invalid extent line"),
    ] {
        for line in ["info --verdict IMAGE", "convert -O raw IMAGE out", "map IMAGE"] {
            let (out, peak_kib) = measured(dir, &line.replace("IMAGE", image), 10);
            assert!(matches!(out.code, Some(1 | 2)), "{out}");
            assert!(peak_kib < 128 << 10, "{peak_kib} KiB: {out}");
            assert!(out.stderr.len() + out.stdout.len() < 4000, "{image}: {} bytes", out.stderr.len());
            assert!(format!("{out}").contains(message), "{out}");
        }
    }
}

/// A disk of many sparse extents: each is looked at once.
#[test]
fn a_vmdk_of_many_extent_files_opens_soon() {
    const FILES: usize = 2000;
    let scratch = Scratch::new("many");
    let dir = scratch.path();
    let (mut sample, mut lines) = (foreign_samples::sparse(), String::new());
    let extent = sample.image().clone();
    for number in 0..FILES {
        std::fs::write(dir.join(format!("s{number}")), &extent).unwrap();
        let _ = writeln!(lines, "RW 33 SPARSE \"s{number}\"");
    }
    // As long as a text may be.
    lines.extend((0..15 << 10).map(|_| "#".repeat(1023) + "\n"));
    let text = foreign_samples::vmware::descriptor("twoGbMaxExtentSparse", "", &lines);
    std::fs::write(dir.join("image.vmdk"), text).unwrap();
    let (out, peak_kib) = measured(dir, "convert -O raw image.vmdk out", 60);
    assert_eq!(out.code, Some(0), "{out}");
    assert!(peak_kib < 240 << 10, "{peak_kib} KiB");
    assert!(std::fs::read(dir.join("out")).unwrap() == sample.disk.repeat(FILES));
}

/// A log of 64 MiB that is full.
#[test]
fn the_log_of_a_vhdx_is_replayed_once() {
    let scratch = Scratch::new("log");
    let dir = scratch.path();
    let sample = foreign_samples::hyper_v::vhdx_with_long_log();
    std::fs::write(dir.join("image.vhdx"), &sample.files[0].1).unwrap();
    // The sums of a log take a while without optimisation; replayed for each part of the tables, they took minutes.
    for line in ["info --verdict image.vhdx", "convert -O raw image.vhdx out"] {
        let (out, peak_kib) = measured(dir, line, 30);
        assert!(out.code.is_some_and(|code| code <= 2), "{out}");
        assert!(peak_kib < 284 << 10, "{peak_kib} KiB: {out}");
    }
    assert!(std::fs::read(dir.join("out")).unwrap() == sample.disk);
}
