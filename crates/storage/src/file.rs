//! Files and block devices.

use crate::IoError;
use std::path::Path;
use std::sync::Arc;

/// Reading only, or reading and writing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// O_RDONLY.
    ReadOnly,
    /// O_RDWR.
    ReadWrite,
}

/// Whether a file is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Create {
    /// It must exist.
    No,
    /// Made if it is not there, else cut to 0 bytes (after it was locked), mode 0644.
    Truncate,
    /// Made; an existing file is an error.
    New,
}

/// Who else may use the file meanwhile (QEMU's lock bytes).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LockMode {
    /// No lock taken or tested (`-U`; reading only).
    None,
    /// Other readers may come, no writer: holds consistent-read; does not share write, resize.
    Read,
    /// Nothing but other `info`-like openers without I/O: does not share write, resize; holds nothing.
    Inspect,
    /// The only user: holds consistent-read, write, resize; does not share write, resize.
    Write,
}

/// How a file is opened.
#[derive(Debug, Clone)]
pub struct OpenFlags {
    /// Reading only or both.
    pub access: Access,
    /// O_DIRECT.
    pub direct: bool,
    /// Make it?
    pub create: Create,
    /// Lock to take.
    pub lock: LockMode,
    /// `cache=unsafe`: flushes do nothing.
    pub no_flush: bool,
}

impl Default for OpenFlags {
    fn default() -> Self {
        Self {
            access: Access::ReadOnly,
            direct: false,
            create: Create::No,
            lock: LockMode::Read,
            no_flush: false,
        }
    }
}

/// What a [`File`] is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileKind {
    /// A regular file.
    Regular,
    /// A block device.
    BlockDevice,
    /// A simulated file.
    Simulated,
}

/// The file system below, as far as it matters for a choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FsKind {
    /// ext2, ext3, ext4.
    Ext4,
    /// XFS.
    Xfs,
    /// btrfs.
    Btrfs,
    /// tmpfs.
    Tmpfs,
    /// Any other.
    Other,
}

/// What the kernel asks of requests. All three are powers of two, in bytes; 1 without O_DIRECT.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Alignment {
    /// Of addresses in memory.
    pub memory: u32,
    /// Of offsets in the file.
    pub offset: u32,
    /// Of lengths.
    pub length: u32,
}

/// Identity of the file behind a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FileId {
    /// Device number.
    pub dev: u64,
    /// Inode number (for a block device: its own device number).
    pub ino: u64,
}

/// A run of data or hole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileExtent {
    /// Offset of the run in bytes: the offset asked for.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// Whether the run is a hole (reads as zero).
    pub hole: bool,
}

/// An open file, shared by all workers.
#[derive(Clone)]
pub struct File {
    _inner: Arc<()>,
}

impl File {
    /// Opens `path`: regular files and block devices only.
    pub fn open(path: &Path, flags: &OpenFlags) -> Result<Self, IoError> {
        todo!("{path:?} {flags:?}")
    }
    /// Opens `name`, which an image named, beneath the directory `dir` (openat2, `RESOLVE_BENEATH`,
    /// `RESOLVE_NO_MAGICLINKS`): a name that leads outside fails with [`crate::IoErrorKind::Escapes`].
    pub fn open_beneath(dir: &Path, name: &Path, flags: &OpenFlags) -> Result<Self, IoError> {
        todo!("{dir:?} {name:?} {flags:?}")
    }
    /// The name it was opened by.
    pub fn path(&self) -> &Path {
        todo!()
    }
    /// Identity.
    pub fn id(&self) -> FileId {
        todo!()
    }
    /// What it is.
    pub fn kind(&self) -> FileKind {
        todo!()
    }
    /// The file system.
    pub fn fs(&self) -> FsKind {
        todo!()
    }
    /// Whether it was opened with O_DIRECT.
    pub fn is_direct(&self) -> bool {
        todo!()
    }
    /// Whether it was opened for writing.
    pub fn is_writable(&self) -> bool {
        todo!()
    }
    /// Length in bytes as last known to this process (a write past the end and `set_len` raise it).
    pub fn len(&self) -> u64 {
        todo!()
    }
    /// Whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Bytes of disk in use (`st_blocks * 512`).
    pub fn disk_usage(&self) -> Result<u64, IoError> {
        todo!()
    }
    /// What requests must keep to.
    pub fn alignment(&self) -> Alignment {
        todo!()
    }
    /// Changes the lock (upgrade or downgrade), atomically towards other openers.
    pub fn set_lock(&self, mode: LockMode) -> Result<(), IoError> {
        todo!("{mode:?}")
    }
    /// Releases all locks at once (at an explicit close; a copy of the descriptor in a ring may live on).
    pub fn unlock(&self) -> Result<(), IoError> {
        todo!()
    }
    /// Whether punching, zero-range, allocate are believed to work (until the kernel said no).
    pub fn can_punch(&self) -> bool {
        todo!()
    }
    /// See [`File::can_punch`].
    pub fn can_zero_range(&self) -> bool {
        todo!()
    }
    /// See [`File::can_punch`].
    pub fn can_allocate(&self) -> bool {
        todo!()
    }
    /// Sets the XFS extent size hint in bytes; `Unsupported` elsewhere.
    pub fn set_extent_size_hint(&self, bytes: u32) -> Result<(), IoError> {
        todo!("{bytes}")
    }
    /// Sets btrfs' NOCOW attribute (on an empty file); `Unsupported` elsewhere.
    pub fn set_nocow(&self) -> Result<(), IoError> {
        todo!()
    }
}
