//! Memory for the requests of all clients of a server, of whatever kind, divided among them: connections of NBD, rings of
//! vhost-user-blk, files (FUSE).
//!
//! The first half is for the requests that come first. The second half is divided evenly: a client that has less than its share gets in
//! as long as the share lasts, whatever others hold. So clients that do not take their replies can't keep others from
//! theirs. All together hold no more than the limit, and what connections take that came after the requests.

use slab::Slab;
use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::task::{Context, Poll, Waker};
use zebu_storage::sync::Mutex;

/// The least that a budget has: half of it has room for the largest request.
pub const MIN_MEMORY: u64 = 64 << 20;
/// The default size of a budget.
pub const DEFAULT_MEMORY: u64 = 512 << 20;

/// A limit in bytes for the memory of a server's clients. Cheap to clone; clones share it.
#[derive(Debug, Clone)]
pub struct MemoryBudget(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    limit: u64,
    /// Memory of idle connections.
    fixed: AtomicU64,
    clients: AtomicU64,
    /// Memory of requests.
    used: AtomicU64,
    /// Waiters for room; as many as `waiting` says.
    wakers: Mutex<Slab<Option<Waker>>>,
    waiting: AtomicUsize,
}

impl Default for MemoryBudget {
    fn default() -> Self {
        Self::new(DEFAULT_MEMORY)
    }
}

impl MemoryBudget {
    /// A budget of `limit` bytes, at least [`MIN_MEMORY`].
    pub fn new(limit: u64) -> Self {
        Self(Arc::new(Inner {
            limit: limit.max(MIN_MEMORY),
            fixed: AtomicU64::new(0),
            clients: AtomicU64::new(0),
            used: AtomicU64::new(0),
            wakers: Mutex::default(),
            waiting: AtomicUsize::new(0),
        }))
    }

    /// Bytes that may be taken.
    pub fn limit(&self) -> u64 {
        self.0.limit
    }

    /// Bytes that are taken: by connections, and by requests that were not answered or whose replies were not taken.
    pub fn used(&self) -> u64 {
        self.0.fixed.load(SeqCst) + self.0.used.load(SeqCst)
    }

    /// Requests that wait for memory.
    pub fn waiting(&self) -> usize {
        self.0.waiting.load(SeqCst)
    }

    /// Takes memory for a job of the server's own, for as long as the result lives: `wanted` bytes, but no more than half of
    /// what idle connections may still have, so that jobs never keep clients out. `None` if that is less than `least`.
    pub fn reserve(&self, wanted: u64, least: u64) -> Option<Reserved> {
        let most = self.0.limit / 2;
        let mut now = self.0.fixed.load(SeqCst);
        loop {
            let bytes = wanted.min(most.saturating_sub(now) / 2);
            if bytes < least {
                return None;
            }
            match self.0.fixed.compare_exchange(now, now + bytes, SeqCst, SeqCst) {
                Ok(_) => return Some(Reserved { budget: Arc::clone(&self.0), bytes }),
                Err(other) => now = other,
            }
        }
    }

    /// Takes a client in; `None` if those that are there have half of the memory by being there. `held` says what its
    /// requests take.
    pub(crate) fn admit(&self, due: Due, held: Arc<AtomicU64>) -> Option<Account> {
        let most = self.0.limit / 2;
        let Due { fixed, reserve } = due;
        let add = |now: u64| now.checked_add(fixed)?.checked_add(reserve).filter(|sum| *sum <= most);
        self.0.fixed.fetch_update(SeqCst, SeqCst, add).ok()?;
        self.0.clients.fetch_add(1, SeqCst);
        Some(Account { budget: Arc::clone(&self.0), due, held })
    }
}

/// Memory of a job of the server's own; given back when dropped.
#[derive(Debug)]
pub struct Reserved {
    budget: Arc<Inner>,
    bytes: u64,
}

impl Reserved {
    /// Bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.budget.fixed.fetch_sub(self.bytes, SeqCst);
        self.budget.wake_all();
    }
}

/// Bytes that a client has by being there.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Due {
    /// For itself.
    pub(crate) fixed: u64,
    /// For its requests. One that has room for its largest request is never held up by what others hold.
    pub(crate) reserve: u64,
}

impl Inner {
    /// For requests.
    fn room(&self) -> u64 {
        self.limit - self.fixed.load(SeqCst).min(self.limit / 2)
    }

    fn share(&self) -> u64 {
        self.room() / 2 / self.clients.load(SeqCst).max(1)
    }

    /// Takes `bytes` for a client that has `own`, if they are to be had.
    fn take(&self, own: u64, bytes: u64) -> bool {
        let (room, share) = (self.room(), self.share());
        let is_within_share = own.saturating_add(bytes) <= share;
        let add = |used: u64| {
            let sum = used.checked_add(bytes)?;
            // What is larger than all of it goes alone.
            (sum <= room / 2 || is_within_share && sum <= room || used == 0).then_some(sum)
        };
        self.used.fetch_update(SeqCst, SeqCst, add).is_ok()
    }

    fn give(&self, bytes: u64) {
        self.used.fetch_sub(bytes, SeqCst);
    }

    fn wake_all(&self) {
        if self.waiting.load(SeqCst) == 0 {
            return;
        }
        let wakers: Vec<Waker> =
            self.wakers.lock().iter_mut().filter_map(|(_, waker)| waker.take()).collect();
        wakers.into_iter().for_each(Waker::wake);
    }
}

/// The share of one client in a budget. One task takes, any thread gives back.
#[derive(Debug)]
pub(crate) struct Account {
    budget: Arc<Inner>,
    due: Due,
    /// Bytes that its requests take. What is beyond the reserve is counted in `budget.used`.
    held: Arc<AtomicU64>,
}

impl Account {
    /// Bytes of `held` that the budget has to give.
    fn beyond_reserve(&self, held: u64) -> u64 {
        held.saturating_sub(self.due.reserve)
    }

    /// Takes `bytes` if they are to be had.
    pub(crate) fn try_take(&self, bytes: u64) -> bool {
        let mut held = self.held.load(SeqCst);
        loop {
            let own = self.beyond_reserve(held);
            let more = self.beyond_reserve(held.saturating_add(bytes)) - own;
            if more > 0 && !self.budget.take(own, more) {
                return false;
            }
            match self.held.compare_exchange(held, held.saturating_add(bytes), SeqCst, SeqCst) {
                Ok(_) => return true,
                // Another thread has given something back meanwhile.
                Err(now) => {
                    self.budget.give(more);
                    held = now;
                }
            }
        }
    }

    /// Waits until `bytes` are to be had, and takes them.
    pub(crate) async fn take(&self, bytes: u64) {
        if !self.try_take(bytes) {
            let waiting = Waiting::new(&self.budget);
            poll_fn(|cx| waiting.poll(cx, || self.try_take(bytes))).await;
        }
    }

    /// Gives bytes back.
    pub(crate) fn give(&self, bytes: u64) {
        if bytes > 0 {
            let held = self.held.fetch_sub(bytes, SeqCst);
            self.budget.give(self.beyond_reserve(held) - self.beyond_reserve(held - bytes));
            // Where the reserve is free again, its owner may wait for that.
            self.budget.wake_all();
        }
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        self.give(self.held.load(SeqCst));
        self.budget.fixed.fetch_sub(self.due.fixed + self.due.reserve, SeqCst);
        self.budget.clients.fetch_sub(1, SeqCst);
        self.budget.wake_all();
    }
}

/// A place among those that wait.
struct Waiting<'a> {
    budget: &'a Inner,
    key: usize,
}

impl<'a> Waiting<'a> {
    fn new(budget: &'a Inner) -> Self {
        let mut wakers = budget.wakers.lock();
        let key = wakers.insert(None);
        budget.waiting.store(wakers.len(), SeqCst);
        drop(wakers);
        Self { budget, key }
    }

    fn poll(&self, cx: &Context<'_>, try_to_take: impl Fn() -> bool) -> Poll<()> {
        // First, so that what is given back from now on wakes us.
        if let Some(waker) = self.budget.wakers.lock().get_mut(self.key) {
            *waker = Some(cx.waker().clone());
        }
        if try_to_take() { Poll::Ready(()) } else { Poll::Pending }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut wakers = self.budget.wakers.lock();
        wakers.try_remove(self.key);
        self.budget.waiting.store(wakers.len(), SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::pin;

    const MIB: u64 = 1 << 20;

    fn takes(account: &Account, bytes: u64) -> bool {
        pin!(account.take(bytes)).poll(&mut Context::from_waker(Waker::noop())).is_ready()
    }

    fn client(budget: &MemoryBudget) -> Account {
        budget.admit(Due::default(), Arc::default()).unwrap()
    }

    #[test]
    fn jobs_share_what_clients_leave_and_keep_none_out() {
        let budget = MemoryBudget::new(64 * MIB);
        let jobs: Vec<Reserved> = std::iter::from_fn(|| budget.reserve(32 * MIB, MIB)).collect();
        let bytes: Vec<u64> = jobs.iter().map(|job| job.bytes() / MIB).collect();
        assert_eq!(bytes, [16, 8, 4, 2, 1]);
        assert_eq!(budget.used(), 31 * MIB);
        assert!(takes(&client(&budget), 16 * MIB), "a client gets in beside them");
        drop(jobs);
        assert_eq!(budget.used(), 0);
        assert_eq!(budget.reserve(MIB, MIB).map(|job| job.bytes()), Some(MIB));
    }

    #[test]
    fn those_who_hold_much_leave_each_other_client_its_share() {
        let budget = MemoryBudget::new(64 * MIB);
        let (greedy, modest, late) = (client(&budget), client(&budget), client(&budget));
        assert!(takes(&greedy, 32 * MIB));
        assert!(!takes(&greedy, 1), "it has its half and more than its share");
        assert!(takes(&modest, 10 * MIB));
        assert!(!takes(&modest, MIB), "a third of the other half is 10.67 MiB");
        let others: Vec<Account> = (0..7).map(|_| client(&budget)).collect();
        assert!(takes(&late, 3 * MIB) && !takes(&late, MIB), "a tenth");
        assert!(others.iter().all(|other| takes(other, 2 * MIB)));
        assert!(budget.used() <= budget.limit());
        greedy.give(32 * MIB);
        assert!(takes(&late, MIB));
        drop((greedy, modest, late, others));
        assert_eq!((budget.used(), budget.waiting()), (0, 0));
    }

    #[test]
    fn a_request_of_any_size_goes_alone() {
        let budget = MemoryBudget::new(64 * MIB);
        let (large, small) = (client(&budget), client(&budget));
        assert!(takes(&large, 1 << 40));
        assert!(!takes(&small, 1));
        drop(large);
        assert!(takes(&small, 1));
    }

    #[test]
    fn who_waits_is_woken_by_whoever_gives_back() {
        let budget = MemoryBudget::new(64 * MIB);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let account = client(&budget);
                    for turn in 0..500 {
                        let bytes = (turn % 32 + 1) * MIB;
                        crate::test_wait::block_on(account.take(bytes));
                        assert!(budget.used() <= budget.limit());
                        account.give(bytes);
                    }
                });
            }
        });
        assert_eq!((budget.used(), budget.waiting()), (0, 0));
    }

    #[test]
    fn connections_take_half_at_most() {
        let budget = MemoryBudget::new(64 * MIB);
        let all: Vec<Account> =
            std::iter::from_fn(|| budget.admit(Due { fixed: MIB, reserve: 0 }, Arc::default()))
                .take(100)
                .collect();
        assert_eq!(all.len(), 32);
        assert!(takes(&all[0], MIB / 2), "a share of the rest");
    }

    #[test]
    fn a_reserve_is_there_whatever_others_hold() {
        let budget = MemoryBudget::new(64 * MIB);
        let greedy = client(&budget);
        let file = budget.admit(Due { fixed: MIB, reserve: 2 * MIB }, Arc::default()).unwrap();
        assert_eq!(budget.used(), 3 * MIB);
        assert!(takes(&greedy, 1 << 40));
        assert!(takes(&file, MIB) && takes(&file, MIB) && !takes(&file, 1), "its reserve, and no more");
        file.give(MIB);
        assert!(takes(&file, MIB));
        greedy.give(1 << 40);
        assert_eq!(budget.used(), 3 * MIB);
        assert!(takes(&file, 10 * MIB));
        assert_eq!(budget.used(), 13 * MIB);
        file.give(11 * MIB);
        assert_eq!(budget.used(), 3 * MIB, "what is given back is what goes beyond the reserve");
        drop(file);
        assert_eq!(budget.used(), 0);
    }
}
