//! Memory for keys: locked into RAM, kept out of core dumps and of children, wiped before it is given back.

use crate::memory::PAGE;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mlock, mmap_anonymous, munmap};
use std::fmt;
use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::{self, NonNull};
use zeroize::Zeroize;

/// Does what leaves keys in the last `BYTES` of the stack, such as to derive one, to expand it or to use it, and wipes them.
///
/// `work` returns no secret by value: its result, and what it borrows, lie outside of what is wiped.
pub fn on_wiped_stack<const BYTES: usize, T>(work: impl FnOnce() -> T) -> T {
    let result = below(work);
    wipe::<BYTES>();
    result
}

/// Runs `work` in frames that begin where that of [`wipe`] does.
#[inline(never)]
fn below<T>(work: impl FnOnce() -> T) -> T {
    work()
}

#[inline(never)]
fn wipe<const BYTES: usize>() {
    let bytes = [0_u8; BYTES];
    // Somebody could look at them, for all that the compiler knows.
    std::hint::black_box(&bytes);
}

/// A private mapping of whole pages. Zeroes at first.
struct LockedPages {
    start: NonNull<u8>,
    /// Bytes, whole pages.
    len: usize,
    is_locked: bool,
}

// SAFETY: an address and a size, with no access by itself.
unsafe impl Send for LockedPages {}
// SAFETY: as above.
unsafe impl Sync for LockedPages {}

impl LockedPages {
    fn new(len: usize) -> io::Result<Self> {
        let len = len.max(1).checked_next_multiple_of(PAGE).ok_or(io::ErrorKind::OutOfMemory)?;
        // SAFETY: a new mapping, anywhere.
        let start = unsafe {
            mmap_anonymous(ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
        }?;
        let Some(start) = NonNull::new(start.cast::<u8>()) else {
            return Err(io::ErrorKind::OutOfMemory.into());
        };
        let mut pages = Self { start, len, is_locked: false };
        // SAFETY: our own mapping; the advice changes no byte of this process.
        unsafe { madvise(start.as_ptr().cast(), len, Advice::LinuxDontDump) }?;
        // Kernels before 4.14 don't know it, and no child of this program uses the memory of its parent.
        // SAFETY: as above.
        let _ = unsafe { madvise(start.as_ptr().cast(), len, Advice::LinuxWipeOnFork) };
        // SAFETY: our own mapping.
        pages.is_locked = unsafe { mlock(start.as_ptr().cast(), len) }.is_ok();
        Ok(pages)
    }
}

impl Drop for LockedPages {
    fn drop(&mut self) {
        // SAFETY: our own mapping, readable and writable, whose owner gives it up.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }.zeroize();
        // SAFETY: our own mapping, which nobody uses any more.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// Secret bytes, such as a key or a passphrase, in memory of their own.
///
/// The memory is not in core dumps, and not in children of `fork`. It is locked where the limit of the process allows
/// (`RLIMIT_MEMLOCK`; see [`LockedBytes::is_locked`]), so that it does not reach a swap device. It is wiped when it is dropped.
pub struct LockedBytes {
    pages: LockedPages,
    len: usize,
}

impl LockedBytes {
    /// `len` zero bytes.
    ///
    /// # Errors
    /// The system gives no memory, or can't keep it out of core dumps.
    pub fn zeroed(len: usize) -> io::Result<Self> {
        Ok(Self { pages: LockedPages::new(len)?, len })
    }

    /// A copy of `bytes`, which the caller wipes.
    ///
    /// # Errors
    /// As [`LockedBytes::zeroed`].
    pub fn copy_of(bytes: &[u8]) -> io::Result<Self> {
        let mut locked = Self::zeroed(bytes.len())?;
        locked.copy_from_slice(bytes);
        Ok(locked)
    }

    /// Whether the memory is locked. If not, the limit of locked memory was reached.
    pub fn is_locked(&self) -> bool {
        self.pages.is_locked
    }
}

impl Deref for LockedBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `len` bytes of our mapping, borrowed as `self` is.
        unsafe { std::slice::from_raw_parts(self.pages.start.as_ptr(), self.len) }
    }
}

impl DerefMut for LockedBytes {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above; `self` is borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.pages.start.as_ptr(), self.len) }
    }
}

/// Says the length alone.
impl fmt::Debug for LockedBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LockedBytes({} bytes)", self.len)
    }
}

/// A value that holds secrets, such as the schedule of a key, in memory as that of [`LockedBytes`].
pub struct LockedBox<T> {
    pages: LockedPages,
    value: NonNull<T>,
}

// SAFETY: owns its value, as a `Box` does.
unsafe impl<T: Send> Send for LockedBox<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for LockedBox<T> {}

impl<T> LockedBox<T> {
    /// Moves a value into locked memory. What the move leaves on the stack is the caller's.
    ///
    /// # Errors
    /// As [`LockedBytes::zeroed`].
    pub fn new(value: T) -> io::Result<Self> {
        const { assert!(align_of::<T>() <= PAGE, "a mapping begins at a page") };
        let pages = LockedPages::new(size_of::<T>())?;
        let place = pages.start.cast::<T>();
        // SAFETY: the mapping has room for a `T` and begins at a page, which is as aligned as any `T` here.
        unsafe { place.write(value) };
        Ok(Self { pages, value: place })
    }

    /// Whether the memory is locked. If not, the limit of locked memory was reached.
    pub fn is_locked(&self) -> bool {
        self.pages.is_locked
    }
}

impl<T> Deref for LockedBox<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: written in `new`, dropped in `drop` alone.
        unsafe { self.value.as_ref() }
    }
}

impl<T> Drop for LockedBox<T> {
    fn drop(&mut self) {
        // SAFETY: as above; the pages are given back after it.
        unsafe { ptr::drop_in_place(self.value.as_ptr()) };
    }
}

/// Says nothing of the value.
impl<T> fmt::Debug for LockedBox<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LockedBox")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The flags that the kernel has for the mapping of an address (`dd`: not dumped, `lo`: locked, `wf`: wiped on fork).
    fn flags_of(address: usize) -> Vec<String> {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut is_ours = false;
        for line in maps.lines() {
            let range = line.split(' ').next().and_then(|range| range.split_once('-'));
            if let Some((from, to)) = range
                && let (Ok(from), Ok(to)) = (usize::from_str_radix(from, 16), usize::from_str_radix(to, 16))
            {
                is_ours = (from..to).contains(&address);
            }
            if let (true, Some(flags)) = (is_ours, line.strip_prefix("VmFlags:")) {
                return flags.split_whitespace().map(str::to_owned).collect();
            }
        }
        Vec::new()
    }

    #[test]
    fn keys_are_not_dumped_and_locked_where_the_limit_allows() {
        let key = LockedBytes::copy_of(b"secret").unwrap();
        assert_eq!(&*key, b"secret");
        let flags = flags_of(key.as_ptr() as usize);
        for flag in ["dd", "wf"] {
            assert!(flags.iter().any(|f| f == flag), "{flag} in {flags:?}");
        }
        assert_eq!(flags.iter().any(|f| f == "lo"), key.is_locked());
        assert_eq!(format!("{key:?}"), "LockedBytes(6 bytes)");
    }

    #[test]
    fn values_live_in_locked_pages_and_are_dropped_once() {
        struct Counted<'a>(&'a std::cell::Cell<u32>, u64);
        impl Drop for Counted<'_> {
            fn drop(&mut self) {
                self.0.set(self.0.get() + 1);
            }
        }
        let drops = std::cell::Cell::new(0);
        let value = LockedBox::new(Counted(&drops, 7)).unwrap();
        assert_eq!(value.1, 7);
        assert!(flags_of(ptr::from_ref(&*value) as usize).iter().any(|f| f == "dd"));
        drop(value);
        assert_eq!(drops.get(), 1);
    }

    const WORD: u64 = 0x9bad_c0de_5ec3_e7a1;

    /// Leaves the word on the stack, deeper than what reads it afterwards, and returns its address.
    #[inline(never)]
    fn leave_word() -> u64 {
        let mut place = [0; 2048];
        place[0] = std::hint::black_box(WORD);
        std::hint::black_box(&place);
        ptr::from_ref(&place[0]) as u64
    }

    #[test]
    fn what_was_on_the_stack_is_wiped() {
        let memory = std::fs::File::open("/proc/self/mem").unwrap();
        let word_at = |address: u64| {
            let mut bytes = [0; 8];
            std::os::unix::fs::FileExt::read_exact_at(&memory, &mut bytes, address).unwrap();
            u64::from_ne_bytes(bytes)
        };
        assert_eq!(word_at(leave_word()), WORD, "the test would see nothing");
        assert_ne!(word_at(on_wiped_stack::<65536, _>(leave_word)), WORD);
    }

    #[test]
    fn an_empty_key_has_memory_too() {
        assert!(LockedBytes::zeroed(0).unwrap().is_empty());
    }

    #[test]
    fn a_length_beyond_the_address_space_is_an_error() {
        assert!(LockedBytes::zeroed(usize::MAX).is_err());
        assert!(LockedBytes::zeroed(isize::MAX as usize).is_err());
    }
}
