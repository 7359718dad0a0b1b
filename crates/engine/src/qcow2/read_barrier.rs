//! Readers of an image, and keeping them out for the moment in which one mapping of the disk replaces another.

use crate::sync::{Clock, ClosedGate, EpochGuard, Gate, Moment, ReadEpochs, with_long_patience};
use zebu_storage::Worker;

/// The readers of an image, with a barrier for them beside the one for requests that change it
/// ([`crate::sync::RequestBarrier`]).
#[derive(Debug, Default)]
pub(crate) struct Readers {
    epochs: ReadEpochs,
    gate: Gate,
}

/// The closed barrier: nobody reads the image until this is dropped.
#[derive(Debug)]
pub(crate) struct ReadsStopped<'a> {
    _closed: ClosedGate<'a>,
}

impl Readers {
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
        let enter = || {
            let inside = self.enter(worker);
            self.gate.is_open().then_some(inside)
        };
        match enter() {
            Some(inside) => inside,
            None => self.gate.pass(enter).await,
        }
    }

    /// Waits until no read is under way and keeps new ones waiting. The caller is alone with the image, so that there is
    /// one at a time. A read whose worker is not polled keeps the caller waiting, and other reads for a while only. `None`:
    /// a read did not end within half a minute.
    pub(crate) async fn stop(&self, clock: &impl Clock) -> Option<ReadsStopped<'_>> {
        let closed =
            with_long_patience(clock, self.gate.close_after(clock, async || self.wait().await)).await?;
        Some(ReadsStopped { _closed: closed })
    }
}
