//! `zebu create` against `qemu-img create`.

use crate::common::{Background, Scratch, assert_has_all, qemu, send, wait_for, words};
use rustix::process::Signal;
use std::process::Child;
use std::process::Stdio;

/// `-o` options with which qcow2 images are made, and the size.
const QCOW2: &[(&str, &str)] = &[
    ("", "64M"),
    ("cluster_size=512", "1M"),
    ("cluster_size=4k", "1000000"),
    ("cluster_size=2M", "1G"),
    ("compat=v2", "64M"),
    ("compat=0.10,cluster_size=4k", "64M"),
    ("compat=1.1,lazy_refcounts=on", "64M"),
    ("extended_l2=on", "64M"),
    ("extended_l2=on,cluster_size=16k,refcount_bits=1", "64M"),
    ("refcount_bits=64,compression_type=zstd", "64M"),
    ("refcount_bits=8,lazy_refcounts=off", "1T"),
    ("preallocation=off", "64M"),
    ("preallocation=metadata", "64M"),
    ("preallocation=falloc,extended_l2=on", "4M"),
    ("preallocation=full,cluster_size=4k", "4M"),
    ("data_file=data.raw", "64M"),
    ("data_file=data.raw,data_file_raw=on", "64M"),
    ("nocow=off", "64M"),
];

fn create_line(options: &str, name: &str, size: &str) -> Vec<String> {
    let mut line: Vec<String> = words("create -f qcow2").into_iter().map(str::to_owned).collect();
    if !options.is_empty() {
        line.extend(["-o".to_owned(), options.to_owned()]);
    }
    line.extend([name.to_owned(), size.to_owned()]);
    line
}

#[test]
fn images_are_made_as_qemu_makes_them() {
    if !qemu() {
        return;
    }
    for (options, size) in QCOW2 {
        let (ours, theirs) = (Scratch::new(), Scratch::new());
        let line = create_line(options, "a.qcow2", size);
        let made = ours.zebu(&line).ok();
        let reference = theirs.qemu_img(&line).ok();
        assert_eq!(made.stdout, reference.stdout, "{options}");
        assert_eq!(made.stderr, "", "{options}");
        let check = ours.qemu_img(&["check", "a.qcow2"]);
        assert_eq!(check.code, Some(0), "{options}: {check:#?}");
        let info = |scratch: &Scratch| scratch.qemu_img(&["info", "--output=json", "a.qcow2"]).ok().json();
        let (own, other) = (info(&ours), info(&theirs));
        for key in ["virtual-size", "cluster-size", "format", "dirty-flag", "format-specific"] {
            assert_eq!(own[key], other[key], "{options}: {key}");
        }
        let compare = ours.qemu_img(&["compare", "a.qcow2", theirs.file("a.qcow2").to_str().unwrap()]);
        assert_eq!(compare.code, Some(0), "{options}: {compare:#?}");
    }
}

#[test]
fn raw_images_are_made_as_qemu_makes_them() {
    if !qemu() {
        return;
    }
    for line in [
        "create a.raw 1.5M",
        "create -f raw a.raw 1000",
        "create -f raw -o preallocation=full,nocow=off a.raw 1M",
        "create -f raw -o preallocation=falloc,extent_size_hint=0 a.raw 1M",
        "create -f raw -o size=2M a.raw",
    ] {
        let (ours, theirs) = (Scratch::new(), Scratch::new());
        let made = ours.zebu(&words(line)).ok();
        let reference = theirs.qemu_img(&words(line)).ok();
        assert_eq!(made.stdout, reference.stdout, "{line}");
        assert_eq!(ours.read("a.raw"), theirs.read("a.raw"), "{line}");
    }
}

#[test]
fn overlays_name_their_backing_file() {
    if !qemu() {
        return;
    }
    for options in [
        "-b base.qcow2 -F qcow2",
        "-o backing_file=base.qcow2,backing_fmt=qcow2",
        "-b base.qcow2 -o backing_fmt=qcow2,cluster_size=4k",
        "-u -b missing.qcow2 -F qcow2",
        "-b base.raw -F raw -o compat=v2",
    ] {
        let (ours, theirs) = (Scratch::new(), Scratch::new());
        let size = if options.contains("-u") { " 3M" } else { "" };
        let line = format!("create -f qcow2 {options} top.qcow2{size}");
        for scratch in [&ours, &theirs] {
            scratch.qemu_img(&words("create -q -f qcow2 base.qcow2 5M")).ok();
            scratch.qemu_img(&words("create -q -f raw base.raw 7M")).ok();
        }
        let made = ours.zebu(&words(&line)).ok();
        assert_eq!(made.stdout, theirs.qemu_img(&words(&line)).ok().stdout, "{line}");
        let info = |scratch: &Scratch| scratch.qemu_img(&words("info --output=json top.qcow2")).ok().json();
        assert_has_all(&info(&ours), &info(&theirs), &["actual-size", "children"]);
    }
}

#[test]
fn a_backing_file_needs_its_format_and_says_which() {
    let scratch = Scratch::new();
    scratch.zebu(&words("create -q -f qcow2 base.qcow2 5M")).ok();
    let ran = scratch.zebu(&words("create -f qcow2 -b base.qcow2 top.qcow2"));
    ran.fails_naming(1, &["top.qcow2", "Backing file specified without backing format", "-F qcow2"]);
    assert!(!scratch.file("top.qcow2").exists());
}

#[test]
fn what_qemu_refuses_is_refused_with_the_same_code() {
    if !qemu() {
        return;
    }
    for (line, named) in [
        ("create -f qcow2 x.qcow2", "x.qcow2"),
        ("create -f qcow2 x.qcow2 1Z", "1Z"),
        ("create -f qcow2 x.qcow2 -- -1M", "-1M"),
        ("create -f qcow2 -o foo=bar x.qcow2 1M", "foo"),
        (
            "create -f qcow2 -o cluster_size=3 x.qcow2 1M",
            "Cluster size must be a power of two between 512 and 2048k",
        ),
        ("create -f qcow2 -o cluster_size=4M x.qcow2 1M", "Cluster size must be a power of two"),
        ("create -f qcow2 -o cluster_size=abc x.qcow2 1M", "cluster_size"),
        ("create -f qcow2 -o compat=0.9 x.qcow2 1M", "0.9"),
        ("create -f qcow2 -o refcount_bits=3 x.qcow2 1M", "Refcount width"),
        ("create -f qcow2 -o compat=v2,refcount_bits=8 x.qcow2 1M", "efcount"),
        ("create -f qcow2 -o compat=v2,lazy_refcounts=on x.qcow2 1M", "azy"),
        ("create -f qcow2 -o compat=v2,extended_l2=on x.qcow2 1M", "xtended"),
        ("create -f qcow2 -o compat=v2,compression_type=zstd x.qcow2 1M", "ompression type"),
        ("create -f qcow2 -o extended_l2=on,cluster_size=8k x.qcow2 1M", "16384"),
        ("create -f qcow2 -o lazy_refcounts=perhaps x.qcow2 1M", "lazy_refcounts"),
        ("create -f qcow2 -o data_file_raw=on x.qcow2 1M", "data"),
        ("create -f qcow2 -o preallocation=most x.qcow2 1M", "most"),
        ("create -f qcow2 -o cluster_size=512 x.qcow2 1P", "size"),
        ("create -f qcow2 -o size=1M x.qcow2 2M", "only once"),
        ("create -f vmdk2 x.qcow2 1M", "vmdk2"),
        ("create -f qcow2 -b missing.qcow2 -F qcow2 x.qcow2", "missing.qcow2"),
        ("create -f qcow2 -F qcow2 x.qcow2 1M", "backing"),
        ("create -f raw -b base.qcow2 -F qcow2 x.raw 1M", "x.raw"),
        ("create -f qcow2 nodir/x.qcow2 1M", "nodir/x.qcow2"),
        ("create -f qcow2 . 1M", "."),
        ("create -f qcow2", "FILENAME"),
        ("create -f qcow2 a b c", "c"),
        ("create --nosuch", "--nosuch"),
    ] {
        let (ours, theirs) = (Scratch::new(), Scratch::new());
        for scratch in [&ours, &theirs] {
            scratch.qemu_img(&words("create -q -f qcow2 base.qcow2 5M")).ok();
        }
        let code = theirs.qemu_img(&words(line)).code;
        let ran = ours.zebu(&words(line));
        assert_eq!(ran.code, code, "{line}: {ran:#?}");
        if code != Some(0) {
            ran.fails_naming(1, &[named]);
            assert!(!ours.file("x.qcow2").exists(), "{line} left something behind");
        }
    }
}

#[test]
fn help_lists_options_that_work() {
    let scratch = Scratch::new();
    for (format, option) in [("qcow2", "cluster_size="), ("raw", "preallocation=")] {
        let ran = scratch.zebu(&["create", "-f", format, "-o", "help"]);
        let ran = if ran.code == Some(0) {
            ran
        } else {
            scratch.zebu(&["create", "-f", format, "-o", "help", "x"])
        };
        assert!(ran.clone().ok().stdout.starts_with(&format!("Supported {format} options:\n")), "{ran:#?}");
        assert!(ran.stdout.contains(option));
    }
}

#[test]
fn quiet_means_quiet() {
    let scratch = Scratch::new();
    assert_eq!(scratch.zebu(&words("create -q -f qcow2 a.qcow2 1M")).ok().stdout, "");
}

#[test]
fn progress_is_shown_on_request() {
    let scratch = Scratch::new();
    for (format, mode) in [("qcow2", "off"), ("qcow2", "full"), ("raw", "falloc"), ("raw", "full")] {
        let line = |how: &str| format!("create {how} -f {format} -o preallocation={mode} disk 8M");
        let ran = scratch.zebu(&words(&line("--progress=json"))).ok();
        let last: serde_json::Value = serde_json::from_str(ran.stderr.lines().last().unwrap()).unwrap();
        assert_eq!((&last["done"], &last["total"]), (&(8 << 20).into(), &(8 << 20).into()), "{ran:#?}");
        let ran = scratch.zebu(&words(&line("-p"))).ok();
        assert!(ran.stdout.ends_with("    (100.00/100%)\r\n"), "{ran:#?}");
        let ran = scratch.zebu(&words(&line("-q -p"))).ok();
        assert_eq!((ran.stdout.as_str(), ran.stderr.as_str()), ("", ""), "-q, but it says something");
    }
}

#[test]
fn a_signal_removes_half_an_image() {
    use std::os::unix::fs::MetadataExt;
    for format in ["qcow2", "raw"] {
        let scratch = Scratch::new();
        let line = format!("create -f {format} -o preallocation=full --progress=json disk 64G");
        let mut command = scratch.command(env!("CARGO_BIN_EXE_zebu"), &words(&line));
        let child = Background::start(command.stderr(Stdio::piped()));
        let blocks = || std::fs::metadata(scratch.file("disk")).map_or(0, |metadata| metadata.blocks());
        wait_for("the image to grow", || blocks() * 512 > 16 << 20);
        send(&child, Signal::INT);
        let (code, stderr) = child.ended();
        assert_eq!(code, Some(130), "{stderr}");
        assert!(!scratch.file("disk").exists(), "{format}");
        let line = stderr.lines().rfind(|line| line.starts_with('{')).expect("a line of progress");
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        assert_eq!((&line["phase"], &line["total"]), (&"reserving".into(), &(64_u64 << 30).into()), "{line}");
        let done = line["done"].as_u64().unwrap();
        assert!(done > 0 && done < 64 << 30, "{line}");
    }
}

/// Of two that make one file at a time, the one that finds it locked leaves the other's alone.
#[test]
fn a_file_that_another_program_makes_meanwhile_is_not_removed() {
    for _ in 0..4 {
        let scratch = Scratch::new();
        let start = || {
            let line = words("create --force -q --aio threads -f raw -o preallocation=full disk 64G");
            let mut command = scratch.command(env!("CARGO_BIN_EXE_zebu"), &line);
            Background::start(command.stderr(Stdio::piped()))
        };
        let mut both = [start(), start()];
        // The one that writes is stopped: it would fill the disk before a busy machine starts the other.
        wait_for("one of them to write", || both.iter().any(|child| bytes_written(child) > 1 << 20));
        let writer = both.iter().position(|child| bytes_written(child) > 1 << 20).unwrap();
        send(&both[writer], Signal::STOP);
        let mut refused = None;
        wait_for("the other to be refused", || {
            refused = both[1 - writer].try_wait().unwrap();
            refused.is_some()
        });
        let there = scratch.file("disk").exists();
        send(&both[writer], Signal::CONT);
        send(&both[writer], Signal::INT);
        assert_eq!(refused.unwrap().code(), Some(1));
        assert!(there, "removed by the other");
        let [first, second] = both;
        let (code, said) = if writer == 0 { first.ended() } else { second.ended() };
        assert_eq!(code, Some(130));
        // The one that was refused may have been the one that made the file.
        assert_eq!(scratch.file("disk").exists(), said.contains("'disk' existed before"), "{said}");
    }
}

/// A program that waits for the lock of an image has not made one if that image is removed: it makes another.
#[test]
fn an_image_in_the_place_of_one_that_is_removed_is_there() {
    for format in ["raw", "qcow2"] {
        let scratch = Scratch::new();
        let start = |options: &str| {
            let line = format!("create --force -q --aio threads -f {format} {options}");
            let mut command = scratch.command(env!("CARGO_BIN_EXE_zebu"), &words(&line));
            Background::start(command.stderr(Stdio::piped()))
        };
        let first = start("-o preallocation=full disk 64G");
        wait_for("the first image to grow", || bytes_written(&first) > 1 << 20);
        send(&first, Signal::STOP);
        let second = start("disk 1M");
        // It waits for the lock, a second at most.
        wait_for("the second program to find the image", || has_open(&second, "disk"));
        send(&first, Signal::TERM);
        send(&first, Signal::CONT);
        assert_eq!(first.ended().0, Some(130), "{format}");
        let (code, said) = second.ended();
        // On a busy machine it may have waited in vain.
        assert_eq!(scratch.file("disk").exists(), code == Some(0), "{format}: {said}");
    }
}

/// An image over a file that was there before is cut off by a signal: the file stays, and the message says so.
#[test]
fn a_signal_leaves_a_file_that_was_there_before_and_says_so() {
    let scratch = Scratch::new();
    std::fs::write(scratch.file("disk"), b"").unwrap();
    let line = words("create --force -q --aio threads -f raw -o preallocation=full disk 64G");
    let mut command = scratch.command(env!("CARGO_BIN_EXE_zebu"), &line);
    let child = Background::start(command.stderr(Stdio::piped()));
    wait_for("the image to grow", || bytes_written(&child) > 1 << 20);
    send(&child, Signal::INT);
    let (code, said) = child.ended();
    assert_eq!(code, Some(130), "{said}");
    assert!(said.contains("'disk' existed before and is kept"), "{said}");
    assert!(scratch.file("disk").exists());
}

/// The bytes that a process has written by system calls of its threads (io_uring's are not counted here).
fn has_open(child: &Child, name: &str) -> bool {
    let links = std::fs::read_dir(format!("/proc/{}/fd", child.id())).into_iter().flatten().flatten();
    let mut files = links.filter_map(|link| std::fs::read_link(link.path()).ok());
    let has_ended = std::fs::read_link(format!("/proc/{}/exe", child.id())).is_err();
    has_ended || files.any(|file| file.file_name().is_some_and(|own| own == name))
}

fn bytes_written(child: &Child) -> u64 {
    let counters = std::fs::read_to_string(format!("/proc/{}/io", child.id())).unwrap_or_default();
    let line = counters.lines().find_map(|line| line.strip_prefix("wchar: "));
    line.and_then(|number| number.parse().ok()).unwrap_or(0)
}
