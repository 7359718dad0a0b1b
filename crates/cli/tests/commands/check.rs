//! `zebu check` against `qemu-img check`.

use crate::common::{Scratch, qemu, words};
use std::os::unix::fs::FileExt;

/// An image with three clusters of data, as QEMU lays it out: the refcount block at 0x20000, the L2 table at 0x40000,
/// data in clusters 5 to 7.
fn image(scratch: &Scratch) {
    scratch.qemu_img(&words("create -q -f qcow2 a.qcow2 1M")).ok();
    scratch.qemu_io(&["-c", "write -P 1 0 192k", "a.qcow2"]).ok();
}

fn damage(scratch: &Scratch, damage: &Damage) {
    let file = std::fs::OpenOptions::new().write(true).open(scratch.file("a.qcow2")).unwrap();
    for (offset, bytes) in damage.writes {
        file.write_all_at(bytes, *offset).unwrap();
    }
}

/// The refcount of a cluster of [`image`].
const fn refcount(cluster: u64) -> u64 {
    0x20000 + 2 * cluster
}

struct Damage {
    what: &'static str,
    writes: &'static [(u64, &'static [u8])],
    /// Exit code of a check.
    code: i32,
}

const LEAK: Damage = Damage { what: "a link less", writes: &[(0x40010, &[0; 8])], code: 3 };

const DAMAGE: &[Damage] = &[
    Damage { what: "none", writes: &[], code: 0 },
    LEAK,
    Damage { what: "refcount too high", writes: &[(refcount(5), &[0, 2])], code: 2 },
    Damage { what: "refcount too low", writes: &[(refcount(6), &[0, 0])], code: 2 },
    Damage { what: "two links to one cluster", writes: &[(0x40010, &[0x80, 0, 0, 0, 0, 5, 0, 0])], code: 2 },
];

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
    for damaged in DAMAGE {
        let (what, code) = (damaged.what, damaged.code);
        let scratch = Scratch::new();
        image(&scratch);
        damage(&scratch, damaged);
        let line = words("check --output=json a.qcow2");
        let (ours, theirs) = (scratch.zebu(&line), scratch.qemu_img(&line));
        assert_eq!((ours.code, theirs.code), (Some(code), Some(code)), "{what}: {ours:#?} {theirs:#?}");
        let (ours, theirs) = (ours.json(), theirs.json());
        for key in REPORTED {
            assert_eq!(ours.get(key), theirs.get(key), "{what}: {key}\n{ours:#}\n{theirs:#}");
        }
        let (ours, theirs) = (scratch.zebu(&["check", "a.qcow2"]), scratch.qemu_img(&["check", "a.qcow2"]));
        assert_eq!(ours.stdout, theirs.stdout, "{what}");
        assert_eq!(ours.stderr.contains("`zebu check -r "), code != 0, "{what}: {}", ours.stderr);
    }
}

#[test]
fn repairs_leave_what_qemu_finds_clean() {
    if !qemu() {
        return;
    }
    for damaged in DAMAGE {
        let what = damaged.what;
        let scratch = Scratch::new();
        image(&scratch);
        damage(&scratch, damaged);
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
    damage(&scratch, &LEAK);
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
    damage(&scratch, &LEAK);
    let ran = scratch.zebu(&words("check -q a.qcow2"));
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(3), ""));
    assert!(ran.stderr.to_lowercase().contains("leak") && ran.stderr.contains('7'), "{ran:#?}");
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
        ("check --slice-size 4k a.qcow2", "slice"),
        ("check --zero-policy write a.qcow2", "zero"),
    ] {
        scratch.zebu(&words(line)).fails_naming(1, &[named]);
    }
}
