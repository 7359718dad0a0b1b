//! `zebu convert` against `qemu-img convert`, and its own promises.

mod conflicts;
mod endings;
mod messages;
mod page_cache;
mod pipes;
mod reproducible;
mod targets;

use crate::common::{Scratch, noise, words};

/// An image with data, zeroes, holes, a compressed cluster and a snapshot.
pub(crate) fn source(scratch: &Scratch) {
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
pub(crate) fn identical(scratch: &Scratch, a: &str, b: &str) {
    let ran = scratch.qemu_img(&["compare", a, b]);
    assert_eq!(ran.code, Some(0), "{a} {b}: {ran:#?}");
}

/// Files in the directory that a test did not name.
pub(crate) fn left_over(scratch: &Scratch) -> Vec<String> {
    let known = ["a.qcow2", "noise", "reference.raw", "data.raw", "out", "big.raw"];
    let mut names: Vec<String> = std::fs::read_dir(scratch.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| !known.contains(&name.as_str()))
        .collect();
    names.sort();
    names
}
