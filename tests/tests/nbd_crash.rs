//! A server that is killed while clients write: everything that was flushed is there afterwards.
//!
//! `ZEBU_NBD_CRASH_ROUNDS` sets the number of rounds.

use std::time::{Duration, Instant};
use zebu_tests::nbd_client::{Client, command};
use zebu_tests::program::zebu;
use zebu_tests::qemu::Qemu;
use zebu_tests::random::Random;
use zebu_tests::scratch::Scratch;
use zebu_tests::server::Server;

const BLOCK: u64 = 4096;
const BLOCKS: u64 = 8192;
const IMAGE: &str = "disk.qcow2";
/// Cookies from here on are those of flushes.
const FLUSHES: u64 = 1 << 40;

/// What is known of one block: it holds the number of its last write, or of a later one that was sent.
#[derive(Debug, Clone, Copy, Default)]
struct Block {
    /// The last write that was answered before a flush was sent that was answered.
    durable: u64,
    /// The last write that was answered.
    done: u64,
    /// The last write that was sent.
    sent: u64,
    is_pending: bool,
}

fn content(number: u64) -> Vec<u8> {
    number.to_be_bytes().repeat(BLOCK as usize / 8)
}

/// Writes blocks with many requests under way until the server dies. Every write has a number of its own, which is its
/// cookie and its content.
fn write_until_dead(
    server: Server,
    blocks: &mut [Block],
    next: &mut u64,
    random: &mut Random,
    life: Duration,
) {
    let mut client = Client::open(server.socket(), "").unwrap();
    let mut under_way: Vec<(u64, u64)> = Vec::new();
    // What each flush covers: the answered writes at the time it was sent.
    let mut flushes: Vec<(u64, Vec<(u64, u64)>)> = Vec::new();
    let start = Instant::now();
    let mut server = Some(server);
    loop {
        if start.elapsed() > life
            && let Some(server) = server.take()
        {
            server.kill();
        }
        let mut bytes = Vec::new();
        while under_way.len() < 64 {
            let block = random.below(BLOCKS);
            if blocks[block as usize].is_pending {
                continue;
            }
            *next += 1;
            bytes.extend(client.header(0, command::WRITE, *next, block * BLOCK, BLOCK));
            bytes.extend(content(*next));
            blocks[block as usize].sent = *next;
            blocks[block as usize].is_pending = true;
            under_way.push((*next, block));
        }
        if flushes.len() < 2 && random.chance(5) {
            *next += 1;
            bytes.extend(client.header(0, command::FLUSH, FLUSHES + *next, 0, 0));
            let done = blocks.iter().enumerate().map(|(block, state)| (block as u64, state.done));
            flushes.push((FLUSHES + *next, done.collect()));
        }
        if client.say(&bytes).is_err() {
            break;
        }
        let Ok(reply) = client.reply() else { break };
        assert_eq!(reply.error, 0);
        if let Some(at) = flushes.iter().position(|(cookie, _)| *cookie == reply.cookie) {
            for (block, done) in flushes.remove(at).1 {
                let state = &mut blocks[block as usize];
                state.durable = state.durable.max(done);
            }
            continue;
        }
        let at = under_way.iter().position(|(number, _)| *number == reply.cookie).expect("a cookie of ours");
        let (number, block) = under_way.swap_remove(at);
        blocks[block as usize].done = number;
        blocks[block as usize].is_pending = false;
    }
    assert!(server.is_none(), "the server went away by itself");
    for block in blocks {
        block.is_pending = false;
    }
}

#[test]
fn what_was_flushed_survives_kill() {
    let Some(qemu) = Qemu::find() else { return };
    let rounds = std::env::var("ZEBU_NBD_CRASH_ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(6);
    let scratch = Scratch::new("nbd-crash");
    let mut random = Random::new(42);
    let mut next = 0;
    for round in 0..rounds {
        let dir = scratch.path();
        // A fresh image now and then, so that clusters are being allocated.
        if round % 3 == 0 {
            zebu(dir, ["create", "-q", "-f", "qcow2", IMAGE, "32M"]).ok();
        }
        let cache = *random.pick(&["none", "writeback"]);
        let options = format!("-t {cache} --queues {} -f qcow2 {IMAGE}", 1 + round % 2);
        let mut blocks = vec![Block::default(); BLOCKS as usize];
        let server = Server::start(dir, &options);
        if round % 3 != 0 {
            // What earlier rounds left is read, and counts as durable.
            let mut client = Client::open(server.socket(), "").unwrap();
            for (at, block) in blocks.iter_mut().enumerate() {
                let bytes = client.read(at as u64 * BLOCK, BLOCK).unwrap();
                let number = u64::from_be_bytes(bytes[..8].try_into().unwrap());
                *block = Block { durable: number, done: number, sent: number, is_pending: false };
            }
            assert_eq!(client.call(0, command::FLUSH, 0, 0).unwrap().error, 0);
        }
        let life = Duration::from_millis(random.between(50, 600));
        write_until_dead(server, &mut blocks, &mut next, &mut random, life);
        let check = || qemu.img(dir, ["check", "-f", "qcow2", IMAGE]);
        let mut out = check();
        // The kernel may hold the files of a killed process's ring for moments.
        for _ in 0..40 {
            if out.stderr.contains("lock") {
                std::thread::sleep(Duration::from_millis(50));
                out = check();
            }
        }
        assert!(matches!(out.code, Some(0 | 3)), "round {round}: {out}");
        let server = Server::start(dir, &options);
        let mut client = Client::open(server.socket(), "").unwrap();
        for (at, block) in blocks.iter().enumerate() {
            let bytes = client.read(at as u64 * BLOCK, BLOCK).unwrap();
            let words: Vec<u64> =
                bytes.chunks(8).map(|word| u64::from_be_bytes(word.try_into().unwrap())).collect();
            for (index, word) in words.iter().enumerate() {
                assert!(
                    (block.durable..=block.sent).contains(word),
                    "round {round}: block {at}, word {index} holds {word}; {block:?}"
                );
            }
        }
        server.stop();
    }
}
