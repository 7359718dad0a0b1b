//! Overlays of disks on web servers: made at once, filled by what is read, and in the background.

use std::io::Write;
use std::net::{Ipv4Addr, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use zebu_tests::foreign_server::ForeignServer;
use zebu_tests::nbd_client::{Client, command};
use zebu_tests::patience::{wait_for, wait_until};
use zebu_tests::program::{Finished, find, run_in, zebu};
use zebu_tests::random::Random;
use zebu_tests::scratch::Scratch;
use zebu_tests::server::Server;
use zebu_tests::web_server::WebServer;

/// Bytes of the disk.
const LEN: u64 = 24 << 20;
/// Bytes from which on it has data.
const DATA: u64 = 4 << 20;

fn qemu_img(dir: &Path, line: &str) -> Finished {
    let program = find("qemu-img").expect("qemu-img is missing: `cargo xtask setup` installs it");
    run_in(dir, &program, line.split_whitespace()).ok()
}

/// A disk with zeroes and data, as `www/disk.raw`, `www/disk.qcow2` and, compressed, `www/packed.qcow2`.
fn source(dir: &Path) -> Vec<u8> {
    let mut content = vec![0; LEN as usize];
    let mut random = Random::new(8);
    for word in content[DATA as usize..].chunks_exact_mut(8) {
        word.copy_from_slice(&(random.bits() >> 5).to_le_bytes());
    }
    std::fs::create_dir_all(dir.join("www")).unwrap();
    std::fs::write(dir.join("www/disk.raw"), &content).unwrap();
    qemu_img(dir, "convert -f raw -O qcow2 www/disk.raw www/disk.qcow2");
    qemu_img(dir, "convert -c -f raw -O qcow2 www/disk.raw www/packed.qcow2");
    content
}

fn ctl(dir: &Path, words: &[&str]) -> Finished {
    zebu(dir, ["ctl", "ctl.sock"].iter().chain(words).copied())
}

/// The server's log once it has all requests that were answered: their lines come after their last bytes.
fn whole_log(web: &WebServer) -> String {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let marker = format!("/marker-{} ", NUMBER.fetch_add(1, Ordering::Relaxed));
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, web.port())).unwrap();
    stream.write_all(format!("GET {marker}HTTP/1.0\r\n\r\n").as_bytes()).unwrap();
    wait_for(format_args!("{marker}in the log"), || Some(web.log()).filter(|log| log.contains(&marker)))
}

/// Ranges of the requests for a path, as the server's log has them.
fn ranges(web: &WebServer, path: &str) -> Vec<(u64, u64)> {
    let log = whole_log(web);
    let lines = log.lines().filter(|line| line.contains(path));
    let range = lines.filter_map(|line| line.split("bytes=").nth(1)?.split('"').next()?.split_once('-'));
    range.map(|(first, last)| (first.parse().unwrap(), last.parse::<u64>().unwrap() + 1)).collect()
}

fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut random = Random::new(seed);
    (0..len).map(|_| random.bits() as u8).collect()
}

#[test]
fn an_overlay_is_made_keeps_what_is_written_and_shows_the_rest() {
    let scratch = Scratch::new("lazy-overlay");
    let dir = scratch.path();
    let mut content = source(dir);
    let web = WebServer::start(dir);
    let url = web.url("/packed.qcow2");
    let options = format!("--cache-dir cache --overlay own.qcow2 {url}");
    for round in 0..3u64 {
        let server = Server::start(dir, &options);
        let mut client = Client::open(server.socket(), "").unwrap();
        for at in (0..LEN).step_by(1 << 20) {
            assert!(client.read(at, 1 << 20).unwrap() == content[at as usize..][..1 << 20], "{round} {at}");
        }
        let bytes = pattern(300_000 / 512 * 512, round);
        let at = 1_000_448 + round * 3_000_320;
        assert_eq!(client.write(0, at, &bytes).unwrap(), 0);
        content[at as usize..][..bytes.len()].copy_from_slice(&bytes);
        drop(client);
        server.stop();
    }
    // Nothing was fetched twice, but for the beginning, which pins the version.
    let mut fetched = ranges(&web, "/packed.qcow2");
    fetched.retain(|range| *range != (0, 65536));
    fetched.sort_unstable();
    assert!(fetched.windows(2).all(|pair| pair[0].1 <= pair[1].0), "{fetched:?}");
    let info = qemu_img(dir, "info --output json own.qcow2").stdout;
    assert!(info.contains(&format!("\"backing-filename\": \"{url}\"")), "{info}");
    zebu(dir, ["check", "own.qcow2"]).ok();
    // Only the named base is one of it; and nobody has it made anew.
    let other = web.url("/disk.qcow2");
    let line = ["serve", "--nbd", "unix:s", "--overlay", "own.qcow2", &other];
    let out = zebu(dir, line).exits(1);
    assert!(out.stderr.contains("stands on") && out.stderr.contains("packed.qcow2"), "{out}");
    let secret = url.replace("http://", "http://user:hidden@");
    let out = zebu(dir, ["serve", "--nbd", "unix:s", "--overlay", "new.qcow2", &secret]).exits(1);
    assert!(out.stderr.contains("netrc") && !out.stderr.contains("hidden"), "{out}");
    assert!(!dir.join("new.qcow2").exists());
    let missing = web.url("/none.qcow2");
    let out = zebu(dir, ["serve", "--nbd", "unix:s", "--overlay", "new.qcow2", &missing]).exits(1);
    assert!(out.stderr.contains("404") || out.stderr.contains("No such file"), "{out}");
    assert!(!dir.join("new.qcow2").exists());
    // A local base has an overlay by the same option.
    let server = Server::start(dir, "--overlay local.qcow2 www/disk.qcow2");
    let mut client = Client::open(server.socket(), "").unwrap();
    assert_eq!(client.write(0, DATA, &[7; 4096]).unwrap(), 0);
    drop(client);
    server.stop();
    assert!(qemu_img(dir, "info local.qcow2").stdout.contains("www/disk.qcow2"));
    qemu_img(dir, "compare -q www/disk.raw www/disk.qcow2");
}

#[test]
fn a_page_is_written_above_a_server_without_asking_it() {
    let scratch = Scratch::new("lazy-pages");
    let dir = scratch.path();
    let base = source(dir);
    let web = WebServer::start(dir);
    for path in ["/disk.raw", "/packed.qcow2"] {
        let mut content = base.clone();
        let format = if path == "/disk.raw" { "raw" } else { "qcow2" };
        let _ = std::fs::remove_file(dir.join("own.qcow2"));
        let server = Server::start(dir, &format!("--overlay own.qcow2 -f {format} {}", web.url(path)));
        let mut client = Client::open(server.socket(), "").unwrap();
        // It has the base's tables then.
        assert!(client.read(8 << 20, 4096).unwrap() == content[8 << 20..][..4096]);
        let before = ranges(&web, path).len();
        for at in (8 << 20..LEN).step_by((1 << 20) + (20 << 10)) {
            let bytes = pattern(4096, at);
            assert_eq!(client.write(0, at, &bytes).unwrap(), 0);
            content[at as usize..][..4096].copy_from_slice(&bytes);
        }
        assert_eq!(client.call(0, command::FLUSH, 0, 0).unwrap().error, 0);
        assert_eq!(ranges(&web, path).len(), before, "{path}");
        for at in (0..LEN).step_by(1 << 20) {
            assert!(client.read(at, 1 << 20).unwrap() == content[at as usize..][..1 << 20], "{path} {at}");
        }
        drop(client);
        server.stop();
        // Without its base: not every QEMU can read from web servers.
        let alone =
            r#"json:{"driver":"qcow2","file":{"driver":"file","filename":"own.qcow2"},"backing":null}"#;
        qemu_img(dir, &format!("check -q {alone}"));
    }
}

#[test]
fn a_clone_of_a_disk_on_a_server_is_an_overlay_at_once() {
    let scratch = Scratch::new("lazy-clone");
    let dir = scratch.path();
    source(dir);
    let web = WebServer::start(dir);
    let url = web.url("/disk.qcow2");
    let out = zebu(dir, ["clone", &url, "own.qcow2"]).ok();
    assert!(out.stdout.contains("overlay") && out.stdout.contains(&url), "{out}");
    let refs = format!("prefix={url}");
    zebu(dir, ["io", "--allow-refs", &refs, "own.qcow2", "-c", "write -P 9 5M 1M"]).ok();
    zebu(dir, ["convert", "--allow-refs", &refs, "-O", "raw", "own.qcow2", "flat.raw"]).ok();
    qemu_img(dir, "convert -O raw www/disk.qcow2 right.raw");
    let mut right = std::fs::read(dir.join("right.raw")).unwrap();
    right[5 << 20..6 << 20].fill(9);
    assert!(std::fs::read(dir.join("flat.raw")).unwrap() == right);
    let out = zebu(dir, ["clone", "--mode", "reflink", &url, "other.qcow2"]).exits(1);
    assert!(out.stderr.contains("--mode overlay"), "{out}");
    let out = zebu(dir, ["clone", &url, "own.qcow2"]).exits(1);
    assert!(out.stderr.contains("exists already"), "{out}");
    let out = zebu(dir, ["clone", "rbd:x", "other.qcow2"]).exits(1);
    assert!(out.stderr.contains("rbd") && !dir.join("other.qcow2").exists(), "{out}");
}

#[test]
fn what_is_read_is_copied_into_the_overlay_if_that_is_asked_for() {
    let scratch = Scratch::new("lazy-copy");
    let dir = scratch.path();
    let content = source(dir);
    for path in ["/disk.raw", "/packed.qcow2"] {
        let web = WebServer::start(dir);
        let _ = std::fs::remove_file(dir.join("own.qcow2"));
        let url = web.url(path);
        let format = if path == "/disk.raw" { "raw" } else { "qcow2" };
        let server = Server::start(dir, &format!("--copy-on-read --overlay own.qcow2 -f {format} {url}"));
        let mut client = Client::open(server.socket(), "").unwrap();
        assert!(
            client.read(DATA + 70_000 / 512 * 512, 512).unwrap()
                == content[DATA as usize + 70_000 / 512 * 512..][..512]
        );
        assert!(client.read(8 << 20, 3 << 20).unwrap() == content[8 << 20..11 << 20]);
        drop(client);
        server.stop();
        let refs = format!("prefix={url}");
        let map = zebu(dir, ["map", "--output", "json", "--allow-refs", &refs, "own.qcow2"]).ok().stdout;
        let map: serde_json::Value = serde_json::from_str(&map).unwrap();
        let own: Vec<_> = map
            .as_array()
            .unwrap()
            .iter()
            .filter(|entry| entry["depth"] == 0 && entry["data"] == true)
            .map(|entry| (entry["start"].as_u64().unwrap(), entry["length"].as_u64().unwrap()))
            .collect();
        let cluster = DATA + (64 << 10);
        let total: u64 = own.iter().map(|(_, len)| len).sum();
        assert!(own.contains(&(cluster, 64 << 10)) && total == (3 << 20) + (64 << 10), "{path}: {own:?}");
        // It is there without the server.
        drop(web);
        qemu_img(dir, "rebase -u -F raw -b www/disk.raw own.qcow2");
        qemu_img(dir, "compare -q -f qcow2 -F raw own.qcow2 www/disk.raw");
        qemu_img(dir, "check -q own.qcow2");
    }
    let out = zebu(dir, ["serve", "--nbd", "unix:s", "-r", "--copy-on-read", "www/disk.qcow2"]).exits(1);
    assert!(out.stderr.contains("cannot be used with"), "{out}");
}

#[test]
fn a_hydration_goes_on_where_it_was_ended_and_leaves_an_image_that_stands_alone() {
    let scratch = Scratch::new("lazy-hydrate");
    let dir = scratch.path();
    let content = source(dir);
    let web = WebServer::start(dir);
    let url = web.url("/disk.qcow2");
    let options = format!("--control ctl.sock --cache-dir cache --overlay own.qcow2 {url}");
    let server = Server::start(dir, &options);
    let out = ctl(dir, &["hydrate-query", ""]).exits(1);
    assert!(out.stderr.contains("no hydration"), "{out}");
    let state = || -> serde_json::Value {
        serde_json::from_str(&ctl(dir, &["hydrate-query", ""]).ok().stdout).unwrap()
    };
    let is_past_the_data = || state()["done"].as_u64().unwrap() > DATA;
    // Many times as long as the cancellation takes.
    ctl(dir, &["hydrate", "--rate", "1M", ""]).ok();
    let out = ctl(dir, &["hydrate", ""]).exits(1);
    assert!(out.stderr.contains("under way"), "{out}");
    wait_until("hydration of the data", is_past_the_data);
    ctl(dir, &["hydrate-cancel", ""]).ok();
    let state = state();
    let done = state["done"].as_u64().unwrap();
    assert!(state["status"] == "cancelled" && done > DATA && done < LEN - (4 << 20), "{state}");
    // One that is killed leaves no more behind than one that is cancelled.
    ctl(dir, &["hydrate", "--rate", "1M", ""]).ok();
    wait_until("hydration after the cancelled one", is_past_the_data);
    drop(server);
    for name in ["nbd.sock", "ctl.sock"] {
        let _ = std::fs::remove_file(dir.join(name));
    }
    let server = Server::start(dir, &options);
    // Clients write meanwhile; each block is theirs from then on.
    let is_over = AtomicBool::new(false);
    let written = std::thread::scope(|scope| {
        let (is_over, socket) = (&is_over, server.socket());
        let writer = scope.spawn(move || {
            let mut client = Client::open(socket, "").unwrap();
            let mut random = Random::new(77);
            let mut written = Vec::new();
            while !is_over.load(Ordering::Relaxed) {
                let at = random.below(LEN / 4096) * 4096;
                let seed = random.bits();
                assert_eq!(client.write(0, at, &pattern(4096, seed)).unwrap(), 0);
                written.push((at, seed));
            }
            written
        });
        ctl(dir, &["hydrate", "--rate", "8M", "-w", "--drop-backing", ""]).ok();
        is_over.store(true, Ordering::Relaxed);
        writer.join().unwrap()
    });
    let state = ctl(dir, &["hydrate-query", ""]).ok().stdout;
    assert!(state.contains("completed"), "{state}");
    assert!(written.len() > 20, "{}", written.len());
    server.stop();
    drop(web);
    let mut right = content;
    for (at, seed) in written {
        right[at as usize..][..4096].copy_from_slice(&pattern(4096, seed));
    }
    assert!(!qemu_img(dir, "info own.qcow2").stdout.contains("backing"));
    qemu_img(dir, "check -q own.qcow2");
    std::fs::write(dir.join("right.raw"), &right).unwrap();
    qemu_img(dir, "compare -q -f qcow2 -F raw own.qcow2 right.raw");
    // What was zero takes no space.
    let size = std::os::unix::fs::MetadataExt::blocks(&dir.join("own.qcow2").metadata().unwrap()) * 512;
    assert!(size < LEN + (2 << 20), "{size}");
}

#[test]
fn a_hundred_overlays_share_what_is_fetched_and_take_little_memory() {
    const OVERLAYS: usize = 100;
    let scratch = Scratch::new("lazy-hundred");
    let dir = scratch.path();
    let content = source(dir);
    let web = WebServer::start(dir);
    let url = web.url("/disk.qcow2");
    let server = |overlay: &str, overlays: usize, url: &str| {
        let mut options = "--cache-dir cache".to_owned();
        for number in 0..overlays {
            options += &format!(" --overlay {overlay}{number}.qcow2 --export-name e{number}");
        }
        for _ in 0..overlays {
            options += &format!(" {url}");
        }
        Server::start(dir, &options)
    };
    // A name of its own: what was on its way when this server ended is fetched again by the next.
    let one = server("alone", 1, &format!("{url}?alone"));
    Client::open(one.socket(), "e0").unwrap().read(DATA, 1 << 20).unwrap();
    let alone = one.resident_kib();
    one.stop();
    let many = server("own", OVERLAYS, &url);
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let (content, socket) = (&content, many.socket());
            scope.spawn(move || {
                for number in (thread..OVERLAYS).step_by(8) {
                    let mut client = Client::open(socket, &format!("e{number}")).unwrap();
                    for at in (0..LEN).step_by(3 << 20) {
                        assert!(client.read(at, 1 << 20).unwrap() == content[at as usize..][..1 << 20]);
                    }
                    assert_eq!(client.write(0, DATA, &[number as u8; 4096]).unwrap(), 0);
                }
            });
        }
    });
    let together = many.resident_kib();
    println!("one overlay: {alone} KiB, {OVERLAYS}: {together} KiB");
    // The buffers of eight clients come on top.
    assert!(together < alone + (OVERLAYS as u64) * 1024 + (64 << 10), "{alone} {together}");
    for number in [0, 57, 99] {
        let mut client = Client::open(many.socket(), &format!("e{number}")).unwrap();
        assert!(client.read(DATA, 4096).unwrap() == [number as u8; 4096]);
    }
    many.stop();
    let mut fetched = ranges(&web, "/disk.qcow2 ");
    fetched.retain(|range| *range != (0, 65536));
    fetched.sort_unstable();
    assert!(fetched.len() > 4 && fetched.windows(2).all(|pair| pair[0].1 <= pair[1].0), "{fetched:?}");
}

#[test]
fn a_disk_on_an_nbd_server_has_overlays_too() {
    let scratch = Scratch::new("lazy-nbd");
    let dir = scratch.path();
    let content = source(dir);
    let far = ForeignServer::qemu(dir, "-r -f qcow2 www/disk.qcow2");
    let options = format!("--control ctl.sock --overlay own.qcow2 -f raw {}", far.uri());
    let server = Server::start(dir, &options);
    let mut client = Client::open(server.socket(), "").unwrap();
    assert!(client.read(DATA, 1 << 20).unwrap() == content[DATA as usize..][..1 << 20]);
    assert_eq!(client.write(0, 4096, &[3; 4096]).unwrap(), 0);
    ctl(dir, &["hydrate", "-w", "--drop-backing", ""]).ok();
    drop(client);
    server.stop();
    drop(far);
    let mut right = content;
    right[4096..8192].fill(3);
    std::fs::write(dir.join("right.raw"), &right).unwrap();
    qemu_img(dir, "compare -q -f qcow2 -F raw own.qcow2 right.raw");
    // The next start needs no server.
    let server =
        Server::start(dir, &format!("--overlay own.qcow2 -f raw {}", dir.join("right.raw").display()));
    let said = server.stop_with_messages();
    assert!(said.contains("names no backing file"), "{said}");
}

/// A qcow2 image has no place for the size of sectors: alone, its partition table would be read wrong.
#[test]
fn a_base_that_tells_of_large_sectors_is_not_dropped() {
    let scratch = Scratch::new("lazy-sectors");
    let dir = scratch.path();
    zebu(dir, ["create", "-q", "-f", "vhdx", "-o", "logical_sector_size=4096", "base.vhdx", "4M"]).ok();
    zebu(dir, ["create", "-q", "-f", "qcow2", "-b", "base.vhdx", "-F", "vhdx", "own.qcow2"]).ok();
    let server = Server::start(dir, "--control ctl.sock own.qcow2");
    let out = ctl(dir, &["hydrate", "-w", "--drop-backing", ""]);
    assert!(out.code == Some(1) && out.stderr.contains("keep the backing file"), "{out}");
    ctl(dir, &["hydrate", "-w", ""]).ok();
    server.stop();
    assert!(zebu(dir, ["info", "own.qcow2"]).ok().stdout.contains("base.vhdx"));
}
