//! A mutex whose holder may await. Deterministic (first come, first served), usable from any worker.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Mutex, PoisonError};
use std::task::{Context, Poll, Waker};

/// The lock. What it protects is named where it is kept.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    held: bool,
    next_ticket: u64,
    waiting: VecDeque<(u64, Option<Waker>)>,
}

/// Holding the gate; dropping it lets the next one in.
#[derive(Debug)]
pub(crate) struct GateGuard<'a>(&'a Gate);

impl Gate {
    /// Waits for the gate.
    pub(crate) fn enter(&self) -> Enter<'_> {
        Enter { gate: self, ticket: None }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn leave(&self) {
        let waker = {
            let mut state = self.state();
            state.held = false;
            state.waiting.front_mut().and_then(|(_, waker)| waker.take())
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl Drop for GateGuard<'_> {
    fn drop(&mut self) {
        self.0.leave();
    }
}

/// The wait for a [`Gate`].
#[derive(Debug)]
pub(crate) struct Enter<'a> {
    gate: &'a Gate,
    ticket: Option<u64>,
}

impl<'a> Future for Enter<'a> {
    type Output = GateGuard<'a>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.gate.state();
        let first_waiting = state.waiting.front().map(|(ticket, _)| *ticket);
        let is_next = match (self.ticket, first_waiting) {
            (None, None) => true,
            (None, Some(_)) => false,
            (Some(mine), first) => first == Some(mine),
        };
        if is_next && !state.held {
            state.held = true;
            if self.ticket.is_some() {
                state.waiting.pop_front();
            }
            drop(state);
            self.ticket = None;
            return Poll::Ready(GateGuard(self.gate));
        }
        let ticket = if let Some(ticket) = self.ticket {
            ticket
        } else {
            let ticket = state.next_ticket;
            state.next_ticket += 1;
            state.waiting.push_back((ticket, None));
            ticket
        };
        if let Some(entry) = state.waiting.iter_mut().find(|(t, _)| *t == ticket) {
            entry.1 = Some(cx.waker().clone());
        }
        drop(state);
        self.ticket = Some(ticket);
        Poll::Pending
    }
}

impl Drop for Enter<'_> {
    fn drop(&mut self) {
        let Some(ticket) = self.ticket else { return };
        let waker = {
            let mut state = self.gate.state();
            let was_first = state.waiting.front().is_some_and(|(t, _)| *t == ticket);
            state.waiting.retain(|(t, _)| *t != ticket);
            if was_first && !state.held {
                state.waiting.front_mut().and_then(|(_, waker)| waker.take())
            } else {
                None
            }
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::task::Waker;

    fn poll<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
        Pin::new(future).poll(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn waiters_enter_in_the_order_they_came() {
        let gate = Gate::default();
        let Poll::Ready(first) = poll(&mut gate.enter()) else { panic!("free gate") };
        let (mut a, mut b) = (gate.enter(), gate.enter());
        assert!(poll(&mut a).is_pending());
        assert!(poll(&mut b).is_pending());
        drop(first);
        assert!(poll(&mut b).is_pending(), "b came after a");
        let Poll::Ready(second) = poll(&mut a) else { panic!("a is next") };
        drop(second);
        assert!(poll(&mut b).is_ready());
    }

    #[test]
    fn a_waiter_that_gives_up_does_not_block_the_next() {
        let gate = Gate::default();
        let Poll::Ready(first) = poll(&mut gate.enter()) else { panic!("free gate") };
        let (mut a, mut b) = (gate.enter(), gate.enter());
        assert!(poll(&mut a).is_pending());
        assert!(poll(&mut b).is_pending());
        drop(first);
        drop(a);
        assert!(poll(&mut b).is_ready());
    }
}
