//! Page-aligned allocations, the ground below buffers.

use std::alloc::{self, Layout};
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Alignment in bytes of every buffer that this crate allocates.
pub const PAGE: usize = 4096;

/// A page-aligned allocation. It hands out its start only; who may touch which bytes is settled by the views on it.
pub(crate) struct Region {
    start: NonNull<u8>,
    layout: Layout,
    /// Where it goes when its last view is dropped; `None` while it lies there.
    home: Option<Arc<FreeList>>,
}

// SAFETY: a region is an address and a size; it never reads or writes its bytes after its construction.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// `len` zero bytes, rounded up to whole pages.
    ///
    /// # Panics
    /// If `len` is 0 or exceeds the address space.
    pub(crate) fn zeroed(len: usize) -> RegionRef {
        assert!(len > 0);
        let layout = len
            .checked_next_multiple_of(PAGE)
            .and_then(|len| Layout::from_size_align(len, PAGE).ok())
            .expect("the buffer does not fit the address space");
        // SAFETY: the layout's size is not 0.
        let start = unsafe { alloc::alloc_zeroed(layout) };
        let Some(start) = NonNull::new(start) else { alloc::handle_alloc_error(layout) };
        RegionRef(ManuallyDrop::new(Arc::new(Self { start, layout, home: None })))
    }

    /// A page-aligned address for views of no bytes.
    pub(crate) fn dangling() -> NonNull<u8> {
        #[repr(align(4096))]
        struct Aligned;
        NonNull::<Aligned>::dangling().cast()
    }

    /// The first byte.
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Bytes.
    pub(crate) fn len(&self) -> usize {
        self.layout.size()
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: allocated in `zeroed` with this layout; the last view is gone, since views hold the `Arc`.
        unsafe { alloc::dealloc(self.start.as_ptr(), self.layout) }
    }
}

/// A counted reference to a region. The last one to go returns the region to the free list that it came from.
pub(crate) struct RegionRef(ManuallyDrop<Arc<Region>>);

impl RegionRef {
    /// Whether nobody else refers to the region.
    pub(crate) fn is_unique(&mut self) -> bool {
        Arc::get_mut(&mut self.0).is_some()
    }

    /// Whether both refer to one region.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Clone for RegionRef {
    fn clone(&self) -> Self {
        Self(ManuallyDrop::new(Arc::clone(&self.0)))
    }
}

impl Deref for RegionRef {
    type Target = Region;
    fn deref(&self) -> &Region {
        &self.0
    }
}

impl Drop for RegionRef {
    fn drop(&mut self) {
        // SAFETY: `drop` runs once and nothing uses the field after it.
        let mut region = unsafe { ManuallyDrop::take(&mut self.0) };
        // When two references go at the same time, both may see each other here: the region is freed then instead
        // of kept, which is only slower.
        if let Some(home) = Arc::get_mut(&mut region).and_then(|region| region.home.take()) {
            home.put(region);
        }
    }
}

/// Sizes of kept regions: powers of two from one page (class 0) to 4 MiB.
const CLASSES: usize = 11;

/// Regions for reuse, by size. Shared by the buffers that were taken from it, which may die on any thread.
pub(crate) struct FreeList {
    classes: [Mutex<Vec<Arc<Region>>>; CLASSES],
    /// Bytes that lie in `classes`.
    kept: AtomicUsize,
    limit: usize,
}

impl FreeList {
    /// A free list that keeps at most `limit` bytes.
    pub(crate) fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self { classes: Default::default(), kept: AtomicUsize::new(0), limit })
    }

    /// A region of at least `len` bytes with unspecified, initialised content.
    pub(crate) fn take(self: &Arc<Self>, len: usize) -> RegionRef {
        let class = class_of(len);
        if class >= CLASSES {
            return Region::zeroed(len);
        }
        let kept = self.classes[class].lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut region = if let Some(region) = kept {
            self.kept.fetch_sub(region.len(), Ordering::Relaxed);
            RegionRef(ManuallyDrop::new(region))
        } else {
            Region::zeroed(PAGE << class)
        };
        if let Some(region) = Arc::get_mut(&mut region.0) {
            region.home = Some(Arc::clone(self));
        }
        region
    }

    fn put(&self, region: Arc<Region>) {
        let len = region.len();
        if self.kept.fetch_add(len, Ordering::Relaxed) + len > self.limit {
            self.kept.fetch_sub(len, Ordering::Relaxed);
            return;
        }
        self.classes[class_of(len)].lock().unwrap_or_else(PoisonError::into_inner).push(region);
    }
}

/// The class whose regions hold `len` bytes; `CLASSES` or more if none does.
fn class_of(len: usize) -> usize {
    len.div_ceil(PAGE)
        .max(1)
        .checked_next_power_of_two()
        .map_or(CLASSES, |pages| pages.trailing_zeros() as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_hold_their_lengths() {
        for (len, class) in [(1, 0), (4096, 0), (4097, 1), (65536, 4), (4 << 20, 10), ((4 << 20) + 1, 11)] {
            assert_eq!(class_of(len), class, "{len}");
        }
        assert!(class_of(usize::MAX) >= CLASSES);
    }

    #[test]
    fn a_region_comes_back_when_its_last_reference_goes() {
        let list = FreeList::new(1 << 20);
        let first = list.take(5000);
        let address = first.start();
        let second = first.clone();
        drop(first);
        assert_eq!(list.kept.load(Ordering::Relaxed), 0);
        std::thread::spawn(move || drop(second)).join().unwrap();
        assert_eq!(list.kept.load(Ordering::Relaxed), 8192);
        assert_eq!(list.take(8192).start(), address);
    }

    #[test]
    fn no_more_is_kept_than_allowed() {
        let list = FreeList::new(8192);
        let regions: Vec<_> = (0..10).map(|_| list.take(4096)).collect();
        drop(regions);
        assert_eq!(list.kept.load(Ordering::Relaxed), 8192);
        drop(list.take(64 << 20));
        assert_eq!(list.kept.load(Ordering::Relaxed), 8192);
    }
}
