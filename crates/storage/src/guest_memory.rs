//! A guest's memory as buffers: I/O in place.

use crate::buf::{IoBuf, IoBufs, IoMemory};
use std::fmt;
use std::sync::Arc;
use vm_memory::bitmap::Bitmap;
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

/// Makes buffers of parts of a guest's memory, for reads into it and writes from it without a copy. The memory stays mapped
/// while a buffer of it lives. It is cheap to clone.
///
/// ```
/// use std::sync::Arc;
/// use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
/// use zebu_storage::GuestBuffers;
///
/// let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
/// memory.write_slice(b"guest", GuestAddress(4096)).unwrap();
/// let guest = GuestBuffers::new(Arc::new(memory));
/// let bufs = guest.buffers([(GuestAddress(4096), 3), (GuestAddress(4099), 2)]).unwrap();
/// let mut seen = [0; 5];
/// bufs.copy_to(0, &mut seen);
/// assert_eq!(&seen, b"guest");
/// assert!(guest.buffers([(GuestAddress(1 << 20), 1)]).is_none());
/// ```
pub struct GuestBuffers<B = ()> {
    memory: Arc<GuestMemoryMmap<B>>,
    regions: Arc<[Region]>,
}

/// A region of the memory. Each is a mapping of its own, so views of two of them are never joined, though they may be
/// neighbours in the address space: they have different owners.
struct Region {
    start: GuestAddress,
    owner: Arc<dyn IoMemory>,
}

/// Memory that stays mapped.
struct Mapped<B> {
    _memory: Arc<GuestMemoryMmap<B>>,
}

// SAFETY: the mappings of the regions live as long as the value holds them, and never move. They are readable and writable,
// but for what their owner takes away, as by cutting a file short, which ends the process by a signal.
unsafe impl<B: Bitmap + Send + Sync + 'static> IoMemory for Mapped<B> {}

impl<B: Bitmap + Send + Sync + 'static> GuestBuffers<B> {
    /// Buffers of this memory.
    pub fn new(memory: Arc<GuestMemoryMmap<B>>) -> Self {
        let region = |start| {
            let owner = Arc::new(Mapped { _memory: Arc::clone(&memory) }) as Arc<dyn IoMemory>;
            Region { start, owner }
        };
        let mut regions: Vec<_> = memory.iter().map(|mapped| region(mapped.start_addr())).collect();
        regions.sort_unstable_by_key(|region| region.start);
        Self { memory, regions: regions.into() }
    }

    /// The memory.
    pub fn memory(&self) -> &GuestMemoryMmap<B> {
        &self.memory
    }

    /// The owner of the mapping that has `address`.
    fn owner_of(&self, address: GuestAddress) -> Option<Arc<dyn IoMemory>> {
        let behind = self.regions.partition_point(|region| region.start <= address);
        Some(Arc::clone(&self.regions.get(behind.checked_sub(1)?)?.owner))
    }

    /// Views of parts (address and bytes), in order; `None` if a part does not lie in memory. What is read into them is not
    /// noted in the memory's dirty bitmap: see [`GuestBuffers::mark_dirty`].
    pub fn buffers(&self, parts: impl IntoIterator<Item = (GuestAddress, usize)>) -> Option<IoBufs> {
        let mut bufs = IoBufs::new();
        for (mut address, len) in parts {
            for slice in self.memory().get_slices(address, len) {
                let slice = slice.ok()?;
                let owner = self.owner_of(address)?;
                address = GuestAddress(address.0.wrapping_add(slice.len() as u64));
                // SAFETY: the range lies in a mapping that `owner` keeps, and the pointer is that mapping's. It is memory that
                // the guest may change at any time; if it gives the same bytes to two requests, both find whatever the other
                // left, which the contract allows for such memory.
                bufs.push(unsafe { IoBuf::from_memory(owner, slice.ptr_guard_mut().as_ptr(), slice.len()) });
            }
        }
        Some(bufs)
    }

    /// Notes in the memory's dirty bitmap that parts were read into, for migration. To be called when the read has ended.
    pub fn mark_dirty(&self, parts: impl IntoIterator<Item = (GuestAddress, usize)>) {
        for (address, len) in parts {
            for slice in self.memory().get_slices(address, len).flatten() {
                slice.bitmap().mark_dirty(0, slice.len());
            }
        }
    }
}

impl<B> Clone for GuestBuffers<B> {
    fn clone(&self) -> Self {
        Self { memory: Arc::clone(&self.memory), regions: Arc::clone(&self.regions) }
    }
}

impl<B> fmt::Debug for GuestBuffers<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GuestBuffers").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vm_memory::Bytes;
    use vm_memory::bitmap::AtomicBitmap;

    #[test]
    fn a_part_may_span_regions_and_keeps_them_mapped() {
        let ranges = [(GuestAddress(0), 8192), (GuestAddress(8192), 8192)];
        let memory = Arc::new(GuestMemoryMmap::<AtomicBitmap>::from_ranges(&ranges).unwrap());
        let guest = GuestBuffers::new(Arc::clone(&memory));
        let mut bufs = guest.buffers([(GuestAddress(8000), 400)]).unwrap();
        assert_eq!(bufs.len(), 400);
        bufs.fill(0, 400, 5);
        assert_eq!(memory.read_obj::<u8>(GuestAddress(8399)).unwrap(), 5);
        guest.mark_dirty([(GuestAddress(8000), 400)]);
        let is_dirty = |at| memory.get_slice(GuestAddress(at), 1).unwrap().bitmap().dirty_at(0);
        assert!(is_dirty(8000) && is_dirty(8192) && !is_dirty(0));
        drop((guest, memory));
        assert!(bufs.0.iter().all(|buf| buf.as_slice().iter().all(|&byte| byte == 5)));
    }

    #[test]
    fn mappings_that_are_neighbours_are_not_joined() {
        const LEN: usize = 1 << 20;
        let starts = [GuestAddress(0), GuestAddress(1 << 30)];
        let memory = GuestMemoryMmap::<()>::from_ranges(&starts.map(|start| (start, LEN))).unwrap();
        let guest = GuestBuffers::new(Arc::new(memory));
        // The kernel puts one mapping right before or behind the other, as a rule.
        for [first, second] in [starts, [starts[1], starts[0]]] {
            let bufs = guest.buffers([(first, LEN), (second, LEN)]).unwrap();
            assert_eq!(bufs.parts().len(), 2);
            let halves = guest.buffers([(first, LEN / 2), (GuestAddress(first.0 + LEN as u64 / 2), LEN / 2)]);
            assert_eq!(halves.unwrap().parts().len(), 1);
        }
    }
}
