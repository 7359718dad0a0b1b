//! Epochs: who commits, who waits, and how each commit ended.

use crate::{Error, Result};
use std::future::poll_fn;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Poll, Waker};
use zebu_storage::sabotage::{self, Fault};

/// Who commits, who waits.
#[derive(Debug, Default)]
pub(crate) struct Epochs {
    state: Mutex<State>,
    pub(crate) commits: AtomicU64,
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
    waiting: Vec<Waker>,
}

impl Default for State {
    fn default() -> Self {
        Self { current: Epoch::new(0), next: Epoch::new(1), running: None, ended: 0, waiting: Vec::new() }
    }
}

impl State {
    fn start_next(&mut self) {
        let after = Epoch::new(self.next.number + 1);
        self.current = std::mem::replace(&mut self.next, after);
        self.running = Some(Running::Gathering);
    }
}

/// What was linked between two freezes. Whoever waits for it holds it: however late they are woken, and however many
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

impl Epochs {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
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

    /// Wakes everyone who waits for a commit or a release.
    pub(crate) fn wake_all(&self) {
        for waker in std::mem::take(&mut self.state().waiting) {
            waker.wake();
        }
    }

    /// Has `waker` woken by the next [`Epochs::wake_all`] or end of a commit.
    pub(crate) fn wake_me(&self, waker: &Waker) {
        self.state().waiting.push(waker.clone());
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
            if let Err(error) = result
                && !sabotage::is(Fault::SwallowCommitError)
            {
                state.current.error.get_or_init(|| error);
            }
            state.running = None;
            state.ended = state.current.number;
            std::mem::take(&mut state.waiting)
        };
        for waker in waiting {
            waker.wake();
        }
    }

    /// Waits for the end of `epoch`; `Lead::Yes` if nobody runs it and the caller has to.
    pub(crate) async fn ended(&self, epoch: &Epoch) -> (Result<()>, Lead) {
        poll_fn(|cx| {
            let mut state = self.state();
            if state.ended >= epoch.number {
                return Poll::Ready((epoch.error.get().cloned().map_or(Ok(()), Err), Lead::No));
            }
            if state.running.is_none() && state.next.number == epoch.number {
                state.start_next();
                return Poll::Ready((Ok(()), Lead::Yes));
            }
            state.waiting.push(cx.waker().clone());
            Poll::Pending
        })
        .await
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
    use std::task::Context;

    #[test]
    fn a_flush_that_is_woken_late_learns_how_its_own_commit_ended() {
        let epochs = Epochs::default();
        let (mine, lead) = epochs.join();
        assert_eq!(lead, Lead::Yes);
        let mut cx = Context::from_waker(Waker::noop());
        let mut wait = pin!(epochs.ended(&mine));
        assert!(wait.as_mut().poll(&mut cx).is_pending());
        epochs.set_frozen();
        epochs.end(Err(Error::new(ErrorKind::Io, "the first")));
        for _ in 0..100 {
            assert_eq!(epochs.join().1, Lead::Yes);
            epochs.set_frozen();
            epochs.end(Ok(()));
        }
        let Poll::Ready((Err(error), Lead::No)) = wait.poll(&mut cx) else { panic!("it failed") };
        assert!(error.to_string().contains("the first"));
    }

    #[test]
    fn a_flush_that_comes_after_the_freeze_waits_for_the_next_commit() {
        let epochs = Epochs::default();
        let mut cx = Context::from_waker(Waker::noop());
        assert_eq!(epochs.join().1, Lead::Yes);
        epochs.set_frozen();
        let (next, lead) = epochs.join();
        assert_eq!(lead, Lead::No);
        let mut wait = pin!(epochs.ended(&next));
        assert!(wait.as_mut().poll(&mut cx).is_pending());
        epochs.end(Ok(()));
        let Poll::Ready((Ok(()), Lead::Yes)) = wait.poll(&mut cx) else { panic!("nobody else runs it") };
        let mut wait = pin!(epochs.ended(&next));
        assert!(wait.as_mut().poll(&mut cx).is_pending());
        epochs.set_frozen();
        epochs.end(Ok(()));
        assert!(matches!(wait.poll(&mut cx), Poll::Ready((Ok(()), Lead::No))));
    }
}
