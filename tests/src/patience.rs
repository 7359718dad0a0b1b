//! Waiting for what happens, however long a busy machine takes for it.
//!
//! No test counts seconds: the only limit of time is a guard against a test that hangs.

use std::fmt::Display;
use std::time::{Duration, Instant};

/// Longest wait of a test: what takes longer never comes.
pub const LONGEST: Duration = Duration::from_secs(600);

/// Pause between two looks.
const PAUSE: Duration = Duration::from_millis(5);

/// Guard of a loop that waits.
#[derive(Debug, Clone, Copy)]
pub struct Patience(Instant);

impl Patience {
    /// Patience that ends [`LONGEST`] from now.
    #[must_use]
    pub fn begin() -> Self {
        Self(Instant::now() + LONGEST)
    }

    /// Pauses before the next look for `what`.
    ///
    /// # Panics
    /// If it has not come for [`LONGEST`].
    #[track_caller]
    pub fn pause(self, what: impl Display) {
        self.check(what);
        std::thread::sleep(PAUSE);
    }

    /// As [`Patience::pause`], for a loop that pauses by itself.
    ///
    /// # Panics
    /// If it has not come for [`LONGEST`].
    #[track_caller]
    pub fn check(self, what: impl Display) {
        assert!(Instant::now() < self.0, "waited in vain for {LONGEST:?}: {what}");
    }
}

/// Looks until there is something; `what` tells what is waited for.
///
/// # Panics
/// If there is nothing for [`LONGEST`].
#[track_caller]
pub fn wait_for<T>(what: impl Display, mut look: impl FnMut() -> Option<T>) -> T {
    let patience = Patience::begin();
    loop {
        if let Some(found) = look() {
            return found;
        }
        patience.pause(&what);
    }
}

/// Looks until something is so; `what` tells what is waited for.
///
/// # Panics
/// If it is not so for [`LONGEST`].
#[track_caller]
pub fn wait_until(what: impl Display, mut is_so: impl FnMut() -> bool) {
    wait_for(what, || is_so().then_some(()));
}
