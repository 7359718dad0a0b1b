//! Other clients of registries than skopeo: oras and crane push what zebu reads, and read what zebu pushes.
//!
//! `cargo xtask test` builds them for one of ten runs. Where they are missing, the tests say so and pass.

use std::path::{Path, PathBuf};
use zebu_tests::program::{Finished, find, run_in};
use zebu_tests::registry::{Guests, Registry, qemu_img, source, zebu};
use zebu_tests::scratch::Scratch;

/// A client; `None` if it is missing, which is told.
fn client(name: &str) -> Option<PathBuf> {
    let found = find(name);
    if found.is_none() {
        println!("skipped: {name} is missing (`cargo xtask test --long` builds it)");
    }
    found
}

fn run(dir: &Path, program: &Path, line: &str) -> Finished {
    run_in(dir, program, line.split_whitespace()).ok()
}

#[test]
fn oras_pushes_what_zebu_reads_and_pulls_what_zebu_pushes() {
    let Some(oras) = client("oras") else { return };
    let scratch = Scratch::new("registry-oras");
    let dir = scratch.path();
    let content = source(dir);
    let registry = Registry::start(dir, Guests::All);
    let host = format!("127.0.0.1:{}", registry.port());
    // As people push disks, and as KubeVirt's documents write it.
    run(dir, &oras, &format!("push --plain-http {host}/oras/plain:v1 disk.qcow2"));
    let kubevirt = "disk.qcow2:application/vnd.kubevirt.disk.qcow2";
    run(
        dir,
        &oras,
        &format!(
            "push --plain-http --artifact-type application/vnd.kubevirt.vm {host}/oras/typed:v1 {kubevirt}"
        ),
    );
    for image in ["oras/plain:v1", "oras/typed:v1"] {
        zebu(dir, &["compare", &registry.image(image), "disk.raw"]).ok();
    }
    zebu(dir, &["push", "disk.raw", &registry.image("zebu/disk:v1")]).ok();
    std::fs::create_dir(dir.join("pulled")).unwrap();
    run(&dir.join("pulled"), &oras, &format!("pull --plain-http {host}/zebu/disk:v1"));
    assert!(std::fs::read(dir.join("pulled/disk.raw")).unwrap() == content);
    // It sees the hashes, and copies them with the image.
    let seen = run(dir, &oras, &format!("discover --plain-http --format json {host}/zebu/disk:v1"));
    assert!(seen.stdout.contains("application/vnd.zebu.hashes.v1"), "{seen}");
    let copy = "copy --recursive --from-plain-http --to-plain-http";
    run(dir, &oras, &format!("{copy} {host}/zebu/disk:v1 {host}/copied/disk:v1"));
    zebu(dir, &["compare", "--require-verified", &registry.image("copied/disk:v1"), "disk.raw"]).ok();
    // A stack has a file for each blob.
    qemu_img(dir, "create -f qcow2 -F qcow2 -b disk.qcow2 over.qcow2");
    zebu(dir, &["push", "over.qcow2", &registry.image("zebu/stack:v1")]).ok();
    run(dir, &oras, &format!("{copy} {host}/zebu/stack:v1 {host}/copied/stack:v1"));
    zebu(dir, &["compare", "--require-verified", &registry.image("copied/stack:v1"), "disk.raw"]).ok();
}

#[test]
fn crane_copies_and_exports_what_zebu_pushes() {
    let Some(crane) = client("crane") else { return };
    let scratch = Scratch::new("registry-crane");
    let dir = scratch.path();
    let content = source(dir);
    let registry = Registry::start(dir, Guests::All);
    let host = format!("127.0.0.1:{}", registry.port());
    zebu(dir, &["push", "--as", "container-disk", "disk.raw", &registry.image("zebu/container:v1")]).ok();
    zebu(dir, &["push", "disk.qcow2", &registry.image("zebu/disk:v1")]).ok();
    for image in ["container:v1", "disk:v1"] {
        run(dir, &crane, &format!("copy --insecure {host}/zebu/{image} {host}/copied/{image}"));
        zebu(dir, &["compare", &registry.image(&format!("copied/{image}")), "disk.raw"]).ok();
    }
    // Without `--fast` it takes every layer for gzip.
    run(dir, &crane, &format!("validate --fast --insecure --remote {host}/copied/container:v1"));
    run(dir, &crane, &format!("export --insecure {host}/zebu/container:v1 container.tar"));
    run_in(dir, Path::new("/bin/tar"), ["-xf", "container.tar"]).ok();
    assert!(std::fs::read(dir.join("disk/disk.raw")).unwrap() == content);
    // Its layouts, and layers that it appends.
    run(dir, &crane, &format!("pull --insecure --format oci {host}/zebu/disk:v1 layout"));
    zebu(dir, &["compare", "oci-layout:layout", "disk.raw"]).ok();
}
