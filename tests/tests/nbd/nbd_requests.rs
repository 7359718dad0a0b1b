//! Effects of requests beyond reading and writing, judged by the protocol's description, by QEMU and by the file.

use rustix::process::Signal;
use serde_json::Value;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};
use zebu_tests::mount::Mounted;
use zebu_tests::nbd_client::{ACK, Client, command, option};
use zebu_tests::patience::{LONGEST, wait_for, wait_until};
use zebu_tests::program::{Finished, find, finish, run_in, zebu};
use zebu_tests::qemu::Qemu;
use zebu_tests::scratch::Scratch;
use zebu_tests::server::Server;

const IMAGE: &str = "disk.qcow2";
const CLUSTER: u64 = 64 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const EOVERFLOW: u32 = 75;
const ENOTSUP: u32 = 95;
/// Flags of commands.
const NO_HOLE: u16 = 1 << 1;
const FAST_ZERO: u16 = 1 << 4;
const PAYLOAD_LEN: u16 = 1 << 5;
/// The type of a chunk with 64-bit extents.
const BLOCK_STATUS_EXT: u16 = 6;

/// The answer of `base:allocation` for the whole disk, in as many requests as it takes: (bytes, hole, zero).
fn status(client: &mut Client, context: u32, size: u64) -> Vec<(u64, bool, bool)> {
    let mut runs: Vec<(u64, bool, bool)> = Vec::new();
    let mut at = 0;
    while at < size {
        client.request(0, command::BLOCK_STATUS, 9, at, size - at).unwrap();
        let reply = client.reply().unwrap();
        assert_eq!((reply.kind, reply.error, reply.done), (BLOCK_STATUS_EXT, 0, true), "{reply:?}");
        let number = |from: usize, len: usize| {
            reply.data[from..from + len].iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
        };
        assert_eq!(number(0, 4), u64::from(context));
        assert_eq!(reply.data.len() as u64, 8 + 16 * number(4, 4));
        for extent in (8..reply.data.len()).step_by(16) {
            let (len, flags) = (number(extent, 8), number(extent + 8, 8));
            assert!(len > 0, "an extent of no bytes at {at}");
            at += len;
            let (hole, zero) = (flags & 1 != 0, flags & 2 != 0);
            match runs.last_mut() {
                Some(last) if (last.1, last.2) == (hole, zero) => last.0 += len,
                _ => runs.push((len, hole, zero)),
            }
        }
    }
    assert_eq!(at, size, "extents end with the disk");
    runs
}

/// So many requests at once are not as many reads at once, for which the other clients of the thread would have to wait.
#[test]
fn what_a_client_wants_to_be_read_ahead_is_read_one_after_the_other() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("nbd-requests");
    let dir = scratch.path();
    qemu.create(dir, IMAGE, "qcow2", "cluster_size=512", 64 << 20);
    let server = Server::start(dir, &format!("-f qcow2 {IMAGE}"));
    let mut client = Client::open(server.socket(), "").unwrap();
    for at in (0..8).map(|number| number << 20) {
        assert_eq!(client.write(0, at, &vec![7; 1 << 20]).unwrap(), 0);
    }
    let (long, short) = (8 << 20, 512);
    for (cookie, len) in [(1, long), (2, short), (3, long), (4, short)] {
        client.request(0, command::CACHE, cookie, 0, len).unwrap();
    }
    let order: Vec<u64> = (0..4).map(|_| client.reply().unwrap().cookie).collect();
    assert_eq!(order, [1, 2, 3, 4]);
    drop(client);
    server.stop();
}

#[test]
fn lengths_of_more_than_4_gib_are_one_request() {
    const SIZE: u64 = 24 * GIB;
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("nbd-requests");
    let dir = scratch.path();
    qemu.create(dir, IMAGE, "qcow2", "", SIZE);
    let server = Server::start(dir, &format!("-f qcow2 {IMAGE}"));
    let mut client = Client::start(server.socket()).unwrap();
    assert_eq!(client.ask(option::EXTENDED_HEADERS, b"").unwrap().0, ACK);
    let context = client.contexts("", &["base:allocation"]).unwrap()[0];
    assert_eq!(client.go_extended("").unwrap().0, SIZE);

    // A cluster every 3 GiB, the first at 0.
    for place in 0..8 {
        let data = vec![place as u8 + 1; CLUSTER as usize];
        assert_eq!(client.write(PAYLOAD_LEN, place * 3 * GIB, &data).unwrap(), 0);
    }
    // 3 and 6 GiB go with one request of more than 4 GiB, and 15 GiB to the end with another.
    let end = |reply: zebu_tests::nbd_client::Reply| (reply.error, reply.done);
    assert_eq!(end(client.call(0, command::WRITE_ZEROES, GIB, 6 * GIB).unwrap()), (0, true));
    assert_eq!(end(client.call(0, command::TRIM, 14 * GIB, 10 * GIB).unwrap()), (0, true));
    assert_eq!(end(client.call(0, command::CACHE, 0, SIZE).unwrap()), (0, true));
    // Data of that size is no request.
    assert_eq!(client.call(0, command::READ, 0, 5 * GIB).unwrap().error, EOVERFLOW);
    for (place, byte) in [(0, 1), (3, 0), (6, 0), (9, 4), (12, 5), (15, 0), (21, 0)] {
        assert!(client.read(place * GIB, CLUSTER).unwrap() == vec![byte; CLUSTER as usize], "at {place} GiB");
    }
    let runs = status(&mut client, context, SIZE);
    let data: Vec<u64> = runs.iter().filter(|(_, hole, zero)| !hole && !zero).map(|(len, ..)| *len).collect();
    assert_eq!(data, [CLUSTER; 3], "{runs:?}");
    assert!(runs.iter().any(|(len, ..)| *len > 4 * GIB), "{runs:?}");
    assert_eq!(client.call(0, command::FLUSH, 0, 0).unwrap().error, 0);
    drop(client);
    server.stop();
    qemu.check_clean(dir, IMAGE).unwrap();
    qemu.io(dir, "-f qcow2", IMAGE, &["read -P 1 0 64k", "read -P 4 9G 64k", "read -P 5 12G 64k"]).ok();
    // Everything else reads as zeroes.
    let map = qemu.img(dir, ["map", "--output=json", IMAGE]).ok().stdout;
    let extents: Vec<Value> = serde_json::from_str(&map).unwrap();
    let number = |extent: &Value, name: &str| extent[name].as_u64().unwrap();
    let data: Vec<(u64, u64)> = extents
        .iter()
        .filter(|extent| extent["zero"] != true)
        .map(|extent| (number(extent, "start"), number(extent, "length")))
        .collect();
    assert_eq!(data, [0, 9 * GIB, 12 * GIB].map(|at| (at, CLUSTER)));
    assert_eq!(extents.iter().map(|extent| number(extent, "length")).sum::<u64>(), SIZE);
}

/// Without zero clusters (version 2) zeroes are written, and a client that wants them only if they are cheap is told so.
#[test]
fn zeroes_that_are_not_fast_are_refused_if_they_have_to_be() {
    let Some(qemu) = Qemu::find() else { return };
    for (options, refused) in [("compat=0.10", true), ("compat=1.1", false)] {
        let scratch = Scratch::new("nbd-requests");
        let dir = scratch.path();
        qemu.create(dir, IMAGE, "qcow2", options, 64 * MIB);
        qemu.io(dir, "-f qcow2", IMAGE, &["write -q -P 7 0 16M"]).ok();
        let server = Server::start(dir, &format!("-f qcow2 {IMAGE}"));
        let mut client = Client::open(server.socket(), "").unwrap();
        for flags in [FAST_ZERO, FAST_ZERO | NO_HOLE] {
            let reply = client.call(flags, command::WRITE_ZEROES, MIB, MIB).unwrap();
            assert_eq!(reply.error, if refused { ENOTSUP } else { 0 }, "{options}, flags {flags:#x}");
            let byte = if refused { 7 } else { 0 };
            assert!(client.read(MIB, MIB).unwrap() == vec![byte; MIB as usize], "{options}");
        }
        // Who does not ask for speed gets zeroes.
        assert_eq!(client.call(0, command::WRITE_ZEROES, 2 * MIB, MIB).unwrap().error, 0);
        drop(client);
        server.stop();
        qemu.check_clean(dir, IMAGE).unwrap();
        qemu.io(dir, "-f qcow2", IMAGE, &["read -P 7 0 1M", "read -P 0 2M 1M", "read -P 7 3M 13M"]).ok();
    }
}

/// Zeroes without NO_HOLE give their space back; with it the clusters keep their places, so that a later write there
/// needs no space.
#[test]
fn no_hole_keeps_the_space() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("nbd-requests");
    let dir = scratch.path();
    let taken = || std::fs::metadata(dir.join(IMAGE)).expect("it is there").blocks() * 512;
    let places = || -> u64 {
        let map = qemu.img(dir, ["map", "--output=json", IMAGE]).ok();
        let map: Value = serde_json::from_str(&map.stdout).expect("JSON");
        let with_place = |run: &&Value| run["offset"].is_u64();
        map.as_array()
            .expect("a list")
            .iter()
            .filter(with_place)
            .filter_map(|run| run["length"].as_u64())
            .sum()
    };
    qemu.create(dir, IMAGE, "qcow2", "", 64 * MIB);
    qemu.io(dir, "-f qcow2", IMAGE, &["write -q -P 7 0 32M"]).ok();
    let full = taken();
    for (flags, kept) in [(NO_HOLE, 32 * MIB), (0, 0)] {
        let server = Server::start(dir, &format!("-f qcow2 {IMAGE}"));
        let mut client = Client::open(server.socket(), "").unwrap();
        assert_eq!(client.call(flags, command::WRITE_ZEROES, 0, 32 * MIB).unwrap().error, 0);
        assert_eq!(client.call(0, command::FLUSH, 0, 0).unwrap().error, 0);
        drop(client);
        server.stop();
        assert_eq!(places(), kept, "flags {flags:#x}");
        if kept == 0 {
            assert!(taken() + 31 * MIB < full, "{} bytes of {full} left", taken());
        }
        qemu.io(dir, "-f qcow2", IMAGE, &["read -P 0 0 64M"]).ok();
        qemu.check_clean(dir, IMAGE).unwrap();
    }
}

/// A file system on which writes wait. Goes on when dropped.
struct Frozen<'a>(&'a Path);

impl<'a> Frozen<'a> {
    fn new(mount: &'a Path) -> Self {
        freeze("-f", mount).ok();
        Self(mount)
    }
}

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        freeze("-u", self.0);
    }
}

fn freeze(option: &str, mount: &Path) -> Finished {
    let mut command = Command::new(find("fsfreeze").expect("fsfreeze is missing (util-linux)"));
    command.arg(option).arg(mount);
    finish(command)
}

#[test]
fn requests_of_one_connection_overtake_each_other() {
    const WRITES: u64 = 64;
    let Some(qemu) = Qemu::find() else { return };
    let Some(mounted) = Mounted::on_loop("mkfs.ext4", 256 << 20) else { return };
    let scratch = Scratch::new("nbd-requests");
    let (dir, mount) = (scratch.path(), mounted.path());
    qemu.create(&mount, IMAGE, "qcow2", "", 64 * MIB);
    qemu.io(&mount, "-f qcow2", IMAGE, &["write -q -P 7 0 32M"]).ok();
    let options = format!("--cache none --control ctl.sock -f qcow2 {}", mount.join(IMAGE).display());
    let server = Server::start(dir, &options);
    let mut client = Client::open(server.socket(), "").unwrap();
    // What the first write to an image changes in its header.
    assert_eq!(client.write(0, 0, &[8; 4096]).unwrap(), 0);
    assert_eq!(client.call(0, command::FLUSH, 0, 0).unwrap().error, 0);
    let frozen = Frozen::new(&mount);
    for number in 0..WRITES {
        let header = client.header(0, command::WRITE, 1000 + number, (number + 1) * CLUSTER, 4096);
        client.say(&[&header[..], &[9; 4096]].concat()).unwrap();
    }
    let in_flight = || {
        let stats = zebu(dir, ["ctl", "ctl.sock", "stats", ""]).ok().stdout;
        serde_json::from_str::<Value>(&stats).unwrap()["in-flight"].as_u64().unwrap()
    };
    wait_until("all requests are under way", || in_flight() >= WRITES);
    // Asked last, answered first, twice.
    assert!(client.read(16 * MIB, 4096).unwrap() == [7; 4096]);
    assert_eq!(client.call(0, command::BLOCK_STATUS, 0, 4096).unwrap().error, 22, "no context was chosen");
    assert!(client.read(40 * MIB, 4096).unwrap() == [0; 4096]);
    drop(frozen);
    let mut answered: Vec<u64> = (0..WRITES)
        .map(|_| {
            let reply = client.reply().unwrap();
            assert_eq!(reply.error, 0);
            reply.cookie
        })
        .collect();
    answered.sort_unstable();
    assert!(answered.into_iter().eq(1000..1000 + WRITES));
    drop(client);
    server.stop();
    qemu.check_clean(&mount, IMAGE).unwrap();
    let reads = (1..=WRITES).map(|number| format!("read -q -P 9 {} 4k", number * CLUSTER));
    qemu.io(&mount, "-f qcow2", IMAGE, &reads.collect::<Vec<_>>()).ok();
}

/// The answers to a lane of writes.
struct Lane {
    /// Number of the last write that was acknowledged, from 1 on.
    acknowledged: u64,
    /// Number of the last write that was sent.
    sent: u64,
}

/// Writes the numbers from 1 on, over and over into 16 clusters, until the server is gone.
/// Says when each of the clusters has been written.
fn write_until_the_end(socket: &Path, lane: u64, began: &Sender<()>) -> Lane {
    let mut client = Client::open(socket, "").unwrap();
    let mut lane_is = Lane { acknowledged: 0, sent: 0 };
    loop {
        lane_is.sent += 1;
        let data: Vec<u8> = lane_is.sent.to_be_bytes().repeat(512);
        match client.write(0, place(lane, lane_is.sent), &data) {
            Ok(0) => lane_is.acknowledged = lane_is.sent,
            Ok(error) => panic!("lane {lane}: error {error}"),
            Err(_) => return lane_is,
        }
        if lane_is.sent == 17 {
            let _ = began.send(());
        }
    }
}

/// Where write `number` of a lane goes.
fn place(lane: u64, number: u64) -> u64 {
    (lane * 16 + number % 16) * CLUSTER
}

/// Signals that end it, with requests under way: the server ends well, and what was acknowledged is in an image without a mark.
#[test]
fn a_server_that_is_told_to_end_keeps_what_it_acknowledged() {
    const LANES: u64 = 6;
    let Some(qemu) = Qemu::find() else { return };
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        for round in 0..4 {
            let scratch = Scratch::new("nbd-requests");
            let dir = scratch.path();
            qemu.create(dir, IMAGE, "qcow2", "", 64 * MIB);
            let server = Server::start(dir, &format!("-f qcow2 {IMAGE}"));
            let lanes: Vec<Lane> = std::thread::scope(|scope| {
                let socket = server.socket().to_owned();
                let (began, all) = channel();
                let lanes: Vec<_> = (0..LANES)
                    .map(|lane| {
                        let (socket, began) = (socket.clone(), began.clone());
                        scope.spawn(move || write_until_the_end(&socket, lane, &began))
                    })
                    .collect();
                // What is missing is told below, when the server has ended.
                for _ in 0..LANES {
                    let _ = all.recv_timeout(LONGEST);
                }
                std::thread::sleep(Duration::from_millis(70 * round));
                let said = server.stop_by(signal);
                let is_expected =
                    |line: &str| signal == Signal::HUP && line.contains("SIGHUP ends the server");
                assert!(said.lines().all(is_expected), "{said}");
                lanes.into_iter().map(|lane| lane.join().expect("a lane")).collect()
            });
            qemu.check_clean(dir, IMAGE).unwrap();
            let mut reads = Vec::new();
            for (lane, found) in (0..LANES).zip(&lanes) {
                assert!(found.acknowledged > 16, "lane {lane}: {} writes", found.acknowledged);
                for number in found.acknowledged - 15..=found.acknowledged {
                    // The write that nobody answered may be there, over the one 16 before it.
                    if number + 16 > found.sent {
                        reads.push((place(lane, number), number));
                    }
                }
            }
            let disk = qemu.read_all(dir, IMAGE, None);
            for (at, number) in reads {
                let bytes = &disk[at as usize..at as usize + 4096];
                assert!(bytes == number.to_be_bytes().repeat(512), "write {number} at {at} is lost");
            }
        }
    }
}

/// A client that takes its reply late gets all of it from a server that was told to end meanwhile.
#[test]
fn a_reply_that_is_under_way_arrives_whole() {
    for options in ["--aio io_uring", "--aio threads"] {
        // On a busy machine, a client may come later than the server waits.
        wait_until("a reply is taken in time", || takes_late_reply(options));
    }
}

/// Takes a reply from a server that was told to end; whether that was before the server's patience was over.
fn takes_late_reply(options: &str) -> bool {
    /// More than the socket takes, by far.
    const LEN: usize = 2 << 20;
    /// Less than the server's patience.
    const IN_TIME: Duration = Duration::from_secs(9);
    let scratch = Scratch::new("nbd-requests");
    zebu(scratch.path(), ["create", "-q", "-f", "qcow2", IMAGE, "64M"]).ok();
    let server = Server::start(scratch.path(), &format!("{options} -f qcow2 {IMAGE}"));
    let mut client = Client::open(server.socket(), "").unwrap();
    client.write(0, 0, &[5; 4096]).unwrap();
    client.request(0, command::READ, 7, 0, LEN as u64).unwrap();
    // The first bytes of the reply: the rest waits for us.
    let mut reply = client.take(4).unwrap();
    let began = Instant::now();
    server.signal(Signal::TERM);
    wait_until("the server begins to end", || !server.socket().exists());
    let rest = client.take(16 + 8 + LEN);
    if began.elapsed() > IN_TIME {
        return false;
    }
    reply.extend(rest.unwrap());
    assert_eq!(reply[..4], 0x668e_33efu32.to_be_bytes());
    assert!(reply[28..28 + 4096] == [5; 4096] && reply[28 + 4096..].iter().all(|byte| *byte == 0));
    assert_eq!(server.wait(), (Some(0), String::new()), "{options}");
    true
}

/// Bytes that the other side of a Unix socket has not taken.
fn unsent(stream: &UnixStream) -> i32 {
    let mut count = -1;
    // SAFETY: the request stores a number.
    assert_eq!(unsafe { libc::ioctl(stream.as_raw_fd(), libc::TIOCOUTQ, &raw mut count) }, 0);
    count
}

/// A write whose payload the server did not take, because it ends, is not answered: an error would get to the guest of a
/// client that connects again and repeats what was not answered.
#[test]
fn half_a_write_is_not_answered_by_a_server_that_ends() {
    for options in ["--aio io_uring", "--aio threads"] {
        let scratch = Scratch::new("nbd-requests");
        zebu(scratch.path(), ["create", "-q", "-f", "qcow2", IMAGE, "64M"]).ok();
        let server = Server::start(scratch.path(), &format!("{options} -f qcow2 {IMAGE}"));
        let mut client = Client::open(server.socket(), "").unwrap();
        client.write(0, 0, &[5; 4096]).unwrap();
        client.request(0, command::WRITE, 8, 0, 1 << 20).unwrap();
        client.say(&[6; 4096]).unwrap();
        wait_until("the server has taken what was said", || unsent(client.stream()) == 0);
        server.signal(Signal::TERM);
        assert!(client.take(4).is_err(), "{options}: half a write is answered");
        assert_eq!(server.wait(), (Some(0), String::new()), "{options}");
    }
}

#[test]
fn a_second_signal_ends_the_server_at_once_and_says_what_is_lost() {
    let scratch = Scratch::new("nbd-requests");
    zebu(scratch.path(), ["create", "-q", "-f", "qcow2", IMAGE, "64M"]).ok();
    let mut server = Server::start(scratch.path(), &format!("--export-name disk -f qcow2 {IMAGE}"));
    let mut client = Client::open(server.socket(), "disk").unwrap();
    client.write(0, 0, &vec![5; 65536]).unwrap();
    assert_eq!(client.call(0, command::FLUSH, 0, 0).unwrap().error, 0);
    client.write(0, 0, &[6; 4096]).unwrap();
    // The server waits for this one to be taken.
    client.request(0, command::READ, 7, 0, 32 << 20).unwrap();
    client.take(4).unwrap();
    server.signal(Signal::HUP);
    wait_until("the server begins to end", || !server.socket().exists());
    // The first that comes a second after the first of all.
    let (code, said) = wait_for("it ends", || {
        server.signal(Signal::TERM);
        server.has_ended()
    });
    // One that waited for its client ends in good order.
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("'disk': up to 4096 bytes"), "{said}");
}

#[test]
fn a_hangup_that_was_ignored_before_stays_ignored() {
    let scratch = Scratch::new("nbd-requests");
    zebu(scratch.path(), ["create", "-q", "-f", "qcow2", IMAGE, "64M"]).ok();
    let server = Server::start_without_hangups(scratch.path(), &format!("-f qcow2 {IMAGE}"));
    server.signal(Signal::HUP);
    let mut client = Client::open(server.socket(), "").unwrap();
    client.write(0, 0, &[5; 4096]).unwrap();
    server.stop();
}

#[test]
fn a_file_that_may_not_grow_is_an_error_of_the_request() {
    let scratch = Scratch::new("nbd-requests");
    zebu(scratch.path(), ["create", "-q", "-f", "qcow2", IMAGE, "64M"]).ok();
    for options in ["--aio io_uring", "--aio threads"] {
        let server = Server::start(scratch.path(), &format!("{options} -f qcow2 {IMAGE}"));
        let limit = ["--pid", &server.pid().to_string(), "--fsize=4000000"].map(str::to_owned);
        run_in(scratch.path(), &find("prlimit").unwrap(), limit).ok();
        let mut client = Client::open(server.socket(), "").unwrap();
        let errors: Vec<u32> =
            (0..8).map(|mib| client.write(0, mib * MIB, &vec![5; MIB as usize]).unwrap()).collect();
        assert_eq!(errors[0], 0);
        assert!(errors.iter().any(|error| *error != 0), "{errors:?}");
        assert_eq!(client.read(0, 10).unwrap(), [5; 10]);
        drop(client);
        server.signal(Signal::TERM);
        server.wait();
    }
}
