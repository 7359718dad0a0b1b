//! Packed sources of `convert` and `backup`: what the usual programs pack is read as what was packed.

use rustix::process::{Pid, Signal, kill_process};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;
use zebu_tests::filled_disk::{Fill, disk, write_sparse};
use zebu_tests::model::difference;
use zebu_tests::patience::wait_until;
use zebu_tests::program::{Finished, finish, replacing, zebu, zebu_program};
use zebu_tests::random::Random;
use zebu_tests::scratch::Scratch;
use zebu_tests::server::end_of;
use zebu_tests::usage::run_measured;

const MIB: usize = 1 << 20;

/// Programs that pack from their input to their output.
const PACKERS: [&str; 7] = [
    "gzip -c",
    "xz -c -1 -T2 --block-size=1MiB",
    "xz -c -0 -T1",
    "zstd -c -q -T2",
    "bzip2 -c",
    "lz4 -c -q",
    "lz4 -c -q -BD",
];

/// Packs a file of a directory into another.
fn pack(dir: &Path, line: &str, from: &str, to: &str) {
    let mut words = line.split(' ');
    let program = words.next().expect("a program");
    let status = Command::new(program)
        .args(words)
        .current_dir(dir)
        .stdin(std::fs::File::open(dir.join(from)).expect("just made"))
        .stdout(std::fs::File::create(dir.join(to)).expect("scratch is writable"))
        .status()
        .unwrap_or_else(|e| panic!("{program}: {e}; `cargo xtask setup` installs it"));
    assert!(status.success(), "{line}");
}

fn tar(dir: &Path, format: &str, to: &str, members: &[&str]) {
    let status = Command::new("tar")
        .args([&format!("--format={format}"), "-cf", to])
        .args(members)
        .current_dir(dir)
        .stdin(Stdio::null())
        .status()
        .expect("tar is there");
    assert!(status.success());
}

fn same(dir: &Path, name: &str, expected: &[u8], what: &str) {
    let found = std::fs::read(dir.join(name)).expect("just made");
    if let Some(text) = difference(0, expected, &found) {
        panic!("{what}: {text}");
    }
}

/// The names of all files of a directory.
fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(dir)
        .expect("ours")
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort_unstable();
    names
}

#[test]
fn packed_images_of_any_format_are_converted() {
    let scratch = Scratch::new("packed");
    let dir = scratch.path();
    let expected = disk(3 * MIB, Fill::Some, &mut Random::new(31));
    write_sparse(&scratch.file("raw"), &expected);
    for (name, options) in [
        ("qcow2", "-O qcow2"),
        ("vpc", "-O vpc -o subformat=fixed,force_size"),
        ("vmdk", "-O vmdk -o subformat=streamOptimized"),
    ] {
        let words = ["convert", "-f", "raw"].into_iter().chain(options.split(' ')).chain(["raw", name]);
        zebu(dir, words.collect::<Vec<_>>()).ok();
    }
    for packer in PACKERS {
        for inner in ["raw", "qcow2", "vpc", "vmdk"] {
            pack(dir, packer, inner, "packed");
            zebu(dir, ["convert", "-O", "raw", "packed", "out"]).ok();
            same(dir, "out", &expected, &format!("{packer} of {inner}"));
        }
    }
    // What is in the file counts, not its name; and the format of what is in it can be said.
    pack(dir, "zstd -c -q", "qcow2", "raw.gz");
    zebu(dir, ["convert", "-f", "qcow2", "-O", "raw", "raw.gz", "out"]).ok();
    same(dir, "out", &expected, "a format that was given");
    // With the format raw, the packed bytes are the disk.
    zebu(dir, ["convert", "-f", "raw", "-O", "raw", "raw.gz", "out"]).ok();
    let packed = std::fs::read(scratch.file("raw.gz")).expect("just made");
    let found = std::fs::read(scratch.file("out")).expect("just made");
    assert_eq!(found[..packed.len()], packed);
    // Two sources, one of them packed, and a backup.
    zebu(dir, ["convert", "-O", "raw", "raw.gz", "qcow2", "out"]).ok();
    same(dir, "out", &[expected.clone(), expected.clone()].concat(), "two sources");
    zebu(dir, ["backup", "raw.gz", "backup.qcow2"]).ok();
    zebu(dir, ["compare", "backup.qcow2", "qcow2"]).ok();
    assert_eq!(names(dir), ["backup.qcow2", "out", "packed", "qcow2", "raw", "raw.gz", "vmdk", "vpc"]);
}

const OVF: &str = "<Envelope><References><File ovf:id=\"f\" ovf:href=\"HREF\"/></References>
    <DiskSection><Disk ovf:diskId=\"d\" ovf:fileRef=\"f\"/></DiskSection></Envelope>";

#[test]
fn the_disk_of_an_ova_is_read_in_place() {
    let scratch = Scratch::new("packed");
    let dir = scratch.path();
    let expected = disk(9 * MIB + 512, Fill::Some, &mut Random::new(32));
    write_sparse(&scratch.file("raw"), &expected);
    let long = format!("{}.vmdk", "long".repeat(40));
    zebu(dir, ["convert", "-O", "vmdk", "-o", "subformat=streamOptimized", "raw", &long]).ok();
    std::fs::write(scratch.file("other.txt"), "a note").expect("scratch is writable");
    std::fs::write(scratch.file("box.ovf"), OVF.replace("HREF", &long)).expect("scratch is writable");
    for format in ["ustar", "gnu", "posix"] {
        // A name of more than 100 bytes is none of plain ustar.
        let disk = if format == "ustar" { "raw" } else { &long };
        std::fs::write(scratch.file("box.ovf"), OVF.replace("HREF", disk)).expect("scratch is writable");
        tar(dir, format, "box.ova", &["box.ovf", "other.txt", disk]);
        zebu(dir, ["convert", "-O", "raw", "box.ova", "out"]).ok();
        same(dir, "out", &expected, format);
        let refused = zebu(dir, ["convert", "-O", "raw", "--member", "none.vmdk", "box.ova", "new"]).exits(1);
        assert!(refused.stderr.contains("'other.txt'") && !scratch.file("new").exists(), "{refused}");
        zebu(dir, ["convert", "-f", "raw", "-O", "raw", "--member", "x", "box.ova", "new"]).exits(1);
        zebu(dir, ["convert", "-O", "raw", "--member", &format!("./{disk}"), "box.ova", "out"]).ok();
        same(dir, "out", &expected, format);
    }
    // An OVA in gzip, and a disk in xz in a tar file.
    pack(dir, "gzip -c", "box.ova", "box.ova.gz");
    zebu(dir, ["convert", "-O", "raw", "box.ova.gz", "out"]).ok();
    same(dir, "out", &expected, "an OVA in gzip");
    pack(dir, "xz -c -0", "raw", "raw.xz");
    tar(dir, "ustar", "one.tar", &["raw.xz"]);
    zebu(dir, ["convert", "-O", "raw", "one.tar", "out"]).ok();
    same(dir, "out", &expected, "xz in tar");
    // Without an OVF, or with several disks, somebody has to choose.
    tar(dir, "ustar", "two.tar", &["raw.xz", "other.txt"]);
    let out = zebu(dir, ["convert", "-O", "raw", "two.tar", "new"]).exits(1);
    assert!(out.stderr.contains("--member") && out.stderr.contains("'raw.xz'"), "{out}");
    let two = OVF.replace("</References>", "<File id='g' href='other.txt'/></References>");
    let two = two.replace("</DiskSection>", "<Disk fileRef='g'/></DiskSection>").replace("HREF", "raw.xz");
    std::fs::write(scratch.file("box.ovf"), two).expect("scratch is writable");
    tar(dir, "ustar", "several.ova", &["box.ovf", "raw.xz", "other.txt"]);
    let out = zebu(dir, ["convert", "-O", "raw", "several.ova", "new"]).exits(1);
    assert!(out.stderr.contains("several disks"), "{out}");
    zebu(dir, ["convert", "-O", "raw", "--member", "raw.xz", "several.ova", "out"]).ok();
    same(dir, "out", &expected, "a chosen disk");
    // The OVF may name what it likes: only members of its own file are read.
    for href in ["/etc/passwd", "../raw", "http://example.com/x"] {
        std::fs::write(scratch.file("box.ovf"), OVF.replace("HREF", href)).expect("scratch is writable");
        tar(dir, "ustar", "evil.ova", &["box.ovf", "other.txt"]);
        let out = zebu(dir, ["convert", "-O", "raw", "evil.ova", "new"]).exits(1);
        assert!(out.stderr.contains("not in the file"), "{out}");
    }
    assert!(!scratch.file("new").exists());
}

/// Resident memory that unpacking may take, KiB.
const MEMORY_KIB: u64 = 284 << 10;

#[test]
fn bombs_and_damage_end_in_errors() {
    let scratch = Scratch::new("packed");
    let dir = scratch.path();
    let measured = Path::new(env!("CARGO_BIN_EXE_measured"));
    let run = |words: &[&str]| {
        let (out, peak_kib) = run_measured(measured, Duration::from_secs(60), dir, words);
        assert!(peak_kib <= MEMORY_KIB, "{peak_kib} KiB: {out}");
        assert!(!out.stderr.contains("panicked"), "{out}");
        out
    };
    let zeroes = std::fs::File::create(scratch.file("zeroes")).expect("scratch is writable");
    zeroes.set_len(48 << 20).expect("scratch is writable");
    write_sparse(&scratch.file("raw"), &disk(MIB, Fill::All, &mut Random::new(4)));
    for packer in PACKERS {
        pack(dir, packer, "zeroes", "bomb");
        let out = run(&["convert", "-O", "qcow2", "--max-size", "40M", "bomb", "new"]);
        assert!(out.code == Some(1) && out.stderr.contains("--max-size"), "{packer}: {out}");
        pack(dir, packer, "raw", "packed");
        let packed = std::fs::read(scratch.file("packed")).expect("just made");
        for len in [packed.len() / 2, packed.len() - 1, 40] {
            std::fs::write(scratch.file("cut"), &packed[..len]).expect("scratch is writable");
            let out = run(&["convert", "-O", "qcow2", "cut", "new"]);
            assert!(out.code == Some(1) && out.stderr.contains("can't unpack"), "{packer} {len}: {out}");
        }
    }
    // Packed again and again.
    for layer in 0..6 {
        let names = ["raw", "p0", "p1", "p2", "p3", "p4", "p5"];
        pack(dir, "gzip -c", names[layer], names[layer + 1]);
    }
    let out = run(&["convert", "-O", "qcow2", "p5", "new"]);
    assert!(out.code == Some(1) && out.stderr.contains("times"), "{out}");
    // A tar file whose headers lie.
    tar(dir, "ustar", "good.tar", &["raw"]);
    let good = std::fs::read(scratch.file("good.tar")).expect("just made");
    for (at, bytes) in [
        (124, &b"77777777777\0"[..]),
        (124, b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"),
        (124, b"not octal!!\0"),
        (156, b"S"),
        (0, b"changed"),
    ] {
        let mut bad = good.clone();
        bad[at..at + bytes.len()].copy_from_slice(bytes);
        if at != 0 {
            // With the right sum.
            bad[148..156].fill(b' ');
            let sum: u64 = bad[..512].iter().map(|byte| u64::from(*byte)).sum();
            bad[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        }
        std::fs::write(scratch.file("bad.tar"), &bad).expect("scratch is writable");
        let out = run(&["convert", "-O", "qcow2", "bad.tar", "new"]);
        // Without its sum it is no tar file, but a raw disk.
        assert_eq!(out.code, Some(i32::from(at != 0)), "{out}");
        let _ = std::fs::remove_file(scratch.file("new"));
    }
    assert!(names(dir).iter().all(|name| !name.starts_with('.') && name != "new"), "{:?}", names(dir));
}

#[test]
fn a_target_that_is_the_packed_file_is_refused() {
    let scratch = Scratch::new("packed");
    let dir = scratch.path();
    write_sparse(&scratch.file("raw"), &disk(MIB, Fill::All, &mut Random::new(4)));
    pack(dir, "gzip -c", "raw", "packed");
    tar(dir, "ustar", "tar", &["raw"]);
    for name in ["packed", "tar"] {
        let before = std::fs::read(scratch.file(name)).expect("just made");
        let out = zebu(dir, ["convert", "-O", "qcow2", name, &format!("./{name}")]).exits(1);
        assert!(out.stderr.contains("target"), "{out}");
        assert!(std::fs::read(scratch.file(name)).expect("still there") == before);
    }
    let other = |words: &[&str], packed: &str| {
        let before = std::fs::read(scratch.file(packed)).expect("just made");
        let line = words.iter().map(|word| word.replace("PACKED", packed));
        let out = zebu(dir, [String::from("convert")].into_iter().chain(line)).exits(1);
        assert!(out.stderr.contains(&format!("'{packed}': it is a file of the target")), "{out}");
        assert!(std::fs::read(scratch.file(packed)).expect("still there") == before, "{out}");
    };
    for name in ["packed", "tar"] {
        other(&["-O", "qcow2", "-o", "data_file=PACKED", "PACKED", "new"], name);
        other(&["-n", "--target-image-opts", "PACKED", "driver=raw,file.filename=PACKED"], name);
    }
    // Other commands say what can be done.
    let out = zebu(dir, ["map", "packed"]).exits(1);
    assert!(out.stderr.contains("convert"), "{out}");
}

/// Packings that nothing here unpacks: their bytes are not taken for a disk, and a program is named that unpacks them.
#[test]
fn other_packings_are_refused_with_a_remedy() {
    let scratch = Scratch::new("packed");
    let dir = scratch.path();
    write_sparse(&scratch.file("raw"), &disk(MIB, Fill::Some, &mut Random::new(32)));
    for (line, remedy) in [
        ("lz4 -l -c -q", "lz4 -dc"),
        ("xz -c --format=lzma", "lzma -dc"),
        ("xz -c --format=lzma --lzma1=dict=12MiB", "lzma -dc"),
        ("7zz a -tzip -si -so x", "unzip"),
    ] {
        pack(dir, line, "raw", "packed");
        for words in
            [vec!["info", "packed"], vec!["convert", "-O", "raw", "packed", "out"], vec!["map", "packed"]]
        {
            let refused = zebu(dir, words).exits(1);
            assert!(refused.stderr.contains(remedy) && refused.stderr.contains("-f raw"), "{refused}");
        }
        zebu(dir, ["convert", "-f", "raw", "-O", "raw", "packed", "out"]).ok();
        let verdict = zebu(dir, ["info", "--verdict", "-f", "raw", "packed"]);
        assert!(verdict.code != Some(0) && verdict.stdout.contains("looks like"), "{verdict}");
    }
    zebu(dir, ["convert", "-f", "raw", "-O", "raw", "raw", "plain.zip"]).ok();
    zebu(dir, ["info", "plain.zip"]).ok();
}

/// Runs `zebu` where no file for unpacked bytes can be made.
fn without_room(dir: &Path, words: &[&str]) -> Finished {
    let mut command = Command::new(zebu_program());
    command.args(replacing(words)).current_dir(dir).env("TMPDIR", dir.join("missing"));
    finish(command)
}

/// Has the packers pack a file by its name, so that they know how long it is.
fn pack_by_name(dir: &Path, line: &str, from: &str, to: &str) {
    pack(dir, &format!("{line} {from}"), from, to);
}

#[test]
fn raw_disks_are_unpacked_while_they_are_copied() {
    let scratch = Scratch::new("packed");
    let dir = scratch.path();
    for (number, len) in [(1, 1), (2, 1000), (3, 9 * MIB + 512), (4, 20 * MIB)] {
        let mut expected = disk(len.next_multiple_of(512), Fill::Some, &mut Random::new(number));
        expected.truncate(len);
        expected[0] = 1;
        write_sparse(&scratch.file("raw"), &expected);
        // As large as the disk of the file that is not packed.
        expected.resize(len.next_multiple_of(512), 0);
        for packer in PACKERS {
            pack(dir, packer, "raw", "packed");
            let all = [
                "-O raw",
                "-O qcow2",
                "-O raw -S 0",
                "-O raw -t none -m 3 -W",
                "-O raw --max-size 32M",
                "-O qcow2 -o extended_l2=on -m 1",
                "-O qcow2 -c",
                "-O qcow2 -c -o compression_type=zstd,cluster_size=1M",
                "-O qcow2 -o size=64M",
            ];
            // Every option with a disk of some size is enough.
            let few = if number == 3 { all.len() } else { 2 };
            for options in &all[..few] {
                let what = format!("{len} bytes, {packer}, {options}");
                let words: Vec<&str> =
                    ["convert"].into_iter().chain(options.split(' ')).chain(["packed", "out"]).collect();
                let out = without_room(dir, &words).ok();
                assert!(out.stderr.is_empty(), "{what}: {out}");
                if options.contains("qcow2") {
                    zebu(dir, ["check", "out"]).ok();
                    let size = if options.contains("size=64M") { 64 << 20 } else { expected.len() };
                    let info = zebu(dir, ["info", "--output", "json", "out"]).ok();
                    assert!(info.stdout.contains(&format!("\"virtual-size\": {size}")), "{what}: {info}");
                    zebu(dir, ["compare", "raw", "out"]).ok();
                } else {
                    same(dir, "out", &expected, &what);
                }
                std::fs::remove_file(scratch.file("out")).expect("just made");
            }
        }
    }
    assert_eq!(names(dir), ["packed", "raw"]);
}

#[test]
fn a_target_that_exists_keeps_what_lies_behind_the_source() {
    let scratch = Scratch::new("packed");
    let dir = scratch.path();
    let mut expected = disk(3 * MIB + 512, Fill::Some, &mut Random::new(71));
    write_sparse(&scratch.file("raw"), &expected);
    let old = disk(8 * MIB, Fill::All, &mut Random::new(72));
    expected.extend_from_slice(&old[expected.len()..]);
    for packer in PACKERS {
        pack(dir, packer, "raw", "packed");
        std::fs::write(scratch.file("old"), &old).expect("scratch is writable");
        without_room(dir, &["convert", "-n", "-O", "raw", "packed", "old"]).ok();
        same(dir, "old", &expected, packer);
        zebu(dir, ["convert", "-f", "raw", "-O", "qcow2", "old", "old.qcow2"]).ok();
        without_room(dir, &["convert", "-n", "-O", "qcow2", "packed", "old.qcow2"]).ok();
        zebu(dir, ["compare", "-f", "raw", "-F", "qcow2", "old", "old.qcow2"]).ok();
        zebu(dir, ["check", "old.qcow2"]).ok();
        zebu(dir, ["create", "-f", "raw", "small", "2M"]).ok();
        let out = without_room(dir, &["convert", "-n", "-O", "raw", "packed", "small"]).exits(1);
        assert!(out.stderr.contains("output file is smaller than input file"), "{packer}: {out}");
    }
}

/// Targets that must know the length of their disk first get it from xz and zstd; other packings need the room.
#[test]
fn lengths_that_packed_files_tell_spare_the_room() {
    let scratch = Scratch::new("packed");
    let dir = scratch.path();
    let expected = disk(5 * MIB, Fill::Some, &mut Random::new(73));
    write_sparse(&scratch.file("raw"), &expected);
    for packer in ["xz -c -1 -T2 --block-size=1MiB", "xz -c -0 -T1", "zstd -c -q"] {
        pack_by_name(dir, packer, "raw", "packed");
        for options in [
            "-O vdi",
            "-O vhdx",
            "-O vmdk -o subformat=streamOptimized",
            "-O raw -o preallocation=falloc",
            "-O qcow2 -o preallocation=metadata",
            "-O qcow2 -o cluster_size=512",
        ] {
            let words: Vec<&str> =
                ["convert"].into_iter().chain(options.split(' ')).chain(["packed", "out"]).collect();
            without_room(dir, &words).ok();
            zebu(dir, ["compare", "raw", "out"]).ok();
        }
        let out = without_room(dir, &["convert", "-O", "vdi", "--max-size", "4M", "packed", "new"]).exits(1);
        assert!(out.stderr.contains("--max-size"), "{out}");
        without_room(dir, &["backup", "packed", "backup.qcow2"]).ok();
        zebu(dir, ["compare", "raw", "backup.qcow2"]).ok();
        std::fs::remove_file(scratch.file("backup.qcow2")).expect("just made");
        without_room(dir, &["convert", "-O", "raw", "packed", "packed", "out"]).ok();
        same(dir, "out", &[expected.clone(), expected.clone()].concat(), "two sources");
    }
    pack(dir, "gzip -c", "raw", "packed");
    for words in [
        &["convert", "-O", "vdi", "packed", "new"][..],
        &["convert", "-O", "raw", "packed", "packed", "new"],
        &["backup", "packed", "new"],
    ] {
        let out = without_room(dir, words).exits(1);
        assert!(out.stderr.contains("TMPDIR"), "{out}");
    }
    assert!(!scratch.file("new").exists());
}

/// A fixed VHD looks raw up to its last 512 bytes. What was written by then does not stay.
#[test]
fn an_image_that_is_known_by_its_end_is_read_as_that_image() {
    let scratch = Scratch::new("packed");
    let dir = scratch.path();
    let expected = disk(3 * MIB, Fill::Some, &mut Random::new(74));
    write_sparse(&scratch.file("raw"), &expected);
    let options = ["-O", "vpc", "-o", "subformat=fixed,force_size"];
    zebu(dir, ["convert"].into_iter().chain(options).chain(["raw", "vhd"])).ok();
    for packer in PACKERS {
        pack_by_name(dir, packer, "vhd", "packed");
        zebu(dir, ["convert", "-O", "qcow2", "packed", "out"]).ok();
        zebu(dir, ["compare", "raw", "out"]).ok();
        zebu(dir, ["convert", "-O", "vdi", "packed", "out"]).ok();
        zebu(dir, ["compare", "raw", "out"]).ok();
        std::fs::write(scratch.file("old"), vec![0; 4 * MIB]).expect("scratch is writable");
        zebu(dir, ["convert", "-n", "--target-is-zero", "-O", "raw", "packed", "old"]).ok();
        let old = std::fs::read(scratch.file("old")).expect("just made");
        assert!(old[..expected.len()] == expected, "{packer}");
        zebu(dir, ["backup", "packed", "backup"]).ok();
        zebu(dir, ["compare", "raw", "backup"]).ok();
        std::fs::remove_file(scratch.file("backup")).expect("just made");
        let out = without_room(dir, &["convert", "-O", "raw", "packed", "new"]).exits(1);
        assert!(out.stderr.contains("TMPDIR"), "{packer}: {out}");
    }
    assert!(!scratch.file("new").exists());
}

/// Memory of a copy beside what it takes when nothing is packed, KiB. The window of `xz -6` has 8 MiB, and a block 24 MiB.
const STREAM_KIB: u64 = 204 << 10;

#[test]
fn memory_does_not_grow_with_the_disk() {
    let scratch = Scratch::new("packed");
    let dir = scratch.path();
    let measured = Path::new(env!("CARGO_BIN_EXE_measured"));
    write_sparse(&scratch.file("raw"), &disk(260 * MIB, Fill::Some, &mut Random::new(75)));
    for packer in ["gzip -1 -c", "xz -c -1 -T2", "zstd -c -q -1", "lz4 -c -q"] {
        pack(dir, packer, "raw", "packed");
        let words = ["convert", "-O", "qcow2", "packed", "out"];
        let (out, peak_kib) = run_measured(measured, Duration::from_secs(120), dir, &words);
        out.ok();
        assert!(peak_kib <= STREAM_KIB, "{packer}: {peak_kib} KiB");
        zebu(dir, ["compare", "raw", "out"]).ok();
    }
}

/// The end of a packed file counts, too: a sum, another part, or something that is none.
#[test]
fn damage_at_the_end_leaves_no_target() {
    let scratch = Scratch::new("packed");
    let dir = scratch.path();
    let expected = disk(2 * MIB, Fill::Some, &mut Random::new(76));
    write_sparse(&scratch.file("raw"), &expected);
    // The place of the sum of the content, or of the block, from the end.
    for (packer, sum) in
        [("gzip -c", 8), ("xz -c -0 -T1", 30), ("zstd -c -q", 4), ("bzip2 -c", 5), ("lz4 -c -q", 4)]
    {
        pack(dir, packer, "raw", "good");
        let good = std::fs::read(scratch.file("good")).expect("just made");
        let mut wrong = good.clone();
        let at = wrong.len() - sum;
        wrong[at] ^= 0x10;
        let bad = [
            ("a wrong sum", wrong),
            ("a letter behind", [&good[..], b"x"].concat()),
            (
                "text behind",
                [&good[..], b"this is no packed data, but it is long enough to be some"].concat(),
            ),
            ("half of another part", [&good[..], &good[..good.len() / 2]].concat()),
            ("the head of another part", [&good[..], &good[..5]].concat()),
        ];
        for (what, bytes) in bad {
            std::fs::write(scratch.file("packed"), bytes).expect("scratch is writable");
            for format in ["raw", "qcow2", "vdi"] {
                if packer.starts_with("gzip") && what.ends_with(" behind") {
                    // As gunzip does.
                    let out = zebu(dir, ["convert", "-O", format, "packed", "out"]).ok();
                    assert!(out.stderr.contains("warning: 'packed'"), "{what}: {out}");
                    assert_eq!(out.stderr.lines().count(), 1, "{what}: {out}");
                    zebu(dir, ["compare", "raw", "out"]).ok();
                    continue;
                }
                let out = zebu(dir, ["convert", "-O", format, "packed", "new"]).exits(1);
                assert!(out.stderr.contains("can't unpack"), "{packer}, {what}: {out}");
                assert!(!scratch.file("new").exists(), "{packer}, {what}");
            }
        }
        std::fs::write(scratch.file("packed"), [&good[..], &good].concat()).expect("scratch is writable");
        zebu(dir, ["convert", "-O", "raw", "packed", "out"]).ok();
        same(dir, "out", &[expected.clone(), expected.clone()].concat(), packer);
    }
    assert!(names(dir).iter().all(|name| !name.starts_with('.')), "{:?}", names(dir));
}

/// Bytes that a process has read.
fn bytes_read(pid: u32) -> u64 {
    let io = std::fs::read_to_string(format!("/proc/{pid}/io")).unwrap_or_default();
    let line = io.lines().find_map(|line| line.strip_prefix("rchar: "));
    line.and_then(|bytes| bytes.parse().ok()).unwrap_or(0)
}

/// A file of 1 TiB that has almost nothing in it: a stream that is cut off, which shows at once, or zeroes behind a whole one.
#[test]
fn what_yields_nothing_is_refused_at_once_or_ended_by_a_signal() {
    let scratch = Scratch::new("packed");
    let dir = scratch.path();
    let mut bytes = vec![0; 300_000];
    Random::new(41).fill(&mut bytes);
    std::fs::write(scratch.file("raw"), &bytes).expect("scratch is writable");
    pack(dir, "xz -c", "raw", "whole");
    let lengthen = |name: &str| {
        std::fs::File::options().write(true).open(scratch.file(name)).unwrap().set_len(1 << 40).unwrap();
    };
    let packed = std::fs::read(scratch.file("whole")).expect("just made");
    std::fs::write(scratch.file("cut"), &packed[..65536]).expect("scratch is writable");
    lengthen("cut");
    lengthen("whole");
    for job in ["convert -O qcow2", "backup"] {
        let words = |source| job.split(' ').chain([source, "out"]).collect::<Vec<_>>();
        let out = zebu(dir, words("cut")).exits(1);
        assert!(out.stderr.contains("can't unpack the xz file") && out.stderr.lines().count() == 1, "{out}");
        let mut command = Command::new(zebu_program());
        command.args(words("whole")).current_dir(dir).stderr(Stdio::piped());
        let mut child = command.spawn().expect("zebu starts");
        wait_until("it reads what yields nothing", || bytes_read(child.id()) > 64 << 20);
        kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
        assert_eq!(end_of(&mut child).code(), Some(130), "{job}");
        let said = std::io::read_to_string(child.stderr.take().expect("piped")).unwrap();
        assert_eq!(said, "zebu: interrupted\n", "{job}");
    }
}
