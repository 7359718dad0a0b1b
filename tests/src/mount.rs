//! File systems of their own for tests that need a small or a particular one. Needs root.

use crate::device::LoopDevice;
use crate::patience::wait_for;
use crate::program::{find, finish, is_root};
use crate::scratch::Scratch;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A mounted file system; gone when dropped.
#[derive(Debug)]
pub struct Mounted {
    // Dropped before the file goes.
    device: Option<LoopDevice>,
    scratch: Scratch,
}

impl Mounted {
    /// A tmpfs of `bytes`; `None` where mounting is not allowed, with a note.
    pub fn tmpfs(bytes: u64) -> Option<Self> {
        let this = Self { scratch: Scratch::new("tmpfs"), device: None };
        let options = format!("size={bytes}");
        this.mount(&["-t", "tmpfs", "-o", &options, "none"]).then_some(this)
    }

    /// A file system made by `mkfs` (such as `mkfs.xfs`) in a sparse file of `bytes`, on a loop device.
    ///
    /// # Panics
    /// If `mkfs` fails.
    pub fn on_loop(mkfs: &str, bytes: u64) -> Option<Self> {
        let scratch = Scratch::new("loop");
        let file = scratch.file("disk");
        std::fs::File::create(&file).and_then(|f| f.set_len(bytes)).expect("scratch is writable");
        let program =
            find(mkfs).unwrap_or_else(|| panic!("{mkfs} is missing: `cargo xtask setup` installs it"));
        let mut command = Command::new(program);
        finish({
            command.args(["-q"]).arg(&file);
            command
        })
        .ok();
        let this = Self { device: Some(LoopDevice::over(&file)?), scratch };
        let is_mounted = this.device.as_ref().is_some_and(|device| this.mount(&[device.name()]));
        is_mounted.then_some(this)
    }

    /// Its root directory.
    pub fn path(&self) -> PathBuf {
        self.scratch.file("mnt")
    }

    /// Changes what may be done with it: `ro` or `rw`.
    ///
    /// # Panics
    /// If that fails.
    pub fn remount(&self, mode: &str) {
        let mut command = Command::new("mount");
        command.args(["-o", &format!("remount,{mode}")]).arg(self.path());
        finish(command).ok();
    }

    /// Unmounts it and mounts it again: only what reached the disk is there then.
    ///
    /// # Panics
    /// If something in it stays open, or it has no disk.
    pub fn mount_again(&self) {
        let device = self.device.as_ref().expect("a file system on a disk");
        let run = |program: &str, args: &[&str]| {
            let mut command = Command::new(program);
            command.args(args).arg(self.path());
            finish(command)
        };
        // The kernel may hold the files of a ring for a while.
        wait_for("unmounting", || (run("umount", &[]).code == Some(0)).then_some(()));
        run("mount", &[device.name()]).ok();
    }

    fn mount(&self, what: &[&str]) -> bool {
        if !is_root() {
            eprintln!("skipped: mounting needs root");
            return false;
        }
        std::fs::create_dir(self.path()).expect("scratch is writable");
        let mut command = Command::new("mount");
        let out = finish({
            command.args(what).arg(self.path());
            command
        });
        if out.code != Some(0) {
            eprintln!("skipped: {out}");
        }
        out.code == Some(0)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if is_mount_point(&self.path()) {
            let mut umount = Command::new("umount");
            umount.arg("--lazy").arg(self.path());
            finish(umount);
        }
    }
}

/// Another device number than the directory above.
fn is_mount_point(path: &Path) -> bool {
    let device = |p: &Path| std::fs::metadata(p).map(|m| std::os::unix::fs::MetadataExt::dev(&m)).ok();
    device(path).is_some_and(|own| path.parent().and_then(device) != Some(own))
}
