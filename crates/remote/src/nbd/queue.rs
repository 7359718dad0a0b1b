//! Requests that wait for a connection.

use super::request::Request;
use rustix::event::{EventfdFlags, eventfd};
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The load of a connection that is not there.
pub(super) const ABSENT: usize = usize::MAX;

/// The queue that all connections of a disk take from.
pub(super) struct Queue {
    state: Mutex<State>,
    /// For threads that have no connection.
    more: Condvar,
    bells: Vec<Bell>,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Request>,
    is_closed: bool,
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
        Ok(Self { state: Mutex::default(), more: Condvar::new(), bells })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a request, and tells the connection that has the fewest.
    pub(super) fn push(&self, request: Request) {
        let mut state = self.lock();
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

    /// Puts requests back to the front, in their order.
    pub(super) fn put_back(&self, requests: impl DoubleEndedIterator<Item = Request>) {
        let mut state = self.lock();
        for request in requests.rev() {
            state.waiting.push_front(request);
        }
        drop(state);
        self.more.notify_all();
        self.bells.iter().for_each(Bell::ring);
    }

    /// Takes the next request that is not over time; those that are get EIO.
    pub(super) fn take(&self) -> Option<Request> {
        let mut state = self.lock();
        loop {
            let request = state.waiting.pop_front()?;
            if request.deadline > Instant::now() {
                return Some(request);
            }
            drop(state);
            request.fail(libc::EIO);
            state = self.lock();
        }
    }

    /// Fails what is over time; the time until the next would be.
    pub(super) fn expire(&self) -> Option<Duration> {
        let now = Instant::now();
        let mut state = self.lock();
        let all = std::mem::take(&mut state.waiting);
        let (over, waiting): (VecDeque<_>, VecDeque<_>) =
            all.into_iter().partition(|request| request.deadline <= now);
        state.waiting = waiting;
        let next = state.waiting.iter().map(|request| request.deadline).min();
        drop(state);
        for request in over {
            request.fail(libc::EIO);
        }
        next.map(|deadline| deadline.saturating_duration_since(now))
    }

    /// Waits without a connection until something waits; true if the disk is closed.
    pub(super) fn wait_for_work(&self) -> bool {
        let state = self.lock();
        let idle = |state: &mut State| state.waiting.is_empty() && !state.is_closed;
        let state = self.more.wait_while(state, idle).unwrap_or_else(PoisonError::into_inner);
        state.is_closed
    }

    /// Sleeps for `time`, failing what becomes overdue; true if the disk is closed.
    pub(super) fn pause(&self, time: Duration) -> bool {
        let end = Instant::now() + time;
        loop {
            let next = self.expire().unwrap_or(time);
            let left = end.saturating_duration_since(Instant::now());
            let state = self.lock();
            if state.is_closed || left.is_zero() {
                return state.is_closed;
            }
            let most = left.min(next.max(Duration::from_millis(1)));
            drop(self.more.wait_timeout(state, most).unwrap_or_else(PoisonError::into_inner));
        }
    }

    /// No more requests: what waits gets EIO, and connections end.
    pub(super) fn close(&self) {
        let mut state = self.lock();
        state.is_closed = true;
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        for request in waiting {
            request.fail(libc::EIO);
        }
        self.more.notify_all();
        self.bells.iter().for_each(Bell::ring);
    }

    pub(super) fn is_closed(&self) -> bool {
        self.lock().is_closed
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
