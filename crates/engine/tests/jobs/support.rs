//! What the tests of jobs share: QEMU's tools as the oracle, and images to work on.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use zebu::storage::{Worker, WorkerConfig};

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
