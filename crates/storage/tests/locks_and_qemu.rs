//! Locks, against this program's own other openings and against real QEMU, both ways.

mod fixtures;

use fixtures::or_skip;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::ops::ControlFlow;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use zebu_storage::{
    Access, Engine, File, IoBuf, IoError, IoErrorKind, LockMode, LockWait, OpenFlags, Patience, Worker,
    WorkerConfig,
};

fn open(path: &Path, lock: LockMode) -> Result<File, IoError> {
    let access = if lock == LockMode::Write { Access::ReadWrite } else { Access::ReadOnly };
    File::open(path, &OpenFlags::default().access(access).lock(lock))
}

fn image() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    fs::write(&path, vec![0; 65_536]).unwrap();
    (dir, path)
}

/// An image that QEMU denies to others as it does all but raw ones; `None` without QEMU.
fn qemu_image() -> Option<(tempfile::TempDir, PathBuf)> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    let made = Command::new("qemu-img").args(["create", "-q", "-f", "qcow2"]).arg(&path).arg("1M").status();
    or_skip("real QEMU", made.map_err(|error| error.to_string())).map(|status| {
        assert!(status.success());
        (dir, path)
    })
}

const MODES: [LockMode; 4] = [LockMode::None, LockMode::Inspect, LockMode::Read, LockMode::Write];

/// Whether two openers may be there at once: no lock goes with everything, a writer with nothing else, and the rest
/// with each other.
fn go_together(a: LockMode, b: LockMode) -> bool {
    a == LockMode::None || b == LockMode::None || (a != LockMode::Write && b != LockMode::Write)
}

#[test]
fn openers_exclude_each_other_as_in_the_table() {
    let (_dir, path) = image();
    for first in MODES {
        for second in MODES {
            let holder = open(&path, first).unwrap();
            let result = open(&path, second);
            assert_eq!(result.is_ok(), go_together(first, second), "{first:?}, then {second:?}");
            if let Err(error) = result {
                assert_eq!(error.kind, IoErrorKind::Locked);
                let text = error.to_string();
                let hint = format!("Is another process using the image [{}]?", path.display());
                assert!(text.contains("Failed to get ") && text.contains(&hint), "{text}");
                assert!(!text.contains('\n'));
            }
            drop(holder);
        }
    }
}

#[test]
fn a_lock_is_changed_and_given_up() {
    let (_dir, path) = image();
    let flags = OpenFlags::default().access(Access::ReadWrite).lock(LockMode::Read);
    let (a, b) = (File::open(&path, &flags).unwrap(), open(&path, LockMode::Read).unwrap());
    assert_eq!(a.set_lock(LockMode::Write).unwrap_err().kind, IoErrorKind::Locked);
    // What it had, it still has: a writer is kept out.
    drop(b);
    assert!(open(&path, LockMode::Write).is_err());
    a.set_lock(LockMode::Write).unwrap();
    assert!(open(&path, LockMode::Inspect).is_err());
    a.set_lock(LockMode::Read).unwrap();
    drop(open(&path, LockMode::Read).unwrap());
    a.unlock().unwrap();
    drop(open(&path, LockMode::Write).unwrap());
}

#[test]
fn an_opener_waits_for_a_lock_about_to_be_released() {
    let (_dir, path) = image();
    let begin = Instant::now();
    let has_waited = || {
        let holder = open(&path, LockMode::Write).unwrap();
        let start = Instant::now();
        let thread = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(250));
            drop(holder);
        });
        let opened = open(&path, LockMode::Write);
        assert!(start.elapsed() >= Duration::from_millis(200));
        thread.join().unwrap();
        opened.is_ok()
    };
    // On a busy machine, the holder may be slower than the opener's patience.
    while !has_waited() {
        assert!(begin.elapsed() < Duration::from_secs(600), "it waits for nobody");
    }
}

/// A running `qemu-io` with an image open; ended when dropped.
struct QemuIo(Child);

impl QemuIo {
    fn open(path: &Path, options: &[&str]) -> Result<Self, String> {
        let mut child = Command::new("qemu-io")
            .args(["-f", "qcow2"])
            .args(options)
            .arg(path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|error| format!("qemu-io: {error}"))?;
        // It answers once the image is open.
        let mut input = child.stdin.take().ok_or("stdin")?;
        input.write_all(b"length\n").map_err(|error| error.to_string())?;
        input.flush().map_err(|error| error.to_string())?;
        child.stdin = Some(input);
        let mut line = String::new();
        let output = child.stdout.as_mut().ok_or("stdout")?;
        BufReader::new(output).read_line(&mut line).map_err(|error| error.to_string())?;
        if line.is_empty() { Err("qemu-io could not open the image".to_owned()) } else { Ok(Self(child)) }
    }
}

impl Drop for QemuIo {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn qemu_has_it_open(path: &Path, lock: LockMode) -> QemuIo {
    QemuIo::open(path, if lock == LockMode::Write { &[] } else { &["-r"] }).unwrap()
}

#[test]
fn a_running_qemu_keeps_us_out() {
    let Some((_dir, path)) = qemu_image() else { return };
    for theirs in [LockMode::Read, LockMode::Write] {
        let qemu = qemu_has_it_open(&path, theirs);
        for ours in MODES {
            let result = open(&path, ours);
            assert_eq!(result.is_ok(), go_together(theirs, ours), "QEMU {theirs:?}, we {ours:?}: {result:?}");
            if let Err(error) = result {
                assert_eq!(error.kind, IoErrorKind::Locked);
            }
        }
        drop(qemu);
    }
}

#[test]
fn we_keep_qemu_out_and_in_the_same_words() {
    let Some((_dir, path)) = qemu_image() else { return };
    for ours in MODES {
        let holder = open(&path, ours).unwrap();
        for (theirs, options) in [(LockMode::Read, &["-r"][..]), (LockMode::Write, &[][..])] {
            let output = Command::new("qemu-io")
                .args(["-f", "qcow2", "-c", "read 0 512"])
                .args(options)
                .arg(&path)
                .output()
                .unwrap();
            let words = String::from_utf8_lossy(&output.stderr);
            let refused = words.contains("Failed to get");
            assert_eq!(refused, !go_together(ours, theirs), "we {ours:?}, QEMU {theirs:?}: {words}");
        }
        drop(holder);
    }
    // The words are the same for the same conflict.
    let theirs = qemu_has_it_open(&path, LockMode::Write);
    let output = Command::new("qemu-io").args(["-f", "qcow2", "-c", "length"]).arg(&path).output().unwrap();
    let words = String::from_utf8_lossy(&output.stderr).into_owned();
    let own = open(&path, LockMode::Write).unwrap_err().to_string();
    for said in ["Failed to get \"write\" lock", "Is another process using the image ["] {
        assert!(words.contains(said) && own.contains(said), "{words} / {own}");
    }
    drop(theirs);
}

/// The byte that says that writes may land, and those of QEMU's that are locked as long as they may.
const LANDING: [i64; 3] = [99, 101, 201];

/// The lock bytes that anybody has locked.
fn locked_bytes(path: &Path) -> Vec<i64> {
    let file = fs::File::open(path).unwrap();
    let is_locked = |byte: &i64| {
        // SAFETY: a structure of integers, for which zero is valid.
        let mut lock: libc::flock = unsafe { std::mem::zeroed() };
        lock.l_type = libc::F_WRLCK as libc::c_short;
        (lock.l_start, lock.l_len) = (*byte, 1);
        // A byte that can't be locked for writing: asked as for a write lock, which a read-only descriptor may.
        // SAFETY: the command takes a pointer to one `flock`.
        assert_eq!(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) }, 0);
        lock.l_type != libc::F_UNLCK as libc::c_short
    };
    (99..105).chain(200..205).filter(is_locked).collect()
}

/// How the program to be killed has its image.
const HOLDERS: [&str; 4] = ["buffered", "direct", "descriptor", "read-only"];

const HOLDER: &str = "ZEBU_LOCK_HOLDER";

/// Not a test, but the program that is killed: it has an image open and its ring full of requests.
#[test]
#[ignore = "run by `a_killed_program_leaves_the_locks_of_its_writes_alone`"]
fn a_program_to_be_killed() {
    let Some(holder) = std::env::var_os(HOLDER) else { return };
    let path = PathBuf::from(std::env::var_os("ZEBU_LOCK_IMAGE").unwrap());
    let holder = holder.to_str().unwrap();
    let access = if holder == "read-only" { Access::ReadOnly } else { Access::ReadWrite };
    let lock = if holder == "read-only" { LockMode::Read } else { LockMode::Write };
    let flags = OpenFlags::default().access(access).lock(lock).direct(holder == "direct");
    let file = if holder == "descriptor" {
        let opened = fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
        File::from_descriptor(OwnedFd::from(opened), &path, &flags).unwrap()
    } else {
        File::open(&path, &flags).unwrap()
    };
    let worker = Worker::new(&WorkerConfig::default().engine(Engine::IoUring)).unwrap();
    for i in 0..64u64 {
        let file = file.clone();
        drop(worker.spawn_with(|on| async move {
            loop {
                let buf = IoBuf::zeroed(65_536).into();
                if access == Access::ReadOnly {
                    on.read(&file, i % 8 * 65_536, buf).await.0.unwrap();
                } else {
                    on.write(&file, i % 8 * 65_536, buf).await.0.unwrap();
                    on.flush(&file).await.unwrap();
                }
            }
        }));
    }
    for _ in 0..8 {
        worker.wait(None);
    }
    println!("begun");
    worker.block_on(std::future::pending::<()>());
}

/// Waits without end.
struct Endless;

impl Patience for Endless {
    fn begin(&self, _: &Path) -> Box<dyn FnMut(Duration) -> ControlFlow<()>> {
        Box::new(|_| ControlFlow::Continue(()))
    }
}

#[test]
fn a_killed_program_leaves_the_locks_of_its_writes_alone() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = dir.path().join("image");
    fs::write(&path, vec![1; 8 * 65_536]).unwrap();
    for holder in HOLDERS {
        for _ in 0..13 {
            let left = locks_left_by(holder, &path);
            let may_be_left = |byte: &i64| holder != "read-only" && LANDING.contains(byte);
            assert!(left.iter().all(may_be_left), "{holder}: {left:?}");
            // Whoever comes next waits for the writes, and for nothing else.
            let flags = OpenFlags::default()
                .access(Access::ReadWrite)
                .lock(LockMode::Write)
                .lock_wait(LockWait::with(Arc::new(Endless)));
            drop(File::open(&path, &flags).unwrap());
            assert_eq!(locked_bytes(&path), []);
        }
    }
}

/// Kills a program that has the image open; says which bytes are locked once it has ended.
fn locks_left_by(holder: &str, path: &Path) -> Vec<i64> {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_program_to_be_killed", "--ignored", "--nocapture"])
        .env(HOLDER, holder)
        .env("ZEBU_LOCK_IMAGE", path)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("begun")), "{holder}");
    let locked = locked_bytes(path);
    let expected: &[i64] =
        if holder == "read-only" { &[100, 201, 203] } else { &[99, 100, 101, 103, 201, 203] };
    assert_eq!(locked, expected, "{holder}");
    child.kill().unwrap();
    child.wait().unwrap();
    locked_bytes(path)
}

#[test]
fn a_descriptor_that_another_keeps_has_no_lock_of_ours() {
    let (_dir, path) = image();
    let given = fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let flags = OpenFlags::default().access(Access::ReadWrite).lock(LockMode::Write);
    let file = File::from_descriptor(given.try_clone().unwrap().into(), &path, &flags).unwrap();
    let seen_by_it = |byte| {
        // SAFETY: a structure of integers, for which zero is valid.
        let mut lock: libc::flock = unsafe { std::mem::zeroed() };
        lock.l_type = libc::F_WRLCK as libc::c_short;
        (lock.l_start, lock.l_len) = (byte, 1);
        // SAFETY: the command takes a pointer to one `flock`.
        assert_eq!(unsafe { libc::fcntl(given.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) }, 0);
        lock.l_type != libc::F_UNLCK as libc::c_short
    };
    // A lock of its own it would not see.
    for byte in locked_bytes(&path) {
        assert!(seen_by_it(byte), "{byte}");
    }
    drop(file);
    assert_eq!(locked_bytes(&path), []);
}

#[test]
fn a_lock_goes_with_the_file_and_not_its_name() {
    let (dir, path) = image();
    let holder = open(&path, LockMode::Write).unwrap();
    let elsewhere = dir.path().join("elsewhere");
    fs::rename(&path, &elsewhere).unwrap();
    fs::write(&path, vec![0; 65_536]).unwrap();
    drop(open(&path, LockMode::Write).unwrap());
    assert_ne!(locked_bytes(&elsewhere), []);
    holder.set_lock(LockMode::Read).unwrap();
    drop(open(&elsewhere, LockMode::Read).unwrap());
    assert_eq!(open(&elsewhere, LockMode::Write).unwrap_err().kind, IoErrorKind::Locked);
    drop(holder);
    assert_eq!(locked_bytes(&elsewhere), []);
}

#[test]
fn a_descriptor_whose_owner_has_locked_it_is_taken() {
    // Whoever hands over a descriptor may have QEMU's locks on it already; they are no conflict with ours.
    let (_dir, path) = image();
    let given = fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
    for byte in [100, 101, 103, 201, 203] {
        // SAFETY: a structure of integers, for which zero is valid.
        let mut lock: libc::flock = unsafe { std::mem::zeroed() };
        lock.l_type = libc::F_RDLCK as libc::c_short;
        (lock.l_start, lock.l_len) = (byte, 1);
        // SAFETY: the command takes a pointer to one `flock`.
        assert_eq!(unsafe { libc::fcntl(given.as_raw_fd(), libc::F_OFD_SETLK, &raw mut lock) }, 0);
    }
    let flags = OpenFlags::default().access(Access::ReadWrite).lock(LockMode::Write);
    let file = File::from_descriptor(given.try_clone().unwrap().into(), &path, &flags).unwrap();
    assert!(open(&path, LockMode::Read).is_err());
    drop(file);
    // Two handles to one opened file exclude each other otherwise.
    let given = fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let take = || File::from_descriptor(given.try_clone().unwrap().into(), &path, &flags);
    let first = take().unwrap();
    assert_eq!(take().unwrap_err().kind, IoErrorKind::Locked);
    drop(first);
    drop(take().unwrap());
}
