//! `zebu resize` against `qemu-img resize`.

use crate::common::{Background, Scratch, noise, qemu, send, wait_for, words};
use rustix::process::Signal;
use std::os::unix::fs::MetadataExt;

#[test]
fn sizes_messages_and_codes_are_qemus() {
    if !qemu() {
        return;
    }
    for (image, line) in [
        ("a.qcow2", "resize a.qcow2 128M"),
        ("a.qcow2", "resize a.qcow2 +1M"),
        ("a.qcow2", "resize -q a.qcow2 +1M"),
        ("a.qcow2", "resize a.qcow2 1M"),
        ("a.qcow2", "resize --shrink a.qcow2 1M"),
        ("a.qcow2", "resize --shrink a.qcow2 -63M"),
        ("a.qcow2", "resize --shrink a.qcow2 -65M"),
        ("a.qcow2", "resize --preallocation=metadata a.qcow2 +3M"),
        ("a.qcow2", "resize --preallocation=full a.qcow2 +3M"),
        ("a.qcow2", "resize --preallocation=most a.qcow2 +3M"),
        ("a.qcow2", "resize a.qcow2 +1x"),
        ("a.qcow2", "resize a.qcow2 100000001"),
        ("a.qcow2", "resize a.qcow2 +1"),
        ("a.qcow2", "resize --shrink a.qcow2 1000001"),
        ("a.qcow2", "amend -o size=100000001 a.qcow2"),
        ("a.qcow2", "resize --preallocation=falloc a.qcow2 64M"),
        ("a.qcow2", "resize --preallocation=falloc a.qcow2 1M"),
        ("a.raw", "resize -f raw a.raw 2000001"),
        ("a.raw", "resize -f raw --preallocation=full a.raw 1M"),
        ("a.qcow2", "resize a.qcow2"),
        ("a.qcow2", "resize missing.qcow2 1M"),
        ("a.raw", "resize -f raw a.raw 2M"),
        ("a.raw", "resize -f raw --shrink a.raw 512k"),
        ("a.raw", "resize -f raw --preallocation=falloc a.raw +1M"),
        ("top.qcow2", "resize top.qcow2 70M"),
    ] {
        let (ours, theirs) = (Scratch::new(), Scratch::new());
        for scratch in [&ours, &theirs] {
            scratch.qemu_img(&words("create -q -f qcow2 a.qcow2 64M")).ok();
            scratch.qemu_io(&["-c", "write -P 1 0 2M", "a.qcow2"]).ok();
            scratch.write("a.raw", &noise(1, 1 << 20));
            scratch.write("base.raw", &noise(2, 1 << 20));
            scratch.qemu_img(&words("create -q -f qcow2 -b base.raw -F raw top.qcow2 512k")).ok();
        }
        let (own, other) = (ours.zebu(&words(line)), theirs.qemu_img(&words(line)));
        assert_eq!(own.code, other.code, "{line}: {own:#?} {other:#?}");
        assert_eq!(own.stdout, other.stdout, "{line}");
        let compare = ours.qemu_img(&["compare", "-s", image, theirs.file(image).to_str().unwrap()]);
        // With -s, what is allocated may differ: clusters that zebu gives back at once, QEMU may keep.
        let compare = if compare.stdout.contains("block status") {
            ours.qemu_img(&["compare", image, theirs.file(image).to_str().unwrap()])
        } else {
            compare
        };
        assert_eq!(compare.code, Some(0), "{line}: {compare:#?}");
        if image.ends_with("qcow2") {
            assert_eq!(ours.qemu_img(&["check", image]).code, Some(0), "{line}");
        }
    }
}

#[test]
fn shrinking_needs_a_word() {
    let scratch = Scratch::new();
    scratch.zebu(&words("create -q -f qcow2 a.qcow2 64M")).ok();
    scratch.zebu(&words("resize a.qcow2 1M")).fails_naming(1, &["--shrink", "a.qcow2"]);
    assert_eq!(scratch.zebu(&words("info --output json a.qcow2")).ok().json()["virtual-size"], 64 << 20);
}

#[test]
fn a_raw_image_must_be_called_one() {
    let scratch = Scratch::new();
    scratch.write("a.raw", &[0; 4096]);
    scratch.zebu(&words("resize a.raw 1M")).fails_naming(1, &["a.raw", "raw"]);
    assert_eq!(scratch.read("a.raw").len(), 4096);
}

#[test]
fn progress_is_shown_on_request() {
    let scratch = Scratch::new();
    scratch.zebu(&words("create -q -f qcow2 a.qcow2 1M")).ok();
    let ran = scratch.zebu(&words("resize --preallocation=full --progress=json a.qcow2 8M")).ok();
    let last: serde_json::Value = serde_json::from_str(ran.stderr.lines().last().unwrap()).unwrap();
    assert_eq!((&last["done"], &last["total"]), (&(8 << 20).into(), &(8 << 20).into()), "{ran:#?}");
    let ran = scratch.zebu(&words("resize -p a.qcow2 9M")).ok();
    assert_eq!(ran.stdout, "    (0.00/100%)\r    (100.00/100%)\r\nImage resized.\n");
    assert_eq!(scratch.zebu(&words("resize -q -p a.qcow2 10M")).ok().stdout, "");
}

#[test]
fn a_signal_leaves_the_disk_as_it_was() {
    for (format, name) in [("qcow2", "a.qcow2"), ("raw", "a.raw")] {
        let scratch = Scratch::new();
        scratch.zebu(&words(&format!("create -q -f {format} {name} 1M"))).ok();
        scratch
            .zebu(
                &words(&format!("io -f {format} {name} -c"))
                    .into_iter()
                    .chain(["write -P 9 0 1M"])
                    .collect::<Vec<_>>(),
            )
            .ok();
        let line = format!("resize -f {format} --preallocation=full {name} +64G");
        let mut child = Background::start(&mut scratch.command(env!("CARGO_BIN_EXE_zebu"), &words(&line)));
        let blocks = || std::fs::metadata(scratch.file(name)).map_or(0, |metadata| metadata.blocks());
        wait_for("the image to grow", || blocks() * 512 > 16 << 20);
        send(&child, Signal::INT);
        assert_eq!(child.wait().unwrap().code(), Some(130), "{format}");
        let info = scratch.zebu(&words(&format!("info -f {format} --output json {name}"))).ok().json();
        assert_eq!(info["virtual-size"], 1 << 20, "{info:#}");
        let read = ["io", "-f", format, "-r", name, "-c", "read -P 9 0 1M"];
        scratch.zebu(&read).ok();
        if format == "qcow2" {
            scratch.zebu(&["check", name]).ok();
        }
        assert!(std::fs::metadata(scratch.file(name)).unwrap().len() < 4 << 20, "{format}: not given back");
    }
}
