//! Requests that wait for a connection.

use super::request::Request;
use crate::network::deadline::{Allowance, Backlog};
use rustix::event::{EventfdFlags, eventfd};
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use zebu_storage::sync::{Condvar, Mutex};

/// The load of a connection that is not there.
pub(super) const ABSENT: usize = usize::MAX;
/// The load of a connection that takes no more requests.
pub(super) const LEAVING: usize = ABSENT - 1;

/// The queue that all connections of a disk take from.
pub(super) struct Queue {
    state: Mutex<State>,
    /// For threads that have no connection.
    more: Condvar,
    bells: Vec<Bell>,
    /// Of all requests, in the queue and at connections.
    backlog: Backlog,
    /// When the user of the disk began to wait for its end.
    hurried: OnceLock<Instant>,
    failure: Mutex<Option<String>>,
    given_up: OnceLock<String>,
}

struct State {
    waiting: VecDeque<Request>,
    /// Requests for one connection each, as long as it is there.
    own: Vec<VecDeque<Request>>,
    is_closed: bool,
}

impl State {
    /// All requests that wait.
    fn drain(&mut self) -> Vec<Request> {
        self.own.iter_mut().chain([&mut self.waiting]).flat_map(std::mem::take).collect()
    }
}

/// How a connection is told of requests.
struct Bell {
    fd: OwnedFd,
    rung: AtomicBool,
    /// Requests that the connection has; [`ABSENT`] while there is no connection.
    load: AtomicUsize,
}

impl Queue {
    /// A queue for so many connections.
    pub(super) fn new(connections: usize) -> std::io::Result<Self> {
        let bell = || {
            let fd = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
            Ok(Bell { fd, rung: AtomicBool::new(false), load: AtomicUsize::new(ABSENT) })
        };
        let bells = (0..connections).map(|_| bell()).collect::<std::io::Result<Vec<_>>>()?;
        let own = bells.iter().map(|_| VecDeque::new()).collect();
        let state = State { waiting: VecDeque::new(), own, is_closed: false };
        Ok(Self {
            state: Mutex::new(state),
            more: Condvar::new(),
            bells,
            backlog: Backlog::default(),
            hurried: OnceLock::new(),
            failure: Mutex::default(),
            given_up: OnceLock::new(),
        })
    }

    /// The time of a request of so many bytes of data, which begins now.
    pub(super) fn allowance(&self, timeout: Duration, bytes: u64) -> Allowance {
        self.backlog.allowance(Instant::now(), timeout, bytes)
    }

    /// From now on, a request waits no longer than its grace while no bytes come.
    pub(super) fn hurry(&self) {
        if self.hurried.set(Instant::now()).is_ok() {
            self.more.notify_all();
            self.bells.iter().for_each(Bell::ring);
        }
    }

    /// The time when a request is over that would be at `until`. Bytes came at `progress` last.
    pub(super) fn until(&self, request: &Request, until: Instant, progress: Instant) -> Instant {
        match self.hurried.get() {
            Some(hurried) => until.min(progress.max(*hurried) + request.grace()),
            None => until,
        }
    }

    fn until_waiting(&self, request: &Request, progress: Instant) -> Instant {
        self.until(request, request.allowance.until(progress), progress)
    }

    /// Why a request was given up first, if that ever happened.
    pub(super) fn given_up(&self) -> Option<String> {
        self.given_up.get().cloned()
    }

    /// Fails a request whose time is over. Why its connections failed is told by `failure`.
    pub(super) fn give_up(&self, request: Request) {
        let reason = self.failure.lock().clone();
        let _ = self.given_up.set(reason.unwrap_or_else(|| "the server did not answer in time".to_owned()));
        request.fail(libc::EIO);
    }

    /// A connection broke, or could not be made.
    pub(super) fn note_failure(&self, reason: String) {
        *self.failure.lock() = Some(reason);
    }

    /// Why the latest connection broke, or could not be made.
    pub(super) fn failure(&self) -> Option<String> {
        self.failure.lock().clone()
    }

    /// A connection has moved bytes.
    pub(super) fn note_progress(&self, now: Instant, bytes: u64) {
        self.backlog.note(now, bytes);
    }

    /// The time up to which all connections together moved bytes fast enough.
    pub(super) fn progress(&self) -> Instant {
        self.backlog.progress()
    }

    /// Adds a request, and tells the connection that has the fewest.
    pub(super) fn push(&self, request: Request) {
        let mut state = self.state.lock();
        if state.is_closed {
            drop(state);
            request.fail(libc::EIO);
            return;
        }
        state.waiting.push_back(request);
        drop(state);
        self.more.notify_all();
        let silent = self.bells.iter().filter(|bell| !bell.rung.load(Ordering::Relaxed));
        if let Some(bell) = silent.min_by_key(|bell| bell.load.load(Ordering::Relaxed)) {
            bell.ring();
        }
    }

    /// Adds a request for this connection; for any of them if it is not there.
    pub(super) fn push_to(&self, connection: usize, request: Request) {
        let mut state = self.state.lock();
        let bell = &self.bells[connection];
        if state.is_closed || bell.load.load(Ordering::Relaxed) == ABSENT {
            drop(state);
            self.push(request);
            return;
        }
        state.own[connection].push_back(request);
        drop(state);
        bell.ring();
    }

    /// A connection is not there any more: what was for it is for all.
    pub(super) fn detach(&self, connection: usize) {
        let mut state = self.state.lock();
        self.bells[connection].load.store(ABSENT, Ordering::Relaxed);
        let own = std::mem::take(&mut state.own[connection]);
        drop(state);
        self.put_back(own.into_iter());
    }

    /// Puts requests back to the front, in their order.
    pub(super) fn put_back(&self, requests: impl DoubleEndedIterator<Item = Request>) {
        let mut state = self.state.lock();
        for request in requests.rev() {
            state.waiting.push_front(request);
        }
        drop(state);
        self.more.notify_all();
        self.bells.iter().for_each(Bell::ring);
    }

    /// A connection takes no more requests: the others do.
    pub(super) fn leave(&self, connection: usize) {
        self.set_load(connection, LEAVING);
        self.more.notify_all();
        let others = self.bells.iter().enumerate().filter(|(number, _)| *number != connection);
        others.for_each(|(_, bell)| bell.ring());
    }

    /// Takes the next request for this connection that is not over time; those that are get EIO.
    pub(super) fn take(&self, connection: usize) -> Option<Request> {
        let mut state = self.state.lock();
        loop {
            let own = state.own[connection].pop_front();
            let request = own.or_else(|| state.waiting.pop_front())?;
            if self.until_waiting(&request, self.progress()) > Instant::now() {
                return Some(request);
            }
            drop(state);
            self.give_up(request);
            state = self.state.lock();
        }
    }

    /// Fails what is over time; the time until the next would be.
    pub(super) fn expire(&self) -> Option<Duration> {
        let (now, progress) = (Instant::now(), self.progress());
        let mut state = self.state.lock();
        let mut over = Vec::new();
        let mut next: Option<Instant> = None;
        let State { waiting, own, .. } = &mut *state;
        for requests in own.iter_mut().chain([waiting]) {
            let (late, left): (VecDeque<_>, VecDeque<_>) = std::mem::take(requests)
                .into_iter()
                .partition(|request| self.until_waiting(request, progress) <= now);
            over.extend(late);
            next = next
                .into_iter()
                .chain(left.iter().map(|request| self.until_waiting(request, progress)))
                .min();
            *requests = left;
        }
        drop(state);
        for request in over {
            self.give_up(request);
        }
        next.map(|deadline| deadline.saturating_duration_since(now))
    }

    /// Waits without a connection until something waits; true if the disk is closed.
    pub(super) fn wait_for_work(&self) -> bool {
        let state = self.state.lock();
        let idle = |state: &mut State| state.waiting.is_empty() && !state.is_closed;
        let state = self.more.wait_while(state, idle);
        state.is_closed
    }

    /// Sleeps for `time`, failing what becomes overdue; true if the disk is closed.
    pub(super) fn pause(&self, time: Duration) -> bool {
        let end = Instant::now() + time;
        loop {
            let next = self.expire().unwrap_or(time);
            let left = end.saturating_duration_since(Instant::now());
            let state = self.state.lock();
            if state.is_closed || left.is_zero() {
                return state.is_closed;
            }
            let most = left.min(next.max(Duration::from_millis(1)));
            drop(self.more.wait_timeout(state, most));
        }
    }

    /// No more requests: what waits gets EIO, and connections end.
    pub(super) fn close(&self) {
        let mut state = self.state.lock();
        state.is_closed = true;
        let waiting = state.drain();
        drop(state);
        for request in waiting {
            request.fail(libc::EIO);
        }
        self.more.notify_all();
        self.bells.iter().for_each(Bell::ring);
    }

    /// After [`close`](Self::close), waits until every connection has said goodbye, or for so long.
    pub(super) fn wait_for_farewells(&self, most: Duration) {
        let is_there =
            |_: &mut State| self.bells.iter().any(|bell| bell.load.load(Ordering::Relaxed) != ABSENT);
        drop(self.more.wait_timeout_while(self.state.lock(), most, is_there));
    }

    pub(super) fn is_closed(&self) -> bool {
        self.state.lock().is_closed
    }

    pub(super) fn bell(&self, connection: usize) -> BorrowedFd<'_> {
        self.bells[connection].fd.as_fd()
    }

    /// A connection looks at the queue now.
    pub(super) fn answer_bell(&self, connection: usize) {
        let bell = &self.bells[connection];
        let _ = rustix::io::read(&bell.fd, &mut [0; 8]);
        bell.rung.store(false, Ordering::SeqCst);
    }

    pub(super) fn set_load(&self, connection: usize, load: usize) {
        self.bells[connection].load.store(load, Ordering::Relaxed);
    }
}

impl Bell {
    fn ring(&self) {
        if !self.rung.swap(true, Ordering::SeqCst) {
            let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
        }
    }
}
