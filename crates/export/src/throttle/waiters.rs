//! The requests that wait: the ones that are woken when they may go, and the one that keeps the time.
//!
//! One of those who wait is the keeper: it sleeps until the next request may go, and the others sleep until they are woken. The
//! rule that nothing may break: as long as somebody waits, there is a keeper, and it knows the earliest time. So every change
//! (somebody comes, goes or gives up, other limits) ends in [`Waiters::settle`], which makes it so.

use super::bucket::Nanos;
use super::limits::{Direction, Limits};
use super::queue::{Member, Queue, Ticket};
use std::collections::{BTreeMap, HashSet};
use std::task::Waker;

/// The state of a request that waits, when it looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Look {
    /// It goes.
    Go,
    /// It is woken.
    Wait,
    /// It keeps the time: it has to look again then.
    Until(Nanos),
}

/// Wakers to be called outside of any lock.
#[must_use]
#[derive(Debug, Default)]
pub(crate) struct Woken(Vec<Waker>);

impl Woken {
    pub(crate) fn wake(self) {
        self.0.into_iter().for_each(Waker::wake);
    }
}

#[derive(Debug, Clone, Copy)]
struct Keeper {
    ticket: Ticket,
    /// When it looks again.
    until: Nanos,
}

/// The requests that wait, and their wakers.
#[derive(Debug, Default)]
pub(crate) struct Waiters {
    pub(crate) queue: Queue,
    /// Without a waker until it looks for the first time.
    waiting: BTreeMap<Ticket, Option<Waker>>,
    /// Requests that may go and have not looked since.
    gone: HashSet<Ticket>,
    keeper: Option<Keeper>,
}

impl Waiters {
    /// Requests that wait.
    pub(crate) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Takes a request in: `None` if it goes at once.
    pub(crate) fn arrive(
        &mut self,
        member: Member,
        direction: Direction,
        bytes: u64,
        now: Nanos,
    ) -> (Option<Ticket>, Woken) {
        let mut woken = self.settle(now);
        let ticket = self.queue.arrive(member, direction, bytes, now);
        if let Some(ticket) = ticket {
            self.waiting.insert(ticket, None);
            woken.0.extend(self.settle(now).0);
        }
        (ticket, woken)
    }

    /// Looks whether a request may go. It is not to look again once it may.
    pub(crate) fn look(&mut self, ticket: Ticket, waker: &Waker, now: Nanos) -> (Look, Woken) {
        let woken = self.settle(now);
        if self.gone.remove(&ticket) {
            return (Look::Go, woken);
        }
        self.waiting.insert(ticket, Some(waker.clone()));
        let look = match self.keeper {
            Some(keeper) if keeper.ticket == ticket => Look::Until(keeper.until),
            _ => Look::Wait,
        };
        (look, woken)
    }

    /// Forgets a request that ends before it went.
    pub(crate) fn give_up(&mut self, ticket: Ticket, now: Nanos) -> Woken {
        self.gone.remove(&ticket);
        if self.waiting.remove(&ticket).is_some() {
            self.queue.give_up(ticket);
        }
        if self.keeper.is_some_and(|keeper| keeper.ticket == ticket) {
            self.keeper = None;
        }
        self.settle(now)
    }

    /// Changes the limits.
    pub(crate) fn set(&mut self, limits: &Limits, now: Nanos) -> Woken {
        let mut woken = self.settle(now);
        self.queue.set(limits, now);
        woken.0.extend(self.settle(now).0);
        woken
    }

    /// Lets all requests of a member go, from now on.
    pub(crate) fn release(&mut self, member: Member, now: Nanos) -> Woken {
        let mut woken = Woken::default();
        for ticket in self.queue.release(member) {
            self.go(ticket, &mut woken);
        }
        woken.0.extend(self.settle(now).0);
        woken
    }

    fn go(&mut self, ticket: Ticket, woken: &mut Woken) {
        if let Some(waker) = self.waiting.remove(&ticket) {
            self.gone.insert(ticket);
            woken.0.extend(waker);
        }
        if self.keeper.is_some_and(|keeper| keeper.ticket == ticket) {
            self.keeper = None;
        }
    }

    /// Lets those go that may, and sees to the keeper.
    fn settle(&mut self, now: Nanos) -> Woken {
        let mut woken = Woken::default();
        while let Some(ticket) = self.queue.next(now) {
            self.go(ticket, &mut woken);
        }
        let Some(until) = self.queue.due(now) else { return woken };
        // The last that came, who keeps it for longest.
        let keeper = self.keeper.map(|keeper| keeper.ticket).or(self.waiting.keys().next_back().copied());
        let Some(ticket) = keeper else { return woken };
        if self.keeper.is_none_or(|keeper| keeper.until != until) {
            self.keeper = Some(Keeper { ticket, until });
            woken.0.extend(self.waiting.get(&ticket).and_then(Clone::clone));
        }
        woken
    }
}
