//! `zebu check` against `qemu-img check`.

mod common;

use common::{Scratch, qemu, words};
use std::os::unix::fs::FileExt;

/// An image with two clusters of data, as QEMU lays it out: the refcount block at 0x20000, data from cluster 5 on.
fn image(scratch: &Scratch) {
    scratch.qemu_img(&words("create -q -f qcow2 a.qcow2 1M")).ok();
    scratch.qemu_io(&["-c", "write -P 1 0 128k", "a.qcow2"]).ok();
}

fn set_refcount(scratch: &Scratch, cluster: u64, refcount: u16) {
    let file = std::fs::OpenOptions::new().write(true).open(scratch.file("a.qcow2")).unwrap();
    file.write_all_at(&refcount.to_be_bytes(), 0x20000 + 2 * cluster).unwrap();
}

/// What damages an image, and the exit code of a check before it is repaired.
const DAMAGE: &[(&str, u64, u16, i32)] =
    &[("none", 5, 1, 0), ("leak", 9, 1, 3), ("shared", 5, 2, 2), ("free in use", 6, 0, 2)];

const REPORTED: &[&str] = &[
    "check-errors",
    "corruptions",
    "leaks",
    "total-clusters",
    "allocated-clusters",
    "fragmented-clusters",
    "compressed-clusters",
    "image-end-offset",
    "filename",
    "format",
];

#[test]
fn damage_has_qemus_code_and_numbers() {
    if !qemu() {
        return;
    }
    for &(what, cluster, refcount, code) in DAMAGE {
        let scratch = Scratch::new();
        image(&scratch);
        set_refcount(&scratch, cluster, refcount);
        let line = words("check --output=json a.qcow2");
        let (ours, theirs) = (scratch.zebu(&line), scratch.qemu_img(&line));
        assert_eq!((ours.code, theirs.code), (Some(code), Some(code)), "{what}: {ours:#?} {theirs:#?}");
        let (ours, theirs) = (ours.json(), theirs.json());
        for key in REPORTED {
            assert_eq!(ours.get(key), theirs.get(key), "{what}: {key}\n{ours:#}\n{theirs:#}");
        }
        let (ours, theirs) = (scratch.zebu(&["check", "a.qcow2"]), scratch.qemu_img(&["check", "a.qcow2"]));
        assert_eq!(ours.stdout, theirs.stdout, "{what}");
    }
}

#[test]
fn repairs_leave_what_qemu_finds_clean() {
    if !qemu() {
        return;
    }
    for &(what, cluster, refcount, _) in DAMAGE {
        let scratch = Scratch::new();
        image(&scratch);
        set_refcount(&scratch, cluster, refcount);
        let ran = scratch.zebu(&words("check -r all a.qcow2"));
        assert_eq!(ran.code, Some(0), "{what}: {ran:#?}");
        assert_eq!(
            ran.stdout.contains("The following inconsistencies were found and repaired:"),
            what != "none",
            "{ran:#?}"
        );
        assert!(ran.stdout.contains("No errors were found on the image."), "{ran:#?}");
        assert_eq!(scratch.qemu_img(&["check", "a.qcow2"]).code, Some(0), "{what}");
        scratch.qemu_io(&["-c", "read -P 1 0 128k", "a.qcow2"]).ok();
    }
}

#[test]
fn leaks_alone_are_repaired_on_request() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    image(&scratch);
    set_refcount(&scratch, 9, 1);
    let report = scratch.zebu(&words("check -r leaks --output=json a.qcow2")).ok().json();
    assert_eq!(report["leaks-fixed"], 1, "{report:#}");
    assert_eq!(scratch.qemu_img(&["check", "a.qcow2"]).code, Some(0));
}

#[test]
fn findings_go_to_standard_error() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    image(&scratch);
    set_refcount(&scratch, 9, 1);
    let ran = scratch.zebu(&words("check -q a.qcow2"));
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(3), ""));
    assert!(ran.stderr.contains('9'), "{ran:#?}");
}

#[test]
fn raw_images_have_no_checks() {
    let scratch = Scratch::new();
    scratch.write("a.raw", &[0; 4096]);
    scratch.write("empty", &[]);
    for line in ["check a.raw", "check -f raw a.raw", "check empty", "check --output json a.raw"] {
        scratch.zebu(&words(line)).fails_naming(63, &["This image format does not support checks"]);
    }
    scratch.zebu(&words("check -f qcow2 a.raw")).fails_naming(1, &["a.raw", "not in qcow2 format"]);
}

#[test]
fn contradictions_are_refused() {
    let scratch = Scratch::new();
    scratch.zebu(&words("create -q -f qcow2 a.qcow2 1M")).ok();
    for (line, named) in [
        ("check -U -r all a.qcow2", "-U"),
        ("check -r everything a.qcow2", "everything"),
        ("check --output=xml a.qcow2", "xml"),
        ("check", "FILENAME"),
    ] {
        scratch.zebu(&words(line)).fails_naming(1, &[named]);
    }
}
