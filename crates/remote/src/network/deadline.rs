//! Times by which something must be over.

use std::io;
use std::time::{Duration, Instant};

/// The time until then.
///
/// # Errors
/// It is over.
pub(crate) fn time_left(until: Instant) -> io::Result<Duration> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(late()) } else { Ok(left) }
}

/// The server took too long.
pub(crate) fn late() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "the server does not answer")
}
