//! Backups that are killed at random moments, or meet a full file system: until one is complete there is no file of its
//! name, and it can be resumed until it is.
//!
//! `ZEBU_KILL_ROUNDS` sets the number of interruptions.

use std::io::{Seek, SeekFrom, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use zebu_tests::mount::Mounted;
use zebu_tests::program::{zebu, zebu_program};
use zebu_tests::qemu::Qemu;
use zebu_tests::random::Random;
use zebu_tests::scratch::Scratch;

const SOURCE: &str = "disk.raw";
const BACKUP: &str = "backup.qcow2";
const MANIFEST: &str = "backup.manifest";
const PARTIAL: &str = ".backup.qcow2.zebu-partial";

fn rounds(default: u64) -> u64 {
    std::env::var("ZEBU_KILL_ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// A sparse disk of 1.25 GiB, long enough for some checkpoints, with data here and there.
fn make_source(file: &Path, random: &mut Random) {
    let mut out = std::fs::File::create(file).unwrap();
    out.set_len((5 << 28) + 512).unwrap();
    let mut piece = vec![0; 512 << 10];
    for place in 0..40u64 {
        for sector in piece.chunks_mut(512) {
            let noisy = random.between(8, 400) as usize;
            random.fill(&mut sector[..noisy]);
        }
        out.seek(SeekFrom::Start(place * (32 << 20) + random.below(16 << 20))).unwrap();
        out.write_all(&piece).unwrap();
    }
}

fn command(source: &Path, target: &Path, options: &[&str]) -> Command {
    let mut command = Command::new(zebu_program());
    command.args(["backup", "-q", "-f", "raw", "--manifest", MANIFEST]).args(options).arg(source).arg(BACKUP);
    command.current_dir(target).stdin(Stdio::null()).stderr(Stdio::piped());
    command
}

fn exists(dir: &Path, name: &str) -> bool {
    std::fs::symlink_metadata(dir.join(name)).is_ok()
}

/// The backup is complete: it holds what the source holds, nothing is leaked, nothing else is left.
fn assert_complete(qemu: &Qemu, source: &Path, dir: &Path, what: &str) {
    assert!(exists(dir, BACKUP) && exists(dir, MANIFEST) && !exists(dir, PARTIAL), "{what}");
    let source = source.to_str().unwrap();
    qemu.same_content(dir, source, BACKUP).unwrap_or_else(|e| panic!("{what}: {e}"));
    qemu.check_clean(dir, BACKUP).unwrap_or_else(|e| panic!("{what}: {e}"));
    zebu(dir, ["verify", "-q", "--manifest", MANIFEST, BACKUP]).ok();
}

/// What a process that is gone has left.
fn assert_whole_or_partial(qemu: &Qemu, source: &Path, dir: &Path, what: &str) {
    if exists(dir, BACKUP) {
        // Its name is the last thing but one that it gets: it is complete, and durable.
        qemu.same_content(dir, source.to_str().unwrap(), BACKUP).unwrap_or_else(|e| panic!("{what}: {e}"));
        qemu.check_clean(dir, BACKUP).unwrap_or_else(|e| panic!("{what}: {e}"));
        return;
    }
    assert!(!exists(dir, MANIFEST), "{what}: a manifest of nothing");
}

fn end(mut child: Child, life: Duration) -> Option<i32> {
    std::thread::sleep(life);
    let _ = child.kill();
    let out = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(matches!(out.status.code(), None | Some(0)), "{}: {said}", out.status);
    out.status.code()
}

#[test]
fn a_killed_backup_is_none_and_goes_on() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("backup-kill");
    let dir = scratch.path();
    let source = scratch.file(SOURCE);
    let mut random = Random::new(300);
    make_source(&source, &mut random);
    // How long one takes that nobody interrupts.
    let start = std::time::Instant::now();
    let out = command(&source, dir, &[]).output().unwrap();
    assert!(out.status.success());
    let usual = start.elapsed().as_micros() as u64;
    assert_complete(&qemu, &source, dir, "the first one");
    let (mut kills, mut resumed, mut complete) = (0, 0, 0);
    while kills < rounds(14) {
        for name in [BACKUP, MANIFEST] {
            let _ = std::fs::remove_file(dir.join(name));
        }
        let compression = ["--compression-type", *random.pick(&["zlib", "zstd"])];
        let cache = ["-t", *random.pick(&["none", "writeback"])];
        for attempt in 0..4 {
            let mut options = [compression, cache].concat();
            // One that begins anew must not take anything from one before.
            if attempt > 0 && (exists(dir, BACKUP) || random.chance(75)) {
                options.push("--resume");
            }
            let life = Duration::from_micros(random.below(usual));
            let child = command(&source, dir, &options).spawn().unwrap();
            let code = end(child, life);
            let what = format!("kill {kills}, attempt {attempt}, {life:?} of {usual} µs, {options:?}");
            if code == Some(0) {
                break;
            }
            kills += 1;
            assert_whole_or_partial(&qemu, &source, dir, &what);
            if exists(dir, MANIFEST) {
                break;
            }
        }
        if !exists(dir, MANIFEST) {
            let options = [&compression[..], &cache, &["--resume"]].concat();
            let out = command(&source, dir, &options).output().unwrap();
            let said = String::from_utf8_lossy(&out.stderr);
            assert!(out.status.success(), "kill {kills}: {}: {said}", out.status);
            resumed += 1;
        }
        complete += 1;
        assert_complete(&qemu, &source, dir, &format!("after kill {kills}"));
    }
    eprintln!("{kills} kills, {resumed} of {complete} backups ended by --resume");
}

#[test]
fn a_backup_that_fills_the_disk_goes_on_with_more_space() {
    let Some(qemu) = Qemu::find() else { return };
    let Some(mounted) = Mounted::on_loop("mkfs.ext4", 64 << 20) else { return };
    let scratch = Scratch::new("backup-full");
    let source = scratch.file(SOURCE);
    let mut random = Random::new(301);
    make_source(&source, &mut random);
    let dir = mounted.path();
    let (mut resumed, mut anew) = (0, 0);
    for round in 0..rounds(3) {
        for name in [BACKUP, MANIFEST] {
            let _ = std::fs::remove_file(dir.join(name));
        }
        let filler = dir.join("filler");
        let out = Command::new("stat").args(["-f", "-c", "%a %S"]).arg(&dir).output().unwrap();
        let text = String::from_utf8(out.stdout).unwrap();
        let free: u64 = text.split_whitespace().map(|word| word.parse::<u64>().unwrap()).product();
        // The backup takes some 8 MiB.
        let take = free - random.below(8 << 20);
        let done = Command::new("fallocate").args(["-l", &take.to_string()]).arg(&filler).status().unwrap();
        assert!(done.success());
        let cache = ["-t", *random.pick(&["none", "writeback"])];
        let out = command(&source, &dir, &cache).output().unwrap();
        let said = String::from_utf8_lossy(&out.stderr);
        let what = format!("round {round}, {cache:?}: {}: {said}", out.status);
        assert!(out.status.code() == Some(1) && said.contains("No space left"), "{what}");
        assert!(!exists(&dir, BACKUP) && !exists(&dir, MANIFEST), "{what}");
        let goes_on = exists(&dir, PARTIAL);
        std::fs::remove_file(&filler).unwrap();
        let out = command(&source, &dir, &[&cache[..], &["--resume"]].concat()).output().unwrap();
        assert!(out.status.success(), "{what}, then {}", String::from_utf8_lossy(&out.stderr));
        *(if goes_on { &mut resumed } else { &mut anew }) += 1;
        assert_complete(&qemu, &source, &dir, &what);
    }
    eprintln!("{resumed} went on, {anew} had nothing to go on from");
}
