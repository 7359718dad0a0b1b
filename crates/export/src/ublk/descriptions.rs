//! The descriptions of a queue's requests, which the kernel writes and this process reads.

use super::uapi::{self, DESCRIPTION, Request};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::io;
use std::os::fd::AsFd;
use std::ptr::{self, NonNull};

/// The descriptions, by tag.
pub(super) struct Descriptions {
    start: NonNull<u8>,
    len: usize,
    depth: u16,
}

// SAFETY: an address and a size; the memory is the kernel's, for any thread to read.
unsafe impl Send for Descriptions {}

impl Descriptions {
    /// Maps those of a queue of the device.
    pub(super) fn map(device: impl AsFd, queue: u16, depth: u16) -> io::Result<Self> {
        let (at, len) = uapi::descriptions(queue, depth, rustix::param::page_size());
        // SAFETY: a new mapping, anywhere.
        let start = unsafe { mmap(ptr::null_mut(), len, ProtFlags::READ, MapFlags::SHARED, device, at) }?;
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, len, depth })
    }

    /// The request of a tag, which the kernel has handed over.
    pub(super) fn get(&self, tag: u16) -> Request {
        assert!(tag < self.depth);
        let at = self.start.as_ptr().wrapping_add(usize::from(tag) * DESCRIPTION);
        // SAFETY: within the mapping, which is readable and page-aligned, and descriptions are multiples of 8 bytes. The kernel
        // changes them without asking, so they are read once, as they are; any bytes are numbers.
        let (kind, sectors, first) = unsafe {
            (
                at.cast::<u32>().read_volatile(),
                at.add(4).cast::<u32>().read_volatile(),
                at.add(8).cast::<u64>().read_volatile(),
            )
        };
        Request::decode(kind, sectors, first)
    }
}

impl Drop for Descriptions {
    fn drop(&mut self) {
        // SAFETY: our own mapping, which nobody uses any more.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
    }
}
