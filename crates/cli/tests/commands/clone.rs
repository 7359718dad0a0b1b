//! `zebu clone`.

use crate::common::{Scratch, noise, qemu, words};

#[test]
fn clones_hold_what_their_source_holds() {
    if !qemu() {
        return;
    }
    for line in [
        "clone -f raw a.raw out",
        "clone a.qcow2 out",
        "clone --mode overlay -f raw a.raw out",
        "clone --mode overlay a.qcow2 out",
        "clone top.qcow2 out",
    ] {
        let scratch = Scratch::new();
        scratch.write("a.raw", &noise(1, 4 << 20));
        scratch.qemu_img(&words("convert -f raw -O qcow2 a.raw a.qcow2")).ok();
        scratch.qemu_img(&words("create -q -f qcow2 -b a.qcow2 -F qcow2 top.qcow2")).ok();
        let source = words(line).into_iter().rev().nth(1).unwrap();
        let ran = scratch.zebu(&words(line)).ok();
        assert!(ran.stdout.contains("reflink") || ran.stdout.contains("overlay"), "{line}: {ran:#?}");
        assert_eq!(scratch.qemu_img(&["compare", source, "out"]).code, Some(0), "{line}");
        let before = scratch.read(source);
        let format =
            if ran.stdout.contains("overlay") || source.ends_with("qcow2") { "qcow2" } else { "raw" };
        scratch.zebu(&["io", "-f", format, "-c", "write -P 9 1M 64k", "out"]).ok();
        assert_eq!(scratch.read(source), before, "{line}: the clone's write reached the source");
        assert_eq!(scratch.qemu_img(&["compare", source, "out"]).code, Some(1), "{line}");
    }
}

#[test]
fn nothing_is_overwritten() {
    let scratch = Scratch::new();
    scratch.zebu(&words("create -q -f qcow2 a.qcow2 1M")).ok();
    scratch.write("there", b"mine");
    scratch.zebu(&words("clone a.qcow2 there")).fails_naming(1, &["there"]);
    assert_eq!(scratch.read("there"), b"mine");
    scratch.zebu(&words("clone missing.qcow2 out")).fails_naming(1, &["missing.qcow2"]);
    assert!(!scratch.file("out").exists());
}

#[test]
fn programs_get_json() {
    let scratch = Scratch::new();
    scratch.zebu(&words("create -q -f qcow2 a.qcow2 1M")).ok();
    let report = scratch.zebu(&words("clone --mode overlay --output json a.qcow2 out")).ok().json();
    assert_eq!((&report["method"], &report["virtual-size"]), (&"overlay".into(), &(1 << 20).into()));
    assert_eq!(scratch.zebu(&words("clone -q a.qcow2 out2")).ok().stdout, "");
}

/// Whether the file system of the tests shares blocks is not known, but such images are never shared.
#[test]
fn a_reflink_that_can_not_be_is_an_error_and_no_overlay() {
    let scratch = Scratch::new();
    scratch.zebu(&words("create -q -f qcow2 a.qcow2 1M")).ok();
    scratch.zebu(&words("create -q -f qcow2 -b a.qcow2 -F qcow2 top.qcow2")).ok();
    scratch.zebu(&words("create -q -f qcow2 -o data_file=data split.qcow2 1M")).ok();
    for (source, reason) in [("top.qcow2", "backing file"), ("split.qcow2", "data file")] {
        let ran = scratch.zebu(&["clone", "--mode", "reflink", source, "out"]);
        ran.fails_naming(1, &["Could not clone", source, "reflink", reason]);
        let mut names: Vec<_> =
            std::fs::read_dir(scratch.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["a.qcow2", "data", "split.qcow2", "top.qcow2"]);
        // The way that was taken is told, and why, to people and to programs.
        let ran = scratch.zebu(&["clone", source, "out"]).ok();
        assert!(ran.stdout.contains("overlay") && ran.stdout.contains(reason), "{ran:#?}");
        let report = scratch.zebu(&["clone", "--output", "json", source, "again"]).ok().json();
        assert_eq!(report["method"], "overlay");
        assert!(report["reason"].as_str().unwrap().contains(reason), "{report}");
        for name in ["out", "again"] {
            std::fs::remove_file(scratch.file(name)).unwrap();
        }
    }
    let ran = scratch.zebu(&words("clone --mode reflink a.qcow2 out"));
    if ran.code == Some(0) {
        assert!(ran.stdout.contains("by reflink"), "{ran:#?}");
    } else {
        ran.fails_naming(1, &["Could not clone", "a.qcow2", "reflink"]);
        assert!(!scratch.file("out").exists());
    }
}
