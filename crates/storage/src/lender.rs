//! Counting the views of bytes that a caller lends.

use crate::sync::{Condvar, Mutex};
use std::sync::Arc;

/// How many views are out.
#[derive(Default)]
pub(crate) struct Views {
    state: Mutex<State>,
    none: Condvar,
}

#[derive(Default)]
struct State {
    out: usize,
    /// A call waits for the last one. Where none does, which is usual, its return costs no system call.
    is_awaited: bool,
}

/// The lender of one run of bytes, held by the views of it.
pub(crate) struct Lender(Arc<Views>);

impl Lender {
    pub(crate) fn new(views: &Arc<Views>) -> Arc<Self> {
        views.state.lock().out += 1;
        Arc::new(Self(Arc::clone(views)))
    }
}

impl Drop for Lender {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.out -= 1;
        if state.out == 0 && state.is_awaited {
            self.0.none.notify_all();
        }
    }
}

/// Waits, at the end of a call, until no view is out.
pub(crate) struct UntilReturned<'a>(pub(crate) &'a Views);

impl Drop for UntilReturned<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.is_awaited = true;
        drop(self.0.none.wait_while(state, |state| state.out > 0));
    }
}
