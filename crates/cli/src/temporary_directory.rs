//! Places for temporary files, to which nobody else has access.

use crate::failure::Failure;
use rustix::fs::{Mode, OFlags, mkdir, open, unlink};
use rustix::io::Errno;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

/// Names that are tried for a directory.
const MOST_NAMES: u32 = 100;

/// A directory that is removed, with what is in it, when this value is dropped.
pub(crate) struct TemporaryDirectory(PathBuf);

impl TemporaryDirectory {
    /// Makes one in `TMPDIR`, or in `/var/tmp`.
    ///
    /// # Errors
    /// There is no place for it.
    pub(crate) fn new() -> Result<Self, Failure> {
        let parent = std::env::var_os("TMPDIR").map_or_else(|| PathBuf::from("/var/tmp"), PathBuf::from);
        let names = (0..MOST_NAMES).map(|number| format!(".zebu-{}-{number}", std::process::id()));
        let mut last = Errno::EXIST;
        for directory in names.map(|name| parent.join(name)) {
            match mkdir(&directory, Mode::RWXU) {
                Ok(()) => return Ok(Self(directory)),
                Err(error) => last = error,
            }
            if last != Errno::EXIST {
                break;
            }
        }
        Err(Failure::new(format!("Could not make a directory in '{}': {last}", parent.display())))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

/// Makes an empty file without a name: its space is given back when nobody has it open any more, however the program ends.
///
/// # Errors
/// There is no place for it.
pub(crate) fn unnamed_file() -> Result<OwnedFd, Failure> {
    let directory = TemporaryDirectory::new()?;
    let place = directory.path().join("file");
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    open(&place, flags, Mode::RUSR | Mode::WUSR).and_then(|file| unlink(&place).map(|()| file)).map_err(
        |error| Failure::new(format!("Could not make a file in '{}': {error}", directory.path().display())),
    )
}

impl Drop for TemporaryDirectory {
    fn drop(&mut self) {
        // What can't be removed stays: there is nobody to be told.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
