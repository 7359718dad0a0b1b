//! Kills of a server at random moments, while clients write and backups run: `ZEBU_KILLS=1000` for a long run,
//! `ZEBU_KILLS_FROM=17` to begin with another seed.

use super::{IMAGE, ctl};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::Duration;
use zebu_tests::nbd_client::{Client, command};
use zebu_tests::patience::wait_until;
use zebu_tests::program::zebu;
use zebu_tests::qemu::Qemu;
use zebu_tests::random::Random;
use zebu_tests::scratch::Scratch;
use zebu_tests::server::Server;

const BLOCK: usize = 4096;
const CLIENTS: usize = 3;
/// Blocks of a client.
const BLOCKS: usize = 512;
const SIZE: usize = CLIENTS * BLOCKS * BLOCK;
const MAGIC: &[u8] = b"QFI\xfb";

/// A client's writes: each has a number, one more than the one before, and fills one block with it.
#[derive(Default)]
struct Writes {
    sent: AtomicU64,
    answered: AtomicU64,
    /// A flush that was answered covers all writes up to this one.
    flushed: AtomicU64,
    /// The blocks, by number; the first number is 1.
    blocks: Mutex<Vec<usize>>,
}

impl Writes {
    /// Writes until the server is gone.
    fn go_on(&self, server: &Path, index: usize, seed: u64) {
        let mut random = Random::new(seed * 10 + index as u64);
        let Ok(mut client) = Client::open(server, "") else { return };
        loop {
            if random.chance(8) {
                let answered = self.answered.load(SeqCst);
                match client.call(0, command::FLUSH, 0, 0) {
                    Ok(reply) if reply.error == 0 => self.flushed.store(answered, SeqCst),
                    _ => return,
                }
            }
            let block = random.below(BLOCKS as u64) as usize;
            let number = {
                let mut blocks = self.blocks.lock().unwrap();
                blocks.push(block);
                blocks.len() as u64
            };
            self.sent.store(number, SeqCst);
            let offset = ((index * BLOCKS + block) * BLOCK) as u64;
            match client.write(0, offset, &number.to_le_bytes().repeat(BLOCK / 8)) {
                Ok(0) => self.answered.store(number, SeqCst),
                Ok(error) => panic!("seed {seed}: a write failed with {error}"),
                Err(_) => return,
            }
        }
    }

    /// The numbers that a disk holds in the blocks of client `index`.
    fn found(disk: &[u8], index: usize, what: &str) -> Vec<u64> {
        let blocks = disk.chunks(BLOCK).skip(index * BLOCKS).take(BLOCKS);
        let number = |block: &[u8]| {
            assert!(
                block.chunks(8).all(|part| part == &block[..8]),
                "{what}: a block of client {index} is torn"
            );
            u64::from_le_bytes(block[..8].try_into().unwrap())
        };
        blocks.map(number).collect()
    }

    /// The content of the client's blocks after the write of a number.
    fn after(&self, number: u64) -> Vec<u64> {
        let mut held = vec![0; BLOCKS];
        for (number, block) in (1..=number).zip(self.blocks.lock().unwrap().iter()) {
            held[*block] = number;
        }
        held
    }

    /// The disk after the kill: nothing that was flushed is lost, nothing is there that was not written to the block.
    fn judge_disk(&self, disk: &[u8], index: usize, what: &str) {
        let flushed = self.after(self.flushed.load(SeqCst));
        let blocks = self.blocks.lock().unwrap();
        for (block, (found, flushed)) in Self::found(disk, index, what).into_iter().zip(flushed).enumerate() {
            let is_of_block = found == 0 || blocks.get(found as usize - 1) == Some(&block);
            assert!(
                found >= flushed && is_of_block,
                "{what}: client {index}, block {block}: {found}, flushed {flushed}"
            );
        }
    }

    /// A backup: the client's blocks as they were after one write, of those between `least` and `most`.
    fn judge_backup(&self, disk: &[u8], index: usize, least: u64, most: u64, what: &str) {
        let found = Self::found(disk, index, what);
        let last = found.iter().copied().max().unwrap_or_default().max(least);
        assert!(last <= most, "{what}: client {index}: {last} was not sent yet");
        assert!(found == self.after(last), "{what}: the blocks of client {index} are of no moment");
    }
}

/// A backup that was asked for.
struct Asked {
    target: String,
    /// By client: the last write that was answered before, and the last that was sent when it had begun.
    bounds: Vec<(u64, u64)>,
    /// The command said that it is complete.
    is_complete: bool,
}

/// One server and its end; how many backups were complete, and how many were cut off.
fn round(qemu: &Qemu, seed: u64) -> (u64, u64) {
    let mut random = Random::new(seed);
    let scratch = Scratch::new("kills");
    let dir = scratch.path();
    let shape = *random.pick(&["cluster_size=64k", "cluster_size=4k", "extended_l2=on", "lazy_refcounts=on"]);
    zebu(dir, ["create", "-q", "-f", "qcow2", "-o", shape, IMAGE, &SIZE.to_string()]).ok();
    let cache = *random.pick(&["none", "writeback"]);
    let queues = random.between(1, 2);
    let server =
        Server::start(dir, &format!("--control ctl.sock -t {cache} --queues {queues} -f qcow2 {IMAGE}"));
    let socket = server.socket().to_owned();
    let writes: Vec<Writes> = (0..CLIENTS).map(|_| Writes::default()).collect();
    // From now on, or from the beginning of the first backup, however long that takes.
    let moment = Duration::from_millis(random.between(30, 700));
    let counts_from_backup = !seed.is_multiple_of(3);
    let mut asked = Vec::new();
    let is_over = &AtomicBool::new(false);
    std::thread::scope(|scope| {
        for (index, writes) in writes.iter().enumerate() {
            let socket = &socket;
            scope.spawn(move || writes.go_on(socket, index, seed));
        }
        scope.spawn(move || {
            if counts_from_backup {
                wait_until("a backup begins", || dir.join("0.backup").exists() || is_over.load(SeqCst));
            }
            std::thread::sleep(moment);
            server.kill();
        });
        for number in 0.. {
            let target = format!("{number}.backup");
            let least: Vec<u64> = writes.iter().map(|client| client.answered.load(SeqCst)).collect();
            let mut words = vec!["backup-start", "", &target, "--speed", *random.pick(&["adaptive", "full"])];
            words.extend(*random.pick(&[&["-r", "20M"][..], &["-r", "60M"], &[]]));
            words.extend(*random.pick(&[
                &["--compression-type", "zlib"][..],
                &["--compression-type", "zstd"],
                &[],
            ]));
            words.extend(*random.pick(&[
                &["-t", "none"][..],
                &["-t", "dontcache"],
                &["-t", "writeback"],
                &[],
            ]));
            words.extend(*random.pick(&[&["--bitmap", "b"][..], &[]]));
            let begun = ctl(dir, &words).code == Some(0);
            let sent = writes.iter().map(|client| client.sent.load(SeqCst));
            let bounds = least.into_iter().zip(sent).collect();
            let mut is_complete = false;
            let mut is_over = !begun;
            while !is_over {
                let out = ctl(dir, &["backup-query", ""]);
                is_complete = out.stdout.contains("\"completed\"");
                is_over = out.code != Some(0) || !out.stdout.contains("\"running\"");
                assert!(!out.stdout.contains("\"failed\""), "seed {seed}, {words:?}: {out}");
            }
            asked.push(Asked { target, bounds, is_complete });
            if !is_complete {
                break;
            }
        }
        is_over.store(true, SeqCst);
    });
    judge(qemu, dir, seed, &writes, &asked)
}

fn judge(qemu: &Qemu, dir: &Path, seed: u64, writes: &[Writes], asked: &[Asked]) -> (u64, u64) {
    let what = format!("seed {seed}");
    let out = qemu.img(dir, ["check", "-f", "qcow2", IMAGE]);
    let is_lazy = qemu.info(dir, IMAGE)["dirty-flag"] == true;
    assert!(matches!(out.code, Some(0 | 3)) || is_lazy, "{what}: {out}");
    let disk = qemu.read_all(dir, IMAGE, None);
    for (index, client) in writes.iter().enumerate() {
        client.judge_disk(&disk, index, &what);
    }
    let (mut complete, mut cut_off) = (0, 0);
    for Asked { target, bounds, is_complete } in asked {
        let what = format!("{what}, {target}");
        let first = std::fs::read(dir.join(target)).is_ok_and(|bytes| bytes.starts_with(MAGIC));
        assert!(first || !is_complete, "{what}: it was called complete");
        if !first {
            cut_off += u64::from(dir.join(target).exists());
            continue;
        }
        complete += 1;
        qemu.check_clean(dir, target).unwrap_or_else(|e| panic!("{what}: {e}"));
        let copy = qemu.read_all(dir, target, None);
        for (index, (client, (least, most))) in writes.iter().zip(bounds).enumerate() {
            client.judge_backup(&copy, index, *least, *most, &what);
        }
    }
    // It can be served and backed up again.
    let server = Server::start(dir, &format!("--control ctl.sock -f qcow2 {IMAGE}"));
    ctl(dir, &["backup-start", "-w", "", "last.backup"]).ok();
    server.stop();
    assert!(qemu.read_all(dir, "last.backup", None) == disk, "{what}: the backup after the kill");
    // What the kill leaked is still leaked.
    let out = qemu.img(dir, ["check", "-q", "-f", "qcow2", IMAGE]);
    assert!(matches!(out.code, Some(0 | 3)), "{what}, afterwards: {out}");
    (complete, cut_off)
}

#[test]
fn a_kill_loses_nothing_and_leaves_no_half_backup() {
    let Some(qemu) = Qemu::find() else { return };
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let (first, kills) = (number("ZEBU_KILLS_FROM").unwrap_or(0), number("ZEBU_KILLS").unwrap_or(6));
    let (mut complete, mut cut_off, mut seed) = (0, 0, first);
    // On a busy machine, a server may be gone before a backup begins, or after it has ended.
    while seed < first + kills || cut_off == 0 && seed < first + 10 * kills {
        let (more, less) = round(&qemu, seed);
        (complete, cut_off) = (complete + more, cut_off + less);
        if seed % 50 == 49 {
            eprintln!("{} kills: {complete} backups complete, {cut_off} cut off", seed + 1 - first);
        }
        seed += 1;
    }
    eprintln!("{} kills: {complete} backups complete, {cut_off} cut off", seed - first);
    assert!(cut_off > 0, "no kill came while a backup ran");
}
