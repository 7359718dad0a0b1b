//! How an image is checked, and how a caller watches it.

use crate::{CacheMode, Error, ErrorKind, Result, Sharing};
use std::fmt;

/// What is repaired.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Repair {
    /// Nothing: the image is opened for reading only.
    #[default]
    None,
    /// Refcounts that are too high (`-r leaks`), and COPIED flags if nothing else is wrong. Refused, with the leaks
    /// left in place, where damage has made it impossible to know what is in use.
    Leaks,
    /// Whatever can be repaired (`-r all`).
    All,
}

/// What a check is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum CheckPhase {
    /// References are counted: the L2 tables are read.
    Counting,
    /// The counts are compared with the refcounts in the image.
    Comparing,
    /// COPIED flags are looked at one by one, because some of them are wrong.
    Flags,
    /// Refcount structures are written anew.
    Rebuilding,
}

/// How far a check is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CheckProgress {
    /// What it is doing.
    pub phase: CheckPhase,
    /// Tables (L2 tables, refcount blocks) dealt with in this phase.
    pub done: u64,
    /// Tables of this phase in all.
    pub total: u64,
}

/// How an image is checked.
#[derive(Clone)]
pub struct CheckOptions<'a> {
    /// What is repaired.
    pub repair: Repair,
    /// Cache mode of the file.
    pub cache: CacheMode,
    /// Whether locks are taken. A repair always takes them.
    pub sharing: Sharing,
    /// Reads of tables in flight, at least 1.
    pub parallel: usize,
    /// Most bytes that the counts may take, at least a few hundred KiB. An image that needs more is counted in
    /// several passes, each over a range of host clusters. Read buffers (`parallel` clusters) and the list of
    /// L2 tables (32 bytes each) come on top.
    pub memory: usize,
    /// Findings that the report keeps in words; the rest is only counted.
    pub max_findings: usize,
    /// Called after each table.
    pub progress: Option<&'a dyn Fn(CheckProgress)>,
    /// Asked before each table whether to stop; the check then ends with [`ErrorKind::Cancelled`]. A repair that
    /// was stopped leaves an image that is no worse than before.
    pub cancelled: Option<&'a dyn Fn() -> bool>,
}

impl Default for CheckOptions<'_> {
    fn default() -> Self {
        Self {
            repair: Repair::None,
            cache: CacheMode::default(),
            sharing: Sharing::default(),
            parallel: 16,
            memory: 256 << 20,
            max_findings: 1000,
            progress: None,
            cancelled: None,
        }
    }
}

impl fmt::Debug for CheckOptions<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CheckOptions")
            .field("repair", &self.repair)
            .field("cache", &self.cache)
            .field("sharing", &self.sharing)
            .field("parallel", &self.parallel)
            .field("memory", &self.memory)
            .field("max_findings", &self.max_findings)
            .field("progress", &self.progress.is_some())
            .field("cancelled", &self.cancelled.is_some())
            .finish()
    }
}

impl CheckOptions<'_> {
    /// [`ErrorKind::Cancelled`] if the caller wants the check to stop.
    pub(super) fn check_cancelled(&self) -> Result<()> {
        match self.cancelled {
            Some(cancelled) if cancelled() => {
                Err(Error::new(ErrorKind::Cancelled, "the check was cancelled"))
            }
            _ => Ok(()),
        }
    }

    /// Tells the caller how far it is.
    pub(super) fn report_progress(&self, phase: CheckPhase, done: u64, total: u64) {
        if let Some(progress) = self.progress {
            progress(CheckProgress { phase, done, total });
        }
    }
}
