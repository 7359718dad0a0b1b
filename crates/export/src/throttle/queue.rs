//! The order in which requests go that wait for a limit: within a member, as they came; among members, by what they got.
//!
//! Each member has a lane for reads and one for changes. Of the lanes whose next request may go, that one has its turn which got
//! least time of the limit (start-time fair queueing). A lane that begins to wait starts with what the others are at, so nobody
//! saves up turns.

use super::bucket::{Buckets, Nanos};
use super::limits::{Direction, Limits};
use std::collections::{BTreeMap, VecDeque};

/// The number of a request that waits.
pub(crate) type Ticket = u64;
/// The number of a member.
pub(crate) type Member = u64;

#[derive(Debug, Default)]
struct Lane {
    /// Requests that wait, with their bytes.
    waiting: VecDeque<(Ticket, u64)>,
    /// Nanoseconds of the limit that it got.
    served: u128,
}

#[derive(Debug, Default)]
struct Lanes {
    read: Lane,
    write: Lane,
    /// Its requests wait no more.
    is_released: bool,
}

impl Lanes {
    fn of(&mut self, direction: Direction) -> &mut Lane {
        match direction {
            Direction::Read => &mut self.read,
            Direction::Write => &mut self.write,
        }
    }
}

/// Requests that wait for a limit.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    buckets: Buckets,
    members: BTreeMap<Member, Lanes>,
    /// The time of the limit at which the last one went.
    served: u128,
    next_ticket: Ticket,
    next_member: Member,
}

impl Queue {
    /// Adds a member.
    pub(crate) fn join(&mut self) -> Member {
        let member = self.next_member;
        self.next_member += 1;
        self.members.insert(member, Lanes::default());
        member
    }

    /// Removes a member, none of whose requests waits.
    pub(crate) fn leave(&mut self, member: Member) {
        self.members.remove(&member);
    }

    /// Number of the members.
    pub(crate) fn members(&self) -> usize {
        self.members.len()
    }

    /// Changes the limits. Times of the earlier ones mean nothing any more.
    pub(crate) fn set(&mut self, limits: &Limits, now: Nanos) {
        self.buckets.set(limits, now);
        self.served = 0;
        for lanes in self.members.values_mut() {
            (lanes.read.served, lanes.write.served) = (0, 0);
        }
    }

    /// Takes a request in: `None` if it goes at once. To be called when those are gone that may.
    pub(crate) fn arrive(
        &mut self,
        member: Member,
        direction: Direction,
        bytes: u64,
        now: Nanos,
    ) -> Option<Ticket> {
        let lanes = self.members.get_mut(&member)?;
        if lanes.is_released {
            return None;
        }
        let lane = lanes.of(direction);
        if lane.waiting.is_empty() {
            lane.served = lane.served.max(self.served);
            if self.buckets.wait(direction, now) == 0 {
                self.served = lane.served;
                lane.served += self.buckets.take(direction, bytes);
                return None;
            }
        }
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        lane.waiting.push_back((ticket, bytes));
        Some(ticket)
    }

    /// Lets the next request go, if there is one that may.
    pub(crate) fn next(&mut self, now: Nanos) -> Option<Ticket> {
        let Self { buckets, members, served, .. } = self;
        let may_go = Direction::BOTH.map(|direction| buckets.wait(direction, now) == 0);
        let mut first: Option<(&mut Lane, Direction)> = None;
        for lanes in members.values_mut() {
            let Lanes { read, write, .. } = lanes;
            for (lane, (direction, may_go)) in
                [read, write].into_iter().zip(Direction::BOTH.into_iter().zip(may_go))
            {
                let is_first = first.as_ref().is_none_or(|(first, _)| lane.served < first.served);
                if may_go && !lane.waiting.is_empty() && is_first {
                    first = Some((lane, direction));
                }
            }
        }
        let (lane, direction) = first?;
        let (ticket, bytes) = lane.waiting.pop_front()?;
        *served = lane.served.max(*served);
        lane.served += buckets.take(direction, bytes);
        Some(ticket)
    }

    /// When the next request may go, if one waits.
    pub(crate) fn due(&mut self, now: Nanos) -> Option<Nanos> {
        let Self { buckets, members, .. } = self;
        let waits = |direction: Direction, members: &mut BTreeMap<Member, Lanes>| {
            members.values_mut().any(|lanes| !lanes.of(direction).waiting.is_empty())
        };
        Direction::BOTH
            .into_iter()
            .filter(|direction| waits(*direction, members))
            .map(|direction| now.saturating_add(buckets.wait(direction, now)))
            .min()
    }

    /// Forgets a request that waits no more.
    pub(crate) fn give_up(&mut self, ticket: Ticket) {
        for lanes in self.members.values_mut() {
            for direction in Direction::BOTH {
                lanes.of(direction).waiting.retain(|(other, _)| *other != ticket);
            }
        }
    }

    /// Lets all of a member go, from now on; those that waited.
    pub(crate) fn release(&mut self, member: Member) -> Vec<Ticket> {
        let Some(lanes) = self.members.get_mut(&member) else { return Vec::new() };
        lanes.is_released = true;
        let both = Direction::BOTH.map(|direction| std::mem::take(&mut lanes.of(direction).waiting));
        both.into_iter().flatten().map(|(ticket, _)| ticket).collect()
    }
}
