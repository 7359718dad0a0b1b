//! The clients of a server, as everybody but their own session sees them.

use crate::export::Export;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::Shutdown;
use slab::Slab;
use std::future::{Future, poll_fn};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Poll, Waker};
use zebu_storage::Socket;

/// One client.
#[derive(Debug)]
pub(crate) struct Peer {
    socket: Option<Socket>,
    /// Whether anything was received or sent since the last look.
    is_active: AtomicBool,
    /// Looks since something was, or since it came.
    quiet: AtomicU32,
    is_serving: AtomicBool,
    /// The export, once it is chosen.
    export: OnceLock<Arc<Export>>,
    requests: AtomicUsize,
    /// Bytes of memory that its requests take.
    held: Arc<AtomicU64>,
}

impl Peer {
    fn new(socket: Option<Socket>) -> Self {
        Self {
            socket,
            is_active: AtomicBool::new(false),
            quiet: AtomicU32::new(0),
            is_serving: AtomicBool::new(false),
            export: OnceLock::new(),
            requests: AtomicUsize::new(0),
            held: Arc::default(),
        }
    }

    #[cfg(test)]
    pub(crate) fn for_test() -> Self {
        Self::new(None)
    }

    /// Something was received or sent.
    pub(crate) fn touch(&self) {
        self.is_active.store(true, Relaxed);
    }

    /// The image works on so many requests.
    pub(crate) fn set_requests(&self, requests: usize) {
        self.requests.store(requests, Relaxed);
    }

    /// Where its account says what it holds.
    pub(crate) fn held(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.held)
    }

    /// The handshake is over.
    pub(crate) fn serves(&self, export: &Arc<Export>) {
        let _ = self.export.set(Arc::clone(export));
        self.begin_serving();
    }

    fn begin_serving(&self) {
        self.quiet.store(0, Relaxed);
        self.is_serving.store(true, Relaxed);
    }

    /// Ends the connection in both directions.
    pub(crate) fn hang_up(&self) {
        self.shut_down(Shutdown::Both);
    }

    /// Whether the client closed its side, or the connection ended: what it sent before may not be received yet.
    pub(crate) fn has_left(&self) -> bool {
        self.socket.as_ref().is_some_and(|socket| {
            let mut fds = [PollFd::new(socket, PollFlags::RDHUP)];
            poll(&mut fds, Some(&Timespec::default())).is_ok_and(|found| found > 0)
        })
    }

    /// Ends the receiving side: a receiver finds the end.
    fn stop_receiving(&self) {
        self.shut_down(Shutdown::Read);
    }

    fn shut_down(&self, how: Shutdown) {
        if let Some(socket) = &self.socket {
            // Fails only if the client did it first.
            let _ = rustix::net::shutdown(socket, how);
        }
    }

    /// One look by the watch, once a second. True if the client's time is over.
    fn look(&self, limits: &TimeLimits) -> bool {
        let was_active = self.is_active.swap(false, Relaxed);
        let quiet = self.quiet.load(Relaxed) + 1;
        let is_serving = self.is_serving.load(Relaxed);
        // During the handshake everything counts: one who sends a byte a second is not to stay for ever.
        let is_busy = is_serving && (was_active || self.requests.load(Relaxed) > 0);
        self.quiet.store(if is_busy { 0 } else { quiet }, Relaxed);
        let limit = if is_serving { limits.idle } else { limits.handshake };
        let is_in_the_way = limits.memory_is_short && self.held.load(Relaxed) > 0;
        !is_busy && (limit.is_some_and(|limit| quiet >= limit) || is_in_the_way && quiet >= STUCK)
    }
}

/// How long clients may take, in seconds; `None`: for ever.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TimeLimits {
    pub(crate) handshake: Option<u32>,
    pub(crate) idle: Option<u32>,
    /// Others wait for memory.
    pub(crate) memory_is_short: bool,
}

/// For so many seconds a client may hold memory that others wait for, without taking replies or sending its data.
const STUCK: u32 = 30;

/// All clients.
#[derive(Debug, Default)]
pub(crate) struct Peers {
    present: Mutex<Slab<Arc<Peer>>>,
    /// Clients that had chosen an export and have left.
    left: AtomicUsize,
    /// Woken when one leaves.
    waiting: Mutex<Vec<Waker>>,
}

impl Peers {
    fn lock(&self) -> MutexGuard<'_, Slab<Arc<Peer>>> {
        self.present.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a client in; `None` if there are `most` already.
    pub(crate) fn admit(self: &Arc<Self>, socket: &Socket, most: usize) -> Option<Membership> {
        let mut peers = self.lock();
        if peers.len() >= most {
            return None;
        }
        let peer = Arc::new(Peer::new(Some(socket.clone())));
        let key = peers.insert(Arc::clone(&peer));
        Some(Membership { peers: Arc::clone(self), key, peer })
    }

    pub(crate) fn len(&self) -> usize {
        self.lock().len()
    }

    /// Whether a client was served, and none is there any more.
    pub(crate) fn have_all_left(&self) -> bool {
        self.len() == 0 && self.left.load(Acquire) > 0
    }

    /// Waits until there are fewer than `most`.
    pub(crate) fn room(&self, most: usize) -> impl Future<Output = ()> {
        poll_fn(move |context| {
            let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
            if self.len() < most {
                return Poll::Ready(());
            }
            waiting.retain(|waker| !waker.will_wake(context.waker()));
            waiting.push(context.waker().clone());
            Poll::Pending
        })
    }

    /// Looks at all clients and ends those whose time is over; says how many that are.
    pub(crate) fn look(&self, limits: &TimeLimits) -> usize {
        let peers = self.lock();
        let over = peers.iter().filter(|(_, peer)| peer.look(limits)).map(|(_, peer)| peer.hang_up());
        over.count()
    }

    /// Ends the connections to an export that was closed.
    pub(crate) fn leave_closed(&self) {
        let peers = self.lock();
        let of_closed = peers.iter().filter(|(_, peer)| peer.export.get().is_some_and(|of| of.is_closed()));
        of_closed.for_each(|(_, peer)| peer.hang_up());
    }

    /// No client's further requests are received.
    pub(crate) fn stop_receiving(&self) {
        self.lock().iter().for_each(|(_, peer)| peer.stop_receiving());
    }

    /// Ends all connections.
    pub(crate) fn hang_up(&self) {
        self.lock().iter().for_each(|(_, peer)| peer.hang_up());
    }
}

/// A client's place among the others, until it is dropped.
#[derive(Debug)]
pub(crate) struct Membership {
    peers: Arc<Peers>,
    key: usize,
    peer: Arc<Peer>,
}

impl Membership {
    pub(crate) fn peer(&self) -> &Arc<Peer> {
        &self.peer
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        if self.peer.is_serving.load(Relaxed) {
            self.peers.left.fetch_add(1, Release);
        }
        self.peers.lock().try_remove(self.key);
        let waiting = std::mem::take(&mut *self.peers.waiting.lock().unwrap_or_else(PoisonError::into_inner));
        waiting.into_iter().for_each(Waker::wake);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_handshakes_and_idle_clients_come_to_their_end() {
        let limits = TimeLimits { handshake: Some(3), idle: Some(2), memory_is_short: false };
        let peer = Peer::for_test();
        peer.touch();
        assert_eq!([0; 3].map(|_| peer.look(&limits)), [false, false, true], "activity does not help");
        let peer = Peer::for_test();
        peer.look(&limits);
        peer.begin_serving();
        peer.touch();
        assert_eq!([0; 3].map(|_| peer.look(&limits)), [false, false, true]);
        peer.set_requests(1);
        assert!(!peer.look(&limits), "a slow disk is not the client's fault");
        peer.set_requests(0);
        assert!(!peer.look(&limits));
        assert!(!peer.look(&TimeLimits { handshake: Some(1), idle: None, memory_is_short: false }));
    }

    #[test]
    fn clients_that_hold_memory_which_others_wait_for_come_to_their_end() {
        let peer = Peer::for_test();
        peer.begin_serving();
        let turns = |peer: &Peer, memory_is_short| {
            peer.touch();
            let limits = TimeLimits { handshake: None, idle: None, memory_is_short };
            (0..100).position(|_| peer.look(&limits))
        };
        assert_eq!(turns(&peer, true), None, "it holds nothing");
        peer.held().store(1000, Relaxed);
        assert_eq!(turns(&peer, false), None, "nobody waits");
        assert_eq!(turns(&peer, true), Some(STUCK as usize));
    }
}
