//! Serving one ring, on one worker.

use super::chain::{Chain, Next, chain_at, take_chain};
use super::device::{MAX_RANGES, SECTOR, feature};
use super::inflight::RingLog;
use super::memory::{GuestMap, SharedMap};
use super::own_memory::own_memory;
use super::request::{
    BlkRequest, HEADER, Parts, RANGE, Range, len, parse_header, parse_range, split_front, split_last_byte,
};
use super::ring_control::RingControl;
use crate::export::Export;
use crate::log::{Level, Log};
use crate::memory_budget::Account;
use crate::metrics::RequestKind;
use crate::pool::Seat;
use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress};
use zebu_engine::{Access, Durability, ZeroMode};
use zebu_storage::{IoBuf, IoBufs, Socket};

#[cfg(feature = "fuzzing")]
#[path = "ring_fuzzing.rs"]
pub(crate) mod fuzzing;

/// Bytes of data of one ring in flight at once; one request goes always.
const MAX_BYTES: u64 = 64 << 20;
/// Bytes of data of one request.
const MAX_REQUEST: u64 = 64 << 20;
/// The flag of the available ring by which a guest wants not to be told (virtio 1.2, 2.7.7).
const NO_INTERRUPT: u16 = 1;
/// Bytes of a kick.
const KICK: usize = 8;
/// So many kicks may bring nothing before the ring takes its time.
const FOR_NOTHING: u32 = 64;
/// How long it takes then.
const BREATH: Duration = Duration::from_millis(1);
/// Bytes of the name of a device.
const ID_LEN: usize = 20;

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Status {
    Ok = 0,
    IoError = 1,
    Unsupported = 2,
}

/// Everything that is needed to serve a ring.
pub(crate) struct RingSetup {
    pub(crate) export: Arc<Export>,
    pub(crate) memory: SharedMap,
    pub(crate) queue: Queue,
    pub(crate) kick: Socket,
    /// The features that the guest chose.
    pub(crate) features: u64,
    pub(crate) log: Option<RingLog>,
    /// Heads to be served again.
    pub(crate) again: Vec<u16>,
    pub(crate) control: Arc<RingControl>,
    pub(crate) messages: Log,
    /// Of the memory of all clients.
    pub(crate) account: Account,
}

/// A ring that is being served. Belongs to one thread.
pub(crate) struct Ring {
    seat: Seat,
    export: Arc<Export>,
    memory: SharedMap,
    queue: RefCell<Queue>,
    log: Option<RefCell<RingLog>>,
    control: Arc<RingControl>,
    durability: Durability,
    messages: Log,
    account: Account,
    /// The next request waits for memory.
    is_waiting: Cell<bool>,
    requests: Cell<usize>,
    bytes: Cell<u64>,
    /// Requests wait for room.
    is_stalled: Cell<bool>,
    is_broken: Cell<bool>,
    /// The guest's memory is gone, and that was told.
    is_gone: Cell<bool>,
    /// Requests that were taken.
    taken: Cell<u64>,
    /// Something was used and the guest not told yet.
    is_news: Cell<bool>,
    is_ending: Cell<bool>,
    waker: Cell<Option<Waker>>,
}

/// A request under way. One that is dropped before it is over has panicked.
struct Pending {
    ring: Rc<Ring>,
    is_over: Cell<bool>,
    head: u16,
    map: Arc<GuestMap>,
    /// Where its status goes, if there is room for one.
    status: Option<u64>,
    kind: RequestKind,
    /// Bytes of the disk that it is about.
    len: u64,
    /// Bytes of data in the guest's memory, as counted in the ring.
    held: u64,
    /// Bytes of the server's own memory, as taken from the budget.
    own: u64,
    since: Instant,
}

impl Drop for Pending {
    fn drop(&mut self) {
        if !self.is_over.get() {
            self.ring.vanished(self);
        }
    }
}

/// Says that a ring stands still, whichever way it ends: somebody waits for it.
struct Ending(Rc<Ring>);

impl Drop for Ending {
    fn drop(&mut self) {
        let ring = &self.0;
        ring.export.metrics().client_goes();
        if std::thread::panicking() {
            ring.export.close_if_panicking();
            ring.is_ending.set(true);
            ring.wake();
            ring.control.hang_up();
        }
        let next = ring.queue.try_borrow().map_or(0, |queue| queue.next_avail());
        ring.control.has_ended(next);
    }
}

impl Ring {
    /// Serves a ring until it is told to stop; nothing of it is in flight then.
    pub(crate) async fn run(seat: Seat, setup: RingSetup) {
        // Without the feature, a guest does not flush: every write must be durable.
        let has_flush = setup.features & feature::BLK_FLUSH != 0;
        let ring = Rc::new(Self {
            seat,
            export: setup.export,
            memory: setup.memory,
            queue: RefCell::new(setup.queue),
            log: setup.log.map(RefCell::new),
            control: setup.control,
            durability: if has_flush { Durability::Volatile } else { Durability::Durable },
            messages: setup.messages,
            account: setup.account,
            is_waiting: Cell::new(false),
            requests: Cell::new(0),
            bytes: Cell::new(0),
            is_stalled: Cell::new(false),
            is_broken: Cell::new(false),
            is_gone: Cell::new(false),
            taken: Cell::new(0),
            is_news: Cell::new(false),
            is_ending: Cell::new(false),
            waker: Cell::new(None),
        });
        ring.export.metrics().client_comes();
        let _ending = Ending(Rc::clone(&ring));
        let teller = {
            let ring = Rc::clone(&ring);
            let worker = ring.seat.worker.clone();
            worker.spawn(async move { ring.tell().await })
        };
        ring.serve_again(setup.again).await;
        ring.serve(&setup.kick).await;
        ring.is_ending.set(true);
        ring.wake();
        teller.await;
    }

    /// A request ended without a result. The device of this front end ends.
    fn vanished(&self, pending: &Pending) {
        self.export.close_if_panicking();
        let took = pending.since.elapsed();
        self.export.metrics().end(self.seat.thread, pending.kind, pending.len, false, took);
        self.requests.set(self.requests.get() - 1);
        self.bytes.set(self.bytes.get() - pending.held);
        self.account.give(pending.own);
        self.is_broken.set(true);
        self.control.hang_up();
        self.wake();
    }

    /// Takes requests whenever the guest kicks, until the ring is told to stop.
    async fn serve(self: &Rc<Self>, kick: &Socket) {
        let (control, worker) = (&self.control, &self.seat.worker);
        let mut counter = IoBufs::from(IoBuf::zeroed(KICK));
        let mut for_nothing = 0;
        while !control.stop.is_thrown() {
            let before = self.taken.get();
            self.process();
            let brought = self.taken.get() != before;
            for_nothing = if brought { 0 } else { for_nothing + 1 };
            // A semaphore with a large count stays readable for hours.
            if for_nothing > FOR_NOTHING && control.stop.or(worker.sleep(BREATH)).await.is_none() {
                return;
            }
            let Some((result, bufs)) = control.stop.or(worker.receive(kick, counter)).await else { return };
            counter = bufs;
            let problem = match result {
                Ok(KICK) => continue,
                Ok(bytes) => format!("it gives {bytes} bytes"),
                Err(error) => error.to_string(),
            };
            self.give_up(format_args!("a kick of '{}' can't be read: {problem}", self.export.name()));
            control.stop.wait().await;
        }
    }

    /// Takes no more requests, and ends the connection to the front end.
    fn give_up(&self, why: std::fmt::Arguments<'_>) {
        self.breaks(why);
        self.control.hang_up();
    }

    /// Takes no more requests.
    fn breaks(&self, why: std::fmt::Arguments<'_>) {
        self.is_broken.set(true);
        self.messages.write(Level::Error, why);
        self.control.tell_of_error();
    }

    /// Gives up if the guest's memory is gone.
    fn look_after(&self, map: &GuestMap) {
        let log_vanished = self.log.as_ref().is_some_and(|log| log.borrow().has_vanished());
        if (map.has_vanished() || log_vanished) && !self.is_gone.replace(true) {
            let name = self.export.name();
            let what = "took away memory that it had shared (or the system can't give its pages)";
            self.give_up(format_args!("the front end of '{name}' {what}: its connection is closed"));
        }
    }

    fn wake(&self) {
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }

    /// Tells the guest of used requests, once for all that ended in one turn. Ends when the ring does.
    async fn tell(&self) {
        loop {
            let goes_on = poll_fn(|cx| {
                if self.is_news.get() {
                    return Poll::Ready(true);
                }
                if self.is_ending.get() && self.requests.get() == 0 {
                    return Poll::Ready(false);
                }
                self.waker.set(Some(cx.waker().clone()));
                Poll::Pending
            })
            .await;
            if !goes_on {
                return;
            }
            self.is_news.set(false);
            if self.wants_call()
                && let Err(error) = self.control.call()
                && !self.is_broken.get()
            {
                let name = self.export.name();
                self.give_up(format_args!("a guest of '{name}' can't be told of its requests: {error}"));
            }
        }
    }

    /// Whether the guest wants to be told of what was used. If it can't be found out, it is told in any case.
    fn wants_call(&self) -> bool {
        let (map, mut queue) = (self.memory.get(), self.queue.borrow_mut());
        let is_wanted = queue.needs_notification(map.memory()).unwrap_or(true);
        if queue.event_idx_enabled() {
            return is_wanted;
        }
        // virtio-queue leaves the flag to others. What was used is visible before it is read: there is a fence in the call.
        let flags = map.memory().load::<u16>(GuestAddress(queue.avail_ring()), Ordering::Relaxed);
        flags.map_or(true, |flags| u16::from_le(flags) & NO_INTERRUPT == 0)
    }

    /// Serves requests that an earlier process had taken. Told to stop, it leaves the others to the next one: they stay in
    /// the log.
    async fn serve_again(self: &Rc<Self>, heads: Vec<u16>) {
        for head in heads {
            let (table, size) = {
                let queue = self.queue.borrow();
                (queue.desc_table(), queue.size())
            };
            let map = self.memory.get();
            let chain = chain_at(&map, table, size, head);
            let own = own_memory(&chain);
            if self.control.stop.or(self.account.take(own)).await.is_none() {
                return;
            }
            self.start(&map, head, chain, own);
        }
    }

    /// Goes on when there is memory for the next request.
    fn wait_for_memory(self: &Rc<Self>, own: u64) {
        self.is_waiting.set(true);
        let me = Rc::clone(self);
        drop(self.seat.worker.spawn(async move {
            let is_there = me.control.stop.or(me.account.take(own)).await.is_some();
            me.is_waiting.set(false);
            if is_there {
                me.account.give(own);
                me.process();
            }
        }));
    }

    /// Takes all requests that there is room for.
    fn process(self: &Rc<Self>) {
        let is_over = self.is_broken.get() || self.is_ending.get() || self.control.stop.is_thrown();
        if is_over || self.is_waiting.get() {
            return;
        }
        let map = self.memory.get();
        // A driver that keeps to the rules has no more heads than that in flight.
        let most = usize::from(self.queue.borrow().size());
        for _ in 0..most {
            let requests = self.requests.get();
            if requests > 0 && (requests >= most || self.bytes.get() >= MAX_BYTES) {
                self.is_stalled.set(true);
                return;
            }
            let next = take_chain(&mut self.queue.borrow_mut(), map.memory());
            self.look_after(&map);
            if self.is_gone.get() {
                return;
            }
            match next {
                Some(Next::Chain(head, chain)) => {
                    let own = own_memory(&chain);
                    if !self.account.try_take(own) {
                        // It stays in the ring, and is looked at again then.
                        let mut queue = self.queue.borrow_mut();
                        let back = queue.next_avail().wrapping_sub(1);
                        queue.set_next_avail(back);
                        drop(queue);
                        self.wait_for_memory(own);
                        return;
                    }
                    self.taken.set(self.taken.get() + 1);
                    if let Some(log) = &self.log {
                        log.borrow_mut().take(head);
                    }
                    let is_refused = matches!(chain, Chain::TooLong(_));
                    self.start(&map, head, chain, own);
                    if is_refused {
                        // It took long to follow.
                        break;
                    }
                }
                Some(Next::None) => return,
                None => {
                    let name = self.export.name();
                    self.breaks(format_args!("a guest of '{name}' broke its ring"));
                    return;
                }
            }
        }
        // A guest may add requests as fast as they are refused: others have their turn in between.
        self.process_later();
    }

    fn process_later(self: &Rc<Self>) {
        let me = Rc::clone(self);
        drop(self.seat.worker.spawn(async move { me.process() }));
    }

    /// Starts a request. One without room for a status is only used up.
    fn start(self: &Rc<Self>, map: &Arc<GuestMap>, head: u16, chain: Chain, own: u64) {
        self.requests.set(self.requests.get() + 1);
        self.export.metrics().start(self.seat.thread);
        let mut pending = Pending {
            ring: Rc::clone(self),
            is_over: Cell::new(false),
            head,
            map: Arc::clone(map),
            status: None,
            kind: RequestKind::Other,
            len: 0,
            held: 0,
            own,
            since: Instant::now(),
        };
        let (mut readable, mut writable) = match chain {
            Chain::Whole(readable, writable) => (readable, writable),
            Chain::TooLong(status) => {
                pending.status = status;
                self.finish(&pending, Status::IoError, 0);
                return;
            }
        };
        pending.status = split_last_byte(&mut writable);
        let mut header = [0; HEADER as usize];
        let has_header =
            split_front(&mut readable, HEADER).is_some_and(|parts| map.read_parts(&parts, &mut header));
        let request = if has_header { parse_header(&header) } else { None };
        let data = match request {
            Some(BlkRequest::Read { .. }) => len(&writable),
            Some(BlkRequest::Write { .. }) => len(&readable),
            _ => 0,
        };
        pending.kind = match request {
            Some(BlkRequest::Read { .. }) => RequestKind::Read,
            Some(BlkRequest::Write { .. }) => RequestKind::Write,
            Some(BlkRequest::Flush) => RequestKind::Flush,
            Some(BlkRequest::Discard) => RequestKind::Discard,
            Some(BlkRequest::WriteZeroes) => RequestKind::WriteZeroes,
            _ => RequestKind::Other,
        };
        self.bytes.set(self.bytes.get() + data);
        (pending.len, pending.held) = (data, data);
        let (Some(_), Some(request)) = (pending.status, request) else {
            self.finish(&pending, Status::IoError, 0);
            return;
        };
        let writes =
            matches!(request, BlkRequest::Write { .. } | BlkRequest::Discard | BlkRequest::WriteZeroes);
        if writes && self.export.access() == Access::ReadOnly {
            self.finish(&pending, Status::IoError, 0);
            return;
        }
        let me = Rc::clone(self);
        let worker = &self.seat.worker;
        match request {
            BlkRequest::Read { offset } => match data_buffers(map, &writable, data) {
                Some(bufs) => drop(worker.spawn(async move {
                    me.admit(&pending).await;
                    let result = me.export.read(&me.seat.worker, offset, bufs).await.0;
                    me.end(&pending, &result, data as u32);
                })),
                None => self.finish(&pending, Status::IoError, 0),
            },
            BlkRequest::Write { offset } => match data_buffers(map, &readable, data) {
                Some(bufs) => drop(worker.spawn(async move {
                    me.admit(&pending).await;
                    let result =
                        me.export.image().write(&me.seat.worker, offset, bufs, me.durability).await.0;
                    me.end(&pending, &result, 0);
                })),
                None => self.finish(&pending, Status::IoError, 0),
            },
            BlkRequest::Flush => drop(worker.spawn(async move {
                let result = me.export.flush(&me.seat.worker).await;
                me.end(&pending, &result, 0);
            })),
            BlkRequest::GetId => {
                let mut id = [0; ID_LEN];
                let name = self.export.name().as_bytes();
                let used = name.len().min(ID_LEN);
                id[..used].copy_from_slice(&name[..used]);
                match map.write_parts(&writable, &id) {
                    Some(written) => self.finish(&pending, Status::Ok, written as u32),
                    None => self.finish(&pending, Status::IoError, 0),
                }
            }
            BlkRequest::Discard | BlkRequest::WriteZeroes => match ranges(map, &mut readable, request) {
                Ok(ranges) => {
                    pending.len = ranges.iter().map(|range| range.len).sum();
                    drop(worker.spawn(async move { me.clear(pending, request, ranges).await }));
                }
                Err(status) => self.finish(&pending, status, 0),
            },
            BlkRequest::Unknown => self.finish(&pending, Status::Unsupported, 0),
        }
    }

    /// Waits until the limits of the export let a request go, or the ring is told to stop.
    async fn admit(&self, pending: &Pending) {
        let admitted = self.export.admit(&self.seat.worker, pending.kind, pending.len);
        let _ = self.control.stop.or(admitted).await;
    }

    /// Discards or zeroes ranges.
    async fn clear(self: Rc<Self>, pending: Pending, request: BlkRequest, ranges: Vec<Range>) {
        self.admit(&pending).await;
        let (image, worker) = (self.export.image(), &self.seat.worker);
        let mut result = Ok(());
        for Range { offset, len, unmap } in ranges {
            let mode = if unmap { ZeroMode::Unmap } else { ZeroMode::Keep };
            result = match request {
                BlkRequest::Discard => image.discard(worker, offset, len).await,
                _ => image.write_zeroes(worker, offset, len, mode).await,
            };
            if result.is_err() {
                break;
            }
        }
        if result.is_ok() && self.durability == Durability::Durable {
            result = self.export.flush(worker).await;
        }
        self.end(&pending, &result, 0);
    }

    /// Ends a request that the image worked on. `written`: bytes in the guest's buffers, without the status.
    fn end(self: &Rc<Self>, pending: &Pending, result: &zebu_engine::Result<()>, written: u32) {
        match result {
            Ok(()) => self.finish(pending, Status::Ok, written),
            Err(error) => {
                let status = match error.kind() {
                    zebu_engine::ErrorKind::Unsupported => Status::Unsupported,
                    _ => Status::IoError,
                };
                self.messages.write(Level::Debug, format_args!("{error}"));
                self.finish(pending, status, 0);
            }
        }
    }

    /// Gives a request back to the guest.
    fn finish(self: &Rc<Self>, pending: &Pending, status: Status, written: u32) {
        let is_ok = status == Status::Ok;
        let took = pending.since.elapsed();
        self.export.metrics().end(self.seat.thread, pending.kind, pending.len, is_ok, took);
        pending.is_over.set(true);
        let mut written = written;
        if let Some(address) = pending.status
            && pending.map.memory().write_obj(status as u8, GuestAddress(address)).is_ok()
        {
            written += 1;
        }
        self.use_up(&pending.map, pending.head, written);
        self.look_after(&pending.map);
        self.requests.set(self.requests.get() - 1);
        self.bytes.set(self.bytes.get() - pending.held);
        self.account.give(pending.own);
        self.is_news.set(true);
        self.wake();
        if self.is_stalled.replace(false) {
            // In a turn of its own, since this may be called by what it would call.
            self.process_later();
        }
    }

    /// Puts a head into the used ring.
    fn use_up(&self, map: &Arc<GuestMap>, head: u16, written: u32) {
        let mut queue = self.queue.borrow_mut();
        if let Some(log) = &self.log {
            log.borrow_mut().before_used(head);
        }
        if queue.add_used(map.memory(), head, written).is_err() {
            let name = self.export.name();
            self.breaks(format_args!("a guest of '{name}' took its used ring away"));
            return;
        }
        if let Some(log) = &self.log {
            log.borrow_mut().after_used(head, queue.next_used());
        }
    }
}

/// The guest's buffers of a read or write; `None` if they can't be served.
fn data_buffers(map: &Arc<GuestMap>, parts: &Parts, len: u64) -> Option<IoBufs> {
    if len > MAX_REQUEST || !len.is_multiple_of(SECTOR) {
        return None;
    }
    map.buffers(parts)
}

/// The ranges of a discard or write-zeroes request.
fn ranges(map: &GuestMap, readable: &mut Parts, request: BlkRequest) -> Result<Vec<Range>, Status> {
    let total = len(readable);
    if total == 0 || !total.is_multiple_of(RANGE as u64) || total > u64::from(MAX_RANGES) * RANGE as u64 {
        return Err(Status::IoError);
    }
    let mut ranges = Vec::new();
    while let Some(parts) = split_front(readable, RANGE as u32) {
        let mut bytes = [0; RANGE];
        if !map.read_parts(&parts, &mut bytes) {
            return Err(Status::IoError);
        }
        let range = parse_range(&bytes).ok_or(Status::Unsupported)?;
        // A discard has no flag to unmap (virtio 1.2, 5.2.6.2).
        if range.unmap && request == BlkRequest::Discard {
            return Err(Status::Unsupported);
        }
        ranges.push(range);
    }
    Ok(ranges)
}
