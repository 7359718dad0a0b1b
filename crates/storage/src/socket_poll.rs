//! Socket operations of a worker without a ring: tried at once, and again when `ppoll` says that it is worth it.

use crate::socket::{SocketCompletion, SocketRequest};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::Duration;

/// The operations that wait, and those that are over.
#[derive(Default)]
pub(crate) struct SocketPoll {
    waiting: Vec<(usize, SocketRequest)>,
    done: Vec<SocketCompletion>,
    /// Kept for its capacity.
    polls: Vec<libc::pollfd>,
}

impl SocketPoll {
    /// Takes an operation over; gives it back if it is over at once.
    pub(crate) fn submit(&mut self, id: usize, mut request: SocketRequest) -> Option<SocketCompletion> {
        if let Some(result) = request.attempt() {
            return Some(SocketCompletion { id, request, result });
        }
        self.waiting.push((id, request));
        None
    }

    /// Ends an operation that nobody waits for any more.
    pub(crate) fn cancel(&mut self, id: usize) {
        if let Some(at) = self.waiting.iter().position(|(other, _)| *other == id) {
            let (id, request) = self.waiting.swap_remove(at);
            self.done.push(SocketCompletion { id, request, result: Err(libc::ECANCELED) });
        }
    }

    /// Whether there is none.
    pub(crate) fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.done.is_empty()
    }

    /// Waits until `notifier` is readable or an operation can go on, at most `timeout`.
    pub(crate) fn wait(&mut self, notifier: BorrowedFd<'_>, timeout: Option<Duration>) {
        let timeout = if self.done.is_empty() { timeout } else { Some(Duration::ZERO) };
        self.polls.clear();
        self.polls.push(libc::pollfd { fd: notifier.as_raw_fd(), events: libc::POLLIN, revents: 0 });
        for (_, request) in &self.waiting {
            let events = if request.op.sends() { libc::POLLOUT } else { libc::POLLIN };
            self.polls.push(libc::pollfd { fd: request.socket.as_fd().as_raw_fd(), events, revents: 0 });
        }
        let time = timeout.map(crate::notify::timespec);
        let time = time.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        let count = self.polls.len() as libc::nfds_t;
        // SAFETY: `count` pollfds; `time` is null or points to a timespec that lives through the call. Their
        // descriptors are kept open by the requests. An early return (EINTR) is allowed here.
        let ready = unsafe { libc::ppoll(self.polls.as_mut_ptr(), count, time, std::ptr::null()) };
        if ready <= 0 {
            return;
        }
        // From the end, since the last one takes the place of one that is removed.
        for at in (0..self.waiting.len()).rev() {
            if self.polls[at + 1].revents == 0 {
                continue;
            }
            if let Some(result) = self.waiting[at].1.attempt() {
                let (id, request) = self.waiting.swap_remove(at);
                self.done.push(SocketCompletion { id, request, result });
            }
        }
    }

    /// Appends what is over; looks at what waits.
    pub(crate) fn reap(&mut self, notifier: BorrowedFd<'_>, done: &mut Vec<SocketCompletion>) {
        if !self.waiting.is_empty() && self.done.is_empty() {
            self.wait(notifier, Some(Duration::ZERO));
        }
        done.append(&mut self.done);
    }
}
