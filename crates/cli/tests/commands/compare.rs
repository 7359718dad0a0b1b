//! `zebu compare` against `qemu-img compare`.

use crate::common::{Scratch, noise, qemu, words};

fn images(scratch: &Scratch) {
    scratch.write("a.raw", &noise(1, 4 << 20));
    scratch.qemu_img(&words("convert -f raw -O qcow2 a.raw a.qcow2")).ok();
    let mut changed = scratch.read("a.raw");
    changed[3 << 20] ^= 1;
    scratch.write("changed.raw", &changed);
    scratch.write("zeroes.raw", &vec![0; 4 << 20]);
    scratch.write("longer.raw", &[scratch.read("a.raw"), vec![0; 1 << 20]].concat());
    scratch.write("tail.raw", &[scratch.read("a.raw"), vec![7; 4096]].concat());
    scratch.qemu_img(&words("create -q -f qcow2 empty.qcow2 4M")).ok();
    scratch.qemu_img(&words("create -q -f qcow2 -b a.qcow2 -F qcow2 overlay.qcow2")).ok();
}

#[test]
fn results_and_codes_are_qemus() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    images(&scratch);
    for line in [
        "a.raw a.qcow2",
        "a.qcow2 overlay.qcow2",
        "-f raw -F qcow2 a.raw a.qcow2",
        "a.raw changed.raw",
        "changed.raw a.qcow2",
        "a.raw longer.raw",
        "longer.raw a.qcow2",
        "-s a.raw longer.raw",
        "a.raw tail.raw",
        "-s a.raw a.raw",
        "-s empty.qcow2 zeroes.raw",
        "empty.qcow2 zeroes.raw",
        "empty.qcow2 a.raw",
        "-q a.raw changed.raw",
        "-T none a.raw changed.raw",
        "a.raw missing.raw",
        "missing.raw a.raw",
        "-f qcow2 a.raw a.qcow2",
        "a.raw",
        "a.raw a.raw a.raw",
    ] {
        let arguments: Vec<&str> = ["compare"].into_iter().chain(words(line)).collect();
        let (ours, theirs) = (scratch.zebu(&arguments), scratch.qemu_img(&arguments));
        assert_eq!(ours.code, theirs.code, "{line}: {ours:#?} {theirs:#?}");
        assert_eq!(ours.stdout, theirs.stdout, "{line}");
        assert_eq!(ours.stderr.is_empty(), theirs.stderr.is_empty(), "{line}");
    }
}

#[test]
fn programs_get_json() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    images(&scratch);
    let same = scratch.zebu(&words("compare --output json a.raw a.qcow2")).ok().json();
    assert_eq!(same["result"], "identical");
    let ran = scratch.zebu(&words("compare --output json a.raw changed.raw"));
    assert_eq!(ran.code, Some(1));
    assert_eq!(
        (&ran.json()["result"], &ran.json()["offset"]),
        (&"content-mismatch".into(), &(3 << 20).into())
    );
}

#[test]
fn unreadable_images_have_a_code_of_their_own() {
    let scratch = Scratch::new();
    scratch.write("a.raw", &[0; 512]);
    scratch.zebu(&words("compare a.raw missing.raw")).fails_naming(2, &["missing.raw"]);
    scratch.zebu(&words("compare -T nosuch a.raw a.raw")).fails_naming(2, &["nosuch"]);
    scratch.zebu(&words("compare a.raw")).fails_naming(1, &["FILENAME2"]);
}
