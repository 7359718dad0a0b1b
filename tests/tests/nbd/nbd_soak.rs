//! Slow clients, for as long as is wanted: the server serves others meanwhile, and needs no more for them in the end
//! than in the beginning.
//!
//! `ZEBU_NBD_SOAK_SECONDS` sets the time.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use zebu_tests::nbd_client::{Client, command, option};
use zebu_tests::patience::{LONGEST, wait_until};
use zebu_tests::program::zebu;
use zebu_tests::scratch::Scratch;
use zebu_tests::server::Server;

const SLOW: usize = 100;
/// Between two moves of a slow client.
const TICK: Duration = Duration::from_millis(50);
/// Time that the server gives a client for its handshake.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// Bytes that the server counts when all slow readers have what they get at once.
const ALL_TAKEN: u64 = (SLOW as u64 / 4) * (3 << 20);
/// Bytes that a slow reader takes at once.
const SIP: usize = 700;

/// The habit of a slow client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Habit {
    /// Asks for much and takes it in sips.
    Sips,
    /// Says its requests, a write among them, a few bytes at a time.
    Dribbles,
    /// Says an option a byte at a time, until its time is over.
    Negotiates,
    /// Says nothing.
    Sleeps,
}

const HABITS: [Habit; 4] = [Habit::Sips, Habit::Dribbles, Habit::Negotiates, Habit::Sleeps];

/// A client that comes until it is taken in: on a busy machine, the time of a handshake may be over before it is.
fn taken_in(comes: impl Fn() -> std::io::Result<Client>) -> Client {
    loop {
        let began = Instant::now();
        match comes() {
            Ok(client) => return client,
            Err(error) => assert!(began.elapsed() >= HANDSHAKE, "sent away: {error}"),
        }
    }
}

struct Slow {
    habit: Habit,
    client: Client,
    /// The bytes still to be sent.
    words: Vec<u8>,
}

impl Slow {
    fn new(habit: Habit, socket: &Path) -> Self {
        let mut client = match habit {
            Habit::Negotiates => taken_in(|| Client::start(socket)),
            _ => taken_in(|| Client::open(socket, "")),
        };
        if habit == Habit::Sips {
            for cookie in 0..200 {
                client.request(0, command::READ, cookie, 0, 1 << 20).expect("said");
            }
        }
        client.stream().set_nonblocking(true).expect("non-blocking");
        Self { habit, client, words: Vec::new() }
    }

    /// One move; false if the server has closed the connection.
    fn step(&mut self) -> bool {
        if self.words.is_empty() {
            self.words = match self.habit {
                Habit::Sips | Habit::Sleeps => return self.sip(),
                Habit::Negotiates => {
                    [&b"IHAVEOPT\0\0\0\x03"[..], &4000u32.to_be_bytes(), &[0; 4000]].concat()
                }
                Habit::Dribbles => {
                    let mut words = self.client.header(0, command::WRITE, 1, 8192, 512);
                    words.extend([3; 512]);
                    words.extend(self.client.header(0, command::FLUSH, 2, 0, 0));
                    words
                }
            };
        }
        let some = if self.habit == Habit::Negotiates { 1 } else { 7 }.min(self.words.len());
        match self.client.stream().write(&self.words[..some]) {
            Ok(said) => drop(self.words.drain(..said)),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(_) => return false,
        }
        self.sip()
    }

    fn sip(&mut self) -> bool {
        match self.client.stream().read(&mut [0; SIP]) {
            Ok(count) => count > 0,
            Err(error) => error.kind() == std::io::ErrorKind::WouldBlock,
        }
    }
}

/// Bytes that the server counts for its clients.
fn counted(dir: &Path) -> u64 {
    let mut stream = UnixStream::connect(dir.join("metrics.sock")).expect("connected");
    stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").expect("sent");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("text");
    let value = text.lines().find_map(|line| line.strip_prefix("zebu_memory_bytes "));
    value.expect("a count").parse().expect("a number")
}

/// A client that does all in good order, until it is told to stop; how often it went round.
fn serve_well(socket: &Path, stop: &AtomicBool) -> u64 {
    let mut rounds = 0;
    while !stop.load(Ordering::Relaxed) {
        let mut client = taken_in(|| Client::open(socket, ""));
        for turn in 0..50u64 {
            let at = (1 << 20) + (rounds * 50 + turn) % 4096 * 4096;
            let bytes = [turn as u8 + 1; 4096];
            assert_eq!(client.write(0, at, &bytes).expect("written"), 0);
            assert!(client.read(at, 4096).expect("read") == bytes);
        }
        assert_eq!(client.call(0, command::FLUSH, 0, 0).expect("flushed").error, 0);
        // Some vanish in the middle of the handshake, or with requests under way.
        client.request(0, command::READ, 7, 0, 1 << 20).expect("said");
        let mut half = taken_in(|| Client::start(socket));
        // It may be sent away before.
        let _ = half.option(option::GO, &[0, 0, 0, 0]);
        rounds += 1;
        std::thread::sleep(TICK);
    }
    rounds
}

#[test]
fn slow_clients_need_no_more_as_time_goes_by() {
    let seconds = std::env::var("ZEBU_NBD_SOAK_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(8);
    let scratch = Scratch::new("nbd-soak");
    zebu(scratch.path(), ["create", "-q", "-f", "qcow2", "disk.qcow2", "64M"]).ok();
    let options = "--queues 2 --max-request-memory 4M --metrics unix:metrics.sock -f qcow2 disk.qcow2";
    let options = format!("--handshake-timeout {} {options}", HANDSHAKE.as_secs());
    let server = Server::start(scratch.path(), &options);
    let socket = server.socket();
    let mut slow: Vec<Slow> = (0..SLOW).map(|number| Slow::new(HABITS[number % 4], socket)).collect();
    let stop = AtomicBool::new(false);
    let (rounds, first, last, came_again) = std::thread::scope(|scope| {
        let good = scope.spawn(|| serve_well(socket, &stop));
        let whole = Duration::from_secs(seconds);
        let start = Instant::now();
        let (mut first, mut seen) = (None, (start, 0));
        let mut came_again = 0;
        while start.elapsed() < whole || first.is_none() {
            for client in &mut slow {
                if !client.step() {
                    assert_eq!(client.habit, Habit::Negotiates, "sent away");
                    *client = Slow::new(client.habit, socket);
                    came_again += 1;
                }
            }
            // What all of them take together is taken when it grows no more.
            if first.is_none() && seen.0.elapsed() > Duration::from_millis(500) {
                let (resident, taken) = (server.resident_kib(), counted(scratch.path()));
                let is_all = taken >= ALL_TAKEN && resident.abs_diff(seen.1) <= 1 << 10;
                if is_all && start.elapsed() > whole / 4 {
                    first = Some((server.descriptors(), resident));
                }
                assert!(start.elapsed() < LONGEST + whole, "{taken} bytes are taken, {resident} KiB");
                seen = (Instant::now(), resident);
            }
            std::thread::sleep(TICK);
        }
        stop.store(true, Ordering::Relaxed);
        let rounds = good.join().expect("served well");
        let first = first.expect("a sample");
        // Those that come and go may be there or not, and who vanished may be there for a while.
        wait_until(format_args!("about {} descriptors, as at first", first.0), || {
            server.descriptors() <= first.0 + 8
        });
        (rounds, first, (server.descriptors(), server.resident_kib()), came_again)
    });
    eprintln!(
        "{seconds} s, {SLOW} slow clients, {came_again} that came again: {} descriptors and {} KiB at first, \
         {} and {} in the end; {rounds} rounds of others",
        first.0, first.1, last.0, last.1
    );
    assert!(rounds > 0);
    assert!(last.1 <= first.1 + (16 << 10), "KiB: {} at first, {} in the end", first.1, last.1);
    drop(slow);
    server.stop();
}
