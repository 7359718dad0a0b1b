//! Dirty bitmaps kept by zebu and by QEMU, in turn on one image and by QEMU alone on another: the same bits, whoever
//! reads them, and clean by QEMU's check, over cluster sizes, granularities and refcount widths.

use serde_json::Value;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use zebu_tests::patience::Patience;
use zebu_tests::program::{Finished, find, finish, zebu};
use zebu_tests::qemu::Qemu;
use zebu_tests::random::Random;
use zebu_tests::scratch::Scratch;
use zebu_tests::server::Server;

const IMAGE: &str = "image.qcow2";
const REFERENCE: &str = "reference.qcow2";
const MIB: u64 = 1 << 20;

/// Dirty ranges: start and end.
type Ranges = Vec<(u64, u64)>;

fn run(dir: &Path, program: &str, args: &[&str]) -> Finished {
    let mut command = Command::new(find(program).unwrap_or_else(|| panic!("{program} is missing")));
    command.args(args).current_dir(dir);
    finish(command)
}

/// The dirty ranges of a bitmap, as a server tells them.
fn dirty_at(dir: &Path, uri: &str, name: &str) -> Ranges {
    let context = format!("--map=qemu:dirty-bitmap:{name}");
    let out = run(dir, "nbdinfo", &["--json", &context, uri]).ok();
    let runs: Value = serde_json::from_str(&out.stdout).expect("nbdinfo prints JSON");
    let mut ranges = Ranges::new();
    for entry in runs.as_array().unwrap().iter().filter(|entry| entry["type"] == 1) {
        let (start, len) = (entry["offset"].as_u64().unwrap(), entry["length"].as_u64().unwrap());
        match ranges.last_mut() {
            Some(last) if last.1 == start => last.1 = start + len,
            _ => ranges.push((start, start + len)),
        }
    }
    ranges
}

struct Stop(Child);

impl Drop for Stop {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A bitmap as QEMU reads it.
fn by_qemu(dir: &Path, image: &str, name: &str) -> Ranges {
    let socket = dir.join("qemu.sock");
    let _ = std::fs::remove_file(&socket);
    let mut command = Command::new(find("qemu-nbd").expect("qemu-nbd is missing"));
    command.args(["-r", "-f", "qcow2", "-t", "-x", "x", "-B", name, "-k"]).arg(&socket).arg(image);
    let mut server = Stop(command.current_dir(dir).stdin(Stdio::null()).spawn().unwrap());
    let patience = Patience::begin();
    // The file is there before anybody listens.
    while UnixStream::connect(&socket).is_err() {
        assert!(server.0.try_wait().unwrap().is_none(), "qemu-nbd does not serve bitmap {name} of {image}");
        patience.pause("qemu-nbd begins");
    }
    dirty_at(dir, &format!("nbd+unix:///x?socket={}", socket.display()), name)
}

/// A bitmap as zebu reads it.
fn by_zebu(dir: &Path, image: &str, name: &str) -> Ranges {
    let server = Server::start(dir, &format!("--read-only --export-name x --bitmap {name} -f qcow2 {image}"));
    let ranges = dirty_at(dir, &server.uri("x"), name);
    server.stop();
    ranges
}

/// The program that works on the image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum By {
    Zebu,
    Qemu,
}

struct Pair<'a> {
    qemu: &'a Qemu,
    dir: &'a Path,
    size: u64,
    random: Random,
    log: Vec<String>,
}

impl Pair<'_> {
    fn who(&mut self) -> By {
        if self.random.chance(60) { By::Zebu } else { By::Qemu }
    }

    /// Does the same to both images, to one of them by either.
    fn bitmap(&mut self, actions: &str, name: &str) {
        let who = self.who();
        self.log.push(format!("{who:?}: bitmap {actions} {name}"));
        let line = |image: &str| format!("bitmap {actions} -f qcow2 {image} {name}");
        match who {
            By::Zebu => zebu(self.dir, line(IMAGE).split_whitespace()).ok(),
            By::Qemu => self.qemu.img_line(self.dir, &line(IMAGE)).ok(),
        };
        self.qemu.img_line(self.dir, &line(REFERENCE)).ok();
    }

    fn write(&mut self) {
        let commands: Vec<String> = (0..self.random.between(1, 6))
            .map(|_| {
                let offset = self.random.below(self.size / 512) * 512;
                let longest = (self.size / 16 / 512).max(2);
                let len = (512 * self.random.between(1, longest)).min(self.size - offset);
                match self.random.below(6) {
                    0 => format!("write -z {offset} {len}"),
                    1 => format!("write -z -u {offset} {len}"),
                    2 => format!("discard {offset} {len}"),
                    _ => format!("write -P {} {offset} {len}", self.random.between(1, 255)),
                }
            })
            .collect();
        let who = self.who();
        self.log.push(format!("{who:?}: {commands:?}"));
        match who {
            By::Zebu => {
                let mut args: Vec<String> = ["io", "-f", "qcow2", "-t", "writeback"].map(String::from).into();
                args.extend(commands.iter().flat_map(|c| ["-c".to_owned(), c.clone()]));
                args.push(IMAGE.into());
                zebu(self.dir, &args).ok();
            }
            By::Qemu => drop(self.qemu.io(self.dir, "-t writeback -f qcow2", IMAGE, &commands).ok()),
        }
        self.qemu.io(self.dir, "-t writeback -f qcow2", REFERENCE, &commands).ok();
    }

    fn compare(&self, names: &[&str]) {
        self.qemu.check_clean(self.dir, IMAGE).unwrap_or_else(|e| panic!("{e}\n{:#?}", self.log));
        let list = |image| self.qemu.info(self.dir, image)["format-specific"]["data"]["bitmaps"].clone();
        assert_eq!(list(IMAGE), list(REFERENCE), "{:#?}", self.log);
        let out = zebu(self.dir, ["info", "--output=json", IMAGE]).ok();
        let info: Value = serde_json::from_str(&out.stdout).unwrap();
        assert_eq!(info["format-specific"]["data"]["bitmaps"], list(IMAGE), "{:#?}", self.log);
        for name in names {
            let expected = by_qemu(self.dir, REFERENCE, name);
            assert_eq!(by_qemu(self.dir, IMAGE, name), expected, "{name} by QEMU\n{:#?}", self.log);
            assert_eq!(by_zebu(self.dir, IMAGE, name), expected, "{name} by zebu\n{:#?}", self.log);
        }
    }
}

#[test]
fn bits_are_those_of_qemu() {
    let Some(qemu) = Qemu::find() else { return };
    for (seed, (options, size, granularity)) in [
        ("cluster_size=512,refcount_bits=1", 3 * MIB + 512, "512"),
        ("cluster_size=4k,refcount_bits=64", 20 * MIB, "4k"),
        ("cluster_size=64k", 100 * MIB + 5 * 512, "64k"),
        ("cluster_size=64k,extended_l2=on,refcount_bits=2", 50 * MIB, "512"),
        ("cluster_size=2M,refcount_bits=8", 200 * MIB, "1M"),
    ]
    .into_iter()
    .enumerate()
    {
        let scratch = Scratch::new("bitmaps");
        let dir = scratch.path();
        for image in [IMAGE, REFERENCE] {
            qemu.create(dir, image, "qcow2", options, size);
        }
        let random = Random::new(seed as u64 + 7);
        let mut pair = Pair { qemu: &qemu, dir, size, random, log: vec![options.to_owned()] };
        pair.bitmap(&format!("--add -g {granularity}"), "a");
        pair.write();
        pair.bitmap("--add", "b");
        pair.write();
        pair.write();
        pair.compare(&["a", "b"]);
        pair.bitmap("--disable", "a");
        pair.write();
        pair.bitmap("--add --disable --merge a -g 1M", "c");
        pair.bitmap("--merge b", "a");
        pair.write();
        pair.compare(&["a", "b", "c"]);
        pair.bitmap("--clear", "b");
        pair.bitmap("--enable", "a");
        pair.write();
        pair.bitmap("--remove", "c");
        pair.write();
        pair.compare(&["a", "b"]);
        pair.bitmap("--remove", "a");
        pair.bitmap("--remove", "b");
        pair.compare(&[]);
    }
}

#[test]
fn bitmaps_of_other_images_are_merged_and_copied() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("bitmaps");
    let dir = scratch.path();
    let size = 64 * MIB;
    for image in ["a.qcow2", "b.qcow2"] {
        qemu.create(dir, image, "qcow2", "", size);
        zebu(dir, ["bitmap", "--add", image, "x"]).ok();
    }
    qemu.io(dir, "-f qcow2", "a.qcow2", &["write 1M 100k", "write -z 30M 3M"]).ok();
    zebu(dir, ["io", "-c", "write 5M 64k", "b.qcow2"]).ok();
    zebu(dir, ["bitmap", "--merge", "x", "-b", "a.qcow2", "-F", "qcow2", "b.qcow2", "x"]).ok();
    let merged = vec![(MIB, MIB + (128 << 10)), (5 * MIB, 5 * MIB + (64 << 10)), (30 * MIB, 33 * MIB)];
    assert_eq!(by_qemu(dir, "b.qcow2", "x"), merged);
    zebu(dir, ["convert", "-O", "qcow2", "--bitmaps", "-o", "cluster_size=4k", "b.qcow2", "c.qcow2"]).ok();
    assert_eq!(by_qemu(dir, "c.qcow2", "x"), merged);
    qemu.check_clean(dir, "c.qcow2").unwrap();
    let flags = qemu.info(dir, "c.qcow2")["format-specific"]["data"]["bitmaps"][0]["flags"].clone();
    assert_eq!(flags, serde_json::json!(["auto"]));
    // Of another size.
    qemu.create(dir, "small.qcow2", "qcow2", "", MIB);
    zebu(dir, ["bitmap", "--add", "small.qcow2", "x"]).ok();
    let line = "bitmap --merge x -b b.qcow2 -F qcow2 small.qcow2 x";
    let refused = zebu(dir, line.split(' ')).exits(1);
    qemu.img_line(dir, line).exits(1);
    assert!(refused.stderr.contains("different sizes"), "{refused}");
}

#[test]
fn what_qemu_refuses_is_refused() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("bitmaps");
    let dir = scratch.path();
    qemu.create(dir, "v2.qcow2", "qcow2", "compat=0.10", MIB);
    qemu.create(dir, "v3.qcow2", "qcow2", "", 64 * MIB);
    zebu(dir, ["bitmap", "--add", "v3.qcow2", "a"]).ok();
    zebu(dir, ["snapshot", "-c", "s", "v3.qcow2"]).ok();
    for line in [
        "bitmap v3.qcow2 a",
        "bitmap --add v2.qcow2 a",
        "bitmap --add v3.qcow2 a",
        "bitmap --add -g 1000 v3.qcow2 b",
        "bitmap --add -g 256 v3.qcow2 b",
        "bitmap --clear v3.qcow2 none",
        "bitmap --remove v3.qcow2 none",
        "bitmap --clear -g 64k v3.qcow2 a",
        "bitmap --clear -b v3.qcow2 v3.qcow2 a",
        "bitmap --merge none v3.qcow2 a",
        "snapshot -a s v3.qcow2",
    ] {
        let theirs = qemu.img_line(dir, line);
        let ours = zebu(dir, line.split(' '));
        assert_eq!((ours.code, theirs.code), (Some(1), Some(1)), "{ours}\n{theirs}");
        assert!(ours.stderr.starts_with("zebu: ") && ours.stderr.lines().count() <= 2, "{ours}");
    }
    qemu.check_clean(dir, "v3.qcow2").unwrap();
}

#[test]
fn sizes_follow_the_disk() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("bitmaps");
    let dir = scratch.path();
    qemu.create(dir, IMAGE, "qcow2", "", 10 * MIB);
    zebu(dir, ["bitmap", "--add", IMAGE, "on"]).ok();
    zebu(dir, ["io", "-c", "write 9M 64k", "-c", "write 1M 64k", IMAGE]).ok();
    zebu(dir, ["bitmap", "--add", "--disable", "--merge", "on", IMAGE, "off"]).ok();
    zebu(dir, ["resize", IMAGE, "20M"]).ok();
    let kib64 = 64 << 10;
    let old = vec![(MIB, MIB + kib64), (9 * MIB, 9 * MIB + kib64)];
    assert_eq!(by_qemu(dir, IMAGE, "off"), old);
    assert_eq!(by_qemu(dir, IMAGE, "on"), [&old[..], &[(10 * MIB, 20 * MIB)]].concat());
    zebu(dir, ["resize", "--shrink", IMAGE, "5M"]).ok();
    assert_eq!(by_qemu(dir, IMAGE, "off"), old[..1]);
    assert_eq!(by_qemu(dir, IMAGE, "on"), old[..1]);
    // What was cut off and comes back as zeroes has changed.
    zebu(dir, ["resize", IMAGE, "10M"]).ok();
    assert_eq!(by_qemu(dir, IMAGE, "on"), [(MIB, MIB + kib64), (5 * MIB, 10 * MIB)]);
    qemu.check_clean(dir, IMAGE).unwrap();
    qemu.img_line(dir, &format!("resize -q {IMAGE} 30M")).ok();
    assert_eq!(by_zebu(dir, IMAGE, "off"), old[..1]);
}

#[test]
fn a_crash_leaves_a_bitmap_that_is_recovered_unless_another_program_writes() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("bitmaps");
    let dir = scratch.path();
    qemu.create(dir, IMAGE, "qcow2", "", 10 * MIB);
    zebu(dir, ["bitmap", "--add", IMAGE, "on"]).ok();
    zebu(dir, ["bitmap", "--add", "--disable", IMAGE, "off"]).ok();
    let server = Server::start(dir, &format!("--export-name x -f qcow2 {IMAGE}"));
    run(dir, "nbdinfo", &["--size", &server.uri("x")]).ok();
    // Nothing was written: nothing is lost.
    server.kill();
    assert_eq!(by_zebu(dir, IMAGE, "on"), []);
    let server = Server::start(dir, &format!("--export-name x -f qcow2 {IMAGE}"));
    qemu.img_line(dir, &format!("bench -q -c 1 -w -f raw {}", server.uri("x"))).ok();
    server.kill();
    // The locks of a killed process may stay for a moment; zebu waits for them. 8 KiB are a granule of the record, and 16 are marked.
    let recovered = [(0, 128 << 10)];
    assert_eq!(by_zebu(dir, IMAGE, "on"), recovered);
    let said = zebu(dir, ["info", "--output", "json", IMAGE]).ok().stdout;
    let info = serde_json::from_str::<Value>(&said).unwrap()["format-specific"]["data"]["bitmaps"].clone();
    assert_eq!(
        (&info[0]["recovered-granularity"], info.as_array().unwrap().len()),
        (&8192.into(), 2),
        "{said}"
    );
    let info = qemu.info(dir, IMAGE)["format-specific"]["data"]["bitmaps"].clone();
    assert_eq!(info[0]["flags"], serde_json::json!(["in-use", "auto"]));
    assert_eq!(info[1]["flags"], serde_json::json!([]));
    assert_eq!((&info[2]["name"], &info[2]["flags"]), (&"zebu:record".into(), &serde_json::json!(["auto"])));
    assert_eq!(by_zebu(dir, IMAGE, "off"), []);
    assert_eq!(by_qemu(dir, IMAGE, "off"), []);
    // A change by zebu makes it a bitmap like any other.
    std::fs::copy(scratch.file(IMAGE), scratch.file("mended.qcow2")).unwrap();
    zebu(dir, ["bitmap", "--enable", "mended.qcow2", "on"]).ok();
    let info = qemu.info(dir, "mended.qcow2")["format-specific"]["data"]["bitmaps"].clone();
    assert_eq!((&info[0]["flags"], info.as_array().unwrap().len()), (&serde_json::json!(["auto"]), 2));
    assert_eq!(by_qemu(dir, "mended.qcow2", "on"), recovered);
    // A kill leaves clusters that nobody names.
    zebu(dir, ["check", "-q", "-r", "leaks", "mended.qcow2"]).ok();
    qemu.check_clean(dir, "mended.qcow2").unwrap();
    // After QEMU, nobody knows. Were it to write twice, the record would be where it was.
    for at in ["4M", "5M"] {
        qemu.io(dir, "-f qcow2", IMAGE, &[format!("write {at} 64k")]).ok();
    }
    for action in ["--clear", "--enable", "--disable"] {
        let refused = zebu(dir, ["bitmap", action, IMAGE, "on"]).exits(1);
        assert!(refused.stderr.contains("inconsistent"), "{refused}");
    }
    zebu(dir, ["resize", IMAGE, "20M"]).exits(1);
    zebu(dir, ["convert", "-O", "qcow2", "--bitmaps", IMAGE, "copy.qcow2"]).exits(1);
    let line = format!("convert -O qcow2 --bitmaps --skip-broken-bitmaps {IMAGE} copy.qcow2");
    let warning = "warning: Skipping inconsistent bitmap 'on'";
    assert!(qemu.img_line(dir, &line).ok().stderr.contains(warning), "QEMU has other words");
    std::fs::remove_file(scratch.file("copy.qcow2")).expect("made");
    let ran = zebu(dir, format!("{line} --output=json").split_whitespace()).ok();
    assert!(ran.stderr.contains(warning) && !ran.stderr.contains("'off'"), "{ran}");
    assert!(ran.stdout.contains("\"skipped-bitmaps\": [\n        \"on\"\n    ]"), "{ran}");
    assert_eq!(by_qemu(dir, "copy.qcow2", "off"), []);
    zebu(dir, ["bitmap", "--remove", IMAGE, "on"]).ok();
    zebu(dir, ["check", "-q", "-r", "leaks", IMAGE]).ok();
    qemu.check_clean(dir, IMAGE).unwrap();
}

#[test]
fn a_running_server_changes_bitmaps() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("bitmaps");
    let dir = scratch.path();
    qemu.create(dir, IMAGE, "qcow2", "", 64 * MIB);
    zebu(dir, ["bitmap", "--add", IMAGE, "old"]).ok();
    let options = format!("--control ctl.sock --export-name x --bitmap old -f qcow2 {IMAGE}");
    let server = Server::start(dir, &options);
    let write = |commands: &[&str]| drop(qemu.io(dir, "-f raw", &server.uri("x"), commands).ok());
    let ctl = |line: &str| zebu(dir, format!("ctl ctl.sock {line}").split_whitespace());
    write(&["write 1M 64k"]);
    ctl("bitmap-add x new --granularity 4k").ok();
    write(&["write 2M 512", "discard 10M 1M"]);
    assert_eq!(
        dirty_at(dir, &server.uri("x"), "old"),
        [(MIB, MIB + 65536), (2 * MIB, 2 * MIB + 65536), (10 * MIB, 11 * MIB)]
    );
    let answer: Value = serde_json::from_str(&ctl("bitmaps x").ok().stdout).unwrap();
    let of = |name: &str| {
        answer["bitmaps"].as_array().unwrap().iter().find(|b| b["name"] == name).unwrap().clone()
    };
    assert_eq!(of("old")["dirty-bytes"], MIB + 2 * 65536);
    assert_eq!(of("new")["dirty-bytes"], MIB + 4096);
    assert_eq!(of("new")["recording"], true);
    ctl("bitmap-clear x old").ok();
    assert_eq!(dirty_at(dir, &server.uri("x"), "old"), []);
    write(&["write 3M 64k"]);
    assert_eq!(dirty_at(dir, &server.uri("x"), "old"), [(3 * MIB, 3 * MIB + 65536)]);
    ctl("bitmap-add x gone").ok();
    ctl("bitmap-remove x gone").ok();
    ctl("bitmap-remove x gone").exits(1);
    ctl("bitmap-add x new").exits(1);
    server.stop();
    assert_eq!(by_qemu(dir, IMAGE, "old"), [(3 * MIB, 3 * MIB + 65536)]);
    assert_eq!(
        by_qemu(dir, IMAGE, "new"),
        [(2 * MIB, 2 * MIB + 4096), (3 * MIB, 3 * MIB + 65536), (10 * MIB, 11 * MIB)]
    );
    qemu.check_clean(dir, IMAGE).unwrap();
}
