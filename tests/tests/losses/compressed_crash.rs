//! Compressed rewrites of an image that are killed at random moments, or meet a full file system: each cluster is what
//! it was or what was written last, never older than the last flush, and the image has leaks at worst.
//!
//! `ZEBU_KILL_ROUNDS` sets the number of rounds.

use rustix::process::{Pid, Signal, kill_process};
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use zebu_tests::mount::Mounted;
use zebu_tests::patience::wait_for;
use zebu_tests::program::{Finished, zebu, zebu_program};
use zebu_tests::qemu::Qemu;
use zebu_tests::random::Random;
use zebu_tests::rewriting::{Disk, Kind, Line, content, kind};
use zebu_tests::scratch::Scratch;
use zebu_tests::server::kill_until_free;

const IMAGE: &str = "disk.qcow2";
const SNAPSHOT: &str = "before";
/// Bytes of a cluster, and clusters, of the image that the command writes.
const CLUSTER: u64 = 65536;
const CLUSTERS: usize = 64;

fn rounds(default: u64) -> u64 {
    std::env::var("ZEBU_KILL_ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// The kernel may hold the files of a killed process's ring for moments.
fn unlocked(mut run: impl FnMut() -> Finished) -> Finished {
    wait_for("nobody holds the image", || Some(run()).filter(|out| !out.stderr.contains("lock")))
}

/// An image, and what it held when nothing was under way.
struct Subject {
    dir: PathBuf,
    cluster_size: usize,
    versions: Vec<u64>,
    /// The content of the internal snapshot, if there is one.
    snapshot: Option<Vec<u64>>,
    /// The greatest version so far.
    last: u64,
    /// Versions up to this one were stored plain whatever they are.
    plain_until: u64,
}

impl Subject {
    /// A new image, half of it written by QEMU.
    fn new(qemu: &Qemu, dir: &Path, random: &mut Random, last: u64) -> Self {
        let cluster_size = *random.pick(&[4096, 16384, 65536, 65536, 262_144]);
        let clusters = (if cluster_size < 65536 { 300 } else { (8 << 20) / cluster_size }) as u64;
        let compression = *random.pick(&["zlib", "zstd"]);
        let mut options = format!("cluster_size={cluster_size},compression_type={compression}");
        let with_snapshot = random.chance(30);
        if compression == "zlib" && random.chance(25) {
            options.push_str(",compat=0.10");
        } else if cluster_size >= 16384 && random.chance(30) {
            options.push_str(",extended_l2=on");
        } else {
            // Narrow ones can't count what QEMU packs into a cluster and a snapshot shares.
            let widths: &[u32] = if with_snapshot { &[16, 64] } else { &[2, 8, 16, 64] };
            options.push_str(&format!(",refcount_bits={}", random.pick(widths)));
        }
        let versions: Vec<u64> = (1..=clusters).map(|i| if i % 3 == 0 { 0 } else { last + i }).collect();
        let bytes: Vec<u8> = versions.iter().flat_map(|version| content(*version, cluster_size)).collect();
        std::fs::write(dir.join("disk.raw"), bytes).unwrap();
        let _ = std::fs::remove_file(dir.join(IMAGE));
        let compressed = random.chance(60);
        let how = if compressed { "-c" } else { "-q" };
        qemu.img(dir, ["convert", how, "-f", "raw", "-O", "qcow2", "-o", &options, "disk.raw", IMAGE]).ok();
        std::fs::remove_file(dir.join("disk.raw")).unwrap();
        let snapshot = with_snapshot.then(|| {
            qemu.img(dir, ["snapshot", "-c", SNAPSHOT, IMAGE]).ok();
            versions.clone()
        });
        let plain_until = if compressed { 0 } else { last + clusters };
        Self { dir: dir.to_owned(), cluster_size, versions, snapshot, last: last + clusters, plain_until }
    }

    /// The numbers of the clusters that may be stored plain.
    fn plain(&self) -> String {
        let is_plain =
            |version: u64| version != 0 && version <= self.plain_until || kind(version) == Kind::Plain;
        let plain = self.versions.iter().enumerate().filter(|(_, version)| is_plain(**version));
        plain.map(|(index, _)| index.to_string()).collect::<Vec<_>>().join(",")
    }

    /// Checks an image after a kill or an error: it must be what `disk` says, and an image that is whole but for leaks.
    fn check(&mut self, qemu: &Qemu, disk: &Disk, random: &mut Random, what: &str) {
        let check = unlocked(|| qemu.img(&self.dir, ["check", "-f", "qcow2", IMAGE]));
        assert!(matches!(check.code, Some(0 | 3)), "{what}: {check}");
        let mut read = |snapshot: Option<&str>| {
            if random.chance(50) {
                return qemu.read_all(&self.dir, IMAGE, snapshot);
            }
            let mut words = vec!["convert", "-f", "qcow2", "-O", "raw"];
            words.extend(snapshot.into_iter().flat_map(|name| ["-l", name]));
            words.extend([IMAGE, "read.raw"]);
            zebu(&self.dir, words).ok();
            let bytes = std::fs::read(self.dir.join("read.raw")).unwrap();
            std::fs::remove_file(self.dir.join("read.raw")).unwrap();
            bytes
        };
        self.versions = disk.judge(&read(None)).unwrap_or_else(|e| panic!("{what}: {e}"));
        if let Some(versions) = &self.snapshot {
            let found = Disk::new(versions, self.cluster_size).judge(&read(Some(SNAPSHOT)));
            found.unwrap_or_else(|e| panic!("{what}: in the snapshot: {e}"));
        }
    }

    fn rewriter(&self, seed: u64) -> Child {
        Command::new(env!("CARGO_BIN_EXE_rewriter"))
            .arg(self.dir.join(IMAGE))
            .args(["--seed", &seed.to_string(), "--after", &self.last.to_string()])
            .args(["--plain", &self.plain()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    }
}

/// Notes what the rewriter says until it ends; `each` is called for every line.
fn listen(child: &mut Child, disk: &mut Disk, last: &mut u64, mut each: impl FnMut(&Disk)) {
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut text = String::new();
    while out.read_line(&mut text).unwrap() > 0 {
        if let Some(line) = Line::parse(&text) {
            disk.hear(line);
            if let Line::Begin { version, .. } = line {
                *last = (*last).max(version);
            }
            each(disk);
        }
        text.clear();
    }
}

/// The beginning of a life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Since {
    FirstWord,
    FirstFlush,
}

/// Kills the rewriter when `life` is over.
fn run_and_kill(subject: &mut Subject, seed: u64, since: Since, life: Duration) -> Disk {
    let mut disk = Disk::new(&subject.versions, subject.cluster_size);
    let mut child = subject.rewriter(seed);
    let id = Pid::from_child(&child);
    let mut killer = None;
    listen(&mut child, &mut disk, &mut subject.last, |disk| {
        if since == Since::FirstFlush && disk.flushed == 0 {
            return;
        }
        killer.get_or_insert_with(|| {
            std::thread::spawn(move || {
                std::thread::sleep(life);
                // One that has ended by itself is found below.
                let _ = kill_process(id, Signal::KILL);
            })
        });
    });
    let out = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(killer.is_some() && out.status.code().is_none(), "it ended by itself: {} {said}", out.status);
    killer.map(std::thread::JoinHandle::join).unwrap().unwrap();
    disk
}

#[test]
fn killed_rewrites_leave_old_or_new_clusters() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("compressed-kill");
    let mut random = Random::new(2021);
    let (mut last, mut flushes, rounds) = (0, 0, rounds(24));
    let mut subject = Subject::new(&qemu, scratch.path(), &mut random, last);
    let mut round = 0;
    // On a busy machine, the shorter lives end before anything is flushed.
    while round < rounds || flushes <= rounds {
        if round % 6 == 5 {
            subject = Subject::new(&qemu, scratch.path(), &mut random, last);
        }
        let life = Duration::from_micros(random.below(*random.clone().pick(&[2000, 40_000, 160_000])));
        let since = if round < rounds { Since::FirstWord } else { Since::FirstFlush };
        let disk = run_and_kill(&mut subject, random.bits(), since, life);
        flushes += disk.flushed;
        subject.check(&qemu, &disk, &mut random, &format!("round {round}, {life:?}"));
        last = subject.last;
        round += 1;
    }
    eprintln!("{round} kills, {last} versions, {flushes} flushes");
    assert!(flushes > rounds, "too little happened");
}

/// The command, told what to write through a pipe. What it says after a flush shows that the flush is done.
#[test]
fn the_killed_command_leaves_old_or_new_clusters() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("compressed-kill-io");
    let mut random = Random::new(77);
    zebu(scratch.path(), ["create", "-q", "-f", "qcow2", IMAGE, "4M"]).ok();
    // Of each cluster, what was there at the last flush, and what was sent since.
    let mut known = vec![vec![0]; CLUSTERS];
    let mut flushes = 0;
    for round in 0..rounds(10) {
        let mut child = Command::new(zebu_program())
            .args(["io", "-t", if round % 2 == 0 { "none" } else { "writeback" }, "-f", "qcow2", IMAGE])
            .current_dir(scratch.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stdin = child.stdin.take().unwrap();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let end = Instant::now() + Duration::from_millis(random.between(1, 60));
        let mut sent: Vec<Vec<u8>> = vec![Vec::new(); CLUSTERS];
        while Instant::now() < end {
            let mut text = String::new();
            for _ in 0..random.between(1, 24) {
                let first = random.below(CLUSTERS as u64) as usize;
                let (count, byte) = (1 + random.below(4) as usize, random.between(1, 255) as u8);
                let sent = &mut sent[first..(first + count).min(CLUSTERS)];
                let (at, len) = (first as u64 * CLUSTER, sent.len() as u64 * CLUSTER);
                writeln!(text, "write -q -c -P {byte} {at} {len}").unwrap();
                for sent in sent.iter_mut() {
                    sent.push(byte);
                }
            }
            // Until it is killed, it takes what it is told.
            stdin.write_all(text.as_bytes()).unwrap();
            if random.chance(60) {
                stdin.write_all(b"flush\nlength\n").unwrap();
                let mut line = String::new();
                stdout.read_line(&mut line).unwrap();
                assert!(line.contains("4 MiB"), "round {round}: {line}");
                flushes += 1;
                for (known, sent) in known.iter_mut().zip(&mut sent).filter(|(_, sent)| !sent.is_empty()) {
                    *known = sent.drain(..).next_back().into_iter().collect();
                }
            }
        }
        kill_until_free(&mut child);
        let check = unlocked(|| qemu.img(scratch.path(), ["check", "-f", "qcow2", IMAGE]));
        assert!(matches!(check.code, Some(0 | 3)), "round {round}: {check}");
        let found = qemu.read_all(scratch.path(), IMAGE, None);
        for (index, bytes) in found.chunks(CLUSTER as usize).enumerate() {
            let one = bytes.iter().all(|byte| *byte == bytes[0]);
            let may_be = [&known[index][..], &sent[index][..]].concat();
            let said =
                format!("round {round}: cluster {index} holds {}, one of {may_be:?} is right", bytes[0]);
            assert!(one && may_be.contains(&bytes[0]), "{said}");
            known[index] = vec![bytes[0]];
        }
    }
    eprintln!("{flushes} flushes");
}

/// Fills a file system but for `left` bytes.
fn fill(dir: &Path, left: u64) -> PathBuf {
    let filler = dir.join("filler");
    let free = {
        let out = Command::new("stat").args(["-f", "-c", "%a %S"]).arg(dir).output().unwrap();
        let text = String::from_utf8(out.stdout).unwrap();
        text.split_whitespace().map(|word| word.parse::<u64>().unwrap()).product::<u64>()
    };
    let take = free.saturating_sub(left);
    let status =
        Command::new("fallocate").args(["-l", &take.max(1).to_string()]).arg(&filler).status().unwrap();
    assert!(status.success());
    filler
}

#[test]
fn a_full_file_system_leaves_old_or_new_clusters() {
    let Some(qemu) = Qemu::find() else { return };
    let Some(mounted) = Mounted::on_loop("mkfs.ext4", 64 << 20) else { return };
    let dir = mounted.path();
    let mut random = Random::new(28);
    let (mut last, mut failures, mut recovered) = (0, 0, 0);
    for round in 0..rounds(16) {
        let mut subject = Subject::new(&qemu, &dir, &mut random, last);
        let filler = fill(&dir, random.below(3 << 20));
        let mut disk = Disk::new(&subject.versions, subject.cluster_size);
        let mut child = subject.rewriter(random.bits());
        // Then it is killed, or gets space and goes on to its end.
        let (killed, patience) = (random.chance(50), random.between(1, 30));
        let mut stdin = child.stdin.take();
        let (id, mut ended) = (Pid::from_child(&child), None);
        let mut start: Option<Instant> = None;
        let (mut lines, mut flushed_before) = (0, 0);
        // Each cluster was begun and done ten times: the disk will not be full any more.
        let most = 20 * subject.versions.len();
        listen(&mut child, &mut disk, &mut subject.last, |disk| {
            lines += 1;
            let time = start.get_or_insert_with(Instant::now).elapsed();
            let worked = lines > most && time > Duration::from_secs(1);
            let enough = disk.failures > patience || worked;
            if ended.is_none() && enough {
                ended = Some(());
                flushed_before = disk.flushed;
                if killed {
                    kill_process(id, Signal::KILL).unwrap();
                } else {
                    std::fs::remove_file(&filler).unwrap();
                    stdin.take();
                }
            }
        });
        let out = child.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&out.stderr);
        failures += u64::from(disk.failures > 0);
        for line in said.lines() {
            assert!(line.contains("No space left"), "round {round}: {line}");
        }
        let what = format!("round {round}, killed: {killed}, {} failures", disk.failures);
        if killed {
            let _ = std::fs::remove_file(&filler);
        } else {
            // With space again, the last flush makes everything durable that was acknowledged.
            assert!(out.status.success() && disk.flushed > flushed_before, "{what}: {} {said}", out.status);
            recovered += 1;
        }
        subject.check(&qemu, &disk, &mut random, &what);
        last = subject.last;
    }
    eprintln!("full in {failures} rounds, {recovered} went on with space again");
    assert!(failures > 3, "the file system was never full");
}
