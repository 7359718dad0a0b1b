//! A check, in debug builds, that a file grows by one request at a time.
//!
//! XFS once lost direct writes past the end of a file while another request extended it (the corruption of 2019). So
//! nothing here writes, zeroes or allocates past the end while another request that does is in flight: whoever wants
//! to write much beyond the end grows the file first.

use crate::sync::Mutex;
use std::ops::Range;

/// The requests in flight that go past the end of one file.
#[derive(Default)]
pub(crate) struct GrowthCheck {
    in_flight: Mutex<Vec<Range<u64>>>,
}

impl GrowthCheck {
    /// Notes a request that goes past the end.
    ///
    /// # Panics
    /// If another is in flight.
    pub(crate) fn begin(&self, range: Range<u64>) {
        let mut in_flight = self.in_flight.lock();
        if let Some(other) = in_flight.first().cloned() {
            drop(in_flight);
            panic!("{range:?} and {other:?} both go past the end of the file at once: grow it first");
        }
        in_flight.push(range);
    }

    /// The request is over.
    pub(crate) fn end(&self) {
        self.in_flight.lock().clear();
    }
}
