//! Files that are no images, or can't be used now: one line that names the file and what to do, and qemu-img's code.

mod common;

use common::{Background, Scratch, qemu, words};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::process::Command;

/// Commands that read the image `FILE`.
const READERS: &[&str] = &[
    "info FILE",
    "info --output=json FILE",
    "map FILE",
    "measure -O qcow2 FILE",
    "convert -O raw FILE out",
    "compare FILE FILE",
    "bench -c 1 FILE",
    "check FILE",
];

#[track_caller]
fn same_code(scratch: &Scratch, line: &str, file: &str, named: &[&str]) {
    let line = line.replace("FILE", file);
    let ran = scratch.zebu(&words(&line));
    let code = scratch.qemu_img(&words(&line)).code.unwrap();
    assert_ne!(code, 0, "{line}: QEMU has nothing against it");
    ran.fails_naming(code, named);
    assert!(!scratch.file("out").exists(), "{line} left something behind");
}

#[test]
fn names_that_lead_to_no_image() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    std::fs::create_dir(scratch.file("directory")).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(scratch.file("socket")).unwrap();
    assert!(Command::new("mkfifo").arg(scratch.file("fifo")).status().unwrap().success());
    for (file, words) in [
        ("missing.qcow2", "No such file or directory"),
        ("directory", "directory"),
        ("socket", "socket"),
        ("fifo", "FIFO"),
        ("missing/a.qcow2", "No such file or directory"),
    ] {
        for line in READERS {
            // QEMU waits for somebody to write into a FIFO; nobody does.
            if file == "fifo" {
                let ran = scratch.zebu(&common::words(&line.replace("FILE", file)));
                let code = if line.starts_with("compare") { 2 } else { 1 };
                ran.fails_naming(code, &[file, words]);
            } else {
                same_code(&scratch, line, file, &[file, words]);
            }
        }
        for line in ["resize FILE 1M", "io -c length FILE", "clone FILE out"] {
            let ran = scratch.zebu(&common::words(&line.replace("FILE", file)));
            ran.fails_naming(1, &[file, words]);
        }
    }
}

#[test]
fn a_file_of_no_bytes() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    scratch.write("empty", b"");
    for line in READERS.iter().filter(|line| !line.starts_with("check")) {
        let line = line.replace("FILE", "empty");
        let (ours, theirs) = (scratch.zebu(&words(&line)), scratch.qemu_img(&words(&line)));
        assert_eq!(ours.code, theirs.code, "{line}: {ours:#?} {theirs:#?}");
    }
    std::fs::remove_file(scratch.file("out")).unwrap();
    for line in ["info -f qcow2 FILE", "convert -f qcow2 FILE out", "check -f qcow2 FILE"] {
        same_code(&scratch, line, "empty", &["empty", "not in qcow2 format"]);
    }
}

#[test]
fn files_without_permission() {
    // To root, permissions mean nothing: the command runs as nobody then.
    let scratch = Scratch::new();
    scratch.zebu(&words("create -q -f qcow2 a.qcow2 1M")).ok();
    scratch.write("readable.qcow2", &scratch.read("a.qcow2"));
    std::fs::set_permissions(scratch.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    std::fs::set_permissions(scratch.file("a.qcow2"), std::fs::Permissions::from_mode(0o000)).unwrap();
    std::fs::set_permissions(scratch.file("readable.qcow2"), std::fs::Permissions::from_mode(0o444)).unwrap();
    let copy = scratch.file("zebu-copy");
    std::fs::copy(env!("CARGO_BIN_EXE_zebu"), &copy).unwrap();
    let copy = copy.to_str().unwrap();
    let is_root = Command::new("id").arg("-u").output().is_ok_and(|output| output.stdout == b"0\n");
    let run = |line: &str| {
        let arguments = words(line);
        if is_root {
            let all =
                [&["--reuid=65534", "--regid=65534", "--clear-groups", copy], arguments.as_slice()].concat();
            scratch.run("setpriv", &all)
        } else {
            scratch.run(copy, &arguments)
        }
    };
    run("info a.qcow2").fails_naming(1, &["a.qcow2", "Permission denied"]);
    run("check a.qcow2").fails_naming(1, &["a.qcow2", "Permission denied"]);
    run("convert a.qcow2 out").fails_naming(1, &["a.qcow2", "Permission denied"]);
    run("compare a.qcow2 a.qcow2").fails_naming(2, &["a.qcow2", "Permission denied"]);
    run("info readable.qcow2").ok();
    run("resize readable.qcow2 2M").fails_naming(1, &["readable.qcow2", "Permission denied"]);
    run("check -r all readable.qcow2").fails_naming(1, &["readable.qcow2", "Permission denied"]);
    run("convert readable.qcow2 out").fails_naming(1, &["out", "Permission denied"]);
    run("create -q -f qcow2 out 1M").fails_naming(1, &["out", "Permission denied"]);
}

#[test]
fn an_image_that_qemu_writes_is_left_alone() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    scratch.qemu_img(&words("create -q -f qcow2 used.qcow2 1M")).ok();
    let _machine = Background::with_prompt(scratch.command("qemu-io", &words("used.qcow2")), "qemu-io> ");
    let writers = ["resize FILE 2M", "check -r all FILE", "create -f qcow2 FILE 2M"];
    for line in READERS.iter().chain(&writers) {
        same_code(&scratch, line, "used.qcow2", &["used.qcow2", "nother process"]);
    }
    // Looking at it all the same is allowed, on request.
    for line in [
        "info -U FILE",
        "map -U FILE",
        "check -U FILE",
        "measure -U -O qcow2 FILE",
        "convert -U -O raw FILE out",
    ] {
        scratch.zebu(&words(&line.replace("FILE", "used.qcow2"))).ok();
    }
    let info = scratch.qemu_img(&words("info -U --output=json used.qcow2")).ok().json();
    assert_eq!(info["virtual-size"], 1 << 20);
}

#[test]
fn an_image_that_zebu_writes_is_left_alone_by_qemu() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    scratch.qemu_img(&words("create -q -f qcow2 used.qcow2 1M")).ok();
    let writer = scratch.command(env!("CARGO_BIN_EXE_zebu"), &words("io used.qcow2"));
    let _writer = Background::with_prompt(writer, "zebu> ");
    let ran = scratch.qemu_img(&words("resize used.qcow2 2M"));
    assert!(ran.stderr.contains("lock"), "{ran:#?}");
    scratch.zebu(&words("resize used.qcow2 2M")).fails_naming(1, &["used.qcow2"]);
}

#[test]
fn damaged_headers() {
    if !qemu() {
        return;
    }
    for (what, offset, bytes) in [
        ("magic", 0, &[0u8; 4][..]),
        ("version", 4, &[0, 0, 0, 9]),
        ("cluster bits", 20, &[0, 0, 0, 40]),
        ("L1 size", 36, &[0xff, 0xff, 0xff, 0xff]),
        ("refcount order", 96, &[0, 0, 0, 7]),
        ("header length", 100, &[0xff, 0xff, 0xff, 0xff]),
        ("incompatible features", 72, &[0x80, 0, 0, 0, 0, 0, 0, 0]),
    ] {
        let scratch = Scratch::new();
        scratch.qemu_img(&words("create -q -f qcow2 a.qcow2 1M")).ok();
        let file = std::fs::OpenOptions::new().write(true).open(scratch.file("a.qcow2")).unwrap();
        file.write_all_at(bytes, offset).unwrap();
        for line in [
            "info -f qcow2 FILE",
            "convert -f qcow2 FILE out",
            "check -f qcow2 FILE",
            "compare -f qcow2 FILE FILE",
        ] {
            same_code(&scratch, line, "a.qcow2", &["a.qcow2"]);
        }
        let ran = scratch.zebu(&words("info -f qcow2 a.qcow2"));
        assert!(!ran.stderr.contains("panicked"), "{what}: {ran:#?}");
    }
}

#[test]
fn truncated_images() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    scratch.qemu_img(&words("create -q -f qcow2 a.qcow2 1M")).ok();
    scratch.qemu_io(&["-c", "write -P 1 0 1M", "a.qcow2"]).ok();
    let whole = scratch.read("a.qcow2");
    for length in [3, 4, 71, 72, 103, 104, 512, 65536, 131_072, 196_608, 262_144, whole.len() - 70_000] {
        scratch.write("a.qcow2", &whole[..length]);
        for line in ["info -f qcow2 a.qcow2", "convert -f qcow2 -O raw a.qcow2 out", "check -f qcow2 a.qcow2"]
        {
            let (ours, theirs) = (scratch.zebu(&words(line)), scratch.qemu_img(&words(line)));
            assert!(ours.code.is_some(), "{line} at {length}: {ours:#?}");
            assert!(!ours.stderr.contains("panicked"), "{line} at {length}: {ours:#?}");
            // What QEMU takes for zeroes, zebu may take for what it is: lost.
            assert!(
                ours.code != Some(0) || theirs.code == Some(0),
                "{line} at {length}: {ours:#?} {theirs:#?}"
            );
        }
    }
}

#[test]
fn chains_that_bite_their_tail() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    scratch.qemu_img(&words("create -q -f qcow2 -u -b b.qcow2 -F qcow2 a.qcow2 1M")).ok();
    scratch.qemu_img(&words("create -q -f qcow2 -u -b a.qcow2 -F qcow2 b.qcow2 1M")).ok();
    scratch.zebu(&words("info a.qcow2")).ok();
    for line in ["info --backing-chain a.qcow2", "convert a.qcow2 out", "map a.qcow2"] {
        scratch.zebu(&words(line)).fails_naming(1, &["qcow2"]);
    }
}

#[test]
fn full_disks() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    scratch.qemu_img(&words("create -q -f qcow2 a.qcow2 4M")).ok();
    scratch.qemu_io(&["-c", "write -P 1 0 4M", "a.qcow2"]).ok();
    // A limit on the size of files stands for a full disk: the write fails with EFBIG.
    let script = format!(
        "trap '' XFSZ; ulimit -f 1024; exec {} convert -O raw a.qcow2 out",
        env!("CARGO_BIN_EXE_zebu")
    );
    scratch.run("bash", &["-c", &script]).fails_naming(1, &["out"]);
    assert!(!scratch.file("out").exists());
}
