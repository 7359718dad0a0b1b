//! How many requests of one client, and how many bytes for them, may be in memory at once.

use crate::memory_budget::Account;
use std::future::poll_fn;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::task::{Poll, Waker};
use zebu_storage::sync::Mutex;

/// Requests, and bytes of memory for them.
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

/// Counts what was taken over from a client and not answered yet. One task takes, any thread gives back.
#[derive(Debug)]
pub(crate) struct InflightLimit {
    /// Of the memory of all clients.
    account: Account,
    most: Load,
    /// Bytes that a request takes beside its data.
    each: u64,
    requests: AtomicUsize,
    bytes: AtomicU64,
    waiting: Waiting,
}

/// The waiter for room, if there is one.
#[derive(Debug, Default)]
struct Waiting {
    /// Whether there is a waker, so that nobody takes the lock for nothing.
    is_there: AtomicUsize,
    waker: Mutex<Option<Waker>>,
}

impl Waiting {
    fn set(&self, waker: &Waker) {
        *self.waker.lock() = Some(waker.clone());
        self.is_there.store(1, SeqCst);
    }

    fn wake(&self) {
        if self.is_there.swap(0, SeqCst) == 1
            && let Some(waker) = self.waker.lock().take()
        {
            waker.wake();
        }
    }
}

impl InflightLimit {
    pub(crate) fn new(most: Load, account: Account) -> Self {
        let (requests, bytes) = (AtomicUsize::new(0), AtomicU64::new(0));
        Self { account, most, each: 0, requests, bytes, waiting: Waiting::default() }
    }

    /// Counts so many bytes more for each request in the memory of all clients.
    pub(crate) fn with_each(mut self, bytes: u64) -> Self {
        self.each = bytes;
        self
    }

    fn now(&self) -> Load {
        Load { requests: self.requests.load(SeqCst), bytes: self.bytes.load(SeqCst) }
    }

    /// Waits until there is room for a request with so many bytes, and takes it. One request fits always, once the memory
    /// of all clients has room for it. To be called by one task only.
    pub(crate) async fn enter(&self, bytes: u64) -> Load {
        let fits = |now: Load| {
            now.requests == 0
                || (now.requests < self.most.requests && now.bytes.saturating_add(bytes) <= self.most.bytes)
        };
        self.wait_until(fits).await;
        self.account.take(bytes.saturating_add(self.each)).await;
        self.requests.fetch_add(1, SeqCst);
        self.bytes.fetch_add(bytes, SeqCst);
        Load { requests: 1, bytes }
    }

    /// Whether nothing has been taken beside `load`.
    pub(crate) fn holds_only(&self, load: Load) -> bool {
        self.now() == load
    }

    /// Gives room back: the replies are on their way.
    pub(crate) fn leave(&self, load: Load) {
        self.bytes.fetch_sub(load.bytes, SeqCst);
        self.requests.fetch_sub(load.requests, SeqCst);
        self.account.give(load.bytes + self.each * load.requests as u64);
        self.waiting.wake();
    }

    /// Waits until everything is answered.
    pub(crate) async fn empty(&self) {
        self.wait_until(|now| now.requests == 0).await;
    }

    async fn wait_until(&self, condition: impl Fn(Load) -> bool) {
        poll_fn(|cx| {
            if condition(self.now()) {
                return Poll::Ready(());
            }
            // First, so that what is given back from now on wakes us.
            self.waiting.set(cx.waker());
            if condition(self.now()) { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory_budget::{Due, MemoryBudget};
    use std::pin::pin;
    use std::sync::Arc;
    use std::task::Context;

    fn is_ready<T>(future: impl Future<Output = T>) -> bool {
        pin!(future).poll(&mut Context::from_waker(Waker::noop())).is_ready()
    }

    #[test]
    fn a_limit_holds_back_what_does_not_fit() {
        let budget = MemoryBudget::default();
        let limit = InflightLimit::new(
            Load { requests: 3, bytes: 100 },
            budget.admit(Due::default(), Arc::default()).unwrap(),
        );
        assert!(is_ready(limit.enter(1000)), "one request fits always");
        assert!(!is_ready(limit.enter(0)));
        limit.leave(Load { requests: 1, bytes: 1000 });
        assert!(is_ready(limit.enter(60)));
        assert!(limit.holds_only(Load { requests: 1, bytes: 60 }));
        assert!(is_ready(limit.enter(40)));
        assert!(!limit.holds_only(Load { requests: 1, bytes: 60 }));
        assert!(!is_ready(limit.enter(1)), "bytes");
        assert!(is_ready(limit.enter(0)));
        assert!(!is_ready(limit.enter(0)), "requests");
        assert!(!is_ready(limit.empty()));
        limit.leave(Load { requests: 3, bytes: 100 });
        assert!(is_ready(limit.empty()));
    }

    #[test]
    fn requests_count_beside_their_data() {
        let budget = MemoryBudget::default();
        let account = budget.admit(Due::default(), Arc::default()).unwrap();
        let limit = InflightLimit::new(Load { requests: 9, bytes: 100 }, account).with_each(40);
        assert!(is_ready(limit.enter(0)) && is_ready(limit.enter(100)));
        assert_eq!(budget.used(), 180);
        limit.leave(Load { requests: 2, bytes: 100 });
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn room_that_another_thread_gives_back_is_found() {
        let budget = MemoryBudget::default();
        let limit = InflightLimit::new(
            Load { requests: 2, bytes: 100 },
            budget.admit(Due::default(), Arc::default()).unwrap(),
        );
        std::thread::scope(|scope| {
            let (sender, receiver) = std::sync::mpsc::channel();
            let limit = &limit;
            scope.spawn(move || receiver.into_iter().for_each(|load| limit.leave(load)));
            for _ in 0..2000 {
                sender.send(crate::test_wait::block_on(limit.enter(60))).unwrap();
            }
        });
        assert!(is_ready(limit.empty()));
        assert_eq!(budget.used(), 0);
    }
}
