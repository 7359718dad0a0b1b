//! Patience with work that another request has under way on a worker that may not be driven.
//!
//! Loads are shared: the first request that misses a slice reads it, the others wait. The read belongs to the first one's
//! worker, whose embedder may do something else for as long as it likes. A read can be repeated without harm, so whoever
//! has waited for [`PATIENCE`] reads for itself.
//!
//! Things that can't be repeated are waited for as long as it may come ([`while_driven`]).

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;
use zebu_storage::Worker;
use zebu_storage::drive::{self, BETWEEN_LOOKS, Drive, OneOf};

/// How long the read of another request is waited for. Slow disks answer within it, so reads are rarely repeated.
pub(crate) const PATIENCE: Duration = Duration::from_secs(1);

/// Time as a request feels it.
pub(crate) trait Clock {
    /// Ends after [`PATIENCE`].
    fn patience(&self) -> impl Future<Output = ()>;

    /// Ends when it is time to look at those who are waited for.
    fn look(&self) -> impl Future<Output = ()> {
        self.patience()
    }

    /// The worker of the request.
    fn drive(&self) -> Option<&Arc<Drive>>;
}

impl Clock for Worker {
    async fn patience(&self) {
        self.sleep(PATIENCE).await;
    }

    async fn look(&self) {
        self.sleep(BETWEEN_LOOKS).await;
    }

    fn drive(&self) -> Option<&Arc<Drive>> {
        Some(Self::drive(self))
    }
}

/// A clock that stands still: whoever is waited for is driven.
#[cfg(test)]
pub(crate) struct Standing;

#[cfg(test)]
impl Clock for Standing {
    fn patience(&self) -> impl Future<Output = ()> {
        std::future::pending()
    }

    fn drive(&self) -> Option<&Arc<Drive>> {
        None
    }
}

/// A worker of this number that nobody drives.
#[cfg(test)]
pub(crate) fn drive(number: usize) -> Arc<Drive> {
    Arc::new(Drive::unknown(number))
}

/// The result of `waits`, or `None` when patience is over.
pub(crate) async fn with_patience<T>(clock: &impl Clock, waits: impl Future<Output = T>) -> Option<T> {
    let (mut waits, mut patience) = (pin!(waits), pin!(clock.patience()));
    // Patience starts with its first poll, when there is something to wait for.
    poll_fn(|cx| match waits.as_mut().poll(cx) {
        Poll::Ready(value) => Poll::Ready(Some(value)),
        Poll::Pending => patience.as_mut().poll(cx).map(|()| None),
    })
    .await
}

/// The result of `waits`, which needs all of `awaited`, or `None` if nobody drives one of these. For work that can be given
/// up.
pub(crate) async fn while_driven<T>(
    clock: &impl Clock,
    awaited: impl Fn() -> Vec<OneOf>,
    waits: impl Future<Output = T>,
) -> Option<T> {
    drive::while_driven(async || clock.look().await, awaited, waits).await.ok()
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
