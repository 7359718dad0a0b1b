//! Block devices of their own for tests. Need root.

use crate::program::{finish, is_root};
use crate::scratch::Scratch;
use std::path::Path;
use std::process::Command;

/// A loop device over a file; gone when dropped.
#[derive(Debug)]
pub struct LoopDevice(String);

impl LoopDevice {
    /// `None` where loop devices are not allowed, with a note.
    pub fn over(file: &Path) -> Option<Self> {
        Self::set_up(file, &[])
    }

    /// One whose requests go past the page cache to the file, each by itself.
    pub fn directly_over(file: &Path) -> Option<Self> {
        Self::set_up(file, &["--direct-io=on"])
    }

    fn set_up(file: &Path, options: &[&str]) -> Option<Self> {
        if !is_root() {
            eprintln!("skipped: a loop device needs root");
            return None;
        }
        let mut losetup = Command::new("losetup");
        losetup.args(["--find", "--show"]).args(options).arg(file);
        let found = finish(losetup);
        if found.code != Some(0) {
            eprintln!("skipped: {found}");
            return None;
        }
        Some(Self(found.stdout.trim().to_owned()))
    }

    /// Its file name.
    pub fn name(&self) -> &str {
        &self.0
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let mut losetup = Command::new("losetup");
        losetup.args(["--detach", &self.0]);
        finish(losetup);
    }
}

/// A device for an image without a file around it.
#[derive(Debug)]
pub struct Device {
    // Dropped before the file goes.
    device: LoopDevice,
    scratch: Scratch,
}

impl Device {
    /// One of `bytes`, a multiple of 512, that holds no zeroes; `None` where loop devices are not allowed, with a note.
    ///
    /// # Panics
    /// If the scratch folder can't be written.
    pub fn used(bytes: u64) -> Option<Self> {
        let scratch = Scratch::new("device");
        let file = scratch.file("disk");
        std::fs::write(&file, vec![0x5a; bytes as usize]).expect("scratch is writable");
        LoopDevice::over(&file).map(|device| Self { device, scratch })
    }

    /// Its file name.
    pub fn name(&self) -> &str {
        self.device.name()
    }

    /// A folder for other files.
    pub fn dir(&self) -> &Path {
        self.scratch.path()
    }
}
