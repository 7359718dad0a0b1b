//! Stacks of three drivers with options that a seed chooses: written bytes, read bytes and refusals are those of QEMU.

use crate::program::{Finished, finish, required};
use crate::random::Random;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Drivers that stand on another one, and the name of that among their options.
const DRIVERS: [(&str, &str); 6] = [
    ("raw", "file"),
    ("qcow2", "file"),
    ("blkdebug", "image"),
    ("copy-on-read", "file"),
    ("compress", "file"),
    ("preallocate", "file"),
];

/// Options of every node.
const COMMON: &[(&str, &str)] = &[
    ("read-only", "on"),
    ("read-only", "off"),
    ("auto-read-only", "on"),
    ("auto-read-only", "off"),
    ("force-share", "on"),
    ("discard", "ignore"),
    ("discard", "unmap"),
    ("detect-zeroes", "off"),
    ("detect-zeroes", "on"),
    ("detect-zeroes", "unmap"),
    ("cache.direct", "off"),
    ("cache.no-flush", "on"),
    ("cache.no-flush", "off"),
    ("node-name", "n"),
    ("nothing", "1"),
    ("read-only", "maybe"),
];

/// Options of a driver.
fn options_of(driver: &str) -> &'static [(&'static str, &'static str)] {
    match driver {
        "raw" => &[
            ("offset", "0"),
            ("offset", "4k"),
            ("size", "512k"),
            ("size", "64M"),
            ("size", "1000"),
            ("offset", "x"),
        ],
        "qcow2" => &[
            ("l2-cache-size", "64k"),
            ("l2-cache-size", "0"),
            ("l2-cache-entry-size", "4k"),
            ("l2-cache-entry-size", "3000"),
            ("refcount-cache-size", "256k"),
            ("refcount-cache-size", "0"),
            ("cache-size", "1M"),
            ("cache-clean-interval", "5"),
            ("lazy-refcounts", "on"),
            ("lazy-refcounts", "off"),
            ("overlap-check", "all"),
            ("overlap-check", "none"),
            ("overlap-check", "nosuch"),
            ("overlap-check.template", "cached"),
            ("pass-discard-request", "on"),
            ("pass-discard-snapshot", "off"),
            ("discard-no-unref", "on"),
        ],
        "blkdebug" => &[
            ("align", "512"),
            ("align", "4k"),
            ("align", "1000"),
            ("max-transfer", "64k"),
            ("max-transfer", "1000"),
            ("opt-write-zero", "64k"),
            ("max-write-zero", "64k"),
            ("opt-discard", "64k"),
            ("max-discard", "64k"),
            ("inject-error.0.event", "write_aio"),
            ("inject-error.0.event", "read_aio"),
            ("inject-error.0.event", "flush_to_disk"),
            ("inject-error.0.event", "l2_update"),
            ("inject-error.0.event", "nosuch"),
            ("inject-error.0.iotype", "write"),
            ("config", "nosuch.conf"),
        ],
        "preallocate" => &[
            ("prealloc-size", "1M"),
            ("prealloc-align", "64k"),
            ("prealloc-align", "1000"),
            ("prealloc-size", "x"),
        ],
        _ => &[],
    }
}

/// Commands that write and read.
const COMMANDS: [&str; 9] = [
    "write -P 0x42 4k 8k",
    "read -P 0x42 4k 8k",
    "write -z 64k 64k",
    "discard 128k 64k",
    "write -P 0x17 192k 1k",
    "flush",
    "read -v 1k 4k",
    "read -v 191k 2k",
    "length",
];

/// The bytes of the disk at first.
const SIZE: u64 = 1 << 20;

/// A stack, as the seed chose it.
#[derive(Debug, Clone)]
pub struct Stack {
    /// The seed.
    pub seed: u64,
    drivers: Vec<usize>,
    /// Options, with the number of their node from the top.
    options: Vec<(usize, &'static str, &'static str)>,
}

impl Stack {
    /// The stack of a seed.
    pub fn of(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let drivers: Vec<usize> = (0..3).map(|_| random.below(DRIVERS.len() as u64) as usize).collect();
        let mut options = Vec::new();
        for _ in 0..random.between(1, 3) {
            let node = random.below(4) as usize;
            let own = drivers.get(node).map_or(&[][..], |driver| options_of(DRIVERS[*driver].0));
            let is_own = !own.is_empty() && random.chance(60);
            let (key, value) = *random.pick(if is_own { own } else { COMMON });
            if options.iter().all(|(other, known, _)| (*other, *known) != (node, key)) {
                options.push((node, key, value));
            }
        }
        Self { seed, drivers, options }
    }

    /// The image options of the stack, with these of its own or without them.
    fn text(&self, options: &[(usize, &str, &str)]) -> String {
        let mut words = Vec::new();
        let mut prefix = String::new();
        for node in 0..=self.drivers.len() {
            let driver = self.drivers.get(node).map(|driver| DRIVERS[*driver]);
            words.push(format!("{prefix}driver={}", driver.map_or("file", |(name, _)| name)));
            let own = options.iter().filter(|(of, ..)| *of == node);
            words.extend(own.map(|(_, key, value)| format!("{prefix}{key}={value}")));
            match driver {
                Some((_, child)) => prefix += &format!("{child}."),
                None => words.push(format!("{prefix}filename=disk.img")),
            }
        }
        words.join(",")
    }

    /// The image options.
    pub fn options(&self) -> String {
        self.text(&self.options)
    }

    /// How many of the drivers are qcow2: each is an image within that below.
    fn images(&self) -> usize {
        self.drivers.iter().filter(|driver| DRIVERS[**driver].0 == "qcow2").count()
    }
}

/// Makes the disks that stacks stand on: with no image, with one, and with images within images.
///
/// # Panics
/// If QEMU can't.
pub fn make(dir: &Path) {
    fs::create_dir_all(dir).expect("a directory");
    let bytes: Vec<u8> = (0..SIZE).map(|at| (at / 4096 % 251) as u8 + 1).collect();
    fs::write(dir.join("disk0"), bytes).expect("written");
    for depth in 1..=3 {
        let (from, to) = (format!("disk{}", depth - 1), format!("disk{depth}"));
        let mut command = Command::new(required("qemu-img"));
        finish({
            command.args(["convert", "-f", "raw", "-O", "qcow2", &from, &to]).current_dir(dir);
            command
        })
        .ok();
    }
}

/// Outcome of a stack.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// Both programs did the same.
    Same,
    /// Both refused.
    BothRefused,
    /// Zebu refused an option by its name, which QEMU takes.
    Refused(String),
    /// They differ.
    Differs(String),
}

/// Has both programs work on a stack. `made` is the directory of [`make`], `names` that of zebu's links.
///
/// # Panics
/// If a program can't be started.
pub fn judge(stack: &Stack, made: &Path, names: &Path, home: &Path) -> Outcome {
    let place = tempfile::tempdir_in(home).expect("a directory");
    let text = stack.options();
    let run = |name: &str, program: PathBuf| {
        let dir = place.path().join(name);
        fs::create_dir(&dir).expect("a directory");
        let before = fs::read(made.join(format!("disk{}", stack.images()))).expect("made");
        fs::write(dir.join("disk.img"), &before).expect("written");
        let mut command = Command::new(program);
        for line in COMMANDS {
            command.args(["-c", line]);
        }
        command.args(["--image-opts", &text]).current_dir(&dir).env_remove("ZEBU_ALLOW_REFS");
        let ran = finish(command);
        let has_changed = fs::read(dir.join("disk.img")).expect("there") != before;
        let plain = finish({
            let mut command = Command::new(required("qemu-img"));
            command
                .args(["convert", "-O", "raw", "--image-opts", &stack.text(&[]), "bytes"])
                .current_dir(&dir);
            command
        });
        let bytes = fs::read(dir.join("bytes")).unwrap_or_default();
        (ran, has_changed, (plain.code, bytes))
    };
    let (ours, is_ours_changed, our_bytes) = run("ours", names.join("qemu-io"));
    let (theirs, is_theirs_changed, their_bytes) = run("theirs", required("qemu-io"));
    let are_both_refused = [&ours, &theirs].into_iter().all(is_refused);
    if are_both_refused && !is_ours_changed {
        return Outcome::BothRefused;
    }
    let mut keys = stack.options.iter().map(|(_, key, _)| *key);
    if is_refused(&ours)
        && !is_ours_changed
        && let Some(key) = keys.find(|key| ours.stderr.contains(*key))
    {
        return Outcome::Refused(key.to_owned());
    }
    if ours.code != theirs.code || said(&ours) != said(&theirs) {
        let mut pairs = said(&ours).into_iter().zip(said(&theirs));
        let (our_line, their_line) = pairs.find(|(one, other)| one != other).unwrap_or_default();
        return Outcome::Differs(format!(
            "{text}\n  zebu {:?}: {}\n  QEMU {:?}: {}\n  first: {our_line} / {their_line}",
            ours.code,
            short(&ours),
            theirs.code,
            short(&theirs)
        ));
    }
    if our_bytes != their_bytes || (is_ours_changed != is_theirs_changed && stack.images() == 0) {
        let (sizes, codes) = ([our_bytes.1.len(), their_bytes.1.len()], [our_bytes.0, their_bytes.0]);
        return Outcome::Differs(format!(
            "{text}\n  other bytes: {sizes:?} {codes:?}, changed {is_ours_changed} {is_theirs_changed}"
        ));
    }
    Outcome::Same
}

/// Whether it ended before anything was done.
fn is_refused(ran: &Finished) -> bool {
    ran.code == Some(1) && said(ran).is_empty()
}

/// The lines of `qemu-io` without those that have times.
fn said(ran: &Finished) -> Vec<&str> {
    ran.stdout.lines().filter(|line| !line.contains("ops;") && !line.contains("ops/sec")).collect()
}

fn short(ran: &Finished) -> String {
    let words: Vec<&str> = said(ran).into_iter().filter(|line| !line.contains("  ")).collect();
    format!("{} {}", words.join("; "), ran.stderr.trim())
}
