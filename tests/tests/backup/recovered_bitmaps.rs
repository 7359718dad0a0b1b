//! Servers that are killed under writes: each bitmap knows of everything that has changed since it began, and QEMU takes it once zebu
//! has had the image open.

use serde_json::Value;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use zebu_tests::nbd_client::{Client, command};
use zebu_tests::patience::wait_for;
use zebu_tests::program::{required, run_in, zebu};
use zebu_tests::qemu::Qemu;
use zebu_tests::random::Random;
use zebu_tests::scratch::Scratch;
use zebu_tests::server::Server;

const IMAGE: &str = "disk.qcow2";
const SIZE: usize = 32 << 20;
const SECTOR: usize = 512;

/// Whether each sector is dirty, by the server of `uri`.
fn dirty(dir: &Path, uri: &str) -> Vec<bool> {
    let out = run_in(dir, &required("nbdinfo"), ["--json", "--map=qemu:dirty-bitmap:b", uri]).ok();
    let runs: Value = serde_json::from_str(&out.stdout).expect("nbdinfo prints JSON");
    let mut dirty = vec![false; SIZE / SECTOR];
    for entry in runs.as_array().unwrap().iter().filter(|entry| entry["type"] == 1) {
        let (start, len) = (entry["offset"].as_u64().unwrap(), entry["length"].as_u64().unwrap());
        dirty[start as usize / SECTOR..(start + len) as usize / SECTOR].fill(true);
    }
    dirty
}

fn by_zebu(dir: &Path) -> Vec<bool> {
    let server = Server::start(dir, &format!("--read-only --export-name x --bitmap b -f qcow2 {IMAGE}"));
    let dirty = dirty(dir, &server.uri("x"));
    server.stop();
    dirty
}

/// Writes, zeroes and trims of one client until its server is gone.
fn change(socket: &Path, seed: u64, done: &AtomicU64) {
    let mut random = Random::new(seed);
    let Ok(mut client) = Client::open(socket, "x") else { return };
    loop {
        let len = SECTOR << random.below(6);
        let at = random.below((SIZE / len) as u64) * len as u64;
        let changed = match random.below(8) {
            0 => client.call(0, command::WRITE_ZEROES, at, len as u64).map(|reply| reply.error),
            1 => client.call(0, command::TRIM, at, len as u64).map(|reply| reply.error),
            2 => client.call(0, command::FLUSH, 0, 0).map(|reply| reply.error),
            _ => client.write(0, at, &vec![random.below(255) as u8; len]),
        };
        match changed {
            Ok(error) => assert_eq!(error, 0),
            Err(_) => return,
        }
        done.fetch_add(1, SeqCst);
    }
}

fn kill_under_writes(qemu: &Qemu, seed: u64) {
    let mut random = Random::new(seed);
    let scratch = Scratch::new("recovered");
    let dir = scratch.path();
    let options = *random.pick(&["compat=1.1", "extended_l2=on", "cluster_size=4k"]);
    zebu(dir, ["create", "-q", "-f", "qcow2", "-o", options, IMAGE, &SIZE.to_string()]).ok();
    zebu(dir, ["io", "-c", "write -P 7 0 12M", IMAGE]).ok();
    zebu(dir, ["bitmap", "--add", "-g", "4096", IMAGE, "b"]).ok();
    let before = qemu.read_all(dir, IMAGE, None);
    // The second time, the bitmap goes on from what was recovered.
    for round in 0..2 {
        let server = Server::start(dir, &format!("--export-name x --bitmap b -f qcow2 {IMAGE}"));
        let done = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for lane in 0..3 {
                let (socket, done) = (server.socket().to_owned(), &done);
                scope.spawn(move || change(&socket, seed * 10 + round * 3 + lane, done));
            }
            let wanted = random.between(1, 400);
            wait_for("changes of the disk", || (done.load(SeqCst) >= wanted).then_some(()));
            server.kill();
        });
        let dirty = by_zebu(dir);
        let after = qemu.read_all(dir, IMAGE, None);
        let sectors = before.chunks(SECTOR).zip(after.chunks(SECTOR)).zip(&dirty);
        let unknown =
            sectors.enumerate().find(|(_, ((before, after), is_dirty))| before != after && !**is_dirty);
        assert!(unknown.is_none(), "seed {seed}: sector {:?} has changed", unknown.map(|(number, _)| number));
    }
    let recovered = by_zebu(dir);
    zebu(dir, ["bitmap", "--enable", IMAGE, "b"]).ok();
    assert!(by_zebu(dir) == recovered, "seed {seed}: what was recovered is not what was stored");
    // A kill leaves clusters that nobody names, and nothing worse.
    zebu(dir, ["check", "-q", "-r", "leaks", IMAGE]).ok();
    qemu.check_clean(dir, IMAGE).unwrap();
    let flags = qemu.info(dir, IMAGE)["format-specific"]["data"]["bitmaps"][0]["flags"].clone();
    assert_eq!(flags, serde_json::json!(["auto"]));
}

#[test]
fn kills_under_writes_lose_no_change() {
    let Some(qemu) = Qemu::find() else { return };
    let rounds = std::env::var("ZEBU_KILL_ROUNDS").map_or(3, |rounds| rounds.parse().unwrap());
    for seed in 0..rounds {
        kill_under_writes(&qemu, seed);
    }
}
