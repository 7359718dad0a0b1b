//! Fuzzing of a ring whose memory is whatever a guest left there, up to the I/O.

use super::{Chain, GuestMap, Next, Queue, QueueT, chain_at, data_buffers, len, ranges, take_chain};
use crate::vhost::device::MAX_QUEUE;
use crate::vhost::request::{BlkRequest, HEADER, parse_header, split_front, split_last_byte};
use std::fs::File;
use std::io::Write;
use std::sync::Arc;
use vhost::vhost_user::message::VhostUserMemoryRegion;

/// Chains that are taken at most; a ring has no end if its index goes on.
const CHAINS: usize = 200;
/// Where the guest's memory starts: what is in front of it is not there.
const START: u64 = 0x1000;

/// Takes the chains of a ring of `size` entries in `memory`: descriptors, available and used ring at the offsets
/// `rings`; and those of `heads` again, as after a restart.
///
/// # Panics
/// Something is wrong here, not in the ring.
pub fn look_at_ring(memory: &[u8], rings: [u16; 3], size: u16, heads: &[u16]) {
    let Some(map) = guest(memory) else { return };
    let [table, available, used] = rings.map(|offset| START + u64::from(offset));
    let Ok(mut queue) = Queue::new(256) else { return };
    queue.set_size(size);
    let placed = queue.try_set_desc_table_address(vm_memory::GuestAddress(table)).is_ok()
        && queue.try_set_avail_ring_address(vm_memory::GuestAddress(available)).is_ok()
        && queue.try_set_used_ring_address(vm_memory::GuestAddress(used)).is_ok();
    queue.set_ready(true);
    if placed && queue.is_valid(map.memory()) {
        for _ in 0..CHAINS {
            match take_chain(&mut queue, map.memory()) {
                Some(Next::Chain(_, chain)) => look_at_chain(&map, chain),
                Some(Next::None) | None => break,
            }
        }
    }
    for head in heads {
        look_at_chain(&map, chain_at(&map, table, size, *head));
    }
}

/// A guest that has `memory`, and zeroes behind it.
fn guest(memory: &[u8]) -> Option<Arc<GuestMap>> {
    let mut file = File::from(rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).ok()?);
    file.write_all(memory).ok()?;
    let size = (memory.len() as u64).next_multiple_of(0x1000).max(0x4000);
    file.set_len(size).ok()?;
    let region = VhostUserMemoryRegion {
        guest_phys_addr: START,
        memory_size: size,
        user_addr: 0x7000_0000,
        mmap_offset: 0,
    };
    GuestMap::of_table(&[region], vec![file]).ok().map(Arc::new)
}

/// As a request is begun: header, status, ranges, buffers.
fn look_at_chain(map: &Arc<GuestMap>, chain: Chain) {
    let Chain::Whole(mut readable, mut writable) = chain else { return };
    assert!(readable.len() + writable.len() <= usize::from(MAX_QUEUE), "more descriptors than a request has");
    if let Some(parts) = split_front(&mut readable, HEADER) {
        let mut header = [0; HEADER as usize];
        if map.read_parts(&parts, &mut header) {
            let _ = parse_header(&header);
        }
    }
    let _ = split_last_byte(&mut writable);
    for request in [BlkRequest::Discard, BlkRequest::WriteZeroes] {
        let _ = ranges(map, &mut readable.clone(), request);
    }
    for parts in [readable, writable] {
        let total = len(&parts);
        if let Some(bufs) = data_buffers(map, &parts, total) {
            assert_eq!(bufs.len() as u64, total, "buffers of another length than the parts");
        }
    }
}
