//! Chains of images as several blobs of one image: pushed, read and copied, and what is sent of an update.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use zebu_tests::nbd_client::Client;
use zebu_tests::program::{required, run_in};
use zebu_tests::registry::{Guests, LEN, Registry, blob_digest, qemu_img, skopeo, source, zebu};
use zebu_tests::scratch::Scratch;
use zebu_tests::server::Server;
use zebu_tests::web_proxy::{Mishap, WebProxy};

/// An overlay with a changed mebibyte, and the disk that it shows.
fn overlay(dir: &Path, file: &str, below: (&str, &str), (at, byte): (usize, u8), disk: &mut [u8]) {
    qemu_img(dir, &format!("create -f qcow2 -F {} -b {} {file}", below.1, below.0));
    let write = format!("write -P {byte} {at} 1M");
    run_in(dir, &required("qemu-io"), ["-f", "qcow2", "-c", &write, file]).ok();
    disk[at..at + (1 << 20)].fill(byte);
}

/// Bytes of chunks that were sent.
fn counting(sent: &Arc<AtomicU64>) -> impl Fn(usize, &str) -> Mishap + Send + Sync + 'static {
    let sent = Arc::clone(sent);
    move |_, head| {
        let is_sent = head.starts_with("PATCH ") || head.starts_with("PUT ");
        let len = |line: &str| {
            line.to_ascii_lowercase().strip_prefix("content-length:")?.trim().parse::<u64>().ok()
        };
        if is_sent && let Some(len) = head.lines().find_map(len) {
            sent.fetch_add(len, Ordering::SeqCst);
        }
        Mishap::None
    }
}

#[test]
fn an_update_travels_as_its_difference_and_is_one_disk() {
    let scratch = Scratch::new("registry-stacks");
    let dir = scratch.path();
    let mut disk = source(dir);
    let registry = Registry::start(dir, Guests::All);
    let sent = Arc::new(AtomicU64::new(0));
    let proxy = WebProxy::start(registry.port(), counting(&sent));
    let through = |tag: &str| format!("oci://{}/images/disk:{tag}", proxy.url("").replace("http://", ""));
    zebu(dir, &["push", "disk.qcow2", &through("v1")]).ok();
    let first = sent.swap(0, Ordering::SeqCst);
    assert!(first > 29 << 20, "{first}");
    overlay(dir, "two.qcow2", ("disk.qcow2", "qcow2"), (5 << 20, 2), &mut disk);
    overlay(dir, "three.qcow2", ("two.qcow2", "qcow2"), (35 << 20, 3), &mut disk);
    std::fs::write(dir.join("expected.raw"), &disk).unwrap();
    for (file, tag, before) in [("two.qcow2", "v2", 1), ("three.qcow2", "v3", 2)] {
        let pushed = zebu(dir, &["push", "--output", "json", file, &through(tag)]).ok();
        let pushed: serde_json::Value = serde_json::from_str(&pushed.stdout).unwrap();
        let blobs = pushed["blobs"].as_array().unwrap();
        let was_there = |blob: &&serde_json::Value| blob["was-there"].as_bool().unwrap();
        assert_eq!((blobs.len(), blobs.iter().filter(was_there).count()), (before + 1, before), "{pushed}");
        let update = sent.swap(0, Ordering::SeqCst);
        assert!(update < 2 << 20, "{update} bytes sent");
    }
    let told = zebu(dir, &["push", "three.qcow2", &through("v3")]).ok().stdout;
    assert!(told.contains("3 blobs") && told.contains(" 0 of them sent"), "{told}");

    let name = registry.image("images/disk:v3");
    let info = zebu(dir, &["info", "--output", "json", &name]).ok();
    let info: serde_json::Value = serde_json::from_str(&info.stdout).unwrap();
    assert_eq!((info["format"].as_str(), info["virtual-size"].as_u64()), (Some("raw"), Some(LEN as u64)));
    zebu(dir, &["compare", "--require-verified", "--cache-dir", "cache", &name, "expected.raw"]).ok();
    zebu(dir, &["compare", &registry.image("images/disk:v1"), "disk.raw"]).ok();
    zebu(dir, &["convert", "-O", "raw", &name, "copy.raw"]).ok();
    assert!(std::fs::read(dir.join("copy.raw")).unwrap() == disk);
    zebu(dir, &["pull", &name, "pulled.qcow2"]).ok();
    qemu_img(dir, "compare -f qcow2 -F raw pulled.qcow2 expected.raw");
    let refused = zebu(dir, &["pull", &name, "pulled.qcow2"]).exits(1);
    assert!(refused.stderr.contains("exists already"), "{refused}");
    // Twice: the overlay is made, and opened again.
    for byte in [7, 8] {
        let server = Server::start(dir, &format!("--overlay own.qcow2 {name}"));
        let mut client = Client::open(server.socket(), "").unwrap();
        for at in (1 << 20..LEN).step_by(1 << 20) {
            assert!(client.read(at as u64, 1 << 20).unwrap() == disk[at..][..1 << 20], "{at}");
        }
        client.write(0, 0, &[byte; 4096]).unwrap();
        assert_eq!(client.read(0, 4096).unwrap(), [byte; 4096]);
        drop(client);
        server.stop();
    }

    // Others copy it whole, to a registry and to a layout.
    registry.copy("images/disk:v3", "copied/disk:v3");
    zebu(dir, &["compare", &registry.image("copied/disk:v3"), "expected.raw"]).ok();
    let port = registry.port();
    skopeo(
        dir,
        &format!("copy --src-tls-verify=false docker://127.0.0.1:{port}/images/disk:v3 oci:layout:v3"),
    );
    zebu(dir, &["compare", "oci-layout:layout:v3", "expected.raw"]).ok();
    zebu(dir, &["push", "three.qcow2", "oci-layout:own:v3"]).ok();
    zebu(dir, &["compare", "oci-layout:own", "expected.raw"]).ok();

    // A flipped bit in the lowest blob.
    let blob = blob_digest(dir, "disk.qcow2");
    registry.flip(&blob, 9 << 20);
    for name in [&name, &registry.image("copied/disk:v3")] {
        let refused = zebu(dir, &["pull", name, "target"]).exits(1);
        let is_named = refused.stderr.contains(&blob) || refused.stderr.contains("is not what its hash says");
        assert!(is_named, "{refused}");
        assert!(!dir.join("target").exists());
    }
}

#[test]
fn a_stack_is_raw_whatever_its_guest_wrote_and_other_chains_are_refused() {
    let scratch = Scratch::new("registry-raw-stacks");
    let dir = scratch.path();
    source(dir);
    let registry = Registry::start(dir, Guests::All);
    let name = registry.image("images/tricky:v1");
    // The guest's disk begins as an image does, which names a file of the host.
    qemu_img(dir, "create -f qcow2 -F raw -b disk.raw inner.qcow2 40M");
    std::fs::copy(dir.join("inner.qcow2"), dir.join("tricky.raw")).unwrap();
    std::fs::OpenOptions::new().write(true).open(dir.join("tricky.raw")).unwrap().set_len(1 << 20).unwrap();
    qemu_img(dir, "create -f qcow2 -F raw -b tricky.raw outer.qcow2");
    zebu(dir, &["push", "outer.qcow2", &name]).ok();
    let info = zebu(dir, &["info", &name]).ok();
    assert!(info.stdout.contains("file format: raw") && !info.stdout.contains("backing"), "{info}");
    zebu(dir, &["convert", "-O", "raw", &name, "copy.raw"]).ok();
    assert!(std::fs::read(dir.join("copy.raw")).unwrap() == std::fs::read(dir.join("tricky.raw")).unwrap());

    qemu_img(dir, "convert -f raw -O vmdk disk.raw disk.vmdk");
    qemu_img(dir, "create -f qcow2 -F vmdk -b disk.vmdk over-vmdk.qcow2");
    for (words, why) in [
        (&["push", "over-vmdk.qcow2", &name][..], "vmdk"),
        (&["push", "--as", "qcow2", "outer.qcow2", &name], "omit --as"),
        (&["push", "--as", "container-disk", "outer.qcow2", &name], "has a backing file"),
    ] {
        let refused = zebu(dir, words).exits(1);
        assert!(refused.stderr.contains(why) && refused.stderr.contains("convert"), "{refused}");
    }
    let refused = zebu(dir, &["info", "--oci-disk", "x", &name]).exits(1);
    assert!(refused.stderr.contains("one disk"), "{refused}");
}
