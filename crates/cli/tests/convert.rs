//! `zebu convert` against `qemu-img convert`, and its own promises.

mod common;

use common::{Background, Scratch, noise, qemu, send, wait_for, words};
use rustix::process::Signal;
use std::io::{BufRead, BufReader};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Command, Stdio};
use zebu_storage::FsKind;

/// An image with data, zeroes, holes, a compressed cluster and a snapshot.
fn source(scratch: &Scratch) {
    scratch.qemu_img(&words("create -q -f qcow2 a.qcow2 16M")).ok();
    scratch.write("noise", &noise(1, 3 << 20));
    let commands = [
        "write -s noise 1M 3M",
        "write -z 6M 1M",
        "write -c -P 3 8M 64k",
        "write -P 4 15M 1M",
        "write -P 9 100k 1k",
    ];
    for command in commands {
        scratch.qemu_io(&["-c", command, "a.qcow2"]).ok();
    }
    scratch.qemu_img(&words("snapshot -c before a.qcow2")).ok();
    scratch.qemu_io(&["-c", "write -P 5 1M 2M", "-c", "discard 15M 512k", "a.qcow2"]).ok();
}

#[track_caller]
fn identical(scratch: &Scratch, a: &str, b: &str) {
    let ran = scratch.qemu_img(&["compare", a, b]);
    assert_eq!(ran.code, Some(0), "{a} {b}: {ran:#?}");
}

#[test]
fn targets_hold_what_qemus_hold() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    source(&scratch);
    scratch.qemu_img(&words("convert -O raw a.qcow2 reference.raw")).ok();
    for options in [
        "-O raw",
        "-O qcow2",
        "-f qcow2 -O qcow2 -o cluster_size=4k",
        "-O qcow2 -o compat=v2",
        "-O qcow2 -o extended_l2=on,compression_type=zstd",
        "-O qcow2 -o preallocation=metadata",
        "-O qcow2 -o data_file=data.raw",
        "-O raw -t none -T none",
        "-O qcow2 -t writethrough -m 1",
        "-O qcow2 -W --workers 2 -m 16 --buffer-memory 1M",
        "-O qcow2 -S 0",
        "-O raw -S 64k --copy buffers",
        "-O raw -C",
        "-O qcow2 --aio threads",
        "-O raw -r 1G",
        "--image-opts -O raw",
    ] {
        let from =
            if options.contains("--image-opts") { "driver=qcow2,file.filename=a.qcow2" } else { "a.qcow2" };
        let mut line = vec!["convert"];
        line.extend(words(options));
        line.extend([from, "out"]);
        let ran = scratch.zebu(&line).ok();
        assert_eq!((ran.stdout.as_str(), ran.stderr.as_str()), ("", ""), "{options}");
        identical(&scratch, "reference.raw", "out");
        if options.contains("-O qcow2") {
            let check = scratch.qemu_img(&["check", "out"]);
            assert_eq!(check.code, Some(0), "{options}: {check:#?}");
        }
        std::fs::remove_file(scratch.file("out")).unwrap();
    }
    assert_eq!(left_over(&scratch), Vec::<String>::new());
}

/// Files in the directory that a test did not name.
fn left_over(scratch: &Scratch) -> Vec<String> {
    let known = ["a.qcow2", "noise", "reference.raw", "data.raw", "out", "big.raw"];
    let mut names: Vec<String> = std::fs::read_dir(scratch.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| !known.contains(&name.as_str()))
        .collect();
    names.sort();
    names
}

#[test]
fn snapshots_are_sources() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    source(&scratch);
    scratch.qemu_img(&words("convert -l snapshot.name=before -O raw a.qcow2 reference.raw")).ok();
    for name in ["before", "1", "snapshot.name=before", "snapshot.id=1"] {
        scratch.zebu(&["convert", "-l", name, "-O", "raw", "a.qcow2", "out"]).ok();
        identical(&scratch, "reference.raw", "out");
    }
    scratch.zebu(&words("convert -l nosuch a.qcow2 out")).fails_naming(1, &["a.qcow2", "nosuch"]);
}

#[test]
fn sources_are_joined() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    scratch.write("one.raw", &noise(1, 1 << 20));
    scratch.write("two.raw", &noise(2, 512 << 10));
    scratch.zebu(&words("convert -f raw -O raw one.raw two.raw out")).ok();
    assert_eq!(scratch.read("out"), [scratch.read("one.raw"), scratch.read("two.raw")].concat());
}

#[test]
fn existing_targets_are_overwritten() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    source(&scratch);
    scratch.qemu_img(&words("create -q -f qcow2 out 20M")).ok();
    scratch.qemu_io(&["-c", "write -P 0x77 0 20M", "out"]).ok();
    scratch.zebu(&words("convert -n -O qcow2 a.qcow2 out")).ok();
    scratch.qemu_io(&["-c", "read -P 0x77 16M 4M", "out"]).ok();
    scratch.qemu_img(&words("resize --shrink out 16M")).ok();
    identical(&scratch, "a.qcow2", "out");

    scratch.qemu_img(&words("create -q -f qcow2 out 1M")).ok();
    let ran = scratch.zebu(&words("convert -n -O qcow2 a.qcow2 out"));
    assert_eq!(ran.code, Some(1), "{ran:#?}");
    scratch.zebu(&words("convert -n -O qcow2 a.qcow2 missing")).fails_naming(1, &["missing"]);
}

#[test]
fn empty_targets_take_only_data() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    source(&scratch);
    scratch.qemu_img(&words("create -q -f qcow2 out 16M")).ok();
    scratch.zebu(&words("convert -n --target-is-zero -O qcow2 a.qcow2 out")).ok();
    identical(&scratch, "a.qcow2", "out");
    let options = "driver=qcow2,file.filename=out";
    scratch.zebu(&["convert", "-n", "--target-image-opts", "a.qcow2", options]).ok();
    identical(&scratch, "a.qcow2", "out");
}

#[test]
fn overlays_hold_the_difference_only() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    scratch.write("base.raw", &noise(7, 8 << 20));
    scratch.qemu_img(&words("create -q -f qcow2 -b base.raw -F raw a.qcow2")).ok();
    scratch.qemu_io(&["-c", "write -P 1 1M 64k", "a.qcow2"]).ok();
    scratch.zebu(&words("convert -O qcow2 -B base.raw -F raw a.qcow2 out")).ok();
    identical(&scratch, "a.qcow2", "out");
    assert!(std::fs::metadata(scratch.file("out")).unwrap().len() < 1 << 20);
    scratch
        .zebu(&words("convert -O qcow2 -B base.raw a.qcow2 out2"))
        .fails_naming(1, &["out2", "backing format", "-F raw"]);
}

#[test]
fn options_that_do_not_work_are_refused_by_name() {
    let scratch = Scratch::new();
    scratch.zebu(&words("create -q -f qcow2 a.qcow2 1M")).ok();
    for (line, named) in [
        ("convert -c a.qcow2 out", "Compression not supported for this file format"),
        ("convert -c -O qcow2 -o preallocation=metadata a.qcow2 out", "preallocation"),
        ("convert -c -O qcow2 -o data_file=d.raw a.qcow2 out", "external data file"),
        ("convert -c -C -O qcow2 a.qcow2 out", "copy offloading"),
        ("convert -c -O qcow2 --compression-level 13 a.qcow2 out", "level 13"),
        ("convert -c -O qcow2 -o compression_type=zstd --compression-level 23 a.qcow2 out", "level 23"),
        ("convert --strict-deflate -O qcow2 a.qcow2 out", "--strict-deflate needs -c"),
        ("convert --bitmaps a.qcow2 out", "does not support bitmaps"),
        ("convert --skip-broken-bitmaps -O qcow2 a.qcow2 out", "--bitmaps"),
        ("convert --bitmaps -O qcow2 a.qcow2 a.qcow2 out", "single source"),
        ("convert a.qcow2", "file name"),
        ("convert -O foo a.qcow2 out", "foo"),
        ("convert -f foo a.qcow2 out", "foo"),
        ("convert -t foo a.qcow2 out", "foo"),
        ("convert -m 0 a.qcow2 out", "0"),
        ("convert -S 1x a.qcow2 out", "1x"),
        ("convert -O qcow2 -o cluster_size=3 a.qcow2 out", "Cluster size"),
        ("convert -O qcow2 -o nosuch=3 a.qcow2 out", "nosuch"),
        ("convert --target-is-zero a.qcow2 out", "--no-create"),
        ("convert -n -o compat=v2 -O qcow2 a.qcow2 a.qcow2", "-o"),
        ("convert missing.qcow2 out", "missing.qcow2"),
        ("convert a.qcow2 nodir/out", "nodir/out"),
    ] {
        scratch.zebu(&words(line)).fails_naming(1, &[named]);
        assert!(!scratch.file("out").exists(), "{line}");
    }
}

/// Each has a table of one cluster; the directory is written once, not once more for each of them.
#[test]
fn many_bitmaps_are_copied_at_once_or_not_at_all() {
    const MANY: u64 = 300;
    let bitmaps = |scratch: &Scratch, name: &str| {
        let info = scratch.zebu(&["info", "--output", "json", name]).ok().json();
        info["format-specific"]["data"]["bitmaps"].as_array().map_or(0, Vec::len) as u64
    };
    let scratch = Scratch::new();
    scratch.zebu(&words("create -q -f qcow2 a.qcow2 1M")).ok();
    for number in 0..MANY {
        scratch.zebu(&words(&format!("bitmap --add a.qcow2 b{number:03}"))).ok();
    }
    scratch.zebu(&words("convert --bitmaps -O qcow2 a.qcow2 out")).ok();
    assert_eq!(bitmaps(&scratch, "out"), MANY);
    scratch.zebu(&words("check out")).ok();
    let len = scratch.file("out").metadata().unwrap().len();
    assert!(len <= (MANY + 32) * 65536, "{len}");

    scratch.zebu(&words("create -q -f qcow2 target 1M")).ok();
    scratch.zebu(&words("bitmap --add target b150")).ok();
    scratch.zebu(&words("convert -n --bitmaps -O qcow2 a.qcow2 target")).fails_naming(1, &["b150"]);
    assert_eq!(bitmaps(&scratch, "target"), 1);
    scratch.zebu(&words("check target")).ok();
}

#[test]
fn reports_are_printed_on_request() {
    let scratch = Scratch::new();
    scratch.write("a.raw", &noise(3, 1 << 20));
    let report = scratch.zebu(&words("convert -f raw -O qcow2 --output json a.raw out")).ok().json();
    assert_eq!(report["total"], 1 << 20);
    let moved: u64 =
        ["written", "reflinked", "range-copied"].iter().map(|key| report[*key].as_u64().unwrap()).sum();
    assert_eq!(moved, 1 << 20, "{report:#}");
    let ran = scratch.zebu(&words("convert -f raw -O qcow2 --progress=json a.raw out2")).ok();
    let last: serde_json::Value = serde_json::from_str(ran.stderr.lines().last().unwrap()).unwrap();
    assert_eq!((&last["done"], &last["total"]), (&(1 << 20).into(), &(1 << 20).into()), "{ran:#?}");
    let ran = scratch.zebu(&words("convert -p -f raw -O qcow2 a.raw out3")).ok();
    assert!(ran.stdout.ends_with("    (100.00/100%)\r\n"), "{ran:#?}");
}

#[test]
fn the_source_is_not_its_own_target() {
    let scratch = Scratch::new();
    scratch.write("a.raw", &noise(3, 1 << 20));
    let before = scratch.read("a.raw");
    let ran = scratch.zebu(&words("convert -f raw -O raw a.raw a.raw"));
    ran.fails_naming(1, &["a.raw"]);
    assert_eq!(scratch.read("a.raw"), before);
}

#[test]
fn a_signal_removes_what_was_made() {
    for signal in [Signal::INT, Signal::TERM] {
        let scratch = Scratch::new();
        scratch.write("big.raw", &noise(1, 64 << 20));
        // A rate that takes a minute leaves time for the signal.
        let mut child = slow_job(&scratch, "convert -r 1M -f raw -O qcow2 --copy buffers big.raw out", "");
        send(&child, Signal::USR1);
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        let mut text = String::new();
        stderr.read_line(&mut text).unwrap();
        assert!(text.contains("/100%)"), "SIGUSR1 printed nothing: {text}");
        send(&child, signal);
        let status = child.wait().unwrap();
        assert_eq!(status.code(), Some(130), "{signal:?}");
        assert_eq!(left_over(&scratch), Vec::<String>::new());
        assert!(!scratch.file("out").exists());
        assert_eq!(std::io::read_to_string(stderr).unwrap(), "zebu: interrupted\n");
    }
}

/// Starts a job that takes minutes and waits until it has made a file; `ignoring` are signals that it starts with.
fn slow_job(scratch: &Scratch, job: &str, ignoring: &str) -> Background {
    let line = format!("trap '' {ignoring}; exec \"$0\" $1");
    let line = if ignoring.is_empty() { "exec \"$0\" $1" } else { &line };
    let mut command = scratch.command("sh", &["-c", line, env!("CARGO_BIN_EXE_zebu"), job]);
    let child = Background::start(command.stderr(Stdio::piped()));
    wait_for("the temporary file", || !left_over(scratch).is_empty());
    child
}

#[test]
fn whatever_ends_a_job_nothing_is_left() {
    for job in [
        "convert -r 1M -f raw -O raw big.raw out",
        "convert -r 1M -f raw -O qcow2 -o data_file=out.data big.raw out",
        "convert -r 1M -c -f raw -O qcow2 big.raw out",
        "backup -r 1M -f raw big.raw out",
    ] {
        // As a closing terminal, timeout(1) and an impatient user send them.
        for signals in
            [&[Signal::HUP][..], &[Signal::HUP; 3], &[Signal::TERM; 2], &[Signal::INT, Signal::HUP]]
        {
            let scratch = Scratch::new();
            scratch.write("big.raw", &noise(1, 64 << 20));
            let child = slow_job(&scratch, job, "");
            for signal in signals {
                send(&child, *signal);
            }
            let (code, text) = child.ended();
            assert_eq!(code, Some(130), "{job} {signals:?}: {text}");
            assert_eq!(text, "zebu: interrupted\n", "{job} {signals:?}");
            let mut left = left_over(&scratch);
            // What a backup goes on from is no rubbish.
            left.retain(|name| !name.starts_with(".out.zebu-partial"));
            assert_eq!(left, Vec::<String>::new(), "{job} {signals:?}");
            for name in ["out", "out.data"] {
                assert!(!scratch.file(name).exists(), "{job} {signals:?}: {name}");
            }
        }
    }
}

#[test]
fn a_signal_that_was_ignored_at_the_start_stays_ignored() {
    for (name, signal) in [("HUP", Signal::HUP), ("INT", Signal::INT)] {
        let scratch = Scratch::new();
        scratch.write("big.raw", &noise(1, 3 << 20));
        let child = slow_job(&scratch, "convert -r 1M -f raw -O raw big.raw out", name);
        send(&child, signal);
        let (code, stderr) = child.ended();
        assert_eq!(code, Some(0), "{name}: {stderr}");
        assert_eq!(scratch.read("out"), scratch.read("big.raw"));
    }
}

#[test]
fn a_file_that_may_not_grow_so_far_is_an_error() {
    let scratch = Scratch::new();
    scratch.write("big.raw", &noise(1, 4 << 20));
    for job in [
        "convert -f raw -O raw big.raw out",
        "convert -f raw -O qcow2 big.raw out",
        "convert -c -f raw -O qcow2 big.raw out",
        "convert --aio threads -f raw -O qcow2 big.raw out",
        "backup -f raw big.raw out",
        "dd -f raw -O raw if=big.raw of=out",
        "create -f raw out 4M",
        "create -f qcow2 -o preallocation=full out 4M",
    ] {
        let limited = ["--fsize=1000000", env!("CARGO_BIN_EXE_zebu")];
        let arguments: Vec<&str> = limited.into_iter().chain(job.split(' ')).collect();
        let ran = scratch.run("prlimit", &arguments);
        ran.fails_naming(1, &["out", "File too large"]);
        let names: Vec<String> = std::fs::read_dir(scratch.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        assert_eq!(names, ["big.raw"], "{job}");
    }
}

/// A symbolic link that leads to nothing is a name for a new file, which is complete or not there.
#[test]
fn a_new_file_behind_a_link_is_complete_or_not_there() {
    let scratch = Scratch::new();
    scratch.write("big.raw", &noise(1, 4 << 20));
    std::fs::create_dir(scratch.file("sub")).unwrap();
    std::os::unix::fs::symlink("sub/new", scratch.file("out")).unwrap();
    let names = || -> Vec<String> {
        let names = |dir: &Path| std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name());
        let all = names(scratch.path()).chain(names(&scratch.file("sub")));
        let mut all: Vec<String> = all.map(|name| name.into_string().unwrap()).collect();
        all.sort();
        all
    };
    let before = names();
    assert_eq!(before, ["big.raw", "out", "sub"]);
    for job in [
        "convert -f raw -O raw big.raw out",
        "convert -f raw -O qcow2 big.raw out",
        "convert -f raw -O qcow2 -o data_file=data big.raw out",
        "dd -f raw -O raw if=big.raw of=out",
        "create -f qcow2 -o preallocation=full out 4M",
    ] {
        let limited = ["--fsize=1000000", env!("CARGO_BIN_EXE_zebu")];
        let arguments: Vec<&str> = limited.into_iter().chain(job.split(' ')).collect();
        scratch.run("prlimit", &arguments).fails_naming(1, &["File too large"]);
        assert_eq!(names(), before, "{job}");
        scratch.zebu(&words(job)).ok();
        assert!(scratch.file("sub/new").metadata().unwrap().is_file(), "{job}");
        assert_eq!(std::fs::read_link(scratch.file("out")).unwrap(), Path::new("sub/new"));
        if !job.starts_with("create") {
            let format = if job.contains("qcow2") { "qcow2" } else { "raw" };
            // The names of other files count from the link, as in QEMU.
            scratch.zebu(&words(&format!("compare -f raw -F {format} big.raw out"))).ok();
        }
        for made in ["sub/new", "data"] {
            let _ = std::fs::remove_file(scratch.file(made));
        }
        assert_eq!(names(), before, "{job}");
    }
    let job = "convert -r 128k -f raw -O raw big.raw out";
    let mut child = Background::start(&mut scratch.command(env!("CARGO_BIN_EXE_zebu"), &words(job)));
    wait_for("a file under a temporary name", || names().len() > before.len());
    assert!(!scratch.file("sub/new").exists());
    send(&child, Signal::TERM);
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert_eq!(names(), before);
}

/// More ranges than are listed are counted, and what is lost is summed up.
#[test]
fn all_ranges_that_are_lost_are_counted() {
    const CLUSTER: usize = 4096;
    const CLUSTERS: usize = 3000;
    let scratch = Scratch::new();
    scratch.write("disk", &noise(1, CLUSTERS * CLUSTER));
    scratch.zebu(&words("convert -f raw -O qcow2 -o cluster_size=4k disk bad.qcow2")).ok();
    let mut bytes = scratch.read("bad.qcow2");
    let number = |bytes: &[u8], at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap());
    let place = |entry: u64| (entry & 0x00ff_ffff_ffff_fe00) as usize;
    let l1 = place(number(&bytes, 40));
    for cluster in (0..CLUSTERS).step_by(2) {
        let entry = place(number(&bytes, l1 + cluster / 512 * 8)) + cluster % 512 * 8;
        // No cluster begins there.
        bytes[entry + 6] |= 2;
    }
    scratch.write("bad.qcow2", &bytes);
    for command in ["convert --salvage -O raw", "backup --skip-errors"] {
        let _ = std::fs::remove_file(scratch.file("out"));
        let report = scratch.zebu(&words(&format!("{command} --output json bad.qcow2 out"))).ok();
        let found = report.json();
        assert_eq!(found["unreadable"], CLUSTERS / 2 * CLUSTER, "{command}");
        assert_eq!(found["unreadable-ranges"].as_array().unwrap().len(), 1024, "{command}");
        assert_eq!(found["unreadable-range-count"], CLUSTERS / 2, "{command}");
        let end: Vec<&str> = report.stderr.lines().rev().take(2).collect();
        assert!(end[1].contains("error while reading 476 more ranges"), "{end:?}");
        assert!(end[0].contains("6144000 bytes in 1500 ranges could not be read"), "{end:?}");
        std::fs::remove_file(scratch.file("out")).unwrap();
        let report = scratch.zebu(&words(&format!("{command} --output human bad.qcow2 out"))).ok();
        assert!(report.stdout.contains("unreadable 6144000"), "{report:#?}");
        assert!(report.stdout.contains("unreadable ranges: 1500"), "{report:#?}");
    }
}

#[test]
fn nobody_reads_the_messages() {
    let scratch = Scratch::new();
    scratch.write("a.raw", &noise(1, 1 << 20));
    // Data beyond its end reads as an error in no image but one whose file is cut.
    scratch.zebu(&words("convert -f raw -O qcow2 a.raw cut.qcow2")).ok();
    let bytes = scratch.read("cut.qcow2");
    scratch.write("cut.qcow2", &bytes[..bytes.len() / 2]);
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let status = scratch
        .command(env!("CARGO_BIN_EXE_zebu"), &words("convert --verbose --salvage -O raw cut.qcow2 out"))
        .stderr(writer)
        .status()
        .unwrap();
    assert_eq!(status.code(), Some(0));
    assert!(scratch.file("out").exists());
}

#[test]
fn a_target_that_a_machine_uses_is_refused() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    scratch.write("a.raw", &noise(1, 1 << 20));
    scratch.qemu_img(&words("create -q -f qcow2 used.qcow2 1M")).ok();
    let _machine = Background::with_prompt(scratch.command("qemu-io", &words("used.qcow2")), "qemu-io> ");
    scratch.zebu(&words("convert -f raw -O qcow2 a.raw used.qcow2")).fails_naming(1, &["used.qcow2"]);
    scratch.zebu(&words("convert -n -f raw -O qcow2 a.raw used.qcow2")).fails_naming(1, &["used.qcow2"]);
}

#[test]
fn compressed_targets_are_what_qemu_reads() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    // Half noise, half text, a hole, and an end that cuts a cluster short.
    let mut content = noise(5, 3 << 20);
    for (i, piece) in content.chunks_mut(40_000).enumerate() {
        match i % 4 {
            0 => piece.fill(b'x'),
            1 => piece.iter_mut().enumerate().for_each(|(i, byte)| *byte = (i / 9) as u8),
            2 if i > 20 => piece.fill(0),
            _ => {}
        }
    }
    content.truncate((3 << 20) - 1536);
    scratch.write("a.raw", &content);
    for options in [
        "",
        "-t none -T none -W -m 16",
        "-o compression_type=zstd --compression-level 19",
        "-o compat=0.10,cluster_size=4k",
        "-o cluster_size=2M,compression_type=zstd",
        "-o extended_l2=on",
        "-o refcount_bits=1",
        "-S 0",
        "--workers 2",
    ] {
        scratch.zebu(&words(&format!("convert -c -f raw -O qcow2 {options} a.raw out"))).ok();
        scratch.qemu_img(&words("compare -f raw -F qcow2 a.raw out")).ok();
        scratch.qemu_img(&words("check out")).ok();
        let map = scratch.qemu_img(&words("map --output=json out")).ok().json();
        let compressed = map.as_array().unwrap().iter().filter(|extent| extent["compressed"] == true);
        assert!(compressed.count() > 0, "{options}: nothing is compressed");
        std::fs::remove_file(scratch.file("out")).unwrap();
    }
}

#[test]
fn a_compressed_image_takes_the_changes_of_an_overlay() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    scratch.write("a.raw", &vec![b'a'; 1 << 20]);
    scratch.zebu(&words("convert -c -f raw -O qcow2 a.raw base")).ok();
    scratch.qemu_img(&words("create -q -f qcow2 -b base -F qcow2 top")).ok();
    scratch.qemu_io(&["-c", "write -P 7 70000 5000", "top"]).ok();
    scratch.zebu(&words("convert -c -O qcow2 -B base -F qcow2 top out")).ok();
    scratch.qemu_img(&words("compare top out")).ok();
    scratch.qemu_img(&words("check out")).ok();
    // Allocated clusters may be written compressed, again and again.
    scratch.zebu(&words("convert -c -n -O qcow2 top out")).ok();
    scratch.qemu_img(&words("compare top out")).ok();
    scratch.qemu_img(&words("check out")).ok();
}

#[test]
fn a_raw_image_has_no_snapshots() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    scratch.write("reference.raw", &vec![7; 1 << 20]);
    scratch.zebu(&words("create -q -f qcow2 a.qcow2 1M")).ok();
    scratch.zebu(&words("snapshot -c one a.qcow2")).ok();
    let theirs = scratch.qemu_img(&words("convert -l nosuch -f raw -O raw reference.raw out"));
    assert_eq!(theirs.code, Some(1), "{theirs:#?}");
    for line in [
        "convert -l nosuch -O raw reference.raw out",
        "convert -l nosuch -f raw -O raw reference.raw out",
        "convert -l snapshot.name=one -f raw -O qcow2 a.qcow2 out",
        "measure -l nosuch -O qcow2 reference.raw",
        "measure -f raw -l one -O qcow2 a.qcow2",
        "backup -l nosuch reference.raw out",
        "backup -f raw -l one a.qcow2 out",
        "serve -f raw --snapshot one --nbd unix:socket a.qcow2",
    ] {
        let ran = scratch.run("timeout", &[&["60", env!("CARGO_BIN_EXE_zebu")], &words(line)[..]].concat());
        ran.fails_naming(1, &["raw", "snapshot"]);
        assert_eq!(left_over(&scratch), Vec::<String>::new(), "{line}");
        assert!(!scratch.file("out").exists(), "{line}");
    }
    // What else only a qcow2 image has.
    for (key, word) in [("data-file.filename", "data file"), ("backing.file.filename", "backing file")] {
        let line = format!("info --image-opts driver=raw,file.filename=reference.raw,{key}=a.qcow2");
        scratch.zebu(&words(&line)).fails_naming(1, &["reference.raw", "raw", word]);
        assert_eq!(scratch.qemu_img(&words(&line)).code, Some(1));
    }
}

/// Images, and other names of them.
fn linked(scratch: &Scratch) {
    scratch.write("base.raw", &noise(11, 1 << 20));
    scratch.zebu(&words("convert -f raw -O qcow2 base.raw a.qcow2")).ok();
    scratch.zebu(&words("create -q -f qcow2 -b a.qcow2 -F qcow2 top.qcow2")).ok();
    scratch.zebu(&words("create -q -f qcow2 -o data_file=data.raw split.qcow2 1M")).ok();
    scratch.zebu(&["io", "-f", "qcow2", "-c", "write -P 9 0 1M", "split.qcow2"]).ok();
    for (file, link) in [("a.qcow2", "hard.qcow2"), ("base.raw", "hard.raw"), ("data.raw", "hard.data")] {
        std::fs::hard_link(scratch.file(file), scratch.file(link)).unwrap();
    }
    std::os::unix::fs::symlink("a.qcow2", scratch.file("soft.qcow2")).unwrap();
}

#[test]
fn no_file_of_a_source_is_a_target_under_any_name() {
    let scratch = Scratch::new();
    linked(&scratch);
    let files = ["base.raw", "a.qcow2", "top.qcow2", "split.qcow2", "data.raw"];
    let before: Vec<Vec<u8>> = files.iter().map(|file| scratch.read(file)).collect();
    for line in [
        "convert -U -f raw -O qcow2 base.raw hard.raw",
        "convert -U -O qcow2 a.qcow2 a.qcow2",
        "convert -O qcow2 a.qcow2 a.qcow2",
        "convert -U -O raw a.qcow2 soft.qcow2",
        "convert -U -O qcow2 top.qcow2 hard.qcow2",
        "convert -U -n -O qcow2 top.qcow2 hard.qcow2",
        "convert -U -n -f raw -O raw base.raw hard.raw",
        "convert -U -O raw split.qcow2 hard.data",
        "convert -U -f raw -O qcow2 -o data_file=hard.raw base.raw out",
        "convert -U -O qcow2 base.raw top.qcow2 a.qcow2",
        "dd -U if=top.qcow2 of=hard.qcow2",
        "dd -U -f raw -O raw bs=512 count=1 if=base.raw of=hard.raw",
    ] {
        let ran = scratch.zebu(&words(line));
        ran.fails_naming(1, &[]);
        assert!(ran.stderr.contains("a file of the source"), "{line}: {ran:#?}");
    }
    // Nor is a new image what it is made of.
    for line in [
        "create -q -f qcow2 -b a.qcow2 -F qcow2 a.qcow2",
        "create -q -f qcow2 -b a.qcow2 -F qcow2 hard.qcow2",
        "create -q -f qcow2 -u -b a.qcow2 -F qcow2 soft.qcow2 1M",
        "create -q -f qcow2 -o data_file=a.qcow2 a.qcow2 1M",
        "create -q -f qcow2 -o data_file=hard.qcow2 a.qcow2 1M",
        "create -q -f qcow2 -o data_file=out out 1M",
        "create -q -f qcow2 -b base.raw -F raw -o data_file=hard.raw out",
        "convert -f raw -O qcow2 -B a.qcow2 -F qcow2 base.raw hard.qcow2",
        "convert -f raw -O qcow2 -o data_file=./out base.raw out",
        "rebase -b hard.qcow2 -F qcow2 a.qcow2",
        "rebase -u -b hard.qcow2 -F qcow2 a.qcow2",
    ] {
        let ran = scratch.zebu(&words(line));
        ran.fails_naming(1, &[]);
        assert!(ran.stderr.contains("data file") || ran.stderr.contains("backing file"), "{line}: {ran:#?}");
        assert!(!scratch.file("out").exists(), "{line}");
    }
    for (file, before) in files.iter().zip(before) {
        assert!(scratch.read(file) == before, "{file} was changed");
    }
    // What is only read may be shared.
    scratch.zebu(&words("convert -O qcow2 -B a.qcow2 -F qcow2 top.qcow2 out")).ok();
    scratch.zebu(&words("convert -n -B a.qcow2 -O qcow2 top.qcow2 out")).ok();
}

#[test]
fn locks_are_to_be_gone_around_only_where_that_destroys_nothing() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    scratch.qemu_img(&words("create -q -f qcow2 a.qcow2 1M")).ok();
    scratch.qemu_img(&words("create -q -f qcow2 b.qcow2 1M")).ok();
    let _machine = Background::with_prompt(scratch.command("qemu-io", &["a.qcow2"]), "qemu-io> ");
    for (line, hint) in [
        ("convert -O raw a.qcow2 out", true),
        ("compare a.qcow2 b.qcow2", true),
        ("map a.qcow2", true),
        ("backup a.qcow2 out", true),
        ("io -r -c length a.qcow2", true),
        ("io -c length a.qcow2", false),
        ("bench -w -c 1 a.qcow2", false),
        ("bench -c 1 a.qcow2", true),
        ("check -r all a.qcow2", false),
        ("convert -O qcow2 b.qcow2 a.qcow2", false),
        ("convert -n -O qcow2 b.qcow2 a.qcow2", false),
        ("dd -O qcow2 if=b.qcow2 of=a.qcow2", false),
        ("create -f qcow2 a.qcow2 1M", false),
        ("resize a.qcow2 2M", false),
        ("snapshot -c one a.qcow2", false),
        ("clone a.qcow2 out", false),
        ("amend -o compat=1.1 a.qcow2", false),
        ("bitmap --add a.qcow2 one", false),
        ("commit a.qcow2", false),
        ("rebase -u -b b.qcow2 -F qcow2 a.qcow2", false),
        ("serve --nbd unix:socket a.qcow2", false),
        ("serve --read-only --nbd unix:socket a.qcow2", false),
    ] {
        let ran = scratch.zebu(&words(line));
        ran.fails_naming(if line.starts_with("compare") { 2 } else { 1 }, &["a.qcow2", "lock"]);
        assert_eq!(ran.stderr.contains("-U"), hint, "{line}: {ran:#?}");
    }
}

/// Pages of a file in the page cache.
fn cached_pages(path: &Path) -> u64 {
    let output = Command::new("fincore").args(["-n", "-o", "PAGES"]).arg(path).output().unwrap();
    String::from_utf8_lossy(&output.stdout).trim().parse().unwrap()
}

fn drop_pages(path: &Path) {
    let file = std::fs::File::open(path).unwrap();
    file.sync_all().unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
}

/// Without options, the page cache holds no more of the files afterwards than before.
#[test]
fn nothing_stays_in_the_page_cache_unasked() {
    let scratch = Scratch::new();
    scratch.write("a.raw", &noise(1, 8 << 20));
    let (source, target) = (scratch.file("a.raw"), scratch.file("b"));
    drop_pages(&source);
    if cached_pages(&source) > 0 {
        eprintln!("skipped: temporary files are in memory");
        return;
    }
    for (command, is_asked) in [
        ("convert --copy buffers -f raw -O qcow2 a.raw b", false),
        ("convert --copy buffers -f raw -O raw a.raw b", false),
        ("convert --copy buffers -f raw -O qcow2 -o cluster_size=512 a.raw b", false),
        ("convert -c -f raw -O qcow2 a.raw b", false),
        ("convert --copy buffers --workers 2 -f raw -O qcow2 a.raw b", false),
        ("dd -f raw if=a.raw of=b", false),
        ("convert --copy buffers -t writeback -f raw -O qcow2 a.raw b", true),
    ] {
        drop_pages(&source);
        let found = cached_pages(&source);
        scratch.zebu(&words(command)).ok();
        assert_eq!(cached_pages(&target) > 1024, is_asked, "{command}: {} pages", cached_pages(&target));
        assert!(is_asked || cached_pages(&target) == 0, "{command}: {} pages", cached_pages(&target));
        // The format was looked for in the first block.
        let left = cached_pages(&source).saturating_sub(found);
        assert!(left <= 32, "{command}: {left} pages of the source");
        std::fs::remove_file(&target).unwrap();
    }
    let told = scratch.zebu(&words("convert -v -f raw -O qcow2 a.raw b")).ok();
    assert!(told.stderr.contains("writes to the target"), "{told:#?}");
}

/// A file that exists is overwritten past the page cache as well, and durable at the end: dirty pages could not be dropped.
#[test]
fn nothing_of_what_is_changed_in_place_stays_in_the_page_cache() {
    let scratch = Scratch::new();
    scratch.write("a.raw", &noise(1, 8 << 20));
    drop_pages(&scratch.file("a.raw"));
    if cached_pages(&scratch.file("a.raw")) > 0 {
        eprintln!("skipped: temporary files are in memory");
        return;
    }
    let chain = |dir: &Scratch| {
        for line in [
            "convert -f raw -O qcow2 a.raw base",
            "convert -f raw -O qcow2 a.raw other",
            "create -q -f qcow2 -b base -F qcow2 top",
        ] {
            dir.zebu(&words(line)).ok();
        }
        // More than read-ahead would bring.
        dir.zebu(&["io", "-f", "qcow2", "-c", "write -P 7 1M 4M", "-c", "flush", "top"]).ok();
        for name in ["base", "other", "top"] {
            drop_pages(&dir.file(name));
        }
    };
    for (before, command, files) in [
        ("create -q -f raw b 8M", "convert --copy buffers -n -f raw -O raw a.raw b", &["a.raw", "b"][..]),
        ("create -q -f qcow2 b 8M", "convert --copy buffers -n -f raw -O qcow2 a.raw b", &["a.raw", "b"]),
        ("create -q -f qcow2 -o cluster_size=512 b 8M", "convert -n -f raw -O qcow2 a.raw b", &["b"]),
        ("create -q -f raw b 1M", "convert --copy buffers -f raw -O raw a.raw b", &["b"]),
        ("create -q -f raw b 1M", "convert -f raw -O qcow2 -o cluster_size=512 a.raw b", &["b"]),
        ("create -q -f raw b 1M", "commit -q top", &["base", "top"]),
        ("create -q -f raw b 1M", "rebase -q -b other -F qcow2 top", &["base", "top", "other"]),
        ("create -q -f raw b 1M", "rebase -q -b '' top", &["base", "top"]),
        ("create -q -f raw b 1M", "clone -q base c", &["base", "c"]),
        ("create -q -f raw b 1M", "backup -q base c", &["base", "c"]),
    ] {
        scratch.zebu(&words(before)).ok();
        chain(&scratch);
        drop_pages(&scratch.file("b"));
        drop_pages(&scratch.file("a.raw"));
        let command: Vec<&str> =
            words(command).into_iter().map(|word| if word == "''" { "" } else { word }).collect();
        scratch.zebu(&command).ok();
        for name in files {
            // The first blocks are looked at to tell the format.
            let pages = cached_pages(&scratch.file(name));
            assert!(pages <= 32, "{command:?}: {pages} pages of {name}");
        }
        for name in ["b", "c", "base", "other", "top"] {
            let _ = std::fs::remove_file(scratch.file(name));
        }
    }
}

/// Pages of a file in the page cache.
fn pages(scratch: &Scratch, name: &str) -> u64 {
    let out = Command::new("fincore").args(["-n", "-o", "PAGES"]).arg(scratch.file(name)).output().unwrap();
    String::from_utf8_lossy(&out.stdout).trim().parse().unwrap()
}

/// Leaves the first `bytes` of a file in the page cache, and no more.
fn keep_in_cache(scratch: &Scratch, name: &str, bytes: u64) {
    let file = std::fs::File::open(scratch.file(name)).unwrap();
    file.sync_all().unwrap();
    // The kernel keeps pages that it has just read for a moment.
    for _ in 0..100 {
        rustix::fs::fadvise(&file, bytes, None::<std::num::NonZeroU64>, rustix::fs::Advice::DontNeed)
            .unwrap();
        if pages(scratch, name) <= bytes / 4096 {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
}

#[test]
fn a_source_is_read_past_the_page_cache_unless_it_is_there() {
    const SAID: &str = "reads of the source: O_DIRECT";
    let scratch = Scratch::new();
    for name in ["base", "a.raw"] {
        scratch.write(name, &noise(1, 8 << 20));
    }
    scratch.zebu(&words("convert -q -f raw -O qcow2 base base.qcow2")).ok();
    scratch.zebu(&words("create -q -f qcow2 -F qcow2 -b base.qcow2 top.qcow2")).ok();
    let takes_direct =
        scratch.zebu(&words("convert -v -f raw -O raw a.raw b.raw")).stderr.contains("target: O_DIRECT");
    keep_in_cache(&scratch, "a.raw", 0);
    let file = std::fs::File::open(scratch.file("a.raw")).unwrap();
    let is_known = zebu_storage::cached_bytes(file.as_fd()) == Some(0);
    let is_one_of_them = matches!(zebu_storage::file_system(&file), Ok(FsKind::Ext4 | FsKind::Xfs));
    if !takes_direct || !is_known || !is_one_of_them {
        eprintln!("skipped: the file system or the kernel is none for it");
        return;
    }
    for (command, source) in [
        ("convert -v -f raw -O qcow2 a.raw out", "a.raw"),
        ("dd -v -f raw -O raw bs=1M if=a.raw of=out", "a.raw"),
        ("convert -v -f qcow2 -O raw base.qcow2 out", "base.qcow2"),
        // The files of a chain count together.
        ("convert -v -f qcow2 -O raw top.qcow2 out", "base.qcow2"),
    ] {
        for (cached, is_direct) in [(0, true), (3 << 20, true), (5 << 20, false), (8 << 20, false)] {
            // All of it is read before some of it is dropped.
            std::fs::read(scratch.file(source)).unwrap();
            keep_in_cache(&scratch, source, cached);
            let before = pages(&scratch, source);
            let ran = scratch.zebu(&words(command)).ok();
            assert_eq!(ran.stderr.contains(SAID), is_direct, "{command}, {cached} bytes cached: {ran:#?}");
            // Of a look at its magic, some of what the kernel reads ahead stays; through the page cache, more does.
            let is_left_alone = pages(&scratch, source) <= before + 32;
            assert!(is_left_alone || !is_direct, "{command}, {cached} bytes cached");
            assert_eq!(pages(&scratch, "out"), 0, "{command}");
            std::fs::remove_file(scratch.file("out")).unwrap();
        }
        // Another mode is one that was asked for.
        if command.starts_with("convert") {
            keep_in_cache(&scratch, source, 0);
            let asked = command.replace("-v", "-v -T writeback");
            assert!(!scratch.zebu(&words(&asked)).ok().stderr.contains(SAID), "{asked}");
        }
    }
}
