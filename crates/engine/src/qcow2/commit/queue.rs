//! The queue of commits: which one runs, who waits for which, and how each ended.
//!
//! An epoch is what was linked between two commits. Each commit makes one epoch durable.

use crate::sync::atomic::{
    AtomicBool, AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};
use crate::sync::{Mutex, MutexGuard, OnceLock, WaitList};
use crate::{Error, Result};
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Poll, Waker};
use zebu_storage::sabotage::{self, Fault};

/// The commit that runs, the next one, and those who wait for either.
#[derive(Debug, Default)]
pub(crate) struct CommitQueue {
    state: Mutex<State>,
    /// Something was linked whose bytes must be durable before the link.
    needs_data_barrier: AtomicBool,
    commits: AtomicU64,
    failed: AtomicU64,
}

#[derive(Debug)]
struct State {
    /// The last epoch that began to commit.
    current: Arc<Epoch>,
    /// The one after it.
    next: Arc<Epoch>,
    running: Option<Running>,
    /// Number of the last epoch whose commit ended, well or not.
    ended: u64,
    waiting: WaitList,
}

impl Default for State {
    fn default() -> Self {
        Self {
            current: Epoch::new(0),
            next: Epoch::new(1),
            running: None,
            ended: 0,
            waiting: WaitList::default(),
        }
    }
}

impl State {
    fn start_next(&mut self) {
        let after = Epoch::new(self.next.number + 1);
        self.current = std::mem::replace(&mut self.next, after);
        self.running = Some(Running::Gathering);
    }
}

/// The links between two freezes. A waiter holds it: however late they are woken, and however many
/// commits end meanwhile, they learn how its own went.
#[derive(Debug)]
pub(crate) struct Epoch {
    number: u64,
    /// Why its commit failed; set before it has ended.
    error: OnceLock<Error>,
}

impl Epoch {
    fn new(number: u64) -> Arc<Self> {
        Arc::new(Self { number, error: OnceLock::new() })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Running {
    /// Started, nothing frozen: a flush may still join.
    Gathering,
    /// Copies are taken.
    Frozen,
}

impl CommitQueue {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// The epoch that covers everything linked before the call, and whether the caller has to run its commit.
    pub(crate) fn join(&self) -> (Arc<Epoch>, Lead) {
        let mut state = self.state();
        match state.running {
            None => {
                state.start_next();
                (state.current.clone(), Lead::Yes)
            }
            Some(Running::Gathering) => (state.current.clone(), Lead::No),
            Some(Running::Frozen) if sabotage::is(Fault::JoinFrozenCommit) => {
                (state.current.clone(), Lead::No)
            }
            Some(Running::Frozen) => (state.next.clone(), Lead::No),
        }
    }

    /// Has the next commit make data durable before its links.
    pub(crate) fn need_data_barrier(&self) {
        self.needs_data_barrier.store(true, Release);
    }

    /// Whether something was linked whose bytes must be durable before the link.
    pub(crate) fn needs_data_barrier(&self) -> bool {
        self.needs_data_barrier.load(Acquire)
    }

    /// The same, and the commit that asks sees to it.
    pub(crate) fn take_data_barrier(&self) -> bool {
        self.needs_data_barrier.swap(false, Acquire)
    }

    /// Counts a commit that succeeded.
    pub(crate) fn note_done(&self) {
        self.commits.fetch_add(1, Relaxed);
    }

    /// Commits that succeeded since the open.
    pub(crate) fn commits(&self) -> u64 {
        self.commits.load(Relaxed)
    }

    /// Commits that failed since the open.
    pub(crate) fn failed(&self) -> u64 {
        let _state = self.state();
        self.failed.load(Relaxed)
    }

    pub(crate) fn is_running(&self) -> bool {
        self.state().running.is_some()
    }

    pub(crate) fn set_frozen(&self) {
        self.state().running = Some(Running::Frozen);
    }

    pub(crate) fn end(&self, result: Result<()>) {
        let waiting = {
            let mut state = self.state();
            if let Err(error) = result {
                self.failed.fetch_add(1, Relaxed);
                if !sabotage::is(Fault::SwallowCommitError) {
                    state.current.error.get_or_init(|| error);
                }
            }
            state.running = None;
            state.ended = state.current.number;
            state.waiting.take()
        };
        waiting.wake();
    }

    /// Waits for the end of `epoch`, however long it takes; `Lead::Yes` if nobody runs it and the caller has to.
    pub(crate) async fn ended(&self, epoch: &Epoch) -> (Result<()>, Lead) {
        poll_fn(|cx| self.poll_ended(epoch, cx.waker())).await
    }

    /// Waits until the commit that runs now has ended.
    pub(crate) async fn running_ended(&self) {
        let running = {
            let state = self.state();
            state.running.map(|_| state.current.clone())
        };
        if let Some(epoch) = running {
            drop(self.ended(&epoch).await);
        }
    }

    fn poll_ended(&self, epoch: &Epoch, waker: &Waker) -> Poll<(Result<()>, Lead)> {
        let mut state = self.state();
        if state.ended >= epoch.number {
            return Poll::Ready((epoch.error.get().cloned().map_or(Ok(()), Err), Lead::No));
        }
        if state.running.is_none() && state.next.number == epoch.number {
            state.start_next();
            return Poll::Ready((Ok(()), Lead::Yes));
        }
        state.waiting.add(waker);
        Poll::Pending
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lead {
    Yes,
    No,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;
    use std::pin::pin;
    use std::task::{Context, Wake, Waker};

    #[test]
    fn a_flush_that_is_woken_late_learns_how_its_own_commit_ended() {
        let queue = CommitQueue::default();
        let (mine, lead) = queue.join();
        assert_eq!(lead, Lead::Yes);
        let mut cx = Context::from_waker(Waker::noop());
        let mut wait = pin!(queue.ended(&mine));
        assert!(wait.as_mut().poll(&mut cx).is_pending());
        queue.set_frozen();
        queue.end(Err(Error::new(ErrorKind::Io, "the first")));
        for _ in 0..100 {
            assert_eq!(queue.join().1, Lead::Yes);
            queue.set_frozen();
            queue.end(Ok(()));
        }
        let Poll::Ready((Err(error), Lead::No)) = wait.poll(&mut cx) else { panic!("it failed") };
        assert!(error.to_string().contains("the first"));
    }

    #[test]
    fn a_flush_that_comes_after_the_freeze_waits_for_the_next_commit() {
        let queue = CommitQueue::default();
        let mut cx = Context::from_waker(Waker::noop());
        assert_eq!(queue.join().1, Lead::Yes);
        queue.set_frozen();
        let (next, lead) = queue.join();
        assert_eq!(lead, Lead::No);
        let mut wait = pin!(queue.ended(&next));
        assert!(wait.as_mut().poll(&mut cx).is_pending());
        queue.end(Ok(()));
        let Poll::Ready((Ok(()), Lead::Yes)) = wait.poll(&mut cx) else { panic!("nobody else runs it") };
        let mut wait = pin!(queue.ended(&next));
        assert!(wait.as_mut().poll(&mut cx).is_pending());
        queue.set_frozen();
        queue.end(Ok(()));
        assert!(matches!(wait.poll(&mut cx), Poll::Ready((Ok(()), Lead::No))));
    }

    /// Looks at the queue when it is woken, as a future does that is polled at once.
    struct LooksAgain {
        queue: CommitQueue,
        found_it_locked: Mutex<Option<bool>>,
    }
    impl Wake for LooksAgain {
        fn wake(self: Arc<Self>) {
            *self.found_it_locked.lock() = Some(self.queue.state.try_lock().is_none());
        }
    }

    #[test]
    fn who_is_woken_may_look_at_once() {
        let looks = Arc::new(LooksAgain { queue: CommitQueue::default(), found_it_locked: Mutex::default() });
        let waker = Waker::from(looks.clone());
        let (mine, _) = looks.queue.join();
        let mut wait = pin!(looks.queue.ended(&mine));
        assert!(wait.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        looks.queue.end(Ok(()));
        assert_eq!(*looks.found_it_locked.lock(), Some(false));
    }
}
