//! The values that one place of a virtual disk may have: which request made each, and when.

use smallvec::{SmallVec, smallvec};

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GuestResult {
    /// It succeeded.
    Done,
    /// It succeeded, and what it wrote is durable (FUA).
    Durable,
    /// It failed: each sector may be old or new, for good.
    Failed,
    /// It failed and was promised to have changed nothing.
    FailedUnchanged,
}

/// One thing that a sector (or the length) may be, and when it was made so.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry<V> {
    pub(crate) op: u32,
    pub(crate) value: V,
    pub(crate) begin: u64,
    pub(crate) end: u64,
    /// Whether it surely replaced what was there before it began.
    pub(crate) settles: bool,
    pub(crate) durable: bool,
}

impl<V> Entry<V> {
    fn replaces(&self, other: &Self) -> bool {
        self.settles && self.begin > other.end
    }
}

/// In the order of beginning.
pub(crate) type Entries<V> = SmallVec<[Entry<V>; 2]>;

/// The entries that may show, if everything that `counts` accepts has surely happened.
pub(crate) fn possible<'a, V>(
    entries: &'a [Entry<V>],
    counts: impl Fn(&Entry<V>) -> bool + 'a,
) -> impl Iterator<Item = &'a Entry<V>> {
    entries.iter().filter(move |entry| !entries.iter().any(|other| counts(other) && other.replaces(entry)))
}

/// A value that is durable from the start.
pub(crate) fn settled<V>(value: V) -> Entries<V> {
    smallvec![Entry { op: 0, value, begin: 0, end: 0, settles: true, durable: true }]
}

/// Reduces the possibilities to those that a crash leaves.
pub(crate) fn survive<V: Copy + PartialEq>(entries: &mut Entries<V>, now: u64) {
    let mut left: Entries<V> = SmallVec::new();
    for entry in possible(entries, |e| e.durable) {
        if !left.iter().any(|e| e.value == entry.value) {
            left.push(Entry { begin: now, end: now, settles: true, durable: true, ..*entry });
        }
    }
    *entries = left;
}

/// The request `op` is over.
pub(crate) fn close<V: PartialEq>(entries: &mut Entries<V>, op: u32, end: u64, result: GuestResult) {
    if result == GuestResult::FailedUnchanged {
        entries.retain(|e| e.op != op);
        return;
    }
    for entry in entries.iter_mut().filter(|e| e.op == op) {
        entry.end = end;
        entry.settles &= result != GuestResult::Failed;
        entry.durable |= result == GuestResult::Durable;
    }
}

/// Makes entries durable that ended before `begin`; removes those that can't show any more, to the oldest reader either.
pub(crate) fn mark_durable<V: Copy>(entries: &mut Entries<V>, begin: u64, oldest_reader: u64) {
    for entry in entries.iter_mut() {
        entry.durable |= entry.end < begin;
    }
    let all: Entries<V> = entries.iter().copied().collect();
    // Neither a crash nor a read that is still under way can show an entry that was replaced for both.
    entries.retain(|e| !all.iter().any(|o| o.durable && o.end < oldest_reader && o.replaces(e)));
}
