//! NBD clients that do not keep to the protocol: each gets its error or is sent away, the others are served on.

use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, prlimit, setrlimit};
use serde_json::Value;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::{Duration, Instant};
use zebu_tests::nbd_client::{ACK, Client, ERROR, command, option};
use zebu_tests::patience::{wait_for, wait_until};
use zebu_tests::program::zebu;
use zebu_tests::scratch::Scratch;
use zebu_tests::server::Server;

const SIZE: u64 = 64 << 20;
const EINVAL: u32 = 22;
const ENOSPC: u32 = 28;
const EOVERFLOW: u32 = 75;
const EPERM: u32 = 1;

fn serve(options: &str) -> (Scratch, Server) {
    let scratch = Scratch::new("nbd-malformed");
    zebu(scratch.path(), ["create", "-q", "-f", "qcow2", "disk.qcow2", "64M"]).ok();
    let server = Server::start(scratch.path(), &format!("{options} -f qcow2 disk.qcow2"));
    (scratch, server)
}

/// A client in good order is served.
#[track_caller]
fn serves(server: &Server) {
    let mut client = Client::open(server.socket(), "").expect("serves");
    assert_eq!(client.write(0, 4096, &[5; 512]).unwrap(), 0);
    assert!(client.read(4096, 512).unwrap() == [5; 512]);
}

#[test]
fn negotiations_out_of_order_are_refused() {
    let (_scratch, server) = serve("");
    // Unknown handshake flags.
    let mut client = Client::connect(server.socket()).unwrap();
    client.say(&0x8000_0003u32.to_be_bytes()).unwrap();
    assert!(client.is_closed());
    // An option without its magic.
    let mut client = Client::start(server.socket()).unwrap();
    client.say(b"IHAVEOPTX\0\0\0\0\0\0\0").unwrap();
    client.say(&[0; 16]).unwrap();
    assert!(client.is_closed());
    let mut client = Client::start(server.socket()).unwrap();
    client.say(&[0; 16]).unwrap();
    assert!(client.is_closed());
    // An export that is not there, in the way that has no errors.
    let mut client = Client::start(server.socket()).unwrap();
    client.option(option::EXPORT_NAME, b"nosuch").unwrap();
    assert!(client.is_closed());
    // More data than anybody has to say.
    for len in [u32::MAX, (1 << 20) + 1] {
        let mut client = Client::start(server.socket()).unwrap();
        client.say(&[&b"IHAVEOPT"[..], &7u32.to_be_bytes(), &len.to_be_bytes()].concat()).unwrap();
        assert!(client.is_closed());
    }
    // Everything that can be answered is, and the negotiation goes on.
    let mut client = Client::start(server.socket()).unwrap();
    let long = vec![b'a'; 70_000];
    let cut = [0, 0, 0, 9, b'x'];
    let unknown = [0, 0, 0, 1, b'x', 0, 0];
    for (code, data) in [
        (99, &b""[..]),
        (4, b""),
        (5, b""),
        (option::LIST, b"data"),
        (option::STRUCTURED_REPLY, b"data"),
        (option::GO, b""),
        (option::GO, &cut),
        (option::GO, &unknown),
        (option::GO, &long),
        (option::INFO, &unknown),
        (option::SET_META_CONTEXT, &[0; 8]),
        (option::LIST_META_CONTEXT, b"x"),
    ] {
        let (reply, message) = client.ask(code, data).unwrap();
        assert!(reply & ERROR != 0, "option {code}: {reply:#x}");
        assert!(!message.is_empty(), "option {code} is refused without a word");
    }
    assert_eq!(client.ask(option::STRUCTURED_REPLY, b"").unwrap().0, ACK);
    client.go("").unwrap();
    assert_eq!(client.read(0, 512).unwrap(), [0; 512]);
    serves(&server);
    server.stop();
}

#[test]
fn a_form_of_replies_is_not_given_up() {
    const INVALID: u32 = ERROR + 3;
    const EXTENDED_HEADERS_REQUIRED: u32 = ERROR + 10;
    let (_scratch, server) = serve("");
    let mut client = Client::start(server.socket()).unwrap();
    for (code, expected) in [
        (option::STRUCTURED_REPLY, ACK),
        (option::STRUCTURED_REPLY, INVALID),
        (option::EXTENDED_HEADERS, ACK),
        (option::EXTENDED_HEADERS, INVALID),
        (option::STRUCTURED_REPLY, EXTENDED_HEADERS_REQUIRED),
    ] {
        assert_eq!(client.ask(code, b"").unwrap().0, expected, "option {code}");
    }
    client.go_extended("").unwrap();
    assert_eq!(client.write(0, 4096, &[6; 512]).unwrap(), 0);
    assert_eq!(client.read(4096, 512).unwrap(), [6; 512]);
    // The option that has no errors has no extended headers, either.
    let mut client = Client::start(server.socket()).unwrap();
    assert_eq!(client.ask(option::EXTENDED_HEADERS, b"").unwrap().0, ACK);
    client.option(option::EXPORT_NAME, b"").unwrap();
    assert!(client.is_closed());
    let mut client = Client::start(server.socket()).unwrap();
    assert_eq!(client.ask(option::STRUCTURED_REPLY, b"").unwrap().0, ACK);
    client.option(option::EXPORT_NAME, b"").unwrap();
    assert_eq!(client.take(10).unwrap()[..8], SIZE.to_be_bytes());
    assert_eq!(client.read(4096, 512).unwrap(), [6; 512]);
    server.stop();
}

#[test]
fn contexts_count_for_the_export_that_they_were_chosen_for() {
    let scratch = Scratch::new("nbd-malformed");
    for name in ["a.qcow2", "b.qcow2"] {
        zebu(scratch.path(), ["create", "-q", "-f", "qcow2", name, "1M"]).ok();
    }
    let server = Server::start(scratch.path(), "-f qcow2 a.qcow2 b.qcow2");
    let mut client = Client::start(server.socket()).unwrap();
    assert_eq!(client.ask(option::STRUCTURED_REPLY, b"").unwrap().0, ACK);
    let names = ["base:allocation", "qemu:allocation-depth", "no:such"];
    assert_eq!(client.contexts("a.qcow2", &names).unwrap().len(), 2);
    client.go("b.qcow2").unwrap();
    assert_eq!(client.call(0, command::BLOCK_STATUS, 0, 4096).unwrap().error, EINVAL);
    assert_eq!(client.read(0, 512).unwrap(), [0; 512]);
    server.stop();
}

#[test]
fn requests_out_of_order_are_refused() {
    let (_scratch, server) = serve("");
    for extended in [false, true] {
        let open = if extended { Client::open_extended } else { Client::open };
        let mut client = open(server.socket(), "").unwrap();
        for (command, flags, offset, len, error) in [
            (command::READ, 0, SIZE, 1, EINVAL),
            (command::READ, 0, SIZE - 1, 2, EINVAL),
            (command::READ, 0, u64::MAX, 512, EINVAL),
            (command::READ, 0, 0, (32 << 20) + 1, EOVERFLOW),
            (command::READ, 1 << 9, 0, 512, EINVAL),
            (command::TRIM, 0, SIZE, 512, EINVAL),
            (command::TRIM, 0, u64::MAX - 511, 512, EINVAL),
            (command::WRITE_ZEROES, 0, SIZE - 512, 1024, ENOSPC),
            (command::WRITE_ZEROES, 1 << 2, 0, 512, EINVAL),
            (command::CACHE, 0, SIZE, 512, EINVAL),
            (command::BLOCK_STATUS, 0, 0, 512, EINVAL),
            (8, 0, 0, 512, EINVAL),
            (0xffff, 0, 0, 0, EINVAL),
        ] {
            let reply = client.call(flags, command, offset, len).unwrap();
            assert_eq!(reply.error, error, "command {command}, flags {flags}, {len} bytes at {offset}");
        }
        // A payload that is refused is skipped.
        assert_eq!(client.write(0, SIZE, &[1; 5000]).unwrap(), ENOSPC);
        assert_eq!(client.write(1 << 12, 0, &[1; 5000]).unwrap(), EINVAL);
        assert_eq!(client.write(0, 0, &vec![1; (32 << 20) + 512]).unwrap(), EINVAL);
        assert_eq!(client.read(0, 512).unwrap(), [0; 512]);
        // Requests of no bytes do nothing.
        assert_eq!(client.write(0, 0, &[]).unwrap(), 0);
        assert_eq!(client.call(0, command::READ, 0, 0).unwrap().error, 0);
        assert_eq!(client.call(0, command::TRIM, SIZE, 0).unwrap().error, 0);
        if extended {
            let too_long = client.call(0, command::TRIM, 0, 1 << 40).unwrap();
            assert_eq!(too_long.error, EINVAL);
            // A payload where none belongs is skipped.
            client.request(1 << 5, command::BLOCK_STATUS, 2, 0, 100).unwrap();
            client.say(&[7; 100]).unwrap();
            assert_eq!(client.reply().unwrap().error, EINVAL);
            client.request(1 << 5, command::READ, 2, 0, 1 << 40).unwrap();
        } else {
            client.say(&[0; 28]).unwrap();
        }
        assert!(client.is_closed());
        let mut client = open(server.socket(), "").unwrap();
        client.request(0, command::WRITE, 1, 0, u64::from(u32::MAX)).unwrap();
        assert!(client.is_closed(), "nobody waits for 4 GiB that are not wanted");
    }
    serves(&server);
    server.stop();
}

#[test]
fn a_read_only_export_is_not_written() {
    let (scratch, server) = serve("--read-only");
    let before = std::fs::read(scratch.file("disk.qcow2")).unwrap();
    let mut client = Client::open(server.socket(), "").unwrap();
    assert_eq!(client.write(0, 0, &[1; 512]).unwrap(), EPERM);
    for command in [command::TRIM, command::WRITE_ZEROES] {
        assert_eq!(client.call(0, command, 0, 512).unwrap().error, EPERM);
    }
    assert_eq!(client.call(0, command::FLUSH, 0, 0).unwrap().error, 0);
    drop(client);
    server.stop();
    assert!(std::fs::read(scratch.file("disk.qcow2")).unwrap() == before);
}

#[test]
fn half_a_request_holds_nobody_up() {
    // Others are served while nobody's time is over.
    let (_scratch, server) = serve("--handshake-timeout 100000 --idle-timeout 100000");
    let halves = halves_of_requests(&server).unwrap();
    serves(&server);
    for half in &halves {
        half.stream().set_nonblocking(true).unwrap();
        let read = half.stream().read(&mut [0]);
        assert!(read.is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock), "it is open");
    }
    drop(halves);
    let mut client = Client::open(server.socket(), "").unwrap();
    assert!(client.read(1 << 20, 8192).unwrap() == [0; 8192], "half a payload is written");
    server.stop();
    // Their time ends, and nobody else's connection is needed meanwhile.
    let (scratch, server) = serve("--handshake-timeout 5 --idle-timeout 5");
    // On a busy machine, it may end before they have said their halves.
    let mut halves = wait_for("halves in time", || halves_of_requests(&server).ok());
    assert!(halves.iter_mut().all(Client::is_closed));
    server.stop();
    zebu(scratch.path(), ["io", "-f", "qcow2", "-r", "-c", "read -P 0 1M 8k", "disk.qcow2"]).ok();
}

/// Clients that say half of what they want: nothing, an option, a header, a payload.
fn halves_of_requests(server: &Server) -> std::io::Result<[Client; 4]> {
    let silent = Client::connect(server.socket())?;
    let mut half_an_option = Client::start(server.socket())?;
    half_an_option.say(b"IHAVE")?;
    let mut half_a_header = Client::open(server.socket(), "")?;
    let header = half_a_header.header(0, command::READ, 1, 0, 512);
    half_a_header.say(&header[..20])?;
    let mut half_a_payload = Client::open(server.socket(), "")?;
    half_a_payload.request(0, command::WRITE, 1, 1 << 20, 8192)?;
    half_a_payload.say(&[1; 5000])?;
    Ok([silent, half_an_option, half_a_header, half_a_payload])
}

#[test]
fn a_client_that_never_reads_is_held_back() {
    let (_scratch, server) = serve("--max-request-memory 4M --queues 2");
    let mut client = Client::open(server.socket(), "").unwrap();
    client.stream().set_nonblocking(true).unwrap();
    // Requests for 4 GiB, until the server takes no more.
    let header = client.header(0, command::READ, 1, 0, 1 << 20);
    let mut sent = 0;
    let mut quiet = 0;
    while quiet < 20 && sent < 4096 {
        if client.say(&header).is_ok() {
            (sent, quiet) = (sent + 1, 0);
        } else {
            quiet += 1;
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    // Whoever is served behind them finds what they take taken.
    (0..20).for_each(|_| serves(&server));
    let resident = server.resident_kib();
    assert!(resident < 120 << 10, "{resident} KiB after {sent} requests");
    // It ends with its replies still waiting to be read.
    server.stop();
}

#[test]
fn clients_that_never_read_leave_memory_to_others() {
    let (_scratch, server) = serve("--max-memory 64M --queues 2");
    let greedy: Vec<Client> = (0..60)
        .map(|_| {
            let mut client = Client::open(server.socket(), "").unwrap();
            client.request(0, command::READ, 1, 0, 32 << 20).unwrap();
            client
        })
        .collect();
    wait_until("the first reply is ready", || server.resident_kib() >= 30 << 10);
    // Their own shares are there for others.
    for _ in 0..20 {
        serves(&server);
    }
    let resident = server.resident_kib();
    assert!(resident < 110 << 10, "{resident} KiB");
    // Whoever leaves makes room.
    drop(greedy);
    let mut client = Client::open(server.socket(), "").unwrap();
    assert_eq!(client.read(0, 32 << 20).unwrap().len(), 32 << 20);
    server.stop();
}

#[test]
fn requests_that_wait_for_memory_do_not_keep_a_server_from_its_end() {
    let (_scratch, server) = serve("--max-memory 64M");
    let pid = server.pid();
    let greedy: Vec<Client> = (0..100)
        .map(|_| {
            let mut client = Client::open(server.socket(), "").unwrap();
            client.request(0, command::READ, 1, 0, 32 << 20).unwrap();
            client
        })
        .collect();
    server.signal(Signal::TERM);
    server.wait();
    assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
    // Most were told by the end of the connection that nobody works on their requests.
    let answered = greedy.into_iter().filter_map(|mut client| client.take(4).ok()).count();
    assert!(answered <= 2, "{answered} of them");
}

#[test]
fn connections_have_no_more_than_half_of_the_memory() {
    let (_scratch, server) = serve("--max-memory 64M --max-clients-per-peer 256");
    let clients: Vec<Client> = (0..256).map(|_| Client::open(server.socket(), "").unwrap()).collect();
    assert!(Client::open(server.socket(), "").is_err());
    drop(clients);
    wait_until("somebody is let in", || Client::open(server.socket(), "").is_ok());
    let said = server.stop_with_messages();
    assert!(said.contains("connections take half of 64 MiB"), "{said}");
}

#[test]
fn clients_beyond_the_limit_are_sent_away() {
    let (_scratch, server) = serve("--max-clients 2 --log-level error");
    let first = Client::open(server.socket(), "").unwrap();
    let second = Client::open(server.socket(), "").unwrap();
    assert!(Client::connect(server.socket()).is_err());
    drop(first);
    wait_until("the place of one who left", || Client::open(server.socket(), "").is_ok());
    drop(second);
    server.stop();
}

/// As many silent clients as may come at all; before the handshake, in it, and behind it.
#[test]
fn silent_clients_lock_nobody_out() {
    for engine in ["io_uring", "threads"] {
        let scratch = Scratch::new("nbd-malformed");
        zebu(scratch.path(), ["create", "-q", "-f", "qcow2", "disk.qcow2", "64M"]).ok();
        // A socket that other users reach.
        let public = tempfile::tempdir().unwrap();
        std::fs::set_permissions(public.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        let socket = public.path().join("nbd.sock");
        let limits = "--max-clients 64 --queues 2 --handshake-timeout 600 --socket-mode 0666";
        let address = format!("--nbd unix:{}", socket.display());
        let options = format!("{limits} {address} --aio {engine} -f qcow2 disk.qcow2");
        let server = Server::start(scratch.path(), &options);
        // Whoever has a place behind the handshake keeps it.
        let mut first = Client::open(server.socket(), "").unwrap();
        let silent: Vec<_> = (0..200).map(|_| UnixStream::connect(server.socket()).unwrap()).collect();
        serves(&server);
        let halfway: Vec<_> = (0..200).filter_map(|_| Client::start(server.socket()).ok()).collect();
        serves(&server);
        let others: Vec<_> = (0..200).filter_map(|_| Client::open(server.socket(), "").ok()).collect();
        assert_eq!(others.len(), 64 - 64 / 16 - 1, "{engine}: one user's share");
        assert!(Client::open(server.socket(), "").is_err());
        assert_eq!(first.write(0, 4096, &[7; 512]).unwrap(), 0);
        // As another user, who has none of these places.
        let uri = format!("nbd+unix:///?socket={}", socket.display());
        let other_user = Command::new("setpriv")
            .args(["--reuid=65534", "--regid=65534", "--clear-groups", "nbdinfo", "--size", &uri])
            .output()
            .unwrap();
        drop((silent, halfway));
        if rustix::process::getuid().is_root() {
            assert!(other_user.status.success(), "{engine}: {other_user:?}");
            assert_eq!(String::from_utf8_lossy(&other_user.stdout).trim(), SIZE.to_string());
        }
        drop((others, first));
        let said = server.stop_with_messages();
        assert!(said.contains("more than 60 clients of user"), "{engine}: {said}");
    }
}

#[test]
fn clients_that_vanish_leave_nothing_behind() {
    let (_scratch, server) = serve("--queues 2");
    let idle = server.sockets();
    let visit = |turn: u64| {
        let mut client = Client::start(server.socket()).unwrap();
        if !turn.is_multiple_of(3) {
            client.ask(option::STRUCTURED_REPLY, b"").unwrap();
            client.go("").unwrap();
        }
        if turn % 3 > 1 {
            client.request(0, command::READ, 1, 0, 1 << 20).unwrap();
            client.request(0, command::WRITE, 2, 0, 1 << 20).unwrap();
            client.say(&[3; 100]).unwrap();
        }
        drop(client);
        // So few at once that what they need together tells nothing.
        if turn % 8 == 7 {
            wait_until("those who left are gone", || server.sockets() <= idle);
        }
    };
    // As many as later: what is allocated once, and what stays free between, is there.
    (0..1000).for_each(visit);
    let (descriptors, resident) = (server.descriptors(), server.resident_kib());
    (0..1000).for_each(visit);
    wait_until(format_args!("{descriptors} descriptors, as before"), || server.descriptors() <= descriptors);
    let after = server.resident_kib();
    assert!(after < resident + (16 << 10), "{after} KiB, {resident} before");
    serves(&server);
    server.stop();
}

/// Reading all of the disk ahead takes hours.
#[test]
fn nothing_is_read_ahead_for_clients_that_left() {
    const HUGE: u64 = 60 << 40;
    let scratch = Scratch::new("nbd-malformed");
    let dir = scratch.path();
    zebu(dir, ["create", "-q", "-f", "qcow2", "disk.qcow2", "60T"]).ok();
    let server = Server::start(dir, "--control ctl.sock -f qcow2 disk.qcow2");
    let clients = || {
        let stats = zebu(dir, ["ctl", "ctl.sock", "stats"]).ok().stdout;
        let stats: Value = serde_json::from_str(&stats).unwrap();
        stats["exports"][0]["clients"].as_u64().unwrap()
    };
    let all_leave = |what: &str| wait_until(what, || clients() == 0);
    let mut client = Client::open_extended(server.socket(), "").unwrap();
    client.request(0, command::CACHE, 1, 0, HUGE).unwrap();
    // It has begun, and others are served meanwhile.
    serves(&server);
    drop(client);
    all_leave("one request");
    // More than there is room for: the server does not come to see the end of what was sent.
    let mut client = Client::open_extended(server.socket(), "").unwrap();
    for cookie in 0..100 {
        client.request(0, command::CACHE, cookie, 0, HUGE).unwrap();
    }
    serves(&server);
    drop(client);
    all_leave("many requests");
    // One that says that it leaves, and waits for the server to close the connection.
    let mut client = Client::open_extended(server.socket(), "").unwrap();
    client.request(0, command::CACHE, 1, 0, HUGE).unwrap();
    client.request(0, command::DISCONNECT, 2, 0, 0).unwrap();
    all_leave("a farewell");
    assert!(client.is_closed());
    server.stop();
}

#[test]
fn the_server_has_as_many_descriptors_as_it_may() {
    let limits = getrlimit(Resource::Nofile);
    let low = Rlimit { current: Some(limits.maximum.unwrap_or(u64::MAX).min(1000)), ..limits };
    // Whoever else starts a server meanwhile has no need of more.
    setrlimit(Resource::Nofile, low).unwrap();
    let (_scratch, server) = serve("");
    setrlimit(Resource::Nofile, limits).unwrap();
    let pid = Pid::from_raw(server.pid() as i32);
    let found = prlimit(pid, Resource::Nofile, limits).unwrap();
    assert_eq!(found, Rlimit { current: limits.maximum, ..limits });
    // Without any left, that is told once, and those who wait are served when there are some again.
    let none = Rlimit { current: Some(server.descriptors() as u64 + 1), ..limits };
    let began = Instant::now();
    prlimit(pid, Resource::Nofile, none).unwrap();
    let waiting: Vec<_> = (0..4).map(|_| UnixStream::connect(server.socket()).unwrap()).collect();
    server.wait_for_words("cannot accept a client");
    // It tries again all the time.
    std::thread::sleep(Duration::from_secs(2));
    prlimit(pid, Resource::Nofile, limits).unwrap();
    serves(&server);
    drop(waiting);
    let said = server.stop_with_messages();
    // Once a minute, that is.
    let most = 1 + began.elapsed().as_secs() as usize / 60;
    assert!((1..=most).contains(&said.lines().count()), "{said}");
    assert!(said.contains("cannot accept a client") && said.contains("ulimit -n"), "{said}");
}

#[test]
fn random_bytes_do_no_harm() {
    use zebu_tests::random::Random;
    let (_scratch, server) = serve("--handshake-timeout 600 --idle-timeout 600");
    let mut random = Random::new(7);
    for turn in 0..300 {
        let mut bytes: Vec<u8> = (0..random.below(3000)).map(|_| random.below(256) as u8).collect();
        let mut client = if turn % 2 == 0 {
            Client::connect(server.socket()).unwrap()
        } else {
            let client = Client::open(server.socket(), "").unwrap();
            // A header with its magic, and the rest by chance; reading and looking only.
            if let Some(head) = bytes.get_mut(..8) {
                head.copy_from_slice(&client.header(0, [0, 3, 5, 7][turn / 2 % 4], 0, 0, 0)[..8]);
            }
            client
        };
        // It may be closed before all is said.
        let _ = client.say(&bytes);
    }
    serves(&server);
    server.stop();
}
