//! Files in the states that an image may be in, made by QEMU's programs.

use crate::program::required;
use std::fs;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// A state, and the file that has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct State {
    /// Its name in lines.
    pub file: &'static str,
    /// The state in a word or two.
    pub name: &'static str,
}

const fn state(file: &'static str, name: &'static str) -> State {
    State { file, name }
}

/// All of them.
pub const STATES: &[State] = &[
    state("nosuch.img", "missing"),
    state("empty.img", "empty"),
    state("base.raw", "raw"),
    state("a.qcow2", "plain"),
    state("ov.qcow2", "with a backing file"),
    state("snap.qcow2", "with a snapshot"),
    state("bm.qcow2", "with a bitmap"),
    state("luks.qcow2", "encrypted"),
    state("broken.qcow2", "with wrong refcounts"),
    state("marked.qcow2", "marked as corrupt"),
    state("ro.qcow2", "read-only"),
    state("locked.qcow2", "in use by another program"),
    state("orphan.qcow2", "whose backing file is gone"),
    state("old.qcow2", "of version 2"),
    state("feature.qcow2", "with an unknown feature"),
];

/// Files of every line, beside the one whose state matters.
const ALWAYS: [&str; 3] = ["base.raw", "other.raw", "a.qcow2"];
/// The file that no write reaches, by its mode.
const READ_ONLY: &str = "ro.qcow2";
/// The file that another program holds.
pub const LOCKED: &str = "locked.qcow2";

/// How they are made.
const MAKE: &[&str] = &[
    "qemu-img create -q -f raw base.raw 1M",
    "qemu-io -f raw -c write:-P:1:0:64k -c write:-P:2:512k:128k base.raw",
    "qemu-img create -q -f raw other.raw 1M",
    "qemu-io -f raw -c write:-P:7:256k:64k other.raw",
    "qemu-img create -q -f raw empty.img 0",
    "qemu-img convert -O qcow2 base.raw a.qcow2",
    "qemu-img create -q -f qcow2 -b base.raw -F raw ov.qcow2",
    "qemu-io -f qcow2 -c write:-P:3:256k:64k ov.qcow2",
    "qemu-img convert -O qcow2 base.raw snap.qcow2",
    "qemu-img snapshot -c one snap.qcow2",
    "qemu-io -f qcow2 -c write:-P:9:0:64k snap.qcow2",
    "qemu-img convert -O qcow2 base.raw bm.qcow2",
    "qemu-img bitmap --add bm.qcow2 b0",
    "qemu-io -f qcow2 -c write:-P:9:256k:64k bm.qcow2",
    "qemu-img create -q -f qcow2 --object secret,id=k,data=key -o encrypt.format=luks,encrypt.key-secret=k,encrypt.iter-time=10 \
     luks.qcow2 1M",
    "qemu-img convert -O qcow2 base.raw broken.qcow2",
    "qemu-img convert -O qcow2 base.raw marked.qcow2",
    "qemu-img convert -O qcow2 base.raw ro.qcow2",
    "qemu-img convert -O qcow2 base.raw locked.qcow2",
    "qemu-img create -q -u -f qcow2 -b gone.raw -F raw orphan.qcow2 1M",
    "qemu-img convert -O qcow2 -o compat=0.10 base.raw old.qcow2",
    "qemu-img convert -O qcow2 base.raw feature.qcow2",
];

/// Makes the files in `dir`.
///
/// # Panics
/// If QEMU can't.
pub fn make(dir: &Path) {
    fs::create_dir_all(dir).expect("a directory");
    for line in MAKE {
        let words: Vec<String> = line.split_whitespace().map(|word| word.replace(':', " ")).collect();
        let status = Command::new(required(&words[0]))
            .args(&words[1..])
            .current_dir(dir)
            .stdout(Stdio::null())
            .status();
        assert!(status.expect("QEMU's program").success(), "{line}");
    }
    let change = |name: &str, at: usize, value: &[u8]| {
        let path = dir.join(name);
        let mut bytes = fs::read(&path).expect("it is made");
        bytes[at..at + value.len()].copy_from_slice(value);
        fs::write(path, bytes).expect("written");
    };
    // The refcount block of a small image is its third cluster: counts of clusters 4 and 5 are not what is used.
    change("broken.qcow2", 0x2_0008, &[0, 0, 0, 7]);
    // The bit `corrupt` of incompatible features, and one that nobody knows.
    change("marked.qcow2", 79, &[2]);
    change("feature.qcow2", 72, &[0x80]);
}

/// Copies what the line needs to whose files these are.
///
/// # Panics
/// If a file can't be copied.
pub fn copy(made: &Path, dir: &Path, state: &State) {
    fs::create_dir_all(dir).expect("a directory");
    for name in ALWAYS.iter().chain([&state.file]) {
        let from = made.join(name);
        if from.exists() {
            let bytes = fs::read(&from).expect("readable");
            fs::write(dir.join(name), bytes).expect("writable");
        }
    }
    if state.file == READ_ONLY {
        fs::set_permissions(dir.join(READ_ONLY), fs::Permissions::from_mode(0o444)).expect("ours");
    }
}

/// A program for a line on files in this state: the superuser gives up what lets it write any file.
pub fn command(program: &Path, state: &State) -> Command {
    if state.file != READ_ONLY || !crate::program::is_root() {
        return Command::new(program);
    }
    let mut command = Command::new(required("setpriv"));
    command.args(["--bounding-set", "-dac_override,-dac_read_search"]).arg(program);
    command
}

/// A program that has a file open.
#[derive(Debug)]
pub struct Holder(Child);

impl Holder {
    /// Opens the file of `dir`, if the state is that of one in use.
    ///
    /// # Panics
    /// If QEMU can't.
    pub fn of(dir: &Path, state: &State) -> Option<Self> {
        if state.file != LOCKED {
            return None;
        }
        let mut command = Command::new(required("qemu-io"));
        command.args(["-f", "qcow2", LOCKED]).current_dir(dir);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("qemu-io");
        // Its prompt.
        let mut byte = [0];
        child.stdout.as_mut().expect("a pipe").read_exact(&mut byte).expect("it opens the file");
        Some(Self(child))
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

/// The files of a directory, in the order of their names.
///
/// # Panics
/// If it can't be read.
pub fn files(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).expect("a directory").map(|entry| entry.expect("an entry").path());
    let mut names: Vec<PathBuf> = entries.filter(|path| path.is_file()).collect();
    names.sort();
    names
}
