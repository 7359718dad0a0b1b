//! Sending: replies are collected while the completions of one turn are looked at, and go out in one call. Small ones
//! after which nothing is left to do go out with the call that waits for the next request.

use super::peers::Peer;
use super::transport::Transport;
use crate::inflight_limit::{InflightLimit, Load};
use std::cell::RefCell;
use std::future::poll_fn;
use std::io;
use std::sync::Arc;
use std::task::{Poll, Waker};
use zebu_engine::storage::{IoBuf, IoBufs, Worker};

/// Bytes of memory from which heads are cut.
const ARENA: usize = 4096;
/// Replies of up to so many bytes may be sent lazily: more are worth a system call of their own, and their memory is not
/// to be held until the next request comes.
const LAZY: usize = 64 << 10;

/// Replies that wait to be sent. Belongs to one thread.
pub(crate) struct Outbox {
    worker: Worker,
    state: RefCell<State>,
}

struct State {
    queue: IoBufs,
    /// The load that the queued replies give back to the limit.
    load: Load,
    arena: IoBuf,
    waker: Option<Waker>,
    is_closed: bool,
    is_broken: bool,
}

impl Outbox {
    pub(crate) fn new(worker: &Worker) -> Self {
        let state = State {
            queue: IoBufs::new(),
            load: Load::default(),
            arena: IoBuf::zeroed(0),
            waker: None,
            is_closed: false,
            is_broken: false,
        };
        Self { worker: worker.clone(), state: RefCell::new(state) }
    }

    /// Queues a reply.
    pub(crate) fn push(&self, head: &[u8], payload: IoBufs, load: Load) {
        let mut state = self.state.borrow_mut();
        state.load.add(load);
        if !state.is_broken {
            let head = state.piece(&self.worker, head);
            state.queue.push(head);
            for part in payload {
                state.queue.push(part);
            }
        }
        let waker = state.waker.take();
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// A request has vanished: what it took is given back, and no further reply is sent.
    pub(crate) fn give_up(&self, load: Load) {
        // Taken if the panic came from in here; then nothing is sent any more in any case.
        let Ok(mut state) = self.state.try_borrow_mut() else { return };
        state.is_broken = true;
        state.queue.clear();
        state.load.add(load);
        let waker = state.waker.take();
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Lets [`Outbox::run`] end when everything is sent.
    pub(crate) fn close(&self) {
        let mut state = self.state.borrow_mut();
        state.is_closed = true;
        let waker = state.waker.take();
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Sends what is queued until it is closed. If the connection breaks, replies go nowhere from then on, and the
    /// other direction ends too.
    pub(crate) async fn run(&self, transport: &Transport, limit: &InflightLimit, peer: &Arc<Peer>) {
        let mut batch = IoBufs::new();
        let mut lazy = None;
        loop {
            let load = self.next(&mut batch).await;
            // Nothing may be sent before it is over.
            if let Some(sending) = lazy.take() {
                let (result, _): (io::Result<usize>, _) = sending.await;
                self.note_sent(result.is_ok(), peer);
            }
            let Some(load) = load else { return };
            let is_last = limit.holds_only(load) && (1..=LAZY).contains(&batch.len());
            if is_last && let Some(socket) = transport.plain() {
                lazy = Some(self.worker.send_lazily(socket, std::mem::take(&mut batch)));
                peer.touch();
            } else {
                let (result, sent) = transport.send(&self.worker, std::mem::take(&mut batch)).await;
                batch = sent;
                batch.clear();
                self.note_sent(result.is_ok(), peer);
            }
            limit.leave(load);
        }
    }

    fn note_sent(&self, is_ok: bool, peer: &Peer) {
        peer.touch();
        if !is_ok {
            let mut state = self.state.borrow_mut();
            state.is_broken = true;
            state.queue.clear();
            drop(state);
            peer.hang_up();
        }
    }

    /// Waits for replies and takes all; `None` if there will be none.
    async fn next(&self, batch: &mut IoBufs) -> Option<Load> {
        poll_fn(|cx| {
            let mut state = self.state.borrow_mut();
            if state.load != Load::default() || !state.queue.is_empty() {
                std::mem::swap(&mut state.queue, batch);
                return Poll::Ready(Some(std::mem::take(&mut state.load)));
            }
            if state.is_closed {
                return Poll::Ready(None);
            }
            state.waker = Some(cx.waker().clone());
            Poll::Pending
        })
        .await
    }
}

impl State {
    /// A buffer with these bytes; small ones share memory.
    fn piece(&mut self, worker: &Worker, bytes: &[u8]) -> IoBuf {
        if bytes.len() > ARENA / 4 {
            return IoBuf::copy_of(bytes);
        }
        if self.arena.len() < bytes.len() {
            self.arena = worker.buffer(ARENA);
        }
        let mut piece = self.arena.split_to(bytes.len());
        piece.as_mut_slice().copy_from_slice(bytes);
        piece
    }
}
