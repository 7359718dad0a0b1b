//! Blobs of registries that are read by ranges: compared without hashes, and in frames of zstd.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use zebu_tests::nbd_client::Client;
use zebu_tests::patience::wait_until;
use zebu_tests::program::{required, run_in};
use zebu_tests::registry::{Guests, LEN, Registry, blob_digest, source, zebu};
use zebu_tests::scratch::Scratch;
use zebu_tests::server::Server;
use zebu_tests::web_proxy::{Mishap, WebProxy};

#[test]
fn a_blob_without_hashes_is_compared_once_all_of_it_was_read() {
    let scratch = Scratch::new("registry-whole");
    let dir = scratch.path();
    let content = source(dir);
    let registry = Registry::start(dir, Guests::All);
    for (file, name) in [("disk.qcow2", "disk"), ("disk.raw", "raw")] {
        zebu(dir, &["push", file, &registry.image(&format!("own/{name}:v1"))]).ok();
        registry.copy(&format!("own/{name}:v1"), &format!("copied/{name}:v1"));
    }
    let (qcow2, raw) = (registry.image("copied/disk:v1"), registry.image("copied/raw:v1"));
    let blobs = [blob_digest(dir, "disk.qcow2"), blob_digest(dir, "disk.raw")];
    // Of the qcow2 image, the block of refcounts: no copy of the disk needs it.
    for (name, blob, at) in
        [(&qcow2, &blobs[0], 9 << 20), (&qcow2, &blobs[0], 0x2_0008), (&raw, &blobs[1], 9 << 20)]
    {
        registry.flip(blob, at);
        for (words, code) in [
            (&["convert", "-O", "raw", name, "copy"][..], 1),
            (&["convert", "-O", "qcow2", "--cache-dir", "cache", name, "copy"], 1),
            (&["backup", name, "copy"], 1),
            (&["pull", name, "copy"], 1),
        ] {
            let told = zebu(dir, words).exits(code).stderr;
            let repository =
                name.trim_start_matches("oci://").trim_end_matches(":v1").split_once('/').unwrap();
            for word in ["another digest", blob, repository.0, repository.1] {
                assert!(told.contains(word), "{words:?} {at}: {word}: {told}");
            }
            assert!(!dir.join("copy").exists(), "{words:?}");
        }
        // What is read of it in part can't be compared.
        zebu(dir, &["info", name]).ok();
        registry.flip(blob, at);
    }
    zebu(dir, &["compare", &qcow2, "disk.raw"]).ok();
    zebu(dir, &["convert", "-O", "raw", &raw, "copy"]).ok();
    assert!(std::fs::read(dir.join("copy")).unwrap() == content);

    // A server, whose client reads from the end.
    registry.flip(&blobs[1], 9 << 20);
    zebu(dir, &["compare", &raw, "disk.raw"]).exits(1);
    let server = Server::start(dir, &format!("--read-only {raw}"));
    let mut client = Client::open(server.socket(), "").unwrap();
    let read = |client: &mut Client, at: usize| client.read(at as u64, 1 << 20);
    let wrong = (0..LEN).step_by(1 << 20).rev().filter(|at| read(&mut client, *at).is_err()).count();
    assert!(wrong <= 1, "{wrong}");
    wait_until("the digest of all is compared", || read(&mut client, 0).is_err());
    drop(client);
    let told = server.stop_with_messages();
    assert!(told.contains("another digest") && told.contains(&blobs[1]), "{told}");
}

/// Bytes of blobs that ranges asked for.
fn counting(asked: &Arc<AtomicU64>) -> impl Fn(usize, &str) -> Mishap + Send + Sync + 'static {
    let asked = Arc::clone(asked);
    move |_, head| {
        let range = head
            .lines()
            .find_map(|line| line.to_ascii_lowercase().strip_prefix("range: bytes=").map(str::to_owned));
        if let Some((from, to)) = range.as_deref().and_then(|range| range.split_once('-')) {
            let [from, to] = [from, to].map(|number| number.trim().parse::<u64>().unwrap_or(0));
            asked.fetch_add((to + 1).saturating_sub(from), Ordering::SeqCst);
        }
        Mishap::None
    }
}

#[test]
fn a_disk_in_frames_of_zstd_is_read_by_frames() {
    let scratch = Scratch::new("registry-frames");
    let dir = scratch.path();
    let content = source(dir);
    let registry = Registry::start(dir, Guests::All);
    let name = registry.image("images/packed:v1");
    let pushed = zebu(dir, &["push", "--as", "raw-zstd", "--output", "json", "disk.raw", &name]).ok();
    let pushed: serde_json::Value = serde_json::from_str(&pushed.stdout).unwrap();
    let blob = pushed["blobs"][0]["digest"].as_str().unwrap();
    let len = pushed["length"].as_u64().unwrap();
    // Whoever reads plain zstd reads it.
    std::fs::copy(registry.blob(blob), dir.join("packed.zst")).unwrap();
    run_in(dir, &required("zstd"), ["-q", "-d", "packed.zst", "-o", "unpacked"]).ok();
    assert!(std::fs::read(dir.join("unpacked")).unwrap() == content);

    let asked = Arc::new(AtomicU64::new(0));
    let proxy = WebProxy::start(registry.port(), counting(&asked));
    let through = format!("oci://{}/images/packed:v1", proxy.url("").replace("http://", ""));
    let server = Server::start(dir, &format!("--read-only --require-verified {through}"));
    let mut client = Client::open(server.socket(), "").unwrap();
    assert!(client.read(20 << 20, 4096).unwrap() == content[20 << 20..][..4096]);
    let few = asked.load(Ordering::SeqCst);
    assert!(few < len / 2, "{few} of {len}");
    for at in (0..LEN).step_by(1 << 20).rev() {
        assert!(client.read(at as u64, 1 << 20).unwrap() == content[at..][..1 << 20], "{at}");
    }
    drop(client);
    server.stop();
    zebu(dir, &["pull", &name, "pulled"]).ok();
    assert!(std::fs::read(dir.join("pulled")).unwrap() == content);

    // Flipped bits: with hashes, without, and in the table, whose length is 17 bytes and 8 for each frame of a mebibyte.
    let table = len - 17 - 8 * (LEN as u64 >> 20);
    registry.copy("images/packed:v1", "copied/packed:v1");
    let copied = registry.image("copied/packed:v1");
    zebu(dir, &["compare", &copied, "disk.raw"]).ok();
    // Without hashes, what is to be verified is unpacked as a whole.
    zebu(dir, &["compare", "--require-verified", &copied, "disk.raw"]).ok();
    for at in [len / 2, table + 3, table + 9, table + 13, len - 9, len - 5, len - 1] {
        registry.flip(blob, at);
        for name in [&name, &copied] {
            let refused = zebu(dir, &["convert", "-f", "raw", "-O", "raw", name, "copy"]).exits(1);
            assert!(refused.stderr.contains(blob), "{at}: {refused}");
        }
        registry.flip(blob, at);
    }
}
