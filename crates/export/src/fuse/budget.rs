//! How much memory requests of the kernel may take.

use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

/// Bytes that may be taken; whoever takes waits until there are enough. One request fits always. One task takes, any thread
/// gives back.
#[derive(Debug)]
pub(super) struct Budget(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    most: u64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    taken: u64,
    waiting: Option<Waker>,
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Budget {
    pub(super) fn new(most: u64) -> Self {
        Self(Arc::new(Inner { most, state: Mutex::default() }))
    }

    /// Waits for room. The room is given back with the value.
    pub(super) async fn take(&self, bytes: u64) -> Share {
        poll_fn(|cx| {
            let mut state = self.0.lock();
            if state.taken > 0 && state.taken.saturating_add(bytes) > self.0.most {
                state.waiting = Some(cx.waker().clone());
                return Poll::Pending;
            }
            state.taken = state.taken.saturating_add(bytes);
            Poll::Ready(())
        })
        .await;
        Share { budget: Arc::clone(&self.0), bytes }
    }
}

/// A part of a budget.
#[derive(Debug)]
pub(super) struct Share {
    budget: Arc<Inner>,
    bytes: u64,
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut state = self.budget.lock();
        state.taken -= self.bytes;
        let waiting = state.waiting.take();
        drop(state);
        if let Some(waiting) = waiting {
            waiting.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::pin;
    use std::task::Context;

    fn now<T>(future: impl Future<Output = T>) -> Option<T> {
        match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(value) => Some(value),
            Poll::Pending => None,
        }
    }

    #[test]
    fn no_more_is_taken_than_there_is() {
        let budget = Budget::new(100);
        let large = now(budget.take(1000)).expect("one request fits always");
        assert!(now(budget.take(1)).is_none());
        drop(large);
        let shares = [now(budget.take(60)).unwrap(), now(budget.take(40)).unwrap()];
        assert!(now(budget.take(1)).is_none());
        std::thread::spawn(move || drop(shares)).join().unwrap();
        assert!(now(budget.take(100)).is_some());
    }
}
