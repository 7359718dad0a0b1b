//! How many requests of one client, and how many bytes of data, may be in memory at once.

use std::cell::Cell;
use std::future::poll_fn;
use std::task::{Poll, Waker};

/// Requests, and bytes of their data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Load {
    pub(crate) requests: usize,
    pub(crate) bytes: u64,
}

impl Load {
    pub(crate) fn add(&mut self, other: Load) {
        self.requests += other.requests;
        self.bytes += other.bytes;
    }
}

/// Counts what a session has taken over and not answered yet. Belongs to one thread.
pub(crate) struct Gate {
    most: Load,
    now: Cell<Load>,
    waiting: Cell<Option<Waker>>,
}

impl Gate {
    pub(crate) fn new(most: Load) -> Self {
        Self { most, now: Cell::default(), waiting: Cell::new(None) }
    }

    /// Waits until there is room for a request with so many bytes, and takes it. One request fits always.
    pub(crate) async fn enter(&self, bytes: u64) -> Load {
        let load = Load { requests: 1, bytes };
        let fits = |now: Load| {
            now.requests == 0
                || (now.requests < self.most.requests && now.bytes.saturating_add(bytes) <= self.most.bytes)
        };
        self.wait_until(fits).await;
        let mut now = self.now.get();
        now.add(load);
        self.now.set(now);
        load
    }

    /// Whether nothing has been taken beside `load`.
    pub(crate) fn holds_only(&self, load: Load) -> bool {
        self.now.get() == load
    }

    /// Gives room back: the replies are on their way.
    pub(crate) fn leave(&self, load: Load) {
        let now = self.now.get();
        self.now.set(Load { requests: now.requests - load.requests, bytes: now.bytes - load.bytes });
        if let Some(waker) = self.waiting.take() {
            waker.wake();
        }
    }

    /// Waits until everything is answered.
    pub(crate) async fn empty(&self) {
        self.wait_until(|now| now.requests == 0).await;
    }

    async fn wait_until(&self, condition: impl Fn(Load) -> bool) {
        poll_fn(|cx| {
            if condition(self.now.get()) {
                return Poll::Ready(());
            }
            self.waiting.set(Some(cx.waker().clone()));
            Poll::Pending
        })
        .await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::pin;
    use std::task::Context;

    fn is_ready<T>(future: impl Future<Output = T>) -> bool {
        pin!(future).poll(&mut Context::from_waker(Waker::noop())).is_ready()
    }

    #[test]
    fn a_gate_holds_back_what_does_not_fit() {
        let gate = Gate::new(Load { requests: 3, bytes: 100 });
        assert!(is_ready(gate.enter(1000)), "one request fits always");
        assert!(!is_ready(gate.enter(0)));
        gate.leave(Load { requests: 1, bytes: 1000 });
        assert!(is_ready(gate.enter(60)));
        assert!(gate.holds_only(Load { requests: 1, bytes: 60 }));
        assert!(is_ready(gate.enter(40)));
        assert!(!gate.holds_only(Load { requests: 1, bytes: 60 }));
        assert!(!is_ready(gate.enter(1)), "bytes");
        assert!(is_ready(gate.enter(0)));
        assert!(!is_ready(gate.enter(0)), "requests");
        assert!(!is_ready(gate.empty()));
        gate.leave(Load { requests: 3, bytes: 100 });
        assert!(is_ready(gate.empty()));
    }
}
