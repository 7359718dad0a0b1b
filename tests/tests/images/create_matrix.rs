//! Images created by `zebu create` with every option: QEMU finds them clean, sees the options in them, can write them;
//! zebu reads what QEMU wrote. What QEMU refuses to create, zebu refuses too.

use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use zebu_tests::model::difference;
use zebu_tests::mount::Mounted;
use zebu_tests::program::{find, run_in, zebu};
use zebu_tests::qemu::Qemu;
use zebu_tests::random::Random;
use zebu_tests::scratch::Scratch;
use zebu_tests::server::Server;

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

/// Creates an image with `-o options` that can't be had; the one line of the error has all of `words`.
fn refused(dir: &Path, format: &str, options: &str, size: &str, words: &[&str]) {
    let out = zebu(dir, ["create", "-q", "-f", format, "-o", options, IMAGE, size]).exits(1);
    assert_eq!(out.stderr.lines().count(), 1, "{out}");
    for word in words.iter().chain(&[IMAGE]) {
        assert!(out.stderr.contains(word), "{word} is missing: {out}");
    }
    assert!(!dir.join(IMAGE).exists(), "left behind: {out}");
}

#[test]
fn a_file_system_that_reserves_nothing_says_what_to_use() {
    // ext2 has no extents, so it can't reserve space.
    let Some(ext2) = Mounted::on_loop("mkfs.ext2", 64 << 20) else { return };
    let dir = ext2.path();
    for (format, instead) in [("qcow2", "preallocation=full or metadata"), ("raw", "preallocation=full")] {
        let words = ["can't reserve space (fallocate)", instead];
        refused(&dir, format, "preallocation=falloc", "4M", &words);
        // Nor does a disk grow by what can't be had.
        zebu(&dir, ["create", "-q", "-f", format, IMAGE, "1M"]).ok();
        let grow = ["resize", "-q", "-f", format, "--preallocation=falloc", IMAGE, "4M"];
        let out = zebu(&dir, grow).exits(1);
        assert!([IMAGE, words[0], words[1]].iter().all(|word| out.stderr.contains(word)), "{out}");
        assert_eq!(info(&dir)["virtual-size"], 1 << 20);
        std::fs::remove_file(dir.join(IMAGE)).expect("it is ours");
        let full = ["create", "-q", "-f", format, "-o", "preallocation=full", IMAGE, "4M"];
        zebu(&dir, full).ok();
        std::fs::remove_file(dir.join(IMAGE)).expect("it is ours");
    }
}

#[test]
fn a_file_system_that_is_too_small_says_what_to_use() {
    let Some(ext4) = Mounted::on_loop("mkfs.ext4", 64 << 20) else { return };
    let Some(tmpfs) = Mounted::tmpfs(16 << 20) else { return };
    for dir in [ext4.path(), tmpfs.path()] {
        for (format, instead) in [("qcow2", "preallocation=off or metadata"), ("raw", "preallocation=off")] {
            let words = ["the file system is full", "free some space", instead];
            for mode in ["full", "falloc"] {
                refused(&dir, format, &format!("preallocation={mode}"), "1G", &words);
                zebu(&dir, ["create", "-q", "-f", format, IMAGE, "1M"]).ok();
                let option = format!("--preallocation={mode}");
                let out = zebu(&dir, ["resize", "-q", "-f", format, &option, IMAGE, "1G"]).exits(1);
                assert!(words.iter().chain(&[IMAGE]).all(|word| out.stderr.contains(word)), "{out}");
                assert_eq!(info(&dir)["virtual-size"], 1 << 20);
                if format == "qcow2" {
                    zebu(&dir, ["check", "-q", IMAGE]).ok();
                }
                std::fs::remove_file(dir.join(IMAGE)).expect("it is ours");
            }
        }
        zebu(&dir, ["create", "-q", "-f", "qcow2", "-o", "preallocation=metadata", IMAGE, "1G"]).ok();
        zebu(&dir, ["check", "-q", IMAGE]).ok();
    }
}

fn info(dir: &Path) -> Value {
    let out = zebu(dir, ["info", "--output=json", IMAGE]).ok();
    serde_json::from_str(&out.stdout).expect("zebu prints JSON")
}

/// The hint of the image's file in bytes, as zebu, QEMU and XFS itself tell it.
fn hint(qemu: &Qemu, dir: &Path) -> u64 {
    let told = |info: &Value| {
        let place = "/children/0/info/format-specific/data/extent-size-hint";
        info.pointer(place).map_or(0, |bytes| bytes.as_u64().expect("a number"))
    };
    let found = told(&info(dir));
    assert_eq!(told(&qemu.info(dir, IMAGE)), found, "QEMU sees another one");
    let words = zebu(dir, ["info", IMAGE]).ok();
    assert_eq!(words.stdout.contains(&format!("extent size hint: {found}\n")), found != 0, "{words}");
    let out = run_in(dir, &xfs_io(), ["-r", "-c", "extsize", IMAGE]).ok();
    assert!(out.stdout.starts_with(&format!("[{found}] ")), "{found}: {out}");
    found
}

fn xfs_io() -> PathBuf {
    find("xfs_io").expect("xfs_io is missing: `cargo xtask setup` installs it")
}

/// A copy by reflink has the hint of its source.
#[test]
fn reflinked_copies_keep_the_extent_size_hint_on_xfs() {
    let Some(qemu) = Qemu::find() else { return };
    let Some(xfs) = Mounted::on_loop("mkfs.xfs", 512 << 20) else { return };
    let dir = &xfs.path();
    zebu(dir, ["create", "-q", "-f", "qcow2", "-o", "extent_size_hint=2M", "source", "1G"]).ok();
    qemu.io(dir, "-f qcow2", "source", &["write -q 0 10M"]).ok();
    zebu(dir, ["clone", "-q", "-f", "qcow2", "--mode", "reflink", "source", IMAGE]).ok();
    assert_eq!(hint(&qemu, dir), 2 << 20);
    std::fs::remove_file(dir.join(IMAGE)).expect("it is ours");
    let server = Server::start(dir, "--control ctl.sock -f qcow2 source");
    zebu(dir, ["ctl", "ctl.sock", "snapshot-create", "", "--to", IMAGE]).ok();
    server.stop();
    assert_eq!(hint(&qemu, dir), 2 << 20);
}

/// First writes to a copy by reflink, in any order, leave it in fewer pieces than those to a copy without the hint.
#[test]
fn reflinked_copies_stay_in_few_pieces_on_xfs() {
    let Some(qemu) = Qemu::find() else { return };
    let Some(xfs) = Mounted::on_loop("mkfs.xfs", 512 << 20) else { return };
    let dir = &xfs.path();
    std::fs::write(dir.join("source"), vec![7; 16 << 20]).unwrap();
    zebu(dir, ["clone", "-q", "-f", "raw", "--mode", "reflink", "source", "clone"]).ok();
    let server = Server::start(dir, "--control ctl.sock -f raw source");
    zebu(dir, ["ctl", "ctl.sock", "snapshot-create", "", "--to", "snapshot"]).ok();
    server.stop();
    run_in(dir, &find("cp").unwrap(), ["--reflink=always", "source", "plain"]).ok();
    // Every block once, in any order.
    let mut random = Random::new(1);
    let mut order: Vec<u64> = (0..4096).collect();
    (1..order.len()).for_each(|last| order.swap(last, random.below(last as u64 + 1) as usize));
    let writes: Vec<String> =
        order.iter().map(|block| format!("write -q -P 9 {} 4k", block * 4096)).collect();
    let pieces = |name: &str| {
        qemu.io(dir, "-f raw -t none", name, &writes);
        let out = run_in(dir, &xfs_io(), ["-r", "-c", "fiemap", name]).ok();
        out.stdout.lines().count() - 1
    };
    let (plain, clone, snapshot) = (pieces("plain"), pieces("clone"), pieces("snapshot"));
    assert!(2 * clone < plain && 2 * snapshot < plain, "{plain}, {clone} and {snapshot} pieces");
}

#[test]
fn extent_size_hints_on_xfs() {
    let Some(qemu) = Qemu::find() else { return };
    let Some(xfs) = Mounted::on_loop("mkfs.xfs", 512 << 20) else { return };
    let inheriting = xfs.path().join("inheriting");
    std::fs::create_dir(&inheriting).expect("writable");
    run_in(&inheriting, &xfs_io(), ["-c", "extsize 2m", "."]).ok();
    for dir in [xfs.path(), inheriting] {
        for (options, bytes) in [
            ("size=1G", 1 << 20),
            ("extent_size_hint=4M", 4 << 20),
            ("extent_size_hint=64k", 64 << 10),
            ("extent_size_hint=0", 0),
        ] {
            for format in ["qcow2", "raw"] {
                let size = if options == "size=1G" { None } else { Some("1G") };
                let words = ["create", "-q", "-f", format, "-o", options, IMAGE].into_iter().chain(size);
                zebu(&dir, words).ok();
                assert_eq!(hint(&qemu, &dir), bytes, "{options} in {}", dir.display());
                if format == "qcow2" {
                    qemu.check_clean(&dir, IMAGE).expect("clean");
                }
                std::fs::remove_file(dir.join(IMAGE)).expect("it is ours");
            }
        }
        for bad in ["extent_size_hint=5000", "extent_size_hint=1G"] {
            refused(
                &dir,
                "qcow2",
                bad,
                "1G",
                &["multiple of the file system's block size", "Invalid argument"],
            );
        }
    }
}

#[test]
fn extent_size_hints_elsewhere() {
    let Some(ext4) = Mounted::on_loop("mkfs.ext4", 64 << 20) else { return };
    refused(&ext4.path(), "qcow2", "extent_size_hint=1M", "1G", &["extent size hint", "XFS", "leave it out"]);
    zebu(&ext4.path(), ["create", "-q", "-f", "qcow2", "-o", "extent_size_hint=0", IMAGE, "1G"]).ok();
}

#[test]
fn nocow_counts_on_btrfs_and_means_nothing_elsewhere() {
    let Some(btrfs) = Mounted::on_loop("mkfs.btrfs", 256 << 20) else { return };
    let Some(ext4) = Mounted::on_loop("mkfs.ext4", 64 << 20) else { return };
    for (dir, on_btrfs) in [(btrfs.path(), true), (ext4.path(), false)] {
        for (format, option) in [("qcow2", "on"), ("raw", "on"), ("qcow2", "off")] {
            let option_text = format!("nocow={option}");
            zebu(&dir, ["create", "-q", "-f", format, "-o", &option_text, IMAGE, "64M"]).ok();
            let lsattr = find("lsattr").expect("lsattr is missing: `cargo xtask setup` installs it");
            let out = run_in(&dir, &lsattr, [IMAGE]).ok();
            let flags = out.stdout.split_whitespace().next().unwrap_or_default();
            assert_eq!(flags.contains('C'), on_btrfs && option == "on", "{out}");
            std::fs::remove_file(dir.join(IMAGE)).expect("it is ours");
        }
    }
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
