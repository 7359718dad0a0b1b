//! Watching, slowing and stopping a job.

use crate::{Error, ErrorKind, Result};
use std::fmt;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// What a job is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Phase {
    /// Data moves from the source to the target.
    Copying,
    /// Two images are read and compared.
    Comparing,
    /// The mapping is walked.
    Measuring,
    /// The target is made durable and gets its name.
    Finishing,
}

/// How far a job is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// What it is doing.
    pub phase: Phase,
    /// Bytes of the virtual disk dealt with (holes count as they are skipped). Never decreases within a phase.
    pub done: u64,
    /// Bytes of the virtual disk in all.
    pub total: u64,
}

/// Asks a job to stop. Clones are the same switch; any thread may use it.
#[derive(Debug, Clone, Default)]
pub struct Cancel(Arc<AtomicBool>);

impl Cancel {
    /// A switch that is not thrown yet.
    pub fn new() -> Self {
        Self::default()
    }
    /// Asks the job to stop. It ends with [`ErrorKind::Cancelled`] once its requests in flight have completed.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
    /// Whether the job was asked to stop.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
    /// [`ErrorKind::Cancelled`] if the job was asked to stop.
    pub fn check(&self) -> Result<()> {
        if self.is_cancelled() { Err(Error::new(ErrorKind::Cancelled, "cancelled")) } else { Ok(()) }
    }
}

/// How a caller watches and steers a job.
#[derive(Clone, Default)]
pub struct JobControl {
    /// Stops the job.
    pub cancel: Cancel,
    /// Called with the state of the job after each piece of work (about a MiB), from the threads that do the work.
    pub progress: Option<Arc<dyn Fn(Progress) + Send + Sync>>,
    /// Most bytes a second that the job moves, averaged; no limit if `None`.
    pub rate_limit: Option<NonZeroU64>,
}

impl fmt::Debug for JobControl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JobControl")
            .field("cancel", &self.cancel)
            .field("progress", &self.progress.is_some())
            .field("rate_limit", &self.rate_limit)
            .finish()
    }
}
