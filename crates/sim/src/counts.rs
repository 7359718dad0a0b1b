//! How much a simulated run did, counted per thread: what a report about it may claim.

use std::cell::Cell;

/// Numbers that only grow while a thread runs simulated worlds.
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

thread_local! {
    static COUNTS: Cell<Counts> = const { Cell::new(Counts {
        requests: 0, operations: 0, failures: 0, crash_states: 0, moments: 0
    }) };
}

impl Counts {
    /// The counts of this thread so far.
    pub fn now() -> Self {
        COUNTS.get()
    }

    /// Changes what this thread counted.
    pub fn change(change: impl FnOnce(&mut Self)) {
        let mut counts = COUNTS.get();
        change(&mut counts);
        COUNTS.set(counts);
    }

    /// The difference to `earlier`.
    pub fn since(self, earlier: Self) -> Self {
        Self {
            requests: self.requests - earlier.requests,
            operations: self.operations - earlier.operations,
            failures: self.failures - earlier.failures,
            crash_states: self.crash_states - earlier.crash_states,
            moments: self.moments - earlier.moments,
        }
    }

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

/// While it lives, nothing that this thread does is counted: a judge's own reading of a crash state is no operation of
/// the run.
#[derive(Debug)]
pub struct Aside(Counts);

impl Aside {
    /// Stops the counting.
    #[allow(clippy::new_without_default, reason = "making one has an effect")]
    pub fn new() -> Self {
        Self(Counts::now())
    }
}

impl Drop for Aside {
    fn drop(&mut self) {
        COUNTS.set(self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_done_aside_does_not_count() {
        let start = Counts::now();
        Counts::change(|c| c.moments += 2);
        {
            let _aside = Aside::new();
            Counts::change(|c| c.operations += 5);
        }
        let done = Counts::now().since(start);
        assert_eq!((done.moments, done.operations), (2, 0));
    }
}
