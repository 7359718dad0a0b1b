//! Disks on web servers: nginx, with proxies, certificates, users, and a network that breaks in between.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use zebu_tests::program::{Finished, find, finish, run_in, zebu, zebu_program};
use zebu_tests::scratch::Scratch;
use zebu_tests::server::Server;
use zebu_tests::web_proxy::{Mishap, WebProxy};
use zebu_tests::web_server::{WebServer, certificates};

/// Bytes of the disk.
const LEN: usize = 24 << 20;

/// A disk with data and zeroes, as `www/disk.raw`, `www/disk.qcow2` and, compressed, `www/packed.qcow2`.
fn source(dir: &Path) -> Vec<u8> {
    let mut content = vec![0; LEN];
    let mut state = 1u64;
    for word in content[1 << 20..17 << 20].chunks_exact_mut(8) {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        word.copy_from_slice(&(state >> 11).to_le_bytes());
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

fn flat(dir: &Path) -> Vec<u8> {
    std::fs::read(dir.join("flat.raw")).unwrap()
}

/// Converts to `flat.raw`.
fn convert(dir: &Path, words: &[&str], name: &str) -> Finished {
    let _ = std::fs::remove_file(dir.join("flat.raw"));
    let mut line = vec!["convert", "-O", "raw"];
    line.extend(words);
    line.extend([name, "flat.raw"]);
    zebu(dir, line)
}

fn zebu_with(dir: &Path, variables: &[(&str, &str)], words: &[&str]) -> Finished {
    let mut command = Command::new(zebu_program());
    command.args(words).current_dir(dir).envs(variables.iter().copied());
    finish(command)
}

#[test]
fn files_on_a_web_server_are_sources_of_every_command() {
    let scratch = Scratch::new("http-sources");
    let dir = scratch.path();
    let content = source(dir);
    let server = WebServer::start(dir);
    let raw = server.url("/disk.raw");
    for aio in ["io_uring", "threads"] {
        for (format, name) in [("raw", "/disk.raw"), ("qcow2", "/disk.qcow2"), ("qcow2", "/packed.qcow2")] {
            convert(dir, &["--aio", aio, "-f", format], &server.url(name)).ok();
            assert!(flat(dir) == content, "{name}");
        }
    }
    let info = zebu(dir, ["info", "--output", "json", &server.url("/disk.qcow2")]).ok().stdout;
    assert!(info.contains(&format!("\"virtual-size\": {LEN}")) && info.contains("\"http\""), "{info}");
    zebu(dir, ["compare", "-f", "raw", "-F", "qcow2", &raw, "www/disk.qcow2"]).ok();
    for command in [
        &["map", "-f", "qcow2", "--output", "json"][..],
        &["measure", "-O", "qcow2", "-f", "qcow2"],
        &["check", "-f", "qcow2"],
    ] {
        let run = |name: &str| zebu(dir, command.iter().copied().chain([name])).ok().stdout;
        let theirs = run("www/disk.qcow2").replace("www/disk.qcow2", "X");
        assert_eq!(run(&server.url("/disk.qcow2")).replace(&server.url("/disk.qcow2"), "X"), theirs);
    }
    zebu(dir, ["io", "-r", "-f", "raw", &raw, "-c", "read -P 0 0 1M", "-c", "read 1048000 1M"]).ok();
    let line = ["backup", "-f", "raw", "--output", "json", "--manifest", "m", &raw, "backup.qcow2"];
    assert!(zebu(dir, line).ok().stdout.contains("\"read-bytes\""));
    zebu(dir, ["compare", "-f", "qcow2", "-F", "raw", "backup.qcow2", "www/disk.raw"]).ok();
    zebu(dir, ["verify", "--manifest", "m", "backup.qcow2"]).ok();
    std::fs::copy(dir.join("backup.qcow2"), dir.join("www/backup.qcow2")).unwrap();
    zebu(dir, ["verify", "--manifest", "m", &server.url("/backup.qcow2")]).ok();
    // What would be read is told beforehand, and nothing is made.
    let map = zebu(
        dir,
        ["convert", "--dry-run", "--output", "json", "-O", "raw", &server.url("/disk.qcow2"), "none"],
    );
    let told: serde_json::Value = serde_json::from_str(&map.ok().stdout).unwrap();
    assert_eq!((told["total"].as_u64(), told["read"].as_u64()), (Some(LEN as u64), Some(16 << 20)));
    assert!(told["remote"]["read-bytes"].as_u64().is_some_and(|bytes| bytes < 1 << 20), "{told}");
    let line = ["backup", "--dry-run", &server.url("/packed.qcow2"), "none"];
    assert!(zebu(dir, line).ok().stdout.contains("16777216 that are compressed"));
    assert!(!dir.join("none").exists());
    // QEMU's keys.
    let keys = format!("driver=http,url={raw},readahead=256k,timeout=20,memory=8M,connections=2");
    convert(dir, &["--image-opts"], &keys).ok();
    assert!(flat(dir) == content);
    let keys = format!("driver=qcow2,file.driver=http,file.url={}", server.url("/packed.qcow2"));
    let out = convert(dir, &["--image-opts", "-v"], &keys).ok();
    assert!(flat(dir) == content && out.stderr.contains("0 retries"), "{out}");
    // Odd lengths, an empty file, and one that ends within a block.
    for len in [0, 1, 511, 512, 65_535, 65_537, 300_001] {
        std::fs::write(dir.join("www/odd"), &content[1 << 20..][..len]).unwrap();
        zebu(dir, ["convert", "-f", "raw", "-O", "raw", &server.url("/odd"), "odd.raw"]).ok();
        let odd = std::fs::read(dir.join("odd.raw")).unwrap();
        let end = odd.len().min(len);
        assert!(odd[..end] == content[1 << 20..][..end] && odd.len() == len.next_multiple_of(512), "{len}");
    }
    let out = zebu(dir, ["convert", "-f", "raw", "-O", "raw", "www/disk.raw", &raw]).exits(1);
    assert!(out.stderr.contains("Read-only") && out.stderr.lines().count() == 1, "{out}");
}

#[test]
fn random_reads_are_right_whatever_the_memory() {
    let scratch = Scratch::new("http-random");
    let dir = scratch.path();
    let content = source(dir);
    let server = WebServer::start(dir);
    for (memory, depth) in [("4M", 1), ("4M", 16), ("64M", 16)] {
        let mut lines = Vec::new();
        let mut state = 7u64;
        for index in 0..100 {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let offset = (state >> 20) as usize % (LEN - 600_000);
            let len = [512, 4096, 5000, 8192, 70_000, 300_000]
                [if index % 20 == 0 { 5 } else { (state >> 50) as usize % 5 }];
            lines.push((offset, len));
        }
        // Through a server of blocks, many at a time; each is compared with what was written.
        let keys = format!("driver=http,url={},memory={memory}", server.url("/disk.raw"));
        let mut words = vec!["io".to_owned(), "-r".to_owned(), "--image-opts".to_owned(), keys];
        for (index, (offset, len)) in lines.iter().enumerate() {
            let command = if depth > 1 { "aio_read -v" } else { "read -v" };
            words.extend(["-c".to_owned(), format!("{command} {offset} {len}")]);
            if depth > 1 && index % depth == depth - 1 {
                words.extend(["-c".to_owned(), "aio_flush".to_owned()]);
            }
        }
        words.extend(["-c".to_owned(), "aio_flush".to_owned()]);
        let out = zebu(dir, &words).ok();
        let mut lines_read = 0;
        for line in out.stdout.lines() {
            let Some((offset, bytes)) = line.split_once(":  ") else { continue };
            let Ok(offset) = usize::from_str_radix(offset, 16) else { continue };
            for (index, byte) in bytes.split_whitespace().take(16).enumerate() {
                let Some(byte) = u8::from_str_radix(byte, 16).ok().filter(|_| byte.len() == 2) else { break };
                assert_eq!(byte, content[offset + index], "offset {offset}");
            }
            lines_read += 1;
        }
        assert!(lines_read > 5_000, "{lines_read}");
    }
}

#[test]
fn what_breaks_is_asked_for_again_and_nothing_is_mixed_up() {
    let scratch = Scratch::new("http-faults");
    let dir = scratch.path();
    let content = source(dir);
    let server = WebServer::start(dir);
    let proxy = WebProxy::start(server.port(), |_, _| Mishap::None);
    let url = proxy.url("/disk.raw");
    let faults = [
        Mishap::CutAfter(0),
        Mishap::CutAfter(70_000),
        Mishap::ResetAfter(300_000),
        Mishap::Answer("503 Service Unavailable".to_owned()),
        Mishap::Answer("429 Too Many Requests\r\nRetry-After: 1".to_owned()),
        Mishap::Answer("500 Internal Server Error\r\nRetry-After: soon".to_owned()),
        Mishap::Answer("403 Forbidden".to_owned()),
        Mishap::Answer("404 Not Found".to_owned()),
        Mishap::WithoutRange,
        Mishap::RangeHigher(512),
        Mishap::Replace("Content-Range", "X-Range"),
        Mishap::Replace("206 Partial Content", "206 Partial Content\r\nContent-Encoding: gzip"),
        Mishap::Replace("Content-Range: bytes ", "Content-Range: bits "),
        Mishap::Garbage,
        Mishap::EndlessHead,
        Mishap::EndlessChunk,
        Mishap::Late(Duration::from_millis(300)),
    ];
    // One at a time, with which a quarter of all requests meets.
    for fault in faults {
        let is_answer = matches!(fault, Mishap::Answer(_));
        let (rule, name) = (fault.clone(), format!("{fault:?}"));
        let before = proxy.requests();
        proxy.change(move |number, _| if (number - before) % 4 == 2 { rule.clone() } else { Mishap::None });
        let out = convert(dir, &["-f", "raw", "-v"], &url).ok();
        assert!(flat(dir) == content, "{name}");
        let told = out.stderr.lines().any(|line| line.contains("a request failed"));
        assert!(told || matches!(fault, Mishap::Late(_) | Mishap::CutAfter(0)), "{name}: {out}");
        assert!(!is_answer || !out.stderr.contains(" 0 retries"), "{name}: {out}");
        // Small reads, and read-ahead.
        let before = proxy.requests();
        proxy.change(move |number, _| if (number - before) % 3 == 1 { fault.clone() } else { Mishap::None });
        zebu(dir, ["compare", "-f", "raw", "-F", "raw", &url, "www/disk.raw"]).ok();
    }
    // All at once.
    let before = proxy.requests();
    proxy.change(move |number, _| match (number - before) % 7 {
        1 => Mishap::CutAfter(1000),
        3 => Mishap::ResetAfter(5000),
        5 => Mishap::Answer("502 Bad Gateway".to_owned()),
        6 => Mishap::WithoutRange,
        _ => Mishap::None,
    });
    convert(dir, &[], &proxy.url("/packed.qcow2")).ok();
    assert!(flat(dir) == content);
}

/// All that is asked for at once takes several times as long as one answer may: bytes come all the time.
#[test]
fn a_slow_server_is_waited_for_as_long_as_bytes_come() {
    let scratch = Scratch::new("http-slow");
    let dir = scratch.path();
    source(dir);
    let content: Vec<u8> = (0..4 << 20).map(|at: u32| (at / 512 % 255) as u8 + 1).collect();
    std::fs::write(dir.join("www/slow.raw"), &content).unwrap();
    let server = WebServer::start(dir);
    let proxy = WebProxy::start(server.port(), |_, _| Mishap::Slow(160 << 10));
    let keys = format!("driver=http,url={},timeout=2,connections=1", proxy.url("/slow.raw"));
    let begin = Instant::now();
    convert(dir, &["--image-opts", "-m", "16", "--buffer-memory", "4M"], &keys).ok();
    assert!(begin.elapsed() > Duration::from_secs(9), "the server was slow");
    assert!(flat(dir) == content);
}

/// A server that gives the object at its own place at first, and sends its clients elsewhere later.
#[test]
fn a_redirect_after_the_opening_is_followed_and_judged() {
    let scratch = Scratch::new("http-later");
    let dir = scratch.path();
    let content = source(dir);
    let server = WebServer::start(dir);
    let moved_to = |place: &'static str| {
        WebProxy::start(server.port(), move |number, head| {
            if number >= 2 && head.starts_with("GET /disk.raw ") {
                Mishap::Answer(format!("302 Found\r\nLocation: {place}"))
            } else {
                Mishap::None
            }
        })
    };
    convert(dir, &["-f", "raw"], &moved_to("/disk.raw?place=2").url("/disk.raw")).ok();
    assert!(flat(dir) == content);
    std::fs::remove_file(dir.join("flat.raw")).unwrap();
    for (place, word) in [("ftp://127.0.0.1/x", "scheme"), ("/whole/other.raw", "404")] {
        let proxy = moved_to(place);
        let keys = format!("driver=http,url={},timeout=2", proxy.url("/disk.raw"));
        let out = convert(dir, &["--image-opts"], &keys).exits(1);
        assert!(out.stderr.contains(word), "{place}: {out}");
    }
}

#[test]
fn a_server_that_does_not_recover_is_an_error_at_the_deadline() {
    let scratch = Scratch::new("http-deadline");
    let dir = scratch.path();
    source(dir);
    let server = WebServer::start(dir);
    let proxy = WebProxy::start(server.port(), |_, _| Mishap::None);
    let keys = format!("driver=http,url={},timeout=2", proxy.url("/disk.raw?token=secret"));
    for (fault, word) in [
        (Mishap::SilentAfter(1000), "does not answer"),
        (Mishap::Answer("503 Service Unavailable".to_owned()), "503"),
        (Mishap::Answer("403 Forbidden".to_owned()), "403"),
        (Mishap::WithoutRange, "no ranges"),
        (Mishap::RangeHigher(1), "Content-Range"),
        (Mishap::Drip(Duration::from_millis(200)), "does not answer"),
    ] {
        let name = format!("{fault:?}");
        let before = proxy.requests();
        proxy.change(move |number, _| if number - before < 4 { Mishap::None } else { fault.clone() });
        let begin = Instant::now();
        let out = convert(dir, &["--image-opts", "-m", "1", "--buffer-memory", "64k"], &keys).exits(1);
        let took = begin.elapsed();
        assert!(took >= Duration::from_millis(1900) && took < Duration::from_secs(60), "{name}: {took:?}");
        assert!(out.stderr.contains("Input/output error") && out.stderr.contains(word), "{name}: {out}");
        assert!(!out.stderr.contains("secret") && !dir.join("flat.raw").exists(), "{name}: {out}");
    }
    // At the opening.
    for (fault, word) in [
        (Mishap::SilentAfter(10), "in time"),
        (Mishap::Answer("503 Service Unavailable".to_owned()), "503"),
        (Mishap::Answer("416 Range Not Satisfiable".to_owned()), "416"),
        (Mishap::Answer("401 Unauthorized".to_owned()), "netrc"),
        (Mishap::Garbage, "breaks the protocol"),
        (Mishap::EndlessHead, "breaks the protocol"),
        (Mishap::Replace("/25165824", "/*"), "length"),
        (Mishap::Replace("/25165824", "/99999999999999999999"), "Content-Range"),
    ] {
        let name = format!("{fault:?}");
        proxy.change(move |_, _| fault.clone());
        let out = zebu(dir, ["info", "--image-opts", &keys]);
        if name.contains("SilentAfter") && out.code == Some(0) {
            continue;
        }
        let out = out.exits(1);
        assert!(out.stderr.contains(word) && !out.stderr.contains("secret"), "{name}: {out}");
        assert_eq!(out.stderr.lines().count(), 1, "{name}: {out}");
    }
}

#[test]
fn an_object_that_changes_is_an_error_and_never_mixed() {
    let scratch = Scratch::new("http-changed");
    let dir = scratch.path();
    let content = source(dir);
    let other: Vec<u8> = content.iter().map(|byte| !byte).collect();
    let server = WebServer::start(dir);
    // The file is replaced before the n-th request; with and without what marks versions.
    for at in [1, 3, 8] {
        for strip in [None, Some("ETag"), Some("Last-Modified")] {
            std::fs::write(dir.join("www/object"), &content).unwrap();
            let (www, new) = (dir.join("www"), other.clone());
            let is_changed = Arc::new(AtomicBool::new(false));
            let changed = Arc::clone(&is_changed);
            let proxy = WebProxy::start(server.port(), move |number, _| {
                if number == at && !changed.swap(true, Ordering::SeqCst) {
                    std::fs::write(www.join("new"), &new).unwrap();
                    let later = std::time::SystemTime::now() + Duration::from_secs(100);
                    std::fs::File::options()
                        .write(true)
                        .open(www.join("new"))
                        .unwrap()
                        .set_modified(later)
                        .unwrap();
                    std::fs::rename(www.join("new"), www.join("object")).unwrap();
                }
                match strip {
                    None => Mishap::None,
                    Some("ETag") => Mishap::Replace("ETag", "X-Tag"),
                    Some(_) => Mishap::Replace("Last-Modified", "X-Modified"),
                }
            });
            let begin = Instant::now();
            let out = convert(dir, &["-f", "raw", "-m", "1"], &proxy.url("/object")).exits(1);
            assert!(out.stderr.contains("another than when it was opened"), "{at} {strip:?}: {out}");
            assert!(begin.elapsed() < Duration::from_secs(30), "nothing would help: no reason to wait");
            assert!(is_changed.load(Ordering::SeqCst) && !dir.join("flat.raw").exists());
        }
    }
    // Of another length, and gone.
    std::fs::write(dir.join("www/object"), &content).unwrap();
    let www = dir.join("www");
    let proxy = WebProxy::start(server.port(), move |number, _| {
        if number == 3 {
            std::fs::File::options().write(true).open(www.join("object")).unwrap().set_len(100_000).unwrap();
        }
        Mishap::None
    });
    let out = convert(dir, &["-f", "raw", "-m", "1"], &proxy.url("/object")).exits(1);
    assert!(out.stderr.contains("the object has another length"), "{out}");
}

#[test]
fn a_server_without_ranges_is_streamed_once_and_nothing_else() {
    let scratch = Scratch::new("http-whole");
    let dir = scratch.path();
    let content = source(dir);
    let server = WebServer::start(dir);
    let whole = server.url("/whole/disk.raw");
    let out = zebu(dir, ["info", "-f", "raw", &whole]).exits(1);
    assert!(out.stderr.contains("no ranges") && out.stderr.lines().count() == 1, "{out}");
    for aio in ["io_uring", "threads"] {
        convert(dir, &["--aio", aio, "-f", "raw"], &whole).ok();
        assert!(flat(dir) == content);
    }
    // A request is logged at its end, which is the client's.
    let begin = Instant::now();
    while server.log().lines().count() < 3 && begin.elapsed() < Duration::from_secs(20) {
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(server.log().lines().count(), 3, "each is read once");
    // A proxy that drops ranges is the same; when it breaks, it is read again from the beginning.
    let proxy = WebProxy::start(server.port(), |number, _| match number {
        0 => Mishap::WithoutRange,
        _ => Mishap::None,
    });
    convert(dir, &["-f", "raw"], &proxy.url("/disk.raw")).ok();
    assert!(flat(dir) == content);
    let proxy = WebProxy::start(server.port(), |number, _| match number {
        0 => Mishap::CutAfter(9 << 20),
        1 => Mishap::ResetAfter(1 << 20),
        _ => Mishap::None,
    });
    let out = convert(dir, &["-f", "raw", "-v"], &proxy.url("/whole/disk.raw")).ok();
    assert!(flat(dir) == content && !out.stderr.contains(" 0 retries"), "{out}");
    // Nobody can say whether it would be the same again.
    let proxy = WebProxy::start(server.port(), |number, _| match number {
        0 => Mishap::Replace("Last-Modified", "X"),
        _ => Mishap::None,
    });
    drop(convert(dir, &["-f", "raw"], &proxy.url("/whole/disk.raw")).ok());
    // A small file is here with the first answer.
    std::fs::write(dir.join("www/small"), &content[1 << 20..][..50_000]).unwrap();
    zebu(dir, ["info", "-f", "raw", &server.url("/whole/small")]).ok();
}

#[test]
fn redirects_are_followed_once_and_places_that_expire_are_looked_up_again() {
    let scratch = Scratch::new("http-moved");
    let dir = scratch.path();
    let content = source(dir);
    let server = WebServer::start(dir);
    convert(dir, &["-f", "raw"], &server.url("/moved/disk.raw")).ok();
    assert!(flat(dir) == content);
    let log = server.log();
    assert_eq!(log.lines().filter(|line| line.contains("/moved/")).count(), 1, "{log}");
    // The place is good for some requests; then the server tells another.
    let uses = Arc::new(Mutex::new((0, 0)));
    let counted = Arc::clone(&uses);
    let proxy = WebProxy::start(server.port(), move |_, head| {
        let mut state = counted.lock().unwrap();
        if head.starts_with("GET /named") {
            state.0 += 1;
            state.1 = 0;
            return Mishap::Answer(format!("302 Found\r\nLocation: /disk.raw?place={}", state.0));
        }
        state.1 += 1;
        let is_old = !head.contains(&format!("place={} ", state.0));
        if is_old || state.1 > 6 { Mishap::Answer("403 Forbidden".to_owned()) } else { Mishap::None }
    });
    convert(dir, &["-f", "raw"], &proxy.url("/named")).ok();
    assert!(flat(dir) == content);
    assert!(uses.lock().unwrap().0 > 1, "it was looked up again");
    for (path, word) in [("/loop", "10 redirects"), ("/ftp", "scheme"), ("/nowhere", "redirect")] {
        let proxy = WebProxy::start(server.port(), |_, head| match head {
            _ if head.starts_with("GET /ftp") => {
                Mishap::Answer("302 Found\r\nLocation: ftp://127.0.0.1/x".to_owned())
            }
            _ if head.starts_with("GET /nowhere") => Mishap::Answer("302 Found".to_owned()),
            _ => Mishap::None,
        });
        let out = zebu(dir, ["info", "-f", "raw", &proxy.url(path)]).exits(1);
        assert!(out.stderr.contains(word) || out.stderr.contains("302"), "{path}: {out}");
        assert_eq!(out.stderr.lines().count(), 1, "{out}");
    }
}

#[test]
fn certificates_are_checked_and_https_is_not_left() {
    let scratch = Scratch::new("http-tls");
    let dir = scratch.path();
    let content = source(dir);
    certificates(dir);
    let server =
        WebServer::start_with(dir, "location /down { return 302 http://127.0.0.1:$server_port/disk.raw; }");
    let plain = server.url("/disk.raw");
    let secure = server.secure_url("/disk.raw");
    for words in
        [&["convert", "-f", "raw", "-O", "raw", &secure, "flat.raw"][..], &["info", "-f", "raw", &secure]]
    {
        let out = zebu(dir, words).exits(1);
        assert!(out.stderr.contains("certificate"), "{out}");
    }
    convert(dir, &["-f", "raw", "--tls-ca", "ca-cert.pem"], &secure).ok();
    assert!(flat(dir) == content);
    let out = zebu_with(dir, &[("SSL_CERT_FILE", "ca-cert.pem")], &["info", "-f", "raw", &secure]);
    out.ok();
    let unchecked = format!("driver=https,url={secure},sslverify=off");
    convert(dir, &["--image-opts"], &unchecked).ok();
    assert!(flat(dir) == content);
    // Another host than the certificate's.
    let other = secure.replace("localhost", "127.0.0.1");
    let out = zebu(dir, ["info", "-f", "raw", "--tls-ca", "ca-cert.pem", &other]).exits(1);
    assert!(out.stderr.contains("certificate"), "{out}");
    // TLS to a server without, and the other way round.
    let out = zebu(dir, ["info", "-f", "raw", &plain.replace("http:", "https:")]).exits(1);
    assert_eq!(out.stderr.lines().count(), 1, "{out}");
    let port = server.port();
    let redirects = WebServer::start_with(
        &{
            let below = dir.join("redirects");
            std::fs::create_dir_all(&below).unwrap();
            for name in ["server-cert.pem", "server-key.pem"] {
                std::fs::copy(dir.join(name), below.join(name)).unwrap();
            }
            below
        },
        &format!("location /down {{ return 302 http://127.0.0.1:{port}/disk.raw; }}"),
    );
    let down = redirects.secure_url("/down");
    let out = zebu(dir, ["info", "-f", "raw", "--tls-ca", "ca-cert.pem", &down]).exits(1);
    assert!(out.stderr.contains("from https to") && out.stderr.contains("--redirects any"), "{out}");
    zebu(dir, ["info", "-f", "raw", "--tls-ca", "ca-cert.pem", "--redirects", "any", &down]).ok();
}

#[test]
fn passwords_come_from_files_go_to_their_server_only_and_are_never_shown() {
    let scratch = Scratch::new("http-users");
    let dir = scratch.path();
    source(dir);
    let server = WebServer::start(dir);
    let private = server.url("/private/disk.raw");
    let none = [("NETRC", "/dev/null")];
    let out = zebu_with(dir, &none, &["info", "-f", "raw", &private]).exits(1);
    assert!(out.stderr.contains("401") && out.stderr.contains("netrc"), "{out}");
    std::fs::write(dir.join("netrc"), "machine 127.0.0.1 login user password secret\n").unwrap();
    zebu_with(dir, &[("NETRC", "netrc")], &["info", "-f", "raw", &private]).ok();
    std::fs::create_dir(dir.join("home")).unwrap();
    std::fs::rename(dir.join("netrc"), dir.join("home/.netrc")).unwrap();
    let home = dir.join("home");
    let home = [("NETRC", ""), ("HOME", home.to_str().unwrap())];
    zebu_with(dir, &home, &["info", "-f", "raw", &private]).ok();
    std::fs::write(dir.join("password"), "secret\n").unwrap();
    let keys = format!("driver=http,url={private},username=user,password-file=password");
    zebu_with(dir, &none, &["info", "--image-opts", &keys]).ok();
    let named = private.replace("http://", "http://user:secret@");
    let out = zebu_with(dir, &none, &["info", "-f", "raw", &named]).ok();
    assert!(!out.stdout.contains("secret") && out.stdout.contains(&private), "{out}");
    let wrong = private.replace("http://", "http://user:wr%6fngsecret@") + "?key=secret";
    for words in
        [&["info", "-f", "raw", &wrong][..], &["convert", "-v", "-f", "raw", "-O", "raw", &wrong, "x"]]
    {
        let out = zebu_with(dir, &none, words).exits(1);
        assert!(out.stderr.contains("401") && !out.stderr.contains("secret"), "{out}");
    }
    // Not to where a redirect leads, and a cookie neither.
    let heads = Arc::new(Mutex::new(String::new()));
    let seen = Arc::clone(&heads);
    let other = WebProxy::start(server.port(), move |_, head| {
        seen.lock().unwrap().push_str(head);
        Mishap::None
    });
    let place = other.url("/disk.raw");
    let proxy = WebProxy::start(server.port(), move |_, head| {
        assert!(head.to_ascii_lowercase().contains("authorization: basic") && head.contains("a=b"), "{head}");
        Mishap::Answer(format!("302 Found\r\nLocation: {place}"))
    });
    let url = proxy.url("/x");
    let keys = format!("driver=http,url={url},username=user,password-file=password,cookie=a=b");
    zebu_with(dir, &none, &["info", "--image-opts", &keys]).ok();
    let heads = heads.lock().unwrap().to_ascii_lowercase();
    assert!(!heads.is_empty() && !heads.contains("authorization") && !heads.contains("a=b"), "{heads}");
    // netrc's default is for the server that was named, and not for where it leads.
    std::fs::write(dir.join("default"), "default login user password secret\n").unwrap();
    let asked = Arc::new(Mutex::new(String::new()));
    let seen = Arc::clone(&asked);
    let other = WebProxy::start(server.port(), move |_, head| {
        seen.lock().unwrap().push_str(head);
        Mishap::None
    });
    let place = other.url("/disk.raw");
    let proxy = WebProxy::start(server.port(), move |_, head| {
        assert!(head.to_ascii_lowercase().contains("authorization: basic"), "{head}");
        Mishap::Answer(format!("302 Found\r\nLocation: {place}"))
    });
    zebu_with(dir, &[("NETRC", "default")], &["info", "-f", "raw", &proxy.url("/x")]).ok();
    let asked = asked.lock().unwrap().to_ascii_lowercase();
    assert!(!asked.is_empty() && !asked.contains("authorization"), "{asked}");
    // Nor into an image.
    let out = zebu(dir, ["create", "-f", "qcow2", "-b", &named, "-F", "raw", "top.qcow2"]).exits(1);
    assert!(out.stderr.contains("netrc") && !out.stderr.contains("secret"), "{out}");
    for (key, remedy) in [("password-secret", "password-file"), ("cookie-secret", "cookie")] {
        let out = zebu(dir, ["info", "--image-opts", &format!("driver=http,url={url},{key}=x")]).exits(1);
        assert!(out.stderr.contains(remedy), "{out}");
    }
}

#[test]
fn proxies_of_the_environment_are_used() {
    let scratch = Scratch::new("http-proxy");
    let dir = scratch.path();
    let content = source(dir);
    certificates(dir);
    let server = WebServer::start(dir);
    let tinyproxy = find("tinyproxy").expect("tinyproxy is missing: `cargo xtask setup` installs it");
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    drop(listener);
    let config = format!(
        "Port {port}\nListen 127.0.0.1\nTimeout 60\nMaxClients 100\nLogFile \"{}\"\nLogLevel Info\nBasicAuth user secret\n",
        dir.join("proxy.log").display()
    );
    std::fs::write(dir.join("proxy.conf"), config).unwrap();
    let mut child = Command::new(tinyproxy).arg("-d").arg("-c").arg(dir.join("proxy.conf")).spawn().unwrap();
    let begin = Instant::now();
    while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
        assert!(begin.elapsed() < Duration::from_secs(20), "tinyproxy does not listen");
        std::thread::sleep(Duration::from_millis(20));
    }
    let proxy = format!("http://user:secret@127.0.0.1:{port}");
    let (plain, secure) = (server.url("/disk.raw"), server.secure_url("/disk.raw"));
    let asked = |word: &str| {
        let log = std::fs::read_to_string(dir.join("proxy.log")).unwrap();
        log.lines().filter(|line| line.contains(word)).count()
    };
    let convert = |url: &str| {
        ["convert", "-f", "raw", "-O", "raw", "--tls-ca", "ca-cert.pem", url, "flat.raw"].map(str::to_owned)
    };
    for (variable, url, word) in [("http_proxy", &plain, "GET http"), ("https_proxy", &secure, "CONNECT")] {
        let words = convert(url);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        zebu_with(dir, &[(variable, &proxy), ("no_proxy", "")], &words).ok();
        assert!(flat(dir) == content && asked(word) > 0, "{variable}");
        let before = asked(word);
        zebu_with(dir, &[(variable, &proxy), ("no_proxy", "localhost,127.0.0.0/8")], &words).ok();
        assert_eq!(asked(word), before);
        let wrong = proxy.replace("secret", "wrong");
        let out = zebu_with(dir, &[(variable, &wrong), ("no_proxy", "")], &words).exits(1);
        assert!(out.stderr.contains("401") || out.stderr.contains("407"), "{out}");
        assert!(!out.stderr.contains("wrong"), "{out}");
    }
    let socks = [("all_proxy", "socks5://127.0.0.1:1"), ("no_proxy", "")];
    let out = zebu_with(dir, &socks, &["info", "-f", "raw", &plain]).exits(1);
    assert!(out.stderr.contains("all_proxy"), "{out}");
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn an_image_leads_to_a_web_server_only_if_the_user_says_so() {
    let scratch = Scratch::new("http-refs");
    let dir = scratch.path();
    let content = source(dir);
    let server = WebServer::start(dir);
    let proxy = WebProxy::start(server.port(), |_, _| Mishap::None);
    let base = proxy.url("/disk.raw");
    // Named on the command line it is opened, and its size is taken.
    zebu(dir, ["create", "-q", "-f", "qcow2", "-b", &base, "-F", "raw", "top.qcow2"]).ok();
    let info = zebu(dir, ["info", "top.qcow2"]).ok().stdout;
    assert!(info.contains("24 MiB") && info.contains(&base), "{info}");
    let before = proxy.connections();
    let other = server.url("/");
    for options in [
        &[][..],
        &["--allow-refs", "local"],
        &["--allow-refs", "dir=/"],
        &["--allow-refs", &format!("prefix={other}")],
        &["--allow-refs", "prefix=http://127.0.0.1"],
    ] {
        let out = convert(dir, options, "top.qcow2").exits(1);
        assert!(out.stderr.contains("--allow-refs prefix=URL"), "{out}");
    }
    zebu(dir, ["check", "top.qcow2"]).ok();
    assert_eq!(proxy.connections(), before, "nobody connected");
    for options in [&["--allow-refs", "all"][..], &["--allow-refs", &format!("prefix={}", proxy.url("/"))]] {
        convert(dir, options, "top.qcow2").ok();
        assert!(flat(dir) == content);
    }
    // An overlay on a server, whose backing file is beside it.
    let line =
        ["create", "-q", "-u", "-f", "qcow2", "-b", "disk.qcow2", "-F", "qcow2", "www/top.qcow2", "24M"];
    zebu(dir, line).ok();
    let top = proxy.url("/top.qcow2");
    assert!(convert(dir, &[], &top).exits(1).stderr.contains("--allow-refs"));
    convert(dir, &["--allow-refs", &format!("prefix={}", proxy.url("/"))], &top).ok();
    assert!(flat(dir) == content);
    // The base of a new image, of which only the difference is written.
    zebu(dir, ["convert", "-O", "qcow2", "-B", &base, "-F", "raw", "www/disk.qcow2", "diff.qcow2"]).ok();
    convert(dir, &["--allow-refs", "all"], "diff.qcow2").ok();
    assert!(flat(dir) == content);
    let options = format!(
        "driver=qcow2,file.filename=top.qcow2,backing.driver=raw,backing.file.driver=http,backing.file.url={base}"
    );
    convert(dir, &["--image-opts"], &options).ok();
    assert!(flat(dir) == content);
}

/// Runs the test of the name `name` again, in a network of its own that has a public and a private address.
fn in_own_network(name: &str) -> bool {
    if std::env::var_os("ZEBU_OWN_NETWORK").is_some() {
        return true;
    }
    let this = std::env::current_exe().unwrap();
    let script = "ip link set lo up && ip address add 9.9.9.9/32 dev lo && exec \"$@\"";
    let mut command = Command::new(find("unshare").expect("unshare is missing: it is in util-linux"));
    command.args(["-r", "-n", "sh", "-e", "-c", script, "sh"]).arg(this);
    command.args(["--exact", name, "--nocapture"]).env("ZEBU_OWN_NETWORK", "1");
    finish(command).ok();
    false
}

#[test]
fn a_redirect_from_a_public_to_a_private_address_is_refused() {
    if !in_own_network("a_redirect_from_a_public_to_a_private_address_is_refused") {
        return;
    }
    let scratch = Scratch::new("http-private");
    let dir = scratch.path();
    let content = source(dir);
    let server = WebServer::start_with(
        dir,
        "listen 9.9.9.9:80; location /inside { return 302 http://127.0.0.1:$server_port/disk.raw; }\n\
         location /alias { return 302 http://localhost/disk.raw; }\n\
         location /own { return 302 http://9.9.9.9/disk.raw; }",
    );
    let inside = server.url("/disk.raw");
    let redirect = |path: &str, options: &[&str]| {
        let mut words = vec!["-f", "raw"];
        words.extend(options);
        convert(dir, &words, &format!("http://9.9.9.9{path}"))
    };
    redirect("/own", &[]).ok();
    assert!(flat(dir) == content);
    for path in ["/inside", "/alias"] {
        let before = server.log().lines().filter(|line| line.contains("/disk.raw")).count();
        let out = redirect(path, &[]).exits(1);
        assert!(out.stderr.contains("private") && out.stderr.contains("--redirects any"), "{out}");
        let after = server.log().lines().filter(|line| line.contains("/disk.raw")).count();
        assert_eq!(before, after, "nobody asked there");
    }
    // One that is named is opened wherever it is, and may lead to others like it.
    convert(dir, &["-f", "raw"], &inside).ok();
    convert(dir, &["-f", "raw"], &server.url("/own")).ok();
    assert!(flat(dir) == content);
}

/// The most memory that zebu has for a command, in bytes (getrusage(2)).
fn peak_of(dir: &Path, words: &[&str]) -> u64 {
    let script = "import resource,subprocess,sys\nsubprocess.run(sys.argv[1:],check=True,stdout=subprocess.DEVNULL)\n\
                  print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)";
    let mut command = Command::new(find("python3").expect("python3"));
    command.args(["-c", script]).arg(zebu_program()).args(words).current_dir(dir);
    finish(command).ok().stdout.trim().parse::<u64>().expect("a number") << 10
}

/// An answer that is larger than the window of it that is kept.
#[test]
fn memory_of_a_server_without_ranges_is_bounded_by_the_option() {
    let scratch = Scratch::new("http-window");
    let dir = scratch.path();
    std::fs::create_dir_all(dir.join("www")).unwrap();
    let bytes: Vec<u8> =
        (0..25u32 << 20).flat_map(|number| number.wrapping_mul(2654435761).to_le_bytes()).collect();
    std::fs::write(dir.join("www/big.raw"), &bytes).unwrap();
    let server = WebServer::start(dir);
    let url = server.url("/whole/big.raw");
    let local = peak_of(dir, &["convert", "-f", "raw", "-O", "raw", "www/big.raw", "flat.raw"]);
    for mib in [8, 64, 96] {
        let memory = format!("{mib}M");
        let words = ["convert", "--http-memory", &memory, "-f", "raw", "-O", "raw", &url, "flat.raw"];
        let found = peak_of(dir, &words);
        assert!(flat(dir) == bytes);
        assert!(found < local + ((mib + 12) << 20), "{mib} MiB: {found} beside {local}");
    }
}

#[test]
fn memory_is_bounded_by_the_option() {
    let scratch = Scratch::new("http-memory");
    let dir = scratch.path();
    std::fs::create_dir_all(dir.join("www")).unwrap();
    let file = std::fs::File::create(dir.join("www/big.raw")).unwrap();
    let piece: Vec<u8> =
        (0..1u32 << 18).flat_map(|number| number.wrapping_mul(2654435761).to_le_bytes()).collect();
    for at in 0..256u64 {
        file.write_all_at(&piece, at << 20).unwrap();
    }
    let server = WebServer::start(dir);
    let peak = |options: &str| {
        let keys = format!("driver=http,url={},{options}", server.url("/big.raw"));
        let words = ["bench", "--image-opts", "-c", "3000", "-d", "32", "-s", "4096", "-S", "131072", &keys];
        peak_of(dir, &words)
    };
    let (small, large) = (peak("memory=4M"), peak("memory=128M,connections=32"));
    println!("peak with 4M: {small}, with 128M: {large}");
    assert!(small < 64 << 20, "{small}");
    assert!(large < small + (140 << 20), "{large}");
}

#[test]
fn a_server_in_its_sandbox_connects_again_to_where_its_image_is() {
    let scratch = Scratch::new("http-serve");
    let dir = scratch.path();
    let content = source(dir);
    certificates(dir);
    let web = WebServer::start(dir);
    let proxy = WebProxy::start(web.port(), |number, _| match number % 9 {
        5 => Mishap::CutAfter(100_000),
        7 => Mishap::ResetAfter(10_000),
        _ => Mishap::None,
    });
    for (format, url) in [
        ("raw", proxy.url("/disk.raw")),
        ("qcow2", proxy.url("/packed.qcow2")),
        ("raw", web.secure_url("/disk.raw")),
    ] {
        let below = dir.join("serve");
        let _ = std::fs::remove_dir_all(&below);
        std::fs::create_dir(&below).unwrap();
        let authority = dir.join("ca-cert.pem");
        let options =
            format!("--read-only --http-memory 4M --tls-ca {} -f {format} {url}", authority.display());
        let server = Server::start(&below, &options);
        let ours = format!("nbd+unix:///?socket={}", server.socket().display());
        for _ in 0..2 {
            convert(dir, &["-f", "raw"], &ours).ok();
            assert!(flat(dir) == content, "{url}");
            // No connection is left, and the sandbox lets none be made.
            proxy.cut();
        }
        let said = server.stop_with_messages();
        assert!(!said.contains("sandbox"), "{said}");
    }
    let out = zebu(dir, ["serve", "--nbd", "unix:s", "-f", "raw", &proxy.url("/disk.raw")]).exits(1);
    assert!(out.stderr.contains("Read-only") && out.stderr.contains("reading only"), "{out}");
}
