//! Backups that are killed at random moments, or meet a full file system: until one is complete there is no file of its
//! name, and it can be resumed until it is. A killed increment leaves the backup that it stands on alone, and the bitmap as
//! it was; that is only cleared where the increment is complete.
//!
//! `ZEBU_KILL_ROUNDS` sets the number of interruptions.

use std::io::{Seek, SeekFrom, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use zebu_tests::killed::wait_for_writes_to;
use zebu_tests::mount::Mounted;
use zebu_tests::patience::LONGEST;
use zebu_tests::program::{zebu, zebu_program};
use zebu_tests::qemu::Qemu;
use zebu_tests::random::Random;
use zebu_tests::scratch::Scratch;
use zebu_tests::server::kill_until_free;

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

/// Checks what a process that is gone has left.
fn assert_whole_or_partial(qemu: &Qemu, source: &Path, dir: &Path, what: &str) {
    if exists(dir, BACKUP) {
        wait_for_writes_to(&dir.join(BACKUP));
        // Its name is the last thing but one that it gets: it is complete, and durable.
        qemu.same_content(dir, source.to_str().unwrap(), BACKUP).unwrap_or_else(|e| panic!("{what}: {e}"));
        qemu.check_clean(dir, BACKUP).unwrap_or_else(|e| panic!("{what}: {e}"));
        return;
    }
    assert!(!exists(dir, MANIFEST), "{what}: a manifest of nothing");
}

fn end(mut child: Child, life: Duration) -> Option<i32> {
    std::thread::sleep(life);
    kill_until_free(&mut child);
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

const DISK: &str = "disk.qcow2";
const PREVIOUS: &str = "previous.qcow2";
/// The disk's image before each backup.
const KEPT: &str = "kept.qcow2";
/// The name of the image that a killed backup has left.
const LEFT: &str = "left.qcow2";

/// The source of an increment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum By {
    Manifest,
    Bitmap,
    Both,
}

impl By {
    fn command(self, dir: &Path, options: &[&str]) -> Command {
        let mut command = Command::new(zebu_program());
        command.args(["backup", "-q", "--previous", PREVIOUS]).args(options);
        if self != By::Bitmap {
            command.args(["--previous-manifest", "previous.manifest", "--manifest", MANIFEST]);
        }
        if self != By::Manifest {
            command.args(["--bitmap", "b"]);
        }
        command.args([DISK, BACKUP]).current_dir(dir).stdin(Stdio::null()).stderr(Stdio::piped());
        command
    }
}

fn copy(dir: &Path, from: &str, to: &str) {
    std::fs::copy(dir.join(from), dir.join(to)).unwrap();
}

/// Images that show what these raw files hold: the previous backup's disk, and the disk as it is.
struct Expected<'a> {
    qemu: &'a Qemu,
    dir: &'a Path,
}

impl Expected<'_> {
    fn shows(&self, image: &str, raw: &str, what: &str) {
        self.qemu.same_content(self.dir, raw, image).unwrap_or_else(|e| panic!("{what}: {e}"));
        self.qemu.check_clean(self.dir, image).unwrap_or_else(|e| panic!("{what}: {e}"));
    }

    /// The bitmap tells what has changed since the backup that there is: the next increment by it has the disk. True if
    /// it was cleared.
    fn bitmap_tells(&self, what: &str) -> bool {
        copy(self.dir, DISK, LEFT);
        let base = if exists(self.dir, BACKUP) { BACKUP } else { PREVIOUS };
        let line = format!("backup --output json --bitmap b --previous {base} {LEFT} next.qcow2");
        let out = zebu(self.dir, line.split(' '));
        assert!(out.code == Some(0), "{what}: {out}");
        self.shows("next.qcow2", "now.raw", what);
        std::fs::remove_file(self.dir.join("next.qcow2")).unwrap();
        let report: serde_json::Value = serde_json::from_str(&out.stdout).unwrap();
        report["read"] == 0
    }
}

#[test]
fn a_killed_increment_leaves_the_previous_backup_and_the_bitmap() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("increment-kill");
    let dir = scratch.path();
    let mut random = Random::new(302);
    make_source(&scratch.file("then.raw"), &mut random);
    zebu(dir, ["convert", "-f", "raw", "-O", "qcow2", "then.raw", DISK]).ok();
    zebu(dir, ["backup", "-q", "--bitmap", "b", "--manifest", "previous.manifest", DISK, PREVIOUS]).ok();
    for _ in 0..30 {
        let (fill, place) = (random.between(1, 255), random.below(1200) << 20);
        zebu(dir, ["io", "-c", &format!("write -P {fill} {place} 600k"), DISK]).ok();
    }
    zebu(dir, ["convert", "-f", "qcow2", "-O", "raw", DISK, "now.raw"]).ok();
    copy(dir, DISK, KEPT);
    let expected = Expected { qemu: &qemu, dir };
    // How long one takes that nobody kills, by what it is made by.
    let mut usual = [0; 3];
    let (mut kills, mut cleared, mut complete) = (0, 0, 0);
    for round in 0.. {
        let by = *random.pick(&[By::Manifest, By::Bitmap, By::Bitmap, By::Both]);
        for name in [BACKUP, MANIFEST] {
            let _ = std::fs::remove_file(dir.join(name));
        }
        copy(dir, KEPT, DISK);
        for attempt in 0..4 {
            let resume = attempt == 3 || exists(dir, BACKUP) || attempt > 0 && random.chance(60);
            let options = if resume { &["--resume"][..] } else { &[] };
            let start = std::time::Instant::now();
            let child = by.command(dir, options).spawn().unwrap();
            let usual = &mut usual[by as usize];
            let life = if *usual == 0 || attempt == 3 {
                LONGEST
            } else {
                // Names and the bitmap change at the end.
                let from = if random.chance(50) { *usual * 3 / 4 } else { 0 };
                Duration::from_micros(random.between(from, *usual))
            };
            let code = end_or_kill(child, life);
            let took = start.elapsed().as_micros() as u64;
            let what =
                format!("round {round}, attempt {attempt}, {by:?}, {life:?} of {usual} µs, {options:?}");
            expected.shows(PREVIOUS, "then.raw", &what);
            if exists(dir, BACKUP) {
                wait_for_writes_to(&dir.join(BACKUP));
                expected.shows(BACKUP, "now.raw", &what);
            }
            let is_clear = expected.bitmap_tells(&what);
            assert!(!is_clear || exists(dir, BACKUP), "{what}: cleared without a backup");
            cleared += u32::from(is_clear);
            if code == Some(0) {
                assert_eq!(is_clear, by != By::Manifest, "{what}");
                *usual = if *usual == 0 { took } else { took.min(*usual) };
                complete += 1;
                break;
            }
            kills += 1;
            // With a bitmap, what has its name is not gone on with; what has both names is complete.
            if exists(dir, BACKUP) && (by != By::Manifest || exists(dir, MANIFEST)) {
                break;
            }
        }
        if exists(dir, MANIFEST) {
            zebu(dir, ["verify", "-q", "--manifest", MANIFEST, BACKUP]).ok();
        }
        for left in [PARTIAL, ".backup.qcow2.zebu-partial.manifest"] {
            let _ = std::fs::remove_file(dir.join(left));
        }
        if kills >= rounds(14) {
            break;
        }
    }
    eprintln!("{kills} kills, {complete} increments complete, the bitmap cleared {cleared} times");
}

/// As [`end`], for one that may be over before.
fn end_or_kill(mut child: Child, life: Duration) -> Option<i32> {
    let deadline = std::time::Instant::now() + life;
    while std::time::Instant::now() < deadline && child.try_wait().unwrap().is_none() {
        std::thread::sleep(Duration::from_micros(500));
    }
    end(child, Duration::ZERO)
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
