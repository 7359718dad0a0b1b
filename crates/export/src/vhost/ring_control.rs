//! State shared by the thread that talks to the front end and the task that serves a ring.

use crate::stop::Stop;
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Weak};
use zebu_storage::ForeignEvent;
use zebu_storage::sync::{Condvar, Mutex, MutexGuard};

/// A running ring, as the front end's thread sees it.
pub(crate) struct RingControl {
    pub(crate) stop: Stop,
    /// The connection to the front end.
    connection: Arc<UnixStream>,
    call: Mutex<Option<Arc<ForeignEvent>>>,
    error: Mutex<Option<Arc<ForeignEvent>>>,
    /// The next index of the available ring, once the ring stands still.
    end: Mutex<Option<u16>>,
    ended: Condvar,
}

/// The rings of a device that run.
#[derive(Default)]
pub(crate) struct RunningRings(Mutex<State>);

#[derive(Default)]
struct State {
    rings: Vec<Weak<RingControl>>,
    is_over: bool,
}

impl RunningRings {
    /// Adds a ring that starts; false if none may start any more.
    pub(crate) fn add(&self, ring: &Arc<RingControl>) -> bool {
        let mut state = lock(&self.0);
        state.rings.retain(|ring| ring.strong_count() > 0);
        state.rings.push(Arc::downgrade(ring));
        !state.is_over
    }

    /// Tells all to stop, and lets none start.
    pub(crate) fn stop(&self) {
        let mut state = lock(&self.0);
        state.is_over = true;
        state.rings.drain(..).filter_map(|ring| ring.upgrade()).for_each(|ring| ring.stop.throw());
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock()
}

impl RingControl {
    pub(crate) fn new(
        connection: &Arc<UnixStream>,
        call: Option<Arc<ForeignEvent>>,
        error: Option<Arc<ForeignEvent>>,
    ) -> Self {
        Self {
            stop: Stop::default(),
            connection: Arc::clone(connection),
            call: Mutex::new(call),
            error: Mutex::new(error),
            end: Mutex::default(),
            ended: Condvar::new(),
        }
    }

    /// Ends the connection, and with it the device of this front end.
    pub(crate) fn hang_up(&self) {
        // Fails only if the front end did it first.
        let _ = self.connection.shutdown(std::net::Shutdown::Both);
    }

    /// Changes how the guest is told of used requests.
    pub(crate) fn set_call(&self, call: Option<Arc<ForeignEvent>>) {
        *lock(&self.call) = call;
    }

    /// Tells the guest that requests were used, whatever the front end did to the descriptor, and without waiting.
    ///
    /// # Errors
    /// The kernel lacks memory for it.
    pub(crate) fn call(&self) -> io::Result<()> {
        lock(&self.call).as_ref().map_or(Ok(()), |call| call.signal())
    }

    /// Changes how the front end is told of errors.
    pub(crate) fn set_error(&self, error: Option<Arc<ForeignEvent>>) {
        *lock(&self.error) = error;
    }

    /// Tells the front end that the ring is broken, if it wants to know.
    pub(crate) fn tell_of_error(&self) {
        if let Some(error) = &*lock(&self.error) {
            // It is in the log as well.
            let _ = error.signal();
        }
    }

    /// The ring stands still.
    pub(crate) fn has_ended(&self, next_avail: u16) {
        *lock(&self.end) = Some(next_avail);
        self.ended.notify_all();
    }

    /// Stops the ring and waits until nothing of it is in flight; the next index of the available ring.
    pub(crate) fn end(&self) -> u16 {
        self.stop.throw();
        let mut end = lock(&self.end);
        loop {
            match *end {
                Some(next) => return next,
                None => end = self.ended.wait(end),
            }
        }
    }
}
