//! Snapshots of a served disk as files that share its blocks.

use super::{IMAGE, MIB, ctl};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::Duration;
use zebu_tests::lanes::{content, lanes};
use zebu_tests::mount::Mounted;
use zebu_tests::nbd_client::{Client, command};
use zebu_tests::patience::wait_until;
use zebu_tests::program::zebu;
use zebu_tests::qemu::Qemu;
use zebu_tests::scratch::Scratch;
use zebu_tests::server::Server;

const BLOCK: u64 = 4096;
const CLIENTS: u64 = 3;
const SIZE: u64 = 16 << 20;

/// The first block of a client, and the number of those that it writes in turn. The first client comes to new clusters all
/// the time, whose links wait for a commit; the others write in place.
fn blocks_of(client: u64) -> (u64, u64) {
    if client == 0 { (2048, 2048) } else { (client * 64, 16) }
}

fn make(dir: &Path, format: &str, options: &str) {
    let mut args = vec!["create", "-q", "-f", format];
    if !options.is_empty() {
        args.extend(["-o", options]);
    }
    let size = SIZE.to_string();
    args.extend([IMAGE, &size]);
    zebu(dir, args).ok();
}

fn serve(dir: &Path, format: &str, options: &str) -> Server {
    Server::start(dir, &format!("--control ctl.sock {options} -f {format} {IMAGE}"))
}

/// Files in a directory that are not known.
fn strange_files(dir: &Path, known: &[&str]) -> Vec<PathBuf> {
    let all = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    all.filter(|path| known.iter().all(|name| *path != dir.join(name))).collect()
}

/// The number that was last written by a client, by what a disk holds of its blocks: they must be as after that write.
fn last_of(disk: &[u8], client: u64, what: &str) -> u64 {
    let (first, blocks) = blocks_of(client);
    let at = |block: u64| {
        let start = ((first + block) * BLOCK) as usize;
        let block = &disk[start..start + BLOCK as usize];
        assert!(
            block.chunks(8).all(|part| part == &block[..8]),
            "{what}: a block of client {client} is torn"
        );
        u64::from_le_bytes(block[..8].try_into().unwrap())
    };
    let last = (0..blocks).map(at).max().unwrap();
    for block in 0..blocks {
        // The latest number up to `last` that falls on this block.
        let expected = (1..=last).rev().take(blocks as usize).find(|n| n % blocks == block).unwrap_or(0);
        assert_eq!(at(block), expected, "{what}: block {block} of client {client}, which wrote {last} last");
    }
    last
}

/// Each client writes a number only after the client before it was told that it has written that number, so at every
/// moment the numbers do not rise from one client to the next. Which is so in every snapshot, too.
fn case(qemu: &Qemu, dir: &Path, format: &str, options: &str, serving: &str) {
    make(dir, format, options);
    let server = serve(dir, format, &format!("--queues 2 {serving}"));
    let sent: Vec<AtomicU64> = (0..CLIENTS).map(|_| AtomicU64::new(0)).collect();
    let done: Vec<AtomicU64> = (0..CLIENTS).map(|_| AtomicU64::new(0)).collect();
    let stop = AtomicBool::new(false);
    let mut bounds = Vec::new();
    std::thread::scope(|scope| {
        for index in 0..CLIENTS as usize {
            let (sent, done, stop) = (&sent, &done, &stop);
            let mut client = Client::open(server.socket(), "").unwrap();
            scope.spawn(move || {
                let mut number = 0u64;
                while !stop.load(SeqCst) {
                    if index > 0 && done[index - 1].load(SeqCst) <= number {
                        std::thread::yield_now();
                        continue;
                    }
                    number += 1;
                    let bytes = number.to_le_bytes().repeat(BLOCK as usize / 8);
                    sent[index].store(number, SeqCst);
                    let (first, blocks) = blocks_of(index as u64);
                    let block = first + number % blocks;
                    assert_eq!(client.write(0, block * BLOCK, &bytes).unwrap(), 0);
                    done[index].store(number, SeqCst);
                }
            });
        }
        let load = |all: &[AtomicU64]| all.iter().map(|n| n.load(SeqCst)).collect::<Vec<_>>();
        for round in 0..5 {
            let before = done[0].load(SeqCst);
            wait_until("the first client writes", || done[0].load(SeqCst) > before + 10);
            let least = load(&done);
            ctl(dir, &["snapshot-create", "", "--to", &format!("snapshot-{round}")]).ok();
            bounds.push((least, load(&sent)));
        }
        stop.store(true, SeqCst);
    });
    server.stop();
    let mut names = vec![IMAGE.to_owned(), "ctl.sock".to_owned()];
    for (round, (least, most)) in bounds.iter().enumerate() {
        let name = format!("snapshot-{round}");
        let what = format!("{format} {options} {serving}, {name}");
        if format == "qcow2" {
            qemu.check_clean(dir, &name).unwrap_or_else(|e| panic!("{what}: {e}"));
        }
        let raw = format!("{name}.raw");
        qemu.img(dir, ["convert", "-f", format, "-O", "raw", &name, &raw]).ok();
        let disk = std::fs::read(dir.join(&raw)).unwrap();
        assert_eq!(disk.len() as u64, SIZE, "{what}");
        let last: Vec<u64> = (0..CLIENTS).map(|client| last_of(&disk, client, &what)).collect();
        assert!(last.is_sorted_by(|before, after| before >= after), "{what}: {last:?} is no moment");
        for (client, last) in last.iter().enumerate() {
            let bounds = least[client]..=most[client];
            assert!(bounds.contains(last), "{what}: client {client} at {last}, not in {bounds:?}");
        }
        names.extend([name, raw]);
    }
    assert!(bounds.last().unwrap().0[0] > 0, "nobody wrote");
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let strange = strange_files(dir, &names);
    assert!(strange.iter().all(|path| path.extension().is_some_and(|e| e == "sock")), "{strange:?}");
    for name in names {
        let _ = std::fs::remove_file(dir.join(name));
    }
}

#[test]
fn a_file_snapshot_is_the_disk_at_one_moment() {
    let Some(qemu) = Qemu::find() else { return };
    let Some(xfs) = Mounted::on_loop("mkfs.xfs", 512 << 20) else { return };
    let dir = xfs.path();
    for (format, options, serving) in [
        ("raw", "", ""),
        ("raw", "", "-t none"),
        ("qcow2", "cluster_size=4k", "-t none"),
        ("qcow2", "lazy_refcounts=on", ""),
        ("qcow2", "extended_l2=on", ""),
    ] {
        case(&qemu, &dir, format, options, serving);
    }
}

#[test]
fn a_file_snapshot_that_can_not_be_is_refused_by_name() {
    let scratch = Scratch::new("file-snapshot");
    let dir = scratch.path();
    make(dir, "qcow2", "");
    std::fs::write(dir.join("there"), "mine").unwrap();
    let server = serve(dir, "qcow2", "");
    let refused = ctl(dir, &["snapshot-create", "", "--to", "there"]).exits(1);
    assert!(refused.stderr.contains("there") && refused.stderr.contains("exists"), "{refused}");
    assert_eq!(std::fs::read(dir.join("there")).unwrap(), b"mine");
    ctl(dir, &["snapshot-create"]).exits(1);
    ctl(dir, &["snapshot-create", "", "name", "--to", "x"]).exits(1);
    // Another file system never shares blocks with this one.
    if let Some(tmpfs) = Mounted::tmpfs(64 << 20) {
        let to = tmpfs.path().join("x");
        let refused = ctl(dir, &["snapshot-create", "", "--to", to.to_str().unwrap()]).exits(1);
        assert!(refused.stderr.contains("share blocks") && refused.stderr.contains("backup"), "{refused}");
        assert_eq!(strange_files(&tmpfs.path(), &[]), Vec::<PathBuf>::new());
    }
    server.stop();
    // An overlay that names its backing file by a relative name would not find it from elsewhere.
    zebu(dir, ["create", "-q", "-f", "qcow2", "-b", IMAGE, "-F", "qcow2", "top.qcow2"]).ok();
    std::fs::create_dir(dir.join("elsewhere")).unwrap();
    let server = Server::start(dir, "--control ctl.sock -f qcow2 top.qcow2");
    let refused = ctl(dir, &["snapshot-create", "", "--to", "elsewhere/x"]).exits(1);
    assert!(refused.stderr.contains("relative name"), "{refused}");
    assert_eq!(strange_files(&dir.join("elsewhere"), &[]), Vec::<PathBuf>::new());
    server.stop();
}

/// Counts that are not right are still called so in the snapshot of a disk that is only read.
#[test]
fn a_file_snapshot_of_an_image_to_be_repaired_says_so() {
    let Some(qemu) = Qemu::find() else { return };
    let Some(xfs) = Mounted::on_loop("mkfs.xfs", 512 << 20) else { return };
    let dir = xfs.path();
    make(&dir, "qcow2", "lazy_refcounts=on");
    // It ends without a close, so the counts stay behind.
    qemu.io(&dir, "-f qcow2", IMAGE, &["write -P 7 0 4M", "flush", "abort"]);
    let dirty = |name: &str| qemu.info(&dir, name)["dirty-flag"].clone();
    assert_eq!(dirty(IMAGE), true);
    for options in ["--read-only", ""] {
        let server = serve(&dir, "qcow2", options);
        ctl(&dir, &["snapshot-create", "", "--to", "snapshot"]).ok();
        assert_eq!(dirty("snapshot"), options == "--read-only");
        qemu.img(&dir, ["check", "-q", "-r", "all", "snapshot"]).ok();
        let held = qemu.read_all(&dir, "snapshot", None);
        assert!(held[..4 * MIB].iter().all(|byte| *byte == 7), "{options}");
        server.stop();
        std::fs::remove_file(dir.join("snapshot")).unwrap();
    }
}

#[test]
fn a_kill_among_file_snapshots_leaves_whole_ones_only() {
    let Some(qemu) = Qemu::find() else { return };
    let Some(xfs) = Mounted::on_loop("mkfs.xfs", 512 << 20) else { return };
    let dir = xfs.path();
    for seed in 0..4u64 {
        make(&dir, "qcow2", "");
        let server = serve(&dir, "qcow2", "");
        let mut lanes = lanes(&server, SIZE as usize, seed);
        for lane in &mut lanes {
            (0..20).for_each(|_| lane.change());
            assert_eq!(lane.client.call(0, command::FLUSH, 0, 0).unwrap().error, 0);
        }
        let flushed = content(&lanes);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in 0..50 {
                    if ctl(&dir, &["snapshot-create", "", "--to", &format!("{seed}-{round}")]).code != Some(0)
                    {
                        break;
                    }
                }
            });
            std::thread::sleep(Duration::from_millis(100 + 70 * seed));
            server.kill();
        });
        let out = qemu.img(&dir, ["check", "-f", "qcow2", IMAGE]);
        assert!(matches!(out.code, Some(0 | 3)), "seed {seed}: {out}");
        assert!(qemu.read_all(&dir, IMAGE, None) == flushed, "seed {seed}");
        let mut whole = 0;
        for round in 0..50 {
            let name = format!("{seed}-{round}");
            if dir.join(&name).exists() {
                whole += 1;
                qemu.check_clean(&dir, &name).unwrap_or_else(|e| panic!("{name}: {e}"));
                assert!(qemu.read_all(&dir, &name, None) == flushed, "{name}");
                std::fs::remove_file(dir.join(&name)).unwrap();
            }
        }
        eprintln!("seed {seed}: {whole} snapshots before the kill");
        std::fs::remove_file(dir.join(IMAGE)).unwrap();
        assert!(flushed.len() > 4 * MIB);
    }
}
