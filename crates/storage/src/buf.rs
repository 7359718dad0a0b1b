//! Memory for I/O: page-aligned, exclusively owned views that can be split and joined without copying.

use crate::lender::Lender;
use crate::memory::{Region, RegionRef};
use smallvec::SmallVec;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

pub use crate::memory::PAGE;

/// Memory that somebody else owns and that I/O may use in place (a guest's memory, a caller's buffer).
///
/// # Safety
/// While the value lives, the memory of every [`IoBuf`] made from it with [`IoBuf::from_memory`] stays mapped,
/// readable and writable.
pub unsafe trait IoMemory: Send + Sync + 'static {}

/// The owner that keeps the bytes of a view alive.
enum Owner {
    /// Views of no bytes need no memory.
    Nobody,
    Region(RegionRef),
    Foreign(Arc<dyn IoMemory>),
    /// Of a caller that waits.
    Lent(Arc<Lender>),
    /// The same, not to be changed.
    LentToRead(Arc<Lender>),
}

impl Owner {
    fn share(&self) -> Self {
        match self {
            Self::Nobody => Self::Nobody,
            Self::Region(region) => Self::Region(region.clone()),
            Self::Foreign(memory) => Self::Foreign(Arc::clone(memory)),
            Self::Lent(lender) => Self::Lent(Arc::clone(lender)),
            Self::LentToRead(lender) => Self::LentToRead(Arc::clone(lender)),
        }
    }

    fn is_same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Region(a), Self::Region(b)) => a.is_same(b),
            (Self::Foreign(a), Self::Foreign(b)) => std::ptr::addr_eq(Arc::as_ptr(a), Arc::as_ptr(b)),
            (Self::Lent(a), Self::Lent(b)) | (Self::LentToRead(a), Self::LentToRead(b)) => Arc::ptr_eq(a, b),
            _ => false,
        }
    }
}

/// An exclusive view of bytes. The bytes live as long as some view of them does; views that were split from one
/// buffer never overlap.
pub struct IoBuf {
    owner: Owner,
    /// Start of the view; its provenance covers the owner's whole memory, so that views can be joined again.
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: a view is the only access to its bytes (constructors and `split_to` keep views disjoint), and its owner
// (`RegionRef` or `Arc<dyn IoMemory>`) may be dropped by any thread.
unsafe impl Send for IoBuf {}
// SAFETY: `&IoBuf` gives shared, read-only access to bytes that nobody can change meanwhile.
unsafe impl Sync for IoBuf {}

impl IoBuf {
    /// A page-aligned buffer of `len` bytes, all zero.
    pub fn zeroed(len: usize) -> Self {
        if len == 0 {
            return Self::empty();
        }
        Self::whole(Region::zeroed(len), len)
    }

    /// A page-aligned copy of `bytes`.
    pub fn copy_of(bytes: &[u8]) -> Self {
        let mut buf = Self::zeroed(bytes.len());
        buf.as_mut_slice().copy_from_slice(bytes);
        buf
    }

    /// A view of no bytes.
    pub(crate) fn empty() -> Self {
        Self { owner: Owner::Nobody, start: Region::dangling(), len: 0 }
    }

    /// The first `len` bytes of a region.
    ///
    /// # Panics
    /// If the region is shorter, or someone else has a view of it.
    pub(crate) fn whole(mut region: RegionRef, len: usize) -> Self {
        assert!(region.is_unique(), "a region is given out to one view at a time");
        assert!(len <= region.len());
        let start = region.start();
        Self { owner: Owner::Region(region), start, len }
    }

    /// A view of foreign memory.
    ///
    /// # Safety
    /// `ptr..ptr+len` belongs to `owner`'s memory, `ptr` is derived from a pointer that may access all of that
    /// memory, and no other `IoBuf` over these bytes exists. Nobody else makes or uses a Rust reference to the bytes
    /// while the view lives. (A guest may change its own memory under the view as any device's memory, or name the same
    /// bytes in two requests at once: they are then whatever they happen to be.)
    pub unsafe fn from_memory(owner: Arc<dyn IoMemory>, ptr: *mut u8, len: usize) -> Self {
        match NonNull::new(ptr) {
            Some(start) if len > 0 => Self { owner: Owner::Foreign(owner), start, len },
            _ => Self::empty(),
        }
    }

    /// A view of bytes that a caller lends.
    ///
    /// # Safety
    /// As of [`IoBuf::from_memory`], with the lender as the owner.
    pub(crate) unsafe fn lent(lender: Arc<Lender>, ptr: *mut u8, len: usize) -> Self {
        match NonNull::new(ptr) {
            Some(start) if len > 0 => Self { owner: Owner::Lent(lender), start, len },
            _ => Self::empty(),
        }
    }

    /// The same, of bytes that are only read.
    ///
    /// # Safety
    /// As of [`IoBuf::from_memory`], but that others may read the bytes as well, and nobody may change them.
    pub(crate) unsafe fn lent_to_read(lender: Arc<Lender>, ptr: *const u8, len: usize) -> Self {
        match NonNull::new(ptr.cast_mut()) {
            Some(start) if len > 0 => Self { owner: Owner::LentToRead(lender), start, len },
            _ => Self::empty(),
        }
    }

    /// Whether the bytes must not be changed.
    pub(crate) fn is_read_only(&self) -> bool {
        matches!(self.owner, Owner::LentToRead(_))
    }

    /// Bytes in the view.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the view is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: the owner keeps `len` initialised bytes at `start` alive, and only this view accesses them.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    /// The bytes, to change.
    ///
    /// # Panics
    /// If they were lent to be read only ([`crate::lend`]).
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        assert!(!self.is_read_only(), "bytes that were lent to be read are not to be changed");
        // SAFETY: as in `as_slice`; `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }

    /// Cuts off and returns the first `at` bytes.
    ///
    /// # Panics
    /// If `at > len`.
    pub fn split_to(&mut self, at: usize) -> IoBuf {
        assert!(at <= self.len, "cannot split {at} bytes off a buffer of {}", self.len);
        if at == 0 {
            return Self::empty();
        }
        if at == self.len {
            return std::mem::replace(self, Self::empty());
        }
        let head = Self { owner: self.owner.share(), start: self.start, len: at };
        // SAFETY: `at < len`, so the pointer stays inside the view.
        self.start = unsafe { self.start.add(at) };
        self.len -= at;
        head
    }

    /// Joins `tail` to the end if it directly follows in the same memory, else gives it back.
    pub fn unsplit(&mut self, tail: IoBuf) -> Result<(), IoBuf> {
        if tail.is_empty() {
            return Ok(());
        }
        if self.is_empty() {
            *self = tail;
            return Ok(());
        }
        // An address of one past the end may equal the start of another owner's memory: same owner is required.
        if self.start.as_ptr().wrapping_add(self.len) == tail.start.as_ptr()
            && self.owner.is_same(&tail.owner)
        {
            self.len += tail.len;
            return Ok(());
        }
        Err(tail)
    }

    /// Address of the first byte.
    pub fn as_ptr(&self) -> *const u8 {
        self.start.as_ptr()
    }

    /// Address of the first byte, for the kernel: to write to, unless the bytes are read only (`Worker::operate` sees to
    /// that).
    pub(crate) fn as_mut_ptr(&mut self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// The region below, if this crate allocated it.
    #[cfg(feature = "io-uring")]
    pub(crate) fn region(&self) -> Option<&Region> {
        match &self.owner {
            Owner::Region(region) => Some(region),
            Owner::Nobody | Owner::Foreign(_) | Owner::Lent(_) | Owner::LentToRead(_) => None,
        }
    }
}

impl fmt::Debug for IoBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "IoBuf({:p}+{})", self.start, self.len)
    }
}

/// A list of buffers that one vectored operation reads into or writes from, in order.
#[derive(Debug)]
pub struct IoBufs(pub(crate) SmallVec<[IoBuf; 2]>);

/// The buffers of [`IoBufs`], one after the other.
#[derive(Debug)]
pub struct IoBufsIntoIter(smallvec::IntoIter<[IoBuf; 2]>);

impl Iterator for IoBufsIntoIter {
    type Item = IoBuf;
    fn next(&mut self) -> Option<IoBuf> {
        self.0.next()
    }
    fn size_hint(&self) -> (usize, Option<usize>) {
        self.0.size_hint()
    }
}

impl ExactSizeIterator for IoBufsIntoIter {}

impl IntoIterator for IoBufs {
    type Item = IoBuf;
    type IntoIter = IoBufsIntoIter;
    fn into_iter(self) -> IoBufsIntoIter {
        IoBufsIntoIter(self.0.into_iter())
    }
}

/// Each buffer stays by itself, neighbours in memory too.
impl FromIterator<IoBuf> for IoBufs {
    fn from_iter<I: IntoIterator<Item = IoBuf>>(bufs: I) -> Self {
        Self(bufs.into_iter().collect())
    }
}

impl From<IoBuf> for IoBufs {
    fn from(buf: IoBuf) -> Self {
        let mut v = SmallVec::new();
        v.push(buf);
        Self(v)
    }
}

impl IoBufs {
    /// No buffers.
    pub fn new() -> Self {
        Self(SmallVec::new())
    }

    /// The buffers, in order.
    pub fn parts(&self) -> &[IoBuf] {
        &self.0
    }

    /// The buffers, in order, to be changed.
    pub fn parts_mut(&mut self) -> &mut [IoBuf] {
        &mut self.0
    }

    /// Appends one buffer, which stays by itself. [`Self::push`] joins neighbours in memory.
    pub fn push_part(&mut self, part: IoBuf) {
        self.0.push(part);
    }

    /// Drops all buffers; the list keeps its room.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// Takes the last buffer away.
    pub fn pop_part(&mut self) -> Option<IoBuf> {
        self.0.pop()
    }

    /// Bytes in all buffers.
    pub fn len(&self) -> usize {
        self.0.iter().map(IoBuf::len).sum()
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(IoBuf::is_empty)
    }

    /// Cuts off and returns the first `at` bytes.
    ///
    /// # Panics
    /// If `at > len`.
    pub fn split_to(&mut self, at: usize) -> IoBufs {
        let mut left = at;
        let mut whole = 0;
        for buf in &self.0 {
            if buf.len() > left {
                break;
            }
            left -= buf.len();
            whole += 1;
        }
        let mut head = IoBufs(self.0.drain(..whole).collect());
        if left > 0 {
            let cut = self.0.first_mut().expect("cannot split more bytes off than there are");
            head.0.push(cut.split_to(left));
        }
        head
    }

    /// Appends `tail`, joining neighbours in memory.
    pub fn append(&mut self, tail: IoBufs) {
        for buf in tail.0 {
            self.push(buf);
        }
    }

    /// Appends one buffer, joining it with the last where they are neighbours in memory.
    pub fn push(&mut self, tail: IoBuf) {
        if tail.is_empty() {
            return;
        }
        match self.0.last_mut() {
            Some(last) => {
                if let Err(tail) = last.unsplit(tail) {
                    self.0.push(tail);
                }
            }
            None => self.0.push(tail),
        }
    }

    /// Fills `len` bytes from `offset` with `byte`.
    ///
    /// # Panics
    /// If the range is not within the buffers.
    pub fn fill(&mut self, offset: usize, len: usize, byte: u8) {
        self.for_each_mut(offset, len, |part, _| part.fill(byte));
    }

    /// Copies `src` into the buffers at `offset`.
    ///
    /// # Panics
    /// If the range is not within the buffers.
    pub fn copy_from(&mut self, offset: usize, src: &[u8]) {
        self.for_each_mut(offset, src.len(), |part, at| part.copy_from_slice(&src[at..at + part.len()]));
    }

    /// Copies from the buffers at `offset` into `dst`.
    ///
    /// # Panics
    /// If the range is not within the buffers.
    pub fn copy_to(&self, offset: usize, dst: &mut [u8]) {
        let mut skip = offset;
        let mut done = 0;
        for buf in &self.0 {
            if done == dst.len() {
                return;
            }
            if skip >= buf.len() {
                skip -= buf.len();
                continue;
            }
            let take = (buf.len() - skip).min(dst.len() - done);
            dst[done..done + take].copy_from_slice(&buf.as_slice()[skip..skip + take]);
            done += take;
            skip = 0;
        }
        assert_eq!(done, dst.len(), "range outside the buffers");
    }

    /// Whether all bytes are zero.
    pub fn is_zero(&self) -> bool {
        self.0.iter().all(|buf| is_zero(buf.as_slice()))
    }

    /// Calls `f` with the parts of the range and how many bytes of it came before.
    fn for_each_mut(&mut self, offset: usize, len: usize, mut f: impl FnMut(&mut [u8], usize)) {
        let mut skip = offset;
        let mut done = 0;
        for buf in &mut self.0 {
            if done == len {
                return;
            }
            if skip >= buf.len() {
                skip -= buf.len();
                continue;
            }
            let take = (buf.len() - skip).min(len - done);
            f(&mut buf.as_mut_slice()[skip..skip + take], done);
            done += take;
            skip = 0;
        }
        assert_eq!(done, len, "range outside the buffers");
    }
}

impl Default for IoBufs {
    fn default() -> Self {
        Self::new()
    }
}

/// Whether all bytes are zero; looks at the first few alone before it reads on, since most data differs early.
fn is_zero(bytes: &[u8]) -> bool {
    // Wide enough for the compiler to use vector instructions, small enough to stop soon.
    const STEP: usize = 256;
    let (chunks, rest) = bytes.as_chunks::<STEP>();
    chunks.iter().all(|chunk| chunk.iter().fold(0, |all, byte| all | byte) == 0)
        && rest.iter().all(|&byte| byte == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbered(len: usize) -> IoBuf {
        IoBuf::copy_of(&(0..len).map(|i| (i % 251) as u8).collect::<Vec<_>>())
    }

    #[test]
    fn own_buffers_are_page_aligned_and_zero() {
        for len in [1, 511, 4096, 4097, 1 << 20] {
            let buf = IoBuf::zeroed(len);
            assert_eq!(buf.as_ptr() as usize % PAGE, 0);
            assert_eq!(buf.len(), len);
            assert!(buf.as_slice().iter().all(|&b| b == 0));
        }
        assert!(IoBuf::zeroed(0).as_slice().is_empty());
    }

    #[test]
    fn split_views_are_disjoint_and_join_again() {
        let mut tail = numbered(1000);
        let mut head = tail.split_to(300);
        head.as_mut_slice().fill(1);
        tail.as_mut_slice().fill(2);
        assert!(head.as_slice().iter().all(|&b| b == 1));
        let mut middle = tail.split_to(100);
        // Not neighbours: given back.
        let tail = head.unsplit(tail).unwrap_err();
        middle.unsplit(tail).unwrap();
        head.unsplit(middle).unwrap();
        assert_eq!(head.len(), 1000);
        assert_eq!(head.as_slice().iter().map(|&b| u32::from(b)).sum::<u32>(), 300 + 2 * 700);
    }

    #[test]
    fn views_of_different_memory_do_not_join() {
        let mut a = numbered(4096);
        assert!(a.unsplit(numbered(4096)).is_err());
        assert!(a.unsplit(IoBuf::zeroed(0)).is_ok());
    }

    #[test]
    fn a_view_may_be_dropped_and_changed_on_another_thread() {
        let mut tail = numbered(8192);
        let mut head = tail.split_to(4096);
        let thread = std::thread::spawn(move || {
            head.as_mut_slice().fill(7);
            head
        });
        tail.as_mut_slice().fill(8);
        let mut head = thread.join().unwrap();
        head.unsplit(tail).unwrap();
        assert_eq!((head.as_slice()[4095], head.as_slice()[4096]), (7, 8));
    }

    struct Leased(std::cell::UnsafeCell<Vec<u8>>);
    // SAFETY: the test reaches the bytes only through views.
    unsafe impl Sync for Leased {}
    // SAFETY: the vector is neither moved nor resized while the value lives.
    unsafe impl IoMemory for Leased {}

    #[test]
    fn foreign_memory_is_used_in_place() {
        let owner = Arc::new(Leased(std::cell::UnsafeCell::new(vec![0; 100])));
        // SAFETY: the vector lives as long as `owner`; nothing else refers to it.
        let start = unsafe { (*owner.0.get()).as_mut_ptr() };
        // SAFETY: the whole of the owner's memory, once.
        let mut view = unsafe { IoBuf::from_memory(Arc::clone(&owner) as Arc<dyn IoMemory>, start, 100) };
        let mut head = view.split_to(40);
        head.as_mut_slice().fill(9);
        assert_eq!(head.as_ptr(), start.cast_const());
        head.unsplit(view).unwrap();
        drop(head);
        assert_eq!(Arc::strong_count(&owner), 1);
        // SAFETY: no view is left.
        assert_eq!(unsafe { (&*owner.0.get())[39..41].to_vec() }, [9, 0]);
    }

    #[test]
    fn lists_behave_as_one_run_of_bytes() {
        let mut model: Vec<u8> = (0..900).map(|i| (i % 251) as u8).collect();
        let mut bufs = IoBufs::new();
        for part in model.chunks(250) {
            bufs.push(IoBuf::copy_of(part));
        }
        assert_eq!((bufs.len(), bufs.0.len()), (900, 4));
        bufs.fill(200, 400, 0);
        model[200..600].fill(0);
        bufs.copy_from(500, &[1; 300]);
        model[500..800].fill(1);
        for cut in [0, 100, 250, 600, 900] {
            let mut head = bufs.split_to(cut);
            assert_eq!((head.len(), bufs.len()), (cut, 900 - cut));
            head.append(bufs);
            bufs = head;
            assert_eq!(bufs.0.len(), 4, "neighbours join again");
        }
        let mut out = vec![0; 700];
        bufs.copy_to(150, &mut out);
        assert_eq!(out, model[150..850]);
        assert!(!bufs.is_zero());
        bufs.fill(0, 900, 0);
        assert!(bufs.is_zero());
        bufs.fill(899, 1, 1);
        assert!(!bufs.is_zero());
    }

    #[test]
    #[should_panic(expected = "range outside the buffers")]
    fn a_range_outside_is_refused() {
        IoBufs::from(IoBuf::zeroed(10)).fill(5, 6, 1);
    }
}
