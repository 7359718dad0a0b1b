//! Servers with several threads: connections of NBD, and rings of a vhost-user-blk device, that share a disk. What each
//! client saw is explained by some order of all requests; a flush on one connection covers what was acknowledged on any;
//! what was flushed survives a kill.

use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use zebu_tests::nbd_client::{ACK, Client, command, option};
use zebu_tests::patience::Patience;
use zebu_tests::qemu::Qemu;
use zebu_tests::random::Random;
use zebu_tests::scratch::Scratch;
use zebu_tests::server::Server;
use zebu_tests::thread_stress::copies::{self, Through};
use zebu_tests::thread_stress::history::History;
use zebu_tests::thread_stress::journal::{Kind, Outcome};
use zebu_tests::thread_stress::process::read_journals;
use zebu_tests::thread_stress::recorder::{Clock, Recorder};
use zebu_tests::thread_stress::sector::{SECTOR, Seen, Tearing, ZERO, fill, look_at_all};
use zebu_tests::vhost_guest::{DATA, VhostGuest, WRITE};

const IMAGE: &str = "disk.qcow2";
/// Sectors of the disk.
const SECTORS: u64 = 32768;
/// Most sectors of a request.
const MOST: u64 = 48;
/// Requests in flight on a connection or ring.
const DEPTH: usize = 8;
/// The flag of a write that is durable when it is answered.
const FUA: u16 = 1;
/// Zeroes stay allocated.
const NO_HOLE: u16 = 2;
/// Several connections see one disk.
const MULTI_CONN: u16 = 1 << 8;

/// How a round ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Stopped,
    /// After so many requests.
    Killed(u64),
}

/// Makes the image: full of data that a snapshot holds on to, so that tables are copied.
fn make(qemu: &Qemu, dir: &Path, cluster: u64) -> Vec<u64> {
    const VALUE: u64 = 0x1111_1111_1111_1111;
    let mut content = vec![0; SECTORS as usize * SECTOR];
    fill(&mut content, VALUE, 0);
    std::fs::write(dir.join("first.raw"), content).unwrap();
    let options = format!("convert -f raw -O qcow2 -o cluster_size={cluster} first.raw {IMAGE}");
    qemu.img_line(dir, &options).ok();
    qemu.img_line(dir, &format!("snapshot -c s {IMAGE}")).ok();
    vec![VALUE; SECTORS as usize]
}

/// A request to be made.
struct Next {
    kind: Kind,
    first: u64,
    count: u64,
    flag: bool,
}

fn next(random: &mut Random) -> Next {
    let count = random.between(1, MOST);
    // Mostly in the same places as the others.
    let room = if random.chance(70) { 2048 } else { SECTORS - MOST };
    let first = random.below(room);
    let kind = match random.below(100) {
        0..50 => Kind::Write,
        50..54 => Kind::DurableWrite,
        54..74 => Kind::Read,
        74..82 => Kind::Zero,
        82..90 => Kind::Discard,
        _ => Kind::Flush,
    };
    let count = if kind == Kind::Flush { 0 } else { count };
    Next { kind, first, count, flag: random.chance(50) }
}

fn data(recorder: &Recorder, next: &Next) -> (u64, Vec<u8>) {
    let mut bytes = vec![0; next.count as usize * SECTOR];
    match next.kind {
        Kind::Write | Kind::DurableWrite => {
            let value = recorder.value();
            fill(&mut bytes, value, next.first);
            (value, bytes)
        }
        _ => (ZERO, Vec::new()),
    }
}

/// One connection.
struct Connection {
    client: Client,
    recorder: Recorder,
    random: Random,
    /// By cookie, which is the number of the request: what it does, where, and what came of it so far.
    under_way: HashMap<u64, (Next, Vec<u8>)>,
}

impl Connection {
    fn send(&mut self) -> io::Result<()> {
        let next = next(&mut self.random);
        let (value, bytes) = data(&self.recorder, &next);
        let (code, flags) = match next.kind {
            Kind::Write => (command::WRITE, 0),
            Kind::DurableWrite => (command::WRITE, FUA),
            Kind::Read => (command::READ, 0),
            Kind::Zero => (command::WRITE_ZEROES, if next.flag { NO_HOLE } else { 0 }),
            Kind::Discard => (command::TRIM, 0),
            _ => (command::FLUSH, 0),
        };
        let number = self.recorder.begin(next.kind, next.first, next.count, value);
        let [offset, len] = match next.kind {
            Kind::Flush => [0, 0],
            _ => [next.first, next.count].map(|sectors| sectors * SECTOR as u64),
        };
        let mut message = self.client.header(flags, code, number, offset, len);
        message.extend(bytes);
        let room = if next.kind == Kind::Read { len as usize } else { 0 };
        self.under_way.insert(number, (next, vec![0; room]));
        self.client.say(&message)
    }

    fn take(&mut self, answered: &AtomicU64) -> io::Result<()> {
        let reply = self.client.reply()?;
        assert_eq!(reply.error, 0, "a request failed");
        let (next, bytes) = self.under_way.get_mut(&reply.cookie).expect("a cookie of ours");
        if reply.kind == 1 {
            let offset = u64::from_be_bytes(reply.data[..8].try_into().unwrap());
            let at = (offset - next.first * SECTOR as u64) as usize;
            bytes[at..at + reply.data.len() - 8].copy_from_slice(&reply.data[8..]);
        }
        if reply.done {
            let ended = self.recorder.now();
            let (next, bytes) = self.under_way.remove(&reply.cookie).expect("it is there");
            self.recorder.end_at(reply.cookie, ended, Outcome::Done, look_at_all(&bytes, next.first));
            answered.fetch_add(1, Ordering::SeqCst);
        }
        Ok(())
    }

    /// Makes so many requests; an error if the server goes away.
    fn run(&mut self, count: u64, answered: &AtomicU64) -> io::Result<()> {
        for _ in 0..count {
            self.send()?;
            while self.under_way.len() >= DEPTH {
                self.take(answered)?;
            }
        }
        while !self.under_way.is_empty() {
            self.take(answered)?;
        }
        Ok(())
    }
}

fn connect(socket: &Path) -> Client {
    let mut client = Client::start(socket).unwrap();
    assert_eq!(client.ask(option::STRUCTURED_REPLY, b"").unwrap().0, ACK);
    let (_, flags) = client.go("").unwrap();
    assert_ne!(flags & MULTI_CONN, 0, "{flags:#x}");
    client
}

/// The disk of an image, as QEMU reads it.
fn content(qemu: &Qemu, dir: &Path) -> Vec<Seen> {
    look_at_all(&qemu.read_all(dir, IMAGE, None), 0)
}

/// Judges what the clients saw, and what is left.
fn judge(qemu: &Qemu, dir: &Path, initial: Vec<u64>, cluster: u64, end: End, through: Through) {
    let mut history =
        History::new(initial, cluster / SECTOR as u64, Tearing::Bytes, read_journals(dir).unwrap());
    let mut wrong = Vec::new();
    if end == End::Stopped {
        qemu.check_clean(dir, IMAGE).unwrap();
        history.add_final(content(qemu, dir));
    } else {
        let copy = dir.join("crash");
        copies::take(dir, &copy, &[IMAGE], through).unwrap();
        let check = qemu.img(&copy, ["check", "-f", "qcow2", IMAGE]);
        assert!(matches!(check.code, Some(0 | 3)), "{check}");
        wrong.extend(history.judge_crash(&content(qemu, &copy), 4));
    }
    wrong.extend(history.judge(4));
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(history.counts().flushes > 0);
}

fn through(options: &str) -> Through {
    if options.contains("-t none") { Through::Direct } else { Through::PageCache }
}

/// Connections that do all kinds of requests on the same sectors.
fn connections(seed: u64, cluster: u64, options: &str, count: u64, end: End) {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("nbd-threads");
    let dir = scratch.path();
    let initial = make(&qemu, dir, cluster);
    let server = Server::start(dir, &format!("{options} -f qcow2 {IMAGE}"));
    let clock: Clock = Arc::new(AtomicU64::new(1));
    let answered = AtomicU64::new(0);
    // The first connection idles, wherever it is served.
    let _idle = connect(server.socket());
    let clients: Vec<Client> = (0..4).map(|_| connect(server.socket())).collect();
    let server = std::thread::scope(|scope| {
        for (writer, client) in (0..).zip(clients) {
            let (clock, answered) = (&clock, &answered);
            scope.spawn(move || {
                let recorder = Recorder::new(dir, seed, writer, clock);
                let random = Random::new(seed * 1000 + writer);
                let mut connection = Connection { client, recorder, random, under_way: HashMap::new() };
                let ended = connection.run(count, answered);
                assert!(ended.is_ok() || end != End::Stopped, "{ended:?}");
            });
        }
        match end {
            End::Stopped => {}
            End::Killed(after) => {
                let patience = Patience::begin();
                while answered.load(Ordering::SeqCst) < after {
                    patience.check(format_args!("{after} requests are answered"));
                    std::thread::sleep(Duration::from_millis(1));
                }
                server.kill();
                return None;
            }
        }
        Some(server)
    });
    if let Some(server) = server {
        server.stop();
    }
    judge(&qemu, dir, initial, cluster, end, through(options));
}

#[test]
fn connections_to_two_threads() {
    connections(1, 4096, "-t writeback --queues 2", 1500, End::Stopped);
    connections(2, 512, "-t none --queues 2", 1500, End::Stopped);
}

#[test]
fn connections_to_four_threads() {
    connections(3, 65536, "-t none --queues 4", 1500, End::Stopped);
    connections(4, 512, "-t writeback --queues 4 --aio threads", 1500, End::Stopped);
}

#[test]
fn a_killed_server_keeps_what_any_connection_flushed() {
    for round in 0..4 {
        let options = ["-t none --queues 2", "-t writeback --queues 4"][round as usize % 2];
        let cluster = [4096, 512, 65536, 512][round as usize];
        connections(10 + round, cluster, options, u64::MAX, End::Killed(500 + 700 * round));
    }
}

/// Tells that it is over when it is dropped, by a panic, too.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// One connection writes into each table of a disk, and another one flushes meanwhile: a table that is made while a
/// commit is under way loses nothing.
#[test]
fn a_flush_beside_new_tables_on_another_connection_loses_nothing() {
    const CLUSTER: u64 = 4096;
    const TABLE: u64 = CLUSTER / 8 * CLUSTER;
    const TABLES: u64 = 4096;
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("nbd-threads");
    let dir = scratch.path();
    qemu.create(dir, IMAGE, "qcow2", "cluster_size=4096", TABLES * TABLE);
    let expected = std::fs::File::create(dir.join("expected.raw")).unwrap();
    expected.set_len(TABLES * TABLE).unwrap();
    let write = |client: &mut Client, table: u64, cluster: u64| {
        let offset = table * TABLE + cluster * CLUSTER;
        let mut bytes = vec![0; CLUSTER as usize];
        fill(&mut bytes, table << 8 | cluster | 1, offset / SECTOR as u64);
        std::os::unix::fs::FileExt::write_all_at(&expected, &bytes, offset).unwrap();
        let mut message = client.header(0, command::WRITE, table, offset, CLUSTER);
        message.extend(bytes);
        client.say(&message).unwrap();
    };
    for cluster in [1, 3, 5] {
        let server = Server::start(dir, &format!("--queues 2 -f qcow2 {IMAGE}"));
        let mut flusher = connect(server.socket());
        let _idle = connect(server.socket());
        let mut writer = connect(server.socket());
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let _over = Over(&is_over);
            scope.spawn(|| {
                while !is_over.load(Ordering::SeqCst) {
                    assert_eq!(flusher.call(0, command::FLUSH, 0, 0).unwrap().error, 0);
                }
            });
            for table in 0..TABLES {
                write(&mut writer, table, cluster);
                if table >= 32 {
                    assert_eq!(writer.reply().unwrap().error, 0);
                }
            }
            for _ in 0..32 {
                assert_eq!(writer.reply().unwrap().error, 0);
            }
        });
        assert_eq!(writer.call(0, command::FLUSH, 0, 0).unwrap().error, 0);
        drop((flusher, writer));
        server.stop();
        qemu.same_content(dir, "expected.raw", IMAGE).unwrap();
        qemu.check_clean(dir, IMAGE).unwrap();
        // The next writes copy the tables.
        qemu.img_line(dir, &format!("snapshot -c s{cluster} {IMAGE}")).ok();
    }
}

/// Rings of one device, all kinds of requests on the same sectors.
fn rings(seed: u64, cluster: u64, options: &str, queues: usize, count: u64, end: End) {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("vhost-threads");
    let dir = scratch.path();
    let initial = make(&qemu, dir, cluster);
    let server = Server::start_vhost_user(dir, &format!("{options} --queues {queues} -f qcow2 {IMAGE}"));
    let mut guest = VhostGuest::connect(server.socket(), queues);
    let recorder = Recorder::new(dir, seed, 0, &Arc::new(AtomicU64::new(1)));
    let mut random = Random::new(seed);
    // By ring and head.
    let mut under_way: HashMap<(usize, u16), (u64, Next)> = HashMap::new();
    let place =
        |ring: usize, head: u16| DATA + (ring as u64 * 64 + u64::from(head) / 3) * MOST * SECTOR as u64;
    let (mut sent, mut answered) = (0, 0);
    while sent < count || !under_way.is_empty() {
        if matches!(end, End::Killed(after) if answered >= after) {
            break;
        }
        for ring in 0..queues {
            let heads = (0..DEPTH as u16).map(|slot| slot * 3);
            let free = heads.filter(|head| !under_way.contains_key(&(ring, *head))).collect::<Vec<_>>();
            for head in free.into_iter().take((count - sent) as usize) {
                // Rings have no writes of their own that are durable.
                let mut next = next(&mut random);
                if next.kind == Kind::DurableWrite {
                    next.kind = Kind::Write;
                }
                let (value, bytes) = data(&recorder, &next);
                let number = recorder.begin(next.kind, next.first, next.count, value);
                let at = place(ring, head);
                let len = (next.count * SECTOR as u64) as u32;
                let range = [&next.first.to_le_bytes()[..], &(next.count as u32).to_le_bytes()].concat();
                let (kind, sector, len, flags) = match next.kind {
                    Kind::Write => (1, next.first, len, 0),
                    Kind::Read => (0, next.first, len, WRITE),
                    Kind::Zero => (13, 0, 16, 0),
                    Kind::Discard => (11, 0, 16, 0),
                    _ => (4, 0, 0, 0),
                };
                match next.kind {
                    Kind::Write => guest.put(at, &bytes),
                    Kind::Zero => guest.put(at, &[&range[..], &u32::from(next.flag).to_le_bytes()].concat()),
                    Kind::Discard => guest.put(at, &[&range[..], &[0; 4]].concat()),
                    _ => {}
                }
                guest.put_request(ring, head, kind, sector, (VhostGuest::at(at), len, flags));
                guest.offer(ring, head);
                under_way.insert((ring, head), (number, next));
                sent += 1;
            }
            guest.kick(ring);
        }
        let mut any = false;
        for ring in 0..queues {
            for (head, _) in guest.used_now(ring) {
                let ended = recorder.now();
                assert_eq!(guest.status(ring, head), 0, "a request failed");
                let (number, next) = under_way.remove(&(ring, head)).expect("a head of ours");
                let bytes = match next.kind {
                    Kind::Read => guest.get(place(ring, head), next.count as usize * SECTOR),
                    _ => Vec::new(),
                };
                recorder.end_at(number, ended, Outcome::Done, look_at_all(&bytes, next.first));
                answered += 1;
                any = true;
            }
        }
        if !any && (0..queues).all(|ring| guest.ask_for_call(ring)) {
            guest.wait_for_call(Duration::from_millis(100));
        }
    }
    match end {
        End::Stopped => {
            drop(guest);
            server.stop();
        }
        End::Killed(_) => server.kill(),
    }
    judge(&qemu, dir, initial, cluster, end, through(options));
}

#[test]
fn rings_of_two_and_four_threads() {
    rings(21, 4096, "-t none", 2, 4000, End::Stopped);
    rings(22, 512, "-t writeback", 4, 4000, End::Stopped);
}

#[test]
fn a_killed_device_keeps_what_any_ring_flushed() {
    rings(23, 512, "-t none", 2, u64::MAX, End::Killed(700));
    rings(24, 65536, "-t writeback", 4, u64::MAX, End::Killed(1500));
}
