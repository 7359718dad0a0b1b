//! The guest's memory, as the front end shares it.

use super::foreign_memory;
use super::request::Parts;
use std::fs::File;
use std::sync::{Arc, PoisonError, RwLock};
use vhost::vhost_user::message::{VhostUserMemoryRegion, VhostUserSingleMemoryRegion};
use vhost::vhost_user::{Error, Result};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestRegionMmap};
use zebu_storage::{IoBuf, IoBufs, IoMemory, MappingGuard};

/// Regions of one front end at most. Each takes a descriptor and a mapping of the process.
pub(crate) const MAX_REGIONS: usize = 509;

/// A run of guest memory, and where the front end sees it.
#[derive(Clone)]
struct Region {
    /// Before the mapping, to be dropped before it.
    guard: Arc<MappingGuard>,
    mapping: Arc<GuestRegionMmap>,
    guest: u64,
    front_end: u64,
    size: u64,
}

/// The guest's memory at one time. What is in flight keeps it mapped.
#[derive(Default)]
pub(crate) struct GuestMap {
    /// With the guards of the mappings, which are dropped before `memory`.
    regions: Vec<Region>,
    memory: GuestMemoryMmap,
}

// SAFETY: the mappings live as long as the value, are readable and writable, and never move. (If the front
// end cuts its file short, their guards put zero pages in their place.)
unsafe impl IoMemory for GuestMap {}

impl GuestMap {
    /// Regions as in SET_MEM_TABLE.
    pub(crate) fn of_table(table: &[VhostUserMemoryRegion], files: Vec<File>) -> Result<Self> {
        if table.len() != files.len() {
            return Err(Error::IncorrectFds);
        }
        let mut regions = Vec::new();
        for (entry, file) in table.iter().zip(files) {
            regions.push(map(entry, file)?);
        }
        Self::of_regions(regions)
    }

    /// The same memory and one region more.
    pub(crate) fn with(&self, entry: &VhostUserSingleMemoryRegion, file: File) -> Result<Self> {
        let mut regions = self.regions.clone();
        regions.push(map(entry, file)?);
        Self::of_regions(regions)
    }

    /// The same memory without a region.
    pub(crate) fn without(&self, entry: &VhostUserSingleMemoryRegion) -> Result<Self> {
        let (guest, front_end, size) = (entry.guest_phys_addr, entry.user_addr, entry.memory_size);
        let is_it =
            |region: &Region| (region.guest, region.front_end, region.size) == (guest, front_end, size);
        let mut regions = self.regions.clone();
        let at = regions.iter().position(is_it).ok_or(Error::InvalidParam)?;
        regions.remove(at);
        Self::of_regions(regions)
    }

    fn of_regions(mut regions: Vec<Region>) -> Result<Self> {
        if regions.len() > MAX_REGIONS {
            return Err(Error::InvalidOperation("there are more regions of memory than slots"));
        }
        regions.sort_by_key(|region| region.guest);
        let mappings = regions.iter().map(|region| Arc::clone(&region.mapping)).collect::<Vec<_>>();
        let memory = if mappings.is_empty() {
            GuestMemoryMmap::new()
        } else {
            GuestMemoryMmap::from_arc_regions(mappings).map_err(|_| Error::InvalidParam)?
        };
        Ok(Self { regions, memory })
    }

    /// The guest's address of one of the front end.
    pub(crate) fn guest_address(&self, front_end: u64) -> Result<GuestAddress> {
        let within = |region: &&Region| {
            front_end.checked_sub(region.front_end).is_some_and(|offset| offset < region.size)
        };
        let region = self.regions.iter().find(within).ok_or(Error::InvalidParam)?;
        Ok(GuestAddress(region.guest + (front_end - region.front_end)))
    }

    /// Whether the front end has taken some of it away, or the system can't give its pages: it reads as zero then.
    pub(crate) fn has_vanished(&self) -> bool {
        self.regions.iter().any(|region| region.guard.has_vanished())
    }

    pub(crate) fn memory(&self) -> &GuestMemoryMmap {
        &self.memory
    }

    /// Copies the bytes of parts, which must be as many as `out` has; false if they are not all in memory.
    pub(crate) fn read_parts(&self, parts: &Parts, out: &mut [u8]) -> bool {
        let mut rest = out;
        for (address, len) in parts {
            let Some((head, tail)) = rest.split_at_mut_checked(*len as usize) else { return false };
            if self.memory.read_slice(head, GuestAddress(*address)).is_err() {
                return false;
            }
            rest = tail;
        }
        rest.is_empty()
    }

    /// Copies bytes into parts, as far as these reach; how many, or `None` if a part is not in memory.
    pub(crate) fn write_parts(&self, parts: &Parts, bytes: &[u8]) -> Option<usize> {
        let mut done = 0;
        for (address, len) in parts {
            let part = &bytes[done..bytes.len().min(done + *len as usize)];
            self.memory.write_slice(part, GuestAddress(*address)).ok()?;
            done += part.len();
        }
        Some(done)
    }

    /// Views of parts, for I/O in place; `None` if one is not in memory.
    pub(crate) fn buffers(self: &Arc<Self>, parts: &Parts) -> Option<IoBufs> {
        let mut bufs = IoBufs::new();
        for (address, len) in parts {
            for slice in self.memory.get_slices(GuestAddress(*address), *len as usize) {
                let slice = slice.ok()?;
                let owner = Arc::clone(self) as Arc<dyn IoMemory>;
                // SAFETY: the range lies in a mapping that `owner` keeps, and the pointer is that mapping's. It is
                // memory that the guest may change at any time; if it gives the same bytes to two requests, both find
                // whatever the other left, which the contract allows for such memory.
                bufs.push(unsafe { IoBuf::from_memory(owner, slice.ptr_guard_mut().as_ptr(), slice.len()) });
            }
        }
        Some(bufs)
    }
}

fn map(entry: &VhostUserMemoryRegion, file: File) -> Result<Region> {
    let (guest, front_end, size) = (entry.guest_phys_addr, entry.user_addr, entry.memory_size);
    if front_end.checked_add(size).is_none() {
        return Err(Error::InvalidParam);
    }
    let (guard, mapping) =
        foreign_memory::map(file, entry.mmap_offset, size).map_err(Error::ReqHandlerError)?;
    let mapping = GuestRegionMmap::new(mapping, GuestAddress(guest)).ok_or(Error::InvalidParam)?;
    Ok(Region { guard: Arc::new(guard), mapping: Arc::new(mapping), guest, front_end, size })
}

/// The guest's memory as it is now, shared by the rings of a device.
#[derive(Clone, Default)]
pub(crate) struct SharedMap(Arc<RwLock<Arc<GuestMap>>>);

impl SharedMap {
    pub(crate) fn get(&self) -> Arc<GuestMap> {
        Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn set(&self, map: GuestMap) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(map);
    }
}
