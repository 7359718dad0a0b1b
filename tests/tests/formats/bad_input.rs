//! Files that are no images, damaged images, files that can't be used, a full disk, an image in use: one line that names
//! the file, the exit code of qemu-img, in little time and memory, and nothing destroyed.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Stdio};
use zebu_tests::model::difference;
use zebu_tests::mount::Mounted;
use zebu_tests::patch::{COPIED, Patch, header};
use zebu_tests::program::{Finished, find, finish, is_root, zebu, zebu_limited, zebu_program};
use zebu_tests::qemu::Qemu;
use zebu_tests::random::Random;
use zebu_tests::scratch::Scratch;

const IMAGE: &str = "disk.qcow2";
const MIB: u64 = 1 << 20;

/// An image of 8 MiB with some data and a snapshot.
fn image(qemu: &Qemu, options: &str) -> Scratch {
    let scratch = Scratch::new("bad");
    qemu.create(scratch.path(), IMAGE, "qcow2", options, 8 * MIB);
    qemu.io(scratch.path(), "-f qcow2", IMAGE, &["write -P 0x11 1M 2M"]).ok();
    if !options.contains("data_file") {
        qemu.img(scratch.path(), ["snapshot", "-c", "one", IMAGE]).ok();
        qemu.io(scratch.path(), "-f qcow2", IMAGE, &["write -P 0x12 2M 2M"]).ok();
    }
    scratch
}

/// Fails in one line that names the file.
#[track_caller]
fn one_line(out: &Finished, name: &str) {
    assert_eq!(out.code, Some(1), "{out}");
    assert_eq!(out.stderr.lines().count(), 1, "more or less than one line: {out}");
    assert!(out.stderr.contains(name), "{name} is not named: {out}");
}

/// Whatever happens, it ends by itself, without a panic (exit code 101), and says something if it fails.
#[track_caller]
fn survives(out: &Finished) {
    assert!(matches!(out.code, Some(0..=3 | 63)), "{out}");
    assert!(!out.stderr.contains("panicked"), "{out}");
    assert!(
        out.code == Some(0) || !out.stderr.is_empty() || !out.stdout.is_empty(),
        "fails in silence: {out}"
    );
}

/// Everything that opens an image for reading.
fn readers() -> Vec<Vec<&'static str>> {
    vec![
        vec!["info", "-f", "qcow2", IMAGE],
        vec!["check", "-f", "qcow2", IMAGE],
        vec!["map", "-f", "qcow2", IMAGE],
        vec!["convert", "-f", "qcow2", "-O", "raw", IMAGE, "out.raw"],
        vec!["io", "-r", "-f", "qcow2", IMAGE, "-c", "read 0 8M"],
    ]
}

#[test]
fn what_is_no_image_is_refused() {
    let scratch = Scratch::new("bad");
    let dir = scratch.path();
    std::fs::create_dir(dir.join("directory")).expect("scratch is writable");
    let _listener = UnixListener::bind(dir.join("socket")).expect("scratch is writable");
    Command::new("mkfifo").arg(dir.join("fifo")).status().expect("coreutils are there");
    std::fs::write(dir.join("empty"), []).expect("scratch is writable");
    std::fs::write(dir.join("short"), b"QFI\xfb").expect("scratch is writable");
    std::fs::write(dir.join("text"), "hello\n".repeat(1000)).expect("scratch is writable");
    std::os::unix::fs::symlink("loop", dir.join("loop")).expect("scratch is writable");
    for name in ["directory", "socket", "fifo", "empty", "short", "text", "missing", "loop"] {
        for words in [
            vec!["info", "-f", "qcow2", name],
            vec!["check", "-f", "qcow2", name],
            vec!["convert", "-f", "qcow2", "-O", "raw", name, "out.raw"],
        ] {
            one_line(&zebu_limited(dir, words), name);
        }
    }
    for name in ["directory", "socket", "fifo", "missing", "loop", "/dev/null"] {
        one_line(&zebu_limited(dir, ["convert", "-f", "raw", "-O", "qcow2", name, "out.qcow2"]), name);
    }
    assert!(!dir.join("out.raw").exists() && !dir.join("out.qcow2").exists());
}

#[test]
fn a_truncated_image_reads_as_qemu_reads_it_or_is_refused() {
    let Some(qemu) = Qemu::find() else { return };
    for options in ["cluster_size=4k", "cluster_size=64k,extended_l2=on", "compat=0.10,cluster_size=512"] {
        let scratch = image(&qemu, options);
        let bytes = std::fs::read(scratch.file(IMAGE)).expect("readable");
        qemu.img(scratch.path(), ["convert", "-f", "qcow2", "-O", "raw", IMAGE, "whole.raw"]).ok();
        let whole = std::fs::read(scratch.file("whole.raw")).expect("made");
        let mut random = Random::new(bytes.len() as u64);
        let mut lengths =
            vec![0, 4, 8, 71, 72, 103, 104, 111, 112, 200, 511, 512, 4095, 4096, 65536, 131_072];
        lengths.extend((0..12).map(|_| random.below(bytes.len() as u64) as usize));
        for len in lengths {
            std::fs::write(scratch.file(IMAGE), &bytes[..len.min(bytes.len())]).expect("scratch is writable");
            for words in readers() {
                survives(&zebu_limited(scratch.path(), words));
            }
            let ours = zebu_limited(scratch.path(), readers()[3].clone());
            let theirs =
                qemu.img(scratch.path(), ["convert", "-f", "qcow2", "-O", "raw", IMAGE, "judge.raw"]);
            // QEMU takes a table that is cut off for an empty one, and data that is cut off for zeroes; an error that says so is
            // better.
            let lost = ours.stderr.contains("the file was cut short");
            let refused = ours.code == Some(1) && (lost || ours.stderr.contains("outside the file"));
            assert!(refused || ours.code == theirs.code, "{options}, {len} bytes: {ours}\n{theirs}");
            if theirs.code == Some(0) && lost {
                let judge = std::fs::read(scratch.file("judge.raw")).expect("made");
                assert!(
                    difference(0, &whole, &judge).is_some(),
                    "{options}, {len} bytes: nothing is lost: {ours}"
                );
            }
            if theirs.code == Some(0) && !refused {
                let read = |name| std::fs::read(scratch.file(name)).expect("made");
                assert_eq!(
                    difference(0, &read("judge.raw"), &read("out.raw")),
                    None,
                    "{options}, {len} bytes"
                );
            }
        }
    }
}

#[test]
fn a_gigantic_header_field_costs_neither_time_nor_memory() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = image(&qemu, "");
    let whole = std::fs::read(scratch.file(IMAGE)).expect("readable");
    let fields32: [(&str, u64, &[u32]); 6] = [
        ("backing file size", header::BACKING_FILE_SIZE, &[1024, u32::MAX]),
        ("cluster bits", header::CLUSTER_BITS, &[0, 8, 22, 63, 64, u32::MAX]),
        ("L1 size", header::L1_SIZE, &[0, 4 << 20, (4 << 20) + 1, u32::MAX]),
        ("refcount table clusters", header::REFCOUNT_TABLE_CLUSTERS, &[0, 128, 129, u32::MAX]),
        ("snapshot count", header::SNAPSHOT_COUNT, &[65536, 65537, u32::MAX]),
        ("header length", header::HEADER_LENGTH, &[0, 103, 105, 65536, 65537, u32::MAX]),
    ];
    let fields64: [(&str, u64); 5] = [
        ("backing file offset", 8),
        ("size", header::SIZE),
        ("L1 table offset", header::L1_TABLE_OFFSET),
        ("refcount table offset", header::REFCOUNT_TABLE_OFFSET),
        ("snapshots offset", header::SNAPSHOTS_OFFSET),
    ];
    let mut cases: Vec<(&str, u64, Vec<u8>)> = Vec::new();
    for (name, at, values) in fields32 {
        cases.extend(values.iter().map(|v| (name, at, v.to_be_bytes().to_vec())));
    }
    for (name, at) in fields64 {
        let values = [1, 511, 65536 * 3, 1 << 40, 1 << 56, 1 << 62, (1 << 63) - 512, u64::MAX];
        cases.extend(values.iter().map(|v: &u64| (name, at, v.to_be_bytes().to_vec())));
    }
    for (name, at, value) in cases {
        std::fs::write(scratch.file(IMAGE), &whole).expect("scratch is writable");
        Patch::open(&scratch.file(IMAGE)).set(at, &value);
        for words in [&readers()[0], &readers()[1], &readers()[2]] {
            let out = zebu_limited(scratch.path(), words);
            assert!(!out.stderr.contains("panicked"), "{name} = {value:x?}: {out}");
            assert!(matches!(out.code, Some(0..=3)), "{name} = {value:x?}: {out}");
        }
        // Where QEMU refuses to open, so does zebu.
        let io = ["io", "-r", "-f", "qcow2", IMAGE, "-c", "read 1M 64k"];
        let ours = zebu_limited(scratch.path(), io);
        let theirs = qemu.io(scratch.path(), "-r -f qcow2", IMAGE, &["read 1M 64k"]);
        assert!(matches!(ours.code, Some(0 | 1)), "{name} = {value:x?}: {ours}");
        if theirs.stderr.contains("can't open") {
            assert_eq!(ours.code, Some(1), "{name} = {value:x?}: QEMU refuses: {theirs}\n{ours}");
        }
    }
}

/// A change of an image.
type Damage = fn(&Patch);

#[test]
fn tables_that_overlap_or_refer_to_themselves_are_found_by_check() {
    let Some(qemu) = Qemu::find() else { return };
    let damages: [(&str, Damage); 9] = [
        ("L2 table is the L1 table", |p| {
            let l1 = p.u64(header::L1_TABLE_OFFSET);
            p.set_u64(l1, l1 | COPIED);
        }),
        ("L2 table is the header", |p| {
            let l1 = p.u64(header::L1_TABLE_OFFSET);
            p.set_u64(l1, COPIED);
        }),
        ("L2 entry points at its own table", |p| {
            p.set_u64(p.l2_entry(16), p.l2_table(0) | COPIED);
        }),
        ("two guest clusters share one", |p| {
            p.set_u64(p.l2_entry(17), p.u64(p.l2_entry(16)));
        }),
        ("data past the end of the file", |p| {
            p.set_u64(p.l2_entry(16), (1 << 50) | COPIED);
        }),
        ("data cluster not aligned", |p| {
            p.set_u64(p.l2_entry(16), p.u64(p.l2_entry(16)) | 512);
        }),
        ("refcount block is the refcount table", |p| {
            let table = p.u64(header::REFCOUNT_TABLE_OFFSET);
            p.set_u64(table, table);
        }),
        ("refcount block not aligned", |p| {
            let table = p.u64(header::REFCOUNT_TABLE_OFFSET);
            p.set_u64(table, p.u64(table) + 512);
        }),
        ("reserved bits in an entry", |p| {
            p.set_u64(p.l2_entry(16), p.u64(p.l2_entry(16)) | (1 << 58));
        }),
    ];
    for (name, damage) in damages {
        let scratch = image(&qemu, "");
        damage(&Patch::open(&scratch.file(IMAGE)));
        for words in readers() {
            survives(&zebu_limited(scratch.path(), words));
        }
        let check = ["check", "-f", "qcow2", IMAGE];
        let theirs = qemu.img(scratch.path(), check);
        let ours = zebu_limited(scratch.path(), check);
        // QEMU gives up on some (1) where damage can as well be reported (2).
        assert!(matches!(theirs.code, Some(1 | 2)), "{name}: QEMU finds nothing: {theirs}");
        assert!(ours.code == Some(2) || ours.code == theirs.code, "{name}: {ours}\n{theirs}");
    }
}

/// A copy of an overlay whose backing file name is `names.1` in place of an equally long one.
fn rename_backing(from: &Path, to: &Path, names: (&str, &str)) {
    let mut bytes = std::fs::read(from).expect("readable");
    let at = bytes.windows(names.0.len()).position(|w| w == names.0.as_bytes()).expect("the name is there");
    bytes[at..at + names.0.len()].copy_from_slice(names.1.as_bytes());
    std::fs::write(to, bytes).expect("scratch is writable");
}

#[test]
fn a_backing_chain_that_goes_in_a_circle_is_named() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("bad");
    let dir = scratch.path();
    for (name, backing) in [("other", "none"), ("one", "two"), ("two", "one")] {
        qemu.img(dir, ["create", "-q", "-u", "-f", "qcow2", "-b", backing, "-F", "qcow2", name, "1M"]).ok();
    }
    rename_backing(&dir.join("other"), &dir.join("self"), ("none", "self"));
    for name in ["self", "one", "two"] {
        let out = zebu_limited(dir, ["convert", "-f", "qcow2", "-O", "raw", name, "out.raw"]);
        one_line(&out, name);
        survives(&zebu_limited(dir, ["info", "-f", "qcow2", "--backing-chain", name]));
        zebu_limited(dir, ["info", "-f", "qcow2", name]).ok();
    }
}

#[test]
fn a_backing_chain_of_more_than_1024_images_is_refused() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("bad");
    let dir = scratch.path();
    qemu.create(dir, "i0000", "qcow2", "cluster_size=4k", MIB);
    qemu.io(dir, "-f qcow2", "i0000", &["write -P 0x42 64k 64k"]).ok();
    let line = "create -q -u -f qcow2 -o cluster_size=4k -b i0000 -F qcow2 i0001 1M";
    qemu.img_line(dir, line).ok();
    for number in 2..1025 {
        let name = |n| format!("i{n:04}");
        rename_backing(&dir.join("i0001"), &dir.join(name(number)), ("i0000", &name(number - 1)));
    }
    // i1023 is the top of 1,024 images, i1024 of one more.
    let read = |top| zebu_limited(dir, ["io", "-r", "-f", "qcow2", top, "-c", "read -P 0x42 64k 64k"]);
    read("i1023").ok();
    let out = read("i1024");
    assert_eq!(out.code, Some(1), "{out}");
    assert!(out.stderr.contains("1024") || out.stderr.contains("1,024"), "the limit is not named: {out}");
    assert_eq!(out.stderr.lines().count(), 1, "{out}");
}

#[test]
fn a_missing_backing_file_is_named() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("bad");
    let line = format!("create -q -u -f qcow2 -b nowhere.raw -F raw {IMAGE} 1M");
    qemu.img_line(scratch.path(), &line).ok();
    let out = zebu(scratch.path(), ["convert", "-f", "qcow2", "-O", "raw", IMAGE, "out.raw"]);
    one_line(&out, "nowhere.raw");
    zebu(scratch.path(), ["info", "-f", "qcow2", IMAGE]).ok();
}

#[test]
fn a_full_disk_fails_the_write_and_keeps_the_image_consistent() {
    let Some(qemu) = Qemu::find() else { return };
    for (options, size) in [
        ("cluster_size=64k", 3 * MIB),
        ("cluster_size=4k", 2 * MIB),
        ("cluster_size=512,refcount_bits=64", MIB),
    ] {
        let Some(small) = Mounted::tmpfs(size) else { return };
        let dir = small.path();
        zebu(&dir, ["create", "-q", "-f", "qcow2", "-o", options, IMAGE, "64M"]).ok();
        zebu(&dir, ["io", "-f", "qcow2", IMAGE, "-c", "write -P 0x21 0 256k", "-c", "flush"]).ok();
        let mut words = vec!["io".to_owned(), "-f".into(), "qcow2".into(), IMAGE.into()];
        for number in 0..64 {
            words.extend(["-c".into(), format!("write -P 0x22 {}k 64k", 1024 + number * 128)]);
        }
        let out = zebu_limited(&dir, &words);
        assert_eq!(out.code, Some(1), "{options}: {out}");
        let said = format!("{}{}", out.stdout, out.stderr);
        assert!(said.contains("No space left"), "{options}: {out}");
        // What was given up must not have cost what was there, nor the image's consistency.
        let check = qemu.img(&dir, ["check", "-q", "-f", "qcow2", IMAGE]);
        assert!(matches!(check.code, Some(0 | 3)), "{options}: {check}");
        qemu.io(&dir, "-r -f qcow2", IMAGE, &["read -P 0x21 0 256k"]).ok();
        zebu(&dir, ["io", "-f", "qcow2", IMAGE, "-c", "discard 0 256k"]).ok();
    }
}

#[test]
fn a_convert_to_a_full_disk_leaves_nothing_behind() {
    let Some(small) = Mounted::tmpfs(2 * MIB) else { return };
    let scratch = Scratch::new("bad");
    let mut bytes = vec![0; 4 * MIB as usize];
    Random::new(1).fill(&mut bytes);
    std::fs::write(scratch.file("source.raw"), bytes).expect("scratch is writable");
    let target = small.path().join("out.qcow2");
    let target = target.to_str().expect("UTF-8");
    for format in ["qcow2", "raw"] {
        let out = zebu_limited(scratch.path(), ["convert", "-f", "raw", "-O", format, "source.raw", target]);
        assert_eq!(out.code, Some(1), "{out}");
        assert!(out.stderr.contains("No space left"), "{out}");
        let left = std::fs::read_dir(small.path()).expect("mounted").count();
        assert_eq!(left, 0, "{format}: files are left behind");
    }
}

#[test]
fn a_file_that_may_not_be_written_is_read_and_named() {
    let Some(qemu) = Qemu::find() else { return };
    let Some(mount) = Mounted::tmpfs(16 * MIB) else { return };
    let dir = mount.path();
    qemu.create(&dir, IMAGE, "qcow2", "", 8 * MIB);
    qemu.io(&dir, "-f qcow2", IMAGE, &["write -P 0x11 1M 1M"]).ok();
    mount.remount("ro");
    zebu(&dir, ["io", "-r", "-f", "qcow2", IMAGE, "-c", "read -P 0x11 1M 1M"]).ok();
    zebu(&dir, ["check", "-f", "qcow2", IMAGE]).ok();
    one_line(&zebu(&dir, ["io", "-f", "qcow2", IMAGE, "-c", "write 0 4k"]), IMAGE);
    one_line(&zebu(&dir, ["resize", "-f", "qcow2", IMAGE, "16M"]), IMAGE);
    one_line(&zebu(&dir, ["create", "-f", "qcow2", "new.qcow2", "1M"]), "new.qcow2");
    mount.remount("rw");
}

#[test]
fn a_file_that_may_not_be_read_is_named() {
    use std::os::unix::fs::PermissionsExt;
    let Some(qemu) = Qemu::find() else { return };
    let scratch = image(&qemu, "");
    std::fs::set_permissions(scratch.file(IMAGE), std::fs::Permissions::from_mode(0o000))
        .expect("it is ours");
    let out = if is_root() {
        // Root may read everything: ask as nobody, if nobody may run the program at all.
        let Some(setpriv) = find("setpriv") else { return };
        let as_nobody = |words: &[&str]| {
            let mut command = Command::new(&setpriv);
            command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
            command.arg(zebu_program()).args(words).current_dir(scratch.path());
            finish(command)
        };
        if as_nobody(&["--version"]).code != Some(0) {
            eprintln!("skipped: nobody may not run {}", zebu_program().display());
            return;
        }
        as_nobody(&["info", "-f", "qcow2", scratch.file(IMAGE).to_str().expect("UTF-8")])
    } else {
        zebu(scratch.path(), ["info", "-f", "qcow2", IMAGE])
    };
    one_line(&out, IMAGE);
    assert!(out.stderr.contains("Permission denied"), "{out}");
}

/// A program that has an image open until it is dropped.
struct Holder {
    child: std::process::Child,
}

impl Holder {
    /// Starts a program that reads commands from its standard input, gives it `command`, and waits for the line with
    /// its answer.
    fn start(mut program: Command, command: &str, answer: &str) -> Self {
        let mut child = program
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|e| panic!("cannot run {program:?}: {e}"));
        writeln!(child.stdin.as_mut().expect("piped"), "{command}").expect("it reads commands");
        let mut lines = BufReader::new(child.stdout.as_mut().expect("piped"));
        let mut line = String::new();
        while !line.contains(answer) {
            line.clear();
            assert!(lines.read_line(&mut line).expect("text") > 0, "it ended before it said {answer}");
        }
        Self { child }
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

#[test]
fn an_image_that_qemu_writes_is_refused() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = image(&qemu, "");
    let mut program = Command::new(find("qemu-io").expect("found before"));
    program.args(["-f", "qcow2"]).arg(scratch.file(IMAGE)).current_dir(scratch.path());
    let holder = Holder::start(program, "write -P 0x31 0 4k", "wrote");
    for words in [
        vec!["info", "-f", "qcow2", IMAGE],
        vec!["check", "-f", "qcow2", IMAGE],
        vec!["convert", "-f", "qcow2", "-O", "raw", IMAGE, "out.raw"],
        vec!["io", "-f", "qcow2", IMAGE, "-c", "write 0 4k"],
        vec!["resize", "-f", "qcow2", IMAGE, "16M"],
    ] {
        let out = zebu(scratch.path(), words);
        one_line(&out, IMAGE);
        assert!(out.stderr.contains("lock"), "{out}");
    }
    // Looking without a lock is what -U is for.
    zebu(scratch.path(), ["info", "-U", "-f", "qcow2", IMAGE]).ok();
    drop(holder);
    zebu(scratch.path(), ["check", "-f", "qcow2", IMAGE]).ok();
}

#[test]
fn an_image_that_qemu_reads_is_read_but_not_written() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = image(&qemu, "");
    let mut program = Command::new(find("qemu-io").expect("found before"));
    program.args(["-r", "-f", "qcow2"]).arg(scratch.file(IMAGE)).current_dir(scratch.path());
    let holder = Holder::start(program, "read 0 4k", "read");
    zebu(scratch.path(), ["io", "-r", "-f", "qcow2", IMAGE, "-c", "read -P 0x11 1M 1M"]).ok();
    one_line(&zebu(scratch.path(), ["io", "-f", "qcow2", IMAGE, "-c", "write 0 4k"]), IMAGE);
    drop(holder);
    zebu(scratch.path(), ["io", "-f", "qcow2", IMAGE, "-c", "write 0 4k"]).ok();
}

#[test]
fn qemu_refuses_an_image_that_zebu_writes() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = image(&qemu, "");
    let worker = zebu_tests::driver::worker(zebu_engine::storage::Engine::Auto);
    let options = zebu_engine::OpenOptions::default()
        .format(Some(zebu_engine::Format::Qcow2))
        .access(zebu_engine::Access::ReadWrite);
    let image = worker
        .block_on(zebu_engine::Image::open(&worker, &scratch.file(IMAGE), &options))
        .unwrap_or_else(|e| panic!("{e}"));
    for words in [vec!["info", IMAGE], vec!["check", IMAGE], vec!["resize", IMAGE, "16M"]] {
        let out = qemu.img(scratch.path(), words);
        assert_eq!(out.code, Some(1), "{out}");
        assert!(out.stderr.contains("lock"), "{out}");
    }
    qemu.img(scratch.path(), ["info", "-U", IMAGE]).ok();
    worker.block_on(image.close(&worker)).unwrap_or_else(|e| panic!("{e}"));
    qemu.check_clean(scratch.path(), IMAGE).unwrap_or_else(|e| panic!("{e}"));
}

#[test]
fn backing_files_in_use_are_shared_for_reading() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = image(&qemu, "");
    let line = format!("create -q -f qcow2 -b {IMAGE} -F qcow2 top.qcow2");
    qemu.img_line(scratch.path(), &line).ok();
    let mut program = Command::new(find("qemu-io").expect("found before"));
    program.args(["-f", "qcow2"]).arg(scratch.file("top.qcow2")).current_dir(scratch.path());
    let _holder = Holder::start(program, "write -P 0x31 0 4k", "wrote");
    zebu(scratch.path(), ["io", "-r", "-f", "qcow2", IMAGE, "-c", "read -P 0x11 1M 1M"]).ok();
    one_line(&zebu(scratch.path(), ["io", "-f", "qcow2", IMAGE, "-c", "write 0 4k"]), IMAGE);
}
