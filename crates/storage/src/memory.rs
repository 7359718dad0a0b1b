//! Page-aligned allocations, the ground below buffers.

use crate::sync::Mutex;
use std::alloc::{self, Layout};
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Alignment in bytes of every buffer that this crate allocates.
pub const PAGE: usize = 4096;

/// A piece of memory that a ring has registered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FixedBuffer {
    /// Number of the ring.
    pub(crate) ring: u64,
    /// Index in the ring's table.
    pub(crate) index: u16,
}

/// A page-aligned allocation.
struct Allocation {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: an allocation is an address and a size; it never touches its bytes after its construction.
unsafe impl Send for Allocation {}
// SAFETY: as above.
unsafe impl Sync for Allocation {}

impl Allocation {
    /// `len` zero bytes, rounded up to whole pages.
    ///
    /// # Panics
    /// If `len` is 0 or exceeds the address space.
    fn zeroed(len: usize) -> Self {
        assert!(len > 0);
        let layout = len
            .checked_next_multiple_of(PAGE)
            .and_then(|len| Layout::from_size_align(len, PAGE).ok())
            .expect("the buffer does not fit the address space");
        // SAFETY: the layout's size is not 0.
        let start = unsafe { alloc::alloc_zeroed(layout) };
        let Some(start) = NonNull::new(start) else { alloc::handle_alloc_error(layout) };
        Self { start, layout }
    }

    /// [`HUGE`] zero bytes that the kernel is asked to back by one huge page. A device takes a limited number of
    /// segments in a request; a buffer of scattered pages is split where one of a huge page is not.
    fn huge() -> Self {
        let layout = Layout::from_size_align(HUGE, HUGE).expect("a power of two");
        // SAFETY: the layout's size is not 0.
        let start = unsafe { alloc::alloc(layout) };
        let Some(start) = NonNull::new(start) else { alloc::handle_alloc_error(layout) };
        // Before the first touch. Where the kernel has no huge pages, small ones do.
        // SAFETY: the range is our own allocation, and the advice changes no content.
        let _ =
            unsafe { rustix::mm::madvise(start.as_ptr().cast(), HUGE, rustix::mm::Advice::LinuxHugepage) };
        // SAFETY: `alloc` gave at least that many bytes.
        unsafe { start.as_ptr().write_bytes(0, HUGE) };
        Self { start, layout }
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // SAFETY: allocated in `zeroed` with this layout; the regions in it, and so all views, are gone.
        unsafe { alloc::dealloc(self.start.as_ptr(), self.layout) }
    }
}

/// A page-aligned run of bytes: a whole allocation, or a piece of a slab that many share. It hands out its start only;
/// who may touch which bytes is settled by the views on it.
pub(crate) struct Region {
    start: NonNull<u8>,
    len: usize,
    /// Set if the memory is registered with a ring; then the allocation is a slab's.
    fixed: Option<FixedBuffer>,
    /// Keeps the bytes; never read.
    _memory: Arc<Allocation>,
    /// Where it goes when its last view is dropped; `None` while it lies there.
    home: Option<Arc<FreeList>>,
}

// SAFETY: as for `Allocation`.
unsafe impl Send for Region {}
// SAFETY: as for `Allocation`.
unsafe impl Sync for Region {}

impl Region {
    /// `len` zero bytes, rounded up to whole pages, of an allocation of their own.
    pub(crate) fn zeroed(len: usize) -> RegionRef {
        let memory = Arc::new(Allocation::zeroed(len));
        let region =
            Self { start: memory.start, len: memory.layout.size(), fixed: None, _memory: memory, home: None };
        RegionRef(ManuallyDrop::new(Arc::new(region)))
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
        self.len
    }

    /// How a ring knows the memory.
    #[cfg(feature = "io-uring")]
    pub(crate) fn fixed(&self) -> Option<FixedBuffer> {
        self.fixed
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
/// Regions up to 64 KiB are cut from slabs, which a ring can register. For larger ones, what that spares is small
/// beside the transfer.
const SLAB_CLASSES: usize = 5;
/// Regions that a free list gives before it makes a slab. Who needs few, as a command that looks at an image, is spared the
/// memory: a slab is touched whole when it is registered.
const BEFORE_SLABS: usize = 16;
/// Bytes of a slab.
const SLAB: usize = 512 << 10;
/// Bytes of a huge page, from which regions between the slabs' and itself are cut.
const HUGE: usize = 2 << 20;

/// Regions for reuse, by size. Shared by the buffers that were taken from it, which may die on any thread.
pub(crate) struct FreeList {
    /// Registered regions, which are taken first.
    pieces: [Mutex<Vec<Arc<Region>>>; SLAB_CLASSES],
    /// Regions with an allocation of their own.
    wholes: [Mutex<Vec<Arc<Region>>>; CLASSES],
    /// Bytes of slabs that may still be made.
    slabs_left: AtomicUsize,
    /// Regions that are still to be given before the first slab.
    before_slabs: AtomicUsize,
    /// Bytes that lie in `wholes`.
    kept: AtomicUsize,
    limit: usize,
}

impl FreeList {
    /// A free list that keeps at most `limit` bytes, at most half of them in slabs.
    pub(crate) fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self {
            pieces: Default::default(),
            wholes: Default::default(),
            slabs_left: AtomicUsize::new(limit / 2),
            before_slabs: AtomicUsize::new(BEFORE_SLABS),
            kept: AtomicUsize::new(0),
            limit,
        })
    }

    /// A region of at least `len` bytes with unspecified, initialised content. New slabs are shown to `register`.
    pub(crate) fn take(
        self: &Arc<Self>,
        len: usize,
        register: impl FnOnce(*mut u8, usize) -> Option<FixedBuffer>,
    ) -> RegionRef {
        let class = class_of(len);
        if class >= CLASSES {
            return Region::zeroed(len);
        }
        let mut region = match self.pop_piece(class) {
            Some(region) => region,
            None if self.add_slab(class, register) => {
                self.pop_piece(class).unwrap_or_else(|| Region::zeroed(PAGE << class))
            }
            None => self
                .pop_whole(class)
                .or_else(|| self.add_huge_page(class).then(|| self.pop_whole(class))?)
                .unwrap_or_else(|| Region::zeroed(PAGE << class)),
        };
        if let Some(region) = Arc::get_mut(&mut region.0) {
            region.home = Some(Arc::clone(self));
        }
        region
    }

    fn pop_piece(&self, class: usize) -> Option<RegionRef> {
        let piece = self.pieces.get(class)?.lock().pop()?;
        Some(RegionRef(ManuallyDrop::new(piece)))
    }

    fn pop_whole(&self, class: usize) -> Option<RegionRef> {
        let whole = self.wholes[class].lock().pop()?;
        self.kept.fetch_sub(whole.len, Ordering::Relaxed);
        Some(RegionRef(ManuallyDrop::new(whole)))
    }

    /// Cuts a new slab into regions of the class. False if there is to be none, or it could not be registered: then
    /// it would be of no use.
    fn add_slab(&self, class: usize, register: impl FnOnce(*mut u8, usize) -> Option<FixedBuffer>) -> bool {
        if class >= SLAB_CLASSES {
            return false;
        }
        let left = self.slabs_left.load(Ordering::Relaxed);
        if left < SLAB {
            return false;
        }
        // Counts that are lost between threads put the first slab off.
        let before = self.before_slabs.load(Ordering::Relaxed);
        if before > 0 {
            self.before_slabs.store(before - 1, Ordering::Relaxed);
            return false;
        }
        let memory = Arc::new(Allocation::zeroed(SLAB));
        let Some(fixed) = register(memory.start.as_ptr(), SLAB) else {
            self.slabs_left.store(0, Ordering::Relaxed);
            return false;
        };
        self.slabs_left.store(left - SLAB, Ordering::Relaxed);
        self.drop_excess();
        let len = PAGE << class;
        let pieces = (0..SLAB / len).rev().map(|piece| {
            // SAFETY: `piece * len` lies within the slab.
            let start = unsafe { memory.start.add(piece * len) };
            Arc::new(Region { start, len, fixed: Some(fixed), _memory: Arc::clone(&memory), home: None })
        });
        self.pieces[class].lock().extend(pieces);
        true
    }

    /// Cuts a huge page into regions of the class. False if the class is none of those.
    fn add_huge_page(&self, class: usize) -> bool {
        let len = PAGE << class;
        if class < SLAB_CLASSES || len > HUGE {
            return false;
        }
        let memory = Arc::new(Allocation::huge());
        let pieces = (0..HUGE / len).rev().map(|piece| {
            // SAFETY: `piece * len` lies within the huge page.
            let start = unsafe { memory.start.add(piece * len) };
            Arc::new(Region { start, len, fixed: None, _memory: Arc::clone(&memory), home: None })
        });
        self.kept.fetch_add(HUGE, Ordering::Relaxed);
        self.wholes[class].lock().extend(pieces);
        true
    }

    fn put(&self, region: Arc<Region>) {
        let (len, class) = (region.len, class_of(region.len));
        if region.fixed.is_some() {
            self.pieces[class].lock().push(region);
        } else if self.take_room(len) || (class >= SLAB_CLASSES && self.take_room_of_small(len)) {
            self.wholes[class].lock().push(region);
        }
    }

    /// Takes room in `wholes`; false if there is not enough.
    fn take_room(&self, len: usize) -> bool {
        let fits = self.kept.fetch_add(len, Ordering::Relaxed) + len <= self.room();
        if !fits {
            self.kept.fetch_sub(len, Ordering::Relaxed);
        }
        fits
    }

    /// Takes room at the expense of small regions. A large one costs more to have again, and small ones that have an
    /// allocation of their own may lie there for ever, as registered ones are taken first.
    fn take_room_of_small(&self, len: usize) -> bool {
        for wholes in &self.wholes[..SLAB_CLASSES] {
            let dropped = std::mem::take(&mut *wholes.lock());
            self.kept.fetch_sub(dropped.iter().map(|whole| whole.len).sum(), Ordering::Relaxed);
        }
        self.take_room(len)
    }

    /// Drops what lies in `wholes` beyond their room, which a slab has made smaller.
    fn drop_excess(&self) {
        for class in (0..CLASSES).rev() {
            while self.kept.load(Ordering::Relaxed) > self.room() && self.pop_whole(class).is_some() {}
        }
    }

    /// Bytes that may lie in `wholes`: all but the slabs' half, and of that what no slab has taken.
    fn room(&self) -> usize {
        self.limit - self.limit / 2 + self.slabs_left.load(Ordering::Relaxed)
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

    fn unregistered(_: *mut u8, _: usize) -> Option<FixedBuffer> {
        None
    }

    #[test]
    fn a_region_comes_back_when_its_last_reference_goes() {
        let list = FreeList::new(1 << 20);
        let first = list.take(5000, unregistered);
        let address = first.start();
        let second = first.clone();
        drop(first);
        assert_eq!(list.kept.load(Ordering::Relaxed), 0);
        std::thread::spawn(move || drop(second)).join().unwrap();
        assert_eq!(list.kept.load(Ordering::Relaxed), 8192);
        assert_eq!(list.take(8192, unregistered).start(), address);
    }

    #[test]
    fn no_more_is_kept_than_allowed() {
        // No slab fits in half of it.
        let list = FreeList::new(16384);
        let regions: Vec<_> = (0..10).map(|_| list.take(4096, unregistered)).collect();
        drop(regions);
        assert_eq!(list.kept.load(Ordering::Relaxed), 16384);
        drop(list.take(64 << 20, unregistered));
        assert_eq!(list.kept.load(Ordering::Relaxed), 16384);
    }

    #[test]
    fn who_needs_few_regions_is_spared_a_slab() {
        let list = FreeList::new(2 << 20);
        let slabs = std::cell::Cell::new(0u16);
        let take = || {
            list.take(4096, |_, _| {
                slabs.set(slabs.get() + 1);
                Some(FixedBuffer { ring: 1, index: 0 })
            })
        };
        for _ in 0..BEFORE_SLABS {
            assert!(take().fixed.is_none());
        }
        assert_eq!(slabs.get(), 0);
        // From now on, registered memory comes first, one request at a time as well.
        for _ in 0..3 {
            assert!(take().fixed.is_some());
        }
        assert_eq!(slabs.get(), 1);
    }

    #[test]
    fn small_regions_take_no_room_from_large_ones() {
        for small in [BEFORE_SLABS, 3000] {
            let list = FreeList::new(8 << 20);
            let register = |_: *mut u8, _| Some(FixedBuffer { ring: 1, index: 0 });
            drop((0..small).map(|_| list.take(4096, register)).collect::<Vec<_>>());
            drop(list.take(65536, register));
            let large = || -> Vec<_> { (0..4).map(|_| list.take(1 << 20, register)).collect() };
            for region in large() {
                // SAFETY: a whole region, which nobody else uses.
                unsafe { region.start().write(1) };
            }
            // SAFETY: as above.
            let is_kept = |region: &RegionRef| unsafe { region.start().read() } == 1;
            assert!(large().iter().all(is_kept), "zeroes: a new one, after {small} small regions");
        }
    }

    #[test]
    fn slabs_and_large_regions_share_the_limit() {
        let list = FreeList::new(8 << 20);
        let register = |_: *mut u8, _| Some(FixedBuffer { ring: 1, index: 0 });
        drop((0..8).map(|_| list.take(1 << 20, register)).collect::<Vec<_>>());
        assert_eq!(list.kept.load(Ordering::Relaxed), 8 << 20);
        for small in [17, 1040] {
            let _held: Vec<_> = (0..small).map(|_| list.take(4096, register)).collect();
            let slabs = (4 << 20) - list.slabs_left.load(Ordering::Relaxed);
            assert!(slabs > 0 && list.kept.load(Ordering::Relaxed) + slabs <= 8 << 20, "{slabs} in slabs");
        }
    }

    #[test]
    fn slabs_are_cut_into_disjoint_regions_and_limited() {
        let list = FreeList::new(2 << 20);
        let registered = std::cell::Cell::new(0u16);
        let take = |len| {
            list.take(len, |_, _| {
                registered.set(registered.get() + 1);
                Some(FixedBuffer { ring: 1, index: registered.get() })
            })
        };
        let regions: Vec<_> = (0..300).map(|_| take(4096)).chain((0..3).map(|_| take(65536))).collect();
        assert_eq!(registered.get(), 2, "half of 2 MiB");
        let mut runs: Vec<_> = regions.iter().map(|r| (r.start().as_ptr() as usize, r.len())).collect();
        runs.sort_unstable();
        assert!(runs.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0));
        assert_eq!(regions.iter().filter(|region| region.fixed.is_some()).count(), 256);
        drop(regions);
        let again: Vec<_> = (0..256).map(|_| take(4096)).collect();
        assert!(again.iter().all(|region| region.fixed.is_some()), "registered memory is taken first");
    }
}
