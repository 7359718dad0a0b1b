//! How an image is checked, and how a caller watches it.

use crate::progress::JobControl;
use crate::{CacheMode, Remote, Sharing};
use zebu_storage::LockWait;

/// The extent of a repair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Repair {
    /// Nothing: the image is opened for reading only.
    #[default]
    None,
    /// Refcounts that are too high (`-r leaks`), and COPIED flags if nothing else is wrong. Refused, with the leaks
    /// left in place, where damage has made it impossible to know what is in use.
    Leaks,
    /// Everything that can be repaired (`-r all`).
    All,
}

/// How an image is checked.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct CheckOptions {
    /// The extent of a repair. Default: [`Repair::None`].
    pub repair: Repair,
    /// Cache mode of the file. Default: [`CacheMode::Writeback`].
    pub cache: CacheMode,
    /// The opener of a name that leads to no local file. Default: no opener.
    pub remote: Remote,
    /// Whether locks are taken. A repair always takes them. Default: [`Sharing::Locked`].
    pub sharing: Sharing,
    /// Patience with the writes of a program that had the file locked and is gone. Default: about a second.
    pub lock_wait: LockWait,
    /// Reads of tables in flight; 0 counts as 1, more than 1024 as 1024. Default: 16.
    pub parallel: usize,
    /// Most bytes that the counts may take, at least a few hundred KiB. An image that needs more is counted in
    /// several passes, each over a range of host clusters. Read buffers (`parallel` clusters) and the list of
    /// L2 tables (32 bytes each) come on top. Default: 256 MiB.
    pub memory: usize,
    /// Findings that the report keeps in words; the rest is only counted. Default: 1000.
    pub max_findings: usize,
    /// Watching, slowing and stopping. Progress counts tables (L2 tables, refcount blocks), the rate limit their bytes. A
    /// repair that was stopped leaves an image that is no worse than before. Default: nobody watches, no limit.
    pub control: JobControl,
}

zebu_storage::option_setters!(CheckOptions {
    repair: Repair,
    cache: CacheMode,
    remote: Remote,
    sharing: Sharing,
    lock_wait: LockWait,
    parallel: usize,
    memory: usize,
    max_findings: usize,
    control: JobControl,
});

impl Default for CheckOptions {
    fn default() -> Self {
        Self {
            repair: Repair::None,
            cache: CacheMode::default(),
            remote: Remote::default(),
            sharing: Sharing::default(),
            lock_wait: LockWait::default(),
            parallel: 16,
            memory: 256 << 20,
            max_findings: 1000,
            control: JobControl::default(),
        }
    }
}
