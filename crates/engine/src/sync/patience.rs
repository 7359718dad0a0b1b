//! Patience with work that another request has under way on a worker that may not be polled.
//!
//! Loads are shared: the first request that misses a slice reads it, the others wait. The read belongs to the first one's
//! worker, whose embedder may do something else for as long as it likes. A read can be repeated without harm, so whoever
//! has waited for [`PATIENCE`] reads for itself.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;
use zebu_storage::Worker;
use zebu_storage::sabotage::{self, Fault};

/// How long the read of another request is waited for. Slow disks answer within it, so reads are rarely repeated.
pub(crate) const PATIENCE: Duration = Duration::from_secs(1);

/// Time as a request feels it.
pub(crate) trait Clock {
    /// Ends after [`PATIENCE`].
    fn patience(&self) -> impl Future<Output = ()>;
}

impl Clock for Worker {
    async fn patience(&self) {
        self.sleep(PATIENCE).await;
    }
}

/// A clock that stands still: whoever is waited for is polled.
#[cfg(test)]
pub(crate) struct Standing;

#[cfg(test)]
impl Clock for Standing {
    fn patience(&self) -> impl Future<Output = ()> {
        std::future::pending()
    }
}

/// The result of `waits`, or `None` when patience is over.
pub(crate) async fn with_patience<T>(clock: &impl Clock, waits: impl Future<Output = T>) -> Option<T> {
    until_over(waits, clock.patience()).await
}

/// Times of [`PATIENCE`] after which a request that has not ended counts as one that never will: its worker is not polled,
/// or its disk does not answer.
pub(crate) const LONG: u32 = 30;

/// The result of `waits`, or `None` after half a minute. For work that can't be done without the end of another's request,
/// and can be given up.
pub(crate) async fn with_long_patience<T>(clock: &impl Clock, waits: impl Future<Output = T>) -> Option<T> {
    let long = async {
        for _ in 0..LONG {
            clock.patience().await;
        }
        if sabotage::is(Fault::WaitWithoutBound) {
            std::future::pending::<()>().await;
        }
    };
    until_over(waits, long).await
}

async fn until_over<T>(waits: impl Future<Output = T>, patience: impl Future<Output = ()>) -> Option<T> {
    let mut waits = pin!(waits);
    // Starts with its first poll, when there is something to wait for.
    let mut patience = pin!(patience);
    poll_fn(|cx| match waits.as_mut().poll(cx) {
        Poll::Ready(value) => Poll::Ready(Some(value)),
        Poll::Pending => patience.as_mut().poll(cx).map(|()| None),
    })
    .await
}

/// Times that patience is had with one wait, at most.
const MOST_TIMES: u32 = 32;

/// Patience that doubles from one attempt to the next, for one who holds others up while it waits: it gets its turn where
/// everything is slow.
pub(crate) struct GrowingPatience {
    times: u32,
}

impl GrowingPatience {
    pub(crate) fn new() -> Self {
        Self { times: 1 }
    }

    /// True if `wait` came to its end. It begins anew each time that patience is over.
    pub(crate) async fn outlasts(&mut self, clock: &impl Clock, wait: impl AsyncFn()) -> bool {
        for _ in 0..self.times {
            if with_patience(clock, wait()).await.is_some() {
                return true;
            }
        }
        self.times = (self.times * 2).min(MOST_TIMES);
        false
    }
}
