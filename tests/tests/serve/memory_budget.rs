//! Memory of all clients of a server together (`--max-memory`): connections of NBD, rings of vhost-user-blk, files (FUSE).

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use zebu_tests::nbd_client::{Client, command};
use zebu_tests::patience::wait_until;
use zebu_tests::program::{is_root, zebu};
use zebu_tests::scratch::Scratch;
use zebu_tests::server::Server;
use zebu_tests::vhost_guest::{DATA, VhostGuest, WRITE};

const IMAGE: &str = "disk.qcow2";
const MIB: usize = 1 << 20;
const LIMIT: u64 = 64 << 20;

fn metric(dir: &Path, name: &str) -> u64 {
    let mut stream = UnixStream::connect(dir.join("metrics.sock")).expect("connected");
    stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").expect("sent");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("text");
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("{name} is not in {text}")).parse().expect("a number")
}

/// Clients that want all memory and take nothing.
fn greedy(server: &Server, count: usize) -> Vec<Client> {
    let ask = |_| {
        let mut client = Client::open(server.socket(), "").expect("connected");
        client.request(0, command::READ, 1, 0, 32 << 20).expect("sent");
        client
    };
    (0..count).map(ask).collect()
}

#[test]
fn files_and_rings_have_their_part_of_the_memory() {
    if !is_root() || File::open("/dev/fuse").is_err() {
        eprintln!("skipped: mounting needs root and /dev/fuse");
        return;
    }
    for engine in ["io_uring", "threads"] {
        let scratch = Scratch::new("memory");
        let dir = scratch.path();
        zebu(dir, ["create", "-q", "-f", "qcow2", IMAGE, "64M"]).ok();
        let doors = "--fuse disk.raw --vhost-user-blk vhost.sock --metrics unix:metrics.sock --queues 2";
        let options = format!("{doors} --max-memory 64M -t none --aio {engine} -f qcow2 {IMAGE}");
        let server = Server::start(dir, &options);
        // The file's buffer, and its largest request.
        let of_file = metric(dir, "zebu_memory_bytes");
        assert_eq!(of_file, 2 << 20);
        let mut guest = VhostGuest::connect(&scratch.file("vhost.sock"), 2);
        let of_rings = metric(dir, "zebu_memory_bytes") - of_file;
        assert!(of_rings > 2 << 20, "{of_rings}");
        assert_eq!(metric(dir, "zebu_memory_limit_bytes"), LIMIT);
        let clients = greedy(&server, 60);
        wait_until("clients wait", || metric(dir, "zebu_memory_waiting") >= 50);
        // What others hold holds nobody up who gives back what he takes.
        let file = File::options().read(true).write(true).open(dir.join("disk.raw")).expect("mounted");
        for round in 0..10u8 {
            let content = vec![round + 1; 4 * MIB];
            file.write_all_at(&content, 0).expect("written");
            let mut read = vec![0; 4 * MIB];
            file.read_exact_at(&mut read, 0).expect("read");
            assert!(read == content);
            // Buffers that do not suit the disk are copied.
            for offset in [DATA, DATA + 512] {
                assert_eq!(guest.call(0, 0, 0, 2 << 20, WRITE), (0, (2 << 20) + 1));
                assert_eq!(guest.get(DATA, 512), vec![round + 1; 512]);
                guest.put_request(1, 0, 0, 0, (VhostGuest::at(offset), 2 << 20, WRITE));
                guest.offer(1, 0);
                guest.kick(1);
                assert_eq!(guest.used(1), [(0, (2 << 20) + 1)]);
                assert_eq!(guest.get(offset, 512), vec![round + 1; 512]);
            }
        }
        // Those who hold it have given nothing back.
        let waiting = metric(dir, "zebu_memory_waiting");
        assert!(waiting >= 50, "{waiting} wait");
        assert!(metric(dir, "zebu_memory_bytes") <= LIMIT);
        let resident = server.resident_kib();
        assert!(resident < 120 << 10, "{resident} KiB");
        drop((clients, guest, file));
        wait_until("what left is not counted", || metric(dir, "zebu_memory_bytes") == of_file);
        server.stop();
    }
}

#[test]
fn a_thousand_clients_that_do_not_read_stay_within_the_memory() {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum })
        .expect("its own limit");
    for engine in ["io_uring", "threads"] {
        let scratch = Scratch::new("memory");
        let dir = scratch.path();
        zebu(dir, ["create", "-q", "-f", "qcow2", IMAGE, "64M"]).ok();
        let doors = "--metrics unix:metrics.sock --queues 2 --max-clients 2000";
        let server = Server::start(dir, &format!("{doors} --aio {engine} -f qcow2 {IMAGE}"));
        let before = server.resident_kib();
        let clients = greedy(&server, 1000);
        wait_until("clients wait", || metric(dir, "zebu_memory_waiting") >= 900);
        let mut most = 0;
        for round in 0..20u8 {
            let mut client = Client::open(server.socket(), "").expect("one more");
            assert_eq!(client.write(0, 0, &[round; 4096]).expect("served"), 0);
            assert_eq!(client.read(0, 4096).expect("served"), [round; 4096]);
            most = most.max(server.resident_kib());
        }
        let used = metric(dir, "zebu_memory_bytes");
        println!("{engine}: {most} KiB of memory, {used} bytes counted");
        assert!(used <= 512 << 20, "{used}");
        // What is counted, and a little.
        assert!(most - before < 560 << 10, "{most} KiB");
        drop(clients);
        server.stop();
    }
}

/// Requests that a limit of the export holds back take memory beside their data, however small they are.
#[test]
fn many_small_requests_that_wait_stay_within_the_memory() {
    let scratch = Scratch::new("memory");
    let dir = scratch.path();
    zebu(dir, ["create", "-q", "-f", "qcow2", IMAGE, "64M"]).ok();
    let doors = "--metrics unix:metrics.sock --control ctl.sock";
    let server = Server::start(dir, &format!("{doors} --max-memory 64M -f qcow2 {IMAGE}"));
    zebu(dir, ["ctl", "ctl.sock", "limit", "", "iops=1"]).ok();
    let mut clients: Vec<Client> =
        (0..100).map(|_| Client::open(server.socket(), "").expect("connected")).collect();
    for client in &mut clients {
        let headers = (0..512).flat_map(|at| client.header(0, command::READ, at, at * 512, 512));
        let headers: Vec<u8> = headers.collect();
        client.say(&headers).expect("sent");
    }
    wait_until("most clients wait for memory", || metric(dir, "zebu_memory_waiting") >= 90);
    let used = metric(dir, "zebu_memory_bytes");
    assert!(used <= LIMIT, "{used}");
    let resident = server.resident_kib();
    assert!(resident < 120 << 10, "{resident} KiB");
    // Once the limit is gone, all go on.
    zebu(dir, ["ctl", "ctl.sock", "limit", "", "none"]).ok();
    for mut client in clients {
        for _ in 0..512 {
            assert_eq!(client.reply().expect("served").error, 0);
        }
    }
    server.stop();
}

#[test]
fn rings_that_there_is_no_memory_for_are_refused() {
    let scratch = Scratch::new("memory");
    let dir = scratch.path();
    zebu(dir, ["create", "-q", "-f", "qcow2", IMAGE, "64M"]).ok();
    let options =
        format!("--vhost-user-blk vhost.sock --max-memory 64M --max-clients-per-peer 1024 -f qcow2 {IMAGE}");
    let server = Server::start(dir, &options);
    // Connections that do nothing have half of the memory.
    let mut clients = Vec::new();
    while let Ok(client) = Client::open(server.socket(), "") {
        clients.push(client);
    }
    let path = scratch.file("vhost.sock");
    let refused = std::thread::spawn(move || drop(VhostGuest::connect(&path, 1))).join();
    assert!(refused.is_err(), "there is no memory for a ring");
    drop(clients);
    let path = scratch.file("vhost.sock");
    let connects = || {
        let path = path.clone();
        std::thread::spawn(move || VhostGuest::connect(&path, 1).call(0, 8, 0, 20, WRITE)).join()
    };
    wait_until("a ring is let in", || connects().is_ok_and(|(status, _)| status == 0));
    let said = server.stop_with_messages();
    assert!(said.contains("half of the memory"), "{said}");
}
