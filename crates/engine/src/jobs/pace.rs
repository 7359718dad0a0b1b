//! The pace of a backup: as fast as the disk goes without making others wait.
//!
//! The signal is the latency of the job's own requests beside the lowest that was seen for requests of their kind and
//! size. More than that is time in queues, of the job itself or of others. As long as there is little of it, more
//! requests go at once, up to the job's limit; else fewer do, and below one there is a pause after each. This is how
//! background transports such as LEDBAT (RFC 6817) find the share that others leave.
//!
//! Compression goes in short bursts, so that others don't wait for the processor either.

use crate::compress::Bursts;
use crate::sync::{Mutex, WaitList};
use std::future::poll_fn;
use std::task::Poll;
use std::time::{Duration, Instant};
use zebu_storage::Worker;

/// How fast a backup goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Speed {
    /// As the latency of its requests allows, so that others who use the disk are not held up.
    #[default]
    Adaptive,
    /// With all requests that it may have in flight.
    Full,
}

/// The kind of a request that is timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Read,
    Write,
}

/// Requests between two decisions.
const ROUND: u32 = 16;
/// Smallest share of one request in flight. A busy processor looks like a busy disk, and must not stop a backup.
const LEAST: f64 = 0.5;
/// Time in queues that is aimed at at least: as much as a busy processor adds.
const TOLERANCE: Duration = Duration::from_micros(50);
/// Time in queues that is aimed at, as a share of the lowest latency. On the model of the tests, 0.5 keeps a
/// neighbour's 99th percentile just below twice what it is without, and 0.25 takes half of the speed.
const AIM: f64 = 0.4;
/// How long the lowest latency is remembered, at least; twice as long at most.
const MEMORY: Duration = Duration::from_secs(20);
/// Longest pause after a request.
const LONGEST_PAUSE: Duration = Duration::from_millis(200);
/// Sizes of requests that are told apart: powers of two.
const SIZES: usize = 64;
/// Bytes of a read while the disk is busy: what others ask for waits for no longer one.
const SHORT: u64 = 128 << 10;

/// The pace of one job, shared by its tasks.
pub(super) struct Pace(Option<Mutex<State>>);

struct State {
    controller: Controller,
    in_flight: usize,
    waiting: WaitList,
}

impl Pace {
    /// Of a job that has at most `most` requests in flight.
    pub(super) fn new(speed: Speed, most: usize) -> Self {
        Self((speed == Speed::Adaptive).then(|| {
            Mutex::new(State {
                controller: Controller::new(most),
                in_flight: 0,
                waiting: WaitList::default(),
            })
        }))
    }

    /// Waits until one more request may go.
    pub(super) async fn turn(&self) -> Turn<'_> {
        if let Some(state) = &self.0 {
            poll_fn(|cx| {
                let mut state = state.lock();
                if state.in_flight >= state.controller.at_once() {
                    state.waiting.add(cx.waker());
                    return Poll::Pending;
                }
                state.in_flight += 1;
                Poll::Ready(())
            })
            .await;
        }
        Turn(self)
    }

    /// How long a thread compresses for the job.
    pub(super) fn bursts(&self) -> Bursts {
        if self.0.is_some() { Bursts::Short } else { Bursts::Whole }
    }

    /// Does a request of `len` bytes, and notes how long it takes.
    pub(super) async fn timed<T>(&self, kind: Kind, len: u64, request: impl Future<Output = T>) -> T {
        let Some(state) = &self.0 else { return request.await };
        let begun = Instant::now();
        let done = request.await;
        let now = Instant::now();
        // Whoever waits for a turn is woken by the end of another.
        state.lock().controller.note(kind, len, now.saturating_duration_since(begun), now);
        done
    }

    /// Most bytes of one read, for a job that would read `len`.
    pub(super) fn read_size(&self, len: u64) -> u64 {
        let is_busy = self.0.as_ref().is_some_and(|state| state.lock().controller.is_busy());
        if is_busy { len.min(SHORT) } else { len }
    }
}

/// The right to one request. Whoever drops it gives it to the next.
pub(super) struct Turn<'a>(&'a Pace);

impl Turn<'_> {
    /// Ends it, after the pause that the disk needs.
    pub(super) async fn end(self, worker: &Worker) {
        let pause = self.0.0.as_ref().map(|state| state.lock().controller.pause()).unwrap_or_default();
        if !pause.is_zero() {
            worker.sleep(pause).await;
        }
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let Some(state) = &self.0.0 else { return };
        let mut state = state.lock();
        state.in_flight -= 1;
        let waiting = state.waiting.take();
        drop(state);
        waiting.wake();
    }
}

/// Decides by latencies how many requests go at once.
struct Controller {
    most: f64,
    /// How many go at once; below 1, the share of the time in which one does.
    window: f64,
    /// The disk has not been found busy yet.
    is_starting: bool,
    /// By kind and size.
    lowest: Vec<Lowest>,
    /// Of the present round.
    samples: u32,
    /// Sum of times in queues, in shares of what is aimed at.
    queued: f64,
    latency: Duration,
    /// Mean latency in the last round.
    mean: Duration,
}

impl Controller {
    fn new(most: usize) -> Self {
        Self {
            most: most.max(1) as f64,
            window: 1.0,
            is_starting: true,
            lowest: vec![Lowest::default(); 2 * SIZES],
            samples: 0,
            queued: 0.0,
            latency: Duration::ZERO,
            mean: Duration::ZERO,
        }
    }

    fn at_once(&self) -> usize {
        self.window.max(1.0) as usize
    }

    /// Whether one request at a time is too much.
    fn is_busy(&self) -> bool {
        self.window < 1.0
    }

    fn pause(&self) -> Duration {
        if !self.is_busy() {
            return Duration::ZERO;
        }
        self.mean.mul_f64(1.0 / self.window - 1.0).min(LONGEST_PAUSE)
    }

    fn note(&mut self, kind: Kind, len: u64, latency: Duration, now: Instant) {
        let class = kind as usize * SIZES + len.max(1).ilog2() as usize;
        let lowest = self.lowest.get_mut(class).map_or(latency, |lowest| lowest.note(latency, now));
        let aim = lowest.mul_f64(AIM).max(TOLERANCE);
        // One request that hangs says no more than that the disk is busy.
        self.queued += (latency.saturating_sub(lowest).as_secs_f64() / aim.as_secs_f64()).min(8.0);
        self.latency += latency;
        self.samples += 1;
        if self.samples >= ROUND {
            self.decide();
        }
    }

    fn decide(&mut self) {
        let queued = self.queued / f64::from(self.samples);
        self.mean = self.latency / self.samples;
        (self.samples, self.queued, self.latency) = (0, 0.0, Duration::ZERO);
        if queued > 1.0 {
            self.is_starting = false;
            self.window *= (1.0 - (queued - 1.0) / 2.0).max(0.5);
        } else if self.is_starting {
            self.window *= 2.0;
        } else {
            // From little, by a part of what it is; so a pause does not end at once.
            self.window += (1.0 - queued) * self.window.min(1.0);
        }
        self.window = self.window.clamp(LEAST, self.most);
    }
}

/// The lowest latency of the last time.
#[derive(Debug, Clone, Copy, Default)]
struct Lowest {
    /// Of the present stretch of time, and of the one before.
    present: Option<Duration>,
    before: Option<Duration>,
    since: Option<Instant>,
}

impl Lowest {
    /// The lowest one, `latency` included.
    fn note(&mut self, latency: Duration, now: Instant) -> Duration {
        if self.since.is_none_or(|since| now.saturating_duration_since(since) >= MEMORY) {
            self.before = self.present.take();
            self.since = Some(now);
        }
        let present = self.present.map_or(latency, |present| present.min(latency));
        self.present = Some(present);
        self.before.map_or(present, |before| before.min(present))
    }
}

#[cfg(test)]
#[path = "pace_on_a_model.rs"]
mod on_a_model;
