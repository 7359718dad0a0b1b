//! A gate that is closed for the moment in which one operation must be alone.

use crate::sync::atomic::{AtomicBool, Ordering::SeqCst};
use crate::sync::{Clock, GrowingPatience, WaitQueue};

/// Keeps newcomers out while it is closed. Those inside are counted elsewhere.
///
/// Order is what makes it safe. One who enters is counted first, and looks at the gate then. One who closes it closes first,
/// and counts then. Both are `SeqCst`, so that one of them sees the other. One operation at a time closes it.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    closed: AtomicBool,
    waiting: WaitQueue,
}

/// The closed gate: dropping this opens it.
#[derive(Debug)]
pub(crate) struct Closed<'a>(&'a Gate);

impl Gate {
    pub(crate) fn is_open(&self) -> bool {
        !self.closed.load(SeqCst)
    }

    /// Waits until the gate is open and `enter`, which looks at it, gives something.
    pub(crate) async fn pass<T>(&self, mut enter: impl FnMut() -> Option<T>) -> T {
        self.waiting.until(|| if self.is_open() { enter() } else { None }).await
    }

    /// Waits with `leave` for those inside, closes the gate, and waits for those that came meanwhile. If one of these takes
    /// long, it opens the gate again and begins anew: one whose worker is not polled keeps the caller waiting, and newcomers
    /// for a while only.
    pub(crate) async fn close_after(&self, clock: &impl Clock, leave: impl AsyncFn()) -> Closed<'_> {
        let mut patience = GrowingPatience::new();
        loop {
            leave().await;
            self.closed.store(true, SeqCst);
            let closed = Closed(self);
            if patience.outlasts(clock, &leave).await {
                return closed;
            }
        }
    }
}

impl Drop for Closed<'_> {
    fn drop(&mut self) {
        self.0.closed.store(false, SeqCst);
        self.0.waiting.wake_all();
    }
}
