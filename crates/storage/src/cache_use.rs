//! How the bytes of a file go past the page cache, and which ways a file has.

use crate::align;
use crate::error::{IoError, IoErrorKind, Op};
use crate::file::{Capability, File};
use crate::file_types::{FileKind, FsKind, OpenFlags};
use crate::os_file::file_system;
use rustix::fs::{FileType, OFlags};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

/// The way that a caller asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum CacheChoice {
    /// The first that the file has of [`CacheUse::Direct`], [`CacheUse::DontCache`], [`CacheUse::DropBehind`].
    #[default]
    Past,
    /// [`CacheUse::Direct`], or an error.
    Direct,
    /// [`CacheUse::DontCache`], else [`CacheUse::DropBehind`].
    DontCache,
    /// [`CacheUse::Kept`].
    Kept,
}

/// The way that the bytes of a file take, and what it leaves in the page cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum CacheUse {
    /// O_DIRECT: they are never in the page cache.
    Direct,
    /// `RWF_DONTCACHE` (Linux 6.14): their pages go when they are written.
    DontCache,
    /// Their pages are dropped: of reads at once, of writes when they are written back, which begins soon.
    DropBehind,
    /// The page cache keeps them.
    Kept,
    /// The file system has no other place for them (tmpfs).
    Memory,
}

impl CacheUse {
    /// The name as in `-t`, where there is one.
    pub fn name(self) -> &'static str {
        match self {
            Self::Direct => "none",
            Self::DontCache => "dontcache",
            Self::DropBehind => "drop-behind",
            Self::Kept => "writeback",
            Self::Memory => "memory",
        }
    }
}

impl File {
    /// Takes a descriptor that another program opened, as [`File::from_descriptor`], and has its bytes go the way that
    /// is asked for. O_DIRECT is set or cleared on the open file itself, so other holders of the descriptor share it.
    ///
    /// # Errors
    /// As [`File::from_descriptor`]; `Unsupported`: [`CacheChoice::Direct`] or [`CacheChoice::DontCache`] for a file that
    /// has no such way.
    pub fn from_descriptor_past_cache(
        fd: OwnedFd,
        path: &Path,
        flags: &OpenFlags,
        choice: CacheChoice,
    ) -> Result<(Self, CacheUse), IoError> {
        let unsupported =
            |detail: &str| IoError::of_file(Op::Open, IoErrorKind::Unsupported, path).with_detail(detail);
        let has_memory_only = is_in_memory(fd.as_fd());
        if has_memory_only && matches!(choice, CacheChoice::Direct | CacheChoice::DontCache) {
            return Err(unsupported(
                "its file system holds files in the page cache alone; leave the choice out, or choose writeback",
            ));
        }
        let wants_direct = !has_memory_only && matches!(choice, CacheChoice::Past | CacheChoice::Direct);
        let is_direct = set_direct(fd.as_fd(), wants_direct);
        if choice == CacheChoice::Direct && !is_direct {
            return Err(unsupported("its file system does not support O_DIRECT; choose dontcache"));
        }
        let file = Self::from_descriptor(fd, path, flags)?;
        let taken = match choice {
            _ if has_memory_only => CacheUse::Memory,
            _ if is_direct => CacheUse::Direct,
            CacheChoice::Kept => CacheUse::Kept,
            CacheChoice::Past | CacheChoice::Direct | CacheChoice::DontCache => {
                file.drop_written_pages();
                if file.can_be_uncached() { CacheUse::DontCache } else { CacheUse::DropBehind }
            }
        };
        Ok((file, taken))
    }

    /// The way of reads by a handle of [`crate::Worker::reading_uncached`].
    pub fn uncached_reads(&self) -> CacheUse {
        match self.os() {
            _ if self.is_direct() => CacheUse::Direct,
            Some(os) if is_in_memory(os.as_fd()) => CacheUse::Memory,
            _ if self.can_be_uncached() => CacheUse::DontCache,
            _ => CacheUse::DropBehind,
        }
    }

    /// Whether the file takes requests with `RWF_DONTCACHE`. The first time, the kernel is asked by a read past the end.
    pub(crate) fn can_be_uncached(&self) -> bool {
        let Some(os) = self.os().filter(|_| !self.is_direct()) else { return false };
        self.can(Capability::DontCache) && self.takes_dontcache(|| takes_dontcache(os.as_fd()))
    }
}

/// Sets or clears O_DIRECT where that works; whether it is set afterwards.
fn set_direct(fd: BorrowedFd<'_>, wanted: bool) -> bool {
    let Ok(status) = rustix::fs::fcntl_getfl(fd) else { return false };
    let set = |direct| rustix::fs::fcntl_setfl(fd, direct).is_ok();
    if !wanted {
        return status.contains(OFlags::DIRECT) && !set(status - OFlags::DIRECT);
    }
    if !status.contains(OFlags::DIRECT) && !set(status | OFlags::DIRECT) {
        return false;
    }
    let kind = match rustix::fs::fstat(fd).map(|stat| FileType::from_raw_mode(stat.st_mode)) {
        Ok(FileType::BlockDevice) => FileKind::BlockDevice,
        _ => FileKind::Regular,
    };
    // Some file systems take the flag and then no request.
    align::of_direct(fd, kind).is_ok() || !set(status - OFlags::DIRECT)
}

/// Whether the page cache is all that the file's bytes have.
fn is_in_memory(fd: BorrowedFd<'_>) -> bool {
    let is_file = rustix::fs::fstat(fd).map(|stat| FileType::from_raw_mode(stat.st_mode));
    is_file == Ok(FileType::RegularFile) && file_system(fd) == Ok(FsKind::Tmpfs)
}

/// Bytes of a file that are in the page cache. `None` where the kernel does not say: before Linux 6.5, and of a file that
/// the user can't write.
pub fn cached_bytes(fd: BorrowedFd<'_>) -> Option<u64> {
    /// `struct cachestat_range` of <linux/mman.h>; a length of 0 is up to the end.
    #[repr(C)]
    struct Asked {
        offset: u64,
        len: u64,
    }
    /// `struct cachestat`.
    #[repr(C)]
    #[derive(Default)]
    struct Found {
        cached: u64,
        dirty: u64,
        in_writeback: u64,
        evicted: u64,
        recently_evicted: u64,
    }
    /// The same on all architectures of Linux.
    const SYS_CACHESTAT: libc::c_long = 451;
    let (asked, mut found) = (Asked { offset: 0, len: 0 }, Found::default());
    // SAFETY: both structures are as the kernel knows them, and live through the call.
    let said = unsafe {
        libc::syscall(SYS_CACHESTAT, fd.as_raw_fd(), &raw const asked, &raw mut found, 0 as libc::c_uint)
    };
    (said == 0).then(|| found.cached.saturating_mul(rustix::param::page_size() as u64))
}

/// Asks by a read of one byte where no file has one.
fn takes_dontcache(fd: BorrowedFd<'_>) -> bool {
    const PAST_THE_END: libc::off_t = 1 << 60;
    let mut byte = 0u8;
    let vector = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    // SAFETY: the vector is of one byte, which lives through the call.
    unsafe { libc::preadv2(fd.as_raw_fd(), &raw const vector, 1, PAST_THE_END, libc::RWF_DONTCACHE) >= 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buf::IoBuf;
    use crate::file_types::{Access, LockMode};
    use crate::worker::Worker;
    use crate::worker_types::WorkerConfig;

    fn adopt(dir: &Path, choice: CacheChoice) -> Result<(File, CacheUse), IoError> {
        let path = dir.join("file");
        let file = std::fs::File::options().read(true).write(true).create(true).truncate(false).open(&path);
        let flags = OpenFlags { access: Access::ReadWrite, lock: LockMode::None, ..OpenFlags::default() };
        File::from_descriptor_past_cache(file.unwrap().into(), &path, &flags, choice)
    }

    #[test]
    fn a_file_in_memory_says_so_and_refuses_what_it_can_not() {
        let Ok(dir) = tempfile::tempdir_in("/dev/shm") else {
            eprintln!("skipped: there is no /dev/shm");
            return;
        };
        let opened = std::fs::File::open(dir.path()).unwrap();
        if file_system(opened.as_fd()) != Ok(FsKind::Tmpfs) {
            eprintln!("skipped: /dev/shm is no tmpfs");
            return;
        }
        assert_eq!(adopt(dir.path(), CacheChoice::Past).unwrap().1, CacheUse::Memory);
        for choice in [CacheChoice::Direct, CacheChoice::DontCache] {
            let error = adopt(dir.path(), choice).unwrap_err();
            assert!(error.to_string().contains("writeback"), "{error}");
        }
    }

    /// Pages of a file in the page cache.
    fn pages(path: &Path) -> u64 {
        let out = std::process::Command::new("fincore").args(["-n", "-o", "PAGES"]).arg(path).output();
        String::from_utf8_lossy(&out.expect("util-linux is installed").stdout).trim().parse().unwrap_or(0)
    }

    #[test]
    fn what_is_in_the_page_cache_is_counted() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, vec![7; 3 << 20]).unwrap();
        let file = std::fs::File::open(&path).unwrap();
        let Some(found) = cached_bytes(file.as_fd()) else {
            eprintln!("skipped: the kernel does not say");
            return;
        };
        assert_eq!((found, pages(&path)), (3 << 20, (3 << 20) / rustix::param::page_size() as u64));
        file.sync_all().unwrap();
        if file_system(file.as_fd()) != Ok(FsKind::Tmpfs) {
            crate::write_behind::drop_pages(file.as_fd(), 0, 0);
            assert_eq!(cached_bytes(file.as_fd()), Some(0));
        }
    }

    /// As on kernels without `RWF_DONTCACHE`.
    #[test]
    fn what_is_written_behind_does_not_stay() {
        let dir = tempfile::tempdir().unwrap();
        let (file, taken) = adopt(dir.path(), CacheChoice::Past).unwrap();
        if taken == CacheUse::Memory {
            eprintln!("skipped: temporary files are in memory");
            return;
        }
        drop(file);
        let (file, _) = adopt(dir.path(), CacheChoice::DontCache).unwrap();
        file.refuse(Capability::DontCache);
        let path = dir.path().join("file");
        let worker = Worker::new(&WorkerConfig::default()).unwrap();
        worker.block_on(async {
            for piece in 0..40 {
                let mut buf = IoBuf::zeroed(1 << 20);
                buf.as_mut_slice().fill(7);
                worker.write(&file, piece << 20, buf.into()).await.0.unwrap();
            }
            let before = pages(&path);
            assert!(before <= 24 * 256, "{before} pages are more than three batches");
            worker.flush(&file).await.unwrap();
            assert_eq!(pages(&path), 0);
            let (read, bufs) =
                worker.reading_uncached().read(&file, 5 << 20, IoBuf::zeroed(1 << 20).into()).await;
            read.unwrap();
            assert!(!bufs.is_zero());
            assert!(pages(&path) < 256, "what was read, apart from what the kernel read ahead");
        });
    }

    #[test]
    fn a_descriptor_is_made_direct_and_cleared_again() {
        let dir = tempfile::tempdir().unwrap();
        let (file, taken) = adopt(dir.path(), CacheChoice::Past).unwrap();
        if taken == CacheUse::Memory {
            eprintln!("skipped: temporary files are in memory");
            return;
        }
        assert_eq!(file.is_direct(), taken == CacheUse::Direct);
        let (file, taken) = adopt(dir.path(), CacheChoice::Kept).unwrap();
        assert_eq!((file.is_direct(), taken), (false, CacheUse::Kept));
        let (file, taken) = adopt(dir.path(), CacheChoice::DontCache).unwrap();
        assert!(!file.is_direct() && matches!(taken, CacheUse::DontCache | CacheUse::DropBehind));
    }
}
