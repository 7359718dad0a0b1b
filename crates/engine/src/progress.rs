//! Watching, slowing and stopping a job.

use crate::rate_limit::RateLimit;
use crate::{Error, ErrorKind, Result};
use std::fmt;
use std::num::NonZeroU64;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use zebu_storage::Worker;
use zebu_storage::sync::Mutex;

/// The phase of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Phase {
    /// Data moves from the source to the target.
    Copying,
    /// Two images are read and compared.
    Comparing,
    /// References are counted: the L2 tables of a checked image are read. Tables are counted, not bytes.
    CountingReferences,
    /// The references are compared with the refcounts of a checked image, block by block.
    ComparingRefcounts,
    /// COPIED flags of a checked image are looked at one by one, table by table, because some of them are wrong.
    CheckingFlags,
    /// Refcount structures are written anew, block by block.
    RebuildingRefcounts,
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
#[non_exhaustive]
pub struct Progress {
    /// The present phase.
    pub phase: Phase,
    /// Bytes of the virtual disk dealt with (holes count as they are skipped); tables in the phases of a check. Never
    /// decreases within a phase, but for a check that counts in several passes.
    pub done: u64,
    /// Bytes of the virtual disk in all, or tables.
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
#[non_exhaustive]
pub struct JobControl {
    /// Stops the job.
    pub cancel: Cancel,
    /// Called with the state of the job after each piece of work (about a MiB), from the threads that do the work.
    pub progress: Option<Arc<dyn Fn(Progress) + Send + Sync>>,
    /// Most bytes a second that the job moves, averaged; no limit if `None`.
    pub rate_limit: Option<NonZeroU64>,
}

zebu_storage::option_setters!(JobControl {
    cancel: Cancel,
    rate_limit: impl Into<Option<NonZeroU64>>,
});

impl JobControl {
    /// Sets [`progress`](#structfield.progress).
    #[must_use]
    pub fn progress(mut self, progress: impl Fn(Progress) + Send + Sync + 'static) -> Self {
        self.progress = Some(Arc::new(progress));
        self
    }
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

impl JobControl {
    /// Reports how far the job is.
    pub(crate) fn report(&self, phase: Phase, done: u64, total: u64) {
        if let Some(progress) = &self.progress {
            progress(Progress { phase, done, total });
        }
    }
}

/// The switch and the rate limit of a running job.
pub(crate) struct Throttle {
    cancel: Cancel,
    rate: Option<RateLimit>,
}

/// The sleep of a job that waits, between two looks at whether it was cancelled.
pub(crate) const NAP: Duration = Duration::from_millis(100);

impl Throttle {
    pub(crate) fn new(control: &JobControl) -> Self {
        let rate = control.rate_limit.map(|rate| RateLimit::new(rate, Instant::now()));
        Self { cancel: control.cancel.clone(), rate }
    }

    /// Waits until `bytes` may be moved under the rate limit, and charges them.
    ///
    /// # Errors
    /// [`ErrorKind::Cancelled`].
    pub(crate) async fn wait(&self, worker: &Worker, bytes: u64) -> Result<()> {
        self.cancel.check()?;
        let Some(rate) = &self.rate else { return Ok(()) };
        let start = rate.reserve(bytes, Instant::now());
        loop {
            self.cancel.check()?;
            let left = start.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            worker.sleep(left.min(NAP)).await;
        }
    }
}

/// A running job's side of its [`JobControl`], shared by its threads.
pub(crate) struct Tracker {
    control: JobControl,
    phase: Phase,
    total: AtomicU64,
    done: AtomicU64,
    /// The last report. Held while the caller's function runs, so that it never sees progress go back.
    reported: Mutex<u64>,
    throttle: Throttle,
    on_panic: OnPanic,
}

/// The effect of a progress function that panics.
enum OnPanic {
    /// The job vanishes with it.
    Propagate,
    /// The next check fails, and the job undoes what it has begun.
    Fail(AtomicBool),
}

impl Tracker {
    pub(crate) fn new(control: &JobControl, phase: Phase, total: u64) -> Self {
        Self::build(control, phase, total, OnPanic::Propagate)
    }

    /// The same for a job that must undo what it has begun if its progress function panics.
    pub(crate) fn catching(control: &JobControl, phase: Phase, total: u64) -> Self {
        Self::build(control, phase, total, OnPanic::Fail(AtomicBool::new(false)))
    }

    fn build(control: &JobControl, phase: Phase, total: u64, on_panic: OnPanic) -> Self {
        let tracker = Self {
            control: control.clone(),
            phase,
            total: AtomicU64::new(total),
            done: AtomicU64::new(0),
            reported: Mutex::new(0),
            throttle: Throttle::new(control),
            on_panic,
        };
        tracker.report(0);
        tracker
    }

    /// Fails if the job was asked to stop, or its progress function has panicked.
    pub(crate) fn check(&self) -> Result<()> {
        self.check_reports()?;
        self.control.cancel.check()
    }

    /// Fails if the progress function has panicked.
    pub(crate) fn check_reports(&self) -> Result<()> {
        match &self.on_panic {
            OnPanic::Fail(panicked) if panicked.load(Ordering::Relaxed) => {
                Err(Error::new(ErrorKind::Panicked, "the function that is told the progress panicked"))
            }
            OnPanic::Propagate | OnPanic::Fail(_) => Ok(()),
        }
    }

    /// Bytes in all.
    fn total(&self) -> u64 {
        self.total.load(Ordering::Relaxed)
    }

    /// Changes how many bytes there are in all, for what learns its length as it goes.
    pub(crate) fn set_total(&self, total: u64) {
        self.total.store(total, Ordering::Relaxed);
    }

    /// Adds bytes that are dealt with.
    pub(crate) fn advance(&self, bytes: u64) {
        self.done.fetch_add(bytes, Ordering::Relaxed);
        if self.control.progress.is_none() {
            return;
        }
        // If another thread is reporting: it, or the next one, says more than this one could.
        let Some(mut reported) = self.reported.try_lock() else { return };
        // What is reserved ends with a cluster, which may reach past the end of the disk.
        let done = self.done.load(Ordering::Relaxed).min(self.total());
        if done > *reported {
            *reported = done;
            self.report(done);
        }
    }

    /// Reports that all is done, then that `next` begins.
    pub(crate) fn finish(&self, next: Option<Phase>) {
        let last = *self.reported.lock();
        let total = self.total();
        if last < total {
            self.report(total);
        }
        if let Some(phase) = next {
            self.report_phase(phase, total);
        }
    }

    fn report(&self, done: u64) {
        self.report_phase(self.phase, done);
    }

    fn report_phase(&self, phase: Phase, done: u64) {
        let report = || self.control.report(phase, done, self.total());
        match &self.on_panic {
            OnPanic::Propagate => report(),
            OnPanic::Fail(panicked) if panicked.load(Ordering::Relaxed) => {}
            OnPanic::Fail(panicked) => {
                if catch_unwind(AssertUnwindSafe(report)).is_err() {
                    panicked.store(true, Ordering::Relaxed);
                }
            }
        }
    }

    /// Waits until more may be moved under the rate limit, and charges nothing: for work that may be refused. What was
    /// moved is charged afterwards ([`Self::charge`]).
    pub(crate) async fn wait_for_rate(&self, worker: &Worker) -> Result<()> {
        self.keep_to_rate(worker, 0).await
    }

    /// Charges bytes that were moved; what is moved next waits for them.
    pub(crate) fn charge(&self, bytes: u64) {
        if let Some(rate) = &self.throttle.rate {
            rate.reserve(bytes, Instant::now());
        }
    }

    /// Waits until `bytes` may be moved under the rate limit, and charges them.
    pub(crate) async fn keep_to_rate(&self, worker: &Worker, bytes: u64) -> Result<()> {
        self.throttle.wait(worker, bytes).await
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
                sink.lock().push((p.phase, p.done, p.total));
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
            *seen.lock(),
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
