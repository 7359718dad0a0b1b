//! The byte budget of a chain's mapping: who holds how much of it.
//!
//! Everything that grows with the disk is in it: slices with what they cost beyond their content, the buffers that
//! they are loaded through, the copies that a commit works on, the extent index, the tables that are held whole. Memory
//! is reserved before it is taken, so the sum stays within the limit. Two things may exceed it: tables, which can't be
//! given up while the image is open, and slices that were changed and wait for their commit, when nothing else is left
//! to give up (commits start long before, see [`crate::qcow2::cache::slice_cache::Pressure`]).

use crate::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The budget of the mapping cache. All in bytes.
#[derive(Debug)]
pub(crate) struct Budget {
    limit: AtomicU64,
    used: AtomicU64,
    /// The part of `used` that tables hold.
    tables: AtomicU64,
    /// The part of `used` that the extent index holds.
    index: AtomicU64,
}

impl Budget {
    pub(crate) fn new(limit: u64) -> Self {
        Self {
            limit: AtomicU64::new(limit),
            used: AtomicU64::new(0),
            tables: AtomicU64::new(0),
            index: AtomicU64::new(0),
        }
    }

    pub(crate) fn limit(&self) -> u64 {
        self.limit.load(Relaxed)
    }
    pub(crate) fn set_limit(&self, limit: u64) {
        self.limit.store(limit, Relaxed);
    }
    pub(crate) fn used(&self) -> u64 {
        self.used.load(Relaxed)
    }
    pub(crate) fn tables(&self) -> u64 {
        self.tables.load(Relaxed)
    }
    pub(crate) fn index(&self) -> u64 {
        self.index.load(Relaxed)
    }

    /// Bytes that are left for slices.
    pub(crate) fn for_slices(&self) -> u64 {
        self.limit().saturating_sub(self.tables())
    }

    pub(crate) fn is_exceeded(&self) -> bool {
        self.used() > self.limit()
    }

    /// Takes `bytes` if they fit.
    pub(crate) fn try_take(&self, bytes: u64) -> bool {
        let fits = |used: u64| used.checked_add(bytes).filter(|sum| *sum <= self.limit());
        self.used.fetch_update(Relaxed, Relaxed, fits).is_ok()
    }

    /// Takes `bytes` in any case.
    pub(crate) fn take(&self, bytes: u64) {
        raise(&self.used, bytes);
    }

    /// Gives back `bytes` that were taken.
    pub(crate) fn give_back(&self, bytes: u64) {
        lower(&self.used, bytes);
    }

    /// Whether `bytes` more would be more than the index may have: a quarter of what is there for slices.
    pub(crate) fn index_is_full(&self, bytes: u64) -> bool {
        (self.index() + bytes) * 4 > self.for_slices()
    }

    /// Takes `bytes` for the index if they fit, within its share and the whole.
    pub(crate) fn try_take_for_index(&self, bytes: u64) -> bool {
        if self.index_is_full(bytes) || !self.try_take(bytes) {
            return false;
        }
        self.index.fetch_add(bytes, Relaxed);
        true
    }

    pub(crate) fn give_back_index(&self, bytes: u64) {
        lower(&self.index, bytes);
        self.give_back(bytes);
    }

    /// Notes that tables grew by `bytes`.
    pub(crate) fn take_for_tables(&self, bytes: u64) {
        raise(&self.tables, bytes);
        self.take(bytes);
    }

    pub(crate) fn give_back_tables(&self, bytes: u64) {
        lower(&self.tables, bytes);
        self.give_back(bytes);
    }
}

/// Raises a count, to its largest value at most. More is a bug, and a panic where assertions are on: a count that wraps
/// would stop all loads for good.
pub(super) fn raise(count: &AtomicU64, by: u64) {
    let _ = count.fetch_update(Relaxed, Relaxed, |old| {
        debug_assert!(old.checked_add(by).is_some(), "the budget's {old} bytes grow by {by}");
        Some(old.saturating_add(by))
    });
}

/// Lowers a count, to 0 at least, as [`raise`] raises it.
pub(super) fn lower(count: &AtomicU64, by: u64) {
    let _ = count.fetch_update(Relaxed, Relaxed, |old| {
        debug_assert!(old >= by, "{by} bytes are given back to a budget of {old}");
        Some(old.saturating_sub(by))
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_not_taken() {
        let budget = Budget::new(1000);
        assert!(budget.try_take(600));
        assert!(!budget.try_take(401));
        assert!(budget.try_take(400));
        assert!(!budget.try_take(u64::MAX));
        budget.give_back(600);
        assert_eq!(budget.used(), 400);
        budget.take(900);
        assert!(budget.is_exceeded());
    }

    #[test]
    fn the_index_has_a_quarter_at_most() {
        let budget = Budget::new(1000);
        budget.take_for_tables(200);
        assert!(budget.try_take_for_index(200));
        assert!(!budget.try_take_for_index(1));
        budget.give_back_index(200);
        assert_eq!((budget.used(), budget.index(), budget.tables()), (200, 0, 200));
    }
}
