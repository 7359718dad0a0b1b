//! Readers of an image, and keeping them out for the moment in which one mapping of the disk replaces another.

use crate::sync::atomic::{AtomicBool, Ordering::SeqCst};
use crate::sync::{Clock, EpochGuard, GrowingPatience, Moment, ReadEpochs, WaitQueue, with_long_patience};
use zebu_storage::Worker;

/// The readers of an image, with a barrier for them beside the one for requests that change it
/// ([`crate::sync::RequestBarrier`]).
#[derive(Debug, Default)]
pub(crate) struct Readers {
    epochs: ReadEpochs,
    closed: AtomicBool,
    waiting: WaitQueue,
}

/// The closed barrier: nobody reads the image until this is dropped.
#[derive(Debug)]
pub(crate) struct ReadsStopped<'a>(&'a Readers);

impl Drop for ReadsStopped<'_> {
    fn drop(&mut self) {
        self.0.closed.store(false, SeqCst);
        self.0.waiting.wake_all();
    }
}

impl Readers {
    fn is_open(&self) -> bool {
        !self.closed.load(SeqCst)
    }

    /// Begins a use of host clusters that the barrier does not keep out.
    #[inline]
    pub(crate) fn enter(&self, worker: &Worker) -> EpochGuard<'_> {
        self.epochs.enter(worker.id())
    }

    /// Waits until those who are inside now have left.
    pub(crate) async fn wait(&self) {
        self.epochs.wait().await;
    }

    /// This moment, if somebody is inside.
    pub(crate) fn moment(&self) -> Option<Moment> {
        self.epochs.moment()
    }

    /// Whether all who were inside at `moment` are known to have left.
    pub(crate) fn has_passed(&self, moment: Moment) -> bool {
        self.epochs.has_passed(moment)
    }

    /// Waits until those who were inside at `moment` have left.
    pub(crate) async fn wait_past(&self, moment: Moment) {
        self.epochs.wait_past(moment).await;
    }

    /// Begins a read: its guard is held until its I/O is complete.
    pub(crate) async fn begin(&self, worker: &Worker) -> EpochGuard<'_> {
        loop {
            let inside = self.enter(worker);
            if self.is_open() {
                return inside;
            }
            drop(inside);
            self.waiting.until(|| self.is_open().then_some(())).await;
        }
    }

    /// Waits until no read is under way and keeps new ones waiting. The caller is alone with the image, so that there is
    /// one at a time. A read whose worker is not polled keeps the caller waiting, and other reads for a while only. `None`:
    /// a read did not end within half a minute.
    pub(crate) async fn stop(&self, clock: &impl Clock) -> Option<ReadsStopped<'_>> {
        with_long_patience(clock, self.stop_all(clock)).await
    }

    async fn stop_all(&self, clock: &impl Clock) -> ReadsStopped<'_> {
        let mut patience = GrowingPatience::new();
        loop {
            self.wait().await;
            self.closed.store(true, SeqCst);
            let stopped = ReadsStopped(self);
            if patience.outlasts(clock, async || self.wait().await).await {
                return stopped;
            }
        }
    }
}
