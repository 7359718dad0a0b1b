//! The cache of disks on web servers: several processes on one directory, servers that are killed, full disks.
//!
//! `ZEBU_KILL_ROUNDS` sets the number of kills.

use std::io::{self, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use zebu_tests::certificates::{AUTHORITY, certificates, issue};
use zebu_tests::mount::Mounted;
use zebu_tests::nbd_client::Client;
use zebu_tests::patience::wait_until;
use zebu_tests::program::{find, run_in, zebu};
use zebu_tests::random::Random;
use zebu_tests::scratch::Scratch;
use zebu_tests::server::Server;
use zebu_tests::web_server::WebServer;

/// Bytes of the disk.
const LEN: usize = 24 << 20;

/// A disk with data and zeroes, as `www/disk.raw`, `www/disk.qcow2` and, compressed, `www/packed.qcow2`.
fn source(dir: &Path, seed: u64) -> Vec<u8> {
    let mut content = vec![0; LEN];
    let mut random = Random::new(seed);
    for word in content[1 << 20..].chunks_exact_mut(8) {
        word.copy_from_slice(&(random.bits() >> 9).to_le_bytes());
    }
    std::fs::create_dir_all(dir.join("www")).unwrap();
    std::fs::write(dir.join("www/disk.raw"), &content).unwrap();
    let qemu_img = find("qemu-img").expect("qemu-img is missing: `cargo xtask setup` installs it");
    for options in ["www/disk.qcow2", "-c www/packed.qcow2"] {
        let line = format!("convert -f raw -O qcow2 www/disk.raw {options}");
        run_in(dir, &qemu_img, line.split_whitespace()).ok();
    }
    content
}

/// Converts `name` to raw bytes, through the cache `cache`; them, and what was said.
fn convert(dir: &Path, words: &[&str], name: &str) -> (Vec<u8>, String) {
    let mut line = vec!["convert", "-v", "-O", "raw", "--cache-dir", "cache"];
    line.extend(words);
    line.extend([name, "flat.raw"]);
    let out = zebu(dir, line).ok();
    let bytes = std::fs::read(dir.join("flat.raw")).unwrap();
    std::fs::remove_file(dir.join("flat.raw")).unwrap();
    (bytes, out.stderr)
}

/// Requests of the server's log for a path.
fn requests(web: &WebServer, path: &str) -> Vec<String> {
    web.whole_log().lines().filter(|line| line.contains(path)).map(str::to_owned).collect()
}

#[test]
fn a_second_command_asks_the_server_for_nothing_but_the_version() {
    let scratch = Scratch::new("cache-second");
    let dir = scratch.path();
    let content = source(dir, 1);
    let web = WebServer::start(dir);
    for (format, path) in [("raw", "/disk.raw"), ("qcow2", "/disk.qcow2"), ("qcow2", "/packed.qcow2")] {
        let (bytes, said) = convert(dir, &["-f", format], &web.url(path));
        assert!(bytes == content, "{path}: {said}");
        assert!(said.contains("0 not stored, 0 evicted, 0 blocks"), "{said}");
        let before = requests(&web, path).len();
        for aio in ["io_uring", "threads"] {
            let (bytes, said) = convert(dir, &["-f", format, "--aio", aio], &web.url(path));
            assert!(bytes == content && said.contains(" 0 bytes fetched"), "{path}: {said}");
        }
        let later = &requests(&web, path)[before..];
        assert!(later.len() == 2 && later.iter().all(|line| line.contains("bytes=0-65535")), "{later:?}");
    }
    // Another version has a place of its own.
    let changed = source(dir, 2);
    let (bytes, _) = convert(dir, &["-f", "raw"], &web.url("/disk.raw"));
    assert!(bytes == changed);
    let (bytes, said) = convert(dir, &["-f", "raw"], &web.url("/disk.raw"));
    assert!(bytes == changed && said.contains(" 0 bytes fetched"), "{said}");
    // A query may lead to something else, so it counts; no secret of it is kept in a name.
    let (bytes, said) = convert(dir, &["-f", "raw"], &web.url("/disk.raw?signature=abcdef"));
    assert!(bytes == changed && !said.contains(" 0 bytes fetched") && !said.contains("abcdef"), "{said}");
    // A bound holds.
    let (bytes, said) = convert(dir, &["-f", "qcow2", "--remote-cache-size", "16M"], &web.url("/disk.qcow2"));
    assert!(bytes == changed && !said.contains(" 0 evicted"), "{said}");
    let used = run_in(dir, &find("du").unwrap(), ["-s", "-B1M", "cache"]).ok().stdout;
    let used: u64 = used.split_whitespace().next().unwrap().parse().unwrap();
    assert!(used <= 18, "{used} MiB");
}

#[test]
fn what_has_no_version_is_not_kept_and_the_reason_is_told() {
    let scratch = Scratch::new("cache-without");
    let dir = scratch.path();
    let content = source(dir, 3);
    let web = WebServer::start_with(
        dir,
        "location /dated/ { alias www/; etag off; }\nlocation /weak/ { alias www/; etag off; add_header ETag 'W/\"1\"'; }\n",
    );
    for path in ["/dated/disk.raw", "/weak/disk.raw", "/whole/disk.raw"] {
        for _ in 0..2 {
            let (bytes, said) = convert(dir, &["-f", "raw"], &web.url(path));
            assert!(bytes == content && said.contains("not cached: the server"), "{path}: {said}");
        }
    }
    let below = dir.join("serve");
    std::fs::create_dir(&below).unwrap();
    let server = Server::start(&below, "--read-only -f raw ../www/disk.raw");
    let (bytes, said) = convert(dir, &["-f", "raw"], &server.uri(""));
    assert!(bytes == content && said.contains("not cached: an NBD server"), "{said}");
    server.stop();
    let out = zebu(dir, ["info", "--remote-cache-size", "1G", "www/disk.raw"]).exits(1);
    assert!(out.stderr.contains("--cache-dir"), "{out}");
    std::fs::create_dir(dir.join("open")).unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o777);
    std::fs::set_permissions(dir.join("open"), mode).unwrap();
    let out = zebu(dir, ["info", "--cache-dir", "open", &web.url("/disk.raw")]).exits(1);
    assert!(out.stderr.contains("0700") && out.stderr.lines().count() == 1, "{out}");
}

/// Reads at random through a server's socket until it fails; bytes that were right. A wrong one ends the test.
fn read_until_it_ends(socket: &Path, content: &[u8], seed: u64) -> u64 {
    let mut random = Random::new(seed);
    let mut read = 0;
    let Ok(mut client) = Client::open(socket, "") else { return 0 };
    loop {
        let len = *random.pick(&[4096, 65536, 1 << 20]);
        let offset = random.below(LEN as u64 - len) / 512 * 512;
        match client.read(offset, len) {
            Ok(bytes) => {
                assert!(bytes == content[offset as usize..][..len as usize], "wrong bytes: {offset}+{len}");
                read += len;
            }
            Err(error) => {
                assert_ne!(error.kind(), io::ErrorKind::Other, "{error}");
                return read;
            }
        }
    }
}

#[test]
fn no_wrong_byte_is_shown_however_often_a_server_is_killed() {
    let rounds: u64 = std::env::var("ZEBU_KILL_ROUNDS").ok().and_then(|n| n.parse().ok()).unwrap_or(8);
    let scratch = Scratch::new("cache-kills");
    let dir = scratch.path();
    let content = source(dir, 4);
    let web = WebServer::start(dir);
    // Less than the disk: blocks come and go all the time. Another server lives on, with the same directory.
    let options = |format: &str, path: &str| {
        format!("--read-only --cache-dir ../cache --remote-cache-size 16M -f {format} {}", web.url(path))
    };
    let places = ["stays", "killed"].map(|name| dir.join(name));
    for place in &places {
        std::fs::create_dir(place).unwrap();
    }
    let stays = Server::start(&places[0], &options("raw", "/disk.raw"));
    let is_over = AtomicBool::new(false);
    let read = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let (is_over, read, content, socket) = (&is_over, &read, &content, stays.socket());
        scope.spawn(move || {
            let mut client = Client::open(socket, "").unwrap();
            let mut random = Random::new(99);
            while !is_over.load(Ordering::Relaxed) {
                let offset = random.below(LEN as u64 - 65536) / 512 * 512;
                let bytes = client.read(offset, 65536).unwrap();
                assert!(bytes == content[offset as usize..][..65536], "wrong bytes: {offset}");
            }
        });
        let mut random = Random::new(5);
        for round in 0..rounds {
            let (format, path) = if round % 2 == 0 { ("raw", "/disk.raw") } else { ("qcow2", "/disk.qcow2") };
            let server = Server::start(&places[1], &options(format, path));
            let readers: Vec<_> = (0..2)
                .map(|reader| {
                    let socket = server.socket().to_owned();
                    scope.spawn(move || read_until_it_ends(&socket, content, round * 2 + reader))
                })
                .collect();
            std::thread::sleep(Duration::from_millis(random.between(5, 400)));
            drop(server);
            let _ = std::fs::remove_file(places[1].join("nbd.sock"));
            for reader in readers {
                read.fetch_add(reader.join().unwrap(), Ordering::Relaxed);
            }
        }
        is_over.store(true, Ordering::Relaxed);
    });
    let said = stays.stop_with_messages();
    assert!(said.is_empty(), "{said}");
    println!("{rounds} kills, {} MiB read", read.load(Ordering::Relaxed) >> 20);
    let used = run_in(dir, &find("du").unwrap(), ["-s", "-B1M", "cache"]).ok().stdout;
    let used: u64 = used.split_whitespace().next().unwrap().parse().unwrap();
    assert!(used <= 40, "{used} MiB: what killed servers left is found when a cache is opened");
    let (bytes, said) = convert(dir, &["-f", "raw", "--remote-cache-size", "16M"], &web.url("/disk.raw"));
    assert!(bytes == content && said.contains(" 0 blocks with wrong bytes"), "{said}");
    let used = run_in(dir, &find("du").unwrap(), ["-s", "-B1M", "cache"]).ok().stdout;
    let used: u64 = used.split_whitespace().next().unwrap().parse().unwrap();
    assert!(used <= 18, "{used} MiB");
}

#[test]
fn a_disk_that_is_full_at_the_start_is_told_of_and_reads_go_on() {
    let Some(small) = Mounted::tmpfs(64 << 10) else { return };
    let scratch = Scratch::new("cache-full-start");
    let dir = scratch.path();
    let content = source(dir, 7);
    let web = WebServer::start(dir);
    let filler = small.path().join("filler");
    let cache = small.path().join("cache");
    let words = ["convert", "-f", "raw", "-O", "raw", "--cache-dir", cache.to_str().unwrap()];
    let url = web.url("/disk.raw");
    // With no cache there yet, and with one that has no place for another object.
    for turn in ["new", "old"] {
        if turn == "old" {
            std::fs::remove_file(&filler).unwrap();
            zebu(
                dir,
                ["info", "-f", "raw", "--cache-dir", cache.to_str().unwrap(), &web.url("/disk.raw?other")],
            )
            .ok();
        }
        let mut file = std::fs::File::create(&filler).unwrap();
        while file.write_all(&[1; 512]).is_ok() {}
        let _ = std::fs::remove_file(dir.join("copy.raw"));
        let done = zebu(dir, words.iter().copied().chain([url.as_str(), "copy.raw"])).ok();
        assert!(std::fs::read(dir.join("copy.raw")).unwrap() == content, "{turn}");
        // What an earlier command could not store is given back at the opening, which may be enough for the object's map.
        let is_told = ["is kept", "nothing is stored"].iter().any(|words| done.stderr.contains(words));
        assert!(done.stderr.lines().count() == 1 && is_told, "{turn}: {}", done.stderr);
    }
}

#[test]
fn a_full_disk_ends_the_storing_once_and_nothing_else() {
    let Some(small) = Mounted::tmpfs(6 << 20) else { return };
    let scratch = Scratch::new("cache-full");
    let dir = scratch.path();
    let content = source(dir, 6);
    let web = WebServer::start(dir);
    let options =
        format!("--read-only -f raw --cache-dir {}/cache {}", small.path().display(), web.url("/disk.raw"));
    let server = Server::start(dir, &options);
    let mut client = Client::open(server.socket(), "").unwrap();
    for _ in 0..2 {
        for at in (0..LEN).step_by(1 << 20) {
            assert!(client.read(at as u64, 1 << 20).unwrap() == content[at..][..1 << 20]);
        }
    }
    drop(client);
    let said = server.stop_with_messages();
    assert!(said.lines().count() == 1 && said.contains("nothing is stored"), "{said}");
    assert!(said.contains("No space left"), "{said}");
    // What was stored before is used by the next one.
    let line = ["io", "-v", "-r", "-f", "raw", "--cache-dir"];
    let cache = small.path().join("cache");
    let out = zebu(
        dir,
        line.iter().copied().chain([cache.to_str().unwrap(), &web.url("/disk.raw"), "-c", "read 1M 1M"]),
    );
    assert!(out.ok().stderr.contains(" 0 bytes fetched"));
}

/// A false server that tells the same version as the true one, read by who does not verify it.
#[test]
fn bytes_that_nobody_vouched_for_are_given_to_nobody_else() {
    let scratch = Scratch::new("cache-trust");
    let dir = scratch.path();
    let content = source(dir, 8);
    certificates(dir);
    let web = WebServer::start(dir);
    let (url, path) = (web.secure_url("/disk.raw"), dir.join("www/disk.raw"));
    let time = std::fs::metadata(&path).unwrap().modified().unwrap();
    // nginx makes an ETag of the length and the time.
    let show = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        std::fs::File::options().write(true).open(&path).unwrap().set_modified(time).unwrap();
    };
    show(&vec![0xee; LEN]);
    let unchecked = format!("driver=https,url={url},sslverify=off");
    let (bytes, said) = convert(dir, &["--image-opts"], &unchecked);
    assert!(bytes == vec![0xee; LEN]);
    assert!(said.contains("not cached: the server's certificate is not verified"), "{said}");
    show(&content);
    let verified = ["-f", "raw", "--tls-ca", "ca-cert.pem"];
    let (bytes, said) = convert(dir, &verified, &url);
    assert!(bytes == content, "{said}");
    let (bytes, said) = convert(dir, &verified, &url);
    assert!(bytes == content && said.contains(" 0 bytes fetched"), "{said}");
    // Who believes others, or follows a server anywhere, has bytes of their own.
    issue(dir, "other", "other", "/CN=other", AUTHORITY);
    let both = ["ca-cert.pem", "other-cert.pem"].map(|name| std::fs::read(dir.join(name)).unwrap()).concat();
    std::fs::write(dir.join("both.pem"), both).unwrap();
    for words in
        [&["-f", "raw", "--tls-ca", "both.pem"][..], &[&verified[..], &["--redirects", "any"]].concat()]
    {
        let (bytes, said) = convert(dir, words, &url);
        assert!(bytes == content && !said.contains(" 0 bytes fetched"), "{said}");
    }
}

/// A server in its sandbox, whose cache another process has filled meanwhile.
#[test]
fn a_server_stores_again_after_another_process_has_filled_the_cache() {
    let scratch = Scratch::new("cache-starved");
    let dir = scratch.path();
    let content = source(dir, 9);
    std::fs::write(dir.join("www/other.raw"), content.repeat(2)).unwrap();
    let web = WebServer::start(dir);
    let cache = ["--cache-dir", "cache", "--remote-cache-size", "16M"];
    let options =
        format!("--control ctl.sock --read-only -f raw {} {}", cache.join(" "), web.url("/disk.raw"));
    let server = Server::start(dir, &options);
    let mut client = Client::open(server.socket(), "").unwrap();
    let mut read = |from: usize, to: usize| {
        for at in (from..to).map(|at| at << 20) {
            assert!(client.read(at as u64, 1 << 20).unwrap() == content[at..][..1 << 20]);
        }
    };
    let counter = |name: &str| {
        let stats = zebu(dir, ["ctl", "ctl.sock", "stats"]).ok().stdout;
        let stats: serde_json::Value = serde_json::from_str(&stats).unwrap();
        stats["remote-cache"][name].as_u64().unwrap()
    };
    read(0, 4);
    wait_until("it is stored", || counter("stored-bytes") >= 4 << 20);
    let line = [&["convert", "-f", "raw", "-O", "raw"][..], &cache].concat();
    let url = web.url("/other.raw");
    zebu(dir, line.iter().copied().chain([url.as_str(), "other.raw"])).ok();
    let stored = counter("stored-bytes");
    read(20, 22);
    wait_until("what is read now is stored", || counter("stored-bytes") >= stored + (2 << 20));
    wait_until("it comes from the cache", || {
        let hits = counter("hit-bytes");
        read(20, 22);
        counter("hit-bytes") >= hits + (2 << 20)
    });
    server.stop();
}
