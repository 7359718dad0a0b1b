//! File systems of their own for measurements: a sparse file, a loop device, a mount.

use crate::Outcome;
use crate::process::{find, is_root, output, run};
use std::cell::Cell;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// Which file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Ext4,
    Xfs,
    Btrfs,
}

/// A mounted file system; gone when dropped.
pub(crate) struct Mounted {
    kind: Kind,
    device: String,
    mounted: Cell<bool>,
    scratch: TempDir,
}

impl Mounted {
    /// A fresh file system of `size` bytes in a sparse file under `dir`, through a loop device that does direct I/O.
    /// Needs root. The first write to each place of it is slow: the file below is allocated then.
    pub(crate) fn new(kind: Kind, size: u64, dir: &Path) -> Outcome<Self> {
        Self::over(kind, dir, |file| {
            File::create(file).and_then(|f| f.set_len(size)).map_err(|e| format!("{}: {e}", file.display()))
        })
    }

    /// The same in a file that is written with zeroes first, so that each place takes the same time whoever comes first.
    pub(crate) fn written(kind: Kind, size: u64, dir: &Path) -> Outcome<Self> {
        const PIECE: u64 = 4 << 20;
        Self::over(kind, dir, |file| {
            let mut fill = Command::new(program("dd")?);
            fill.args(["if=/dev/zero", "oflag=direct", "status=none"]).arg(format!("bs={PIECE}"));
            run(fill.arg(format!("count={}", size / PIECE)).arg(format!("of={}", file.display())))
        })
    }

    /// A file system in the file that `make` makes.
    fn over(kind: Kind, dir: &Path, make: impl FnOnce(&Path) -> Outcome) -> Outcome<Self> {
        if !is_root() {
            return Err("a loop device needs root".into());
        }
        let scratch =
            TempDir::with_prefix_in("zebu-fs-", dir).map_err(|e| format!("{}: {e}", dir.display()))?;
        let file = scratch.path().join("disk");
        make(&file)?;
        let mut losetup = Command::new(program("losetup")?);
        let device =
            output(losetup.args(["--find", "--show", "--direct-io=on"]).arg(&file))?.trim().to_owned();
        let this = Self { kind, device, mounted: Cell::new(false), scratch };
        std::fs::create_dir(this.path()).map_err(|e| e.to_string())?;
        this.mount_fresh()?;
        Ok(this)
    }

    /// Makes the file system anew: whoever writes next finds the same places free as the one before did. (The space of a
    /// file that was removed is not free before the journal's next commit, and an allocator goes on elsewhere.)
    pub(crate) fn renew(&self) -> Outcome {
        run(Command::new(program("umount")?).arg(self.path()))?;
        self.mounted.set(false);
        self.mount_fresh()
    }

    fn mount_fresh(&self) -> Outcome {
        let (make, options): (_, &[&str]) = match self.kind {
            // Nothing is left for the kernel to initialise while somebody measures.
            Kind::Ext4 => {
                ("mkfs.ext4", &["-q", "-F", "-E", "nodiscard,lazy_itable_init=0,lazy_journal_init=0"])
            }
            Kind::Xfs => ("mkfs.xfs", &["-q", "-f", "-K"]),
            Kind::Btrfs => ("mkfs.btrfs", &["-q", "-f", "-K"]),
        };
        output(Command::new(program(make)?).args(options).arg(&self.device))?;
        run(Command::new(program("mount")?).arg(&self.device).arg(self.path()))?;
        self.mounted.set(true);
        Ok(())
    }

    /// Its root directory.
    pub(crate) fn path(&self) -> PathBuf {
        self.scratch.path().join("mnt")
    }

    /// Requests that its device has finished since it was made: reads and writes, merged ones counted once
    /// (Documentation/block/stat.rst of Linux).
    pub(crate) fn requests(&self) -> Outcome<(u64, u64)> {
        let name = self.device.trim_start_matches("/dev/");
        let file = format!("/sys/block/{name}/stat");
        let text = std::fs::read_to_string(&file).map_err(|e| format!("{file}: {e}"))?;
        let fields: Vec<u64> = text.split_whitespace().filter_map(|f| f.parse().ok()).collect();
        match (fields.first(), fields.get(4)) {
            (Some(reads), Some(writes)) => Ok((*reads, *writes)),
            _ => Err(format!("{file}: not as documented: {text}")),
        }
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let said = |what: &str, outcome: Outcome<String>| {
            if let Err(error) = outcome {
                eprintln!("note: {what} stays behind: {error}");
            }
        };
        if self.mounted.get() {
            said("the mount", output(Command::new("umount").arg(self.path())));
        }
        said("the loop device", output(Command::new("losetup").args(["--detach", &self.device])));
    }
}

fn program(name: &str) -> Outcome<PathBuf> {
    find(name).ok_or_else(|| format!("{name} is missing: run `cargo xtask setup`"))
}
