//! Disks that are served as a manifest says, above files and caches with flipped bits.

use std::collections::BTreeSet;
use std::fs::{File, FileTimes};
use std::os::unix::fs::FileExt;
use std::path::Path;
use zebu_tests::nbd_client::{Client, command};
use zebu_tests::program::zebu;
use zebu_tests::random::Random;
use zebu_tests::scratch::Scratch;
use zebu_tests::server::Server;
use zebu_tests::web_server::WebServer;

const CLUSTER: u64 = 64 << 10;
/// Bytes of the disk, of which the first eighth is zero.
const LEN: u64 = 24 << 20;
const EIO: u32 = 5;

/// `www/disk.raw` and `www/disk.qcow2`, the manifest `disk.manifest`, and `other.manifest` of a disk of another size.
fn source(dir: &Path) -> Vec<u8> {
    let mut content = vec![0; LEN as usize];
    let mut random = Random::new(8);
    for word in content[LEN as usize / 8..].chunks_exact_mut(8) {
        word.copy_from_slice(&random.bits().to_le_bytes());
    }
    std::fs::create_dir_all(dir.join("www")).unwrap();
    std::fs::write(dir.join("www/disk.raw"), &content).unwrap();
    std::fs::write(dir.join("small.raw"), &content[..1 << 20]).unwrap();
    zebu(dir, ["convert", "-f", "raw", "-O", "qcow2", "www/disk.raw", "www/disk.qcow2"]).ok();
    zebu(dir, ["backup", "-f", "raw", "--manifest", "disk.manifest", "www/disk.raw", "copy.qcow2"]).ok();
    zebu(dir, ["backup", "-f", "raw", "--manifest", "other.manifest", "small.raw", "small.qcow2"]).ok();
    content
}

/// Changes a file so that its time, by which a web server tells versions apart, stays.
fn change(path: &Path, change: impl FnOnce(&File)) {
    let file = File::options().read(true).write(true).open(path).unwrap();
    let time = file.metadata().unwrap().modified().unwrap();
    change(&file);
    file.set_times(FileTimes::new().set_modified(time)).unwrap();
}

/// Flips a bit at each offset.
fn flip(path: &Path, offsets: &BTreeSet<u64>, seed: u64) {
    let mut random = Random::new(seed);
    change(path, |file| {
        for &offset in offsets {
            let mut byte = [0];
            file.read_exact_at(&mut byte, offset).unwrap();
            file.write_all_at(&[byte[0] ^ 1 << random.below(8)], offset).unwrap();
        }
    });
}

/// Offsets within the data, of which no two are in one cluster.
fn places(seed: u64, count: usize) -> BTreeSet<u64> {
    let mut random = Random::new(seed);
    let mut clusters = BTreeSet::new();
    while clusters.len() < count {
        clusters.insert(random.between(LEN / 8 / CLUSTER, LEN / CLUSTER - 1));
    }
    clusters.into_iter().map(|cluster| cluster * CLUSTER + random.below(CLUSTER)).collect()
}

/// Reads each cluster once, in pieces; offsets of those that could not be read. All others are right.
fn refused(client: &mut Client, content: &[u8], piece: u64) -> BTreeSet<u64> {
    let mut refused = BTreeSet::new();
    for offset in (0..LEN).step_by(piece as usize) {
        let reply = client.call(0, command::READ, offset, piece).unwrap();
        if reply.error == 0 {
            assert!(
                reply.data[8..] == content[offset as usize..][..piece as usize],
                "wrong bytes at {offset}"
            );
        } else {
            assert_eq!(reply.error, EIO);
            refused.insert(offset / CLUSTER * CLUSTER);
        }
    }
    refused
}

fn clusters(places: &BTreeSet<u64>) -> BTreeSet<u64> {
    places.iter().map(|place| place / CLUSTER * CLUSTER).collect()
}

#[test]
fn flipped_bits_of_the_object_are_refused_and_told() {
    let scratch = Scratch::new("verified-object");
    let dir = scratch.path();
    let content = source(dir);
    let web = WebServer::start(dir);
    let url = web.url("/disk.raw");
    let mut flipped = 0;
    for (round, options) in ["", "--cache-dir cache", "-i threads --queues 2"].iter().enumerate() {
        let places = places(round as u64, 300);
        flip(&dir.join("www/disk.raw"), &places, 1);
        let line = format!("--read-only -f raw --verify disk.manifest --control ctl.sock {options} {url}");
        let server = Server::start(dir, &line);
        let mut client = Client::open(server.socket(), "").unwrap();
        for piece in [CLUSTER, (8 << 10) << round] {
            assert_eq!(refused(&mut client, &content, piece), clusters(&places));
        }
        let stats = zebu(dir, ["ctl", "ctl.sock", "stats"]).ok().stdout;
        assert!(stats.contains("\"refused-reads\"") && stats.contains("disk.manifest"), "{stats}");
        drop(client);
        let said = server.stop_with_messages();
        let first = places.first().unwrap() / CLUSTER * CLUSTER;
        assert!(said.contains(&format!("the cluster at {first} is not what 'disk.manifest' says")), "{said}");
        assert_eq!(said.lines().count(), 16, "{said}");
        flip(&dir.join("www/disk.raw"), &places, 1);
        flipped += places.len();
    }
    println!("{flipped} flipped bits");
}

#[test]
fn what_a_cache_has_wrong_is_fetched_again() {
    let scratch = Scratch::new("verified-cache");
    let dir = scratch.path();
    let content = source(dir);
    let web = WebServer::start(dir);
    let url = web.url("/disk.raw");
    let places = places(7, 150);
    flip(&dir.join("www/disk.raw"), &places, 2);
    // Wrong bytes with the right sums of wrong bytes, as bad memory leaves them.
    zebu(dir, ["convert", "-f", "raw", "-O", "raw", "--cache-dir", "cache", &url, "flat.raw"]).ok();
    flip(&dir.join("www/disk.raw"), &places, 2);
    let line = format!("--read-only --queues 2 -f raw --cache-dir cache --verify disk.manifest {url}");
    let server = Server::start(dir, &line);
    // At once, so that some read clusters and their neighbours while others give them up.
    std::thread::scope(|scope| {
        for piece in [CLUSTER, 16 << 10, 1 << 20] {
            let (socket, content) = (server.socket(), &content);
            scope.spawn(move || {
                let mut client = Client::open(socket, "").unwrap();
                assert_eq!(refused(&mut client, content, piece), BTreeSet::new());
            });
        }
    });
    let said = server.stop_with_messages();
    assert!(said.contains("read again, it is") && said.lines().count() == 16, "{said}");
    // What was wrong is gone from the cache.
    let server = Server::start(dir, &line);
    let mut client = Client::open(server.socket(), "").unwrap();
    assert_eq!(refused(&mut client, &content, CLUSTER), BTreeSet::new());
    drop(client);
    let said = server.stop_with_messages();
    assert!(said.is_empty(), "{said}");
}

#[test]
fn an_overlay_stands_on_a_verified_base() {
    let scratch = Scratch::new("verified-overlay");
    let dir = scratch.path();
    let mut content = source(dir);
    let web = WebServer::start(dir);
    for base in ["www/disk.qcow2".to_owned(), web.url("/disk.qcow2"), "www/disk.raw".to_owned()] {
        let _ = std::fs::remove_file(dir.join("own.qcow2"));
        let format = if base.ends_with("raw") { "raw" } else { "qcow2" };
        let line = format!("--overlay own.qcow2 --verify disk.manifest --copy-on-read -f {format} {base}");
        for round in 0..2u8 {
            let server = Server::start(dir, &line);
            let mut client = Client::open(server.socket(), "").unwrap();
            // A part of a cluster, the rest of which comes from the base.
            let at = LEN as usize / 2 + 70_144;
            assert_eq!(client.write(0, at as u64, &[round; 1024]).unwrap(), 0);
            content[at..at + 1024].fill(round);
            assert_eq!(refused(&mut client, &content, 1 << 20), BTreeSet::new());
            drop(client);
            let said = server.stop_with_messages();
            assert!(said.is_empty(), "{said}");
        }
        zebu(dir, ["check", "own.qcow2"]).ok();
        let info = zebu(dir, ["info", "own.qcow2"]).ok().stdout;
        assert!(info.contains(&base) && !info.contains("verified:"), "{info}");
    }
}

#[test]
fn a_cluster_of_a_wrong_base_is_not_copied_into_the_overlay() {
    let scratch = Scratch::new("verified-copy");
    let dir = scratch.path();
    let content = source(dir);
    let places = places(3, 40);
    flip(&dir.join("www/disk.raw"), &places, 4);
    let line = "--overlay own.qcow2 --verify disk.manifest --copy-on-read -f raw www/disk.raw";
    let server = Server::start(dir, line);
    let mut client = Client::open(server.socket(), "").unwrap();
    let place = places.first().unwrap() / CLUSTER * CLUSTER;
    assert_eq!(client.write(0, place + 512, &[1; 512]).unwrap(), EIO, "the rest of the cluster is wrong");
    assert_eq!(
        client.write(0, place, &vec![1; CLUSTER as usize]).unwrap(),
        0,
        "nothing of the base is wanted"
    );
    let mut wrong = clusters(&places);
    wrong.remove(&place);
    let mut content = content;
    content[place as usize..][..CLUSTER as usize].fill(1);
    assert_eq!(refused(&mut client, &content, CLUSTER), wrong);
    drop(client);
    server.stop_with_messages();
    // Mended, the base serves what the overlay has not.
    flip(&dir.join("www/disk.raw"), &places, 4);
    let server = Server::start(dir, line);
    let mut client = Client::open(server.socket(), "").unwrap();
    assert_eq!(refused(&mut client, &content, CLUSTER), BTreeSet::new());
    drop(client);
    assert_eq!(server.stop_with_messages(), "");
}

#[test]
fn manifests_of_others_and_images_that_are_written_are_refused() {
    let scratch = Scratch::new("verified-refused");
    let dir = scratch.path();
    source(dir);
    let serve = |words: &[&str]| {
        let line = ["serve", "--nbd", "unix:s"].iter().chain(words);
        zebu(dir, line.copied())
    };
    let out = serve(&["-r", "-f", "raw", "--verify", "other.manifest", "www/disk.raw"]).exits(1);
    assert!(out.stderr.contains("of another disk") && out.stderr.contains("1048576"), "{out}");
    let out = serve(&["-r", "-f", "raw", "--verify", "none.manifest", "www/disk.raw"]).exits(1);
    assert!(out.stderr.contains("none.manifest") && out.stderr.contains("No such file"), "{out}");
    let out = serve(&["-r", "-f", "raw", "--verify", "www/disk.raw", "www/disk.raw"]).exits(1);
    assert!(out.stderr.contains("manifest"), "{out}");
    let out = serve(&["-f", "raw", "--verify", "disk.manifest", "www/disk.raw"]).exits(1);
    assert!(out.stderr.contains("--read-only") && out.stderr.contains("--overlay"), "{out}");
    let out = serve(&["-r", "-f", "raw", "--verify", "a", "--verify", "b", "www/disk.raw"]).exits(1);
    assert!(out.stderr.contains("2 paths are given with --verify"), "{out}");
    // An overlay that could not be made leaves nothing behind.
    let out = serve(&["--overlay", "new.qcow2", "--verify", "other.manifest", "www/disk.qcow2"]).exits(1);
    assert!(out.stderr.contains("of another disk") && !dir.join("new.qcow2").exists(), "{out}");
    assert!(!dir.join("s").exists());
}

/// Headers and L1 tables stand in memory as they were at the opening, and in the cache.
#[test]
fn a_header_and_an_l1_table_that_a_cache_has_wrong_are_fetched_again() {
    let scratch = Scratch::new("verified-tables");
    let dir = scratch.path();
    let content = source(dir);
    let web = WebServer::start(dir);
    let (url, image) = (web.url("/disk.qcow2"), dir.join("www/disk.qcow2"));
    let header = std::fs::read(&image).unwrap();
    let l1 = u64::from_be_bytes(header[40..48].try_into().unwrap());
    // The magic number, the size of clusters, that of the disk, the place of the L1 table, a table's place in it, and its bit 63.
    for (at, bit) in [(1, 1), (23, 0), (28, 2), (45, 0), (l1 + 5, 1), (l1, 7)] {
        let flip = || {
            change(&image, |file| {
                let mut byte = [0];
                file.read_exact_at(&mut byte, at).unwrap();
                file.write_all_at(&[byte[0] ^ 1 << bit], at).unwrap();
            });
        };
        let _ = std::fs::remove_dir_all(dir.join("cache"));
        flip();
        // Wrong bytes with the right sums of wrong bytes, of the whole object.
        zebu(dir, ["convert", "-f", "raw", "-O", "raw", "--cache-dir", "cache", &url, "flat.raw"]).ok();
        flip();
        let line = format!("--read-only -f qcow2 --cache-dir cache --verify disk.manifest {url}");
        for round in 0..2 {
            let server = Server::start(dir, &line);
            let mut client = Client::open(server.socket(), "").unwrap();
            assert_eq!(refused(&mut client, &content, CLUSTER), BTreeSet::new(), "{at} {round}");
            drop(client);
            let said = server.stop_with_messages();
            // What was wrong is gone from the cache.
            assert!(round == 0 || said.is_empty(), "{at}: {said}");
        }
    }
}
