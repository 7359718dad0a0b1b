//! Limits that only large and old images reach, lowered so that small ones cross them.

use std::fmt;
use zebu_sim::SimRng;
use zebu_storage::sabotage::{Limit, limit};

/// The limits of a run: those of the engine, or a small number in their place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limits(Option<u64>);

impl Limits {
    /// The limits of the engine.
    pub(crate) const ORDINARY: Self = Self(None);

    /// The limits of a seed: small ones for one seed in three. They are drawn apart, so that a seed means the same otherwise.
    pub(crate) fn of_seed(seed: u64) -> Self {
        let mut rng = SimRng::new(seed ^ 0x6c69_6d69_7473);
        Self(rng.chance(1, 3).then(|| rng.between(2, 3)))
    }

    /// Has the engine keep them on this thread.
    pub(crate) fn set(self) {
        for which in Limit::COUNTS {
            limit(which, self.0.unwrap_or(u64::MAX));
        }
    }
}

impl fmt::Display for Limits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            None => f.write_str("ordinary limits"),
            Some(most) => write!(f, "limits of {most}"),
        }
    }
}
