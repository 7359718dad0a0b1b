//! The files of a world, and what is done to their operations: the handle for tests and for their tasks.

use crate::content::Content;
use crate::core::{Core, FileLimits, HoldId, Waiting};
use crate::counts::Tally;
use crate::crash::{CrashOptions, CrashStates, Possible};
use crate::fault::{FaultPlan, FaultRule};
use crate::log::{LogEvent, SimLog};
use crate::op::{FileNumber, OpFilter, OpInfo};
use std::cell::RefCell;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use zebu_storage::simulated::{FileFacts, SimulatedFile};
use zebu_storage::{Access, Alignment, File, FileId, FileKind, FsKind};

/// Whether a file, or the device below it, has a facility.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Facility {
    /// It works.
    #[default]
    Supported,
    /// It fails with `EOPNOTSUPP` (copying between files: `EXDEV`). A [`File`] notices at the first attempt only.
    Refused,
}

/// Properties of a simulated file.
#[derive(Debug, Clone)]
pub struct SimFileConfig {
    /// The answer of [`File::kind`]. A [`FileKind::BlockDevice`] can't change its length.
    pub kind: FileKind,
    /// The answer of [`File::fs`].
    pub fs: FsKind,
    /// Opened for reading only, or for both.
    pub access: Access,
    /// O_DIRECT with this alignment; `None`: buffered. A request that does not keep to it fails with `EINVAL`.
    pub direct: Option<Alignment>,
    /// `cache=unsafe`: flushes do nothing.
    pub no_flush: bool,
    /// Punching holes.
    pub punch: Facility,
    /// Zeroing ranges.
    pub zero_range: Facility,
    /// Allocating space.
    pub allocate: Facility,
    /// `copy_file_range` into this file.
    pub copy: Facility,
    /// `FICLONERANGE` into this file.
    pub clone: Facility,
    /// Growing past this length in bytes fails with `ENOSPC`.
    pub max_len: Option<u64>,
    /// Taking more than this many bytes of disk fails with `ENOSPC`.
    pub space: Option<u64>,
}

impl Default for SimFileConfig {
    /// A buffered regular file that can do everything, without limits.
    fn default() -> Self {
        Self {
            kind: FileKind::Simulated,
            fs: FsKind::Other,
            access: Access::ReadWrite,
            direct: None,
            no_flush: false,
            punch: Facility::Supported,
            zero_range: Facility::Supported,
            allocate: Facility::Supported,
            copy: Facility::Supported,
            clone: Facility::Supported,
            max_len: None,
            space: None,
        }
    }
}

impl SimFileConfig {
    /// The default, opened with O_DIRECT: memory, offsets and lengths aligned to `bytes`, a power of two.
    pub fn direct(bytes: u32) -> Self {
        Self { direct: Some(Alignment { memory: bytes, offset: bytes, length: bytes }), ..Self::default() }
    }

    fn limits(&self) -> FileLimits {
        let works = |facility| facility == Facility::Supported;
        FileLimits {
            alignment: self.alignment(),
            direct: self.direct.is_some(),
            punch: works(self.punch),
            zero_range: works(self.zero_range),
            allocate: works(self.allocate),
            copy: works(self.copy),
            clone: works(self.clone),
            max_len: self.max_len,
            space: self.space,
        }
    }

    fn alignment(&self) -> Alignment {
        self.direct.unwrap_or(Alignment { memory: 1, offset: 1, length: 1 })
    }
}

/// The disk of a [`crate::SimWorld`], as a handle to keep and to give to tasks. Cheap to clone, not `Send`.
///
/// It does not keep the world's workers alive, so a task that holds it makes no circle.
#[derive(Clone)]
pub struct SimDisk {
    pub(crate) core: Rc<RefCell<Core>>,
}

impl SimDisk {
    /// Makes a file, durable as it is, and opens it.
    ///
    /// # Panics
    /// If there is a file of that name.
    pub fn file(&self, name: &str, content: Content, config: SimFileConfig) -> File {
        let mut core = self.core.borrow_mut();
        assert!(core.find(name).is_none(), "a second file {name:?}");
        let len = content.len();
        let number = core.add_file(name, content, config.limits());
        open_handle(&core, number, name, len, &config)
    }

    /// Opens a file once more, with another configuration. The new handle knows nothing of failed flushes and
    /// refused facilities. Limits of the file apply to all handles from now on.
    pub fn open(&self, name: &str, config: SimFileConfig) -> Option<File> {
        let mut core = self.core.borrow_mut();
        let number = core.find(name)?;
        *core.limits_mut(number) = config.limits();
        let len = core.disk.lock().files[number.0].volatile.len();
        Some(open_handle(&core, number, name, len, &config))
    }

    /// Has what is done from now on be counted there.
    pub fn count_in(&self, tally: &Tally) {
        self.core.borrow_mut().tally = tally.clone();
    }

    /// Counts a moment at which everything that the disk might hold was looked at.
    pub fn note_moment(&self) {
        self.core.borrow().tally.change(|counts| counts.moments += 1);
    }

    /// The content of the file, as reads would see it now.
    pub fn content(&self, name: &str) -> Option<Content> {
        let core = self.core.borrow();
        let number = core.find(name)?;
        let content = core.disk.lock().files[number.0].volatile.clone();
        Some(content)
    }

    /// Changes how much disk the file may take, in bytes; `None`: no limit.
    pub fn set_space(&self, name: &str, space: Option<u64>) {
        let mut core = self.core.borrow_mut();
        if let Some(number) = core.find(name) {
            core.limits_mut(number).space = space;
        }
    }

    /// Replaces the plan of faults, for operations submitted from now on.
    pub fn set_faults(&self, plan: FaultPlan) {
        self.core.borrow_mut().plan = plan;
    }

    /// Adds a scripted fault, for operations submitted from now on.
    pub fn inject(&self, rule: FaultRule) {
        self.core.borrow_mut().plan.push(rule);
    }

    /// From now on, operations that `filter` chooses do not take effect, pending ones included (unless a part of
    /// them did already), until [`SimDisk::release`].
    pub fn hold(&self, filter: OpFilter) -> HoldId {
        self.core.borrow_mut().hold(filter)
    }

    /// Ends a hold. Operations that no other hold catches go on.
    pub fn release(&self, hold: HoldId) {
        self.core.borrow_mut().release(hold);
    }

    /// The operations that the hold has caught, in the order of submission.
    pub fn held(&self, hold: HoldId) -> Vec<OpInfo> {
        let caught = |(info, waiting)| (waiting == Waiting::Held(hold)).then_some(info);
        self.core.borrow().pending().into_iter().filter_map(caught).collect()
    }

    /// All operations in flight and what each waits for, in the order of submission.
    pub fn pending(&self) -> Vec<(OpInfo, Waiting)> {
        self.core.borrow().pending()
    }

    /// Simulated time since the world began.
    pub fn now(&self) -> Duration {
        self.core.borrow().now
    }

    /// Writes a note into the log.
    pub fn mark(&self, mark: u64) {
        self.core.borrow_mut().record(LogEvent::Mark(mark));
    }

    /// The log so far.
    pub fn log(&self) -> SimLog {
        self.core.borrow().log.clone()
    }

    /// A fingerprint of everything that happened so far. Equal runs have equal digests.
    pub fn digest(&self) -> u64 {
        self.core.borrow().log.digest()
    }

    /// How many events the log has had so far: while it stays, the disk stays as it is.
    pub fn events(&self) -> u64 {
        self.core.borrow().log.count()
    }

    /// The possible contents of each sector of the file `name` if the power fails now.
    pub fn possible(&self, name: &str) -> Option<Possible> {
        Possible::of(&self.core.borrow().disk.lock(), name)
    }

    /// The possible contents of the files if the power fails now.
    pub fn crash_states(&self, options: &CrashOptions) -> CrashStates {
        let core = self.core.borrow();
        CrashStates::new(&core.disk.lock(), options, &core.tally)
    }
}

fn open_handle(core: &Core, number: FileNumber, name: &str, len: u64, config: &SimFileConfig) -> File {
    let facts = FileFacts {
        path: PathBuf::from(name),
        id: FileId { dev: u64::MAX - core.world, ino: number.0 as u64 + 1 },
        kind: config.kind,
        fs: config.fs,
        access: config.access,
        direct: config.direct.is_some(),
        no_flush: config.no_flush,
        alignment: config.alignment(),
        len,
    };
    let disk = Arc::downgrade(&core.disk);
    let disk_usage = move || {
        // The world may be gone.
        let disk = disk.upgrade().ok_or(libc::EBADF)?;
        let disk = disk.lock();
        Ok(disk.files.get(number.0).ok_or(libc::EBADF)?.volatile.disk_usage())
    };
    let at = SimulatedFile { world: core.world, number: number.0, disk_usage: Box::new(disk_usage) };
    File::simulated(facts, at)
}
