//! Limits on a simulated clock, against a simple model.

use super::bucket::{Bucket, Nanos};
use super::limits::{Direction, Limits};
use super::queue::Ticket;
use super::waiters::{Look, Waiters};
use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::task::{Wake, Waker};

const SECOND: Nanos = 1_000_000_000;

fn some(number: u64) -> Option<NonZeroU64> {
    NonZeroU64::new(number)
}

/// A generator of numbers, the same ones every time.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, most: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % most
    }
}

/// Grants as the definition has it, in floating point: the content of a bucket that leaks.
struct Model {
    rate: f64,
    burst: f64,
    level: f64,
    at: f64,
}

impl Model {
    fn may_go(&mut self, now: f64) -> bool {
        self.level = (self.level - self.rate * (now - self.at)).max(0.0);
        self.at = now;
        self.level <= self.burst - 1.0 + 1e-3
    }
}

#[test]
fn a_bucket_does_what_its_definition_says() {
    let mut numbers = Numbers(1);
    for (rate, burst) in [(1, 1), (10, 1), (1000, 7), (1_000_000, 100_000), (5_000_000_000, 1 << 20)] {
        let mut bucket = Bucket::new(some(rate).unwrap(), some(burst), 0);
        let mut model = Model { rate: rate as f64, burst: burst as f64, level: 0.0, at: 0.0 };
        let mut now = 0;
        for _ in 0..20_000 {
            now += numbers.below(3 * SECOND / rate.min(1000));
            let wait = bucket.wait(now);
            let seconds = now as f64 / 1e9;
            if wait == 0 {
                assert!(model.may_go(seconds), "{rate} {burst}: {now}");
                let units = 1 + numbers.below(burst);
                bucket.take(units);
                model.level += units as f64;
            } else {
                // The model rounds, and has a thousandth of a request for that.
                assert!(
                    !model.may_go(seconds) || wait < SECOND / 500 / rate + 10,
                    "{rate} {burst}: {now}, {wait}"
                );
                assert_eq!(bucket.wait(now + wait), 0, "the wait is long enough");
                now += wait;
            }
        }
    }
}

#[test]
fn rates_are_kept_within_two_hundredths_over_ten_seconds() {
    for (rate, cost) in
        [(7, 1), (100, 1), (99_991, 1), (10 << 20, 4096), (1 << 30, 1 << 20), (1 << 40, 1 << 26)]
    {
        let mut bucket = Bucket::new(some(rate).unwrap(), None, 0);
        let (mut now, mut units) = (0, 0);
        loop {
            now += bucket.wait(now);
            if now > 10 * SECOND {
                break;
            }
            bucket.take(cost);
            units += cost;
        }
        let wanted = 10 * rate;
        let slack = wanted / 50 + cost;
        assert!(units.abs_diff(wanted) <= slack, "{rate}: {units} instead of {wanted}");
    }
}

#[test]
fn the_largest_numbers_overflow_nothing() {
    let most = some(u64::MAX);
    let mut bucket = Bucket::new(most.unwrap(), most, 0);
    for now in [0, 1, u64::MAX / 2, u64::MAX] {
        let _ = bucket.wait(now);
        bucket.take(u64::MAX);
    }
    let mut slow = Bucket::new(NonZeroU64::MIN, None, 0);
    for _ in 0..4 {
        slow.take(u64::MAX);
    }
    assert_eq!(slow.wait(0), u64::MAX);
}

/// A worker's view of a request that waits: whether it was woken, and its timer.
#[derive(Default)]
struct Alarm {
    is_woken: AtomicBool,
}

impl Wake for Alarm {
    fn wake(self: Arc<Self>) {
        self.is_woken.store(true, SeqCst);
    }
}

struct Sleeper {
    alarm: Arc<Alarm>,
    timer: Option<Nanos>,
}

/// Requests on a simulated clock. Nobody looks who was not woken, and whose timer is not over.
#[derive(Default)]
struct World {
    waiters: Waiters,
    now: Nanos,
    sleeping: BTreeMap<Ticket, Sleeper>,
    /// The tickets in the order in which they went.
    went: Vec<(Nanos, Ticket)>,
}

impl World {
    fn arrive(&mut self, member: u64, direction: Direction, bytes: u64) -> Option<Ticket> {
        let (ticket, woken) = self.waiters.arrive(member, direction, bytes, self.now);
        woken.wake();
        if let Some(ticket) = ticket {
            let alarm = Arc::new(Alarm { is_woken: AtomicBool::new(true) });
            self.sleeping.insert(ticket, Sleeper { alarm, timer: None });
        }
        self.run();
        ticket
    }

    /// Has everybody look who was woken or whose time has come, until nobody is left.
    fn run(&mut self) {
        loop {
            let now = self.now;
            let due = self.sleeping.iter().find(|(_, sleeper)| {
                sleeper.alarm.is_woken.load(SeqCst) || sleeper.timer.is_some_and(|timer| timer <= now)
            });
            let Some(ticket) = due.map(|(ticket, _)| *ticket) else { return };
            let alarm = Arc::clone(&self.sleeping[&ticket].alarm);
            alarm.is_woken.store(false, SeqCst);
            let (look, woken) = self.waiters.look(ticket, &Waker::from(alarm), now);
            woken.wake();
            let timer = match look {
                Look::Go => {
                    self.sleeping.remove(&ticket);
                    self.went.push((now, ticket));
                    continue;
                }
                Look::Wait => None,
                Look::Until(until) => {
                    assert!(until > now, "a keeper that does not sleep spins");
                    Some(until)
                }
            };
            self.sleeping.get_mut(&ticket).unwrap().timer = timer;
        }
    }

    /// Goes on until `end`, or until the next timer. Somebody who waits without any timer would wait for ever.
    fn pass_time(&mut self, end: Nanos) {
        loop {
            self.run();
            let next = self.sleeping.values().filter_map(|sleeper| sleeper.timer).min();
            assert!(
                next.is_some() || self.sleeping.is_empty(),
                "everybody waits to be woken, and nobody wakes"
            );
            let Some(next) = next.filter(|next| *next <= end) else {
                self.now = self.now.max(end);
                return;
            };
            self.now = self.now.max(next);
        }
    }

    fn give_up(&mut self, ticket: Ticket) {
        self.sleeping.remove(&ticket);
        self.waiters.give_up(ticket, self.now).wake();
        self.run();
    }

    fn set(&mut self, limits: &Limits) {
        self.waiters.set(limits, self.now).wake();
        self.run();
    }
}

#[test]
fn an_earlier_deadline_wakes_who_keeps_the_time() {
    let mut world = World::default();
    let member = world.waiters.queue.join();
    // A read has to wait for an hour, and a write that comes later for a millisecond.
    let limits = Limits::default().iops_read(some(1)).iops_write(some(1000)).bps_read(some(1)).burst(some(1));
    world.set(&limits);
    assert_eq!(world.arrive(member, Direction::Read, 3600), None);
    let read = world.arrive(member, Direction::Read, 1).unwrap();
    assert_eq!(world.arrive(member, Direction::Write, 1), None);
    let write = world.arrive(member, Direction::Write, 1).unwrap();
    world.pass_time(SECOND);
    assert_eq!(world.went, [(SECOND / 1000, write)]);
    // A limit that is lifted lets the read go at once, one that becomes wider at its time.
    world.set(&limits.iops_read(None).bps_read(some(3600)));
    world.pass_time(3 * SECOND);
    assert_eq!(world.went.len(), 2, "{:?}", world.went);
    assert_eq!(world.went[1].1, read);
}

#[test]
fn who_keeps_the_time_hands_it_on_when_it_gives_up() {
    let mut world = World::default();
    let member = world.waiters.queue.join();
    world.set(&Limits::default().iops(some(10)).burst(some(1)));
    assert_eq!(world.arrive(member, Direction::Read, 0), None);
    let tickets: Vec<Ticket> = (0..5).map(|_| world.arrive(member, Direction::Read, 0).unwrap()).collect();
    for gone in [4, 0, 2] {
        world.give_up(tickets[gone]);
    }
    world.pass_time(SECOND);
    assert_eq!(world.went, [(SECOND / 10, tickets[1]), (SECOND / 5, tickets[3])]);
}

#[test]
fn a_flood_leaves_the_others_of_a_group_their_share() {
    let mut world = World::default();
    let [flood, other] = [(); 2].map(|()| world.waiters.queue.join());
    world.set(&Limits::default().bps(some(1 << 20)).bps_burst(some(1)));
    // The flood's requests are 16 times as large, and 500 of them wait already.
    let of_flood: Vec<Ticket> =
        (0..500).filter_map(|_| world.arrive(flood, Direction::Write, 65_536)).collect();
    world.pass_time(SECOND);
    let before = world.went.len();
    let mut waits = Vec::new();
    while world.now < 5 * SECOND {
        let since = world.now;
        let Some(ticket) = world.arrive(other, Direction::Write, 4096) else { continue };
        while world.sleeping.contains_key(&ticket) {
            let next = world.sleeping.values().filter_map(|sleeper| sleeper.timer).min().unwrap();
            world.pass_time(next);
        }
        waits.push(world.now - since);
    }
    // It waits for one request of the other, at most, and for its own before.
    let one = 65_536 * SECOND / (1 << 20);
    assert!(waits.iter().all(|wait| *wait <= one + one / 8), "{waits:?}");
    let flooded = world.went[before..].iter().filter(|(_, ticket)| of_flood.contains(ticket)).count();
    assert!(flooded >= 10, "nor does it starve: {flooded}");
}

#[test]
fn nobody_saves_up_turns_while_others_are_away() {
    let mut world = World::default();
    let [first, second] = [(); 2].map(|()| world.waiters.queue.join());
    world.set(&Limits::default().iops(some(100)).burst(some(1)));
    let mut of_first = Vec::new();
    for _ in 0..500 {
        of_first.extend(world.arrive(first, Direction::Read, 0));
    }
    // The first has the limit for itself, for four seconds; then they share it.
    world.pass_time(4 * SECOND);
    for _ in 0..50 {
        world.arrive(second, Direction::Read, 0);
    }
    let before = world.went.len();
    world.pass_time(5 * SECOND);
    let of_it = world.went[before..].iter().filter(|(_, ticket)| of_first.contains(ticket)).count();
    assert!((45..=55).contains(&of_it), "{of_it} of {}", world.went.len() - before);
}

/// Any order of arrivals, ends, new limits and time: nobody is forgotten, and the limit is kept.
#[test]
fn whatever_happens_nobody_is_forgotten() {
    for seed in 0..60 {
        let mut numbers = Numbers(seed);
        let mut world = World::default();
        let members = [(); 3].map(|()| world.waiters.queue.join());
        for _ in 0..300 {
            match numbers.below(12) {
                0..6 => {
                    let member = members[numbers.below(3) as usize];
                    let direction = Direction::BOTH[numbers.below(2) as usize];
                    let bytes = numbers.below(100_000);
                    world.arrive(member, direction, bytes);
                }
                6 => {
                    let tickets: Vec<Ticket> = world.sleeping.keys().copied().collect();
                    if !tickets.is_empty() {
                        let ticket = tickets[numbers.below(tickets.len() as u64) as usize];
                        world.give_up(ticket);
                    }
                }
                7 => {
                    let any = |numbers: &mut Numbers| some(numbers.below(5) * numbers.below(100));
                    let limits = Limits::default()
                        .iops(any(&mut numbers))
                        .iops_read(any(&mut numbers))
                        .bps_write(some(numbers.below(3) * 100_000))
                        .burst(some(numbers.below(20)));
                    world.set(&limits);
                }
                _ => {
                    let end = world.now + numbers.below(SECOND / 4);
                    world.pass_time(end);
                }
            }
        }
        for member in members {
            world.waiters.release(member, world.now).wake();
        }
        world.run();
        assert!(world.sleeping.is_empty() && world.waiters.len() == 0, "seed {seed}");
    }
}
