//! The syncs of a file that are under way.
//!
//! The kernel tells of a loss once for each open file. Of two syncs at once, one may take that report, and the other succeed
//! though what it was to make durable is lost as well. Which one the kernel answered first is not known: their workers see
//! the ends in any order. So a sync that succeeded is believed when those that ran beside it have ended, none with a failure.
//!
//! So a sync waits for the slowest of those beside it. One whose worker nobody drives may never be seen to end: it is not
//! waited for without end ([`crate::drive`]), and if it failed, later syncs say so.

use crate::drive::{Drive, OneOf};
use crate::sabotage::{self, Fault};
use crate::sync::{Mutex, WaitList};
use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;

/// The number of a sync, by which those of one file are told apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SyncNumber(u64);

/// The observer of the end of a sync.
#[derive(Debug, Clone)]
pub(crate) enum SeenBy {
    /// The thread that does it.
    ItsThread,
    /// A worker, when it takes a turn.
    Worker(Arc<Drive>),
}

/// The syncs of one file.
#[derive(Debug, Default)]
pub(crate) struct Syncs(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    begun: u64,
    /// In the order of their numbers.
    under_way: Vec<(SyncNumber, SeenBy)>,
    waiting: WaitList,
}

impl Syncs {
    /// Notes that a sync begins. It is under way until [`Syncs::end`].
    pub(crate) fn begin(&self, by: SeenBy) -> SyncNumber {
        let mut state = self.0.lock();
        state.begun += 1;
        let number = SyncNumber(state.begun);
        state.under_way.push((number, by));
        number
    }

    /// The end of a sync. A failure of it was noted before.
    pub(crate) fn end(&self, number: SyncNumber) {
        self.remove(|other, _| other == number);
    }

    /// Waits no longer for those up to `last` of workers that nobody drives.
    pub(crate) fn give_up(&self, last: SyncNumber, undriven: &[OneOf]) {
        self.remove(|number, by| match by {
            SeenBy::ItsThread => false,
            SeenBy::Worker(drive) => {
                number <= last && undriven.iter().flatten().any(|one| Arc::ptr_eq(one, drive))
            }
        });
    }

    /// The workers that see the ends of those up to `last`.
    pub(crate) fn seen_by(&self, last: SyncNumber) -> Vec<OneOf> {
        let state = self.0.lock();
        let awaited = state.under_way.iter().take_while(|(number, _)| *number <= last);
        awaited
            .filter_map(|(_, by)| match by {
                SeenBy::ItsThread => None,
                SeenBy::Worker(drive) => Some(vec![Arc::clone(drive)]),
            })
            .collect()
    }

    fn remove(&self, is_over: impl Fn(SyncNumber, &SeenBy) -> bool) {
        let waiting = {
            let mut state = self.0.lock();
            state.under_way.retain(|(number, by)| !is_over(*number, by));
            state.waiting.take()
        };
        waiting.wake();
    }

    /// The last one that is under way.
    pub(crate) fn last(&self) -> Option<SyncNumber> {
        let last = self.0.lock().under_way.last().map(|(number, _)| *number);
        last.filter(|_| !sabotage::is(Fault::BelieveEachSync))
    }

    /// Waits until none is under way that began before `last`, nor `last` itself.
    pub(crate) async fn wait(&self, last: SyncNumber) {
        poll_fn(|cx| {
            let mut state = self.0.lock();
            if state.under_way.first().is_none_or(|(first, _)| *first > last) {
                return Poll::Ready(());
            }
            state.waiting.add(cx.waker());
            Poll::Pending
        })
        .await;
    }
}
