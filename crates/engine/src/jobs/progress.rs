//! Watching, slowing and stopping a job.

use super::rate::RateLimit;
use crate::{Error, ErrorKind, Result};
use std::fmt;
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, TryLockError};
use std::time::{Duration, Instant};
use zebu_storage::Worker;

/// What a job is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Phase {
    /// Data moves from the source to the target.
    Copying,
    /// Two images are read and compared.
    Comparing,
    /// An image is read and compared with its manifest.
    Verifying,
    /// The mapping is walked.
    Measuring,
    /// Space is set aside for a new disk, or for what is added to one; only that is counted.
    Reserving,
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

/// A running job's side of its [`JobControl`], shared by its threads.
pub(crate) struct Tracker {
    control: JobControl,
    phase: Phase,
    total: u64,
    done: AtomicU64,
    /// What was reported last. Held while the caller's function runs, so that it never sees progress go back.
    reported: Mutex<u64>,
    rate: Option<RateLimit>,
}

/// How long a job that is slowed down sleeps before it looks whether it was cancelled.
const NAP: Duration = Duration::from_millis(100);

impl Tracker {
    pub(crate) fn new(control: &JobControl, phase: Phase, total: u64) -> Self {
        let tracker = Self {
            control: control.clone(),
            phase,
            total,
            done: AtomicU64::new(0),
            reported: Mutex::new(0),
            rate: control.rate_limit.map(|rate| RateLimit::new(rate, Instant::now())),
        };
        tracker.report(0);
        tracker
    }

    pub(crate) fn check(&self) -> Result<()> {
        self.control.cancel.check()
    }

    /// Adds bytes that are dealt with.
    pub(crate) fn advance(&self, bytes: u64) {
        self.done.fetch_add(bytes, Ordering::Relaxed);
        let Some(progress) = &self.control.progress else { return };
        let mut reported = match self.reported.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(guard)) => guard.into_inner(),
            // Another thread is reporting; it, or the next one, says more than this one could.
            Err(TryLockError::WouldBlock) => return,
        };
        // What is reserved ends with a cluster, which may reach past the end of the disk.
        let done = self.done.load(Ordering::Relaxed).min(self.total);
        if done > *reported {
            *reported = done;
            progress(Progress { phase: self.phase, done, total: self.total });
        }
    }

    /// Reports that all is done, then that `next` begins.
    pub(crate) fn finish(&self, next: Option<Phase>) {
        let last = *self.reported.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if last < self.total {
            self.report(self.total);
        }
        if let (Some(progress), Some(phase)) = (&self.control.progress, next) {
            progress(Progress { phase, done: self.total, total: self.total });
        }
    }

    fn report(&self, done: u64) {
        if let Some(progress) = &self.control.progress {
            progress(Progress { phase: self.phase, done, total: self.total });
        }
    }

    /// Waits until `bytes` may be moved under the rate limit.
    pub(crate) async fn throttle(&self, worker: &Worker, bytes: u64) -> Result<()> {
        let Some(rate) = &self.rate else { return Ok(()) };
        let start = rate.reserve(bytes, Instant::now());
        loop {
            self.check()?;
            let left = start.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            worker.sleep(left.min(NAP)).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_is_reported_in_order_and_to_the_end() {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let sink = Arc::clone(&seen);
        let control = JobControl {
            progress: Some(Arc::new(move |p: Progress| {
                sink.lock().unwrap().push((p.phase, p.done, p.total));
            })),
            ..JobControl::default()
        };
        let tracker = Tracker::new(&control, Phase::Copying, 10);
        tracker.advance(4);
        tracker.advance(0);
        tracker.advance(3);
        tracker.finish(Some(Phase::Finishing));
        let copying = |done| (Phase::Copying, done, 10);
        assert_eq!(
            *seen.lock().unwrap(),
            [copying(0), copying(4), copying(7), copying(10), (Phase::Finishing, 10, 10)]
        );
    }

    #[test]
    fn a_cancelled_job_says_so() {
        let control = JobControl::default();
        let tracker = Tracker::new(&control, Phase::Copying, 10);
        assert!(tracker.check().is_ok());
        control.cancel.clone().cancel();
        assert_eq!(tracker.check().unwrap_err().kind(), ErrorKind::Cancelled);
    }
}
