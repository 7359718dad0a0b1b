//! Options of nodes in stacks of drivers: every key in every position, beside QEMU.

use crate::common::{Ran, Scratch, qemu};
use std::os::unix::fs::symlink;

/// Descriptions of a disk in the files of [`FILES`], and what stands before the options of each of its nodes.
const STACKS: &[(&str, &[&str])] = &[
    ("driver=raw,file.driver=file,file.filename=x.raw", &["", "file."]),
    ("driver=qcow2,file.driver=file,file.filename=x.qcow2", &["", "file."]),
    (
        "driver=qcow2,file.driver=raw,file.file.driver=file,file.file.filename=x.qcow2",
        &["file.", "file.file."],
    ),
    ("driver=raw,offset=0,size=64k,file.driver=file,file.filename=x.raw", &["", "file."]),
    ("driver=blkdebug,image.driver=file,image.filename=x.raw", &["", "image."]),
    ("driver=raw,file.driver=blkdebug,file.image.filename=x.raw", &["", "file.", "file.image."]),
    ("driver=qcow2,file.driver=blkdebug,file.image.filename=x.qcow2", &["", "file.", "file.image."]),
    ("driver=blkdebug,image.driver=qcow2,image.file.filename=x.qcow2", &["", "image.", "image.file."]),
    ("driver=preallocate,file.driver=file,file.filename=x.raw", &["", "file."]),
    ("driver=raw,file.driver=preallocate,file.file.filename=x.raw", &["", "file.", "file.file."]),
    (
        "driver=blkverify,raw.driver=file,raw.filename=y.raw,test.driver=raw,test.file.filename=x.raw",
        &["", "raw.", "test.", "test.file."],
    ),
    ("driver=null-co,size=64k", &[""]),
    ("driver=raw,file.driver=null-co,file.size=64k", &["", "file."]),
    ("driver=copy-on-read,file.driver=qcow2,file.file.filename=x.qcow2", &["", "file.", "file.file."]),
    ("driver=compress,file.driver=qcow2,file.file.filename=x.qcow2", &["", "file.", "file.file."]),
    (
        "driver=raw,file.driver=qcow2,file.file.driver=file,file.file.filename=x.qcow2",
        &["", "file.", "file.file."],
    ),
    (
        "driver=qcow2,file.driver=raw,file.offset=0,file.size=1M,file.file.driver=file,file.file.filename=z.qcow2",
        &["", "file.", "file.file."],
    ),
    (
        "driver=qcow2,file.filename=o.qcow2,backing.driver=raw,backing.file.driver=blkdebug,backing.file.image.filename=x.raw",
        &["backing.", "backing.file.", "backing.file.image."],
    ),
    (
        "driver=qcow2,file.filename=d.qcow2,data-file.driver=blkdebug,data-file.image.filename=d.raw",
        &["data-file.", "data-file.image."],
    ),
];

/// Options that every node has, and values that are none.
const OPTIONS: &[(&str, &str)] = &[
    ("read-only", "on"),
    ("read-only", "off"),
    ("read-only", "maybe"),
    ("auto-read-only", "on"),
    ("auto-read-only", "off"),
    ("auto-read-only", "maybe"),
    ("node-name", "n1"),
    ("node-name", "-"),
    ("force-share", "on"),
    ("force-share", "off"),
    ("discard", "ignore"),
    ("discard", "unmap"),
    ("detect-zeroes", "off"),
    ("detect-zeroes", "on"),
    ("detect-zeroes", "unmap"),
    ("cache.direct", "off"),
    ("cache.no-flush", "on"),
    ("cache.nothing", "on"),
    ("nothing", "1"),
];

/// Files of the stacks.
const FILES: [&str; 7] = ["x.raw", "y.raw", "x.qcow2", "z.qcow2", "o.qcow2", "d.qcow2", "d.raw"];

/// A directory with the files of the stacks.
struct Place {
    scratch: Scratch,
    files: Vec<Vec<u8>>,
}

impl Place {
    fn new() -> Self {
        let scratch = Scratch::new();
        for line in [
            "create -q -f raw x.raw 64k",
            "create -q -f raw y.raw 64k",
            "create -q -f qcow2 x.qcow2 64k",
            "create -q -f qcow2 z.qcow2 64k",
            "create -q -f qcow2 o.qcow2 64k",
            "create -q -f qcow2 -o data_file=d.raw d.qcow2 64k",
        ] {
            scratch.qemu_img(&line.split(' ').collect::<Vec<_>>()).ok();
        }
        let long = scratch.read("z.qcow2").len().max(1 << 20);
        std::fs::File::options()
            .write(true)
            .open(scratch.file("z.qcow2"))
            .unwrap()
            .set_len(long as u64)
            .unwrap();
        for name in ["qemu-io", "qemu-img"] {
            symlink(env!("CARGO_BIN_EXE_zebu"), scratch.file(name)).unwrap();
        }
        let files = FILES.iter().map(|name| scratch.read(name)).collect();
        Self { scratch, files }
    }

    /// Runs a program and puts the files back: how it ended, and which files it changed.
    fn run(&self, program: &str, arguments: &[&str]) -> (Ran, Vec<&'static str>) {
        let ran = self.scratch.run(program, arguments);
        let mut changed = Vec::new();
        for (name, before) in FILES.iter().zip(&self.files) {
            if self.scratch.read(name) != *before {
                changed.push(*name);
                self.scratch.write(name, before);
            }
        }
        (ran, changed)
    }

    /// Runs `qemu-io`, of QEMU or of zebu, or zebu under its own name.
    fn write(&self, program: &str, image: &[&str]) -> (Ran, Vec<&'static str>) {
        let own = self.scratch.file("qemu-io");
        let (program, first): (_, &[&str]) = match program {
            "zebu" => (env!("CARGO_BIN_EXE_zebu"), &["io"]),
            "qemu-io" => ("qemu-io", &[]),
            _ => (own.to_str().unwrap(), &[]),
        };
        let commands = ["-c", "write -P 0x42 0 4k"];
        self.run(program, &[first, &commands, image].concat())
    }
}

/// A flat description in JSON.
fn json(text: &str) -> String {
    let pairs = text.split(',').map(|pair| pair.split_once('=').unwrap());
    let pairs: Vec<String> = pairs.map(|(key, value)| format!("\"{key}\": \"{value}\"")).collect();
    format!("json:{{{}}}", pairs.join(", "))
}

/// Every key has the effect that it has for QEMU, or is refused by its name before anything is written.
#[test]
fn every_key_works_or_is_refused_in_every_position() {
    if !qemu() {
        return;
    }
    let place = Place::new();
    let mut wrong = Vec::new();
    for (stack, positions) in STACKS {
        for prefix in *positions {
            for (key, value) in OPTIONS {
                let text = format!("{stack},{prefix}{key}={value}");
                let (theirs, changed) = place.write("qemu-io", &["--image-opts", &text]);
                for name in ["zebu", "as qemu-io"] {
                    if name != "zebu" && !key.ends_with("read-only") {
                        continue;
                    }
                    let (ours, written) = place.write(name, &["--image-opts", &text]);
                    let is_same = ours.code == theirs.code && written.is_empty() == changed.is_empty();
                    let is_refused = ours.code == Some(1) && written.is_empty() && ours.stderr.contains(key);
                    if !is_same && !is_refused {
                        wrong.push(format!(
                            "{name}: {text}\n  code {:?} {written:?}: {}\n  QEMU {:?} {changed:?}: {}",
                            ours.code, ours.stderr, theirs.code, theirs.stderr
                        ));
                    }
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{} lines:\n{}", wrong.len(), wrong.join("\n"));
}

/// Whatever a node is called by, `read-only=on` keeps its files as they are.
#[test]
fn what_is_read_only_is_never_written() {
    if !qemu() {
        return;
    }
    let place = Place::new();
    place.scratch.write("source", &vec![7; 64 << 10]);
    let own = place.scratch.file("qemu-img");
    for (stack, positions) in STACKS {
        for prefix in *positions {
            let text = format!("{stack},{prefix}read-only=on");
            let named = json(&text);
            let is_of_backing = prefix.starts_with("backing.");
            let line = ["convert", "-n", "-f", "raw", "--target-image-opts", "source", &text];
            for (ran, changed) in [
                place.write("zebu", &[&named]),
                place.write("as qemu-io", &[&named]),
                place.run(env!("CARGO_BIN_EXE_zebu"), &line),
                place.run(own.to_str().unwrap(), &line),
            ] {
                if !is_of_backing || ran.code != Some(0) {
                    assert_eq!((ran.code, &changed[..]), (Some(1), &[][..]), "{text}: {ran:#?}");
                }
                assert!(!changed.contains(&"x.raw") || !is_of_backing, "{text}: {ran:#?}");
            }
            // Reading is as before, where the option is known in this position.
            let (read, changed) = place.run("qemu-io", &["-r", "-c", "read 0 4k", "--image-opts", &text]);
            let (ours, written) = place
                .run(env!("CARGO_BIN_EXE_zebu"), &["io", "-r", "-c", "read 0 4k", "--image-opts", &text]);
            assert!(changed.is_empty() && written.is_empty(), "{text}");
            assert!(
                ours.code == read.code || ours.stderr.contains("read-only"),
                "{text}: {ours:#?} {read:#?}"
            );
        }
    }
}

#[test]
fn a_part_ends_at_a_sector() {
    if !qemu() {
        return;
    }
    let place = Place::new();
    let text = "driver=raw,size=1000,file.driver=file,file.filename=x.raw";
    for program in ["zebu", "as qemu-io", "qemu-io"] {
        let (ran, changed) = place.write(program, &["--image-opts", text]);
        assert_eq!((ran.code, &changed[..]), (Some(1), &[][..]), "{program}: {ran:#?}");
        assert!(ran.stderr.contains("Specified size is not multiple of 512"), "{ran:#?}");
    }
}
