//! A file of the operating system: opening it, its facts and attributes.

use crate::align;
use crate::error::{IoError, IoErrorKind, Op};
use crate::file_types::{
    Access, Alignment, Create, FileFacts, FileId, FileKind, FsKind, LockMode, OpenFlags,
};
use crate::lock::{self, FileLock, Holders};
use crate::lock_wait::LockWait;
use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::Path;

/// A descriptor with the locks held through it.
pub(crate) struct OsFile {
    fd: OwnedFd,
    lock: FileLock,
}

impl OsFile {
    /// Opens a regular file or block device.
    pub(crate) fn open(path: &Path, flags: &OpenFlags) -> Result<(FileFacts, Self), IoError> {
        let mode = Mode::RUSR | Mode::WUSR | Mode::RGRP | Mode::ROTH;
        let mut attempts = 0;
        loop {
            let fd = rustix::fs::openat(CWD, path, open_flags(flags), mode)
                .map_err(|errno| open_error(path, flags, errno))?;
            let (facts, file) = Self::from_fd(path, fd, Holders::ThisProcess, flags)?;
            attempts += 1;
            // One that had it locked may have removed it.
            if flags.create != Create::Truncate || file.is_at(path) || attempts == 100 {
                return Ok((facts, file));
            }
        }
    }

    /// Whether `path` still leads to it.
    fn is_at(&self, path: &Path) -> bool {
        let (Ok(own), Ok(there)) = (rustix::fs::fstat(&self.fd), rustix::fs::stat(path)) else {
            return false;
        };
        (own.st_dev, own.st_ino) == (there.st_dev, there.st_ino)
    }

    /// Opens `name` beneath the directory `dir`, whatever links there are on the way.
    pub(crate) fn open_beneath(
        dir: &Path,
        name: &Path,
        flags: &OpenFlags,
    ) -> Result<(FileFacts, Self), IoError> {
        let path = dir.join(name);
        let within = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
        let dir = rustix::fs::openat(
            CWD,
            within,
            OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        )
        .map_err(|errno| IoError::of_file(Op::Open, os(errno), within))?;
        let mode = match flags.create {
            Create::No => Mode::empty(),
            Create::Truncate | Create::New => Mode::RUSR | Mode::WUSR | Mode::RGRP | Mode::ROTH,
        };
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        let fd = loop {
            match rustix::fs::openat2(&dir, name, open_flags(flags), mode, resolve) {
                Ok(fd) => break fd,
                // The kernel could not rule out a race with a rename, or was interrupted.
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(Errno::XDEV) => return Err(IoError::of_file(Op::Open, IoErrorKind::Escapes, path)),
                Err(errno) => return Err(open_error(&path, flags, errno)),
            }
        };
        Self::from_fd(&path, fd, Holders::ThisProcess, flags)
    }

    /// Takes a descriptor that another program opened. `flags.access` is what it must allow; whether it is one for
    /// O_DIRECT is as it was opened.
    pub(crate) fn adopt(path: &Path, fd: OwnedFd, flags: &OpenFlags) -> Result<(FileFacts, Self), IoError> {
        let fail = |errno| IoError::of_file(Op::Open, os(errno), path);
        let status = rustix::fs::fcntl_getfl(&fd).map_err(fail)?;
        let needed = if flags.access == Access::ReadWrite { OFlags::RDWR } else { OFlags::RDONLY };
        let given = status & OFlags::RWMODE;
        if status.intersects(OFlags::APPEND | OFlags::PATH) || (given != needed && given != OFlags::RDWR) {
            return Err(fail(Errno::BADF).with_detail("the descriptor must be open for reading and writing"));
        }
        // Locks of writes that are under way must be nobody else's, or they outlive those.
        let is_locked = flags.access == Access::ReadWrite && flags.lock != LockMode::None;
        let alone = if is_locked { lock::open_alone(fd.as_fd(), status) } else { None };
        let (fd, holders) = alone.map_or((fd, Holders::Others), |alone| (alone, Holders::ThisProcess));
        let flags = OpenFlags { direct: status.contains(OFlags::DIRECT), ..flags.clone() };
        Self::from_fd(path, fd, holders, &flags)
    }

    fn from_fd(
        path: &Path,
        fd: OwnedFd,
        holders: Holders,
        flags: &OpenFlags,
    ) -> Result<(FileFacts, Self), IoError> {
        let fail = |errno| IoError::of_file(Op::Open, os(errno), path);
        let stat = rustix::fs::fstat(&fd).map_err(fail)?;
        let kind = match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => FileKind::Regular,
            FileType::BlockDevice => FileKind::BlockDevice,
            other => {
                let what = match other {
                    FileType::Directory => "it is a directory",
                    FileType::Fifo => "it is a FIFO",
                    FileType::Socket => "it is a socket",
                    FileType::CharacterDevice => "it is a character device",
                    _ => "it is not a file",
                };
                return Err(IoError::of_file(Op::Open, IoErrorKind::NotAFile, path)
                    .with_detail(format!("{what}, not a regular file or block device")));
            }
        };
        // O_NONBLOCK kept the opening of a FIFO from waiting; io_uring would take it as "fail rather than wait".
        let status = rustix::fs::fcntl_getfl(&fd).map_err(fail)?;
        rustix::fs::fcntl_setfl(&fd, status & !OFlags::NONBLOCK).map_err(fail)?;
        if kind == FileKind::BlockDevice && flags.access == Access::ReadWrite && is_read_only_device(&fd) {
            return Err(fail(Errno::ROFS).with_detail("the device is read-only"));
        }
        let lock = FileLock::new(holders);
        lock.set(fd.as_fd(), path, flags.lock, &flags.lock_wait)?;
        let file = Self { fd, lock };
        if flags.create == Create::Truncate && kind == FileKind::Regular && stat.st_size != 0 {
            rustix::fs::ftruncate(&file.fd, 0).map_err(fail)?;
        }
        let fs = match kind {
            FileKind::Regular => file_system(&file.fd).map_err(fail)?,
            FileKind::BlockDevice | FileKind::Simulated | FileKind::Foreign => FsKind::Other,
        };
        let len = match kind {
            FileKind::BlockDevice => rustix::fs::seek(&file.fd, rustix::fs::SeekFrom::End(0)),
            // Asked again: it may have changed while the lock was waited for, or by the cut above.
            _ => rustix::fs::fstat(&file.fd).map(|stat| stat.st_size as u64),
        }
        .map_err(fail)?;
        let alignment = if flags.direct {
            align::of_direct(file.fd.as_fd(), kind).map_err(|detail| {
                IoError::of_file(Op::Open, IoErrorKind::Unsupported, path).with_detail(detail)
            })?
        } else {
            Alignment { memory: 1, offset: 1, length: 1 }
        };
        let id = match kind {
            FileKind::BlockDevice => FileId { dev: stat.st_rdev, ino: stat.st_rdev },
            _ => FileId { dev: stat.st_dev, ino: stat.st_ino },
        };
        let facts = FileFacts {
            path: path.to_owned(),
            id,
            kind,
            fs,
            access: flags.access,
            direct: flags.direct,
            no_flush: flags.no_flush,
            alignment,
            len,
        };
        Ok((facts, file))
    }

    /// All that it has.
    pub(crate) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        std::iter::once(self.fd.as_fd()).chain(self.lock.descriptor())
    }

    pub(crate) fn raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    /// Bytes of disk in use.
    pub(crate) fn disk_usage(&self) -> Result<u64, i32> {
        let stat = rustix::fs::fstat(&self.fd).map_err(Errno::raw_os_error)?;
        Ok(stat.st_blocks as u64 * 512)
    }

    /// Its length in bytes, if the system tells it.
    pub(crate) fn len(&self) -> Option<u64> {
        // Also that of a block device. The file's position is used by nobody.
        rustix::fs::seek(&self.fd, rustix::fs::SeekFrom::End(0)).ok()
    }

    pub(crate) fn set_lock(&self, path: &Path, mode: LockMode) -> Result<(), IoError> {
        self.lock.set(self.fd.as_fd(), path, mode, &LockWait::default())
    }

    pub(crate) fn unlock(&self) -> Result<(), i32> {
        self.lock.release(self.fd.as_fd())
    }

    fn attributes(&self) -> Result<FsXattr, i32> {
        let mut attributes = MaybeUninit::<FsXattr>::zeroed();
        // SAFETY: the request writes one `fsxattr`, whose layout `FsXattr` has.
        check(unsafe { libc::ioctl(self.raw_fd(), FS_IOC_FSGETXATTR, attributes.as_mut_ptr()) })?;
        // SAFETY: all-zero bytes are valid, and so is what the kernel wrote: plain integers.
        Ok(unsafe { attributes.assume_init() })
    }

    /// The extent size hint in bytes (ioctl_xfs_fsgetxattr(2)), if there is one.
    pub(crate) fn extent_size_hint(&self) -> Option<u32> {
        let attributes = self.attributes().ok()?;
        let is_set = attributes.xflags & FS_XFLAG_EXTSIZE != 0 && attributes.extsize != 0;
        is_set.then_some(attributes.extsize)
    }

    /// Sets the extent size hint, or takes it away.
    pub(crate) fn set_extent_size_hint(&self, bytes: u32) -> Result<(), i32> {
        let mut attributes = self.attributes()?;
        attributes.extsize = bytes;
        if bytes == 0 {
            attributes.xflags &= !FS_XFLAG_EXTSIZE;
        } else {
            attributes.xflags |= FS_XFLAG_EXTSIZE;
        }
        // SAFETY: the request reads one `fsxattr`.
        check(unsafe { libc::ioctl(self.raw_fd(), FS_IOC_FSSETXATTR, &raw const attributes) })
    }

    /// Sets the hint how many bytes are set aside at once for copies of shared blocks that are written.
    pub(crate) fn set_cow_extent_size_hint(&self, bytes: u32) -> Result<(), i32> {
        let mut attributes = self.attributes()?;
        attributes.cowextsize = bytes;
        attributes.xflags |= FS_XFLAG_COWEXTSIZE;
        // SAFETY: the request reads one `fsxattr`.
        check(unsafe { libc::ioctl(self.raw_fd(), FS_IOC_FSSETXATTR, &raw const attributes) })
    }

    /// Sets the NOCOW attribute (ioctl_iflags(2)).
    pub(crate) fn set_nocow(&self) -> Result<(), i32> {
        let flags = rustix::fs::ioctl_getflags(&self.fd).map_err(Errno::raw_os_error)?;
        rustix::fs::ioctl_setflags(&self.fd, flags | rustix::fs::IFlags::NOCOW).map_err(Errno::raw_os_error)
    }
}

impl AsFd for OsFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for OsFile {
    fn drop(&mut self) {
        // A duplicate in a ring may keep the open file alive a little longer; the locks, if they are its, end now.
        let _ = self.lock.release(self.fd.as_fd());
    }
}

/// `struct fsxattr` of linux/fs.h.
#[repr(C)]
struct FsXattr {
    xflags: u32,
    extsize: u32,
    nextents: u32,
    projid: u32,
    cowextsize: u32,
    pad: [u8; 8],
}

const FS_XFLAG_EXTSIZE: u32 = 0x800;
const FS_XFLAG_COWEXTSIZE: u32 = 0x10000;
const FS_IOC_FSGETXATTR: libc::Ioctl = libc::_IOR::<FsXattr>(b'X' as u32, 31);
const FS_IOC_FSSETXATTR: libc::Ioctl = libc::_IOW::<FsXattr>(b'X' as u32, 32);
const BLKROGET: libc::Ioctl = libc::_IO(0x12, 94);

/// The result of a system call that returns 0 or -1 and sets errno.
fn check(result: c_int) -> Result<(), i32> {
    if result == 0 {
        Ok(())
    } else {
        Err(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
    }
}

fn open_flags(flags: &OpenFlags) -> OFlags {
    // O_NONBLOCK: the opening of a FIFO or a terminal must not wait for its other side.
    let mut oflags = OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
    oflags |= match flags.access {
        Access::ReadOnly => OFlags::RDONLY,
        Access::ReadWrite => OFlags::RDWR,
    };
    oflags |= match flags.create {
        Create::No => OFlags::empty(),
        // Cut by hand, after the file is locked.
        Create::Truncate => OFlags::CREATE,
        Create::New => OFlags::CREATE | OFlags::EXCL,
    };
    if flags.direct {
        oflags |= OFlags::DIRECT;
    }
    oflags
}

fn os(errno: Errno) -> IoErrorKind {
    IoErrorKind::Os(errno.raw_os_error())
}

fn open_error(path: &Path, flags: &OpenFlags, errno: Errno) -> IoError {
    // Opening a socket fails so, and a FIFO for writing without a reader.
    if errno == Errno::NXIO {
        return IoError::of_file(Op::Open, IoErrorKind::NotAFile, path)
            .with_detail("it is a socket, a FIFO or an absent device, not a regular file or block device");
    }
    // Opening a directory for writing.
    if errno == Errno::ISDIR {
        return IoError::of_file(Op::Open, IoErrorKind::NotAFile, path)
            .with_detail("it is a directory, not a regular file or block device");
    }
    if errno == Errno::INVAL && flags.direct {
        return IoError::of_file(Op::Open, IoErrorKind::Unsupported, path)
            .with_detail("its file system does not support O_DIRECT; open it with buffered I/O");
    }
    IoError::of_file(Op::Open, os(errno), path)
}

fn is_read_only_device(fd: &OwnedFd) -> bool {
    let mut read_only: c_int = 0;
    // SAFETY: the request writes one int.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), BLKROGET, &raw mut read_only) };
    result == 0 && read_only != 0
}

/// The file system that a file is on.
///
/// # Errors
/// Those of fstatfs(2).
pub fn file_system(fd: impl AsFd) -> rustix::io::Result<FsKind> {
    const EXT4: i64 = 0xEF53;
    const XFS: i64 = 0x5846_5342;
    const BTRFS: i64 = 0x9123_683E;
    const TMPFS: i64 = 0x0102_1994;
    // The type of `f_type` differs between architectures.
    #[allow(clippy::useless_conversion, clippy::unnecessary_cast)]
    let kind = rustix::fs::fstatfs(fd)?.f_type as i64;
    Ok(match kind {
        EXT4 => FsKind::Ext4,
        XFS => FsKind::Xfs,
        BTRFS => FsKind::Btrfs,
        TMPFS => FsKind::Tmpfs,
        _ => FsKind::Other,
    })
}
