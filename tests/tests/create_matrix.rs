//! Images created by `zebu create` with every option: QEMU finds them clean, sees the options in them, can write them;
//! zebu reads what QEMU wrote. What QEMU refuses to create, zebu refuses too.

use serde_json::{Value, json};
use zebu_tests::model::difference;
use zebu_tests::mount::Mounted;
use zebu_tests::program::zebu;
use zebu_tests::qemu::Qemu;
use zebu_tests::scratch::Scratch;

const IMAGE: &str = "new.qcow2";

/// Creates an image with options (`size` as on the command line), and lets QEMU judge and use it. `expected` are
/// places in the JSON of `qemu-img info` and what must stand there.
fn create(options: &str, size: &str, expected: &[(&str, Value)]) {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("create");
    create_in(&qemu, &scratch, &["-o", options], size, expected);
}

fn create_in(qemu: &Qemu, scratch: &Scratch, words: &[&str], size: &str, expected: &[(&str, Value)]) {
    let dir = scratch.path();
    let command = ["create", "-q", "-f", "qcow2"].into_iter().chain(words.iter().copied());
    let out = zebu(dir, command.chain([IMAGE, size])).ok();
    assert_eq!((out.stdout.as_str(), out.stderr.as_str()), ("", ""), "-q, but it says something");
    qemu.check_clean(dir, IMAGE).unwrap_or_else(|e| panic!("{words:?}, as created: {e}"));
    let info = qemu.info(dir, IMAGE);
    for (place, value) in expected {
        assert_eq!(info.pointer(place), Some(value), "{words:?}: {place} in {info:#}");
    }
    let virtual_size = info["virtual-size"].as_u64().expect("a number");
    if virtual_size < 1 << 20 {
        return;
    }
    let last = virtual_size - 512;
    let commands = [
        "write -P 0x11 0 4096".to_owned(),
        "write -P 0x22 70000 70000".to_owned(),
        "write -z 65536 1000".to_owned(),
        format!("write -P 0x33 {last} 512"),
    ];
    let io = qemu.io(dir, "-f qcow2", IMAGE, &commands);
    assert!(io.code == Some(0), "{words:?}: {io}");
    qemu.check_clean(dir, IMAGE).unwrap_or_else(|e| panic!("{words:?}, after QEMU wrote: {e}"));
    zebu(dir, ["check", "-f", "qcow2", IMAGE]).ok();
    let expected = [(0, 0x11, 4096), (70_000, 0x22, 70_000), (last, 0x33, 512)];
    let reads = expected.map(|(offset, pattern, len)| format!("read -P {pattern} {offset} {len}"));
    let args = ["io", "-f", "qcow2", "-r", IMAGE, "-c", &reads[0], "-c", &reads[1], "-c", &reads[2]];
    zebu(dir, args).ok();
}

#[test]
fn cluster_sizes() {
    for bits in 9..=21 {
        let bytes = 1_u64 << bits;
        create(&format!("cluster_size={bytes}"), "10M", &[("/cluster-size", json!(bytes))]);
    }
}

#[test]
fn refcount_widths() {
    for width in [1, 2, 4, 8, 16, 32, 64] {
        let place = "/format-specific/data/refcount-bits";
        create(&format!("refcount_bits={width}"), "10M", &[(place, json!(width))]);
        create(&format!("refcount_bits={width},cluster_size=512"), "3M", &[(place, json!(width))]);
    }
}

#[test]
fn versions() {
    let place = "/format-specific/data/compat";
    for (compat, seen) in [("0.10", "0.10"), ("1.1", "1.1"), ("v2", "0.10"), ("v3", "1.1")] {
        create(&format!("compat={compat}"), "10M", &[(place, json!(seen))]);
    }
}

#[test]
fn sizes() {
    for (size, bytes) in [
        ("0", 0_u64),
        ("1", 512),
        ("512", 512),
        ("1048577", 1_049_088),
        ("1G", 1 << 30),
        ("10T", 10 << 40),
        ("0.5G", 1 << 29),
    ] {
        create("cluster_size=64k", size, &[("/virtual-size", json!(bytes))]);
    }
    create("cluster_size=2M", "1P", &[("/virtual-size", json!(1_u64 << 50))]);
}

#[test]
fn preallocation() {
    for mode in ["off", "metadata", "falloc", "full"] {
        for more in
            ["", ",cluster_size=4k", ",extended_l2=on", ",refcount_bits=64,cluster_size=512", ",compat=0.10"]
        {
            create(&format!("preallocation={mode}{more}"), "5M", &[]);
        }
        create(&format!("preallocation={mode},data_file=data.bin"), "5M", &[]);
    }
}

#[test]
fn preallocated_space_is_there() {
    use std::os::unix::fs::MetadataExt;
    for mode in ["falloc", "full"] {
        let scratch = Scratch::new("create");
        zebu(
            scratch.path(),
            ["create", "-q", "-f", "qcow2", "-o", &format!("preallocation={mode}"), IMAGE, "8M"],
        )
        .ok();
        let blocks = std::fs::metadata(scratch.file(IMAGE)).expect("it is there").blocks();
        assert!(blocks * 512 >= 8 << 20, "{mode}: {blocks} blocks");
    }
}

#[test]
fn compression_types() {
    let place = "/format-specific/data/compression-type";
    for name in ["zlib", "zstd"] {
        create(&format!("compression_type={name}"), "10M", &[(place, json!(name))]);
    }
}

#[test]
fn extended_l2() {
    for cluster in ["16k", "64k", "2M"] {
        let place = "/format-specific/data/extended-l2";
        create(&format!("extended_l2=on,cluster_size={cluster}"), "10M", &[(place, json!(true))]);
    }
}

#[test]
fn lazy_refcounts() {
    let place = "/format-specific/data/lazy-refcounts";
    create("lazy_refcounts=on", "10M", &[(place, json!(true))]);
    create("lazy_refcounts=off", "10M", &[(place, json!(false))]);
}

#[test]
fn data_files() {
    let place = |name: &str| format!("/format-specific/data/{name}");
    create(
        "data_file=data.bin",
        "10M",
        &[(&place("data-file"), json!("data.bin")), (&place("data-file-raw"), json!(false))],
    );
    create("data_file=data.bin,data_file_raw=on", "10M", &[(&place("data-file-raw"), json!(true))]);
}

#[test]
fn backing_files() {
    let Some(qemu) = Qemu::find() else { return };
    for (format, base) in [("raw", "base.raw"), ("qcow2", "base.qcow2")] {
        for version in ["0.10", "1.1"] {
            let scratch = Scratch::new("create");
            qemu.create(scratch.path(), base, format, "", 6 << 20);
            qemu.io(scratch.path(), &format!("-f {format}"), base, &["write -P 0x77 1M 2M"]).ok();
            let expected = [
                ("/backing-filename", json!(base)),
                ("/backing-filename-format", json!(format)),
                ("/virtual-size", json!(10 << 20)),
            ];
            let compat = format!("compat={version}");
            create_in(&qemu, &scratch, &["-o", &compat, "-b", base, "-F", format], "10M", &expected);
            zebu(scratch.path(), ["io", "-f", "qcow2", "-r", IMAGE, "-c", "read -P 0x77 1M 2M"]).ok();
            // The size of the backing file is the default.
            let options = format!("backing_file={base},backing_fmt={format}");
            zebu(scratch.path(), ["create", "-q", "-f", "qcow2", "-o", &options, "second.qcow2"]).ok();
            assert_eq!(qemu.info(scratch.path(), "second.qcow2")["virtual-size"], 6 << 20);
        }
    }
}

#[test]
fn raw_images() {
    let Some(qemu) = Qemu::find() else { return };
    for (mode, blocks) in [("off", 0), ("falloc", 2048), ("full", 2048)] {
        let scratch = Scratch::new("create");
        let options = format!("preallocation={mode}");
        zebu(scratch.path(), ["create", "-q", "-f", "raw", "-o", &options, "disk.raw", "1M"]).ok();
        let metadata = std::fs::metadata(scratch.file("disk.raw")).expect("it is there");
        assert_eq!(metadata.len(), 1 << 20);
        // A block at the front may be written so that alignment can be probed.
        assert!(std::os::unix::fs::MetadataExt::blocks(&metadata) >= blocks, "{mode}");
        let zeroes = vec![0; 1 << 20];
        let found = std::fs::read(scratch.file("disk.raw")).expect("readable");
        assert_eq!(difference(0, &zeroes, &found), None);
        assert_eq!(qemu.info(scratch.path(), "disk.raw")["format"], "raw");
    }
}

#[test]
fn an_extent_size_hint_reaches_xfs() {
    let Some(qemu) = Qemu::find() else { return };
    let Some(xfs) = Mounted::on_loop("mkfs.xfs", 512 << 20) else { return };
    let dir = xfs.path();
    zebu(&dir, ["create", "-q", "-f", "qcow2", "-o", "extent_size_hint=4M", IMAGE, "1G"]).ok();
    let info = qemu.info(&dir, IMAGE);
    let child = &info["children"][0]["info"]["format-specific"]["data"]["extent-size-hint"];
    assert_eq!(*child, 4 << 20, "{info:#}");
    qemu.check_clean(&dir, IMAGE).expect("clean");
}

#[test]
fn what_qemu_refuses_is_refused() {
    let Some(qemu) = Qemu::find() else { return };
    for (options, size) in [
        ("cluster_size=1000", "1M"),
        ("cluster_size=256", "1M"),
        ("cluster_size=4M", "1M"),
        ("cluster_size=0", "1M"),
        ("refcount_bits=3", "1M"),
        ("refcount_bits=128", "1M"),
        ("refcount_bits=0", "1M"),
        ("compat=0.10,refcount_bits=1", "1M"),
        ("compat=0.10,lazy_refcounts=on", "1M"),
        ("compat=0.10,compression_type=zstd", "1M"),
        ("compat=0.10,extended_l2=on", "1M"),
        ("compat=0.10,data_file=d.bin", "1M"),
        ("compat=2.0", "1M"),
        ("extended_l2=on,cluster_size=4k", "1M"),
        ("data_file_raw=on", "1M"),
        ("compression_type=lzma", "1M"),
        ("preallocation=some", "1M"),
        ("no_such_option=1", "1M"),
        ("lazy_refcounts=maybe", "1M"),
        ("cluster_size=512", "1T"),
        ("cluster_size=64k", "9E"),
        ("cluster_size=64k", "ten"),
        ("backing_file=missing.raw,backing_fmt=raw", ""),
        ("backing_file=base.raw", "1M"),
        ("backing_file=base.raw,backing_fmt=raw,preallocation=full", "1M"),
        ("backing_file=base.raw,backing_fmt=raw,data_file=d.bin,data_file_raw=on", "1M"),
        ("backing_file=base.raw,backing_fmt=nothing", "1M"),
    ] {
        let scratch = Scratch::new("create");
        qemu.create(scratch.path(), "base.raw", "raw", "", 1 << 20);
        let words = ["create", "-q", "-f", "qcow2", "-o", options, IMAGE, size];
        let words = words.into_iter().filter(|w| !w.is_empty());
        let judge = qemu.img(scratch.path(), words.clone());
        assert_eq!(judge.code, Some(1), "QEMU itself takes it: {judge}");
        let _ = std::fs::remove_file(scratch.file(IMAGE));
        let ours = zebu(scratch.path(), words);
        assert_eq!(ours.code, Some(1), "QEMU refuses: {judge}\n{ours}");
        assert_eq!(ours.stderr.lines().count(), 1, "more or less than one line: {ours}");
        assert!(!scratch.file(IMAGE).exists(), "left behind: {ours}");
    }
}
