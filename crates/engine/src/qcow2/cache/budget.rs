//! The byte budget of a chain's mapping: who holds how much of it.
//!
//! Everything that grows with the disk is in it: slices with what they cost beyond their content, the buffers that
//! they are loaded through, the copies that a commit works on, the extent index, the tables that are held whole. Memory
//! is reserved before it is taken, so the sum stays within the limit. Three things may exceed it:
//!
//! - tables, which can't be given up while the image is open;
//! - slices that were changed and wait for their commit, when nothing else is left to give up (commits start long before, see
//!   [`crate::qcow2::cache::slice_cache::Pressure`]);
//! - a load that is alone, or has waited a second for room.

use crate::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The budget of the mapping cache. All in bytes.
#[derive(Debug)]
pub(crate) struct Budget {
    limit: AtomicU64,
    used: ByteCount,
    /// The part of `used` that tables hold.
    tables: ByteCount,
    /// The part of `used` that the extent index holds.
    index: ByteCount,
}

impl Budget {
    pub(crate) fn new(limit: u64) -> Self {
        Self {
            limit: AtomicU64::new(limit),
            used: ByteCount::default(),
            tables: ByteCount::default(),
            index: ByteCount::default(),
        }
    }

    pub(crate) fn limit(&self) -> u64 {
        self.limit.load(Relaxed)
    }
    pub(crate) fn set_limit(&self, limit: u64) {
        self.limit.store(limit, Relaxed);
    }
    pub(crate) fn used(&self) -> u64 {
        self.used.get()
    }
    pub(crate) fn tables(&self) -> u64 {
        self.tables.get()
    }
    pub(crate) fn index(&self) -> u64 {
        self.index.get()
    }

    /// Bytes that are left for slices.
    pub(crate) fn for_slices(&self) -> u64 {
        self.limit().saturating_sub(self.tables())
    }

    pub(crate) fn is_exceeded(&self) -> bool {
        self.used() > self.limit()
    }

    /// How often a count would have wrapped: more than 0 is a bug.
    pub(crate) fn miscounts(&self) -> u64 {
        [&self.used, &self.tables, &self.index].into_iter().map(ByteCount::miscounts).sum()
    }

    /// Takes `bytes` if they fit.
    pub(crate) fn try_take(&self, bytes: u64) -> bool {
        self.used.try_raise(bytes, self.limit())
    }

    /// Takes `bytes` in any case.
    pub(crate) fn take(&self, bytes: u64) {
        self.used.raise(bytes);
    }

    /// Gives back `bytes` that were taken.
    pub(crate) fn give_back(&self, bytes: u64) {
        self.used.lower(bytes);
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
        self.index.raise(bytes);
        true
    }

    pub(crate) fn give_back_index(&self, bytes: u64) {
        self.index.lower(bytes);
        self.give_back(bytes);
    }

    /// Notes that tables grew by `bytes`.
    pub(crate) fn take_for_tables(&self, bytes: u64) {
        self.tables.raise(bytes);
        self.take(bytes);
    }

    pub(crate) fn give_back_tables(&self, bytes: u64) {
        self.tables.lower(bytes);
        self.give_back(bytes);
    }
}

/// A count of bytes that stays between 0 and its largest value whatever is added and taken away: one that wraps would stop all
/// loads for good. That it would have wrapped is a bug. It is counted, and a panic where assertions are on.
#[derive(Debug, Default)]
pub(super) struct ByteCount {
    bytes: AtomicU64,
    miscounts: AtomicU64,
}

impl ByteCount {
    #[inline]
    pub(super) fn get(&self) -> u64 {
        self.bytes.load(Relaxed)
    }

    pub(super) fn raise(&self, by: u64) {
        let add = |old: u64| Some(old.saturating_add(by));
        let old = self.bytes.fetch_update(Relaxed, Relaxed, add).unwrap_or_default();
        if old.checked_add(by).is_none() {
            self.note_miscount(format_args!("a budget's {old} bytes grow by {by}"));
        }
    }

    pub(super) fn lower(&self, by: u64) {
        let take = |old: u64| Some(old.saturating_sub(by));
        let old = self.bytes.fetch_update(Relaxed, Relaxed, take).unwrap_or_default();
        if old < by {
            self.note_miscount(format_args!("{by} bytes are given back to a budget of {old}"));
        }
    }

    /// Raises it unless it would be more than `limit`.
    fn try_raise(&self, by: u64, limit: u64) -> bool {
        let fits = |old: u64| old.checked_add(by).filter(|sum| *sum <= limit);
        self.bytes.fetch_update(Relaxed, Relaxed, fits).is_ok()
    }

    #[cold]
    fn note_miscount(&self, what: std::fmt::Arguments<'_>) {
        self.miscounts.fetch_add(1, Relaxed);
        debug_assert!(false, "{what}");
    }

    /// How often it would have wrapped.
    pub(super) fn miscounts(&self) -> u64 {
        self.miscounts.load(Relaxed)
    }
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

    #[test]
    fn what_would_wrap_is_kept_within_bounds_and_counted() {
        let count = ByteCount::default();
        count.raise(100);
        // With assertions, each panics once it is counted.
        let wraps = [
            |count: &ByteCount| count.lower(101),
            |count: &ByteCount| {
                count.raise(7);
                count.raise(u64::MAX);
            },
        ];
        for (number, wrap) in (1..).zip(wraps) {
            let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| wrap(&count)));
            assert_eq!((ended.is_err(), count.miscounts()), (cfg!(debug_assertions), number));
        }
        assert_eq!(count.get(), u64::MAX);
        count.lower(u64::MAX);
        assert_eq!((count.get(), count.miscounts()), (0, 2));
    }
}
