//! Counting the views of bytes that a caller lends.

use crate::sync::{Condvar, Mutex};
use std::sync::Arc;

/// How many views are out.
#[derive(Default)]
pub(crate) struct Views {
    count: Mutex<usize>,
    none: Condvar,
}

/// The lender of one run of bytes, held by the views of it.
pub(crate) struct Lender(Arc<Views>);

impl Lender {
    pub(crate) fn new(views: &Arc<Views>) -> Arc<Self> {
        *views.count.lock() += 1;
        Arc::new(Self(Arc::clone(views)))
    }
}

impl Drop for Lender {
    fn drop(&mut self) {
        let mut count = self.0.count.lock();
        *count -= 1;
        if *count == 0 {
            self.0.none.notify_all();
        }
    }
}

/// Waits, at the end of a call, until no view is out.
pub(crate) struct UntilReturned<'a>(pub(crate) &'a Views);

impl Drop for UntilReturned<'_> {
    fn drop(&mut self) {
        drop(self.0.none.wait_while(self.0.count.lock(), |count| *count > 0));
    }
}
