//! Limits that requests on several threads wait for.

use super::bucket::Nanos;
use super::limits::{Direction, Limits};
use super::queue::{Member, Ticket};
use super::waiters::{Look, Waiters};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use zebu_engine::storage::Worker;
use zebu_storage::sync::Mutex;

/// Limits, and the requests that wait for them.
#[derive(Debug)]
pub(crate) struct Gate {
    /// Whether there are limits, so that nobody takes the lock for nothing.
    is_limited: AtomicBool,
    state: Mutex<State>,
    since: Instant,
}

#[derive(Debug, Default)]
struct State {
    limits: Limits,
    waiters: Waiters,
}

/// Whether a request had to wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Passed {
    AtOnce,
    Waited,
}

impl Default for Gate {
    fn default() -> Self {
        Self { is_limited: AtomicBool::new(false), state: Mutex::default(), since: Instant::now() }
    }
}

impl Gate {
    fn now(&self) -> Nanos {
        u64::try_from(self.since.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    pub(crate) fn join(&self) -> Member {
        self.state.lock().waiters.queue.join()
    }

    pub(crate) fn leave(&self, member: Member) {
        self.state.lock().waiters.queue.leave(member);
    }

    pub(crate) fn members(&self) -> usize {
        self.state.lock().waiters.queue.members()
    }

    pub(crate) fn is_limited(&self) -> bool {
        self.is_limited.load(SeqCst)
    }

    pub(crate) fn limits(&self) -> Limits {
        self.state.lock().limits
    }

    /// Requests that wait.
    pub(crate) fn waiting(&self) -> usize {
        self.state.lock().waiters.len()
    }

    /// Changes the limits. Those who wait go on under the new ones.
    pub(crate) fn set(&self, limits: &Limits) {
        let mut state = self.state.lock();
        let now = self.now();
        state.limits = *limits;
        self.is_limited.store(!limits.is_empty(), SeqCst);
        let woken = state.waiters.set(limits, now);
        drop(state);
        woken.wake();
    }

    /// Lets all requests of a member go, from now on.
    pub(crate) fn release(&self, member: Member) {
        let mut state = self.state.lock();
        let now = self.now();
        let woken = state.waiters.release(member, now);
        drop(state);
        woken.wake();
    }

    /// Waits until a request may go.
    pub(crate) async fn pass(
        &self,
        worker: &Worker,
        member: Member,
        direction: Direction,
        bytes: u64,
    ) -> Passed {
        if !self.is_limited() {
            return Passed::AtOnce;
        }
        let (ticket, woken) = {
            let mut state = self.state.lock();
            let now = self.now();
            state.waiters.arrive(member, direction, bytes, now)
        };
        // Before the others are woken: nobody is to be without a waker and without whoever takes it away.
        let turn = ticket.map(|ticket| Turn { gate: self, worker, ticket, is_over: false, alarm: None });
        woken.wake();
        match turn {
            None => Passed::AtOnce,
            Some(turn) => {
                turn.await;
                Passed::Waited
            }
        }
    }
}

/// The sleep of the keeper of the time.
type Alarm = Pin<Box<dyn Future<Output = ()>>>;

/// A request that waits until it may go.
struct Turn<'a> {
    gate: &'a Gate,
    worker: &'a Worker,
    ticket: Ticket,
    is_over: bool,
    /// Of the keeper of the time: until when it sleeps.
    alarm: Option<(Nanos, Alarm)>,
}

impl Future for Turn<'_> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let me = self.get_mut();
        loop {
            let mut state = me.gate.state.lock();
            let now = me.gate.now();
            let (look, woken) = state.waiters.look(me.ticket, cx.waker(), now);
            drop(state);
            woken.wake();
            let until = match look {
                Look::Go => {
                    me.is_over = true;
                    return Poll::Ready(());
                }
                Look::Wait => {
                    me.alarm = None;
                    return Poll::Pending;
                }
                Look::Until(until) => until,
            };
            let alarm = match &mut me.alarm {
                Some((at, alarm)) if *at == until => alarm,
                _ => {
                    let (worker, wait) = (me.worker.clone(), Duration::from_nanos(until.saturating_sub(now)));
                    let alarm: Alarm = Box::pin(async move { worker.sleep(wait).await });
                    &mut me.alarm.insert((until, alarm)).1
                }
            };
            if alarm.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
            me.alarm = None;
        }
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if self.is_over {
            return;
        }
        let mut state = self.gate.state.lock();
        let now = self.gate.now();
        let woken = state.waiters.give_up(self.ticket, now);
        drop(state);
        woken.wake();
    }
}
