//! A front end of vhost-user-blk with a guest driver of its own, which does what a test wants, right or wrong. Written
//! from the specifications of virtio (1.2, 2.7 and 5.2) and vhost-user.

use crate::patience::{LONGEST, Patience};
use rustix::io::Errno;
use rustix::net::RecvFlags;
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;
use vhost::vhost_user::message::{VhostUserConfigFlags, VhostUserInflight, VhostUserProtocolFeatures};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryMmap, GuestRegionMmap, MmapRegion};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// Bytes of guest memory.
pub const MEMORY: u64 = 16 << 20;
/// Where a test may put its data.
pub const DATA: u64 = 1 << 20;
/// Entries of a ring, if a test does not ask for others.
pub const QUEUE: u16 = 128;
/// Where the guest's memory is, as the guest sees it.
const BASE: u64 = 0x4000_0000;
/// Bytes between rings.
const RING: u64 = 0x1_0000;
const AVAILABLE: u64 = 0x2000;
const USED: u64 = 0x3000;

/// The device may write.
pub const WRITE: u16 = 2;
/// The descriptor has a table behind it.
pub const INDIRECT: u16 = 4;
const NEXT: u16 = 1;

/// Features: version 1, event index, indirect, the device's own, vhost-user's.
const FEATURES: u64 = 1 << 32 | 1 << 30 | 1 << 29 | 1 << 28 | 0x7fff;

/// The driver uses the event index.
pub const EVENT_INDEX: u64 = 1 << 29;
/// The driver flushes what has to be durable.
pub const HAS_FLUSH: u64 = 1 << 9;

/// Properties of the guest's driver.
#[derive(Debug, Clone, Copy)]
pub struct Driver {
    /// Entries of each ring, at most 256.
    pub entries: u16,
    /// Features that it does not use though they are offered, as bits.
    pub declined: u64,
}

impl Default for Driver {
    fn default() -> Self {
        Self { entries: QUEUE, declined: 0 }
    }
}

/// A descriptor: offset in memory (or any address, see [`VhostGuest::at`]), length, flags.
pub type Descriptor = (u64, u32, u16);

/// The driver's side of a ring.
#[derive(Debug)]
struct Ring {
    kick: EventFd,
    call: EventFd,
    available: u16,
    used: u16,
}

/// Whether a descriptor can be read, or can within `timeout`.
pub fn is_readable(fd: RawFd, timeout: Duration) -> bool {
    let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: one pollfd; a descriptor that is not open is told in `revents`.
    unsafe { libc::poll(&raw mut poll, 1, timeout.as_millis() as i32) == 1 }
}

/// A guest, and the memory that outlives the device.
pub struct VhostGuest {
    memory: GuestMemoryMmap,
    file: File,
    front_end: Frontend,
    rings: Vec<Ring>,
    inflight: Option<(VhostUserInflight, File)>,
    /// On which the device tells of changes.
    channel: Option<UnixStream>,
    has_event_index: bool,
    driver: Driver,
    /// Bytes of the disk.
    pub size: u64,
    /// Bytes of a logical block (`blk_size`).
    pub logical_block: u32,
}

impl VhostGuest {
    /// Connects to a device and starts `queues` rings.
    ///
    /// # Panics
    /// If anything goes wrong.
    pub fn connect(socket: &Path, queues: usize) -> Self {
        Self::connect_with(socket, queues, Driver::default())
    }

    /// As [`VhostGuest::connect`], with another driver.
    ///
    /// # Panics
    /// If anything goes wrong.
    pub fn connect_with(socket: &Path, queues: usize, driver: Driver) -> Self {
        // In memory where there is such a folder: nobody else's file system is to be measured.
        let file = tempfile::tempfile_in("/dev/shm").or_else(|_| tempfile::tempfile());
        let file = file.expect("a file for the memory");
        file.set_len(MEMORY).expect("resized");
        let mapping =
            MmapRegion::from_file(FileOffset::new(file.try_clone().expect("cloned"), 0), MEMORY as usize);
        let region = GuestRegionMmap::new(mapping.expect("mapped"), GuestAddress(BASE)).expect("in range");
        let memory = GuestMemoryMmap::from_regions(vec![region]).expect("one region");
        let rings = (0..queues)
            .map(|_| Ring {
                kick: EventFd::new(EFD_NONBLOCK).expect("eventfd"),
                call: EventFd::new(EFD_NONBLOCK).expect("eventfd"),
                available: 0,
                used: 0,
            })
            .collect();
        let front_end = Frontend::connect(socket, queues as u64).expect("connected");
        let mut guest = Self {
            memory,
            file,
            front_end,
            rings,
            inflight: None,
            channel: None,
            has_event_index: false,
            driver,
            size: 0,
            logical_block: 0,
        };
        guest.set_up();
        guest
    }

    /// Connects to another device (the same, restarted), with the memory as it is and the log of what was in flight.
    ///
    /// # Panics
    /// If anything goes wrong.
    pub fn reconnect(&mut self, socket: &Path) {
        self.front_end = Frontend::connect(socket, self.rings.len() as u64).expect("connected");
        self.set_up();
    }

    fn set_up(&mut self) {
        let host = self.host_base();
        let front_end = &mut self.front_end;
        front_end.set_owner().expect("owner");
        let offered = front_end.get_features().expect("features");
        let features = offered & FEATURES & !self.driver.declined;
        front_end.set_features(features).expect("features");
        self.has_event_index = features & EVENT_INDEX != 0;
        let protocol = front_end.get_protocol_features().expect("protocol features");
        let needed = VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::REPLY_ACK;
        assert!(protocol.contains(needed), "{protocol:?}");
        // Other devices may have none.
        let log = protocol & VhostUserProtocolFeatures::INFLIGHT_SHMFD;
        let channel = protocol & VhostUserProtocolFeatures::BACKEND_REQ;
        front_end.set_protocol_features(needed | log | channel).expect("protocol features");
        front_end.set_hdr_flags(vhost::vhost_user::message::VhostUserHeaderFlag::NEED_REPLY);
        if !channel.is_empty() {
            let (ours, theirs) = UnixStream::pair().expect("sockets");
            front_end.set_backend_request_fd(&theirs).expect("channel");
            self.channel = Some(ours);
        }
        assert!(front_end.get_queue_num().expect("queues") >= self.rings.len() as u64);
        let (_, config) =
            front_end.get_config(0, 60, VhostUserConfigFlags::empty(), &[0; 60]).expect("configuration");
        self.size = u64::from_le_bytes(config[..8].try_into().expect("8 bytes")) * 512;
        self.logical_block = u32::from_le_bytes(config[20..24].try_into().expect("4 bytes"));
        if let Some((log, file)) = &self.inflight {
            front_end.set_inflight_fd(log, file.as_raw_fd()).expect("log");
        } else if !log.is_empty() {
            let wish = VhostUserInflight::new(0, 0, self.rings.len() as u16, self.driver.entries);
            self.inflight = Some(front_end.get_inflight_fd(&wish).expect("log"));
        }
        let region = VhostUserMemoryRegionInfo {
            guest_phys_addr: BASE,
            memory_size: MEMORY,
            userspace_addr: host,
            mmap_offset: 0,
            mmap_handle: self.file.as_raw_fd(),
        };
        front_end.set_mem_table(&[region]).expect("memory");
        for (index, ring) in self.rings.iter().enumerate() {
            let start = host + RING * index as u64;
            front_end.set_vring_num(index, self.driver.entries).expect("size");
            let addresses = VringConfigData {
                queue_max_size: self.driver.entries,
                queue_size: self.driver.entries,
                flags: 0,
                desc_table_addr: start,
                used_ring_addr: start + USED,
                avail_ring_addr: start + AVAILABLE,
                log_addr: None,
            };
            front_end.set_vring_addr(index, &addresses).expect("addresses");
            // As QEMU does it after the device went away: what was used is all that is known.
            front_end.set_vring_base(index, ring.used).expect("base");
            front_end.set_vring_call(index, &ring.call).expect("call");
            front_end.set_vring_kick(index, &ring.kick).expect("kick");
            front_end.set_vring_enable(index, true).expect("enabled");
        }
    }

    fn host_base(&self) -> u64 {
        let slice =
            vm_memory::GuestMemoryBackend::get_slice(&self.memory, GuestAddress(BASE), 1).expect("mapped");
        slice.ptr_guard().as_ptr() as u64
    }

    /// The guest's address of an offset in its memory.
    pub fn at(offset: u64) -> u64 {
        BASE + offset
    }

    /// Writes guest memory at an offset.
    pub fn put(&self, offset: u64, bytes: &[u8]) {
        self.memory.write_slice(bytes, GuestAddress(BASE + offset)).expect("in memory");
    }

    /// Reads guest memory at an offset.
    pub fn get(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory.read_slice(&mut bytes, GuestAddress(BASE + offset)).expect("in memory");
        bytes
    }

    /// Puts a table of descriptors (with absolute addresses) at an offset; each leads to the next.
    pub fn put_table(&self, offset: u64, table: &[Descriptor]) {
        for (index, (address, len, flags)) in table.iter().enumerate() {
            let is_last = index + 1 == table.len();
            let (next, flags) = if is_last { (0, *flags) } else { (index as u16 + 1, flags | NEXT) };
            self.put_descriptor(offset, index as u16, *address, *len, flags, next);
        }
    }

    /// Puts one descriptor into a table.
    pub fn put_descriptor(&self, table: u64, index: u16, address: u64, len: u32, flags: u16, next: u16) {
        let mut bytes = address.to_le_bytes().to_vec();
        bytes.extend(len.to_le_bytes());
        bytes.extend(flags.to_le_bytes());
        bytes.extend(next.to_le_bytes());
        self.put(table + u64::from(index) * 16, &bytes);
    }

    /// Where the table of a ring is.
    pub fn table_of(ring: usize) -> u64 {
        RING * ring as u64
    }

    /// Makes a head available.
    pub fn offer(&mut self, ring: usize, head: u16) {
        let start = RING * ring as u64 + AVAILABLE;
        let index = self.rings[ring].available;
        self.put(start + 4 + u64::from(index % self.driver.entries) * 2, &head.to_le_bytes());
        self.rings[ring].available = index.wrapping_add(1);
        self.put(start + 2, &self.rings[ring].available.to_le_bytes());
    }

    /// Says that so many heads are available, whatever is there.
    pub fn claim_available(&mut self, ring: usize, index: u16) {
        self.put(RING * ring as u64 + AVAILABLE + 2, &index.to_le_bytes());
    }

    /// Says whether the device is to tell of used heads (without the event index: flag NO_INTERRUPT of the available ring).
    pub fn want_calls(&self, ring: usize, wanted: bool) {
        self.put(RING * ring as u64 + AVAILABLE, &u16::from(!wanted).to_le_bytes());
    }

    /// Whether the device told of used heads of a ring since the last look.
    pub fn was_called(&self, ring: usize) -> bool {
        is_readable(self.rings[ring].call.as_raw_fd(), Duration::ZERO)
    }

    /// Tells the device.
    pub fn kick(&self, ring: usize) {
        self.rings[ring].kick.write(1).expect("kicked");
    }

    /// Whether the device keeps a log of what is in flight.
    pub fn has_log(&self) -> bool {
        self.inflight.is_some()
    }

    /// The heads used since the last look, with what was written; does not wait.
    pub fn used_now(&mut self, ring: usize) -> Vec<(u16, u32)> {
        let start = RING * ring as u64 + USED;
        let mut heads = Vec::new();
        let index = u16::from_le_bytes(self.get(start + 2, 2).try_into().expect("2 bytes"));
        while self.rings[ring].used != index {
            let at = start + 4 + u64::from(self.rings[ring].used % self.driver.entries) * 8;
            let bytes = self.get(at, 8);
            let number =
                |range: std::ops::Range<usize>| u32::from_le_bytes(bytes[range].try_into().expect("4 bytes"));
            heads.push((number(0..4) as u16, number(4..8)));
            self.rings[ring].used = self.rings[ring].used.wrapping_add(1);
        }
        heads
    }

    /// Whether there are used heads that were not looked at.
    pub fn has_used(&self, ring: usize) -> bool {
        self.get(RING * ring as u64 + USED + 2, 2) != self.rings[ring].used.to_le_bytes()
    }

    /// Waits until there are used heads that were not looked at, and leaves them.
    ///
    /// # Panics
    /// If there are never any.
    pub fn wait_for_used(&self, ring: usize) {
        let patience = Patience::begin();
        while !self.has_used(ring) {
            patience.check("something is used");
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// Lets the device tell of the next used head of a ring (event index). False if there is one by now.
    pub fn ask_for_call(&mut self, ring: usize) -> bool {
        let used = self.rings[ring].used;
        let start = RING * ring as u64;
        self.put(start + AVAILABLE + 4 + u64::from(self.driver.entries) * 2, &used.to_le_bytes());
        fence(Ordering::SeqCst);
        self.get(start + USED + 2, 2) == used.to_le_bytes()
    }

    /// Whether the device wants to be told that heads are available, of which `new` were made so (event index).
    pub fn wants_kick(&self, ring: usize, new: u16) -> bool {
        fence(Ordering::SeqCst);
        let event = self.get(RING * ring as u64 + USED + 4 + u64::from(self.driver.entries) * 8, 2);
        let event = u16::from_le_bytes(event.try_into().expect("2 bytes"));
        let available = self.rings[ring].available;
        !self.has_event_index || available.wrapping_sub(event).wrapping_sub(1) < new
    }

    /// Waits until the device told of used heads of any ring, at most `timeout`.
    pub fn wait_for_call(&self, timeout: Duration) {
        let mut polls: Vec<_> = self
            .rings
            .iter()
            .map(|ring| libc::pollfd { fd: ring.call.as_raw_fd(), events: libc::POLLIN, revents: 0 })
            .collect();
        // SAFETY: as many pollfds as are said, of descriptors that are open.
        unsafe { libc::poll(polls.as_mut_ptr(), polls.len() as libc::nfds_t, timeout.as_millis() as i32) };
        for (poll, ring) in polls.iter().zip(&self.rings) {
            if poll.revents != 0 {
                let _ = ring.call.read();
            }
        }
    }

    /// The heads used since the last look, with what was written; waits for the first.
    pub fn used(&mut self, ring: usize) -> Vec<(u16, u32)> {
        let patience = Patience::begin();
        loop {
            patience.check("something is used");
            let heads = self.used_now(ring);
            if !heads.is_empty() {
                return heads;
            }
            if self.ask_for_call(ring) {
                // Not relied upon: a device that forgets to tell is found by others.
                self.wait_for_call(Duration::from_millis(1));
            }
        }
    }

    /// As [`VhostGuest::used`], but looks only when the device told of something, as guests do. [`VhostGuest::ask_for_call`]
    /// must have found nothing before.
    pub fn used_by_call(&mut self, ring: usize) -> Vec<(u16, u32)> {
        let mut heads = Vec::new();
        while heads.is_empty() {
            while self.rings[ring].call.read().is_err() {
                let told = is_readable(self.rings[ring].call.as_raw_fd(), LONGEST);
                assert!(told, "the device does not tell");
            }
            heads = self.used_now(ring);
            while !self.ask_for_call(ring) {
                heads.extend(self.used_now(ring));
            }
        }
        heads
    }

    /// Waits until the device told of used heads of a ring, and forgets that it did.
    pub fn miss_call(&self, ring: usize) {
        let call = &self.rings[ring].call;
        assert!(is_readable(call.as_raw_fd(), LONGEST), "the device does not tell");
        call.read().expect("there is something");
    }

    /// Puts a request's header, data and status into memory and its chain into the ring's table, from `head` on: three
    /// descriptors. The data has 64 KiB of room.
    pub fn put_request(&self, ring: usize, head: u16, kind: u32, sector: u64, data: Descriptor) {
        let header = Self::header_of(ring, head);
        let mut bytes = kind.to_le_bytes().to_vec();
        bytes.extend(0u32.to_le_bytes());
        bytes.extend(sector.to_le_bytes());
        bytes.push(0xee);
        self.put(header, &bytes);
        let table = Self::table_of(ring);
        self.put_descriptor(table, head, Self::at(header), 16, NEXT, head + 1);
        self.put_descriptor(table, head + 1, data.0, data.1, data.2 | NEXT, head + 2);
        self.put_descriptor(table, head + 2, Self::at(header) + 16, 1, WRITE, 0);
    }

    /// Where the header of a request is; its status is 16 bytes further.
    pub fn header_of(ring: usize, head: u16) -> u64 {
        0x8_0000 + ring as u64 * 0x4000 + u64::from(head) * 32
    }

    /// The status of a request: 0 success, 1 error, 2 unsupported, 0xee none.
    pub fn status(&self, ring: usize, head: u16) -> u8 {
        self.get(Self::header_of(ring, head) + 16, 1)[0]
    }

    /// Does one request with its data at [`DATA`], and waits; its status and how much was written.
    pub fn call(&mut self, ring: usize, kind: u32, sector: u64, len: u32, flags: u16) -> (u8, u32) {
        self.put_request(ring, 0, kind, sector, (Self::at(DATA), len, flags));
        self.offer(ring, 0);
        self.kick(ring);
        let used = self.used(ring);
        assert_eq!(used.len(), 1);
        assert_eq!(used[0].0, 0);
        (self.status(ring, 0), used[0].1)
    }

    /// Waits until the device says that its configuration changed, and reads the size anew.
    ///
    /// # Panics
    /// If it says something else, or nothing.
    pub fn wait_for_new_size(&mut self) {
        let channel = self.channel.as_mut().expect("the device asked for a channel");
        channel.set_read_timeout(Some(LONGEST)).expect("a timeout");
        let mut message = [0; 12];
        channel.read_exact(&mut message).expect("a message");
        // VHOST_USER_BACKEND_CONFIG_CHANGE_MSG, version 1, nothing behind it.
        assert_eq!(message, [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
        let (_, config) =
            self.front_end.get_config(0, 8, VhostUserConfigFlags::empty(), &[0; 8]).expect("configuration");
        self.size = u64::from_le_bytes(config[..8].try_into().expect("8 bytes")) * 512;
    }

    /// Gives a ring another call descriptor, of whatever kind.
    ///
    /// # Errors
    /// The device does not take it.
    pub fn set_call(&mut self, ring: usize, fd: OwnedFd) -> vhost::Result<()> {
        // SAFETY: the descriptor is ours to give.
        self.rings[ring].call = unsafe { EventFd::from_raw_fd(fd.into_raw_fd()) };
        self.front_end.set_vring_call(ring, &self.rings[ring].call)
    }

    /// Gives a ring another kick descriptor, of whatever kind.
    ///
    /// # Errors
    /// The device does not take it.
    pub fn set_kick(&mut self, ring: usize, fd: OwnedFd) -> vhost::Result<()> {
        // SAFETY: the descriptor is ours to give.
        self.rings[ring].kick = unsafe { EventFd::from_raw_fd(fd.into_raw_fd()) };
        self.front_end.set_vring_kick(ring, &self.rings[ring].kick)
    }

    /// Gives a ring a descriptor that is signalled when the ring breaks.
    ///
    /// # Panics
    /// If the device does not take it.
    pub fn watch_errors(&mut self, ring: usize) -> EventFd {
        let error = EventFd::new(EFD_NONBLOCK).expect("eventfd");
        self.front_end.set_vring_err(ring, &error).expect("taken");
        error
    }

    /// Chooses protocol features.
    ///
    /// # Errors
    /// The device does not take them.
    pub fn choose_protocol_features(&mut self, features: VhostUserProtocolFeatures) -> vhost::Result<()> {
        self.front_end.set_protocol_features(features)
    }

    /// Takes all memory away that the device has mapped. The guest itself must not touch it any more.
    ///
    /// # Panics
    /// If it can't be cut.
    pub fn cut_memory(&self) {
        self.file.set_len(0).expect("cut");
    }

    /// Takes the log of what is in flight away.
    ///
    /// # Panics
    /// If there is none.
    pub fn cut_log(&self) {
        self.inflight.as_ref().expect("a log").1.set_len(0).expect("cut");
    }

    /// Waits until the device has closed the connection.
    ///
    /// # Panics
    /// If it never does.
    pub fn wait_for_end(&mut self) {
        let patience = Patience::begin();
        // SAFETY: the front end keeps its socket open.
        let socket = unsafe { BorrowedFd::borrow_raw(self.front_end.as_raw_fd()) };
        // Requests say nothing of it: what was not negotiated fails without one. Replies that nobody read come first.
        let mut replies = [0; 4096];
        loop {
            match rustix::net::recv(socket, &mut replies, RecvFlags::DONTWAIT) {
                Ok((0, _)) | Err(Errno::CONNRESET) => return,
                Err(Errno::AGAIN) => patience.pause("the end of the connection"),
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => panic!("the connection: {error}"),
            }
            patience.check("the end of the connection");
        }
    }

    /// Stops a ring; where the device is in the available ring.
    pub fn stop(&mut self, ring: usize) -> u16 {
        self.front_end.get_vring_base(ring).expect("stopped") as u16
    }
}
