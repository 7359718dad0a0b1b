//! Disks on NBD servers as sources and targets: qemu-nbd, nbdkit, `zebu serve`; broken networks in between.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};
use zebu_tests::certificates::certificates;
use zebu_tests::fault_proxy::{Fault, FaultProxy};
use zebu_tests::foreign_server::ForeignServer;
use zebu_tests::patience::wait_until;
use zebu_tests::program::{Finished, required, zebu};
use zebu_tests::scratch::Scratch;
use zebu_tests::server::Server;

fn uri(socket: &Path) -> String {
    format!("nbd+unix:///?socket={}", socket.display())
}

/// A disk with data, zeroes and holes.
fn source(dir: &Path, name: &str) -> Vec<u8> {
    let mut content = vec![0; 24 << 20];
    for (index, byte) in content[1 << 20..9 << 20].iter_mut().enumerate() {
        *byte = (index / 512 * 31 + index) as u8;
    }
    for (index, byte) in content[17 << 20..].iter_mut().enumerate() {
        *byte = (index / 4096 % 3 * 77) as u8;
    }
    let file = std::fs::File::create(dir.join(name)).unwrap();
    file.set_len(content.len() as u64).unwrap();
    for data in [1 << 20..9 << 20, 17 << 20..24 << 20] {
        file.write_all_at(&content[data.clone()], data.start as u64).unwrap();
    }
    content
}

fn same(dir: &Path, first: &[&str]) -> Finished {
    let mut words = vec!["compare"];
    words.extend(first);
    zebu(dir, words).ok()
}

/// Reads, writes, maps and compares what a server has.
fn use_server(dir: &Path, name: &str, uri: &str, content: &[u8]) {
    for aio in ["io_uring", "threads"] {
        zebu(dir, ["convert", "--aio", aio, "-f", "raw", "-O", "qcow2", uri, "copy.qcow2"]).ok();
        same(dir, &["-f", "qcow2", "-F", "raw", "copy.qcow2", "source.raw"]);
    }
    let info = zebu(dir, ["info", "-f", "raw", "--output", "json", uri]).ok().stdout;
    assert!(info.contains(&format!("\"virtual-size\": {}", content.len())), "{name}: {info}");
    same(dir, &["-f", "raw", "-F", "raw", uri, "source.raw"]);
    let map = zebu(dir, ["map", "-f", "raw", "--output", "json", uri]).ok().stdout;
    assert!(map.contains("\"zero\": true") && map.contains("\"data\": true"), "{name}: {map}");
    let ours = zebu(dir, ["measure", "-O", "qcow2", "-f", "raw", uri]).ok().stdout;
    assert_eq!(ours, zebu(dir, ["measure", "-O", "qcow2", "-f", "raw", "source.raw"]).ok().stdout, "{name}");
    let read = "read -P 0 0 1M";
    zebu(dir, ["io", "-r", "-f", "raw", uri, "-c", read]).ok();
    zebu(dir, ["backup", "-f", "raw", uri, "backup.qcow2"]).ok();
    same(dir, &["-f", "qcow2", "-F", "raw", "backup.qcow2", "source.raw"]);
    std::fs::remove_file(dir.join("backup.qcow2")).unwrap();
    // An overlay of a disk on the server, named on the command line.
    zebu(dir, ["create", "-q", "-f", "qcow2", "top.qcow2", &content.len().to_string()]).ok();
    let options = format!(
        "driver=qcow2,file.filename=top.qcow2,backing.driver=raw,backing.file.filename={}",
        uri.replace(',', ",,")
    );
    zebu(dir, ["convert", "--image-opts", "-O", "raw", &options, "flat.raw"]).ok();
    assert!(std::fs::read(dir.join("flat.raw")).unwrap() == content, "{name}");
}

#[test]
fn disks_on_real_servers_are_sources() {
    let scratch = Scratch::new("remote-sources");
    let dir = scratch.path();
    let content = source(dir, "source.raw");
    {
        let server = ForeignServer::qemu(dir, "-r --shared=8 -f raw source.raw");
        use_server(dir, "qemu-nbd", &server.uri(), &content);
        // QEMU's own spellings.
        let old = format!("nbd:unix:{}", server.socket().display());
        same(dir, &["-f", "raw", "-F", "raw", &old, "source.raw"]);
        let keys = format!("driver=nbd,server.type=unix,server.path={}", server.socket().display());
        zebu(dir, ["convert", "--image-opts", "-O", "raw", &keys, "flat.raw"]).ok();
        assert!(std::fs::read(dir.join("flat.raw")).unwrap() == content);
    }
    {
        // It takes one client.
        let server = ForeignServer::qemu(dir, "-r --shared=1 -f raw source.raw");
        same(dir, &["-f", "raw", "-F", "raw", &server.uri(), "source.raw"]);
    }
    {
        let server = ForeignServer::nbdkit(dir, "-r file source.raw");
        use_server(dir, "nbdkit", &server.uri(), &content);
    }
    {
        // Replies without chunks.
        let server = ForeignServer::nbdkit(dir, "--no-sr -r file source.raw");
        same(dir, &["-f", "raw", "-F", "raw", &server.uri(), "source.raw"]);
    }
    {
        // Requests must be whole blocks.
        let policy =
            "--filter=blocksize-policy file source.raw blocksize-minimum=4096 blocksize-error-policy=error";
        let server = ForeignServer::nbdkit(dir, policy);
        let uri = server.uri();
        let commands = ["read 512 1k", "write -P 9 5000 3000", "read -P 9 5000 3000"];
        let words = commands.iter().flat_map(|command| ["-c", command]);
        zebu(dir, ["io", "-f", "raw", &uri].into_iter().chain(words)).ok();
        drop(server);
        let mut changed = content.clone();
        changed[5000..8000].fill(9);
        assert!(std::fs::read(dir.join("source.raw")).unwrap() == changed);
        source(dir, "source.raw");
    }
    let server = Server::start(dir, "--read-only --queues 2 -f raw source.raw");
    use_server(dir, "zebu", &uri(server.socket()), &content);
    server.stop();
}

#[test]
fn disks_on_real_servers_are_targets() {
    let scratch = Scratch::new("remote-targets");
    let dir = scratch.path();
    let content = source(dir, "source.raw");
    let dirty = vec![0xee; content.len()];
    for (name, format) in [("qemu-nbd", "raw"), ("nbdkit", "raw"), ("zebu", "raw"), ("qemu-nbd", "qcow2")] {
        std::fs::write(dir.join("target.raw"), &dirty).unwrap();
        let (_foreign, ours, uri) = if name == "zebu" {
            let server = Server::start(dir, "--queues 2 -f raw target.raw");
            let uri = uri(server.socket());
            (None, Some(server), uri)
        } else {
            let server = match name {
                "nbdkit" => ForeignServer::nbdkit(dir, "file target.raw"),
                _ => ForeignServer::qemu(dir, "--shared=8 --discard=unmap -f raw target.raw"),
            };
            let uri = server.uri();
            (Some(server), None, uri)
        };
        if format == "qcow2" {
            // An image in the export, as on a block device.
            let made = Command::new(required("qemu-img"))
                .args(["create", "-q", "-f", "qcow2", &uri, "16M"])
                .status()
                .unwrap();
            assert!(made.success());
            let commands = ["write -P 7 0 1M", "write -z 256k 64k", "flush", "read -P 7 0 256k"];
            let words = commands.iter().flat_map(|command| ["-c", command]);
            zebu(dir, ["io", "-f", "qcow2", &uri].into_iter().chain(words)).ok();
            zebu(dir, ["check", "-f", "qcow2", &uri]).ok();
        } else {
            let out =
                zebu(dir, ["convert", "--output", "json", "-f", "raw", "-O", "raw", "source.raw", &uri]).ok();
            assert!(out.stdout.contains("\"written-bytes\""), "{name}: {out}");
        }
        if let Some(server) = ours {
            server.stop();
        }
        if format == "raw" {
            assert!(std::fs::read(dir.join("target.raw")).unwrap() == content, "{name}");
        }
    }
}

#[test]
fn disks_under_tls_are_read_and_written() {
    let scratch = Scratch::new("remote-tls");
    let dir = scratch.path();
    let content = source(dir, "source.raw");
    certificates(dir);
    std::fs::write(dir.join("target.raw"), vec![0xee; content.len()]).unwrap();
    let server = Server::start(
        dir,
        "--tls-certificate server-cert.pem --tls-key server-key.pem --tls-client-ca ca-cert.pem -f raw target.raw",
    );
    let socket = server.socket().display().to_string();
    let uri = format!("nbds+unix:///?socket={socket}&tls-certificates={}", dir.display());
    zebu(dir, ["convert", "-n", "-f", "raw", "-O", "raw", "source.raw", &uri]).ok();
    same(dir, &["-f", "raw", "-F", "raw", &uri, "source.raw"]);
    let other = format!("{uri}&tls-hostname=other");
    let out = zebu(dir, ["info", "-f", "raw", &other]).exits(1);
    assert!(out.stderr.contains("certificate"), "{out}");
    let plain = format!("nbd+unix:///?socket={socket}");
    let out = zebu(dir, ["info", "-f", "raw", &plain]).exits(1);
    assert!(out.stderr.contains("TLS is required"), "{out}");
    assert!(server.stop_with_messages().contains("is sent away"));
    assert!(std::fs::read(dir.join("target.raw")).unwrap() == content);
}

#[test]
fn broken_connections_are_replaced_and_nothing_is_lost_or_mixed_up() {
    let scratch = Scratch::new("remote-faults");
    let dir = scratch.path();
    let content = source(dir, "source.raw");
    let server = ForeignServer::qemu(dir, "-r --shared=64 -f raw source.raw");
    let mut number = 0;
    let mut read_through = |faults: Vec<Fault>, deadline: u32| {
        number += 1;
        let proxy = FaultProxy::start(&dir.join(format!("proxy{number}")), server.socket(), faults);
        let place = proxy.path().display();
        let options =
            format!("driver=nbd,server.path={place},open-timeout={deadline},reconnect-delay={deadline}");
        let out = zebu(dir, ["convert", "-v", "--image-opts", "-O", "raw", &options, "flat.raw"]);
        (out, proxy)
    };
    let cuts = [400, 5_000, 70_000, 1 << 20, 3 << 20, 4 << 20].map(Fault::CutAfter);
    let (out, proxy) = read_through(cuts.to_vec(), 600);
    let out = out.ok();
    assert!(std::fs::read(dir.join("flat.raw")).unwrap() == content);
    assert!(proxy.connections() >= 2, "the faults were met");
    assert!(out.stderr.contains("retries") && out.stderr.contains("the connection broke"), "{out}");
    read_through(vec![Fault::Late(Duration::from_millis(3)); 8], 600).0.ok();
    assert!(std::fs::read(dir.join("flat.raw")).unwrap() == content);
    // A byte of the handshake or of a reply's head that is wrong: refused, or another connection tells; never a hang.
    for at in (0..500).step_by(29) {
        let (out, _) = read_through(vec![Fault::FlipAt(at)], 2);
        if out.code == Some(0) {
            let flat = std::fs::read(dir.join("flat.raw")).unwrap();
            assert_eq!(flat.len(), content.len(), "byte {at}");
        } else {
            let words = ["Could not open", "Input/output error"];
            assert!(words.iter().any(|word| out.stderr.contains(word)), "byte {at}: {out}");
        }
    }
}

#[test]
fn a_server_that_says_nothing_is_an_error_at_the_deadline() {
    let scratch = Scratch::new("remote-silent");
    let dir = scratch.path();
    source(dir, "source.raw");
    let server = ForeignServer::qemu(dir, "-r --shared=64 -f raw source.raw");
    let silent = vec![Fault::SilentAfter(300_000); 64];
    let proxy = FaultProxy::start(&dir.join("proxy"), server.socket(), silent);
    let options =
        format!("driver=nbd,server.path={},reconnect-delay=2,open-timeout=600", proxy.path().display());
    let begin = Instant::now();
    let out = zebu(dir, ["convert", "--image-opts", "-O", "raw", &options, "flat.raw"]).exits(1);
    assert!(out.stderr.contains("Input/output error"), "{out}");
    let took = begin.elapsed();
    assert!(took >= Duration::from_secs(2), "{took:?}");
    assert!(!dir.join("flat.raw").exists(), "nothing half is left");
    // Silent from the first byte.
    let mute = FaultProxy::start(&dir.join("mute"), server.socket(), vec![Fault::SilentAfter(0); 8]);
    let options = format!("driver=nbd,server.path={},open-timeout=1", mute.path().display());
    let out = zebu(dir, ["info", "--image-opts", &options]).exits(1);
    assert!(out.stderr.contains("the server does not answer"), "{out}");
}

/// All that is asked for at once takes several times as long as one answer may: bytes come all the time.
#[test]
fn a_slow_link_is_waited_for_as_long_as_bytes_come() {
    let scratch = Scratch::new("remote-slow");
    let dir = scratch.path();
    let content: Vec<u8> = (0..3 << 20).map(|at: u32| (at / 512 % 255) as u8 + 1).collect();
    std::fs::write(dir.join("source.raw"), &content).unwrap();
    std::fs::write(dir.join("target.raw"), vec![0; content.len()]).unwrap();
    let server = ForeignServer::qemu(dir, "--shared=64 -f raw source.raw");
    let mut number = 0;
    // No bytes come where the machine itself stands still for as long.
    wait_until("no connection of a slow link is given up", || {
        number += 1;
        let place = dir.join(format!("proxy{number}"));
        let proxy = FaultProxy::start(&place, server.socket(), vec![Fault::Slow(100 << 10); 64]);
        let options =
            format!("driver=nbd,server.path={},reconnect-delay=3,open-timeout=600", proxy.path().display());
        let begin = Instant::now();
        let out = zebu(dir, ["convert", "--image-opts", "-O", "raw", &options, "flat.raw"]);
        if out.code != Some(0) || proxy.connections() > 4 {
            eprintln!("{} connections: {out}", proxy.connections());
            return false;
        }
        assert!(begin.elapsed() > Duration::from_secs(6), "the link was slow");
        true
    });
    assert!(std::fs::read(dir.join("flat.raw")).unwrap() == content);
}

/// The exit code 0 of `convert` says that the target is durable, also where nobody chose a cache mode.
#[test]
fn a_target_is_flushed_after_its_last_change() {
    let scratch = Scratch::new("remote-flushed");
    let dir = scratch.path();
    let content = source(dir, "source.raw");
    let log = dir.join("log");
    for options in ["-O raw", "-n -O raw", "-n -W -O raw", "-n -O qcow2", "-O qcow2"] {
        // Larger, for the tables of an image.
        let spare = if options.ends_with("qcow2") { 4 << 20 } else { 0 };
        std::fs::write(dir.join("target.raw"), vec![0; content.len() + spare]).unwrap();
        let server =
            ForeignServer::nbdkit(dir, &format!("--filter=log file target.raw logfile={}", log.display()));
        if options.ends_with("qcow2") {
            let made = ["create", "-q", "-f", "qcow2", &server.uri(), "24M"];
            assert!(Command::new(required("qemu-img")).args(made).status().unwrap().success());
        }
        let uri = server.uri();
        let words = ["convert", "-f", "raw"].into_iter().chain(options.split(' '));
        zebu(dir, words.chain(["source.raw", &uri])).ok();
        drop(server);
        let log = std::fs::read_to_string(&log).unwrap();
        let last = |what: &str| {
            let found = log.lines().enumerate().filter(|(_, line)| line.contains(what));
            found.map(|(number, _)| number).last()
        };
        let changed = last(" Write").max(last(" Zero")).expect("something was written");
        assert!(last(" Flush").is_some_and(|flushed| flushed > changed), "{options}:\n{log}");
    }
}

#[test]
fn a_flush_fails_if_the_server_may_have_lost_what_it_answered() {
    let scratch = Scratch::new("remote-flush");
    let dir = scratch.path();
    std::fs::write(dir.join("target.raw"), vec![0; 4 << 20]).unwrap();
    let server = ForeignServer::qemu(dir, "--shared=8 -f raw target.raw");
    // The first answers come through. However requests are spread, one of
    // these connections breaks.
    let faults = vec![Fault::CutAfter(600); 4];
    let proxy = FaultProxy::start(&dir.join("proxy"), server.socket(), faults);
    let options = format!("driver=nbd,server.path={}", proxy.path().display());
    let writes: Vec<String> = (0..200).map(|number| format!("write -q -P 1 {} 512", number * 4096)).collect();
    let mut words = vec!["io", "--image-opts", &options];
    words.extend(writes.iter().flat_map(|write| ["-c", write.as_str()]));
    words.extend(["-c", "flush"]);
    let out = zebu(dir, words);
    assert!(proxy.connections() >= 2, "the fault was met: {out}");
    assert!(out.code != Some(0), "{out}");
    // Without unflushed changes, a broken connection is no reason to fail.
    let faults = vec![Fault::CutAfter(600); 4];
    let proxy = FaultProxy::start(&dir.join("proxy2"), server.socket(), faults);
    let options = format!("driver=nbd,server.path={}", proxy.path().display());
    let mut words = vec!["io", "--image-opts", &options];
    let reads: Vec<String> = (0..20).map(|number| format!("read -q {} 512", number * 4096)).collect();
    words.extend(reads.iter().flat_map(|read| ["-c", read.as_str()]));
    words.extend(["-c", "write -q 0 512", "-c", "flush"]);
    zebu(dir, words).ok();
    assert!(proxy.connections() >= 2);
}

#[test]
fn an_image_leads_to_the_network_only_if_the_user_says_so() {
    let scratch = Scratch::new("remote-refs");
    let dir = scratch.path();
    let content = source(dir, "source.raw");
    let server = ForeignServer::qemu(dir, "-r --shared=8 -f raw source.raw");
    let proxy = FaultProxy::start(&dir.join("proxy"), server.socket(), Vec::new());
    let backing = uri(proxy.path());
    let old = format!("nbd:unix:{}", proxy.path().display());
    for name in [&backing, &old] {
        zebu(dir, ["create", "-q", "-u", "-f", "qcow2", "-b", name, "-F", "raw", "top.qcow2", "24M"]).ok();
        let convert = |options: &[&str]| {
            let mut words = vec!["convert", "-O", "raw"];
            words.extend(options);
            words.extend(["top.qcow2", "flat.raw"]);
            zebu(dir, words)
        };
        let before = proxy.connections();
        for options in [
            &[][..],
            &["--allow-refs", "local"],
            &["--allow-refs", "dir=/"],
            &["--allow-refs", "prefix=nbd://other/"],
        ] {
            let out = convert(options).exits(1);
            assert!(out.stderr.contains("--allow-refs prefix=URL"), "{out}");
        }
        zebu(dir, ["info", "top.qcow2"]).ok();
        zebu(dir, ["check", "top.qcow2"]).ok();
        assert_eq!(proxy.connections(), before, "nobody connected");
        for options in [&["--allow-refs", "all"][..], &["--allow-refs", &format!("prefix={name}")]] {
            convert(options).ok();
            assert!(std::fs::read(dir.join("flat.raw")).unwrap() == content);
        }
        assert!(proxy.connections() > before);
    }
}

#[test]
fn wrong_names_and_servers_are_refused_in_one_line() {
    let scratch = Scratch::new("remote-names");
    let dir = scratch.path();
    source(dir, "source.raw");
    let missing = format!("nbd+unix:///?socket={}/none", dir.display());
    for (name, word) in [
        (missing.as_str(), "No such file"),
        ("nbd://127.0.0.1:1/x", "Connection refused"),
        ("nbds://u@h/x?tls-psk-file=f", "f: No such file"),
        ("nbd://user@h/x", "users"),
        ("nbd:h", "port"),
    ] {
        let out = zebu(dir, ["info", name]).exits(1);
        assert!(out.stderr.contains(word) && out.stderr.lines().count() == 1, "{name}: {out}");
    }
    let server = ForeignServer::qemu(dir, "-r --shared=8 -x there -f raw source.raw");
    let wrong = format!("nbd+unix:///missing?socket={}", server.socket().display());
    assert!(zebu(dir, ["info", &wrong]).exits(1).stderr.contains("there is no such export"));
    let right = format!("nbd+unix:///there?socket={}", server.socket().display());
    zebu(dir, ["info", "-f", "raw", &right]).ok();
    let out = zebu(dir, ["convert", "-f", "raw", "-O", "raw", "source.raw", &right]).exits(1);
    assert!(out.stderr.contains("Read-only"), "{out}");
}

#[test]
fn a_server_in_its_sandbox_connects_again_to_where_its_disk_is() {
    let scratch = Scratch::new("remote-serve");
    let dir = scratch.path();
    let content = source(dir, "source.raw");
    std::fs::copy(dir.join("source.raw"), dir.join("target.raw")).unwrap();
    let backend = ForeignServer::qemu(dir, "--shared=64 -f raw target.raw");
    // The connection of the opening gets as far as the first reads; so do some of those that follow.
    let faults = vec![Fault::CutAfter(3 << 20); 6];
    let proxy = FaultProxy::start(&dir.join("proxy"), backend.socket(), faults);
    let below = dir.join("serve");
    std::fs::create_dir(&below).unwrap();
    let server = Server::start(&below, &format!("--queues 2 -f raw {}", uri(proxy.path())));
    let ours = uri(server.socket());
    for _ in 0..2 {
        zebu(dir, ["convert", "-f", "raw", "-O", "raw", &ours, "flat.raw"]).ok();
        assert!(std::fs::read(dir.join("flat.raw")).unwrap() == content);
    }
    assert!(proxy.connections() > 6, "{}", proxy.connections());
    let write = ["io", "-f", "raw", &ours, "-c", "write -P 9 5M 1M", "-c", "flush", "-c", "read -P 9 5M 1M"];
    zebu(dir, write).ok();
    let said = server.stop_with_messages();
    assert!(!said.contains("sandbox"), "{said}");
    let mut changed = content;
    changed[5 << 20..6 << 20].fill(9);
    assert!(std::fs::read(dir.join("target.raw")).unwrap() == changed);
}
