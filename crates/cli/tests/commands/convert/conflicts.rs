//! Targets that are files of the source, or in use.

use crate::common::{Background, Scratch, noise, qemu, words};

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
