//! How a job reads and writes a file when nobody says how: past the page cache.

use super::convert::NewTarget;
use super::staging::directory_of;
use crate::CacheMode;
use crate::same_file::new_file_place;
use rustix::fs::{CWD, Mode, OFlags};
use std::fmt;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use zebu_storage::{Access, File, FsKind, LockMode, OpenFlags, cached_bytes, file_system};

/// The way that suits the file system of a target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnaskedWrites {
    /// O_DIRECT, several writes at a time.
    Direct,
    /// The page cache, one write at a time: several would wait for the lock of one file. [`drop_pages`] cleans up.
    OneBuffered,
}

impl fmt::Display for UnaskedWrites {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Direct => "O_DIRECT",
            Self::OneBuffered => "one at a time through the page cache, whose pages are dropped at the end",
        })
    }
}

impl UnaskedWrites {
    /// The way for a target at `path`, which may exist, with clusters of `cluster_size` bytes. O_DIRECT is tried: on what
    /// exists, else on a file without a name in its directory. Clusters of less than a page are better written together.
    pub fn of(path: &Path, cluster_size: u64) -> Self {
        if cluster_size >= 4096 && takes_direct(path) { Self::Direct } else { Self::OneBuffered }
    }

    /// Has a new target, which is made durable at the end, written in this way. The number of requests is the job's.
    pub fn apply(self, target: &mut NewTarget) {
        let cache = match self {
            Self::Direct => CacheMode::None,
            Self::OneBuffered => CacheMode::Unsafe,
        };
        (target.create.cache, target.open.cache) = (cache, cache);
    }
}

/// Whether O_DIRECT is the fast way to read files once: at most half of what they hold is in the page cache. No, where that
/// is not known, and elsewhere than on ext4 and XFS: others keep what they read in caches of their own, or in other pages.
pub fn reads_best_direct<'a>(files: impl IntoIterator<Item = &'a Path>) -> bool {
    let sums = files.into_iter().try_fold((0u64, 0u64), |(cached, held), path| {
        // Whatever has the name by now: nothing waits for the other end of a pipe.
        let how = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = std::fs::File::from(rustix::fs::openat(CWD, path, how, Mode::empty()).ok()?);
        if !matches!(file_system(&file).ok()?, FsKind::Ext4 | FsKind::Xfs) {
            return None;
        }
        let blocks = file.metadata().ok()?.blocks();
        Some((
            cached.saturating_add(cached_bytes(file.as_fd())?),
            held.saturating_add(blocks.saturating_mul(512)),
        ))
    });
    sums.is_some_and(|(cached, held)| cached <= held / 2)
}

fn takes_direct(path: &Path) -> bool {
    let flags = OpenFlags::default().direct(true).lock(LockMode::None);
    let opened = match File::open(path, &flags) {
        Ok(file) => Some(file),
        Err(_) => new_file_place(path)
            .and_then(|place| unnamed(directory_of(&place), &flags.access(Access::ReadWrite))),
    };
    opened.is_some_and(|file| file.is_direct() && file.fs() != FsKind::Tmpfs)
}

/// A file without a name, with O_DIRECT; none where the file system has no such files, or no O_DIRECT.
fn unnamed(directory: &Path, flags: &OpenFlags) -> Option<File> {
    let how = OFlags::TMPFILE | OFlags::RDWR | OFlags::DIRECT | OFlags::CLOEXEC;
    let fd = rustix::fs::openat(CWD, directory, how, Mode::RUSR | Mode::WUSR).ok()?;
    File::from_descriptor(fd, directory, flags).ok()
}

/// Drops the pages of a durable file from the page cache. A file that can't be opened keeps them: nothing depends on it.
pub fn drop_pages(path: &Path) {
    if let Ok(file) = std::fs::File::open(path) {
        let _ = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_clusters_and_files_in_memory_go_through_the_page_cache() {
        let directory = tempfile::tempdir().unwrap();
        let target = directory.path().join("target");
        assert_eq!(UnaskedWrites::of(&target, 512), UnaskedWrites::OneBuffered);
        assert_eq!(
            UnaskedWrites::of(Path::new("/no/such/directory/file"), 65536),
            UnaskedWrites::OneBuffered
        );
        if let Ok(memory) = tempfile::tempdir_in("/dev/shm") {
            assert_eq!(UnaskedWrites::of(&memory.path().join("x"), 65536), UnaskedWrites::OneBuffered);
        }
        // The answer is the same for the file once it exists, and nothing is left of the try.
        let before = UnaskedWrites::of(&target, 65536);
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
        std::fs::write(&target, "x").unwrap();
        assert_eq!(UnaskedWrites::of(&target, 65536), before);
    }
}
