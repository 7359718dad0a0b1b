//! Memory for I/O: page-aligned, exclusively owned views that can be split and joined without copying.

use smallvec::SmallVec;
use std::sync::Arc;

/// Alignment in bytes of every buffer that this crate allocates.
pub const PAGE: usize = 4096;

/// Memory that somebody else owns and that I/O may use in place (a guest's memory, a caller's buffer).
///
/// # Safety
/// While the value lives, the memory of every [`IoBuf`] made from it with [`IoBuf::from_memory`] stays mapped,
/// readable and writable.
pub unsafe trait IoMemory: Send + Sync + 'static {}

/// An exclusive view of bytes. The bytes live as long as some view of them does; views that were split from one
/// buffer never overlap.
pub struct IoBuf {
    _todo: (),
}

impl IoBuf {
    /// A page-aligned buffer of `len` bytes, all zero.
    pub fn zeroed(len: usize) -> Self {
        todo!("{len}")
    }
    /// A page-aligned copy of `bytes`.
    pub fn copy_of(bytes: &[u8]) -> Self {
        todo!("{}", bytes.len())
    }
    /// A view of foreign memory.
    ///
    /// # Safety
    /// `ptr..ptr+len` belongs to `owner`'s memory and no other `IoBuf` over it exists.
    pub unsafe fn from_memory(owner: Arc<dyn IoMemory>, ptr: *mut u8, len: usize) -> Self {
        todo!("{:?}", (Arc::as_ptr(&owner), ptr, len))
    }
    /// Bytes in the view.
    pub fn len(&self) -> usize {
        todo!()
    }
    /// Whether the view is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        todo!()
    }
    /// The bytes, to change.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        todo!()
    }
    /// Cuts off and returns the first `at` bytes. # Panics if `at > len`.
    pub fn split_to(&mut self, at: usize) -> IoBuf {
        todo!("{at}")
    }
    /// Joins `tail` to the end if it directly follows in the same memory, else gives it back.
    pub fn unsplit(&mut self, tail: IoBuf) -> Result<(), IoBuf> {
        Err(tail)
    }
    /// Address of the first byte.
    pub fn as_ptr(&self) -> *const u8 {
        todo!()
    }
}

/// A list of buffers that one vectored operation reads into or writes from, in order.
pub struct IoBufs(pub SmallVec<[IoBuf; 2]>);

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
    /// Bytes in all buffers.
    pub fn len(&self) -> usize {
        self.0.iter().map(IoBuf::len).sum()
    }
    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Cuts off and returns the first `at` bytes.
    pub fn split_to(&mut self, at: usize) -> IoBufs {
        todo!("{at}")
    }
    /// Appends `tail`, joining neighbours in memory.
    pub fn append(&mut self, tail: IoBufs) {
        todo!("{}", tail.len())
    }
    /// Appends one buffer, joining it with the last where they are neighbours in memory.
    pub fn push(&mut self, tail: IoBuf) {
        todo!("{}", tail.len())
    }
    /// Fills `len` bytes from `offset` with `byte`.
    pub fn fill(&mut self, offset: usize, len: usize, byte: u8) {
        todo!("{:?}", (offset, len, byte))
    }
    /// Copies `src` into the buffers at `offset`.
    pub fn copy_from(&mut self, offset: usize, src: &[u8]) {
        todo!("{:?}", (offset, src.len()))
    }
    /// Copies from the buffers at `offset` into `dst`.
    pub fn copy_to(&self, offset: usize, dst: &mut [u8]) {
        todo!("{:?}", (offset, dst.len()))
    }
    /// Whether all bytes are zero.
    pub fn is_zero(&self) -> bool {
        todo!()
    }
}

impl Default for IoBufs {
    fn default() -> Self {
        Self::new()
    }
}
