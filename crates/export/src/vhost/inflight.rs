//! The log of requests in flight, in memory that the front end keeps while this process is away (vhost-user,
//! "Inflight I/O tracking", split rings).

use super::foreign_memory;
use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use vm_memory::{Bytes, MmapRegion, VolatileMemory};
use zebu_storage::MappingGuard;

/// Bytes before the first entry: features u64, version u16, number of entries u16, last batch head u16, used index u16.
const HEADER: usize = 16;
/// Bytes of an entry: in flight u8, padding, next u16 (at 6), counter u64 (at 8).
const ENTRY: usize = 16;
const VERSION_AT: usize = 8;
const COUNT_AT: usize = 10;
const LAST_AT: usize = 12;
const USED_AT: usize = 14;
/// Where an entry has the head that was used before it.
const NEXT: usize = 6;
/// The version of this layout.
const VERSION: u16 = 1;
/// Rings begin at multiples of this.
const ALIGN: usize = 64;

/// Bytes of the log of one ring.
fn ring_len(queue_size: u16) -> usize {
    (HEADER + ENTRY * queue_size as usize).next_multiple_of(ALIGN)
}

/// The memory of a log.
struct LogMemory {
    /// Before the mapping, to be dropped before it.
    guard: MappingGuard,
    mapping: MmapRegion,
}

/// The log of all rings of a device.
#[derive(Clone)]
pub(crate) struct InflightLog {
    memory: Arc<LogMemory>,
    rings: u16,
    queue_size: u16,
}

impl InflightLog {
    /// Bytes that a log needs.
    pub(crate) fn len_for(rings: u16, queue_size: u16) -> u64 {
        rings as u64 * ring_len(queue_size) as u64
    }

    /// Maps a log.
    ///
    /// # Errors
    /// It is too small for its rings, lies past the file's end, or can't be mapped.
    pub(crate) fn map(file: File, offset: u64, len: u64, rings: u16, queue_size: u16) -> io::Result<Self> {
        if len < Self::len_for(rings, queue_size) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the log is too small for its rings"));
        }
        let (guard, mapping) = foreign_memory::map(file, offset, len)?;
        Ok(Self { memory: Arc::new(LogMemory { guard, mapping }), rings, queue_size })
    }

    /// The log of one ring; `None` if the log is not for so many rings or so large a queue.
    pub(crate) fn ring(&self, index: u16, queue_size: u16) -> Option<RingLog> {
        if index >= self.rings || queue_size > self.queue_size {
            return None;
        }
        let start = index as usize * ring_len(self.queue_size);
        Some(RingLog { memory: Arc::clone(&self.memory), start, entries: queue_size, next_counter: 0 })
    }
}

/// The log of one ring.
pub(crate) struct RingLog {
    memory: Arc<LogMemory>,
    start: usize,
    entries: u16,
    next_counter: u64,
}

/// Where the entry of a head is.
fn entry_at(head: u16) -> usize {
    HEADER + ENTRY * head as usize
}

impl RingLog {
    /// Begins to use the log. `used` is the index of the used ring in the guest's memory. The heads that were in flight
    /// when an earlier user of the log ended, in the order in which they were taken; `None` if there was none.
    pub(crate) fn begin(&mut self, used: u16) -> Option<Vec<u16>> {
        if self.read::<u16>(VERSION_AT) != VERSION {
            // Fresh: all zero. If it is not, nothing of it counts.
            for head in 0..self.entries {
                self.write(entry_at(head), 0u8);
            }
            self.write(COUNT_AT, self.entries);
            self.write(USED_AT, used);
            self.write(VERSION_AT, VERSION);
            return None;
        }
        // The process ended after the guest could see these as used, and before it was noted here. (A device of other makers
        // may use several at once; the front end may say anything.)
        let unnoted = used.wrapping_sub(self.read::<u16>(USED_AT)).min(self.entries);
        let mut last = self.read::<u16>(LAST_AT);
        for _ in 0..unnoted {
            if last >= self.entries {
                break;
            }
            self.write(entry_at(last), 0u8);
            last = self.read::<u16>(entry_at(last) + NEXT);
        }
        self.write(USED_AT, used);
        let in_flight = |head: &u16| self.read::<u8>(entry_at(*head)) != 0;
        let mut heads: Vec<u16> = (0..self.entries).filter(in_flight).collect();
        // The front end may change the counters meanwhile: each is read once.
        heads.sort_by_cached_key(|head| self.read::<u64>(entry_at(*head) + 8));
        self.next_counter =
            heads.last().map_or(0, |head| self.read::<u64>(entry_at(*head) + 8).wrapping_add(1));
        Some(heads)
    }

    /// Notes that a head was taken.
    pub(crate) fn take(&mut self, head: u16) {
        if head < self.entries {
            self.write(entry_at(head) + 8, self.next_counter);
            self.next_counter = self.next_counter.wrapping_add(1);
            fence(Ordering::Release);
            self.write(entry_at(head), 1u8);
        }
    }

    /// Before a head is put into the used ring.
    pub(crate) fn before_used(&mut self, head: u16) {
        if head < self.entries {
            let last = self.read::<u16>(LAST_AT);
            self.write(entry_at(head) + NEXT, last);
            self.write(LAST_AT, head);
            fence(Ordering::Release);
        }
    }

    /// After the guest can see it there; `used` is the new index.
    pub(crate) fn after_used(&mut self, head: u16, used: u16) {
        if head < self.entries {
            fence(Ordering::Release);
            self.write(entry_at(head), 0u8);
            fence(Ordering::Release);
            self.write(USED_AT, used);
        }
    }

    /// Whether the front end has taken the log away.
    pub(crate) fn has_vanished(&self) -> bool {
        self.memory.guard.has_vanished()
    }

    fn read<T: vm_memory::ByteValued + Default>(&self, at: usize) -> T {
        // Checked against the size of the mapping when it was made.
        self.memory.mapping.as_volatile_slice().read_obj(self.start + at).unwrap_or_default()
    }

    fn write<T: vm_memory::ByteValued>(&self, at: usize, value: T) {
        // As above: it can't fail.
        let _ = self.memory.mapping.as_volatile_slice().write_obj(value, self.start + at);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    fn log() -> InflightLog {
        let file = tempfile::tempfile().unwrap();
        let len = InflightLog::len_for(2, 8);
        file.set_len(len).unwrap();
        InflightLog::map(file, 0, len, 2, 8).unwrap()
    }

    #[test]
    fn what_was_in_flight_is_found_in_order() {
        let log = log();
        let mut ring = log.ring(1, 8).unwrap();
        assert_eq!(ring.begin(40), None);
        for head in [5, 2, 7, 0] {
            ring.take(head);
        }
        ring.before_used(2);
        ring.after_used(2, 41);
        assert_eq!(log.ring(1, 8).unwrap().begin(41), Some(vec![5, 7, 0]));
        assert_eq!(log.ring(0, 8).unwrap().begin(0), None, "another ring");
        // The guest saw 7 as used; the process ended before it was noted.
        ring.before_used(7);
        let mut again = log.ring(1, 8).unwrap();
        assert_eq!(again.begin(42), Some(vec![5, 0]));
        again.take(3);
        assert_eq!(log.ring(1, 8).unwrap().begin(42), Some(vec![5, 0, 3]));
        // And here it ended before the guest saw it.
        again.before_used(5);
        assert_eq!(log.ring(1, 8).unwrap().begin(42), Some(vec![5, 0, 3]));
    }

    // As another device leaves it, which uses several at once.
    #[test]
    fn all_that_the_guest_saw_as_used_is_over() {
        let log = log();
        let mut ring = log.ring(0, 8).unwrap();
        ring.begin(10);
        for head in 0..6 {
            ring.take(head);
        }
        for head in [4, 1, 3] {
            ring.before_used(head);
        }
        assert_eq!(log.ring(0, 8).unwrap().begin(13), Some(vec![0, 2, 5]));
    }

    #[test]
    fn logs_that_lie_end() {
        let log = log();
        let mut ring = log.ring(0, 8).unwrap();
        ring.begin(0);
        ring.take(3);
        // A circle, and more than there are.
        ring.write(entry_at(3) + NEXT, 3u16);
        ring.write(LAST_AT, 3u16);
        assert_eq!(log.ring(0, 8).unwrap().begin(60_000), Some(Vec::new()));
        ring.take(3);
        ring.write(LAST_AT, 50_000u16);
        assert_eq!(log.ring(0, 8).unwrap().begin(9), Some(vec![3]));
        // Of an unknown version, nothing counts.
        ring.write(VERSION_AT, 7u16);
        assert_eq!(log.ring(0, 8).unwrap().begin(9), None);
        assert_eq!(log.ring(0, 8).unwrap().begin(9), Some(Vec::new()));
    }

    /// The standard library's sort may panic if the order changes under it.
    #[test]
    fn a_log_that_the_front_end_changes_meanwhile_is_read() {
        const ENTRIES: u16 = 1024;
        let file = tempfile::tempfile().unwrap();
        let len = InflightLog::len_for(1, ENTRIES);
        file.set_len(len).unwrap();
        let log = InflightLog::map(file, 0, len, 1, ENTRIES).unwrap();
        log.ring(0, ENTRIES).unwrap().begin(0);
        let is_over = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let front_end = log.ring(0, ENTRIES).unwrap();
                let mut number = 1u64;
                while !is_over.load(Ordering::Relaxed) {
                    number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    let entry = entry_at((number >> 33) as u16 % ENTRIES);
                    front_end.write(entry + 8, number);
                    front_end.write(entry, 1u8);
                }
            });
            let found = std::panic::catch_unwind(|| {
                let until = Instant::now() + Duration::from_secs(600);
                let (mut turns, mut most) = (0, 0usize);
                while turns < 2000 || most < usize::from(ENTRIES) && Instant::now() < until {
                    most = most.max(log.ring(0, ENTRIES).unwrap().begin(0).unwrap().len());
                    turns += 1;
                }
                most
            });
            is_over.store(true, Ordering::Relaxed);
            assert_eq!(found.expect("no panic"), usize::from(ENTRIES));
        });
    }

    #[test]
    fn logs_that_are_too_small_are_refused() {
        let file = || {
            let file = tempfile::tempfile().unwrap();
            file.set_len(InflightLog::len_for(1, 8)).unwrap();
            file
        };
        let len = InflightLog::len_for(1, 8);
        assert!(InflightLog::map(file(), 0, len - 1, 1, 8).is_err());
        assert!(InflightLog::map(file(), 4096, len, 1, 8).is_err());
        assert!(InflightLog::map(file(), u64::MAX, len, 1, 8).is_err());
        let log = InflightLog::map(file(), 0, len, 1, 8).unwrap();
        assert!(log.ring(0, 16).is_none() && log.ring(1, 8).is_none());
        let mut ring = log.ring(0, 8).unwrap();
        ring.begin(0);
        // Heads that the queue does not have are not noted anywhere.
        ring.take(60000);
        ring.before_used(60000);
        ring.after_used(60000, 1);
        assert_eq!(log.ring(0, 8).unwrap().begin(0), Some(Vec::new()));
    }
}
