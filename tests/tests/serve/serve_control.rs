//! A running server, looked at and changed from outside.

use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};
use zebu_tests::handed_over::hand_over;
use zebu_tests::nbd_client::{Client, command};
use zebu_tests::patience::{Patience, wait_until};
use zebu_tests::program::{Finished, zebu};
use zebu_tests::qemu::Qemu;
use zebu_tests::scratch::Scratch;
use zebu_tests::server::Server;
use zebu_tests::vhost_guest::VhostGuest;

const IMAGE: &str = "disk.qcow2";
const MIB: u64 = 1 << 20;
/// Time that a server waits for the ring of a killed one.
const LONGEST_RING: Duration = Duration::from_millis(1270);

fn serve(options: &str) -> (Scratch, Server) {
    let scratch = Scratch::new("control");
    zebu(scratch.path(), ["create", "-q", "-f", "qcow2", IMAGE, "64M"]).ok();
    let server = Server::start(
        scratch.path(),
        &format!(
            "--control ctl.sock --metrics unix:metrics.sock --export-name root {options} -f qcow2 {IMAGE}"
        ),
    );
    (scratch, server)
}

/// One request of Prometheus; the status line and the body.
fn scrape(dir: &Path, request: &str) -> (String, String) {
    let mut stream = UnixStream::connect(dir.join("metrics.sock")).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).unwrap();
    let (head, body) = response.split_once("\r\n\r\n").unwrap();
    (head.lines().next().unwrap().to_owned(), body.to_owned())
}

fn sample(body: &str, name: &str) -> u64 {
    let line =
        body.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_else(|| panic!("{name}: {body}"));
    line.trim().parse().unwrap()
}

#[test]
fn counters_count_what_clients_did() {
    let (scratch, server) = serve("--queues 2");
    let dir = scratch.path();
    let mut client = Client::open(server.socket(), "root").unwrap();
    for block in 0..10 {
        assert_eq!(client.write(0, block * 65536, &[1; 4096]).unwrap(), 0);
    }
    client.read(0, 1 << 20).unwrap();
    assert_ne!(client.write(0, 64 * MIB, &[1; 512]).unwrap(), 0);
    client.call(0, command::FLUSH, 0, 0).unwrap();
    let (status, body) = scrape(dir, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
    assert_eq!(status, "HTTP/1.1 200 OK");
    let of = |name: &str, kind: &str| sample(&body, &format!("{name}{{export=\"root\",kind=\"{kind}\"}}"));
    assert_eq!(of("zebu_requests_total", "write"), 10);
    assert_eq!(of("zebu_request_bytes_total", "write"), 40960);
    assert_eq!(of("zebu_requests_total", "read"), 1);
    assert_eq!(of("zebu_requests_total", "flush"), 1);
    assert_eq!(of("zebu_request_errors_total", "other"), 1);
    assert_eq!(of("zebu_request_seconds_count", "write"), 10);
    assert_eq!(sample(&body, "zebu_clients{export=\"root\"}"), 1);
    assert_eq!(sample(&body, "zebu_requests_in_flight{export=\"root\"}"), 0);
    assert!(sample(&body, "zebu_clusters_allocated_total{export=\"root\"}") >= 10);
    // What is discarded is in quarantine until a flush.
    assert_eq!(client.call(0, command::TRIM, 0, 4 * 65536).unwrap().error, 0);
    let quarantine = |dir: &Path| {
        let (_, body) = scrape(dir, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
        ["quarantined", "released_total"]
            .map(|name| sample(&body, &format!("zebu_clusters_{name}{{export=\"root\"}}")))
    };
    assert_eq!(quarantine(dir), [4, 0]);
    client.call(0, command::FLUSH, 0, 0).unwrap();
    // The release goes on after the flush.
    wait_until("the release", || quarantine(dir) == [0, 4]);
    assert_eq!(scrape(dir, "GET /x HTTP/1.1\r\n\r\n").0, "HTTP/1.1 404 Not Found");
    assert_eq!(scrape(dir, "PUT /metrics HTTP/1.1\r\n\r\n").0, "HTTP/1.1 405 Method Not Allowed");
    let stats: Value =
        serde_json::from_str(&zebu(dir, ["ctl", "ctl.sock", "stats", "root"]).ok().stdout).unwrap();
    assert_eq!(stats["requests"]["write"]["requests"], 10);
    assert_eq!(stats["virtual-size"], 64 * MIB);
    server.stop();
    assert!(!dir.join("ctl.sock").exists() && !dir.join("metrics.sock").exists());
}

#[test]
fn a_disk_grows_under_its_clients() {
    let Some(qemu) = Qemu::find() else { return };
    let (scratch, server) = serve("");
    let dir = scratch.path();
    let mut old = Client::open(server.socket(), "root").unwrap();
    assert_ne!(old.write(0, 64 * MIB, &[1; 512]).unwrap(), 0);
    zebu(dir, ["ctl", "ctl.sock", "resize", "root", "+64M"]).ok();
    // One that was there before may use it, one that comes is told of it.
    assert_eq!(old.write(0, 127 * MIB, &[3; 512]).unwrap(), 0);
    let mut new = Client::start(server.socket()).unwrap();
    assert_eq!(new.go("root").unwrap().0, 128 * MIB);
    let out = zebu(dir, ["ctl", "ctl.sock", "resize", "root", "1M"]).exits(1);
    assert!(out.stderr.contains("smaller"), "{out}");
    let out = zebu(dir, ["ctl", "ctl.sock", "resize", "nosuch", "1G"]).exits(1);
    assert!(out.stderr.contains("nosuch"), "{out}");
    zebu(dir, ["ctl", "ctl.sock", "flush", "root"]).ok();
    zebu(dir, ["ctl", "ctl.sock", "cache-size", "root", "4M"]).ok();
    let stats: Value =
        serde_json::from_str(&zebu(dir, ["ctl", "ctl.sock", "stats", "root"]).ok().stdout).unwrap();
    assert_eq!(stats["image"]["cache-limit"], 4 * MIB, "{stats}");
    assert!(stats["image"]["cache-bytes"].as_u64() <= Some(4 * MIB), "{stats}");
    assert_eq!(old.read(127 * MIB, 512).unwrap(), [3; 512]);
    let set = |bytes: u64| zebu(dir, ["ctl", "ctl.sock", "cache-size", "root", &bytes.to_string()]);
    let least = least_cache(&set(1).exits(1));
    set(least - 1).exits(1);
    set(least).ok();
    assert_eq!(old.read(127 * MIB, 512).unwrap(), [3; 512]);
    server.stop();
    assert_eq!(qemu.info(dir, IMAGE)["virtual-size"], 128 * MIB);
    qemu.check_clean(dir, IMAGE).unwrap();
    qemu.io(dir, "-f qcow2", IMAGE, &["read -P 3 127M 512"]).ok();
    zebu(dir, ["ctl", "ctl.sock", "stats"]).exits(1);
}

/// The minimum that a refusal names.
fn least_cache(refused: &Finished) -> u64 {
    let told = refused.stderr.split("at least ").nth(1).and_then(|rest| rest.split(' ').next());
    told.and_then(|told| told.parse().ok()).unwrap_or_else(|| panic!("{refused}"))
}

#[test]
fn a_cache_that_is_too_small_for_the_queues_is_refused() {
    let scratch = Scratch::new("control");
    let dir = scratch.path();
    zebu(dir, ["create", "-q", "-f", "qcow2", IMAGE, "4G"]).ok();
    let options = |bytes: u64| format!("driver=qcow2,file.filename={IMAGE},cache-size={bytes}");
    let socket = format!("unix:{}", dir.join("refused.sock").display());
    let start = |bytes: u64| {
        zebu(dir, ["serve", "--queues", "16", "--nbd", &socket, "--image-opts", &options(bytes)])
    };
    let least = least_cache(&start(1).exits(1));
    start(least - 1).exits(1);
    let server = Server::start(dir, &format!("--queues 16 --image-opts {}", options(least)));
    let mut client = Client::open(server.socket(), "").unwrap();
    for at in (0..4096 * MIB).step_by(600 * MIB as usize) {
        assert_eq!(client.write(0, at, &[1; 4096]).unwrap(), 0);
    }
    server.stop();
}

/// Nobody asks for anything, so that no request looks by the way.
#[test]
fn an_idle_image_gives_its_memory_back() {
    let scratch = Scratch::new("control");
    let dir = scratch.path();
    zebu(dir, ["create", "-q", "-f", "qcow2", "-o", "preallocation=metadata", IMAGE, "4G"]).ok();
    let options = format!("driver=qcow2,file.filename={IMAGE},cache-clean-interval=3,extent-index=off");
    let server = Server::start(dir, &format!("--control ctl.sock --export-name root --image-opts {options}"));
    let mut client = Client::open(server.socket(), "root").unwrap();
    let mut lines = BufReader::new(UnixStream::connect(dir.join("ctl.sock")).unwrap());
    let mut cached = || {
        lines.get_mut().write_all(b"{\"command\":\"stats\",\"export\":\"root\"}\n").unwrap();
        let mut answer = String::new();
        lines.read_line(&mut answer).unwrap();
        let answer: Value = serde_json::from_str(&answer).unwrap();
        answer["result"]["image"]["cache-bytes"].as_u64().unwrap()
    };
    // All at once, and nobody starts a program meanwhile: what the first one loads is not idle yet behind the last.
    for cookie in 0..128 {
        client.request(0, command::READ, cookie, cookie * 32 * MIB, 4096).unwrap();
    }
    for _ in 0..128 {
        let reply = client.reply().unwrap();
        assert!(reply.error == 0 && reply.done, "{reply:?}");
    }
    let before = cached();
    assert!(before > 512 << 10, "{before} bytes");
    wait_until(format_args!("most of {before} bytes are given back"), || cached() <= before / 4);
    client.read(0, 4096).unwrap();
    drop(lines);
    server.stop();
}

#[test]
fn all_threads_are_in_the_sandbox_unless_it_is_off() {
    for (options, mode) in [("--queues 3", "2"), ("--queues 3 --no-sandbox", "0")] {
        let (_scratch, server) = serve(options);
        let mut client = Client::open(server.socket(), "root").unwrap();
        assert_eq!(client.write(0, 0, &[1; 4096]).unwrap(), 0);
        let filters = server.system_call_filters();
        assert!(filters.len() > 3 && filters.iter().all(|filter| filter == mode), "{options}: {filters:?}");
        server.stop();
    }
}

/// The name of an export could be a line of its own, or codes for a terminal.
#[test]
fn messages_are_lines_without_codes_whatever_names_are_in_them() {
    let scratch = Scratch::new("control");
    zebu(scratch.path(), ["create", "-q", "-f", "qcow2", IMAGE, "64M"]).ok();
    let name = "x\u{1b}[31m\u{9b}y";
    let options =
        format!("--log-level debug --export-name {name} --vhost-user-blk vhost.sock -f qcow2 {IMAGE}");
    let server = Server::start(scratch.path(), &options);
    drop(VhostGuest::connect(&scratch.file("vhost.sock"), 1));
    assert!(Client::open(server.socket(), "\u{1b}[2J\nzebu: error: none").is_err());
    let messages = server.stop_with_messages();
    assert!(messages.contains("a front end of 'x\\u{1b}[31m\\u{9b}y' connects"), "{messages:?}");
    assert!(messages.lines().all(|line| line.starts_with("zebu: ")), "{messages:?}");
    assert!(!messages.replace('\n', "").contains(char::is_control), "{messages:?}");
}

/// Documented lines leave the export out.
#[test]
fn an_export_may_be_left_out_where_there_is_one() {
    let (scratch, server) = serve("");
    let dir = scratch.path();
    let ctl = |line: &str| zebu(dir, ["ctl", "ctl.sock"].into_iter().chain(line.split(' ')));
    for line in [
        "resize +64M",
        "resize root +64M",
        "cache-size 8M",
        "flush",
        "snapshot-create before-update",
        "snapshot-create root second",
        "snapshot-delete second",
        "bitmap-add backup",
        "bitmap-clear root backup",
        "bitmap-remove backup",
        "backup-start -w monday.qcow2",
        "backup-query",
    ] {
        ctl(line).ok();
    }
    assert_eq!(ctl("snapshot-list").ok().stdout.lines().count(), 1);
    assert!(ctl("snapshot-create").exits(1).stderr.contains("needs a NAME"));
    let size =
        serde_json::from_str::<Value>(&ctl("stats").ok().stdout).unwrap()["exports"][0]["virtual-size"]
            .clone();
    assert_eq!(size, 192 * MIB);
    server.stop();

    let scratch = Scratch::new("control");
    let dir = scratch.path();
    for image in ["a.qcow2", "b.qcow2"] {
        zebu(dir, ["create", "-q", image, "1M"]).ok();
    }
    let server = Server::start(dir, "--control ctl.sock -f qcow2 a.qcow2 b.qcow2");
    let refused = zebu(dir, ["ctl", "ctl.sock", "resize", "2M"]).exits(1);
    assert!(refused.stderr.contains("which export?") && refused.stderr.contains("'b.qcow2'"), "{refused}");
    zebu(dir, ["ctl", "ctl.sock", "resize", "b.qcow2", "2M"]).ok();
    server.stop();
}

#[test]
fn sockets_are_for_those_who_are_named() {
    let mode = |dir: &Path, name: &str| {
        let metadata = std::fs::metadata(dir.join(name)).unwrap();
        (metadata.permissions().mode() & 0o777, metadata.gid())
    };
    // SAFETY: numbers only. The umask is what servers inherit.
    let umask = unsafe { libc::umask(0) };
    // SAFETY: no arguments.
    let own = unsafe { libc::getegid() };
    let (scratch, server) = serve("");
    for name in ["nbd.sock", "ctl.sock", "metrics.sock"] {
        assert_eq!(mode(scratch.path(), name), (0o600, own), "{name}");
    }
    server.stop();
    let (scratch, server) = serve(&format!("--socket-mode 0666 --socket-group {own}"));
    for (name, expected) in [("nbd.sock", 0o666), ("ctl.sock", 0o600), ("metrics.sock", 0o666)] {
        assert_eq!(mode(scratch.path(), name), (expected, own), "{name}");
    }
    let said = server.stop_with_messages();
    // Older kernels can't.
    let others: Vec<&str> = said.lines().filter(|line| !line.contains("Linux 6.16 refuses them")).collect();
    assert!(others.is_empty(), "{said}");
    // SAFETY: as above.
    unsafe { libc::umask(umask) };
}

#[test]
fn silent_connections_keep_nobody_from_metrics_and_control() {
    let (scratch, server) = serve("");
    let dir = scratch.path();
    let silent = |name: &str| -> Vec<UnixStream> {
        (0..40).map(|_| UnixStream::connect(dir.join(name)).unwrap()).collect()
    };
    let flush = || drop(zebu(dir, ["ctl", "ctl.sock", "flush", "root"]).ok());
    let look = || assert_eq!(scrape(dir, "GET /metrics HTTP/1.1\r\n\r\n").0, "HTTP/1.1 200 OK");
    let doors: [(&str, &dyn Fn()); 2] = [("ctl.sock", &flush), ("metrics.sock", &look)];
    for (name, ask) in doors {
        let patience = Patience::begin();
        loop {
            let silent = silent(name);
            ask();
            // The last that came still has its place: nobody was waited for. The time of all is over on a slow machine.
            if is_open(silent.last().unwrap()) {
                break;
            }
            patience.check(format_args!("{name} answers while silent connections are open"));
        }
    }
    server.stop();
}

/// Whether the other side keeps a connection over which it says nothing.
fn is_open(mut stream: &UnixStream) -> bool {
    stream.set_nonblocking(true).unwrap();
    stream.read(&mut [0]).is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock)
}

#[test]
fn lines_that_are_no_requests_are_refused() {
    let (scratch, server) = serve("--read-only");
    let stream = UnixStream::connect(scratch.file("ctl.sock")).unwrap();
    let mut lines = BufReader::new(stream);
    let mut ask = |line: &str| {
        lines.get_mut().write_all(line.as_bytes()).unwrap();
        let mut answer = String::new();
        lines.read_line(&mut answer).unwrap();
        serde_json::from_str::<Value>(&answer).unwrap()
    };
    for wrong in [
        "{\n",
        "[1]\n",
        "{\"command\":\"nosuch\"}\n",
        "{\"command\":\"resize\",\"export\":\"root\"}\n",
        "\u{fffd}\n",
    ] {
        assert!(ask(wrong)["error"]["message"].is_string(), "{wrong}");
    }
    let answer = ask("{\"id\":[1,2],\"command\":\"resize\",\"export\":\"root\",\"size\":1073741824}\n");
    assert_eq!(answer["id"], json!([1, 2]));
    assert!(answer["error"]["message"].as_str().unwrap().contains("read-only"));
    assert_eq!(ask("{\"id\":\"x\",\"command\":\"stats\"}\n")["result"]["exports"][0]["name"], "root");
    // More than a line has.
    let stream = lines.into_inner();
    let _ = (&stream).write_all(&vec![b'x'; 200_000]);
    let mut rest = Vec::new();
    assert!((&stream).read_to_end(&mut rest).is_err() || rest.is_empty());
    server.stop();
}

#[test]
fn growth_by_clients_that_race_is_added_up() {
    const CLIENTS: u64 = 8;
    let (scratch, server) = serve("");
    let dir = scratch.path();
    std::thread::scope(|scope| {
        for _ in 0..CLIENTS {
            scope.spawn(|| {
                for _ in 0..3 {
                    zebu(dir, ["ctl", "ctl.sock", "resize", "root", "+1M"]).ok();
                }
            });
        }
    });
    let stats: Value =
        serde_json::from_str(&zebu(dir, ["ctl", "ctl.sock", "stats", "root"]).ok().stdout).unwrap();
    assert_eq!(stats["virtual-size"], (64 + 3 * CLIENTS) * MIB);
    let out = zebu(dir, ["ctl", "ctl.sock", "resize", "root", "+9000000T"]).exits(1);
    assert!(out.stderr.contains("too large"), "{out}");
    server.stop();
}

/// A target that a client opened, with what somebody else has in it.
#[test]
fn a_backup_overwrites_no_file_that_is_not_empty() {
    let (scratch, server) = serve("");
    let dir = scratch.path();
    let target = dir.join("target");
    std::fs::write(&target, "precious").unwrap();
    let file = std::fs::File::options().read(true).write(true).open(&target).unwrap();
    let stream = UnixStream::connect(dir.join("ctl.sock")).unwrap();
    let request = json!({ "command": "backup-start", "export": "root", "target": target }).to_string() + "\n";
    hand_over(&stream, request.as_bytes(), file.as_fd()).unwrap();
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer).unwrap();
    assert!(answer.contains("is no empty file"), "{answer}");
    assert_eq!(std::fs::read(&target).unwrap(), b"precious");
    server.stop();
}

#[test]
fn the_socket_of_a_killed_server_is_taken_over_at_once() {
    let scratch = Scratch::new("control");
    let dir = scratch.path();
    zebu(dir, ["create", "-q", "-f", "qcow2", IMAGE, "64M"]).ok();
    let options = format!("--export-name root -f qcow2 {IMAGE}");
    let mut server = Server::start(dir, &options);
    for round in 0..20 {
        // Its ring holds the socket for as long as a client's requests, which the kernel gives up after its end.
        let mut clients: Vec<_> = (0..8).map(|_| Client::open(server.socket(), "root").unwrap()).collect();
        for (client, at) in clients.iter_mut().zip(0..) {
            assert_eq!(client.write(0, at * MIB, &vec![round; 65536]).unwrap(), 0);
        }
        let killed = Instant::now();
        let socket = server.socket().to_owned();
        server.kill_amid_writes();
        server = Server::try_start(dir, &options).unwrap_or_else(|said| {
            // Busy kernels take longer to give up the ring than the next server waits.
            assert!(said.contains("use") && killed.elapsed() > LONGEST_RING, "{said}");
            wait_until("the killed server's socket is closed", || UnixStream::connect(&socket).is_err());
            Server::start(dir, &options)
        });
    }
}

#[test]
fn a_server_that_ends_without_an_answer_is_told_apart() {
    let scratch = Scratch::new("control");
    let listener = UnixListener::bind(scratch.file("ctl.sock")).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut line = String::new();
            BufReader::new(listener.accept().unwrap().0).read_line(&mut line).unwrap();
        });
        let out = zebu(scratch.path(), ["ctl", "ctl.sock", "jobs"]).exits(1);
        assert!(out.stderr.contains("'ctl.sock': the server has ended without an answer"), "{out}");
    });
}
