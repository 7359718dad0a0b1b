//! Locks, against this program's own other openings and against real QEMU, both ways.

mod fixtures;

use fixtures::or_skip;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use zebu_storage::{Access, File, IoError, IoErrorKind, LockMode, OpenFlags};

fn open(path: &Path, lock: LockMode) -> Result<File, IoError> {
    let access = if lock == LockMode::Write { Access::ReadWrite } else { Access::ReadOnly };
    File::open(path, &OpenFlags { access, lock, ..OpenFlags::default() })
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
    let flags = OpenFlags { access: Access::ReadWrite, lock: LockMode::Read, ..OpenFlags::default() };
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
    let holder = open(&path, LockMode::Write).unwrap();
    let thread = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(300));
        drop(holder);
    });
    let start = Instant::now();
    drop(open(&path, LockMode::Write).unwrap());
    assert!(start.elapsed() >= Duration::from_millis(200));
    thread.join().unwrap();
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
