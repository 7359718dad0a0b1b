//! How a file is opened and what is known about one: plain values.

use crate::lock_wait::LockWait;
use std::path::PathBuf;

/// Reading only, or reading and writing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Access {
    /// Nothing is written, an image's header included (O_RDONLY).
    #[default]
    ReadOnly,
    /// Data and metadata may be written (O_RDWR).
    ReadWrite,
}

/// Whether a file is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Create {
    /// It must exist.
    No,
    /// Made if it is not there, else cut to 0 bytes (after it was locked), mode 0644.
    Truncate,
    /// Made; an existing file is an error.
    New,
}

/// The users that are allowed beside this one (QEMU's lock bytes).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
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
#[non_exhaustive]
pub struct OpenFlags {
    /// Reading only or both.
    pub access: Access,
    /// O_DIRECT.
    pub direct: bool,
    /// Make it?
    pub create: Create,
    /// Lock to take.
    pub lock: LockMode,
    /// Patience with the writes of a program that had it locked and is gone.
    pub lock_wait: LockWait,
    /// `cache=unsafe`: flushes do nothing.
    pub no_flush: bool,
}

crate::option_setters!(OpenFlags {
    access: Access,
    direct: bool,
    create: Create,
    lock: LockMode,
    lock_wait: LockWait,
    no_flush: bool,
});

impl Default for OpenFlags {
    fn default() -> Self {
        Self {
            access: Access::ReadOnly,
            direct: false,
            create: Create::No,
            lock: LockMode::Read,
            lock_wait: LockWait::default(),
            no_flush: false,
        }
    }
}

/// The kind of a [`crate::File`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum FileKind {
    /// A regular file.
    Regular,
    /// A block device.
    BlockDevice,
    /// A simulated file.
    Simulated,
    /// A storage that a program brought and whose length can change. (One of fixed length counts as a block device.)
    Foreign,
}

/// The file system below, as far as it matters for a choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
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

/// The alignment that the kernel asks of requests. All three are powers of two, in bytes; 1 without O_DIRECT.
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

/// Properties of a file that do not change while it is open, and its length at first.
pub struct FileFacts {
    /// The name in messages.
    pub path: PathBuf,
    /// Identity.
    pub id: FileId,
    /// Kind.
    pub kind: FileKind,
    /// File system.
    pub fs: FsKind,
    /// Reading only or both.
    pub access: Access,
    /// O_DIRECT.
    pub direct: bool,
    /// `cache=unsafe`: flushes do nothing.
    pub no_flush: bool,
    /// The alignment that requests keep to.
    pub alignment: Alignment,
    /// Length in bytes.
    pub len: u64,
}
