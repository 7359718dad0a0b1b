//! The named steps of a commit, so that a test can do something at each: let an operation of the step fail, take crash
//! states, start another request.
//!
//! Compiled in by the feature `test-faults`, as [`crate::sabotage`] is. What is announced concerns one thread, which is
//! one simulated world.

/// A step of a commit or of the release after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CommitStep {
    /// New refcount blocks are written.
    NewRefcountBlocks,
    /// They become durable.
    Barrier0,
    /// Entries of the refcount table are written.
    RefcountTableEntries,
    /// A refcount table that moved is written as a whole.
    MovedRefcountTable,
    /// It becomes durable.
    BarrierOfMovedTable,
    /// The header names it.
    HeaderOfMovedTable,
    /// Changed refcount blocks are written.
    RefcountBlocks,
    /// New L2 tables are written.
    NewTables,
    /// The external data file becomes durable.
    BarrierOfDataFile,
    /// Counts, new tables and data become durable.
    Barrier1,
    /// Changed L2 blocks and L1 entries are written.
    Links,
    /// The epoch becomes durable.
    Barrier2,
    /// Freed space is punched.
    Punch,
}

#[cfg(feature = "test-faults")]
mod active {
    use super::CommitStep;
    use std::cell::RefCell;

    type Observer = Box<dyn FnMut(CommitStep)>;

    thread_local! {
        static OBSERVER: RefCell<Option<Observer>> = const { RefCell::new(None) };
    }

    /// Announces that a step begins: its operations are submitted next.
    pub fn begins(step: CommitStep) {
        // Taken out meanwhile: what the observer does may pass here as well.
        let Some(mut observer) = OBSERVER.take() else { return };
        observer(step);
        OBSERVER.set(Some(observer));
    }

    /// Calls `observer` at the beginning of each step on this thread, until the next call.
    pub fn observe(observer: Option<Observer>) {
        OBSERVER.set(observer);
    }
}

#[cfg(feature = "test-faults")]
pub use active::{begins, observe};

/// Nobody watches in this build.
#[cfg(not(feature = "test-faults"))]
#[inline(always)]
pub const fn begins(_: CommitStep) {}
