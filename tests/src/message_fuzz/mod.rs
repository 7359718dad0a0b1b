//! Sequences of messages, right and wrong, to a running server: over NBD, vhost-user and the control socket at once.
//!
//! A server has two exports. One is asked for everything that chance gives; a client of the other, and others that keep to
//! the rules, must be served all the time, within bounded memory. In the end the server leaves in good order, and both
//! images are whole. The same seed sends the same messages; how they meet is not chosen.

mod control;
mod nbd;
mod odd;
mod vhost;

use crate::nbd_client::Client;
use crate::patience::LONGEST;
use crate::program::zebu;
use crate::random::Random;
use crate::scratch::Scratch;
use crate::server::Server;
use crate::vhost_guest::{VhostGuest, WRITE};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Turns that one server serves.
const TURNS_OF_A_SERVER: u64 = 200;
/// Turns between looks at everything else that has to work.
const LOOK_AROUND: u64 = 10;
/// How long a turn may take before the server is taken for stuck.
const PATIENCE: Duration = LONGEST;
/// The server's budget for clients' memory, and what the process may have in all.
const BUDGET: &str = "64M";
const MOST_KIB: u64 = 400 << 10;
const SIZE: &str = "64M";

/// How much is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    /// So many turns.
    Turns(u64),
    /// Turns until so much time is over.
    Time(Duration),
}

/// How the server was built.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Build {
    /// As usual: its memory is measured.
    Plain,
    /// With AddressSanitizer, whose own memory is many times the server's.
    Sanitized,
}

/// Counts of what was done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sums {
    /// Servers that were started and left in good order.
    pub servers: u64,
    /// Turns: a sequence over each of the three ways at once.
    pub turns: u64,
    /// Options and requests of NBD clients.
    pub nbd: u64,
    /// Messages of front ends, and kicks.
    pub vhost: u64,
    /// Lines to the control socket, and requests for metrics.
    pub control: u64,
    /// Images that had leaked clusters in the end.
    pub leaking: u64,
}

/// Runs turns from `seed` on.
///
/// # Panics
/// With the seed of the turn, if the server does not bear it.
pub fn run(seed: u64, extent: Extent, build: Build) -> Sums {
    let start = Instant::now();
    let mut sums = Sums::default();
    let progress = Arc::new(AtomicU64::new(seed));
    let _watch = Watch::start(Arc::clone(&progress));
    let goes_on = |turns: u64| match extent {
        Extent::Turns(most) => turns < most,
        Extent::Time(most) => start.elapsed() < most,
    };
    while goes_on(sums.turns) {
        let first = seed + sums.turns;
        let mut host = Host::start(first);
        for turn in first..first + TURNS_OF_A_SERVER {
            if !goes_on(sums.turns) {
                break;
            }
            progress.store(turn, Ordering::Relaxed);
            host.turn(turn, &mut sums);
            if build == Build::Plain {
                let kib = host.server.resident_kib();
                assert!(kib < MOST_KIB, "seed {turn}: {kib} KiB");
            }
            sums.turns += 1;
        }
        sums.leaking += host.end(first);
        sums.servers += 1;
    }
    sums
}

/// Ends the process if a turn takes too long: whoever is stuck waits for ever.
struct Watch(Arc<AtomicU64>);

impl Watch {
    fn start(progress: Arc<AtomicU64>) -> Self {
        let is_over = Arc::new(AtomicU64::new(0));
        let over = Arc::clone(&is_over);
        std::thread::spawn(move || {
            let (mut seen, mut since) = (0, Instant::now());
            while over.load(Ordering::Relaxed) == 0 {
                std::thread::sleep(Duration::from_secs(1));
                let now = progress.load(Ordering::Relaxed);
                if now != seen {
                    (seen, since) = (now, Instant::now());
                }
                if since.elapsed() > PATIENCE {
                    eprintln!("seed {now}: the server is stuck, after {} s", PATIENCE.as_secs());
                    std::process::exit(70);
                }
            }
        });
        Self(is_over)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.0.store(1, Ordering::Relaxed);
    }
}

/// A server, and a client of its other export.
struct Host {
    scratch: Scratch,
    server: Server,
    witness: Client,
}

impl Host {
    fn start(seed: u64) -> Self {
        let scratch = Scratch::new("messages");
        let dir = scratch.path();
        for image in ["root.qcow2", "other.qcow2"] {
            zebu(dir, ["create", "-q", "-f", "qcow2", image, SIZE]).ok();
        }
        let random = &mut Random::new(seed);
        let engine = random.pick(&["io_uring", "threads"]);
        let cache = random.pick(&["none", "writeback", "directsync"]);
        let queues = random.between(1, 2);
        let options = format!(
            "--vhost-user-blk vhost.sock --control ctl.sock --metrics unix:metrics.sock --export-name root \
             --export-name other --queues {queues} --aio {engine} -t {cache} --max-memory {BUDGET} --no-sandbox \
             --handshake-timeout 600 --log-level error -f qcow2 root.qcow2 other.qcow2"
        );
        let server = Server::start(dir, &options);
        let witness = Client::open(server.socket(), "other").expect("the other export");
        Self { scratch, server, witness }
    }

    fn turn(&mut self, seed: u64, sums: &mut Sums) {
        let dir = self.scratch.path();
        let [nbd, vhost, control] = std::thread::scope(|scope| {
            [
                scope.spawn(|| nbd::converse(&dir.join("nbd.sock"), &mut Random::new(seed))),
                scope.spawn(|| vhost::converse(&dir.join("vhost.sock"), &mut Random::new(seed ^ 1 << 40))),
                scope.spawn(|| control::converse(dir, &mut Random::new(seed ^ 1 << 41))),
            ]
            .map(|thread| thread.join().unwrap_or_else(|_| panic!("seed {seed}: the fuzzer's own fault")))
        });
        sums.nbd += nbd;
        sums.vhost += vhost;
        sums.control += control;
        if let Err(error) = self.witness_is_served(seed) {
            panic!("seed {seed}: the other export is not served: {error}; {}", self.why());
        }
        if seed.is_multiple_of(LOOK_AROUND)
            && let Err(error) = self.look_around()
        {
            panic!("seed {seed}: {error}; {}", self.why());
        }
    }

    fn witness_is_served(&mut self, seed: u64) -> std::io::Result<()> {
        let (offset, content) = (seed % 1024 * 4096, [seed as u8 | 1; 4096]);
        let error = self.witness.write(0, offset, &content)?;
        let is_right = error == 0 && self.witness.read(offset, 4096)? == content;
        if is_right { Ok(()) } else { Err(std::io::Error::other("it reads other bytes than were written")) }
    }

    /// Checks that a client which keeps to the rules is served, at each door.
    fn look_around(&self) -> std::io::Result<()> {
        let dir = self.scratch.path();
        let mut guest = VhostGuest::connect(&dir.join("vhost.sock"), 1);
        let (status, _) = guest.call(0, 8, 0, 20, WRITE);
        let mut client = Client::open(self.server.socket(), "root")?;
        client.read(0, 512)?;
        let stats = ask(&dir.join("ctl.sock"), "{\"command\":\"stats\"}\n")?;
        let metrics = ask(&dir.join("metrics.sock"), "GET /metrics HTTP/1.1\r\n\r\n")?;
        if status == 0 && stats.contains("\"root\"") && metrics.contains("zebu_clients") {
            return Ok(());
        }
        Err(std::io::Error::other(format!("status {status}, {stats:?}, {metrics:?}")))
    }

    /// The end of the server, if it has ended.
    fn why(&mut self) -> String {
        std::thread::sleep(Duration::from_secs(2));
        self.server
            .has_ended()
            .map_or_else(|| "it runs".to_owned(), |(code, said)| format!("{code:?}: {said}"))
    }

    /// Ends the server; how many images leak clusters. They are kept, and the log tells what is wrong with them.
    fn end(self, seed: u64) -> u64 {
        let Self { scratch, server, witness } = self;
        drop(witness);
        let pid = server.pid();
        let said = server.stop_with_messages();
        for word in ["panicked", "Sanitizer", "closed by", "was closed"] {
            assert!(!said.contains(word), "seeds from {seed} on, process {pid}: {said}");
        }
        let mut leaking = 0;
        for image in ["root.qcow2", "other.qcow2"] {
            let checked = zebu(scratch.path(), ["check", "-f", "qcow2", image]);
            assert!(matches!(checked.code, Some(0 | 3)), "seeds from {seed} on: {checked}");
            if checked.code == Some(3) {
                leaking += 1;
                let kept = std::env::temp_dir().join(format!("zebu-leaks-{seed}-{image}"));
                let copied = std::fs::copy(scratch.file(image), &kept);
                eprintln!("seeds from {seed} on: {} ({copied:?}): {checked}; {said}", kept.display());
            }
        }
        leaking
    }
}

/// Sends a request and takes what comes, up to a line or the end.
fn ask(path: &Path, request: &str) -> std::io::Result<String> {
    let mut stream = UnixStream::connect(path)?;
    stream.set_read_timeout(Some(LONGEST))?;
    stream.write_all(request.as_bytes())?;
    let is_line = request.starts_with('{');
    let mut answer = Vec::new();
    let mut part = [0; 4096];
    while !(is_line && answer.ends_with(b"\n")) {
        let count = stream.read(&mut part)?;
        if count == 0 {
            break;
        }
        answer.extend_from_slice(&part[..count]);
    }
    Ok(String::from_utf8_lossy(&answer).into_owned())
}
