//! How other threads, and event loops, learn that a worker has something to do.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU8, Ordering};

/// The worker is outside of its turns: it will not look before someone calls it or the descriptor is readable.
const IDLE: u8 = 1;
/// There is something to look at.
const PENDING: u8 = 2;

/// A flag with a descriptor. The descriptor (an eventfd) is written only if the worker is idle, exactly once per
/// change from idle to idle-and-pending, and read exactly once when such a worker begins a turn. So a wake-up of a
/// worker that is running costs no system call, and the descriptor is readable just while an idle worker has
/// something pending.
pub(crate) struct Notifier {
    state: AtomicU8,
    event: OwnedFd,
}

impl Notifier {
    pub(crate) fn new() -> io::Result<Self> {
        // SAFETY: plain system call.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a new descriptor that nobody else owns.
        let event = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Self { state: AtomicU8::new(IDLE), event })
    }

    /// Tells the worker to look at its queues. What it shall find must have been stored before.
    pub(crate) fn notify(&self) {
        if self.state.fetch_or(PENDING, Ordering::AcqRel) == IDLE {
            let one = 1u64.to_ne_bytes();
            // SAFETY: `one` is 8 readable bytes. It can fail only if the counter is about to overflow, and the
            // counter never exceeds 1.
            let _ = unsafe { libc::write(self.event.as_raw_fd(), one.as_ptr().cast(), one.len()) };
        }
    }

    /// As [`Notifier::notify`], for the worker's own thread: within a turn it knows by itself.
    pub(crate) fn notify_if_idle(&self) {
        if self.state.load(Ordering::Relaxed) == IDLE {
            self.notify();
        }
    }

    /// Begins a turn of the worker: whatever was notified before is to be looked at now.
    pub(crate) fn begin_turn(&self) {
        if self.state.swap(0, Ordering::AcqRel) == IDLE | PENDING {
            let mut counter = [0; 8];
            // The one who made it pending has written or is about to, so this waits for moments at most; without
            // it the descriptor would stay readable.
            loop {
                // SAFETY: `counter` is 8 writable bytes.
                let read =
                    unsafe { libc::read(self.event.as_raw_fd(), counter.as_mut_ptr().cast(), counter.len()) };
                if read >= 0 || io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
                    break;
                }
            }
        }
    }

    /// Whether something was notified since the turn began; clears it.
    pub(crate) fn take_pending(&self) -> bool {
        // The plain load spares a turn without news the cost of a locked instruction.
        self.state.load(Ordering::Acquire) & PENDING != 0
            && self.state.compare_exchange(PENDING, 0, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Ends a turn. False if something was notified meanwhile: then the turn goes on.
    #[must_use]
    pub(crate) fn end_turn(&self) -> bool {
        self.state.compare_exchange(0, IDLE, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Ends a turn for one that will not wait: what was notified meanwhile makes the descriptor readable.
    pub(crate) fn leave_turn(&self) {
        if !self.end_turn() {
            self.state.store(IDLE, Ordering::Release);
            self.notify();
        }
    }

    /// Waits until the descriptor is readable, at most `timeout`.
    pub(crate) fn wait_readable(&self, timeout: Option<std::time::Duration>) {
        let mut poll = libc::pollfd { fd: self.event.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        let time = timeout.map(timespec);
        let time = time.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: one pollfd; `time` is null or points to a timespec that lives through the call. An early return
        // (EINTR) is allowed here.
        let _ = unsafe { libc::ppoll(&raw mut poll, 1, time, std::ptr::null()) };
    }
}

impl AsFd for Notifier {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

/// A duration for the kernel; beyond some 292 billion years, that.
pub(crate) fn timespec(duration: std::time::Duration) -> libc::timespec {
    libc::timespec {
        tv_sec: libc::time_t::try_from(duration.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: duration.subsec_nanos().into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn readable(notifier: &Notifier) -> bool {
        let mut poll = libc::pollfd { fd: notifier.event.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one pollfd, no waiting.
        unsafe { libc::poll(&raw mut poll, 1, 0) == 1 }
    }

    #[test]
    fn readable_just_while_idle_and_pending() {
        let notifier = Notifier::new().unwrap();
        assert!(!readable(&notifier));
        notifier.notify();
        notifier.notify();
        assert!(readable(&notifier));
        notifier.begin_turn();
        assert!(!readable(&notifier) && !notifier.take_pending());
        notifier.notify();
        assert!(!readable(&notifier), "a running worker needs no system call");
        assert!(!notifier.end_turn(), "but may not go to sleep");
        assert!(notifier.take_pending() && notifier.end_turn());
        notifier.begin_turn();
        notifier.notify();
        notifier.leave_turn();
        assert!(readable(&notifier));
    }

    #[test]
    fn no_wake_up_is_lost() {
        let notifier = std::sync::Arc::new(Notifier::new().unwrap());
        let sent = std::sync::Arc::new(std::sync::atomic::AtomicU32::new(0));
        let (theirs, count) = (notifier.clone(), sent.clone());
        let thread = std::thread::spawn(move || {
            for _ in 0..20_000 {
                count.fetch_add(1, Ordering::SeqCst);
                theirs.notify();
            }
        });
        let mut seen = 0;
        while seen < 20_000 {
            if notifier.end_turn() {
                notifier.wait_readable(Some(Duration::from_secs(20)));
                assert!(readable(&notifier), "slept although something had been sent");
            }
            notifier.begin_turn();
            seen = sent.load(Ordering::SeqCst);
        }
        thread.join().unwrap();
    }
}
