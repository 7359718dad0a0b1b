//! The clients of a server, as everybody but their own session sees them.

use super::origin::Origin;
use crate::export::Export;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::Shutdown;
use slab::Slab;
use std::collections::HashMap;
use std::future::{Future, poll_fn};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, AtomicUsize};
use std::sync::{Arc, OnceLock};
use std::task::{Poll, Waker};
use zebu_storage::Socket;
use zebu_storage::sync::Mutex;

/// A client's hold on its place among the others.
#[repr(u8)]
enum Slot {
    /// It has not chosen an export: a newcomer may get the place.
    Handshake,
    /// It has chosen one, and keeps the place.
    Kept,
    /// A newcomer has got the place.
    Displaced,
}

/// One client.
#[derive(Debug)]
pub(crate) struct Peer {
    socket: Option<Socket>,
    origin: Origin,
    /// Its number in the order of arrival.
    number: u64,
    /// One of [`Slot`].
    place: AtomicU8,
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
    fn new(socket: Option<Socket>, origin: Origin, number: u64) -> Self {
        Self {
            socket,
            origin,
            number,
            place: AtomicU8::new(Slot::Handshake as u8),
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
        Self::new(None, Origin::Unknown, 0)
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
        self.touch();
        self.is_serving.store(true, Release);
    }

    /// Ends the connection in both directions.
    pub(crate) fn hang_up(&self) {
        self.shut_down(Shutdown::Both);
    }

    /// Keeps its place, before the client is told that its export was found; false if a newcomer has got it.
    pub(crate) fn keep_place(&self) -> bool {
        self.leave_handshake(Slot::Kept) != Slot::Displaced as u8
    }

    /// Leaves its place to a newcomer; false if it is kept, or gone.
    fn give_place(&self) -> bool {
        let is_given = self.leave_handshake(Slot::Displaced) == Slot::Handshake as u8;
        if is_given {
            self.hang_up();
        }
        is_given
    }

    /// The place before that.
    fn leave_handshake(&self, to: Slot) -> u8 {
        let (from, to) = (Slot::Handshake as u8, to as u8);
        self.place.compare_exchange(from, to, Relaxed, Relaxed).unwrap_or_else(|other| other)
    }

    fn can_be_displaced(&self) -> bool {
        self.place.load(Relaxed) == Slot::Handshake as u8
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
        // Before the activity with which serving begins.
        let is_serving = self.is_serving.load(Acquire);
        let was_active = self.is_active.swap(false, Relaxed);
        let quiet = self.quiet.load(Relaxed) + 1;
        // During the handshake everything counts: one who sends a byte a second is not to stay for ever.
        let is_busy = is_serving && (was_active || self.requests.load(Relaxed) > 0);
        self.quiet.store(if is_busy { 0 } else { quiet }, Relaxed);
        // A client in its handshake came within the second before the first look; one that is idle was busy at the last.
        let limit =
            if is_serving { limits.idle } else { limits.handshake.map(|limit| limit.saturating_add(1)) };
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

/// How many clients there may be.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Places {
    pub(crate) most: usize,
    /// Of one origin.
    pub(crate) of_one: usize,
}

/// The lack that keeps a client out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NoPlace {
    /// There are as many clients as may be.
    Full,
    /// Its origin has all that one may have.
    OfOrigin(Origin),
}

/// Displaced clients that may be on their way out, beside those that have places.
pub(crate) const LEAVING: usize = 64;

#[derive(Debug, Default)]
struct Present {
    all: Slab<Arc<Peer>>,
    /// Clients of each origin.
    of: HashMap<Origin, usize>,
    /// The number of the next client.
    next: u64,
}

impl Present {
    /// Takes the place of the client that has been in its handshake for longest, of this origin or of any.
    fn displace(&self, of: Option<Origin>) -> bool {
        let oldest = || {
            let candidates = self.all.iter().map(|(_, peer)| peer).filter(|peer| peer.can_be_displaced());
            candidates
                .filter(|peer| of.is_none_or(|origin| peer.origin == origin))
                .min_by_key(|peer| peer.number)
        };
        // One that chooses an export meanwhile keeps its place.
        std::iter::from_fn(oldest).any(|peer| peer.give_place())
    }
}

/// All clients.
#[derive(Debug, Default)]
pub(crate) struct Peers {
    present: Mutex<Present>,
    /// Clients that had chosen an export and have left.
    left: AtomicUsize,
    /// Woken when one leaves.
    waiting: Mutex<Vec<Waker>>,
}

impl Peers {
    /// Takes a client in. If there are as many as may be, it gets the place of one that has not chosen an export.
    ///
    /// # Errors
    /// There is no such one.
    pub(crate) fn admit(
        self: &Arc<Self>,
        socket: &Socket,
        origin: Origin,
        places: Places,
    ) -> Result<Membership, NoPlace> {
        let mut present = self.present.lock();
        let of_origin = present.of.get(&origin).copied().unwrap_or(0);
        let lack = if of_origin >= places.of_one {
            Some((NoPlace::OfOrigin(origin), Some(origin)))
        } else if present.all.len() >= places.most {
            Some((NoPlace::Full, None))
        } else {
            None
        };
        if let Some((lack, of)) = lack {
            let too_many_leave = present.all.len() >= places.most.saturating_add(LEAVING);
            if too_many_leave || !present.displace(of) {
                return Err(lack);
            }
        }
        let peer = Arc::new(Peer::new(Some(socket.clone()), origin, present.next));
        present.next += 1;
        *present.of.entry(origin).or_default() += 1;
        let key = present.all.insert(Arc::clone(&peer));
        Ok(Membership { peers: Arc::clone(self), key, peer })
    }

    pub(crate) fn len(&self) -> usize {
        self.present.lock().all.len()
    }

    /// Waits until a client was served, and none is there any more.
    pub(crate) fn all_left(&self) -> impl Future<Output = ()> {
        self.until(|peers| peers.len() == 0 && peers.left.load(Acquire) > 0)
    }

    /// Waits until there are fewer than `most`.
    pub(crate) fn room(&self, most: usize) -> impl Future<Output = ()> {
        self.until(move |peers| peers.len() < most)
    }

    /// Waits for a condition that a client's leaving can bring about.
    fn until(&self, holds: impl Fn(&Self) -> bool) -> impl Future<Output = ()> {
        poll_fn(move |context| {
            let mut waiting = self.waiting.lock();
            if holds(self) {
                return Poll::Ready(());
            }
            waiting.retain(|waker| !waker.will_wake(context.waker()));
            waiting.push(context.waker().clone());
            Poll::Pending
        })
    }

    /// Looks at all clients and ends those whose time is over; says how many that are.
    pub(crate) fn look(&self, limits: &TimeLimits) -> usize {
        let present = self.present.lock();
        let over = present.all.iter().filter(|(_, peer)| peer.look(limits)).map(|(_, peer)| peer.hang_up());
        over.count()
    }

    /// Ends the connections to an export that was closed.
    pub(crate) fn leave_closed(&self) {
        let present = self.present.lock();
        let of_closed =
            present.all.iter().filter(|(_, peer)| peer.export.get().is_some_and(|of| of.is_closed()));
        of_closed.for_each(|(_, peer)| peer.hang_up());
    }

    /// Ends the connections to an export.
    pub(crate) fn leave(&self, export: &Arc<Export>) {
        let present = self.present.lock();
        let of_it = present
            .all
            .iter()
            .filter(|(_, peer)| peer.export.get().is_some_and(|of| Arc::ptr_eq(of, export)));
        of_it.for_each(|(_, peer)| peer.hang_up());
    }

    /// No client's further requests are received.
    pub(crate) fn stop_receiving(&self) {
        self.present.lock().all.iter().for_each(|(_, peer)| peer.stop_receiving());
    }

    /// Ends all connections.
    pub(crate) fn hang_up(&self) {
        self.present.lock().all.iter().for_each(|(_, peer)| peer.hang_up());
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
        let mut present = self.peers.present.lock();
        present.all.try_remove(self.key);
        if let Some(count) = present.of.get_mut(&self.peer.origin) {
            *count -= 1;
            if *count == 0 {
                present.of.remove(&self.peer.origin);
            }
        }
        drop(present);
        let waiting = std::mem::take(&mut *self.peers.waiting.lock());
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
        let looks = [0; 4].map(|_| peer.look(&limits));
        assert_eq!(looks, [false, false, false, true], "activity does not help, and 3 seconds have gone by");
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
    fn who_has_not_chosen_an_export_makes_room() {
        let peers = Arc::<Peers>::default();
        let places = Places { most: 3, of_one: 2 };
        let come = |user: u32| {
            let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
            let socket = Socket::new(ours).unwrap();
            peers.admit(&socket, Origin::User(user), places).map(|membership| (membership, theirs))
        };
        let is_there =
            |client: &(Membership, _)| client.0.peer().place.load(Relaxed) != Slot::Displaced as u8;
        let (first, second) = (come(1).unwrap(), come(1).unwrap());
        let third = come(1).unwrap();
        assert!(!is_there(&first) && is_there(&second), "its own, as it has its share");
        drop(first);
        assert!(second.0.peer().keep_place());
        let other = come(2).unwrap();
        assert!(is_there(&third), "there was room");
        let another = come(3).unwrap();
        assert!(!is_there(&third) && is_there(&second) && is_there(&other), "the oldest in its handshake");
        assert!(!third.0.peer().keep_place(), "it comes too late");
        drop(third);
        for chooser in [&other, &another] {
            assert!(chooser.0.peer().keep_place());
        }
        assert_eq!(come(3).err(), Some(NoPlace::Full));
        drop(other);
        let third = come(1).unwrap();
        assert!(third.0.peer().keep_place());
        assert_eq!(come(1).err(), Some(NoPlace::OfOrigin(Origin::User(1))));
        drop((second, third, another));
        assert!(peers.len() == 0 && peers.present.lock().of.is_empty());
    }

    #[test]
    fn those_on_their_way_out_are_bounded() {
        let peers = Arc::<Peers>::default();
        let places = Places { most: 1, of_one: 1 };
        let (ours, _theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let socket = Socket::new(ours).unwrap();
        let come = || peers.admit(&socket, Origin::User(1), places);
        let all: Vec<_> = (0..=LEAVING).map(|_| come().unwrap()).collect();
        assert!(come().is_err());
        drop(all);
        assert!(come().is_ok());
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
