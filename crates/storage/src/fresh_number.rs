//! Numbers that no two things of a process share.

use std::sync::atomic::{AtomicU64, Ordering};

/// A number that was not given before in this process; never 0.
pub fn fresh_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}
