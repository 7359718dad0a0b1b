//! File systems of their own for tests, which only root can mount.

use std::path::{Path, PathBuf};
use std::process::Command;

/// A file system that is unmounted at the end.
pub(crate) struct Mounted {
    directory: tempfile::TempDir,
}

fn run(program: &str, args: &[&str]) -> bool {
    Command::new(program).args(args).output().is_ok_and(|output| output.status.success())
}

impl Mounted {
    fn mount(what: &str, kind: &str, options: &str) -> Option<Self> {
        let directory = tempfile::tempdir().unwrap();
        let at = directory.path().to_str().unwrap();
        if run("mount", &["-t", kind, "-o", options, what, at]) {
            return Some(Self { directory });
        }
        eprintln!("not tested: mounting {kind} needs root");
        None
    }

    /// A tmpfs of so many bytes.
    pub(crate) fn tmpfs(bytes: u64) -> Option<Self> {
        Self::mount("tmpfs", "tmpfs", &format!("size={bytes}"))
    }

    /// An XFS with reflinks, in a file of so many bytes (at least 300 MiB).
    pub(crate) fn xfs(image: &Path, bytes: u64) -> Option<Self> {
        std::fs::File::create(image).unwrap().set_len(bytes).unwrap();
        let name = image.to_str().unwrap();
        if !run("mkfs.xfs", &["-q", "-m", "reflink=1", name]) {
            eprintln!("not tested: mkfs.xfs (package xfsprogs) does not run");
            return None;
        }
        Self::mount(name, "xfs", "loop")
    }

    /// A btrfs in a file of so many bytes (at least 256 MiB).
    pub(crate) fn btrfs(image: &Path, bytes: u64) -> Option<Self> {
        std::fs::File::create(image).unwrap().set_len(bytes).unwrap();
        if !run("mkfs.btrfs", &["-q", image.to_str().unwrap()]) {
            eprintln!("not tested: mkfs.btrfs (package btrfs-progs) does not run");
            return None;
        }
        Self::btrfs_again(image)
    }

    /// One that was made before.
    pub(crate) fn btrfs_again(image: &Path) -> Option<Self> {
        Self::mount(image.to_str().unwrap(), "btrfs", "loop")
    }

    /// A path in it.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Names of all files in it, sorted.
    pub(crate) fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = std::fs::read_dir(self.directory.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    /// Bytes in use once everything is written.
    pub(crate) fn used(&self) -> u64 {
        assert!(run("sync", &["-f", self.directory.path().to_str().unwrap()]));
        let output =
            Command::new("df").args(["-B1", "--output=used"]).arg(self.directory.path()).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        text.lines().nth(1).unwrap().trim().parse().unwrap()
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        run("umount", &["-l", self.directory.path().to_str().unwrap()]);
    }
}

/// A block device over a file, detached at the end.
pub(crate) struct LoopDevice(PathBuf);

impl LoopDevice {
    /// A device of so many bytes (a multiple of 512) over a new file.
    pub(crate) fn new(file: &Path, bytes: u64) -> Option<Self> {
        std::fs::File::create(file).unwrap().set_len(bytes).unwrap();
        let output = Command::new("losetup").args(["--find", "--show"]).arg(file).output().ok()?;
        if output.status.success() {
            let name = String::from_utf8(output.stdout).unwrap();
            return Some(Self(name.trim().into()));
        }
        eprintln!("not tested: loop devices need root");
        None
    }

    /// Its name.
    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        run("losetup", &["--detach", self.0.to_str().unwrap()]);
    }
}
