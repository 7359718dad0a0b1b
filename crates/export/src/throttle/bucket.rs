//! The arithmetic of token buckets. Time is given by the caller, in nanoseconds since any moment.

use super::limits::{Direction, Limits};
use std::num::NonZeroU64;

/// Nanoseconds since any moment.
pub(crate) type Nanos = u64;

const SECOND: u128 = 1_000_000_000;
/// Bursts of which nobody says how large they are hold so much of a second.
const DEFAULT_BURST: u64 = 10;

/// A bucket that fills by what requests cost, and leaks at the limit's rate. A request goes as soon as one unit has room, and may
/// overfill it: the next one waits for that much longer.
#[derive(Debug, Clone)]
pub(crate) struct Bucket {
    /// Units per second.
    rate: NonZeroU64,
    /// Units that have room.
    burst: NonZeroU64,
    /// Units in it, by [`SECOND`], so that nothing is rounded.
    level: u128,
    /// When it leaked last.
    at: Nanos,
}

impl Bucket {
    /// An empty one.
    pub(crate) fn new(rate: NonZeroU64, burst: Option<NonZeroU64>, now: Nanos) -> Self {
        let burst = burst.or(NonZeroU64::new(rate.get() / DEFAULT_BURST)).unwrap_or(NonZeroU64::MIN);
        Self { rate, burst, level: 0, at: now }
    }

    /// Takes over what is in another, as far as this one holds it.
    fn continued(mut self, before: &Self) -> Self {
        let most = u128::from(self.burst.get()) * SECOND;
        self.level = before.level.min(most);
        self
    }

    fn leak(&mut self, now: Nanos) {
        let passed = now.saturating_sub(self.at);
        self.level = self.level.saturating_sub(u128::from(self.rate.get()) * u128::from(passed));
        self.at = self.at.max(now);
    }

    /// Nanoseconds until a request may go; 0: now.
    pub(crate) fn wait(&mut self, now: Nanos) -> Nanos {
        self.leak(now);
        let room_below = u128::from(self.burst.get() - 1) * SECOND;
        let too_much = self.level.saturating_sub(room_below);
        u64::try_from(too_much.div_ceil(self.rate.get().into())).unwrap_or(u64::MAX)
    }

    /// Fills it by the cost of a request; the nanoseconds in which it leaks as much.
    pub(crate) fn take(&mut self, units: u64) -> u128 {
        let cost = u128::from(units) * SECOND;
        self.level = self.level.saturating_add(cost);
        cost / u128::from(self.rate.get())
    }
}

/// A limit of requests and one of bytes.
#[derive(Debug, Clone, Default)]
struct Pair {
    requests: Option<Bucket>,
    bytes: Option<Bucket>,
}

impl Pair {
    fn new(
        requests: Option<NonZeroU64>,
        bytes: Option<NonZeroU64>,
        limits: &Limits,
        before: &Self,
        now: Nanos,
    ) -> Self {
        let bucket = |rate: Option<NonZeroU64>, burst, before: &Option<Bucket>| {
            let new = Bucket::new(rate?, burst, now);
            Some(match before {
                Some(before) => new.continued(before),
                None => new,
            })
        };
        Self {
            requests: bucket(requests, limits.burst, &before.requests),
            bytes: bucket(bytes, limits.bps_burst, &before.bytes),
        }
    }

    fn wait(&mut self, now: Nanos) -> Nanos {
        let both = [&mut self.requests, &mut self.bytes];
        both.into_iter().flatten().map(|bucket| bucket.wait(now)).max().unwrap_or(0)
    }

    fn take(&mut self, bytes: u64) -> u128 {
        let requests = self.requests.as_mut().map_or(0, |bucket| bucket.take(1));
        requests.max(self.bytes.as_mut().map_or(0, |bucket| bucket.take(bytes)))
    }
}

/// All buckets of some limits.
#[derive(Debug, Clone, Default)]
pub(crate) struct Buckets {
    total: Pair,
    read: Pair,
    write: Pair,
}

impl Buckets {
    /// Follows `limits` from now on. What is in a bucket stays there, as far as the new one holds it.
    pub(crate) fn set(&mut self, limits: &Limits, now: Nanos) {
        for direction in Direction::BOTH {
            self.wait(direction, now);
        }
        *self = Self {
            total: Pair::new(limits.iops, limits.bps, limits, &self.total, now),
            read: Pair::new(limits.iops_read, limits.bps_read, limits, &self.read, now),
            write: Pair::new(limits.iops_write, limits.bps_write, limits, &self.write, now),
        };
    }

    fn of(&mut self, direction: Direction) -> [&mut Pair; 2] {
        let own = match direction {
            Direction::Read => &mut self.read,
            Direction::Write => &mut self.write,
        };
        [&mut self.total, own]
    }

    /// Nanoseconds until a request may go; 0: now.
    pub(crate) fn wait(&mut self, direction: Direction, now: Nanos) -> Nanos {
        self.of(direction).into_iter().map(|pair| pair.wait(now)).max().unwrap_or(0)
    }

    /// Counts a request that goes; the nanoseconds that it takes of the tightest limit.
    pub(crate) fn take(&mut self, direction: Direction, bytes: u64) -> u128 {
        self.of(direction).into_iter().map(|pair| pair.take(bytes)).max().unwrap_or(0)
    }
}
