//! Files and block devices.

#[cfg(feature = "io-uring")]
use crate::closed_files::RingUsers;
use crate::error::{IoError, IoErrorKind, Op};
use crate::file_types::{Access, Alignment, FileFacts, FileId, FileKind, FsKind, LockMode, OpenFlags};
#[cfg(debug_assertions)]
use crate::growth_check::GrowthCheck;
use crate::long_waits::{LongWait, LongWaits};
use crate::os_file::OsFile;
use crate::simulated::{Door, SimulatedFile};
use crate::storage::{Storage, StorageAbilities};
use crate::syncs::Syncs;
use crate::write_behind::WriteBehind;
use crate::write_table::WriteTable;
use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// Where a file's bytes are.
pub(crate) enum FileInner {
    Os(OsFile),
    #[cfg_attr(not(feature = "simulated"), expect(dead_code))] // never made
    Sim(Door<SimulatedFile>),
    Foreign(Arc<dyn Storage>),
}

/// A kind of request that the kernel may refuse for a file, once and for all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Capability {
    Punch = 1,
    ZeroRange = 2,
    Allocate = 4,
    DontCache = 8,
}

struct State {
    facts: FileFacts,
    #[cfg(feature = "io-uring")]
    rings: RingUsers,
    len: AtomicU64,
    /// Bits of the [`Capability`]s that the kernel refused.
    refused: AtomicU8,
    flush_failed: AtomicBool,
    has_abandoned_changes: AtomicBool,
    syncs: Syncs,
    waits: LongWaits,
    /// The writes in flight, under O_DIRECT.
    writes: Option<Box<WriteTable>>,
    /// Whether the kernel said that it takes `RWF_DONTCACHE`, once it was asked.
    takes_dontcache: OnceLock<bool>,
    /// Set if pages of the file are not to stay in the page cache.
    behind: OnceLock<WriteBehind>,
    #[cfg(debug_assertions)]
    growth: GrowthCheck,
    inner: FileInner,
}

/// An open file, shared by all workers.
///
/// It is closed when its last handle is dropped and no operation on it is in flight; an io_uring that used it gives up
/// its own reference to the open file at the next turn of its worker. The locks end at once.
#[derive(Clone)]
pub struct File {
    state: Arc<State>,
}

impl fmt::Debug for File {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("File").field("path", &self.path()).field("len", &self.len()).finish_non_exhaustive()
    }
}

impl File {
    /// A file whose bytes are at `inner`.
    fn from_parts(facts: FileFacts, inner: FileInner) -> Self {
        let len = AtomicU64::new(facts.len);
        // Parts of blocks are this crate's business wherever nobody below takes them.
        let writes =
            (facts.direct || facts.alignment.offset.max(facts.alignment.length) > 1).then(Box::default);
        Self {
            state: Arc::new(State {
                facts,
                #[cfg(feature = "io-uring")]
                rings: RingUsers::default(),
                len,
                refused: AtomicU8::new(0),
                flush_failed: AtomicBool::new(false),
                has_abandoned_changes: AtomicBool::new(false),
                syncs: Syncs::default(),
                waits: LongWaits::default(),
                writes,
                takes_dontcache: OnceLock::new(),
                behind: OnceLock::new(),
                #[cfg(debug_assertions)]
                growth: GrowthCheck::default(),
                inner,
            }),
        }
    }

    /// Opens `path`: regular files and block devices only.
    pub fn open(path: &Path, flags: &OpenFlags) -> Result<Self, IoError> {
        let (facts, os) = OsFile::open(path, flags)?;
        Ok(Self::from_parts(facts, FileInner::Os(os)))
    }

    /// Opens `name`, which an image named, beneath the directory `dir` (openat2, `RESOLVE_BENEATH`,
    /// `RESOLVE_NO_MAGICLINKS`): a name that leads outside fails with [`crate::IoErrorKind::Escapes`].
    pub fn open_beneath(dir: &Path, name: &Path, flags: &OpenFlags) -> Result<Self, IoError> {
        let (facts, os) = OsFile::open_beneath(dir, name, flags)?;
        Ok(Self::from_parts(facts, FileInner::Os(os)))
    }

    /// Takes a descriptor that another program opened, of a regular file or block device. `path` is what messages call
    /// it. Locks and truncation are as `flags` say; whether O_DIRECT is used, as the descriptor says.
    pub fn from_descriptor(fd: OwnedFd, path: &Path, flags: &OpenFlags) -> Result<Self, IoError> {
        let (facts, os) = OsFile::adopt(path, fd, flags)?;
        Ok(Self::from_parts(facts, FileInner::Os(os)))
    }

    /// A file whose bytes are in `storage`. `name` is what messages call it. Of `flags`, the access and
    /// [`OpenFlags::no_flush`] count: locks are the storage's business, and so is who makes it.
    ///
    /// # Errors
    /// [`IoErrorKind::Os`] with EROFS: it is to be written, and the storage can't. EINVAL: its alignment is not of powers
    /// of two.
    pub fn from_storage(storage: Arc<dyn Storage>, name: &str, flags: &OpenFlags) -> Result<Self, IoError> {
        let fail = |errno| IoError::of_file(Op::Open, IoErrorKind::Os(errno), name);
        let (abilities, alignment) = (storage.abilities(), storage.alignment());
        let Alignment { memory, offset, length } = alignment;
        if ![memory, offset, length].iter().all(|unit| unit.is_power_of_two()) {
            return Err(fail(libc::EINVAL));
        }
        if flags.access == Access::ReadWrite && !abilities.contains(StorageAbilities::WRITE) {
            return Err(fail(libc::EROFS).with_detail("open it for reading only"));
        }
        let can_resize = abilities.contains(StorageAbilities::SET_LEN);
        let facts = FileFacts {
            path: name.into(),
            // No device of the system has this number.
            id: FileId { dev: u64::MAX, ino: storage.identity() },
            kind: if can_resize { FileKind::Foreign } else { FileKind::BlockDevice },
            fs: FsKind::Other,
            access: flags.access,
            direct: false,
            no_flush: flags.no_flush,
            alignment,
            len: storage.len(),
        };
        let file = Self::from_parts(facts, FileInner::Foreign(storage));
        for (ability, capability) in [
            (StorageAbilities::PUNCH, Capability::Punch),
            (StorageAbilities::ZERO_RANGE, Capability::ZeroRange),
            (StorageAbilities::ALLOCATE, Capability::Allocate),
        ] {
            if !abilities.contains(ability) {
                file.refuse(capability);
            }
        }
        Ok(file)
    }

    /// A file of a simulated world.
    #[cfg(feature = "simulated")]
    pub fn simulated(facts: FileFacts, at: SimulatedFile) -> Self {
        Self::from_parts(facts, FileInner::Sim(Door::new(at)))
    }

    /// The name it was opened by.
    pub fn path(&self) -> &Path {
        &self.state.facts.path
    }

    /// Identity.
    pub fn id(&self) -> FileId {
        self.state.facts.id
    }

    /// Identities of all files that its bytes lie in: its own first, then those below a [`Storage`].
    pub fn files(&self) -> Vec<FileId> {
        let below = match &self.state.inner {
            FileInner::Foreign(storage) => storage.files(),
            _ => Vec::new(),
        };
        std::iter::once(self.id()).chain(below).collect()
    }

    /// The kind of the file.
    pub fn kind(&self) -> FileKind {
        self.state.facts.kind
    }

    /// Whether its bytes are in a [`Storage`] of the caller's.
    pub fn is_foreign(&self) -> bool {
        matches!(self.state.inner, FileInner::Foreign(_))
    }

    /// The file system.
    pub fn fs(&self) -> FsKind {
        self.state.facts.fs
    }

    /// Whether it was opened with O_DIRECT.
    pub fn is_direct(&self) -> bool {
        self.state.facts.direct
    }

    /// Whether it was opened for writing.
    pub fn is_writable(&self) -> bool {
        self.state.facts.access == Access::ReadWrite
    }

    /// Whether flushes do nothing (`cache=unsafe`).
    pub(crate) fn skips_flush(&self) -> bool {
        self.state.facts.no_flush
    }

    /// Length in bytes as last known to this process (a write past the end and `set_len` raise it).
    pub fn len(&self) -> u64 {
        self.state.len.load(Ordering::Acquire)
    }

    /// Asks the system for the length of a file or a block device that is only read, and notes it if another program has made it
    /// longer. Of a file that is written here the length is known, and another thread may just be cutting it.
    pub fn look_up_len(&self) {
        if !self.is_writable()
            && let FileInner::Os(os) = &self.state.inner
            && let Some(len) = os.len()
        {
            self.raise_len(len);
        }
    }

    /// Whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Notes that the file reaches to `end` at least.
    pub(crate) fn raise_len(&self, end: u64) {
        // The load spares a write that grows nothing the cost of a locked instruction.
        if self.len() < end {
            self.state.len.fetch_max(end, Ordering::AcqRel);
        }
    }

    /// Notes that the file was cut or extended.
    pub(crate) fn store_len(&self, len: u64) {
        self.state.len.store(len, Ordering::Release);
    }

    /// Bytes of disk in use (`st_blocks * 512`).
    pub fn disk_usage(&self) -> Result<u64, IoError> {
        match &self.state.inner {
            FileInner::Os(os) => {
                os.disk_usage().map_err(|errno| self.error(Op::Seek, IoErrorKind::Os(errno)))
            }
            FileInner::Sim(sim) => {
                (sim.disk_usage)().map_err(|errno| self.error(Op::Seek, IoErrorKind::Os(errno)))
            }
            // As of a block device: whoever has the bytes knows.
            FileInner::Foreign(_) => Ok(0),
        }
    }

    /// The alignment that requests must keep to.
    pub fn alignment(&self) -> Alignment {
        self.state.facts.alignment
    }

    /// Changes the lock (upgrade or downgrade), atomically towards other openers.
    pub fn set_lock(&self, mode: LockMode) -> Result<(), IoError> {
        match &self.state.inner {
            FileInner::Os(os) => os.set_lock(self.path(), mode),
            FileInner::Sim(_) | FileInner::Foreign(_) => Ok(()),
        }
    }

    /// Releases all locks at once (at an explicit close; a copy of the descriptor in a ring may live on).
    pub fn unlock(&self) -> Result<(), IoError> {
        match &self.state.inner {
            FileInner::Os(os) => os.unlock().map_err(|errno| self.error(Op::Lock, IoErrorKind::Os(errno))),
            FileInner::Sim(_) | FileInner::Foreign(_) => Ok(()),
        }
    }

    /// Whether punching, zero-range, allocate are believed to work (until the kernel said no).
    pub fn can_punch(&self) -> bool {
        self.can(Capability::Punch)
    }

    /// See [`File::can_punch`].
    pub fn can_zero_range(&self) -> bool {
        self.can(Capability::ZeroRange)
    }

    /// See [`File::can_punch`].
    pub fn can_allocate(&self) -> bool {
        self.can(Capability::Allocate)
    }

    /// Whether the kernel has not refused it yet.
    pub(crate) fn can(&self, capability: Capability) -> bool {
        self.state.refused.load(Ordering::Relaxed) & capability as u8 == 0
    }

    /// Notes that the kernel refused it.
    pub(crate) fn refuse(&self, capability: Capability) {
        self.state.refused.fetch_or(capability as u8, Ordering::Relaxed);
    }

    /// Whether a flush failed, or a change was abandoned while it was under way: then no later flush is believed.
    pub(crate) fn has_flush_failed(&self) -> bool {
        self.state.flush_failed.load(Ordering::Acquire)
    }

    /// The syncs that are under way.
    pub(crate) fn syncs(&self) -> &Syncs {
        &self.state.syncs
    }

    /// The waits for this file that have taken [`LONG_WAIT`](crate::LONG_WAIT) and more, the longest first.
    pub fn long_waits(&self) -> Vec<LongWait> {
        self.waits().list(self.path())
    }

    /// Has `tell` called for each wait for this file, once, when it has taken [`LONG_WAIT`](crate::LONG_WAIT). It must not wait
    /// itself. The first such function stays.
    pub fn tell_long_waits(&self, tell: Arc<dyn Fn(&LongWait) + Send + Sync>) {
        self.waits().tell_by(tell);
    }

    /// The waits that have taken long.
    pub(crate) fn waits(&self) -> &LongWaits {
        &self.state.waits
    }

    /// Notes that a flush failed.
    pub(crate) fn set_flush_failed(&self) {
        self.state.flush_failed.store(true, Ordering::Release);
    }

    /// Notes that a change was abandoned while it was under way. No later flush is believed.
    pub(crate) fn note_abandoned_change(&self) {
        self.state.has_abandoned_changes.store(true, Ordering::Release);
        self.set_flush_failed();
    }

    /// Whether a change was abandoned while it was under way: it may land at any time.
    pub fn has_abandoned_changes(&self) -> bool {
        self.state.has_abandoned_changes.load(Ordering::Acquire)
    }

    /// The XFS extent size hint in bytes; `None` if the file, or the file system, has none.
    pub fn extent_size_hint(&self) -> Option<u32> {
        match &self.state.inner {
            FileInner::Os(os) if self.fs() == FsKind::Xfs => os.extent_size_hint(),
            FileInner::Os(_) | FileInner::Sim(_) | FileInner::Foreign(_) => None,
        }
    }

    /// Sets the XFS hint how many bytes are set aside at once where blocks are written that the file shares with another;
    /// `Unsupported` elsewhere. (XFS takes the extent size hint instead if that is larger, and else 32 blocks.)
    pub fn set_cow_extent_size_hint(&self, bytes: u32) -> Result<(), IoError> {
        match &self.state.inner {
            FileInner::Os(os) if self.fs() == FsKind::Xfs => os
                .set_cow_extent_size_hint(bytes)
                .map_err(|errno| self.error(Op::Allocate, IoErrorKind::Os(errno))),
            FileInner::Os(_) | FileInner::Sim(_) | FileInner::Foreign(_) => {
                Err(self.error(Op::Allocate, IoErrorKind::Unsupported))
            }
        }
    }

    /// Sets the XFS extent size hint in bytes (0 takes it away, an inherited one too); `Unsupported` elsewhere.
    pub fn set_extent_size_hint(&self, bytes: u32) -> Result<(), IoError> {
        match &self.state.inner {
            FileInner::Os(os) if self.fs() == FsKind::Xfs => os
                .set_extent_size_hint(bytes)
                .map_err(|errno| self.error(Op::Allocate, IoErrorKind::Os(errno))),
            FileInner::Os(_) | FileInner::Sim(_) | FileInner::Foreign(_) => {
                Err(self.error(Op::Allocate, IoErrorKind::Unsupported))
            }
        }
    }

    /// Sets btrfs' NOCOW attribute (on an empty file); `Unsupported` elsewhere.
    pub fn set_nocow(&self) -> Result<(), IoError> {
        match &self.state.inner {
            FileInner::Os(os) if self.fs() == FsKind::Btrfs => {
                os.set_nocow().map_err(|errno| self.error(Op::Allocate, IoErrorKind::Os(errno)))
            }
            FileInner::Os(_) | FileInner::Sim(_) | FileInner::Foreign(_) => {
                Err(self.error(Op::Allocate, IoErrorKind::Unsupported))
            }
        }
    }

    /// Whether the kernel takes `RWF_DONTCACHE`; `ask` finds out, once.
    pub(crate) fn takes_dontcache(&self, ask: impl FnOnce() -> bool) -> bool {
        *self.state.takes_dontcache.get_or_init(ask)
    }

    /// Has the pages of the file dropped from the page cache when they are written, from now on.
    pub(crate) fn drop_written_pages(&self) {
        if !self.is_direct() && self.os().is_some() {
            self.state.behind.get_or_init(WriteBehind::default);
        }
    }

    /// The ranges that were written; `None` if the page cache may keep its pages, or has none.
    pub(crate) fn behind(&self) -> Option<&WriteBehind> {
        self.state.behind.get()
    }

    /// The writes in flight; `None` without O_DIRECT, where the kernel takes care of parts of blocks.
    pub(crate) fn writes(&self) -> Option<&WriteTable> {
        self.state.writes.as_deref()
    }

    /// The check that the file grows by one request at a time; of simulated files, only those on XFS are checked.
    #[cfg(debug_assertions)]
    pub(crate) fn growth_check(&self) -> Option<&GrowthCheck> {
        (self.kind() != FileKind::Simulated || self.fs() == FsKind::Xfs).then_some(&self.state.growth)
    }

    /// The rings that use it.
    #[cfg(feature = "io-uring")]
    pub(crate) fn rings(&self) -> &RingUsers {
        &self.state.rings
    }

    /// Its place in a simulated world, if it has one.
    #[doc(hidden)]
    pub fn in_simulation(&self) -> Option<&SimulatedFile> {
        match &self.state.inner {
            FileInner::Os(_) | FileInner::Foreign(_) => None,
            FileInner::Sim(sim) => Some(sim),
        }
    }

    /// Tells a storage that a program brought what the next request of this thread is for. It is nothing to other files.
    pub fn announce(&self, purpose: &'static str) {
        if let FileInner::Foreign(storage) = &self.state.inner {
            storage.announce(purpose);
        }
    }

    /// Bytes of which only whole pieces can be discarded.
    pub fn discard_granularity(&self) -> u64 {
        match &self.state.inner {
            FileInner::Foreign(storage) => storage.discard_granularity(),
            FileInner::Os(_) | FileInner::Sim(_) => 1,
        }
    }

    /// Its descriptors, for lists of those that a jail keeps open: one for data, and one for locks if it is locked. None if it
    /// is no file of the system.
    pub fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.os().into_iter().flat_map(OsFile::descriptors)
    }

    pub(crate) fn os(&self) -> Option<&OsFile> {
        match &self.state.inner {
            FileInner::Os(os) => Some(os),
            FileInner::Sim(_) | FileInner::Foreign(_) => None,
        }
    }

    /// The storage that a program brought, if its bytes are there.
    pub(crate) fn storage(&self) -> Option<&Arc<dyn Storage>> {
        match &self.state.inner {
            FileInner::Os(_) | FileInner::Sim(_) => None,
            FileInner::Foreign(storage) => Some(storage),
        }
    }

    fn error(&self, op: Op, kind: IoErrorKind) -> IoError {
        IoError::of_file(op, kind, self.path())
    }
}
