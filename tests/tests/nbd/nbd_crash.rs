//! A server that is killed while a client writes over several connections: everything that was flushed on another one, or
//! written with FUA, is there afterwards.
//!
//! `ZEBU_NBD_CRASH_ROUNDS` sets the number of rounds.

use std::io;
use std::path::Path;
use std::time::{Duration, Instant};
use zebu_tests::nbd_client::{ACK, Client, command, option};
use zebu_tests::program::zebu;
use zebu_tests::qemu::Qemu;
use zebu_tests::random::Random;
use zebu_tests::scratch::Scratch;
use zebu_tests::server::Server;

const BLOCK: u64 = 4096;
const BLOCKS: u64 = 8192;
const IMAGE: &str = "disk.qcow2";
/// The connection that flushes, for all others; it does nothing else.
const FLUSHER: usize = 0;
/// All connections.
const CONNECTIONS: usize = 4;
/// Writes under way on each of the others.
const WRITES: usize = 16;
/// Flushes under way.
const FLUSHES: usize = 2;
/// The flag of a write that is durable when it is answered.
const FUA: u16 = 1;
/// Flags that the server must offer: FUA, and several connections.
const OFFERED: u16 = 1 << 3 | 1 << 8;

/// Means that make writes durable. Either alone as well, since each of them covers up for the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Means {
    Flushes,
    Fua,
    Both,
}

/// The state of one block: it holds the number of its last write, or of a later one that was sent.
#[derive(Debug, Clone, Copy, Default)]
struct Block {
    /// The last write that was answered, on any connection, before a flush was sent that was answered; or with FUA.
    durable: u64,
    /// The last write that was answered.
    done: u64,
    /// The last write that was sent.
    sent: u64,
    is_pending: bool,
}

/// A request under way. Each has a number of its own, which is its cookie.
enum Request {
    /// The number is what is written.
    Write { block: u64, is_fua: bool },
    /// With the answered write of each block at the time it was sent.
    Flush { covered: Vec<u64> },
}

/// Counts of answers, over all rounds.
#[derive(Debug, Default, Clone, Copy)]
struct Answered {
    flushes: u64,
    durable_writes: u64,
}

/// The writer of all connections.
struct Writer<'a> {
    blocks: &'a mut [Block],
    next: &'a mut u64,
    random: &'a mut Random,
    answered: &'a mut Answered,
    connections: Vec<(Client, Vec<(u64, Request)>)>,
    means: Means,
    /// Bytes from one block to the next.
    stride: u64,
}

fn content(number: u64) -> Vec<u8> {
    number.to_be_bytes().repeat(BLOCK as usize / 8)
}

fn connect(socket: &Path) -> Client {
    let mut client = Client::start(socket).unwrap();
    assert_eq!(client.ask(option::STRUCTURED_REPLY, b"").unwrap().0, ACK);
    let (_, flags) = client.go("").unwrap();
    assert_eq!(flags & OFFERED, OFFERED, "{flags:#x}");
    client
}

impl Writer<'_> {
    /// Sends what there is room for on a connection, and takes an answer. An error if the server is gone.
    fn step(&mut self, index: usize) -> io::Result<()> {
        let (client, under_way) = &mut self.connections[index];
        let mut bytes = Vec::new();
        while index == FLUSHER && under_way.len() < FLUSHES {
            *self.next += 1;
            bytes.extend(client.header(0, command::FLUSH, *self.next, 0, 0));
            let covered = self.blocks.iter().map(|state| state.done).collect();
            under_way.push((*self.next, Request::Flush { covered }));
        }
        while index != FLUSHER && under_way.len() < WRITES {
            let block = self.random.below(BLOCKS);
            let state = &mut self.blocks[block as usize];
            if state.is_pending {
                continue;
            }
            *self.next += 1;
            let is_fua = self.means != Means::Flushes && self.random.chance(3);
            let flags = if is_fua { FUA } else { 0 };
            bytes.extend(client.header(flags, command::WRITE, *self.next, block * self.stride, BLOCK));
            bytes.extend(content(*self.next));
            (state.sent, state.is_pending) = (*self.next, true);
            under_way.push((*self.next, Request::Write { block, is_fua }));
        }
        client.say(&bytes)?;
        let reply = client.reply()?;
        assert_eq!(reply.error, 0);
        let at = under_way.iter().position(|(number, _)| *number == reply.cookie).expect("a cookie of ours");
        match under_way.swap_remove(at) {
            (number, Request::Write { block, is_fua }) => {
                let state = &mut self.blocks[block as usize];
                (state.done, state.is_pending) = (number, false);
                if is_fua {
                    state.durable = number;
                    self.answered.durable_writes += 1;
                }
            }
            (_, Request::Flush { covered }) => {
                for (state, done) in self.blocks.iter_mut().zip(covered) {
                    state.durable = state.durable.max(done);
                }
                self.answered.flushes += 1;
            }
        }
        Ok(())
    }

    /// Writes blocks with many requests under way until the server dies.
    fn write_until_dead(&mut self, server: Server, life: Duration) {
        let (start, before) = (Instant::now(), *self.answered);
        let mut server = Some(server);
        loop {
            // Somebody was answered, however slow the machine is.
            let is_flushed = self.means == Means::Fua || self.answered.flushes > before.flushes;
            let is_written =
                self.means == Means::Flushes || self.answered.durable_writes > before.durable_writes;
            if start.elapsed() > life
                && is_flushed
                && is_written
                && let Some(server) = server.take()
            {
                server.kill();
            }
            let flushes = self.means != Means::Fua && self.random.chance(2);
            let writer = self.random.between(1, CONNECTIONS as u64 - 1) as usize;
            let index = if flushes { FLUSHER } else { writer };
            if self.step(index).is_err() {
                break;
            }
        }
        assert!(server.is_none(), "the server went away by itself");
        for block in &mut *self.blocks {
            block.is_pending = false;
        }
    }
}

#[test]
fn what_was_flushed_or_written_with_fua_survives_kill() {
    let Some(qemu) = Qemu::find() else { return };
    let rounds = std::env::var("ZEBU_NBD_CRASH_ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(6);
    let scratch = Scratch::new("nbd-crash");
    let mut random = Random::new(42);
    let (mut next, mut answered) = (0, Answered::default());
    let mut stride = BLOCK;
    for round in 0..rounds {
        let dir = scratch.path();
        let means = [Means::Flushes, Means::Fua, Means::Both][round % 3];
        // Mostly a fresh image, so that clusters are being allocated: each by many writes, or by one.
        let is_fresh = means != Means::Both;
        if is_fresh {
            stride = if round % 4 < 2 { 16 * BLOCK } else { BLOCK };
            let size = (BLOCKS * stride).to_string();
            zebu(dir, ["create", "-q", "-f", "qcow2", IMAGE, &size]).ok();
        }
        let cache = *random.pick(&["none", "writeback"]);
        let options = format!("-t {cache} --queues {} -f qcow2 {IMAGE}", 1 + round % 2 * 3);
        let mut blocks = vec![Block::default(); BLOCKS as usize];
        let server = Server::start(dir, &options);
        if !is_fresh {
            // What earlier rounds left is read, and counts as durable.
            let mut client = Client::open(server.socket(), "").unwrap();
            for (at, block) in blocks.iter_mut().enumerate() {
                let bytes = client.read(at as u64 * stride, BLOCK).unwrap();
                let number = u64::from_be_bytes(bytes[..8].try_into().unwrap());
                *block = Block { durable: number, done: number, sent: number, is_pending: false };
            }
            assert_eq!(client.call(0, command::FLUSH, 0, 0).unwrap().error, 0);
        }
        let life = Duration::from_millis(random.between(50, 600));
        let connections = (0..CONNECTIONS).map(|_| (connect(server.socket()), Vec::new())).collect();
        let mut writer = Writer {
            blocks: &mut blocks,
            next: &mut next,
            random: &mut random,
            answered: &mut answered,
            connections,
            means,
            stride,
        };
        writer.write_until_dead(server, life);
        drop(writer);
        let out = qemu.img(dir, ["check", "-f", "qcow2", IMAGE]);
        assert!(matches!(out.code, Some(0 | 3)), "round {round}: {out}");
        let server = Server::start(dir, &options);
        let mut client = Client::open(server.socket(), "").unwrap();
        for (at, block) in blocks.iter().enumerate() {
            let bytes = client.read(at as u64 * stride, BLOCK).unwrap();
            let words: Vec<u64> =
                bytes.chunks(8).map(|word| u64::from_be_bytes(word.try_into().unwrap())).collect();
            for (index, word) in words.iter().enumerate() {
                assert!(
                    (block.durable..=block.sent).contains(word),
                    "round {round}, {means:?}: block {at}, word {index} holds {word}; {block:?}"
                );
            }
        }
        server.stop();
    }
    assert!(answered.flushes > 0 && answered.durable_writes > 0, "{answered:?}");
}
