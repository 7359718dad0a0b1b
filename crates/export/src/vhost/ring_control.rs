//! What the thread that talks to the front end and the task that serves a ring share.

use crate::stop::Stop;
use std::fs::File;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// A running ring, as the front end's thread sees it.
#[derive(Default)]
pub(crate) struct RingControl {
    pub(crate) stop: Stop,
    call: Mutex<Option<File>>,
    /// The next index of the available ring, once the ring stands still.
    end: Mutex<Option<u16>>,
    ended: Condvar,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl RingControl {
    pub(crate) fn new(call: Option<File>) -> Self {
        Self { call: Mutex::new(call), ..Self::default() }
    }

    /// Changes how the guest is told of used requests.
    pub(crate) fn set_call(&self, call: Option<File>) {
        *lock(&self.call) = call;
    }

    /// Tells the guest that requests were used.
    pub(crate) fn call(&self) {
        if let Some(call) = &*lock(&self.call) {
            // It fails only if the counter is full; then the guest has been told already.
            let _ = rustix::io::write(call, &1u64.to_ne_bytes());
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
                None => end = self.ended.wait(end).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }
}
