//! Helpers of the tests of jobs: QEMU's tools as the oracle, and images to work on.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use zebu_engine::storage::{Worker, WorkerConfig};

/// Runs a tool of QEMU, which must be installed (Debian: `qemu-utils`).
pub(crate) fn tool(name: &str, args: &[&str]) -> Output {
    Command::new(name).args(args).output().unwrap_or_else(|error| {
        panic!("these tests compare with QEMU: {name} (package qemu-utils) does not run: {error}")
    })
}

/// Standard output of `qemu-img`, which must succeed.
pub(crate) fn qemu_img(args: &[&str]) -> String {
    let output = tool("qemu-img", args);
    assert!(output.status.success(), "qemu-img {args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Runs commands of `qemu-io` on an image.
pub(crate) fn qemu_io(image: &Path, format: &str, commands: &[&str]) {
    let mut args = vec!["-f", format, "-t", "writeback"];
    for command in commands {
        args.extend(["-c", command]);
    }
    args.push(text(image));
    let output = tool("qemu-io", &args);
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && !said.contains("failed"), "qemu-io {args:?}: {said}");
}

/// A path as text.
pub(crate) fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// The number behind `"key": ` in JSON.
pub(crate) fn json_number(json: &str, key: &str) -> Option<u64> {
    let from = json.find(&format!("\"{key}\":"))? + key.len() + 3;
    let digits: String = json[from..].trim_start().chars().take_while(char::is_ascii_digit).collect();
    digits.parse().ok()
}

/// Runs `work` on a worker of its own.
pub(crate) fn on_worker<T>(work: impl AsyncFnOnce(&Worker) -> T) -> T {
    let worker = Worker::new(&WorkerConfig::default()).unwrap();
    worker.block_on(work(&worker))
}

/// A directory for the images of one test.
pub(crate) struct Images(tempfile::TempDir);

impl Images {
    /// An empty one.
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }
    /// The path of an image in it.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }
    /// Names of all files in it, sorted.
    pub(crate) fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = std::fs::read_dir(self.0.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }
}

/// A repeatable source of numbers (splitmix64).
pub(crate) struct Seeded(pub(crate) u64);

impl Seeded {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    /// A number below `end`.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.next() % end.max(1)
    }
}

/// The bytes of a disk of `sectors` sectors: holes, data, data with zeroes inside, in runs of all lengths.
pub(crate) fn disk(seed: u64, sectors: u64) -> Vec<u8> {
    let mut random = Seeded(seed);
    let mut bytes = vec![0; (sectors * 512) as usize];
    let mut at = 0;
    while at < sectors {
        let magnitude = random.below(11);
        let run = (1 + random.below(1 << magnitude)).min(sectors - at);
        let range = (at * 512) as usize..((at + run) * 512) as usize;
        match random.below(4) {
            0 | 1 => {}
            2 => {
                for word in bytes[range].chunks_mut(8) {
                    word.copy_from_slice(&random.next().to_le_bytes());
                }
            }
            _ => {
                let byte = 1 + random.below(255) as u8;
                bytes[range].chunks_mut(512).step_by(3).for_each(|sector| sector.fill(byte));
            }
        }
        at += run;
    }
    bytes
}

/// Writes a raw image with holes where `bytes` has aligned zero blocks of 4096 bytes.
pub(crate) fn write_sparse(path: &Path, bytes: &[u8]) {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::create(path).unwrap();
    file.set_len(bytes.len() as u64).unwrap();
    for (i, block) in bytes.chunks(4096).enumerate() {
        if block.iter().any(|&b| b != 0) {
            file.write_all_at(block, i as u64 * 4096).unwrap();
        }
    }
}

/// Bytes of disk that a file occupies.
pub(crate) fn disk_usage(path: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(path).unwrap().blocks() * 512
}

/// The disk of a guest, as QEMU reads it.
pub(crate) fn guest_bytes(image: &Path, format: &str) -> Vec<u8> {
    if format == "raw" {
        return std::fs::read(image).unwrap();
    }
    let directory = tempfile::tempdir().unwrap();
    let raw = directory.path().join("raw");
    qemu_img(&["convert", "-f", format, "-O", "raw", text(image), text(&raw)]);
    std::fs::read(raw).unwrap()
}

/// Panics if the bytes differ, with the place rather than with megabytes of text.
#[track_caller]
pub(crate) fn assert_same_bytes(found: &[u8], expected: &[u8], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}: length");
    if let Some(at) = found.iter().zip(expected).position(|(a, b)| a != b) {
        panic!("{what}: byte {at} is {:#x} instead of {:#x}", found[at], expected[at]);
    }
}
