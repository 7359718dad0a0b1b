//! A network and servers that break, slow down, or change what they have.

use super::{convert, flat, source};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use zebu_tests::patience::{wait_for, wait_until};
use zebu_tests::program::{Finished, zebu};
use zebu_tests::scratch::Scratch;
use zebu_tests::web_proxy::{Mishap, WebProxy};
use zebu_tests::web_server::WebServer;

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
    let keys = format!("driver=http,url={},timeout=5,connections=1", proxy.url("/slow.raw"));
    // No bytes come where the machine itself stands still for as long.
    wait_until("a slow server is waited for", || {
        let begin = Instant::now();
        let out = convert(dir, &["--image-opts", "-m", "16", "--buffer-memory", "4M"], &keys);
        if out.code != Some(0) {
            eprintln!("{out}");
            return false;
        }
        assert!(begin.elapsed() > Duration::from_secs(20), "the server was slow");
        true
    });
    assert!(flat(dir) == content);
}

/// A command that fails and tells `word`. A request that is under way when its time is over tells of that instead.
fn told(word: &str, run: impl Fn() -> Finished) -> Finished {
    wait_for(word, || {
        let out = run().exits(1);
        let is_told = out.stderr.contains(word);
        assert!(is_told || out.stderr.contains("does not answer"), "{word}: {out}");
        is_told.then_some(out)
    })
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
        told(word, || {
            let proxy = moved_to(place);
            let keys = format!("driver=http,url={},timeout=5", proxy.url("/disk.raw"));
            convert(dir, &["--image-opts"], &keys)
        });
    }
}

#[test]
fn a_server_that_does_not_recover_is_an_error_at_the_deadline() {
    let scratch = Scratch::new("http-deadline");
    let dir = scratch.path();
    source(dir);
    let server = WebServer::start(dir);
    let proxy = WebProxy::start(server.port(), |_, _| Mishap::None);
    let keys = format!("driver=http,url={},timeout=5", proxy.url("/disk.raw?token=secret"));
    for (fault, word) in [
        (Mishap::SilentAfter(1000), "does not answer"),
        (Mishap::Answer("503 Service Unavailable".to_owned()), "503"),
        (Mishap::Answer("403 Forbidden".to_owned()), "403"),
        (Mishap::WithoutRange, "no ranges"),
        (Mishap::RangeHigher(1), "Content-Range"),
        (Mishap::Drip(Duration::from_millis(200)), "does not answer"),
    ] {
        let name = format!("{fault:?}");
        let out = told(word, || {
            let (before, fault) = (proxy.requests(), fault.clone());
            proxy.change(move |number, _| if number - before < 4 { Mishap::None } else { fault.clone() });
            let begin = Instant::now();
            let out = convert(dir, &["--image-opts", "-m", "1", "--buffer-memory", "64k"], &keys);
            let took = begin.elapsed();
            assert!(took >= Duration::from_millis(4900), "{name}: {took:?}");
            // The pauses between them grow: in ten times as long, it would ask for four times as many.
            let requests = proxy.requests() - before;
            assert!(requests < 120, "{name}: {requests} requests in five seconds");
            out
        });
        assert!(out.stderr.contains("Input/output error"), "{name}: {out}");
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
        let info = || zebu(dir, ["info", "--image-opts", &keys]);
        if name.contains("SilentAfter") && info().code == Some(0) {
            continue;
        }
        let out = told(word, info);
        assert!(!out.stderr.contains("secret"), "{name}: {out}");
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
            // Nothing would help: whoever tries again does so for ever.
            let keys =
                format!("driver=raw,file.driver=http,file.url={},file.timeout=86400", proxy.url("/object"));
            let out = convert(dir, &["--image-opts", "-m", "1"], &keys).exits(1);
            assert!(out.stderr.contains("another than when it was opened"), "{at} {strip:?}: {out}");
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
