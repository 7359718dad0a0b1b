//! Files on a web server as sources of commands and disks of servers.

use super::{LEN, convert, flat, source};
use zebu_tests::certificates::certificates;
use zebu_tests::patience::wait_until;
use zebu_tests::program::zebu;
use zebu_tests::scratch::Scratch;
use zebu_tests::server::Server;
use zebu_tests::web_proxy::{Mishap, WebProxy};
use zebu_tests::web_server::WebServer;

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
    let keys = format!("driver=http,url={raw},readahead=256k,timeout=600,memory=8M,connections=2");
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
    assert!(out.stderr.contains("not written") && out.stderr.lines().count() == 1, "{out}");
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
    wait_until("three lines of the log", || server.log().lines().count() >= 3);
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

/// Bytes that come again are bounded in proportion to the object, however fast it comes.
#[test]
fn a_server_without_ranges_that_always_breaks_off_is_given_up() {
    let scratch = Scratch::new("http-cut");
    let dir = scratch.path();
    let content = source(dir);
    let server = WebServer::start(dir);
    let half = content.len() as u64 / 2;
    let proxy = WebProxy::start(server.port(), move |_, _| Mishap::CutAfter(half));
    let out = convert(dir, &["-f", "raw"], &proxy.url("/whole/disk.raw")).exits(1);
    assert!(out.stderr.contains("breaks its answers off again and again"), "{out}");
    let most = 2 * content.len() as u64 + (16 << 20);
    assert!(proxy.requests() as u64 <= most / half + 4, "{} requests", proxy.requests());
}

/// Without marks of versions, a change of the object shows in nothing but its length.
#[test]
fn a_server_that_marks_no_versions_is_warned_of() {
    let scratch = Scratch::new("http-unmarked");
    let dir = scratch.path();
    let content = source(dir);
    let server = WebServer::start(dir);
    let plain = convert(dir, &["-f", "raw"], &server.url("/disk.raw")).ok();
    assert_eq!(plain.stderr, "");
    let proxy = WebProxy::start(server.port(), |_, _| Mishap::WithoutVersions);
    let url = proxy.url("/disk.raw");
    let converted = convert(dir, &["-f", "raw"], &url).ok();
    assert!(flat(dir) == content);
    let backup = zebu(dir, ["backup", "-f", "raw", "--manifest", "manifest", &url, "backup.qcow2"]).ok();
    for out in [converted, backup] {
        assert!(out.stderr.contains("marks no versions") && out.stderr.lines().count() == 1, "{out}");
    }
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
