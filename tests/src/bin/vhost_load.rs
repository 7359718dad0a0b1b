//! A load on a vhost-user-blk device, by a front end and driver of our own: several rings, each with so many requests in
//! flight. Prints its figures as JSON; `cargo xtask bench serve-vhost-user` compares servers with it.

use clap::{Parser, ValueEnum};
use std::path::PathBuf;
use std::time::{Duration, Instant};
use zebu_tests::random::Random;
use zebu_tests::vhost_guest::{DATA, MEMORY, QUEUE, VhostGuest, WRITE};

#[derive(Parser)]
#[command(about = "Put a load on a vhost-user-blk device and print IOPS and latencies as JSON")]
struct Options {
    /// The device's socket
    socket: PathBuf,
    /// Pattern of the requests
    #[arg(long, value_enum, default_value_t = Pattern::Randread)]
    rw: Pattern,
    /// Bytes of a request, a multiple of 512
    #[arg(long, default_value_t = 4096)]
    block: u32,
    /// Requests in flight on each ring
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=i64::from(QUEUE / 3)))]
    depth: u16,
    /// Rings
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=8))]
    queues: u8,
    /// Seconds
    #[arg(long, default_value_t = 5)]
    runtime: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Pattern {
    Randread,
    Randwrite,
    Read,
    Write,
}

impl Pattern {
    fn writes(self) -> bool {
        matches!(self, Pattern::Randwrite | Pattern::Write)
    }
}

/// The load on all rings.
struct Load {
    guest: VhostGuest,
    options: Options,
    random: Random,
    /// The next block, where they are taken in order.
    next: u64,
    /// When each request was sent, by ring and place.
    since: Vec<Instant>,
    nanoseconds: Vec<u64>,
}

impl Load {
    fn blocks(&self) -> u64 {
        self.guest.size / u64::from(self.options.block)
    }

    /// Where the data of a request is.
    fn data(&self, ring: usize, place: u16) -> u64 {
        let index = ring as u64 * u64::from(self.options.depth) + u64::from(place);
        DATA + index * u64::from(self.options.block)
    }

    fn send(&mut self, ring: usize, place: u16) {
        let blocks = self.blocks();
        let block = match self.options.rw {
            Pattern::Randread | Pattern::Randwrite => self.random.below(blocks),
            Pattern::Read | Pattern::Write => {
                self.next += 1;
                self.next % blocks
            }
        };
        let sector = block * u64::from(self.options.block / 512);
        let (kind, flags) = if self.options.rw.writes() { (1, 0) } else { (0, WRITE) };
        let data = VhostGuest::at(self.data(ring, place));
        self.guest.put_request(ring, place * 3, kind, sector, (data, self.options.block, flags));
        self.since[ring * usize::from(self.options.depth) + usize::from(place)] = Instant::now();
        self.guest.offer(ring, place * 3);
    }

    /// Takes what a ring has used and sends as many anew; whether there was anything.
    fn go_on(&mut self, ring: usize) -> bool {
        let used = self.guest.used_now(ring);
        for &(head, _) in &used {
            assert_eq!(self.guest.status(ring, head), 0, "a request failed");
            let place = head / 3;
            let since = self.since[ring * usize::from(self.options.depth) + usize::from(place)];
            self.nanoseconds.push(since.elapsed().as_nanos() as u64);
            self.send(ring, place);
        }
        if !used.is_empty() && self.guest.wants_kick(ring, used.len() as u16) {
            self.guest.kick(ring);
        }
        !used.is_empty()
    }

    fn run(&mut self) -> Duration {
        let rings = usize::from(self.options.queues);
        let start = Instant::now();
        for ring in 0..rings {
            for place in 0..self.options.depth {
                self.send(ring, place);
            }
            self.guest.kick(ring);
        }
        while start.elapsed() < Duration::from_secs(self.options.runtime) {
            let mut any = false;
            for ring in 0..rings {
                any |= self.go_on(ring);
            }
            if !any && (0..rings).all(|ring| self.guest.ask_for_call(ring)) {
                self.guest.wait_for_call(Duration::from_secs(1));
            }
        }
        start.elapsed()
    }
}

fn main() {
    let options = Options::parse();
    let rings = usize::from(options.queues);
    let places = rings * usize::from(options.depth);
    assert!(options.block.is_multiple_of(512) && options.block > 0, "--block is a multiple of 512");
    assert!(
        places as u64 * u64::from(options.block) <= MEMORY - DATA,
        "the guest has no room for so much at once"
    );
    let guest = VhostGuest::connect(&options.socket, rings);
    let mut load = Load {
        guest,
        options,
        random: Random::new(1),
        next: 0,
        since: vec![Instant::now(); places],
        nanoseconds: Vec::new(),
    };
    let took = load.run();
    load.nanoseconds.sort_unstable();
    let count = load.nanoseconds.len();
    let p99 = load.nanoseconds.get(count * 99 / 100).copied().unwrap_or(0);
    let iops = count as f64 / took.as_secs_f64();
    println!("{}", serde_json::json!({ "requests": count, "iops": iops, "p99-ns": p99 }));
}
