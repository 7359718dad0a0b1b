//! Reads and writes past the page cache.

use crate::common::{Scratch, noise, wait_for, words};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::Command;
use zebu_storage::FsKind;

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
        ("dd -f raw -O raw if=a.raw of=b", false),
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

/// Leaves the first `bytes` of a file in the page cache, and no more.
fn keep_in_cache(scratch: &Scratch, name: &str, bytes: u64) {
    let file = std::fs::File::open(scratch.file(name)).unwrap();
    file.sync_all().unwrap();
    let is_kept = || {
        rustix::fs::fadvise(&file, bytes, None::<std::num::NonZeroU64>, rustix::fs::Advice::DontNeed)
            .unwrap();
        cached_pages(&scratch.file(name)) <= bytes / 4096
    };
    // The kernel keeps pages that it has just read for a while. File systems in memory keep all.
    if !is_kept() && matches!(zebu_storage::file_system(&file), Ok(FsKind::Ext4 | FsKind::Xfs)) {
        wait_for("pages to be dropped", is_kept);
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
            let before = cached_pages(&scratch.file(source));
            let ran = scratch.zebu(&words(command)).ok();
            assert_eq!(ran.stderr.contains(SAID), is_direct, "{command}, {cached} bytes cached: {ran:#?}");
            // Of a look at its magic, some of what the kernel reads ahead stays; through the page cache, more does.
            let is_left_alone = cached_pages(&scratch.file(source)) <= before + 32;
            assert!(is_left_alone || !is_direct, "{command}, {cached} bytes cached");
            assert_eq!(cached_pages(&scratch.file("out")), 0, "{command}");
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
