//! `zebu bitmap`: what the tests of backups do not try.

use crate::common::{Scratch, words};

#[test]
fn all_bitmaps_are_removed_at_once() {
    let scratch = Scratch::new();
    let names = || {
        let info = scratch.zebu(&words("info --output json a.qcow2")).ok().json();
        let bitmaps = info["format-specific"]["data"]["bitmaps"].as_array().cloned().unwrap_or_default();
        bitmaps.iter().map(|bitmap| bitmap["name"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    scratch.zebu(&words("create -q -f qcow2 a.qcow2 1M")).ok();
    for name in ["x", "y", "z"] {
        scratch.zebu(&["bitmap", "--add", "a.qcow2", name]).ok();
    }
    assert_eq!(names().len(), 3);
    // As QEMU 11: a name only where another action needs it.
    scratch.zebu(&words("bitmap --remove-all a.qcow2 x")).fails_naming(1, &["Expecting filename"]);
    scratch.zebu(&words("bitmap --remove-all --add a.qcow2")).fails_naming(1, &["bitmap name"]);
    scratch.zebu(&words("bitmap --add a.qcow2")).fails_naming(1, &["bitmap name"]);
    assert_eq!(names().len(), 3);
    scratch.zebu(&words("bitmap --remove-all --add a.qcow2 new")).ok();
    assert_eq!(names(), ["new"]);
    for _ in 0..2 {
        scratch.zebu(&words("bitmap --remove-all a.qcow2")).ok();
        assert!(names().is_empty());
    }
    scratch.zebu(&words("check a.qcow2")).ok();
}
