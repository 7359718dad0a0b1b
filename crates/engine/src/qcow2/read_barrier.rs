//! Readers of an image, and keeping them out for the moment in which one mapping of the disk replaces another.

use crate::sync::{Clock, ClosedGate, EpochGuard, Gate, Moment, ReadEpochs, while_driven};
use zebu_storage::Worker;
use zebu_storage::drive::OneOf;
use zebu_storage::sabotage::{self, Fault};

/// The readers of an image, with a barrier for them beside the one for requests that change it
/// ([`crate::sync::RequestBarrier`]).
#[derive(Debug, Default)]
pub(crate) struct Readers {
    reads: ReadEpochs,
    /// Writes are counted apart: only they leave something in a cluster.
    writes: ReadEpochs,
    gate: Gate,
}

/// The closed barrier: nobody reads the image until this is dropped.
#[derive(Debug)]
pub(crate) struct ReadsStopped<'a> {
    _closed: ClosedGate<'a>,
}

impl Readers {
    /// Begins a use of host clusters that the barrier does not keep out, and that leaves nothing in them.
    #[inline]
    pub(crate) fn enter(&self, worker: &Worker) -> EpochGuard<'_> {
        let counts_as_write = sabotage::is(Fault::CountReadsAsWrites);
        if counts_as_write { self.writes.enter(worker.drive()) } else { self.reads.enter(worker.drive()) }
    }

    /// Begins a write, which the barrier does not keep out.
    #[inline]
    pub(crate) fn enter_to_write(&self, worker: &Worker) -> EpochGuard<'_> {
        self.writes.enter(worker.drive())
    }

    /// Waits until those who are inside now have left, reads and writes.
    pub(crate) async fn wait(&self, clock: &impl Clock) {
        self.reads.wait(clock).await;
        self.writes.wait(clock).await;
    }

    /// The workers of those who are inside.
    pub(crate) fn awaited(&self) -> Vec<OneOf> {
        self.reads.awaited().into_iter().chain(self.writes.awaited()).collect()
    }

    /// The workers of the writes that are inside.
    pub(crate) fn writes_awaited(&self) -> Vec<OneOf> {
        self.writes.awaited()
    }

    /// This moment, if a write is inside.
    pub(crate) fn moment_of_writes(&self) -> Option<Moment> {
        self.writes.moment()
    }

    /// Whether all writes that were inside at `moment` are known to have left.
    pub(crate) fn have_writes_passed(&self, moment: Moment) -> bool {
        self.writes.has_passed(moment)
    }

    /// Waits until the writes that were inside at `moment` have left.
    pub(crate) async fn wait_for_writes_of(&self, clock: &impl Clock, moment: Moment) {
        self.writes.wait_past(clock, moment).await;
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
    /// one at a time. A read whose worker is not driven keeps the caller waiting, and other reads for a while only. `None`:
    /// nobody drives the worker of a read.
    pub(crate) async fn stop(&self, clock: &impl Clock) -> Option<ReadsStopped<'_>> {
        let leave = async || self.wait(clock).await;
        let closed = while_driven(clock, || self.awaited(), self.gate.close_after(clock, leave)).await?;
        Some(ReadsStopped { _closed: closed })
    }
}
