//! Serving one ring, on one worker.

use super::device::{MAX_QUEUE, MAX_RANGES, SECTOR, feature};
use super::inflight::RingLog;
use super::memory::{GuestMap, SharedMap};
use super::request::{
    BlkRequest, HEADER, Parts, RANGE, Range, len, parse_header, parse_range, split_front, split_last_byte,
};
use super::ring_control::RingControl;
use crate::export::Export;
use crate::log::{Level, Log};
use crate::metrics::RequestKind;
use crate::pool::Seat;
use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Poll, Waker};
use std::time::Instant;
use virtio_queue::desc::split::Descriptor;
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use zebu::storage::{IoBuf, IoBufs, Socket};
use zebu::{Access, Durability, ZeroMode};

#[cfg(feature = "fuzzing")]
#[path = "ring_fuzzing.rs"]
pub(crate) mod fuzzing;

/// Bytes of data of one ring in flight at once; one request goes always. (Where a guest's buffers do not suit the disk,
/// others of that size are needed.)
const MAX_BYTES: u64 = 64 << 20;
/// Bytes of data of one request.
const MAX_REQUEST: u64 = 64 << 20;
/// The flag of the available ring by which a guest wants not to be told (virtio 1.2, 2.7.7).
const NO_INTERRUPT: u16 = 1;
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

/// What a ring is served with.
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
    requests: Cell<usize>,
    bytes: Cell<u64>,
    /// Requests wait for room.
    is_stalled: Cell<bool>,
    is_broken: Cell<bool>,
    /// Something was used and the guest not told yet.
    is_news: Cell<bool>,
    is_ending: Cell<bool>,
    waker: Cell<Option<Waker>>,
}

/// A request under way.
struct Pending {
    head: u16,
    map: Arc<GuestMap>,
    /// Where its status goes, if there is room for one.
    status: Option<u64>,
    kind: RequestKind,
    /// Bytes of the disk that it is about.
    len: u64,
    /// Bytes of data in the guest's memory, as counted in the ring.
    held: u64,
    since: Instant,
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
            requests: Cell::new(0),
            bytes: Cell::new(0),
            is_stalled: Cell::new(false),
            is_broken: Cell::new(false),
            is_news: Cell::new(false),
            is_ending: Cell::new(false),
            waker: Cell::new(None),
        });
        ring.export.metrics().client_comes();
        let teller = {
            let ring = Rc::clone(&ring);
            let worker = ring.seat.worker.clone();
            worker.spawn(async move { ring.tell().await })
        };
        ring.serve_again(setup.again);
        let mut counter = IoBufs::from(IoBuf::zeroed(8));
        while !ring.control.stop.is_thrown() {
            ring.process();
            let kicked = ring.seat.worker.receive(&setup.kick, counter);
            let Some((result, bufs)) = ring.control.stop.or(kicked).await else { break };
            counter = bufs;
            if let Err(error) = result {
                ring.messages.write(Level::Error, format_args!("a ring's kick can't be read: {error}"));
                ring.control.stop.wait().await;
                break;
            }
        }
        ring.is_ending.set(true);
        ring.wake();
        teller.await;
        ring.export.metrics().client_goes();
        let next = ring.queue.borrow().next_avail();
        ring.control.has_ended(next);
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
            if self.wants_call() {
                self.control.call();
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

    /// Serves requests that an earlier process had taken.
    fn serve_again(self: &Rc<Self>, heads: Vec<u16>) {
        let map = self.memory.get();
        for head in heads {
            let queue = self.queue.borrow();
            let (table, size) = (queue.desc_table(), queue.size());
            drop(queue);
            self.start(&map, head, chain_at(&map, table, size, head));
        }
    }

    /// Takes all requests that there is room for.
    fn process(self: &Rc<Self>) {
        if self.is_broken.get() || self.is_ending.get() || self.control.stop.is_thrown() {
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
            match next {
                Some(Next::Chain(head, chain)) => {
                    if let Some(log) = &self.log {
                        log.borrow_mut().take(head);
                    }
                    let is_refused = matches!(chain, Chain::TooLong(_));
                    self.start(&map, head, chain);
                    if is_refused {
                        // It took long to follow.
                        break;
                    }
                }
                Some(Next::None) => return,
                None => {
                    let name = self.export.name();
                    self.messages.write(Level::Error, format_args!("a guest of '{name}' broke its ring"));
                    self.is_broken.set(true);
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
    fn start(self: &Rc<Self>, map: &Arc<GuestMap>, head: u16, chain: Chain) {
        self.requests.set(self.requests.get() + 1);
        self.export.metrics().start(self.seat.thread);
        let mut pending = Pending {
            head,
            map: Arc::clone(map),
            status: None,
            kind: RequestKind::Other,
            len: 0,
            held: 0,
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
                    let result = me.export.image().read(&me.seat.worker, offset, bufs).await.0;
                    me.end(&pending, &result, data as u32);
                })),
                None => self.finish(&pending, Status::IoError, 0),
            },
            BlkRequest::Write { offset } => match data_buffers(map, &readable, data) {
                Some(bufs) => drop(worker.spawn(async move {
                    let result =
                        me.export.image().write(&me.seat.worker, offset, bufs, me.durability).await.0;
                    me.end(&pending, &result, 0);
                })),
                None => self.finish(&pending, Status::IoError, 0),
            },
            BlkRequest::Flush => drop(worker.spawn(async move {
                let result = me.export.image().flush(&me.seat.worker).await;
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

    /// Discards or zeroes ranges.
    async fn clear(self: Rc<Self>, pending: Pending, request: BlkRequest, ranges: Vec<Range>) {
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
            result = image.flush(worker).await;
        }
        self.end(&pending, &result, 0);
    }

    /// Ends a request that the image worked on. `written`: bytes in the guest's buffers, without the status.
    fn end(self: &Rc<Self>, pending: &Pending, result: &zebu::Result<()>, written: u32) {
        match result {
            Ok(()) => self.finish(pending, Status::Ok, written),
            Err(error) => {
                let status = match error.kind() {
                    zebu::ErrorKind::Unsupported => Status::Unsupported,
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
        let mut written = written;
        if let Some(address) = pending.status
            && pending.map.memory().write_obj(status as u8, GuestAddress(address)).is_ok()
        {
            written += 1;
        }
        self.use_up(&pending.map, pending.head, written);
        self.requests.set(self.requests.get() - 1);
        self.bytes.set(self.bytes.get() - pending.held);
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
            self.messages.write(Level::Error, format_args!("a guest of '{name}' took its used ring away"));
            self.is_broken.set(true);
            return;
        }
        if let Some(log) = &self.log {
            log.borrow_mut().after_used(head, queue.next_used());
        }
    }
}

/// What an available ring has.
enum Next {
    /// A head and its chain.
    Chain(u16, Chain),
    /// Nothing more; the guest will say when there is.
    None,
}

/// A chain of descriptors, up to its end or to where it is none any more.
#[derive(Debug, PartialEq, Eq)]
enum Chain {
    /// What the device may read, and what it may write.
    Whole(Parts, Parts),
    /// More descriptors than a request has; its last byte that the device may write, which is for the status.
    TooLong(Option<u64>),
}

/// Takes the next chain; `None` if the ring is broken. The guest may make others available at any time.
fn take_chain(queue: &mut Queue, memory: &GuestMemoryMmap) -> Option<Next> {
    // What this index says must be there. Looked at later, it may have gone on.
    let available = queue.avail_idx(memory, Ordering::Acquire).ok()?.0;
    if available == queue.next_avail() && !queue.enable_notification(memory).ok()? {
        return Some(Next::None);
    }
    let chain = queue.iter(memory).ok()?.next()?;
    Some(Next::Chain(chain.head_index(), split_chain(chain)))
}

/// What the device may read, and what it may write.
fn split_chain(chain: impl IntoIterator<Item = Descriptor>) -> Chain {
    let mut chain = chain.into_iter().fuse();
    let (mut readable, mut writable) = (Parts::new(), Parts::new());
    for descriptor in chain.by_ref().take(MAX_QUEUE.into()) {
        let list = if descriptor.is_write_only() { &mut writable } else { &mut readable };
        list.push((descriptor.addr().0, descriptor.len()));
    }
    let Some(next) = chain.next() else { return Chain::Whole(readable, writable) };
    let more = std::iter::once(next).chain(chain);
    // Only the last bytes count, so that no more has to be kept.
    for descriptor in more.filter(|descriptor| descriptor.is_write_only() && descriptor.len() > 0) {
        writable.clear();
        writable.push((descriptor.addr().0, descriptor.len()));
    }
    Chain::TooLong(split_last_byte(&mut writable))
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

/// The descriptors of a head, as the queue would give them.
fn chain_at(map: &GuestMap, table: u64, size: u16, head: u16) -> Chain {
    let mut descriptors = Vec::new();
    // Where the chain is none any more, the queue ends it as well.
    let _ = collect(map, GuestAddress(table), size, head, &mut descriptors, Indirect::Allowed);
    split_chain(descriptors)
}

/// Whether a descriptor may lead to another table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Indirect {
    Allowed,
    Refused,
}

/// Follows a chain of descriptors, at most as many as its table has. `None` where it is none any more.
fn collect(
    map: &GuestMap,
    table: GuestAddress,
    size: u16,
    head: u16,
    into: &mut Vec<Descriptor>,
    indirect: Indirect,
) -> Option<()> {
    let mut index = head;
    for _ in 0..size {
        if index >= size {
            return None;
        }
        let address = table.0.checked_add(u64::from(index) * 16)?;
        let descriptor: Descriptor = map.memory().read_obj(GuestAddress(address)).ok()?;
        if descriptor.refers_to_indirect_table() {
            if indirect == Indirect::Refused || !descriptor.len().is_multiple_of(16) {
                return None;
            }
            let entries = u16::try_from(descriptor.len() / 16).ok()?;
            return collect(map, descriptor.addr(), entries, 0, into, Indirect::Refused);
        }
        into.push(descriptor);
        if !descriptor.has_next() {
            return Some(());
        }
        index = descriptor.next();
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use vhost::vhost_user::message::VhostUserMemoryRegion;

    const SIZE: u16 = 8;
    const AVAILABLE: u64 = 0x1000;
    const USED: u64 = 0x2000;
    /// A table of its own.
    const TABLE: u64 = 0x8000;
    /// Flags of a descriptor.
    const NEXT: u16 = 1;
    const WRITE: u16 = 2;
    const INDIRECT: u16 = 4;

    /// A queue over the start of the memory, with its descriptors at 0.
    fn queue() -> Queue {
        let mut queue = Queue::new(SIZE).unwrap();
        queue.try_set_avail_ring_address(GuestAddress(AVAILABLE)).unwrap();
        queue.try_set_used_ring_address(GuestAddress(USED)).unwrap();
        queue.set_event_idx(true);
        queue.set_ready(true);
        queue
    }

    fn put(map: &GuestMap, table: u64, index: u64, descriptor: Descriptor) {
        map.memory().write_obj(descriptor, GuestAddress(table + index * 16)).unwrap();
    }

    // Served again after a restart, it must be what it was.
    #[test]
    fn a_chain_is_no_longer_than_a_request_and_is_found_again_as_it_was() {
        let file = tempfile::tempfile().unwrap();
        let size = 0x20_0000;
        file.set_len(size).unwrap();
        let region = VhostUserMemoryRegion {
            guest_phys_addr: 0,
            memory_size: size,
            user_addr: 0x7000_0000,
            mmap_offset: 0,
        };
        let map = GuestMap::of_table(&[region], vec![file]).unwrap();
        // The last but one of a table can be written, and the last is there for nothing; another may come before both.
        let in_table = |count: u64| {
            for index in 0..count {
                let (len, flags) = match count - 1 - index {
                    0 => (0, WRITE),
                    1 => (3, NEXT | WRITE),
                    _ => (512, NEXT),
                };
                put(&map, TABLE, index, Descriptor::new(0x1000 * index, len, flags, index as u16 + 1));
            }
            put(&map, 0, 0, Descriptor::new(TABLE, count as u32 * 16, INDIRECT, 0));
        };
        let direct = |next: u16| {
            put(&map, 0, 0, Descriptor::new(0x5000, 16, NEXT, 1));
            put(&map, 0, 1, Descriptor::new(0x6000, 1, NEXT | WRITE, next));
            put(&map, 0, 2, Descriptor::new(0x7000, 1, WRITE, 0));
        };
        let mut queue = queue();
        let mut available = 0u16;
        let mut taken = || {
            available += 1;
            map.memory().store(available.to_le(), GuestAddress(AVAILABLE + 2), Ordering::Release).unwrap();
            let Some(Next::Chain(0, chain)) = take_chain(&mut queue, map.memory()) else {
                panic!("nothing is taken")
            };
            assert_eq!(chain_at(&map, 0, SIZE, 0), chain);
            chain
        };
        let count = |chain: &Chain| match chain {
            Chain::Whole(readable, writable) => Ok((readable.len(), writable.len())),
            Chain::TooLong(status) => Err(*status),
        };
        for entries in [2, u64::from(SIZE) + 1, 128, MAX_QUEUE.into()] {
            in_table(entries);
            assert_eq!(count(&taken()), Ok((entries as usize - 2, 2)));
        }
        for entries in [u64::from(MAX_QUEUE) + 1, 2000, 60_000] {
            in_table(entries);
            assert_eq!(count(&taken()), Err(Some(0x1000 * (entries - 2) + 2)), "{entries} entries");
        }
        // The last place that could be written is among those that fit.
        in_table(5000);
        for index in 1000..5000 {
            put(&map, TABLE, index, Descriptor::new(0, 512, NEXT, index as u16 + 1));
        }
        put(&map, TABLE, 900, Descriptor::new(0x9000, 8, NEXT | WRITE, 901));
        assert_eq!(count(&taken()), Err(Some(0x9007)));
        put(&map, TABLE, 900, Descriptor::new(0x9000, 8, NEXT, 901));
        assert_eq!(count(&taken()), Err(None));
        direct(2);
        assert_eq!(count(&taken()), Ok((1, 2)));
        // A chain that goes on where nothing is ends there; a loop ends when the table is through.
        direct(SIZE);
        assert_eq!(count(&taken()), Ok((1, 1)));
        direct(0);
        assert_eq!(count(&taken()), Ok((4, 4)));
        // A table in a table.
        in_table(8);
        put(&map, TABLE, 3, Descriptor::new(TABLE, 160, INDIRECT, 0));
        assert_eq!(count(&taken()), Ok((3, 0)));
    }

    // As a guest with several CPUs does. (Where the index was looked at twice, ten thousand requests were enough.)
    #[test]
    fn requests_may_come_while_the_device_looks() {
        const REQUESTS: u32 = 300_000;
        let memory: GuestMemoryMmap = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x4000)]).unwrap();
        let mut queue = queue();
        let taken = std::sync::atomic::AtomicU32::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // Every head is 0: a descriptor of no bytes.
                for offered in 0..REQUESTS {
                    while offered - taken.load(Ordering::Acquire) >= u32::from(SIZE) {
                        std::thread::yield_now();
                    }
                    let index = (offered + 1) as u16;
                    memory.store(index.to_le(), GuestAddress(AVAILABLE + 2), Ordering::Release).unwrap();
                }
            });
            let mut count = 0;
            while count < REQUESTS {
                match take_chain(&mut queue, &memory) {
                    Some(Next::Chain(head, chain)) => {
                        assert_eq!(head, 0);
                        assert!(matches!(chain, Chain::Whole(..)));
                        count += 1;
                        taken.store(count, Ordering::Release);
                    }
                    Some(Next::None) => std::thread::yield_now(),
                    None => {
                        // Lets the other thread end.
                        taken.store(REQUESTS, Ordering::Release);
                        panic!("request {count}: the ring passes for broken");
                    }
                }
            }
        });
    }
}
