//! The extent index: long runs of guest clusters that lie one after the other on the host too, an entry each.
//!
//! Derived data: any entry may go at any time, and goes when a cluster of it changes. Entries are sorted by guest
//! address in shards by region; a lookup takes one shard's mutex for a search in a small tree, and none at all where
//! the shard is empty. Memory is taken from the budget before an entry is made ([`Extents::top_up`]); without any left,
//! a new entry takes the place of an old one.

use crate::chain::place::ClusterPlace;
use crate::qcow2::cache::slice_store::SliceStore;
use crate::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use crate::sync::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

const SHARDS: usize = crate::sync::spread(64);
/// Bytes of an entry, with what a tree's nodes keep free.
const ENTRY_COST: u64 = 48;
/// Entries that memory is taken for at once.
const TOP_UP: u64 = 64;
/// Entries that a change may add: it can split one at each end of a region.
const RESERVE: u64 = 8;
/// Clusters of a region at least, as a power of two.
const MIN_REGION_BITS: u32 = 12;
/// Regions of a disk at most, as a power of two.
const MAX_REGIONS_BITS: u32 = 10;

/// Fewest clusters of a run that is worth an entry: fewer take less memory in a slice.
pub(crate) const MIN_UNITS: u64 = 8;

/// A run: how many clusters from its key on, and where the first is.
#[derive(Debug, Clone, Copy)]
struct Entry {
    word: u64,
    units: u32,
    depth: u16,
}

impl Entry {
    fn new(units: u64, place: ClusterPlace) -> Self {
        Self { word: place.extent_word(), units: units as u32, depth: place.depth }
    }
    fn place(self) -> ClusterPlace {
        ClusterPlace::from_extent_word(self.word, self.depth)
    }
}

#[derive(Debug, Default)]
struct Tree {
    entries: BTreeMap<u64, Entry>,
    /// Where the search for an entry to replace goes on.
    cursor: u64,
    hits: u64,
    /// The hits there were when it was last looked whether the tree is used.
    hits_seen: u64,
}

impl Tree {
    /// The run that has `unit`, and how many clusters of it lie before that.
    fn run_of(&self, unit: u64) -> Option<(u64, Entry)> {
        let (first, entry) = self.entries.range(..=unit).next_back()?;
        let ahead = unit - first;
        (ahead < u64::from(entry.units)).then_some((ahead, *entry))
    }
}

#[repr(align(128))]
#[derive(Debug, Default)]
struct Shard {
    /// Entries in the tree.
    len: AtomicUsize,
    tree: Mutex<Tree>,
}

/// The index of runs, in shards.
#[derive(Debug)]
pub(crate) struct Extents {
    shards: Box<[Shard]>,
    unit_bits: u32,
    /// Clusters of a region, as a power of two. No run crosses the border of two regions.
    region_bits: u32,
    store: Arc<SliceStore>,
    /// Entries that memory is there for.
    paid: AtomicU64,
    used: AtomicU64,
    /// When it was last looked which trees are used.
    tidied: Mutex<Instant>,
}

impl Extents {
    /// For a disk of `size` bytes in clusters of `1 << unit_bits`.
    pub(crate) fn new(store: Arc<SliceStore>, size: u64, unit_bits: u32) -> Self {
        let units = (size >> unit_bits).max(1);
        let bits = 64 - units.leading_zeros();
        Self {
            shards: (0..SHARDS).map(|_| Shard::default()).collect(),
            unit_bits,
            region_bits: bits.saturating_sub(MAX_REGIONS_BITS).clamp(MIN_REGION_BITS, 31),
            store,
            paid: AtomicU64::new(0),
            used: AtomicU64::new(0),
            tidied: Mutex::new(Instant::now()),
        }
    }

    fn shard(&self, unit: u64) -> &Shard {
        let region = unit >> self.region_bits;
        &self.shards[(region.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 58) as usize % SHARDS]
    }

    /// The place of `unit`, and how many clusters of its run lie from there on.
    #[inline]
    pub(crate) fn find(&self, unit: u64) -> Option<(ClusterPlace, u64)> {
        let shard = self.shard(unit);
        if shard.len.load(Relaxed) == 0 {
            return None;
        }
        let mut tree = lock(shard);
        let (ahead, entry) = tree.run_of(unit)?;
        let found = (entry.place().advanced(ahead << self.unit_bits), u64::from(entry.units) - ahead);
        tree.hits += 1;
        Some(found)
    }

    /// Whether a run has `unit`.
    pub(crate) fn has(&self, unit: u64) -> bool {
        let shard = self.shard(unit);
        shard.len.load(Relaxed) > 0 && lock(shard).run_of(unit).is_some()
    }

    /// Takes memory for some more entries if there are few left. No lock is held.
    pub(crate) fn top_up(&self) {
        let paid = self.paid.load(Relaxed);
        if paid < self.used.load(Relaxed) + RESERVE && self.store.room_for_index(TOP_UP * ENTRY_COST) {
            self.paid.fetch_add(TOP_UP, Relaxed);
        }
    }

    /// Adds the run of `units`, the first of which is at `place`. The caller holds the lock of what it was read from.
    pub(crate) fn insert(&self, units: Range<u64>, place: ClusterPlace) {
        let mut at = units.start;
        while at < units.end {
            let region_end = ((at >> self.region_bits) + 1) << self.region_bits;
            let end = region_end.min(units.end);
            self.insert_in_region(at..end, place.advanced((at - units.start) << self.unit_bits));
            at = end;
        }
    }

    fn insert_in_region(&self, mut units: Range<u64>, mut place: ClusterPlace) {
        let shard = self.shard(units.start);
        let mut tree = lock(shard);
        self.cut(&mut tree, units.clone());
        let region_start = units.start >> self.region_bits << self.region_bits;
        if let Some((first, left)) = tree.entries.range(region_start..units.start).next_back()
            && first + u64::from(left.units) == units.start
            && left.place().advanced((units.start - first) << self.unit_bits) == place
        {
            (units.start, place) = (*first, left.place());
            tree.entries.remove(&units.start);
            self.used.fetch_sub(1, Relaxed);
        }
        if units.end & ((1 << self.region_bits) - 1) != 0
            && let Some(right) = tree.entries.get(&units.end).copied()
            && place.advanced((units.end - units.start) << self.unit_bits) == right.place()
        {
            tree.entries.remove(&units.end);
            self.used.fetch_sub(1, Relaxed);
            units.end += u64::from(right.units);
        }
        if self.pay_for_one(&mut tree) {
            tree.entries.insert(units.start, Entry::new(units.end - units.start, place));
        }
        shard.len.store(tree.entries.len(), Relaxed);
    }

    /// Room for one more entry: paid for already, or that of an older one.
    fn pay_for_one(&self, tree: &mut Tree) -> bool {
        let paid = self.paid.load(Relaxed);
        if self.used.fetch_update(Relaxed, Relaxed, |used| (used < paid).then_some(used + 1)).is_ok() {
            return true;
        }
        let victim = tree.entries.range(tree.cursor..).next().or_else(|| tree.entries.iter().next());
        let Some(victim) = victim.map(|(first, _)| *first) else { return false };
        tree.cursor = victim + 1;
        tree.entries.remove(&victim);
        true
    }

    /// Forgets `units`; what is left of runs that they cut stays.
    pub(crate) fn forget(&self, units: Range<u64>) {
        let mut at = units.start;
        while at < units.end {
            let region_end = ((at >> self.region_bits) + 1) << self.region_bits;
            let end = region_end.min(units.end);
            let shard = self.shard(at);
            // Whoever adds an entry for a cluster and whoever changes it hold the same lock: an entry that matters
            // is seen.
            if shard.len.load(Relaxed) > 0 {
                let mut tree = lock(shard);
                self.cut(&mut tree, at..end);
                shard.len.store(tree.entries.len(), Relaxed);
            }
            at = end;
        }
    }

    /// Takes `units`, which lie in one region, out of the tree.
    fn cut(&self, tree: &mut Tree, units: Range<u64>) {
        while let Some((&first, &entry)) = tree.entries.range(..units.end).next_back() {
            let end = first + u64::from(entry.units);
            if end <= units.start {
                return;
            }
            tree.entries.remove(&first);
            self.used.fetch_sub(1, Relaxed);
            if first < units.start && self.pay_for_one(tree) {
                tree.entries.insert(first, Entry::new(units.start - first, entry.place()));
            }
            if end > units.end && self.pay_for_one(tree) {
                let place = entry.place().advanced((units.end - first) << self.unit_bits);
                tree.entries.insert(units.end, Entry::new(end - units.end, place));
            }
            if first <= units.start {
                return;
            }
        }
    }

    /// Forgets everything, and gives the memory back. True if there was any.
    pub(crate) fn clear(&self) -> bool {
        for shard in &self.shards {
            self.empty(shard, &mut lock(shard));
        }
        self.give_back()
    }

    fn empty(&self, shard: &Shard, tree: &mut Tree) {
        self.used.fetch_sub(tree.entries.len() as u64, Relaxed);
        tree.entries = BTreeMap::new();
        shard.len.store(0, Relaxed);
    }

    /// Gives back the memory of entries that are not there. True if there was any.
    fn give_back(&self) -> bool {
        let used = self.used.load(Relaxed);
        // An entry may have been added meanwhile with what was given back just now. What is paid for never rises here: it
        // would be given back once more than it was taken.
        let spare = |paid: u64| (paid > used).then_some(used);
        let Ok(paid) = self.paid.fetch_update(Relaxed, Relaxed, spare) else { return false };
        self.store.budget().give_back_index((paid - used) * ENTRY_COST);
        true
    }

    /// Gives up the trees in which nothing was found since it last did so, if that is long enough ago. True if memory came
    /// free.
    pub(crate) fn tidy(&self, now: Instant) -> bool {
        let interval = self.store.interval();
        if interval.is_zero() {
            return false;
        }
        {
            let mut tidied = self.tidied.lock();
            if now.saturating_duration_since(*tidied) < interval {
                return false;
            }
            *tidied = now;
        }
        for shard in &self.shards {
            let mut tree = lock(shard);
            if tree.hits == tree.hits_seen {
                self.empty(shard, &mut tree);
            }
            tree.hits_seen = tree.hits;
        }
        self.give_back()
    }

    /// Gives up everything if it takes more than its share of the budget, which has become smaller. True if memory came
    /// free.
    pub(crate) fn shrink_to_budget(&self) -> bool {
        self.store.budget().index_is_full(0) && self.clear()
    }

    /// Lookups that found a run.
    pub(crate) fn hits(&self) -> u64 {
        self.shards.iter().map(|shard| lock(shard).hits).sum()
    }

    /// Entries.
    #[cfg(test)]
    pub(crate) fn len(&self) -> u64 {
        self.used.load(Relaxed)
    }
}

fn lock(shard: &Shard) -> MutexGuard<'_, Tree> {
    shard.tree.lock()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chain::place::PlaceKind;

    const BITS: u32 = 16;

    fn extents(limit: u64) -> Extents {
        Extents::new(Arc::new(SliceStore::new(limit, std::time::Duration::ZERO)), 1 << 40, BITS)
    }

    fn data(host: u64) -> ClusterPlace {
        ClusterPlace { kind: PlaceKind::Data { host, copied: true }, depth: 0 }
    }

    fn host(extents: &Extents, unit: u64) -> Option<(u64, u64)> {
        extents.find(unit).map(|(place, units)| match place.kind {
            PlaceKind::Data { host, .. } => (host >> BITS, units),
            PlaceKind::Zero => (0, units),
        })
    }

    #[test]
    fn runs_that_continue_each_other_are_one_entry() {
        let extents = extents(1 << 20);
        extents.top_up();
        extents.insert(100..200, data(1100 << BITS));
        extents.insert(300..400, data(1300 << BITS));
        extents.insert(200..300, data(1200 << BITS));
        assert_eq!(extents.len(), 1);
        assert_eq!(host(&extents, 100), Some((1100, 300)));
        assert_eq!(host(&extents, 399), Some((1399, 1)));
        assert_eq!((host(&extents, 99), host(&extents, 400)), (None, None));
        extents.insert(400..500, data(9000 << BITS));
        assert_eq!(extents.len(), 2);
    }

    #[test]
    fn a_change_takes_its_clusters_out_and_leaves_the_rest() {
        let extents = extents(1 << 20);
        extents.top_up();
        extents.insert(0..4096, data(0));
        extents.forget(10..20);
        assert_eq!(host(&extents, 9), Some((9, 1)));
        assert_eq!((host(&extents, 10), host(&extents, 19)), (None, None));
        assert_eq!(host(&extents, 20), Some((20, 4076)));
        extents.forget(0..1 << 20);
        assert_eq!((extents.len(), host(&extents, 9)), (0, None));
    }

    #[test]
    fn a_run_over_region_borders_is_found_everywhere() {
        let extents = extents(1 << 20);
        extents.top_up();
        let region = 1 << extents.region_bits;
        extents.insert(region - 5..2 * region + 5, data(1 << 40));
        for unit in [region - 5, region - 1, region, 2 * region, 2 * region + 4] {
            let expected = (1 << 40 >> BITS) + unit - (region - 5);
            assert_eq!(host(&extents, unit).map(|(host, _)| host), Some(expected), "unit {unit}");
        }
        extents.forget(region - 1..region + 1);
        assert_eq!((host(&extents, region - 1), host(&extents, region)), (None, None));
        assert!(host(&extents, region - 2).is_some() && host(&extents, region + 1).is_some());
    }

    #[test]
    fn memory_is_the_budgets_and_goes_back() {
        let extents = extents(100_000);
        for i in 0..10_000 {
            extents.top_up();
            extents.insert(i * 100..i * 100 + 10, data((i * 7) << 30));
        }
        let budget = extents.store.budget();
        assert!(extents.len() * ENTRY_COST <= budget.index() && budget.index() <= 25_000);
        assert_eq!(budget.used(), budget.index());
        assert!(extents.len() > 300);
        extents.clear();
        assert_eq!((budget.used(), extents.len()), (0, 0));
    }

    #[test]
    fn random_changes_match_a_plain_map() {
        let extents = extents(1 << 24);
        let mut model: BTreeMap<u64, u64> = BTreeMap::new();
        let mut state = 7u64;
        let mut random = |below: u64| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) % below
        };
        for _ in 0..20_000 {
            extents.top_up();
            let (start, len) = (random(20_000), 1 + random(600));
            if random(3) > 0 {
                let to = random(1 << 20);
                extents.insert(start..start + len, data(to << BITS));
                for i in 0..len {
                    model.insert(start + i, to + i);
                }
            } else {
                extents.forget(start..start + len);
                for i in 0..len {
                    model.remove(&(start + i));
                }
            }
            let probe = random(20_600);
            assert_eq!(host(&extents, probe).map(|(host, _)| host), model.get(&probe).copied());
        }
    }
}
