//! The descriptions of a queue's requests, which the kernel writes and this process reads.

use super::uapi::{self, Request};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::io;
use std::os::fd::AsFd;
use std::ptr::{self, NonNull};

/// A description: its kind with flags, and sectors; the first sector; an address.
type Words = [u64; uapi::DESCRIPTION / 8];

/// The descriptions, by tag.
pub(super) struct Descriptions {
    start: NonNull<Words>,
    /// Bytes of the mapping.
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
        // SAFETY: within the mapping, which has `depth` descriptions and begins with a page. The kernel changes them without asking,
        // so they are read once, as they are; any bytes are numbers.
        let [head, first, _] = unsafe { self.start.add(tag.into()).read_volatile() };
        let [k0, k1, k2, k3, s0, s1, s2, s3] = head.to_ne_bytes();
        let (kind, sectors) = (u32::from_ne_bytes([k0, k1, k2, k3]), u32::from_ne_bytes([s0, s1, s2, s3]));
        Request::decode(kind, sectors, first)
    }
}

impl Drop for Descriptions {
    fn drop(&mut self) {
        // SAFETY: our own mapping, which nobody uses any more.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
    }
}
