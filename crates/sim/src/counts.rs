//! How much simulated runs did: what a report about them may claim.

use std::fmt;
use std::sync::Arc;
use zebu_storage::sync::Mutex;

/// Numbers that only grow.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Requests of a guest that a [`crate::GuestModel`] was told of.
    pub requests: u64,
    /// Operations that workers handed to simulated disks.
    pub operations: u64,
    /// Operations that were made to fail.
    pub failures: u64,
    /// Crash states that were made.
    pub crash_states: u64,
    /// Moments at which everything that the disk might hold was looked at, sector by sector.
    pub moments: u64,
}

impl Counts {
    /// The numbers with their names.
    pub fn named(self) -> [(&'static str, u64); 5] {
        [
            ("requests", self.requests),
            ("operations", self.operations),
            ("failures", self.failures),
            ("crash_states", self.crash_states),
            ("moments", self.moments),
        ]
    }
}

/// The counts of the worlds and models that count in it. Clones have the same counts.
///
/// Each world and each model has one of its own at first, so that a judge's own reading of a crash state is no operation of the
/// run.
#[derive(Clone, Default)]
pub struct Tally(Arc<Mutex<Counts>>);

impl Tally {
    /// The counts so far.
    pub fn counts(&self) -> Counts {
        *self.0.lock()
    }

    pub(crate) fn change(&self, change: impl FnOnce(&mut Counts)) {
        change(&mut self.0.lock());
    }
}

impl fmt::Debug for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.counts().fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CrashOptions, DiscardLeaves, GuestConfig, GuestModel, GuestRequest, SimWorld};

    #[test]
    fn a_tally_has_what_counts_in_it() {
        let tally = Tally::default();
        let (counted, aside) = (SimWorld::new(1), SimWorld::new(1));
        counted.count_in(&tally);
        for world in [&counted, &aside] {
            world.note_moment();
            assert_eq!(world.crash_states(&CrashOptions::default()).count(), 1);
        }
        let config = GuestConfig { len: 512, backing_len: 0, discard: DiscardLeaves::Zero };
        let mut model = GuestModel::new(config);
        model.begin(GuestRequest::Read);
        model.count_in(&tally);
        model.begin(GuestRequest::Flush);
        let expected = Counts { requests: 1, crash_states: 1, moments: 1, ..Counts::default() };
        assert_eq!(tally.counts(), expected);
    }
}
