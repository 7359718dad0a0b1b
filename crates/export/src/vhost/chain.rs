//! Chains of descriptors, as a guest makes them available.

use super::device::MAX_QUEUE;
use super::memory::GuestMap;
use super::request::{Parts, split_last_byte};
use std::sync::atomic::Ordering;
use virtio_queue::desc::split::Descriptor;
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

/// The next entry of an available ring.
pub(super) enum Next {
    /// A head and its chain.
    Chain(u16, Chain),
    /// Nothing more; the guest will say when there is.
    None,
}

/// A chain of descriptors, up to its end or to where it is none any more.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Chain {
    /// The parts that the device may read, and those that it may write.
    Whole(Parts, Parts),
    /// More descriptors than a request has; its last byte that the device may write, which is for the status.
    TooLong(Option<u64>),
}

/// Takes the next chain; `None` if the ring is broken. The guest may make others available at any time.
pub(super) fn take_chain(queue: &mut Queue, memory: &GuestMemoryMmap) -> Option<Next> {
    // What this index says must be there. Looked at later, it may have gone on.
    let available = queue.avail_idx(memory, Ordering::Acquire).ok()?.0;
    if available == queue.next_avail() && !queue.enable_notification(memory).ok()? {
        return Some(Next::None);
    }
    let chain = queue.iter(memory).ok()?.next()?;
    Some(Next::Chain(chain.head_index(), split_chain(chain)))
}

/// The parts that the device may read, and those that it may write.
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

/// The descriptors of a head, as the queue would give them.
pub(super) fn chain_at(map: &GuestMap, table: u64, size: u16, head: u16) -> Chain {
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
