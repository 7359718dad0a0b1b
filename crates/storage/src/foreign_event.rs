//! Signalling an eventfd that another process holds as well.
//!
//! Whether `write` waits is a flag of the open file, which its other holder can change at any time, and whether it would
//! have to wait depends on a counter that its other holder can fill. The kernel itself signals an eventfd without waiting:
//! for one, at the end of an asynchronous operation (`IOCB_FLAG_RESFD`). The operation here reads no bytes of an empty file
//! and is over when `io_submit` returns.

use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::fs::MemfdFlags;
use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};

/// Operations whose ends the kernel keeps for us at once.
const EVENTS: usize = 1024;
/// After so many operations their ends are taken, and thrown away.
const REAP: u32 = 256;
/// How often an operation is tried when the kernel has no room for its end.
const TRIES: usize = 16;

const IOCB_CMD_PREAD: u16 = 0;
const IOCB_FLAG_RESFD: u32 = 1;

/// `struct iocb` of <linux/aio_abi.h>. (The order of the second and third field depends on the machine; both are 0.)
#[repr(C)]
struct Iocb {
    data: u64,
    key: u32,
    rw_flags: u32,
    opcode: u16,
    priority: i16,
    fd: u32,
    buf: u64,
    len: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    result_fd: u32,
}

/// `struct io_event`, which is not looked at.
#[repr(C)]
#[derive(Clone, Copy)]
struct IoEvent([u64; 4]);

/// A context of asynchronous operations, one for the process: a context of its own for each eventfd would have to be
/// destroyed, which waits.
struct Context {
    id: libc::c_ulong,
    empty: OwnedFd,
    /// Can't be read.
    write_only: OwnedFd,
    submitted: AtomicU32,
}

impl Context {
    fn get() -> Option<&'static Self> {
        static CONTEXT: OnceLock<Option<Context>> = OnceLock::new();
        CONTEXT.get_or_init(|| Self::new().ok()).as_ref()
    }

    fn new() -> io::Result<Self> {
        let empty = rustix::fs::memfd_create("zebu-empty", MemfdFlags::CLOEXEC)?;
        let write_only = io::pipe()?.1.into();
        let mut id: libc::c_ulong = 0;
        // SAFETY: the kernel writes one `aio_context_t` (an unsigned long) to the second argument.
        let made = unsafe { libc::syscall(libc::SYS_io_setup, EVENTS, &raw mut id) };
        if made != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { id, empty, write_only, submitted: AtomicU32::new(0) })
    }

    /// Reads nothing of `fd`; its end signals `event`.
    fn submit(&self, fd: BorrowedFd<'_>, event: BorrowedFd<'_>) -> io::Result<()> {
        let mut iocb = Iocb {
            data: 0,
            key: 0,
            rw_flags: 0,
            opcode: IOCB_CMD_PREAD,
            priority: 0,
            fd: fd.as_raw_fd() as u32,
            buf: 0,
            len: 0,
            offset: 0,
            reserved: 0,
            flags: IOCB_FLAG_RESFD,
            result_fd: event.as_raw_fd() as u32,
        };
        let mut list = [&raw mut iocb];
        // SAFETY: one pointer to one iocb, both alive through the call, which copies them. The operation has no buffer.
        let taken =
            unsafe { libc::syscall(libc::SYS_io_submit, self.id, 1 as libc::c_long, list.as_mut_ptr()) };
        if taken == 1 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    fn signal(&self, event: BorrowedFd<'_>) -> io::Result<()> {
        for _ in 0..TRIES {
            match self.submit(self.empty.as_fd(), event) {
                Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => self.reap(),
                result => {
                    if self.submitted.fetch_add(1, Ordering::Relaxed) % REAP == REAP - 1 {
                        self.reap();
                    }
                    return result;
                }
            }
        }
        Err(io::ErrorKind::WouldBlock.into())
    }

    /// Takes the ends of what is over.
    fn reap(&self) {
        let mut events = [IoEvent([0; 4]); REAP as usize];
        let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: room for as many events as are asked for; the time is alive through the call, which does not wait.
        unsafe {
            libc::syscall(
                libc::SYS_io_getevents,
                self.id,
                0 as libc::c_long,
                events.len() as libc::c_long,
                events.as_mut_ptr(),
                &raw mut now,
            )
        };
    }

    /// Whether a descriptor is an eventfd. It is not signalled.
    fn is_event(&self, fd: BorrowedFd<'_>) -> bool {
        // The kernel looks at the eventfd first (EINVAL), then whether the file can be read (EBADF).
        let refused = self.submit(self.write_only.as_fd(), fd);
        refused.is_err_and(|error| error.raw_os_error() == Some(libc::EBADF))
    }
}

/// Whether a descriptor is an eventfd.
pub fn is_eventfd(fd: impl AsFd) -> bool {
    match Context::get() {
        Some(context) => context.is_event(fd.as_fd()),
        None => has_the_name_of_one(fd.as_fd()),
    }
}

/// As [`is_eventfd`], by what `/proc` says.
fn has_the_name_of_one(fd: BorrowedFd<'_>) -> bool {
    // The names of files begin with a slash there.
    let name = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()));
    name.is_ok_and(|name| name.as_os_str() == "anon_inode:[eventfd]")
}

enum Way {
    /// Through the kernel's completion of an operation.
    Aio(&'static Context, OwnedFd),
    /// By a thread of its own, which may be made to wait.
    Thread(SyncSender<()>),
}

/// An eventfd that somebody else waits on, and may do anything with. Signalling it never waits.
pub struct ForeignEvent(Way);

impl ForeignEvent {
    /// Takes the descriptor over.
    ///
    /// # Errors
    /// It is no eventfd, or the system gives no thread (only needed where the kernel has no asynchronous I/O).
    pub fn new(fd: impl Into<OwnedFd>) -> io::Result<Self> {
        let fd = fd.into();
        if !is_eventfd(&fd) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the descriptor is no eventfd"));
        }
        match Context::get() {
            Some(context) => Ok(Self(Way::Aio(context, fd))),
            None => Self::with_thread(fd),
        }
    }

    fn with_thread(fd: OwnedFd) -> io::Result<Self> {
        // One signal that is still to be given stands for all that come meanwhile.
        let (signal, signals) = sync_channel(1);
        let write = move || {
            while signals.recv().is_ok() {
                // What can't be told is not told.
                let _ = rustix::io::write(&fd, &1u64.to_ne_bytes());
            }
        };
        std::thread::Builder::new().name("zebu-event".to_owned()).spawn(write)?;
        Ok(Self(Way::Thread(signal)))
    }

    /// Adds one to the counter, unless it is full.
    ///
    /// # Errors
    /// The kernel lacks memory.
    pub fn signal(&self) -> io::Result<()> {
        match &self.0 {
            Way::Aio(context, fd) => context.signal(fd.as_fd()),
            Way::Thread(signal) => {
                let _ = signal.try_send(());
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};
    use rustix::io::{dup, read, write};

    fn count(fd: &OwnedFd) -> u64 {
        let mut bytes = [0; 8];
        assert_eq!(read(fd, &mut bytes), Ok(8));
        u64::from_ne_bytes(bytes)
    }

    #[test]
    fn signals_are_counted_and_a_full_counter_makes_nobody_wait() {
        // Without EFD_NONBLOCK: a write to a full one waits for ever.
        let theirs = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let ours = ForeignEvent::new(dup(&theirs).unwrap()).unwrap();
        for signals in [1, 3, 5000] {
            for _ in 0..signals {
                ours.signal().unwrap();
            }
            assert_eq!(count(&theirs), signals);
        }
        write(&theirs, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        ours.signal().unwrap();
        ours.signal().unwrap();
        assert_eq!(count(&theirs), u64::MAX);
        ours.signal().unwrap();
        assert_eq!(count(&theirs), 1);
    }

    #[test]
    fn threads_signal_at_the_same_time() {
        let theirs = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let ours = ForeignEvent::new(dup(&theirs).unwrap()).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..2000).for_each(|_| ours.signal().unwrap()));
            }
        });
        assert_eq!(count(&theirs), 8000);
    }

    #[test]
    fn other_descriptors_are_refused_and_left_alone() {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let (reader, writer) = io::pipe().unwrap();
        let (reader, writer) = (OwnedFd::from(reader), OwnedFd::from(writer));
        let file = OwnedFd::from(tempfile::tempfile().unwrap());
        for (fd, expected) in [(&event, true), (&reader, false), (&writer, false), (&file, false)] {
            assert_eq!(is_eventfd(fd), expected);
            assert_eq!(has_the_name_of_one(fd.as_fd()), expected);
            assert_eq!(ForeignEvent::new(dup(fd).unwrap()).is_ok(), expected);
        }
        assert_eq!(read(&event, &mut [0; 8]), Err(rustix::io::Errno::AGAIN), "looking does not signal");
    }

    #[test]
    fn a_thread_signals_where_the_kernel_does_not() {
        let theirs = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let ours = ForeignEvent::with_thread(dup(&theirs).unwrap()).unwrap();
        ours.signal().unwrap();
        assert_eq!(count(&theirs), 1);
        write(&theirs, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        // The thread waits from now on; nobody else does.
        (0..10).for_each(|_| ours.signal().unwrap());
    }
}
