//! One connection: sends requests from the queue, takes replies, and gives back what was not answered when it breaks.

use super::protocol::{ESHUTDOWN, chunk, command, command_flag};
use super::queue::Queue;
use super::request::{Next, Request};
use super::wire::{self, Breach, Content, Head, HeadKind, RequestHead, Style};
use crate::network::deadline::MOST_OVERTAKING;
use crate::stats::RemoteStats;
use crate::stream::Stream;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::{BTreeMap, VecDeque};
use std::io::{self, IoSlice};
use std::time::{Duration, Instant};

/// The most requests of one connection at a time.
const MOST_REQUESTS: usize = 64;
/// The most bytes of data that the requests of one connection ask for or carry, unless one alone has more.
const MOST_BYTES: u64 = 64 << 20;
/// Bytes that are received at once, beside what goes straight to a request's memory.
const RECEIVED: usize = 128 << 10;
/// Data of at least so many bytes goes straight to the request's memory.
const STRAIGHT: u64 = 16 << 10;
/// Under TLS, the most times that is received before something is sent.
const MOST_ROUNDS: usize = 16;
/// The most pieces of one system call that sends.
const MOST_PIECES: usize = 64;
/// The longest wait for the server to close after the goodbye.
pub(super) const FAREWELL: Duration = Duration::from_millis(200);

/// Limits and form of requests to an export.
#[derive(Debug, Clone, Copy)]
pub(super) struct Terms {
    pub(super) style: Style,
    /// The most bytes of a read or write.
    pub(super) most_payload: u64,
    /// The most bytes of other requests.
    pub(super) most_range: u64,
}

/// Why the connection is over.
#[derive(Debug)]
pub(super) enum Lost {
    /// The disk is closed.
    Closed,
    /// The system or the peer ended it.
    Io(io::Error),
    /// The server breaks the protocol.
    Breach(Breach),
    /// A request was not answered in time.
    Silent,
    /// The server says that it is about to end.
    Shutdown,
}

impl std::fmt::Display for Lost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Closed => f.write_str("the disk is closed"),
            Self::Io(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                f.write_str("the server closed the connection")
            }
            Self::Io(error) => write!(f, "{error}"),
            Self::Breach(Breach(what)) => write!(f, "the server breaks the protocol: {what}"),
            Self::Silent => f.write_str("the server did not answer in time"),
            Self::Shutdown => f.write_str("the server is about to end"),
        }
    }
}

impl From<io::Error> for Lost {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl From<Breach> for Lost {
    fn from(breach: Breach) -> Self {
        Self::Breach(breach)
    }
}

/// Changes that a connection has sent and got no answer to, when it ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unanswered {
    /// The server has closed the connection: it does none of them later.
    None,
    /// The server may do some of them at any time, and overwrite what was written after them.
    MayCome,
}

/// An observer of changes and flushes of connections.
pub(super) trait Watcher {
    /// A flush or change is about to be sent by a connection; false fails it with EIO.
    fn may_send(&self, connection: usize, request: &mut Request) -> bool;
    /// A change or flush of a connection succeeded.
    fn succeeded(&self, connection: usize, request: &Request);
    /// A connection is over. Its unanswered requests are not in the queue yet.
    fn is_over(&self, connection: usize, unanswered: Unanswered);
}

/// A request on its way out.
struct Outgoing {
    head: RequestHead,
    cookie: u64,
    payload: usize,
    sent: usize,
}

/// The meaning of the next bytes.
enum Expect {
    Head,
    /// Data of a read. The part before `at` was received.
    Data {
        cookie: u64,
        at: u64,
        end: u64,
        is_last: bool,
    },
    /// The offset of a data chunk.
    DataOffset {
        cookie: u64,
        len: u64,
        is_last: bool,
    },
    /// Another chunk.
    Content {
        cookie: u64,
        kind: u16,
        len: usize,
        is_last: bool,
    },
}

/// A connection at work.
pub(super) struct Connection<'a, W> {
    number: usize,
    stream: Stream,
    terms: Terms,
    queue: &'a Queue,
    watcher: &'a W,
    stats: &'a RemoteStats,
    /// By cookies, which are never used again: later ones are greater.
    pending: BTreeMap<u64, Request>,
    pending_bytes: u64,
    /// Requests that the server has refused because it is about to end. It may still do the others.
    refused: Vec<Request>,
    next_cookie: u64,
    outgoing: VecDeque<Outgoing>,
    input: Vec<u8>,
    /// The part of `input` that is not parsed.
    start: usize,
    end: usize,
    expect: Expect,
    /// Whether more may have arrived than the socket shows.
    has_more: bool,
    /// Bytes that it received, and of payload that it sent; and when the last of them.
    moved: u64,
    progress: Instant,
}

impl<'a, W: Watcher> Connection<'a, W> {
    pub(super) fn new(
        number: usize,
        stream: Stream,
        terms: Terms,
        queue: &'a Queue,
        watcher: &'a W,
        stats: &'a RemoteStats,
    ) -> Self {
        Self {
            number,
            stream,
            terms,
            queue,
            watcher,
            stats,
            pending: BTreeMap::new(),
            pending_bytes: 0,
            refused: Vec::new(),
            next_cookie: 1,
            outgoing: VecDeque::new(),
            input: vec![0; RECEIVED],
            start: 0,
            end: 0,
            expect: Expect::Head,
            has_more: false,
            moved: 0,
            progress: Instant::now(),
        }
    }

    /// Works until the connection is over; unanswered requests are back in the queue then.
    pub(super) fn run(mut self) -> Lost {
        let lost = loop {
            if let Err(lost) = self.turn() {
                break lost;
            }
        };
        if let Lost::Closed = lost
            && self.outgoing.front().is_none_or(|first| first.sent == 0)
        {
            let head = RequestHead::new(self.terms.style, 0, command::DISCONNECT, self.next_cookie, 0, 0);
            // A server that is gone needs no farewell.
            let _ = self.stream.write_vectored(&[IoSlice::new(head.bytes())]);
            self.stream.say_goodbye(FAREWELL);
        }
        let is_closed_by_peer = match &lost {
            Lost::Io(error) => matches!(
                error.kind(),
                io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe
            ),
            Lost::Closed | Lost::Breach(_) | Lost::Silent | Lost::Shutdown => false,
        };
        let may_come = !is_closed_by_peer && self.pending.values().any(Request::may_change_later);
        let unanswered = if may_come { Unanswered::MayCome } else { Unanswered::None };
        // Before another connection gets any of the requests: a flush that succeeds there says nothing of what was answered
        // here.
        self.watcher.is_over(self.number, unanswered);
        self.queue.detach(self.number);
        let now = Instant::now();
        let refused = std::mem::take(&mut self.refused);
        let pending = std::mem::take(&mut self.pending).into_values().chain(refused);
        let (over, left): (Vec<_>, Vec<_>) = pending.partition(|request| self.until(request) <= now);
        if !matches!(lost, Lost::Closed) {
            self.queue.note_failure(lost.to_string());
        }
        for request in over {
            self.queue.give_up(request);
        }
        if let Lost::Closed = lost {
            for request in left {
                request.fail(libc::EIO);
            }
        } else {
            self.stats.count_retries(left.len());
            self.queue.put_back(left.into_iter());
        }
        lost
    }

    /// Waits for something to do, and does it.
    fn turn(&mut self) -> Result<(), Lost> {
        self.queue.answer_bell(self.number);
        if self.queue.is_closed() {
            return Err(Lost::Closed);
        }
        if self.refused.is_empty() {
            self.take_requests();
        } else if self.pending.values().any(Request::may_change_later) {
            // Sent again over another connection, they might be done here after what comes later.
            self.queue.leave(self.number);
        } else {
            return Err(Lost::Shutdown);
        }
        self.send()?;
        let now = Instant::now();
        let next = self.pending.values().chain(&self.refused).map(|request| self.until(request)).min();
        if next.is_some_and(|deadline| deadline <= now) {
            return Err(Lost::Silent);
        }
        let waits_to_send = !self.outgoing.is_empty() || self.stream.holds_back();
        let events = if waits_to_send { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
        let mut fds = [
            PollFd::new(&self.stream, events),
            PollFd::from_borrowed_fd(self.queue.bell(self.number), PollFlags::IN),
        ];
        // Without a deadline the bell wakes.
        let left = next.map(|deadline| deadline - now + Duration::from_millis(1));
        let left = if self.has_more { Some(Duration::ZERO) } else { left };
        let timeout = left.and_then(|left| Timespec::try_from(left).ok());
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(io::Error::from(error).into()),
        }
        if self.has_more || fds[0].revents().intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR) {
            self.has_more = false;
            let mut rounds = 0;
            // What TLS has decrypted does not make the socket readable.
            while self.receive()? && self.stream.buffers_input() {
                rounds += 1;
                if rounds == MOST_ROUNDS {
                    self.has_more = true;
                    break;
                }
            }
        }
        Ok(())
    }

    /// Takes requests from the queue, as many as the connection has room for.
    fn take_requests(&mut self) {
        while self.pending.len() < MOST_REQUESTS && self.pending_bytes < MOST_BYTES {
            let Some(request) = self.queue.take(self.number) else { break };
            self.begin(request);
        }
        self.queue.set_load(self.number, self.pending.len());
    }

    /// Sets about the next part of a request.
    fn begin(&mut self, mut request: Request) {
        if !self.watcher.may_send(self.number, &mut request) {
            request.fail(libc::EIO);
            return;
        }
        let has_data = matches!(request.command, command::READ | command::WRITE);
        request.begin_part(if has_data { self.terms.most_payload } else { self.terms.most_range });
        let len = request.part.end - request.part.start;
        let mut flags = request.flags;
        if self.terms.style == Style::Extended && request.command == command::WRITE {
            flags |= command_flag::PAYLOAD_LEN;
        }
        let cookie = self.next_cookie;
        self.next_cookie += 1;
        let head =
            RequestHead::new(self.terms.style, flags, request.command, cookie, request.part.start, len);
        let payload = request.payload_len();
        self.stats.count_request(payload as u64);
        self.pending_bytes += if has_data { len } else { 0 };
        request.due = self.moved + self.pending_bytes + MOST_OVERTAKING;
        self.outgoing.push_back(Outgoing { head, cookie, payload, sent: 0 });
        self.pending.insert(cookie, request);
    }

    /// Sends as much as the socket takes.
    fn send(&mut self) -> Result<(), Lost> {
        while !self.outgoing.is_empty() {
            let mut pieces: Vec<IoSlice<'_>> = Vec::with_capacity(MOST_PIECES);
            for outgoing in &self.outgoing {
                if pieces.len() >= MOST_PIECES {
                    break;
                }
                let head = outgoing.head.bytes();
                if outgoing.sent < head.len() {
                    pieces.push(IoSlice::new(&head[outgoing.sent..]));
                }
                if outgoing.payload > 0
                    && let Some(request) = self.pending.get(&outgoing.cookie)
                {
                    let from = outgoing.sent.saturating_sub(head.len());
                    request.payload(from, |piece| pieces.push(IoSlice::new(piece)));
                }
            }
            // The system takes no more at once.
            pieces.truncate(libc::UIO_MAXIOV as usize);
            let sent = match self.stream.write_vectored(&pieces) {
                Ok(sent) => sent,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error.into()),
            };
            self.note_sent(sent);
        }
        if self.stream.holds_back() {
            match self.stream.write_vectored(&[]) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// The time when a request is over.
    fn until(&self, request: &Request) -> Instant {
        // It may be silent by itself, or all of them too slow.
        let progress = self.progress.min(self.queue.progress());
        self.queue.until(request, request.until(self.moved, progress), self.progress)
    }

    fn note_progress(&mut self, bytes: usize) {
        self.moved += bytes as u64;
        self.progress = Instant::now();
        self.queue.note_progress(self.progress, bytes as u64);
    }

    fn note_sent(&mut self, mut sent: usize) {
        // Heads alone say nothing of a server: there may be always more of them.
        if self.outgoing.front().is_some_and(|first| first.payload > 0) {
            self.note_progress(sent);
        }
        while let Some(first) = self.outgoing.front_mut() {
            let left = first.head.bytes().len() + first.payload - first.sent;
            if sent < left {
                first.sent += sent;
                return;
            }
            sent -= left;
            if let Some(request) = self.pending.get_mut(&first.cookie) {
                request.is_sent = true;
            }
            self.outgoing.pop_front();
        }
    }

    /// Takes what has arrived; false if nothing has.
    fn receive(&mut self) -> Result<bool, Lost> {
        let read = if let Some(cookie) = self.straight_memory() {
            self.receive_straight(cookie)
        } else {
            if self.start > 0 {
                self.input.copy_within(self.start..self.end, 0);
                self.end -= self.start;
                self.start = 0;
            }
            let read = self.stream.read(&mut self.input[self.end..]);
            self.end += read.as_ref().map_or(0, |read| *read);
            read
        };
        match read {
            Ok(0) => Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
            Ok(read) => {
                self.note_progress(read);
                self.parse().map(|()| true)
            }
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                Ok(false)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// The cookie of the read whose data comes next, if it is enough to go straight to its place.
    fn straight_memory(&self) -> Option<u64> {
        match self.expect {
            Expect::Data { cookie, at, end, .. } if self.start == self.end && end - at >= STRAIGHT => {
                Some(cookie)
            }
            _ => None,
        }
    }

    fn receive_straight(&mut self, cookie: u64) -> io::Result<usize> {
        let Expect::Data { at, end, .. } = &mut self.expect else { return Ok(0) };
        let Some(request) = self.pending.get_mut(&cookie) else { return Ok(0) };
        let read = self.stream.read(request.memory_at(*at, *end - *at))?;
        *at += read as u64;
        self.stats.count_read(read as u64);
        Ok(read)
    }

    /// Goes through the bytes that have arrived.
    fn parse(&mut self) -> Result<(), Lost> {
        loop {
            let bytes = &self.input[self.start..self.end];
            match self.expect {
                Expect::Head => {
                    let Some((head, used)) = wire::parse_head(self.terms.style, bytes)? else {
                        return Ok(());
                    };
                    self.start += used;
                    self.take_head(head)?;
                }
                Expect::Data { cookie, at, end, is_last } => {
                    let Some(request) = self.pending.get_mut(&cookie) else {
                        return Err(Breach("data of nobody").into());
                    };
                    let (mut at, mut used) = (at, 0);
                    while at < end && used < bytes.len() {
                        let memory = request.memory_at(at, (end - at).min((bytes.len() - used) as u64));
                        if memory.is_empty() {
                            return Err(Breach("data without a place").into());
                        }
                        memory.copy_from_slice(&bytes[used..used + memory.len()]);
                        used += memory.len();
                        at += memory.len() as u64;
                    }
                    self.start += used;
                    self.stats.count_read(used as u64);
                    if at < end {
                        self.expect = Expect::Data { cookie, at, end, is_last };
                        return Ok(());
                    }
                    self.expect = Expect::Head;
                    if is_last {
                        self.finish(cookie)?;
                    }
                }
                Expect::DataOffset { cookie, len, is_last } => {
                    let Some(offset) = wire::data_offset(bytes) else { return Ok(()) };
                    self.start += 8;
                    self.cover(cookie, offset, len)?;
                    self.expect = Expect::Data { cookie, at: offset, end: offset + len, is_last };
                }
                Expect::Content { cookie, kind, len, is_last } => {
                    if bytes.len() < len {
                        // Its length was checked: at most some hundred KiB.
                        if self.input.len() < len {
                            self.input.copy_within(self.start..self.end, 0);
                            self.end -= self.start;
                            self.start = 0;
                            self.input.resize(len, 0);
                        }
                        return Ok(());
                    }
                    let content = wire::parse_content(kind, &bytes[..len])?;
                    self.start += len;
                    self.expect = Expect::Head;
                    self.take_content(cookie, content)?;
                    if is_last {
                        self.finish(cookie)?;
                    }
                }
            }
        }
    }

    fn take_head(&mut self, head: Head) -> Result<(), Lost> {
        let cookie = head.cookie;
        let Some(request) = self.pending.get_mut(&cookie) else {
            return Err(Breach("a reply to a request that was not made").into());
        };
        if !request.is_sent {
            return Err(Breach("a reply to a request that was not sent whole").into());
        }
        match head.kind {
            HeadKind::Simple { error } => {
                let is_read = request.command == command::READ;
                let wants_chunks = is_read || request.command == command::BLOCK_STATUS;
                if wants_chunks && self.terms.style != Style::Simple {
                    return Err(Breach("a reply without chunks to a read").into());
                }
                request.error = error;
                if is_read && error == 0 {
                    let part = request.part.clone();
                    self.cover(cookie, part.start, part.end - part.start)?;
                    self.expect = Expect::Data { cookie, at: part.start, end: part.end, is_last: true };
                    return Ok(());
                }
                self.finish(cookie)
            }
            HeadKind::Chunk { kind: chunk::OFFSET_DATA, is_last, len } => {
                let most = request.part.end - request.part.start;
                if request.command != command::READ || len <= 8 || len - 8 > most {
                    return Err(Breach("a data chunk of a wrong length").into());
                }
                self.expect = Expect::DataOffset { cookie, len: len - 8, is_last };
                Ok(())
            }
            HeadKind::Chunk { kind, is_last, len } => {
                let len = wire::check_content_len(self.terms.style, kind, len)?;
                if kind == chunk::NONE && !is_last {
                    return Err(Breach("an empty chunk that is not the last").into());
                }
                self.expect = Expect::Content { cookie, kind, len, is_last };
                Ok(())
            }
        }
    }

    /// Notes that a range of a read arrives.
    fn cover(&mut self, cookie: u64, offset: u64, len: u64) -> Result<(), Lost> {
        let Some(request) = self.pending.get_mut(&cookie) else {
            return Err(Breach("data of nobody").into());
        };
        let end = offset.checked_add(len).filter(|end| *end <= request.part.end);
        match end {
            Some(end) if len > 0 && offset >= request.part.start && request.covered.add(offset..end) => {
                Ok(())
            }
            _ => Err(Breach("data outside the range that was asked for, or twice").into()),
        }
    }

    fn take_content(&mut self, cookie: u64, content: Content) -> Result<(), Lost> {
        if let Content::Hole { offset, len } = content {
            if self.pending.get(&cookie).is_none_or(|request| request.command != command::READ) {
                return Err(Breach("a hole in what is no read").into());
            }
            self.cover(cookie, offset, len)?;
            if let Some(request) = self.pending.get_mut(&cookie) {
                request.zero(offset, len);
            }
            return Ok(());
        }
        let Some(request) = self.pending.get_mut(&cookie) else { return Ok(()) };
        match content {
            Content::Nothing | Content::Hole { .. } => {}
            Content::Error(error) => request.error = error,
            Content::Status { context, runs } => {
                if request.command != command::BLOCK_STATUS {
                    return Err(Breach("a block status that was not asked for").into());
                }
                if runs.iter().any(|run| run.len == 0) {
                    return Err(Breach("a block status with an empty run").into());
                }
                if context == request.context {
                    if !request.runs.is_empty() {
                        return Err(Breach("a block status twice").into());
                    }
                    request.runs = runs;
                }
            }
        }
        Ok(())
    }

    /// The reply is whole.
    fn finish(&mut self, cookie: u64) -> Result<(), Lost> {
        let Some(request) = self.pending.remove(&cookie) else { return Ok(()) };
        if matches!(request.command, command::READ | command::WRITE) {
            self.pending_bytes -= request.part.end - request.part.start;
        }
        if request.command == command::READ && request.error == 0 && !request.covered.is(&request.part) {
            // The memory is not what the disk has: another connection may tell.
            self.pending.insert(cookie, request);
            return Err(Breach("a read that ends before all of it was sent").into());
        }
        if request.error == ESHUTDOWN {
            self.refused.push(request);
            return Ok(());
        }
        if request.error == 0 {
            self.watcher.succeeded(self.number, &request);
        }
        if let Next::Again(request) = request.end_part() {
            self.begin(*request);
        }
        Ok(())
    }
}
