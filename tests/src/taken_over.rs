//! A thread of another process as somebody has it who has taken it over: it makes any system call, and asks any ring of
//! its process for anything (ptrace(2); x86-64 only).

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::ptr;
use std::time::Duration;

/// The user data of completions that a server overlooks (those of its cancellations).
const OVERLOOKED: u64 = u64::MAX - 1;
/// That of those that were seen: a socket's, which there is not.
const SEEN: u64 = 1 << 62 | 1 << 40;
/// As in <linux/io_uring.h>.
const GET_EVENTS: u64 = 1;
const SUBMISSIONS: i64 = 0x1000_0000;
/// `IOSQE_ASYNC`: a thread of the kernel's does it.
pub const ASYNC: u8 = 1 << 4;
/// How long the completion of a thread of the kernel's is waited for.
const LOOK: Duration = Duration::from_millis(1);
const LOOKS: u32 = 10_000;
/// Bytes that the kernel leaves alone below the stack pointer, and room for our own.
const BELOW_STACK: u64 = 128 + 4096;

/// The numbers of the threads of a process, each with its name.
///
/// # Panics
/// If the process is gone.
pub fn threads(pid: u32) -> Vec<(i32, String)> {
    let entries = fs::read_dir(format!("/proc/{pid}/task")).expect("it runs");
    let names = entries.filter_map(|entry| {
        let path = entry.ok()?.path();
        let name = fs::read_to_string(path.join("comm")).ok()?;
        Some((path.file_name()?.to_str()?.parse().ok()?, name.trim().to_owned()))
    });
    names.collect()
}

/// Descriptors of a process that lead to something whose name has `part` in it.
///
/// # Panics
/// If the process is gone.
pub fn descriptors(pid: u32, part: &str) -> Vec<i32> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).expect("it runs");
    let found = entries.filter_map(|entry| {
        let path = entry.ok()?.path();
        let leads_there = fs::read_link(&path).ok()?.to_string_lossy().contains(part);
        if leads_there { path.file_name()?.to_str()?.parse().ok() } else { None }
    });
    found.collect()
}

/// A thread that is stopped, until this is dropped; then it goes on as if nothing had been.
#[derive(Debug)]
pub struct TakenOver {
    thread: libc::pid_t,
    before: libc::user_regs_struct,
    /// Where its process has an instruction that calls the kernel.
    instruction: u64,
    memory: fs::File,
}

impl TakenOver {
    /// Stops a thread; `None` if it is one of the kernel's or has ended.
    ///
    /// # Panics
    /// If its memory can't be read.
    pub fn stop(pid: u32, thread: libc::pid_t) -> Option<Self> {
        trace(libc::PTRACE_SEIZE, thread, ptr::null_mut()).ok()?;
        trace(libc::PTRACE_INTERRUPT, thread, ptr::null_mut()).ok()?;
        wait(thread)?;
        let before = registers(thread);
        if before.rsp == 0 {
            // One of the kernel's, which has no code of the process to run.
            let _ = trace(libc::PTRACE_DETACH, thread, ptr::null_mut());
            return None;
        }
        let memory = fs::OpenOptions::new().read(true).write(true).open(format!("/proc/{pid}/mem"));
        let memory = memory.expect("the memory of a child");
        let instruction = find_instruction(pid, &memory).expect("an instruction that calls the kernel");
        Some(Self { thread, before, instruction, memory })
    }

    /// Has the thread make a system call; the result as the kernel gives it.
    ///
    /// # Panics
    /// If the thread does not come back.
    pub fn call(&mut self, number: libc::c_long, arguments: [u64; 6]) -> i64 {
        let mut registers = self.before;
        registers.rip = self.instruction;
        registers.rsp = self.scratch() & !15;
        registers.rax = number as u64;
        // No call is to be begun anew.
        registers.orig_rax = u64::MAX;
        [registers.rdi, registers.rsi, registers.rdx, registers.r10, registers.r8, registers.r9] = arguments;
        set_registers(self.thread, &mut registers);
        trace(libc::PTRACE_SINGLESTEP, self.thread, ptr::null_mut()).expect("it is stopped");
        wait(self.thread).expect("it comes back");
        self::registers(self.thread).rax as i64
    }

    /// Puts bytes where the thread may read and write; their address.
    ///
    /// # Panics
    /// If there are too many.
    pub fn put(&self, bytes: &[u8]) -> u64 {
        assert!(bytes.len() <= 4096);
        self.memory.write_all_at(bytes, self.scratch()).expect("its stack");
        self.scratch()
    }

    fn scratch(&self) -> u64 {
        self.before.rsp - BELOW_STACK
    }

    /// Has the thread ask a ring of its process for an operation; its result. `None` if it is another thread's ring.
    ///
    /// # Panics
    /// If the ring has no place or does not answer.
    pub fn ask(&mut self, ring: &Ring, operation: &Operation) -> Option<i32> {
        let fd = ring.number as u64;
        // Nobody but its own thread may ask for completions.
        if self.call(libc::SYS_io_uring_enter, [fd, 0, 0, GET_EVENTS, 0, 0]) == -i64::from(libc::EEXIST) {
            return None;
        }
        let mut queued = ring.push(operation);
        for _ in 0..LOOKS {
            let entered = self.call(libc::SYS_io_uring_enter, [fd, queued, 1, GET_EVENTS, 0, 0]);
            assert!(entered >= 0 || entered == -i64::from(libc::EINTR), "io_uring_enter: {entered}");
            // A call that submits less than it was to does nothing else.
            queued = queued.saturating_sub(u64::try_from(entered).unwrap_or(0));
            if let Some(result) = ring.result() {
                return Some(result);
            }
            // Others' completions, which nobody takes, end the call.
            std::thread::sleep(LOOK);
        }
        panic!("{ring:?} does not answer to {operation:?}: {}", ring.state());
    }
}

impl Drop for TakenOver {
    fn drop(&mut self) {
        set_registers(self.thread, &mut self.before);
        let _ = trace(libc::PTRACE_DETACH, self.thread, ptr::null_mut());
    }
}

/// An operation as a ring takes it.
#[derive(Debug, Clone, Copy, Default)]
pub struct Operation {
    /// `IORING_OP_*`.
    pub code: u8,
    /// `IOSQE_*`.
    pub flags: u8,
    /// The descriptor, or what stands in its place.
    pub fd: i32,
    /// The offset, or what stands in its place.
    pub offset: u64,
    /// An address, or what stands in its place.
    pub address: u64,
    /// The length, or what stands in its place.
    pub length: u32,
}

/// A ring of another process, of which this one has the queues in its memory, too.
#[derive(Debug)]
pub struct Ring {
    /// Its descriptor in the other process.
    number: i32,
    _fd: OwnedFd,
    queues: *mut u8,
    submissions: *mut u8,
    offsets: Offsets,
}

/// Where the parts of a ring are (`struct io_uring_params`).
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct Parameters {
    submissions: u32,
    completions: u32,
    flags: u32,
    unused: [u32; 7],
    offsets: Offsets,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct Offsets {
    head: u32,
    tail: u32,
    mask: u32,
    entries: u32,
    flags: u32,
    dropped: u32,
    array: u32,
    unused: [u32; 3],
    done_head: u32,
    done_tail: u32,
    done_mask: u32,
    done_entries: u32,
    overflow: u32,
    done: u32,
    rest: [u32; 4],
}

impl Ring {
    /// The ring with this descriptor in the process `pid`.
    ///
    /// # Panics
    /// If it can't be had.
    pub fn of(pid: u32, number: i32) -> Self {
        let process = owned(system_call(libc::SYS_pidfd_open, [pid.into(), 0, 0, 0]));
        let fd = owned(system_call(libc::SYS_pidfd_getfd, [process.as_raw_fd() as u64, number as u64, 0, 0]));
        // The first places are the same in all rings.
        let first = map(&fd, 4096, 0);
        let offsets = offsets_of(8);
        let entries = read(first, offsets.entries);
        let offsets = offsets_of(entries);
        let bytes = offsets.array as usize + entries as usize * 4;
        let queues = map(&fd, bytes.max(offsets.done as usize + entries as usize * 32), 0);
        let submissions = map(&fd, entries as usize * 64, SUBMISSIONS);
        Self { number, _fd: fd, queues, submissions, offsets }
    }

    /// The content of its queues, for messages.
    fn state(&self) -> String {
        let Offsets { head, tail, done_head, done_tail, flags, .. } = self.offsets;
        let at = |offset| read(self.queues, offset);
        format!(
            "{}..{} submitted, {}..{} done, flags {:#x}",
            at(head),
            at(tail),
            at(done_head),
            at(done_tail),
            at(flags)
        )
    }

    /// Puts an operation into the queue; how many it has then.
    fn push(&self, operation: &Operation) -> u64 {
        let Offsets { head, tail, mask, array, .. } = self.offsets;
        let (end, mask) = (read(self.queues, tail), read(self.queues, mask));
        let queued = end.wrapping_sub(read(self.queues, head));
        assert!(queued <= mask, "the queue is full");
        let mut entry = [0u8; 64];
        entry[0] = operation.code;
        entry[1] = operation.flags;
        entry[4..8].copy_from_slice(&operation.fd.to_ne_bytes());
        entry[8..16].copy_from_slice(&operation.offset.to_ne_bytes());
        entry[16..24].copy_from_slice(&operation.address.to_ne_bytes());
        entry[24..28].copy_from_slice(&operation.length.to_ne_bytes());
        entry[32..40].copy_from_slice(&OVERLOOKED.to_ne_bytes());
        let index = end & mask;
        // SAFETY: the mapping has `mask + 1` entries, and their owner is stopped.
        unsafe { ptr::copy_nonoverlapping(entry.as_ptr(), self.submissions.add(index as usize * 64), 64) };
        write(self.queues, array + index * 4, index);
        write(self.queues, tail, end.wrapping_add(1));
        u64::from(queued) + 1
    }

    /// The result of what was asked for, if it is there.
    fn result(&self) -> Option<i32> {
        let Offsets { done_head, done_tail, done_mask, done, .. } = self.offsets;
        let (mut at, end) = (read(self.queues, done_head), read(self.queues, done_tail));
        let mask = read(self.queues, done_mask);
        let mut found = None;
        while at != end {
            let entry = done + (at & mask) * 16;
            if (read(self.queues, entry), read(self.queues, entry + 4))
                == (OVERLOOKED as u32, (OVERLOOKED >> 32) as u32)
            {
                found = Some(read(self.queues, entry + 8) as i32);
                write(self.queues, entry, SEEN as u32);
                write(self.queues, entry + 4, (SEEN >> 32) as u32);
            }
            at = at.wrapping_add(1);
        }
        found
    }
}

fn offsets_of(entries: u32) -> Offsets {
    let mut parameters = Parameters::default();
    let address = ptr::from_mut(&mut parameters) as u64;
    drop(owned(system_call(libc::SYS_io_uring_setup, [entries.into(), address, 0, 0])));
    parameters.offsets
}

fn map(fd: &OwnedFd, bytes: usize, offset: i64) -> *mut u8 {
    let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
    // SAFETY: a new mapping; it stays to the end of the test.
    let start = unsafe { libc::mmap(ptr::null_mut(), bytes, access, flags, fd.as_raw_fd(), offset) };
    assert_ne!(start, libc::MAP_FAILED, "{}", io::Error::last_os_error());
    start.cast()
}

#[expect(clippy::cast_ptr_alignment, reason = "the kernel gives aligned offsets")]
fn read(start: *mut u8, offset: u32) -> u32 {
    // SAFETY: the offsets are those that the kernel has given for this mapping.
    unsafe { start.add(offset as usize).cast::<u32>().read_volatile() }
}

#[expect(clippy::cast_ptr_alignment, reason = "the kernel gives aligned offsets")]
fn write(start: *mut u8, offset: u32, value: u32) {
    // SAFETY: as above.
    unsafe { start.add(offset as usize).cast::<u32>().write_volatile(value) }
}

fn system_call(number: libc::c_long, arguments: [u64; 4]) -> i64 {
    // SAFETY: numbers, and the address of the parameters that the kernel fills.
    unsafe { libc::syscall(number, arguments[0], arguments[1], arguments[2], arguments[3]) }
}

fn owned(fd: i64) -> OwnedFd {
    assert!(fd >= 0, "{}", io::Error::last_os_error());
    // SAFETY: a new descriptor.
    unsafe { OwnedFd::from_raw_fd(fd as i32) }
}

fn trace(request: libc::c_uint, thread: libc::pid_t, data: *mut libc::c_void) -> io::Result<()> {
    // SAFETY: the requests of this module read or write the registers that `data` points to, if anything.
    match unsafe { libc::ptrace(request, thread, ptr::null_mut::<libc::c_void>(), data) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

fn registers(thread: libc::pid_t) -> libc::user_regs_struct {
    // SAFETY: a structure of integers.
    let mut registers: libc::user_regs_struct = unsafe { std::mem::zeroed() };
    trace(libc::PTRACE_GETREGS, thread, ptr::from_mut(&mut registers).cast()).expect("it is stopped");
    registers
}

fn set_registers(thread: libc::pid_t, registers: &mut libc::user_regs_struct) {
    let _ = trace(libc::PTRACE_SETREGS, thread, ptr::from_mut(registers).cast());
}

/// Waits until the thread is stopped; `None` if it has ended.
fn wait(thread: libc::pid_t) -> Option<()> {
    let mut status = 0;
    // SAFETY: one number is written.
    let waited = unsafe { libc::waitpid(thread, &raw mut status, libc::__WALL) };
    (waited == thread && libc::WIFSTOPPED(status)).then_some(())
}

/// `syscall` in the code that the kernel maps into every process.
fn find_instruction(pid: u32, memory: &fs::File) -> Option<u64> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).ok()?;
    let line = maps.lines().find(|line| line.ends_with("[vdso]"))?;
    let (start, rest) = line.split_once('-')?;
    let (end, _) = rest.split_once(' ')?;
    let start = u64::from_str_radix(start, 16).ok()?;
    let mut code = vec![0; (u64::from_str_radix(end, 16).ok()? - start) as usize];
    memory.read_exact_at(&mut code, start).ok()?;
    let at = code.windows(2).position(|bytes| bytes == [0x0f, 0x05])?;
    Some(start + at as u64)
}
