//! Serving requests. One task reads them in order and starts a task for each; those end in any order, and their replies
//! are sent by another task, all that came together at once.

use super::contexts::Context;
use super::handshake::Agreement;
use super::inbox::Inbox;
use super::outbox::Outbox;
use super::peers::Peer;
use super::protocol::NbdErrno;
use super::reply::{Ticket, done_head, error_reply, read_head, status_chunk};
use super::request::{Command, HeaderStyle, Refusal, RequestHeader, Terms, Verdict, Zeroing, judge};
use super::status::{RunLimit, block_status};
use super::transport::Transport;
use crate::export::Discards;
use crate::inflight_limit::{InflightLimit, Load};
use crate::metrics::RequestKind;
use crate::pool::Seat;
use crate::stop::Stop;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;
use zebu_engine::storage::{IoBuf, IoBufs};
use zebu_engine::{Durability, ErrorKind, ZeroMode};

/// Bytes that reading ahead reads at once: of an image with the smallest clusters, 256 reads.
const CACHE_STEP: u64 = 128 << 10;
/// Bytes that a reply to BLOCK_STATUS is counted with.
const STATUS_BYTES: u64 = 128 << 10;

/// A client that uses an export.
pub(crate) struct Session {
    seat: Seat,
    agreed: Agreement,
    contexts: Vec<Context>,
    limit: InflightLimit,
    outbox: Outbox,
    peer: Arc<Peer>,
    /// Requests that the image works on.
    executing: Cell<usize>,
    /// Whether further requests may come.
    is_receiving: Cell<bool>,
    stop: Stop,
    /// Ranges that are to be read ahead, with their requests; `None` if nobody does so.
    ahead: RefCell<Option<VecDeque<(Pending, u64)>>>,
}

/// A request under way. One that is dropped before it is over has panicked.
struct Pending {
    session: Rc<Session>,
    is_over: Cell<bool>,
    ticket: Ticket,
    kind: RequestKind,
    /// Bytes of the disk that it is about.
    len: u64,
    load: Load,
    since: Instant,
}

impl Drop for Pending {
    fn drop(&mut self) {
        if !self.is_over.get() {
            self.session.vanished(self);
        }
    }
}

/// Lets the sender of replies end with the session, however that ends.
struct Closing<'a>(&'a Session);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        self.0.agreed.export.close_if_panicking();
        self.0.is_receiving.set(false);
        self.0.outbox.close();
    }
}

/// Reads ahead. However that ends, no request stays behind without a reply.
struct ReadingAhead(Rc<Session>);

impl ReadingAhead {
    fn next(&self) -> Option<(Pending, u64)> {
        self.0.ahead.borrow_mut().as_mut()?.pop_front()
    }
}

impl Drop for ReadingAhead {
    fn drop(&mut self) {
        let rest = self.0.ahead.take();
        drop(rest);
    }
}

type Failure = (NbdErrno, String);

impl Session {
    pub(crate) fn new(
        seat: &Seat,
        agreed: Agreement,
        limit: InflightLimit,
        peer: &Arc<Peer>,
        stop: &Stop,
    ) -> Rc<Self> {
        Rc::new(Self {
            seat: seat.clone(),
            contexts: agreed.contexts.iter().collect(),
            agreed,
            limit,
            peer: Arc::clone(peer),
            executing: Cell::new(0),
            is_receiving: Cell::new(true),
            ahead: RefCell::new(None),
            outbox: Outbox::new(&seat.worker),
            stop: stop.clone(),
        })
    }

    /// Serves until the client leaves or the server stops; all requests are answered then.
    ///
    /// # Errors
    /// The connection breaks, or the client does not speak the protocol.
    pub(crate) async fn run(
        self: &Rc<Self>,
        inbox: &mut Inbox,
        transport: &Transport,
        peer: &Arc<Peer>,
    ) -> io::Result<()> {
        let sender = {
            let (me, transport, peer) = (Rc::clone(self), transport.clone(), Arc::clone(peer));
            self.seat.worker.spawn(async move { me.outbox.run(&transport, &me.limit, &peer).await })
        };
        let closing = Closing(self);
        let result = self.receive(inbox).await;
        self.is_receiving.set(false);
        self.limit.empty().await;
        drop(closing);
        sender.await;
        result
    }

    async fn receive(self: &Rc<Self>, inbox: &mut Inbox) -> io::Result<()> {
        let style = self.agreed.requests;
        while !self.stop.is_thrown() {
            let Some(bytes) = inbox.peek(style.header_len()).await? else { return Ok(()) };
            let header = RequestHeader::parse(style, bytes)
                .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "a request without its magic"))?;
            inbox.advance(style.header_len());
            let terms = Terms {
                style,
                flags: self.agreed.flags,
                size: self.agreed.export.image().virtual_size(),
                has_contexts: !self.contexts.is_empty(),
                smallest_block: self.agreed.smallest_block,
            };
            match judge(&header, &terms) {
                Verdict::Execute(command) => self.start(header, command, inbox).await?,
                Verdict::Refuse(refusal) => self.refuse(header, refusal, inbox).await?,
                Verdict::Disconnect => return Ok(()),
                Verdict::Broken(what) => return Err(io::Error::new(io::ErrorKind::InvalidData, what)),
            }
        }
        Ok(())
    }

    /// Waits until the limits of the export let a request go, or the server ends.
    async fn admit(&self, kind: RequestKind, bytes: u64) {
        let _ = self.stop.or(self.agreed.export.admit(&self.seat.worker, kind, bytes)).await;
    }

    async fn refuse(
        self: &Rc<Self>,
        header: RequestHeader,
        refusal: Refusal,
        inbox: &mut Inbox,
    ) -> io::Result<()> {
        inbox.skip(refusal.skip).await?;
        let pending = self.begin(header, RequestKind::Other, 0, 0).await?;
        self.fail(&pending, (refusal.errno, refusal.message.to_owned()));
        Ok(())
    }

    /// Waits for room, and counts a request in. `len`: bytes of the disk; `bytes`: of memory.
    ///
    /// # Errors
    /// The server ends first: the request is not begun, and the connection closed.
    async fn begin(
        self: &Rc<Self>,
        header: RequestHeader,
        kind: RequestKind,
        len: u64,
        bytes: u64,
    ) -> io::Result<Pending> {
        let ends = || io::Error::new(io::ErrorKind::ConnectionAborted, "the server ends");
        let load = self.stop.or(self.limit.enter(bytes)).await.ok_or_else(ends)?;
        self.agreed.export.metrics().start(self.seat.thread);
        self.set_executing(self.executing.get() + 1);
        let ticket = Ticket { cookie: header.cookie, offset: header.offset };
        let (session, is_over) = (Rc::clone(self), Cell::new(false));
        Ok(Pending { session, is_over, ticket, kind, len, load, since: Instant::now() })
    }

    /// Takes a request over. Its payload has been received when this returns.
    async fn start(
        self: &Rc<Self>,
        header: RequestHeader,
        command: Command,
        inbox: &mut Inbox,
    ) -> io::Result<()> {
        let me = Rc::clone(self);
        let worker = &self.seat.worker;
        match command {
            Command::Read { len } => {
                let pending = self.begin(header, RequestKind::Read, len.into(), len.into()).await?;
                let bufs = IoBufs::from(worker.buffer(len as usize));
                drop(worker.spawn(async move { me.read(pending, bufs).await }));
            }
            Command::Write { len, fua } => {
                let pending = self.begin(header, RequestKind::Write, len.into(), len.into()).await?;
                // Until it has sent its payload, the client is waited for, and not the image.
                self.set_executing(self.executing.get() - 1);
                let payload = inbox.read_payload(worker.buffer(len as usize)).await;
                self.set_executing(self.executing.get() + 1);
                let payload = match payload {
                    Ok(payload) => payload,
                    Err(error) => {
                        // The client is gone, or the server ends: nothing is written, and nothing is answered. Whoever
                        // connects again sends the request again.
                        self.give_up(&pending);
                        return Err(error);
                    }
                };
                drop(worker.spawn(async move { me.write(pending, payload, fua).await }));
            }
            Command::Flush => {
                let pending = self.begin(header, RequestKind::Flush, 0, 0).await?;
                drop(worker.spawn(async move {
                    let result = me.agreed.export.flush(&me.seat.worker).await;
                    me.end(&pending, result.map_err(failure));
                }));
            }
            Command::Trim { len, fua } => {
                let pending = self.begin(header, RequestKind::Discard, len, 0).await?;
                drop(worker.spawn(async move {
                    me.admit(RequestKind::Discard, 0).await;
                    let result = match me.agreed.export.discards() {
                        Discards::Unmap => {
                            me.agreed.export.image().discard(&me.seat.worker, header.offset, len).await
                        }
                        Discards::Ignore => Ok(()),
                    };
                    let result = me.settle(result, fua).await;
                    me.end(&pending, result.map_err(failure));
                }));
            }
            Command::WriteZeroes { len, zeroing, fua } => {
                let pending = self.begin(header, RequestKind::WriteZeroes, len, 0).await?;
                drop(worker.spawn(async move { me.write_zeroes(pending, zeroing, fua).await }));
            }
            Command::Cache { len } => {
                let pending = self.begin(header, RequestKind::Other, 0, CACHE_STEP).await?;
                let idle = me.ahead.borrow().is_none();
                me.ahead.borrow_mut().get_or_insert_default().push_back((pending, len));
                if idle {
                    drop(worker.spawn(me.read_ahead()));
                }
            }
            Command::BlockStatus { len, one } => {
                let bytes = STATUS_BYTES * self.contexts.len() as u64;
                let pending = self.begin(header, RequestKind::Other, 0, bytes).await?;
                drop(worker.spawn(async move { me.block_status(pending, len, one).await }));
            }
        }
        Ok(())
    }

    async fn read(self: Rc<Self>, pending: Pending, bufs: IoBufs) {
        let export = &self.agreed.export;
        self.admit(RequestKind::Read, pending.len).await;
        let (result, bufs) = export.read(&self.seat.worker, pending.ticket.offset, bufs).await;
        match result {
            Ok(()) => {
                self.count(&pending, true);
                let head = read_head(self.agreed.replies, pending.ticket, pending.len as u32);
                self.outbox.push(head.bytes(), bufs, pending.load);
            }
            Err(error) => self.fail(&pending, failure(error)),
        }
    }

    async fn write(self: Rc<Self>, pending: Pending, payload: IoBuf, fua: bool) {
        self.admit(RequestKind::Write, pending.len).await;
        let durability = if fua { Durability::Durable } else { Durability::Volatile };
        let image = self.agreed.export.image();
        let (worker, offset) = (&self.seat.worker, pending.ticket.offset);
        let zeroing = self.agreed.export.zero_detection().filter(|_| is_zero(payload.as_slice()));
        let result = if let Some(mode) = zeroing {
            let result = image.write_zeroes(worker, offset, pending.len, mode).await;
            self.settle(result, fua).await
        } else {
            let result = image.write(worker, offset, payload.into(), durability).await.0;
            if fua { result } else { self.settle(result, fua).await }
        };
        self.end(&pending, result.map_err(failure));
    }

    async fn write_zeroes(self: Rc<Self>, pending: Pending, zeroing: Zeroing, fua: bool) {
        if zeroing.fast && !self.agreed.export.zeroes_fast() {
            let message = "zeroing this image is no faster than writing".to_owned();
            self.fail(&pending, (NbdErrno::NotSupported, message));
            return;
        }
        self.admit(RequestKind::WriteZeroes, 0).await;
        let keeps = zeroing.keep || self.agreed.export.discards() == Discards::Ignore;
        let mode = if keeps { ZeroMode::Keep } else { ZeroMode::Unmap };
        let image = self.agreed.export.image();
        let result = image.write_zeroes(&self.seat.worker, pending.ticket.offset, pending.len, mode).await;
        let result = self.settle(result, fua).await;
        self.end(&pending, result.map_err(failure));
    }

    /// Reads ranges ahead, one after the other: whoever asks for many at once is not to have others wait for as many.
    async fn read_ahead(self: Rc<Self>) {
        let reading = ReadingAhead(self);
        while let Some((pending, len)) = reading.next() {
            Rc::clone(&reading.0).read_one_ahead(pending, len).await;
        }
    }

    /// Reads a range so that it is in the page cache, and its mapping in ours. Ends early when nobody is there any more
    /// to use it.
    async fn read_one_ahead(self: Rc<Self>, pending: Pending, len: u64) {
        let mut result = Ok(());
        if self.agreed.export.has_page_cache() {
            let export = &self.agreed.export;
            let (mut at, end) = (pending.ticket.offset, pending.ticket.offset + len);
            while at < end && result.is_ok() && self.is_wanted() {
                let step = (end - at).min(CACHE_STEP);
                self.admit(RequestKind::Read, step).await;
                let bufs = self.seat.worker.buffer(step as usize).into();
                result = export.read(&self.seat.worker, at, bufs).await.0;
                at += step;
            }
        }
        self.end(&pending, result.map_err(failure));
    }

    /// Whether the client is there to use what is read ahead. (The receiving side, held back by the limit, may not know yet
    /// that it left.)
    fn is_wanted(&self) -> bool {
        self.is_receiving.get() && !self.stop.is_thrown() && !self.peer.has_left()
    }

    async fn block_status(self: Rc<Self>, pending: Pending, len: u64, one: bool) {
        self.admit(RequestKind::Other, 0).await;
        let limit = RunLimit { one, compact: self.agreed.requests == HeaderStyle::Compact };
        let Self { seat, agreed, contexts, .. } = &*self;
        let offset = pending.ticket.offset;
        match block_status(&agreed.export, &seat.worker, offset..offset + len, contexts, limit).await {
            Ok(lists) => {
                self.count(&pending, true);
                let mut reply = Vec::new();
                for (index, (context, runs)) in contexts.iter().zip(&lists).enumerate() {
                    let is_last = index + 1 == contexts.len();
                    reply.extend(status_chunk(agreed.replies, pending.ticket, context.id(), runs, is_last));
                }
                self.outbox.push(&reply, IoBufs::new(), pending.load);
            }
            Err(error) => self.fail(&pending, failure(error)),
        }
    }

    /// Ends a change: flushes it, if the request has FUA.
    async fn settle(&self, result: zebu_engine::Result<()>, fua: bool) -> zebu_engine::Result<()> {
        result?;
        let durability = if fua { Durability::Durable } else { Durability::Volatile };
        self.agreed.export.settle(&self.seat.worker, durability).await
    }

    /// Answers a request without data.
    fn end(&self, pending: &Pending, result: Result<(), Failure>) {
        match result {
            Ok(()) => {
                self.count(pending, true);
                let head = done_head(self.agreed.replies, pending.ticket);
                self.outbox.push(head.bytes(), IoBufs::new(), pending.load);
            }
            Err(failure) => self.fail(pending, failure),
        }
    }

    fn fail(&self, pending: &Pending, (errno, message): Failure) {
        self.count(pending, false);
        let reply = error_reply(self.agreed.replies, pending.ticket, errno, &message);
        self.outbox.push(&reply, IoBufs::new(), pending.load);
    }

    fn set_executing(&self, requests: usize) {
        self.executing.set(requests);
        self.peer.set_requests(requests);
    }

    /// A request ended without a result: its client can't be told of anything any more.
    fn vanished(&self, pending: &Pending) {
        self.agreed.export.close_if_panicking();
        self.give_up(pending);
        self.peer.hang_up();
    }

    /// Ends a request without an answer.
    fn give_up(&self, pending: &Pending) {
        self.count(pending, false);
        self.outbox.give_up(pending.load);
    }

    fn count(&self, pending: &Pending, is_ok: bool) {
        let Pending { kind, len, since, is_over, .. } = pending;
        is_over.set(true);
        self.set_executing(self.executing.get().saturating_sub(1));
        self.agreed.export.metrics().end(self.seat.thread, *kind, *len, is_ok, since.elapsed());
    }
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|&byte| byte == 0)
}

/// An error in the protocol's words.
fn failure(error: zebu_engine::Error) -> Failure {
    let errno = match error.kind() {
        ErrorKind::NoSpace => NbdErrno::NoSpace,
        ErrorKind::ReadOnly => NbdErrno::NotPermitted,
        // ENOTSUP belongs to zeroes that are not fast.
        ErrorKind::InvalidArgument | ErrorKind::OutOfRange | ErrorKind::Unsupported => NbdErrno::Invalid,
        _ => NbdErrno::Io,
    };
    // Without the path, which is none of the client's business.
    (errno, error.message().to_owned())
}
