//! Mappings of files that somebody else may cut short, or whose pages the system can't give.
//!
//! Touching a page that its file does not have any more raises SIGBUS in the thread that touches it, and would end the
//! process. The handler here puts zero pages in the place of the mapping, notes that, and the thread goes on. System
//! calls that are given such a page fail with EFAULT and raise nothing.

use crate::sync::Mutex;
use std::io;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering, fence};

/// Slots that are made at once.
const CHUNK: usize = 64;

/// A place in the list of mappings. A sequence lock: the handler may look while another thread changes it.
struct Slot {
    /// Odd while the range is changed.
    sequence: AtomicUsize,
    start: AtomicUsize,
    /// 0 in a free slot.
    len: AtomicUsize,
    has_vanished: AtomicBool,
}

impl Slot {
    const fn free() -> Self {
        Self {
            sequence: AtomicUsize::new(0),
            start: AtomicUsize::new(0),
            len: AtomicUsize::new(0),
            has_vanished: AtomicBool::new(false),
        }
    }

    /// Only one thread at a time, which holds [`LIST`].
    fn set(&self, start: usize, len: usize) {
        self.sequence.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::Release);
        self.start.store(start, Ordering::Relaxed);
        self.len.store(len, Ordering::Relaxed);
        self.has_vanished.store(false, Ordering::Relaxed);
        self.sequence.fetch_add(1, Ordering::Release);
    }

    /// The range, if the slot has one that contains `address`. One that is changed meanwhile is not the one where the
    /// calling thread uses memory.
    fn range_with(&self, address: usize) -> Option<(usize, usize)> {
        let before = self.sequence.load(Ordering::Acquire);
        let (start, len) = (self.start.load(Ordering::Relaxed), self.len.load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        let is_stable = before.is_multiple_of(2) && self.sequence.load(Ordering::Relaxed) == before;
        (is_stable && address.wrapping_sub(start) < len).then_some((start, len))
    }
}

/// Slots, which are never given back: the handler may look at any time.
struct Chunk {
    slots: [Slot; CHUNK],
    next: AtomicPtr<Chunk>,
}

impl Chunk {
    const fn empty() -> Self {
        Self { slots: [const { Slot::free() }; CHUNK], next: AtomicPtr::new(ptr::null_mut()) }
    }

    fn next(&self) -> Option<&'static Chunk> {
        let next = self.next.load(Ordering::Acquire);
        // SAFETY: null, or leaked in `take_slot`.
        unsafe { next.as_ref() }
    }
}

static FIRST: Chunk = Chunk::empty();
/// Held by who changes slots.
static LIST: Mutex<()> = Mutex::new(());

fn slots() -> impl Iterator<Item = &'static Slot> {
    std::iter::successors(Some(&FIRST), |chunk| chunk.next()).flat_map(|chunk| &chunk.slots)
}

fn take_slot(start: usize, len: usize) -> &'static Slot {
    let _held = LIST.lock();
    let is_free = |slot: &&'static Slot| slot.len.load(Ordering::Relaxed) == 0;
    let slot = slots().find(is_free).unwrap_or_else(|| {
        let chunk: &'static Chunk = Box::leak(Box::new(Chunk::empty()));
        let last = std::iter::successors(Some(&FIRST), |chunk| chunk.next()).last().unwrap_or(&FIRST);
        last.next.store(ptr::from_ref(chunk).cast_mut(), Ordering::Release);
        &chunk.slots[0]
    });
    slot.set(start, len);
    slot
}

/// Keeps the process alive when pages of a mapping vanish. To be dropped before the mapping is.
pub struct MappingGuard(&'static Slot);

impl MappingGuard {
    /// Guards the mapping of `len` bytes (rounded up to the size of its pages) at `start`.
    ///
    /// # Safety
    /// All of it is one mapping of the caller's, readable and writable, that may be replaced by zero pages at any time, and
    /// that stays as long as the guard. Only memory that may change at any time is a case for this.
    ///
    /// # Errors
    /// The system does not take a handler of SIGBUS.
    ///
    /// # Panics
    /// If `len` is 0.
    pub unsafe fn new(start: *mut u8, len: usize) -> io::Result<Self> {
        assert!(len > 0, "a mapping has at least a page");
        install()?;
        Ok(Self(take_slot(start as usize, len)))
    }

    /// Whether pages have vanished; the mapping has nothing but zero pages of our own then.
    pub fn has_vanished(&self) -> bool {
        self.0.has_vanished.load(Ordering::Relaxed)
    }
}

impl Drop for MappingGuard {
    fn drop(&mut self) {
        let _held = LIST.lock();
        self.0.set(0, 0);
    }
}

/// The action of SIGBUS before ours.
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

fn install() -> io::Result<()> {
    static INSTALLING: Mutex<()> = Mutex::new(());
    let _held = INSTALLING.lock();
    if BEFORE.get().is_some() {
        return Ok(());
    }
    let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) = on_bus_error;
    // SAFETY: all zero is a valid sigaction: the default action, no mask, no flags.
    let mut before: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: as above.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: the address of one action, to be filled in.
    if unsafe { libc::sigaction(libc::SIGBUS, ptr::null(), &raw mut before) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // Before the handler can run, which needs it.
    let _ = BEFORE.set(before);
    action.sa_sigaction = handler as usize;
    // On the alternative stack, since the handler before this one is for overflows of the stack.
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: the handler is of the kind that SA_SIGINFO says, and does only what a handler may (see there).
    if unsafe { libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Uses atomics, `mmap` and `sigaction` only, none of which takes a lock or allocates.
extern "C" fn on_bus_error(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel gives a siginfo_t of SIGBUS to a handler with SA_SIGINFO.
    let address = unsafe { (*info).si_addr() } as usize;
    for slot in slots() {
        if let Some((start, len)) = slot.range_with(address) {
            if put_zeroes(start, len) {
                slot.has_vanished.store(true, Ordering::Relaxed);
                return;
            }
            break;
        }
    }
    as_before(signal, info, context);
}

fn put_zeroes(start: usize, len: usize) -> bool {
    let flags = libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: `MappingGuard::new` was told that this mapping may be replaced by zero pages at any time. It is there: the
    // calling thread was using it.
    let mapped = unsafe {
        libc::mmap(start as *mut libc::c_void, len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
    };
    mapped != libc::MAP_FAILED
}

/// Does what would be done without this handler.
fn as_before(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let before = BEFORE.get();
    let action = before.map_or(libc::SIG_DFL, |before| before.sa_sigaction);
    if matches!(action, libc::SIG_DFL | libc::SIG_IGN) {
        // SAFETY: all zero is the default action. The access that failed is made again and ends the process.
        unsafe {
            let default: libc::sigaction = std::mem::zeroed();
            libc::sigaction(signal, &raw const default, ptr::null_mut());
        }
        return;
    }
    let has_info = before.is_some_and(|before| before.sa_flags & libc::SA_SIGINFO != 0);
    // SAFETY: whoever set that action said by its flag which of the two kinds of functions it is.
    unsafe {
        if has_info {
            type WithInfo = extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);
            std::mem::transmute::<usize, WithInfo>(action)(signal, info, context);
        } else {
            std::mem::transmute::<usize, extern "C" fn(libc::c_int)>(action)(signal);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fd::OwnedFd;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    const LEN: usize = 8 << 12;

    struct Mapped {
        file: OwnedFd,
        start: *mut u8,
    }

    impl Mapped {
        fn new() -> Self {
            let file = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
            ftruncate(&file, LEN as u64).unwrap();
            let prot = ProtFlags::READ | ProtFlags::WRITE;
            // SAFETY: a new mapping, anywhere.
            let start = unsafe { mmap(ptr::null_mut(), LEN, prot, MapFlags::SHARED, &file, 0) }.unwrap();
            Self { file, start: start.cast() }
        }

        fn get(&self, at: usize) -> u8 {
            assert!(at < LEN);
            // SAFETY: in the mapping.
            unsafe { self.start.add(at).read_volatile() }
        }

        fn put(&self, at: usize, byte: u8) {
            assert!(at < LEN);
            // SAFETY: in the mapping.
            unsafe { self.start.add(at).write_volatile(byte) }
        }
    }

    impl Drop for Mapped {
        fn drop(&mut self) {
            // SAFETY: our own mapping, which nobody uses any more.
            unsafe { munmap(self.start.cast(), LEN) }.unwrap();
        }
    }

    fn guard(mapped: &Mapped) -> MappingGuard {
        // SAFETY: a mapping of the test's, which outlives the guard; only bytes are read and written.
        unsafe { MappingGuard::new(mapped.start, LEN) }.unwrap()
    }

    #[test]
    fn what_vanishes_reads_as_zero_and_is_noted_there_alone() {
        let (cut, whole) = (Mapped::new(), Mapped::new());
        let guards = [guard(&cut), guard(&whole)];
        cut.put(5, 7);
        whole.put(5, 7);
        ftruncate(&cut.file, 4096).unwrap();
        assert_eq!(cut.get(5), 7, "that page is still there");
        assert!(!guards[0].has_vanished());
        cut.put(4096, 1);
        assert_eq!(cut.get(4096), 1);
        assert_eq!((cut.get(5), cut.get(LEN - 1)), (0, 0));
        assert_eq!(guards.each_ref().map(MappingGuard::has_vanished), [true, false]);
        assert_eq!(whole.get(5), 7);
        drop(guards);
    }

    #[test]
    fn many_threads_find_their_own() {
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        let mapped: Vec<Mapped> = (0..20).map(|_| Mapped::new()).collect();
                        let guards: Vec<MappingGuard> = mapped.iter().map(guard).collect();
                        for (index, mapped) in mapped.iter().enumerate() {
                            mapped.put(0, 1);
                            if index % 2 == 0 {
                                ftruncate(&mapped.file, 0).unwrap();
                            }
                        }
                        for (index, (mapped, guard)) in mapped.iter().zip(&guards).enumerate() {
                            assert_eq!(mapped.get(0), (index % 2) as u8);
                            assert_eq!(guard.has_vanished(), index % 2 == 0);
                        }
                        drop(guards);
                    }
                });
            }
        });
    }

    /// Not a test: what the next one runs in a process of its own.
    #[test]
    #[ignore = "ends the process"]
    fn touches_what_nobody_guards() {
        let (guarded, cut) = (Mapped::new(), Mapped::new());
        let guard = guard(&guarded);
        ftruncate(&guarded.file, 0).unwrap();
        assert_eq!(guarded.get(0), 0);
        ftruncate(&cut.file, 0).unwrap();
        println!("{}", cut.get(0));
        drop(guard);
    }

    #[test]
    fn other_bus_errors_end_the_process_as_ever() {
        let mut command = Command::new(std::env::current_exe().unwrap());
        let name = "mapping_guard::tests::touches_what_nobody_guards";
        let ended = command.args(["--exact", name, "--ignored"]).output().unwrap();
        assert_eq!(ended.status.signal(), Some(libc::SIGBUS), "{ended:?}");
    }
}
