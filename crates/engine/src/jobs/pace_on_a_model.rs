//! The pace on a model of a disk: channels that each serve one request at a time, in order, for a time that varies.

use super::*;

/// A sequence of numbers that a seed decides (xorshift).
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> f64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// Times are in microseconds.
struct Disk {
    /// When each channel is free.
    channels: Vec<f64>,
    numbers: Numbers,
    /// Factor of all times of service.
    slowness: f64,
}

impl Disk {
    fn new(channels: usize) -> Self {
        Self { channels: vec![0.0; channels], numbers: Numbers(88_172_645_463_325_252), slowness: 1.0 }
    }

    /// When a request of `len` bytes that comes at `now` is done. Service: 80 us and 4 us a page, and a tail.
    fn request(&mut self, now: f64, len: u64) -> f64 {
        let tail = -self.numbers.next().max(1e-9).ln() * 30.0;
        let service = (80.0 + 4.0 * (len / 4096) as f64 + tail) * self.slowness;
        let channel = (self.numbers.next() * self.channels.len() as f64) as usize;
        let free = &mut self.channels[channel];
        *free = free.max(now) + service;
        *free
    }
}

/// The result of a run.
struct Outcome {
    /// Bytes a second of the backup.
    rate: f64,
    /// 99th percentile of the neighbour's latency.
    p99: f64,
}

const CHUNK: u64 = 64 << 10;
/// Requests that a backup may have in flight.
const MOST: usize = 16;

/// A backup, and perhaps a neighbour who reads a page at a time with pauses of its own.
struct Run {
    disk: Disk,
    controller: Option<Controller>,
    epoch: Instant,
    now: f64,
    /// When requests of the backup are done, and when they began; later ones than `now` have not ended.
    copies: Vec<(f64, f64)>,
    /// When the next copy may begin.
    resume: f64,
    neighbour: f64,
}

impl Run {
    fn new(channels: usize, speed: Speed) -> Self {
        Self {
            disk: Disk::new(channels),
            controller: (speed == Speed::Adaptive).then(|| Controller::new(MOST)),
            epoch: Instant::now(),
            now: 0.0,
            copies: Vec::new(),
            resume: 0.0,
            neighbour: 0.0,
        }
    }

    /// Goes on for so many seconds; `reads`: with the neighbour, `copies`: with the backup.
    fn go_on(&mut self, seconds: f64, reads: bool, copies: bool) -> Outcome {
        let (begin, end) = (self.now, self.now + seconds * 1e6);
        let (mut moved, mut latencies) = (0, Vec::new());
        self.neighbour = self.neighbour.max(begin);
        while self.now < end {
            let at_once = self.controller.as_ref().map_or(MOST, Controller::at_once);
            let may_copy = copies && self.copies.len() < at_once;
            let first_done = self.copies.iter().map(|copy| copy.0).fold(f64::INFINITY, f64::min);
            let copy_at = if may_copy { self.resume.max(self.now) } else { f64::INFINITY };
            let read_at = if reads { self.neighbour.max(self.now) } else { f64::INFINITY };
            let next = first_done.min(copy_at).min(read_at);
            if !next.is_finite() {
                break;
            }
            self.now = self.now.max(next);
            if next.total_cmp(&first_done).is_eq() {
                let index =
                    self.copies.iter().position(|copy| copy.0.total_cmp(&first_done).is_eq()).unwrap();
                let (done, begun) = self.copies.swap_remove(index);
                moved += CHUNK;
                if let Some(controller) = &mut self.controller {
                    let at = self.epoch + Duration::from_secs_f64(done / 1e6);
                    controller.note(Kind::Read, CHUNK, Duration::from_secs_f64((done - begun) / 1e6), at);
                    self.resume = done + controller.pause().as_secs_f64() * 1e6;
                }
            } else if next.total_cmp(&copy_at).is_eq() {
                let done = self.disk.request(self.now, CHUNK);
                self.copies.push((done, self.now));
            } else {
                let done = self.disk.request(self.now, 4096);
                latencies.push(done - self.now);
                self.neighbour = done + self.disk.numbers.next() * 200.0;
            }
        }
        latencies.sort_by(f64::total_cmp);
        let p99 = latencies.get(latencies.len() * 99 / 100).copied().unwrap_or_default();
        Outcome { rate: moved as f64 / seconds, p99 }
    }
}

#[test]
fn a_disk_of_its_own_is_used_well() {
    for channels in [1, 2, 8, 32] {
        let full = Run::new(channels, Speed::Full).go_on(5.0, false, true);
        let adaptive = Run::new(channels, Speed::Adaptive).go_on(5.0, false, true);
        let share = adaptive.rate / full.rate;
        assert!(share > 0.35, "{channels} channels: {share:.2} of what the disk gives");
    }
}

#[test]
fn a_neighbour_waits_at_most_twice_as_long() {
    for channels in [1, 2, 8, 32] {
        let alone = Run::new(channels, Speed::Full).go_on(5.0, true, false);
        let full = Run::new(channels, Speed::Full).go_on(5.0, true, true);
        let mut run = Run::new(channels, Speed::Adaptive);
        run.go_on(2.0, true, true);
        let adaptive = run.go_on(5.0, true, true);
        let (with, without) = (adaptive.p99 / alone.p99, full.p99 / alone.p99);
        assert!(with <= 2.0, "{channels} channels: {with:.2} times, {without:.2} at full speed");
        assert!(adaptive.rate > 8e6, "{channels} channels: {} bytes a second", adaptive.rate);
    }
    let full = Run::new(8, Speed::Full).go_on(5.0, true, true);
    let alone = Run::new(8, Speed::Full).go_on(5.0, true, false);
    assert!(full.p99 > 3.0 * alone.p99, "the model has no queues: {} and {}", full.p99, alone.p99);
}

#[test]
fn a_disk_that_gets_slow_is_spared_and_that_gets_fast_again_is_used() {
    let mut run = Run::new(8, Speed::Adaptive);
    let before = run.go_on(5.0, false, true).rate;
    run.disk.slowness = 10.0;
    let slow = run.go_on(2.0, false, true).rate;
    assert!(slow < before / 8.0 && slow > 0.0, "{slow} after {before}");
    // It is slow for good: that is how this disk is.
    run.go_on(60.0, false, true);
    let usual = run.go_on(5.0, false, true).rate;
    assert!(usual > before / 20.0, "{usual} after {before}");
    run.disk.slowness = 1.0;
    run.go_on(1.0, false, true);
    let after = run.go_on(5.0, false, true).rate;
    assert!(after > before * 0.8, "{after} after {before}");
}

#[test]
fn times_that_can_not_be_do_no_harm() {
    let mut controller = Controller::new(0);
    let now = Instant::now();
    for latency in [Duration::ZERO, Duration::MAX / 64, Duration::from_nanos(1)] {
        for len in [0, 1, u64::MAX] {
            for _ in 0..2 * ROUND {
                controller.note(Kind::Write, len, latency, now);
            }
        }
    }
    assert!(controller.at_once() == 1 && controller.pause() <= LONGEST_PAUSE);
    let mut controller = Controller::new(4);
    (0..10 * ROUND).for_each(|_| controller.note(Kind::Read, 1, Duration::ZERO, now));
    assert_eq!((controller.at_once(), controller.pause()), (4, Duration::ZERO));
}
