//! Locks beside a live QEMU, both ways: who has the image open keeps the other out as QEMU keeps QEMU out, and each says
//! which file it is. (`crates/storage/tests/locks_and_qemu.rs` has the table of modes, without the command.)

use fuser::Errno;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use zebu_tests::patience::{Patience, wait_until};
use zebu_tests::program::{Finished, find, zebu, zebu_program};
use zebu_tests::qemu::Qemu;
use zebu_tests::scratch::Scratch;
use zebu_tests::stalling_disk::StallingDisk;

const IMAGE: &str = "disk.qcow2";

/// A program that has an image open; it is ended when this is dropped.
struct Holder(Child);

impl Holder {
    /// Starts a shell of I/O commands, and waits until it answers.
    fn shell(dir: &Path, program: &Path, words: &[&str]) -> Self {
        let mut child = Command::new(program)
            .args(words)
            .current_dir(dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("it can be run");
        child.stdin.as_mut().expect("piped").write_all(b"length\n").expect("it reads commands");
        let mut answer = String::new();
        BufReader::new(child.stdout.as_mut().expect("piped")).read_line(&mut answer).expect("it answers");
        assert!(answer.contains("MiB") || answer.contains("1048576"), "{words:?}: {answer}");
        Self(child)
    }

    /// Starts `qemu-storage-daemon` with the image exported over NBD, as a host of virtual machines has it.
    fn daemon(dir: &Path, program: &Path, writable: bool) -> Self {
        let (read_only, write) = if writable { ("off", "on") } else { ("on", "off") };
        let socket = dir.join("nbd");
        let child = Command::new(program)
            .args([
                "--blockdev",
                &format!("driver=file,filename={IMAGE},node-name=file,read-only={read_only}"),
            ])
            .args(["--blockdev", &format!("driver=qcow2,file=file,node-name=disk,read-only={read_only}")])
            .args(["--nbd-server", &format!("addr.type=unix,addr.path={}", socket.display())])
            .args(["--export", &format!("type=nbd,id=e,node-name=disk,writable={write}")])
            .args(["--pidfile", "pid"])
            .current_dir(dir)
            .spawn()
            .expect("it can be run");
        let mut holder = Self(child);
        let patience = Patience::begin();
        // Its number is in the file when everything is set up.
        while !dir.join("pid").exists() {
            assert_eq!(holder.0.try_wait().expect("our child"), None, "the daemon has ended");
            patience.pause("the daemon begins");
        }
        holder
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Commands that change an image.
const WRITERS: &[&[&str]] = &[
    &["io", "-f", "qcow2", IMAGE, "-c", "write 0 64k"],
    &["check", "-f", "qcow2", "-r", "all", IMAGE],
    &["resize", "-f", "qcow2", IMAGE, "2M"],
    &["snapshot", "-f", "qcow2", "-c", "s", IMAGE],
    &["bitmap", "-f", "qcow2", "--add", IMAGE, "b"],
    &["rebase", "-f", "qcow2", "-u", "-b", "", IMAGE],
    &["amend", "-f", "qcow2", "-o", "lazy_refcounts=on", IMAGE],
];

/// Commands that read one, without the options for opening.
const READERS: &[&[&str]] = &[
    &["info", "-f", "qcow2", IMAGE],
    &["map", "-f", "qcow2", IMAGE],
    &["check", "-f", "qcow2", IMAGE],
    &["measure", "-f", "qcow2", "-O", "raw", IMAGE],
    &["compare", "-f", "qcow2", "-F", "qcow2", IMAGE, IMAGE],
    &["convert", "-f", "qcow2", "-O", "raw", IMAGE, "out.raw"],
    &["io", "-f", "qcow2", "-r", "-c", "read 0 64k", IMAGE],
];

fn scratch(qemu: &Qemu) -> Scratch {
    let scratch = Scratch::new("locks");
    qemu.create(scratch.path(), IMAGE, "qcow2", "", 1 << 20);
    scratch
}

/// Requires that a command was refused in words that name the lock and the file.
fn refused(out: &Finished, lock: &str) {
    assert!(matches!(out.code, Some(1 | 2)), "{out}");
    let hint = format!("Is another process using the image [{IMAGE}]?");
    assert!(
        out.stderr.contains(&format!("Failed to get {lock} lock")) && out.stderr.contains(&hint),
        "{out}"
    );
}

/// Waits until nobody holds an image: a process that was killed may do so for a moment, and QEMU does not wait.
fn until_free(qemu: &Qemu, dir: &Path, image: &str) {
    wait_until(format_args!("{image} is free"), || {
        qemu.io(dir, "-f qcow2", image, &["read 0 512"]).code == Some(0)
    });
}

/// Runs commands all at once: who is refused has waited a second for the other to go away.
fn at_once(dir: &Path, commands: &[&'static [&'static str]], judge: impl Fn(&Finished) + Sync) {
    std::thread::scope(|scope| {
        for words in commands {
            scope.spawn(|| judge(&zebu(dir, *words)));
        }
    });
}

fn keeps_writers_out(dir: &Path) {
    let before = std::fs::read(dir.join(IMAGE)).expect("readable");
    at_once(dir, WRITERS, |out| {
        refused(out, "\"write\"");
        assert_eq!(out.stderr.lines().count(), 1, "{out}");
    });
    assert_eq!(
        std::fs::read(dir.join(IMAGE)).expect("readable"),
        before,
        "who was refused has changed nothing"
    );
}

#[test]
fn a_qemu_that_writes_keeps_every_command_out() {
    let Some(qemu) = Qemu::find() else { return };
    let (shell, daemon) = (find("qemu-io"), find("qemu-storage-daemon"));
    for with_daemon in [false, true] {
        let scratch = scratch(&qemu);
        let dir = scratch.path();
        let _holder = match (&shell, &daemon) {
            (_, Some(program)) if with_daemon => Holder::daemon(dir, program, true),
            (Some(program), _) if !with_daemon => Holder::shell(dir, program, &["-f", "qcow2", IMAGE]),
            _ => continue,
        };
        keeps_writers_out(dir);
        at_once(dir, READERS, |out| refused(out, "shared \"write\""));
        for words in READERS {
            // Without locks, at the reader's own risk.
            let mut unlocked = vec![words[0], "-U"];
            unlocked.extend(&words[1..]);
            zebu(dir, unlocked).ok();
        }
        // A command that writes can't go without.
        let out = zebu(dir, ["io", "-U", "-f", "qcow2", IMAGE, "-c", "write 0 64k"]);
        assert_ne!(out.code, Some(0), "{out}");
    }
}

#[test]
fn a_qemu_that_reads_keeps_out_who_writes_only() {
    let Some(qemu) = Qemu::find() else { return };
    let Some(program) = find("qemu-io") else { return };
    let scratch = scratch(&qemu);
    let _holder = Holder::shell(scratch.path(), &program, &["-r", "-f", "qcow2", IMAGE]);
    keeps_writers_out(scratch.path());
    for words in READERS {
        zebu(scratch.path(), *words).ok();
    }
}

#[test]
fn a_zebu_that_writes_keeps_qemu_out() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = scratch(&qemu);
    let dir = scratch.path();
    let holder = Holder::shell(dir, zebu_program(), &["io", "-f", "qcow2", IMAGE]);
    for line in ["info", "map", "check", "check -r all", "snapshot -c s", "resize"] {
        let more = if line == "resize" { " 2M" } else { "" };
        refused(
            &qemu.img_line(dir, &format!("{line} {IMAGE}{more}")),
            if line.contains(' ') || line == "resize" { "\"write\"" } else { "shared \"write\"" },
        );
    }
    qemu.img_line(dir, &format!("info -U {IMAGE}")).ok();
    for options in ["-f qcow2", "-r -f qcow2"] {
        let out = qemu.io(dir, options, IMAGE, &["read 0 512"]);
        assert!(out.code == Some(1) && out.stderr.contains("Failed to get "), "{out}");
    }
    qemu.io(dir, "-r -U -f qcow2", IMAGE, &["read 0 512"]).ok();
    // Killed, it holds nothing any more.
    drop(holder);
    until_free(&qemu, dir, IMAGE);
    qemu.io(dir, "-f qcow2", IMAGE, &["write 0 64k"]).ok();
}

#[test]
fn a_zebu_that_reads_shares_with_qemu_that_reads() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = scratch(&qemu);
    let dir = scratch.path();
    for (options, shared) in
        [(&["io", "-r", "-f", "qcow2", IMAGE][..], true), (&["io", "-r", "-U", "-f", "qcow2", IMAGE], false)]
    {
        let holder = Holder::shell(dir, zebu_program(), options);
        qemu.img_line(dir, &format!("info {IMAGE}")).ok();
        qemu.io(dir, "-r -f qcow2", IMAGE, &["read 0 512"]).ok();
        zebu(dir, ["info", "-f", "qcow2", IMAGE]).ok();
        let out = qemu.io(dir, "-f qcow2", IMAGE, &["read 0 512"]);
        assert_eq!(
            out.code != Some(0),
            shared,
            "a reader with locks keeps writers out, one without does not: {out}"
        );
        drop(holder);
        until_free(&qemu, dir, IMAGE);
    }
}

#[test]
fn a_backing_file_is_held_for_reading() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = scratch(&qemu);
    let dir = scratch.path();
    qemu.img_line(dir, &format!("create -q -f qcow2 -b {IMAGE} -F qcow2 top.qcow2")).ok();
    {
        let _holder =
            Holder::shell(dir, zebu_program(), &["io", "--allow-refs", "local", "-f", "qcow2", "top.qcow2"]);
        qemu.img_line(dir, &format!("info {IMAGE}")).ok();
        let out = qemu.io(dir, "-f qcow2", IMAGE, &["write 0 512"]);
        assert!(out.code == Some(1) && out.stderr.contains("Failed to get \"write\" lock"), "{out}");
    }
    let Some(program) = find("qemu-io") else { return };
    until_free(&qemu, dir, "top.qcow2");
    let _holder = Holder::shell(dir, &program, &["-f", "qcow2", "top.qcow2"]);
    zebu(dir, ["info", "-f", "qcow2", IMAGE]).ok();
    keeps_writers_out(dir);
}

/// NFS without lockd, Lustre without `flock`, some file systems of FUSE: QEMU works there, and so does zebu, with a warning.
#[test]
fn a_file_system_without_locks_is_no_reason_to_refuse() {
    for answer in [Errno::ENOLCK, Errno::EOPNOTSUPP] {
        let Some(disk) = StallingDisk::without_locks(4 << 20, answer) else { return };
        let file = disk.file();
        let file = file.to_str().expect("text");
        let dir = disk.dir();
        let warned = |out: Finished| {
            let said = "has no locks: nothing keeps other programs from";
            assert!(out.stderr.contains(said) && out.stderr.lines().count() == 1, "{out}");
        };
        let write = ["io", "-f", "raw", file, "-c", "write -P 7 0 64k", "-c", "flush"];
        warned(zebu(dir, write).ok());
        warned(zebu(dir, ["convert", "-f", "raw", "-O", "raw", file, "copy"]).ok());
        assert!(std::fs::read(dir.join("copy")).expect("just made")[..65536] == vec![7; 65536]);
        let unlocked = zebu(dir, ["convert", "-U", "-f", "raw", "-O", "raw", file, "copy"]).ok();
        assert!(unlocked.stderr.is_empty(), "{unlocked}");
    }
}
