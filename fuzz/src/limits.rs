//! The cost that an input may have: memory and time in proportion to the size of the file, whatever the file claims.

use rustix::time::{ClockId, clock_gettime};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

/// Bytes of memory for any file, and how many times its size more.
const MEMORY: usize = 64 << 20;
const TIMES: usize = 4;
/// Processor time for any file, and for each MiB of it more. Programs that count what they reach are several times slower
/// than others.
const TIME: Duration = Duration::from_secs(10);
const TIME_PER_MIB: Duration = Duration::from_secs(10);

static NOW: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

/// The system's allocator, which counts. What the kernel maps (buffers of large requests) is libFuzzer's to limit.
struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn took(bytes: usize) {
    PEAK.fetch_max(NOW.fetch_add(bytes, Relaxed) + bytes, Relaxed);
}

// SAFETY: each call goes to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        took(layout.size());
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        took(layout.size());
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // What is large is moved by the kernel, not copied.
        took(size.saturating_sub(layout.size()));
        NOW.fetch_sub(layout.size().saturating_sub(size), Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.realloc(memory, layout, size) }
    }
}

/// Processor time of all threads.
fn spent() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Does something with a file of `len` bytes. More memory or time than such a file may cost is a fault.
pub(crate) fn within<T>(len: usize, work: impl FnOnce() -> T) -> T {
    let (held, begin) = (NOW.load(Relaxed), spent());
    PEAK.store(held, Relaxed);
    let result = work();
    let (memory, time) = (PEAK.load(Relaxed).saturating_sub(held), spent() - begin);
    let most = MEMORY + TIMES * len;
    assert!(memory <= most, "{memory} bytes of memory for a file of {len} (at most {most})");
    let longest = TIME + TIME_PER_MIB * u32::try_from(len >> 20).unwrap_or(u32::MAX);
    assert!(time <= longest, "{time:?} of processor time for a file of {len} bytes (at most {longest:?})");
    result
}
