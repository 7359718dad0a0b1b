//! A mutex whose holder may await, usable from any worker.
//!
//! Whoever is polled first after the gate was left enters: a waiter whose worker is not polled holds nobody up.

use crate::sync::{Mutex, MutexGuard};
use std::future::Future;
use std::pin::Pin;
use std::sync::PoisonError;
use std::task::{Context, Poll, Waker};
use zebu_storage::sabotage::{self, Fault};

/// The lock. What it protects is named where it is kept.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    held: bool,
    waiting: Vec<Waker>,
}

/// Holding the gate; dropping it lets another one in.
#[derive(Debug)]
pub(crate) struct GateGuard<'a>(&'a Gate);

impl Gate {
    /// Waits for the gate.
    pub(crate) fn enter(&self) -> Enter<'_> {
        Enter { gate: self }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for GateGuard<'_> {
    fn drop(&mut self) {
        let waiting = {
            let mut state = self.0.state();
            state.held = false;
            std::mem::take(&mut state.waiting)
        };
        let woken = if sabotage::is(Fault::WakeOneAtGate) { 1 } else { waiting.len() };
        for waker in waiting.into_iter().take(woken) {
            waker.wake();
        }
    }
}

/// The wait for a [`Gate`].
#[derive(Debug)]
pub(crate) struct Enter<'a> {
    gate: &'a Gate,
}

impl<'a> Future for Enter<'a> {
    type Output = GateGuard<'a>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.gate.state();
        if !state.held {
            state.held = true;
            return Poll::Ready(GateGuard(self.gate));
        }
        if !state.waiting.iter().any(|waker| waker.will_wake(cx.waker())) {
            state.waiting.push(cx.waker().clone());
        }
        Poll::Pending
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn poll<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
        Pin::new(future).poll(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn one_is_inside_at_a_time() {
        let gate = Gate::default();
        let Poll::Ready(first) = poll(&mut gate.enter()) else { panic!("free gate") };
        let mut second = gate.enter();
        assert!(poll(&mut second).is_pending());
        drop(first);
        assert!(poll(&mut second).is_ready());
    }

    #[test]
    fn a_waiter_that_is_not_polled_holds_nobody_up() {
        let gate = Gate::default();
        let Poll::Ready(first) = poll(&mut gate.enter()) else { panic!("free gate") };
        let (mut sleeper, mut other) = (gate.enter(), gate.enter());
        assert!(poll(&mut sleeper).is_pending());
        assert!(poll(&mut other).is_pending());
        drop(first);
        assert!(poll(&mut other).is_ready());
    }
}
