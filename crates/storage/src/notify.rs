//! How other threads, and event loops, learn that a worker has something to do.
//!
//! There are two eventfds. A worker that sleeps within a turn waits for one that nobody else has. Event loops get the
//! other, the *signal*, which they may register once and read whenever they like: nothing but their being woken depends
//! on its counter. The ring of a worker raises the same signal for its completions.
//!
//! One descriptor of epoll over the ring's signal and the notifier's would do as well, but could not be read, as users of
//! eventfds are used to, and costs two more wake-ups within the kernel. What does not do is to have the ring signal what
//! it learns by polling the notifier: the kernel does not raise an eventfd from within a write to an eventfd, but later,
//! 10 ms and more, and since Linux 6.11 (`io_eventfd_do_signal`) only the first time in the life of the ring.
//!
//! A worker that no event loop can see, and that waits for nothing but other threads, has a flag in memory instead of both.

use crate::foreign_event::is_eventfd;
use crate::sabotage::{self, Fault};
use crate::sync::{Condvar, Mutex};
#[cfg(all(test, shuttle))]
use shuttle::sync::atomic::AtomicU8;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
#[cfg(not(all(test, shuttle)))]
use std::sync::atomic::AtomicU8;
use std::sync::atomic::{AtomicBool, Ordering};

/// The worker sleeps within a turn.
const ASLEEP: u8 = 1;
/// The worker is between its turns: it will not look before someone calls it.
const OUTSIDE: u8 = 2;
/// There is something to look at.
const PENDING: u8 = 4;

/// A flag with descriptors. The event is written only if the worker sleeps, exactly once per change to
/// asleep-and-pending, and read exactly once when such a worker wakes. The signal is written when something becomes
/// pending between turns, if an event loop watches it. So a wake-up of a worker that is running costs no system call.
pub(crate) struct Notifier {
    state: AtomicU8,
    means: Means,
    watched: AtomicBool,
}

/// By what a worker that sleeps is woken.
enum Means {
    Descriptors { event: OwnedFd, signal: OwnedFd },
    Flag(Flag),
}

/// An event that only threads of this process wait for.
#[derive(Default)]
struct Flag {
    is_up: Mutex<bool>,
    went_up: Condvar,
}

fn eventfd(flags: libc::c_int) -> io::Result<OwnedFd> {
    // SAFETY: plain system call.
    let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | flags) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor that nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Adds one to the counter of an eventfd.
fn raise(fd: &OwnedFd) {
    let one = 1u64.to_ne_bytes();
    // SAFETY: `one` is 8 readable bytes. It fails only if the counter is full, and then the descriptor is readable.
    let _ = unsafe { libc::write(fd.as_raw_fd(), one.as_ptr().cast(), one.len()) };
}

/// Takes the counter of an eventfd.
fn take(fd: &OwnedFd) {
    let mut counter = [0; 8];
    loop {
        // SAFETY: `counter` is 8 writable bytes.
        let read = unsafe { libc::read(fd.as_raw_fd(), counter.as_mut_ptr().cast(), counter.len()) };
        if read >= 0 || io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
            break;
        }
    }
}

impl Notifier {
    pub(crate) fn new() -> io::Result<Self> {
        Self::with_signal(eventfd(libc::EFD_NONBLOCK)?)
    }

    /// A notifier whose signal is an eventfd of somebody else. It does not block from then on, for its other holders
    /// neither: the signal is read here when it may be empty.
    pub(crate) fn with_foreign_signal(signal: OwnedFd) -> io::Result<Self> {
        if !is_eventfd(&signal) {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        let flags = rustix::fs::fcntl_getfl(&signal)?;
        rustix::fs::fcntl_setfl(&signal, flags | rustix::fs::OFlags::NONBLOCK)?;
        Self::with_signal(signal)
    }

    fn with_signal(signal: OwnedFd) -> io::Result<Self> {
        Ok(Self::of_means(Means::Descriptors { event: eventfd(0)?, signal }))
    }

    /// A notifier without descriptors, of a worker that no event loop watches and that waits for nothing in the kernel.
    pub(crate) fn in_memory() -> Self {
        Self::of_means(Means::Flag(Flag::default()))
    }

    fn of_means(means: Means) -> Self {
        Self { state: AtomicU8::new(OUTSIDE), means, watched: AtomicBool::new(false) }
    }

    fn raise_event(&self) {
        match &self.means {
            Means::Descriptors { event, .. } => raise(event),
            Means::Flag(flag) => {
                *flag.is_up.lock() = true;
                flag.went_up.notify_one();
            }
        }
    }

    /// Takes the event back, and waits for it if whoever made the worker pending is still about to raise it.
    fn take_event(&self) {
        match &self.means {
            Means::Descriptors { event, .. } => take(event),
            Means::Flag(flag) => *flag.went_up.wait_while(flag.is_up.lock(), |is_up| !*is_up) = false,
        }
    }

    fn signal_fd(&self) -> &OwnedFd {
        match &self.means {
            Means::Descriptors { signal, .. } => signal,
            Means::Flag(_) => {
                unreachable!("nothing but its own call has a handle of a worker without descriptors")
            }
        }
    }

    /// The descriptor that event loops watch. It is kept up from [`Notifier::watch`] on.
    pub(crate) fn signal(&self) -> BorrowedFd<'_> {
        self.signal_fd().as_fd()
    }

    /// Its descriptors.
    pub(crate) fn descriptors(&self) -> [BorrowedFd<'_>; 2] {
        [self.as_fd(), self.signal()]
    }

    /// From now on, an event loop watches the signal.
    pub(crate) fn watch(&self) {
        self.watched.store(true, Ordering::SeqCst);
        // Either this sees what is pending, or who made it pending sees that the signal is watched.
        if self.state.load(Ordering::SeqCst) == OUTSIDE | PENDING {
            self.raise_signal();
        }
    }

    pub(crate) fn is_watched(&self) -> bool {
        self.watched.load(Ordering::SeqCst)
    }

    /// Makes the signal readable.
    pub(crate) fn raise_signal(&self) {
        raise(self.signal_fd());
    }

    /// Tells the worker to look at its queues. What it shall find must have been stored before.
    pub(crate) fn notify(&self) {
        match self.state.fetch_or(PENDING, Ordering::SeqCst) {
            ASLEEP => self.raise_event(),
            OUTSIDE if self.is_watched() => self.raise_signal(),
            _ => {}
        }
    }

    /// As [`Notifier::notify`], for the worker's own thread: within a turn it knows by itself, and between turns
    /// only an event loop needs to be told.
    pub(crate) fn notify_event_loop(&self) {
        if self.state.load(Ordering::Relaxed) == OUTSIDE && self.watched.load(Ordering::Relaxed) {
            self.notify();
        }
    }

    /// Begins a turn of the worker, or goes on with it after a sleep: whatever was notified before is to be looked at
    /// now.
    pub(crate) fn begin_turn(&self) {
        let before = self.state.swap(0, Ordering::SeqCst);
        if before == ASLEEP | PENDING {
            // The one who made it pending has written or is about to, so this waits for moments at most; without
            // it the descriptor would stay readable.
            self.take_event();
        }
        if before & OUTSIDE != 0 && self.is_watched() {
            // Who made it pending may be about to write still: the event loop is woken once for nothing then.
            take(self.signal_fd());
        }
    }

    /// Whether something was notified since the turn began; clears it.
    pub(crate) fn take_pending(&self) -> bool {
        // The plain load spares a turn without news the cost of a locked instruction.
        self.state.load(Ordering::Acquire) & PENDING != 0
            && self.state.compare_exchange(PENDING, 0, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Lets the worker sleep within its turn. False if something was notified meanwhile: then the turn goes on.
    #[must_use]
    pub(crate) fn fall_asleep(&self) -> bool {
        if matches!(self.means, Means::Flag(_)) && sabotage::is(Fault::SleepOnWake) {
            self.state.store(ASLEEP, Ordering::SeqCst);
            return true;
        }
        self.state.compare_exchange(0, ASLEEP, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// Ends a turn: what was notified meanwhile makes the signal readable.
    pub(crate) fn leave_turn(&self) {
        if self.state.fetch_or(OUTSIDE, Ordering::SeqCst) & PENDING != 0 && self.is_watched() {
            self.raise_signal();
        }
    }

    /// Waits until a worker that fell asleep was notified, at most `timeout`.
    pub(crate) fn wait_notified(&self, timeout: Option<std::time::Duration>) {
        let event = match &self.means {
            Means::Descriptors { event, .. } => event,
            Means::Flag(flag) => {
                let is_down = |is_up: &mut bool| !*is_up;
                match timeout {
                    None => drop(flag.went_up.wait_while(flag.is_up.lock(), is_down)),
                    Some(time) => drop(flag.went_up.wait_timeout_while(flag.is_up.lock(), time, is_down)),
                }
                return;
            }
        };
        let mut poll = libc::pollfd { fd: event.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        let time = timeout.map(timespec);
        let time = time.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: one pollfd; `time` is null or points to a timespec that lives through the call. An early return
        // (EINTR) is allowed here.
        let _ = unsafe { libc::ppoll(&raw mut poll, 1, time, std::ptr::null()) };
    }
}

impl AsFd for Notifier {
    /// Readable when a worker that fell asleep was notified.
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.means {
            Means::Descriptors { event, .. } => event.as_fd(),
            Means::Flag(_) => {
                unreachable!("a worker without descriptors has no operations of the kernel's to wait for")
            }
        }
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

    fn readable(fd: BorrowedFd<'_>) -> bool {
        let mut poll = libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one pollfd, no waiting.
        unsafe { libc::poll(&raw mut poll, 1, 0) == 1 }
    }

    #[test]
    fn the_event_is_readable_just_while_asleep_and_pending() {
        let notifier = Notifier::new().unwrap();
        notifier.notify();
        notifier.begin_turn();
        assert!(!notifier.take_pending());
        notifier.notify();
        assert!(!readable(notifier.as_fd()), "a running worker needs no system call");
        assert!(!notifier.fall_asleep(), "but may not go to sleep");
        assert!(notifier.take_pending() && notifier.fall_asleep());
        notifier.notify();
        notifier.notify();
        assert!(readable(notifier.as_fd()) && !readable(notifier.signal()));
        notifier.begin_turn();
        assert!(!readable(notifier.as_fd()));
    }

    #[test]
    fn the_signal_shows_what_comes_between_turns() {
        let notifier = Notifier::new().unwrap();
        notifier.notify();
        assert!(!readable(notifier.signal()), "nobody watches");
        notifier.watch();
        assert!(readable(notifier.signal()), "what came before shows");
        notifier.begin_turn();
        assert!(!readable(notifier.signal()));
        notifier.notify();
        assert!(!readable(notifier.signal()));
        notifier.leave_turn();
        assert!(readable(notifier.signal()) && !readable(notifier.as_fd()));
        notifier.begin_turn();
        notifier.leave_turn();
        assert!(!readable(notifier.signal()));
        notifier.notify_event_loop();
        assert!(readable(notifier.signal()));
    }

    #[test]
    fn no_wake_up_is_lost() {
        for notifier in [Notifier::new().unwrap(), Notifier::in_memory()] {
            lose_no_wake_up(notifier);
        }
    }

    fn lose_no_wake_up(notifier: Notifier) {
        let has_descriptors = matches!(notifier.means, Means::Descriptors { .. });
        let notifier = std::sync::Arc::new(notifier);
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
            if notifier.fall_asleep() {
                notifier.wait_notified(Some(Duration::from_secs(600)));
                assert!(
                    !has_descriptors || readable(notifier.as_fd()),
                    "slept although something had been sent"
                );
            }
            notifier.begin_turn();
            seen = sent.load(Ordering::SeqCst);
        }
        thread.join().unwrap();
    }
}
