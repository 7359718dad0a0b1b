//! Where the slices of a whole chain live: one hashed table in shards under one budget, with CLOCK eviction.
//!
//! All images of a chain share it, so the slices that are used most stay, whichever image they belong to. A shard's
//! mutex is held for as long as it takes to look at a few entries, never across an await.
//!
//! Constant cost at any size: a lookup is one hash, one probe; an eviction moves the hand of one shard over slots in an
//! array, and each slot that it passes was used since it was passed last.

use crate::qcow2::cache::budget::{Budget, ByteCount};
use crate::qcow2::cache::shard::{Shard, ShardGuard};
use crate::status::ImageStats;
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed};
use crate::sync::{Clock, with_patience};
use crate::sync::{Mutex, WaitQueue, Wakers};
use std::time::{Duration, Instant};
use zebu_storage::sabotage::{self, Fault};

/// Shards of each class.
const SHARDS: usize = crate::sync::spread(64);

/// Bits of a key in an id; above them, the owner.
const KEY_BITS: u32 = 44;

/// Which shards an owner's slices live in. Locks of the first class are taken before those of the second.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Class {
    /// Tables of an image.
    Table,
    /// Slices that are derived from the tables of several images.
    Derived,
}

/// The slices of a chain, under one budget.
#[derive(Debug)]
pub(crate) struct SliceStore {
    /// First those of [`Class::Table`], then those of [`Class::Derived`].
    shards: Box<[Mutex<Shard>]>,
    budget: Budget,
    owners: AtomicU32,
    hand: AtomicU64,
    /// Bytes of slices changed since they were last frozen.
    dirty_bytes: ByteCount,
    /// Bytes of the slices of [`Class::Derived`].
    derived_bytes: ByteCount,
    /// Reservations of loads under way.
    loads: AtomicU64,
    /// Requests that wait for room.
    waiting: WaitQueue,
    interval: Duration,
    /// By how many it is used at once.
    queues: u32,
    tidied: Mutex<Instant>,
}

/// Room for a load; given back when dropped.
pub(crate) struct Room<'a> {
    store: &'a SliceStore,
    bytes: u64,
    kind: RoomKind,
}

/// Whether the room's end may be waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RoomKind {
    /// Its holder waits for nothing but I/O.
    Load,
    /// Its holder may wait for loads.
    Derived,
}

impl SliceStore {
    /// Slices that are not used for `interval` are given up; zero: never.
    pub(crate) fn new(limit: u64, interval: Duration) -> Self {
        Self {
            shards: (0..2 * SHARDS).map(|_| Mutex::default()).collect(),
            budget: Budget::new(limit),
            owners: AtomicU32::new(0),
            hand: AtomicU64::new(0),
            dirty_bytes: ByteCount::default(),
            derived_bytes: ByteCount::default(),
            loads: AtomicU64::new(0),
            waiting: WaitQueue::default(),
            interval,
            queues: 1,
            tidied: Mutex::new(Instant::now()),
        }
    }

    /// For so many queues at once.
    pub(crate) fn for_queues(self, queues: u32) -> Self {
        Self { queues, ..self }
    }

    /// The least number of slices that there has to be room for: a change needs one of a table and one of refcounts.
    pub(crate) fn least_slices(&self) -> u64 {
        u64::from(self.queues.max(2))
    }

    /// A number that nobody else has.
    pub(crate) fn new_owner(&self) -> u32 {
        self.owners.fetch_add(1, Relaxed)
    }

    /// The name of slice `key` of `owner`.
    #[inline]
    pub(crate) fn id(owner: u32, key: u64) -> u64 {
        debug_assert!(key >> KEY_BITS == 0);
        u64::from(owner) << KEY_BITS | key
    }

    /// The key in a name.
    pub(crate) fn key_of(id: u64) -> u64 {
        id & ((1 << KEY_BITS) - 1)
    }

    /// Locks the shard of `id`.
    #[inline]
    pub(crate) fn lock(&self, class: Class, id: u64) -> ShardGuard<'_> {
        let in_class = (id.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 58) as usize % SHARDS;
        self.shards[Self::first_of(class) + in_class].lock()
    }

    /// Where the shards of a class begin.
    fn first_of(class: Class) -> usize {
        if class == Class::Table { 0 } else { SHARDS }
    }

    /// The shards of a class, one after the other.
    pub(crate) fn each(&self, class: Class) -> impl Iterator<Item = ShardGuard<'_>> {
        self.shards[Self::first_of(class)..][..SHARDS].iter().map(|shard| shard.lock())
    }

    pub(crate) fn note_dirty_bytes(&self, bytes: u64) {
        self.dirty_bytes.raise(bytes);
    }
    pub(crate) fn note_clean_bytes(&self, bytes: u64) {
        self.dirty_bytes.lower(bytes);
    }
    pub(crate) fn dirty_bytes(&self) -> u64 {
        self.dirty_bytes.get()
    }

    pub(crate) fn budget(&self) -> &Budget {
        &self.budget
    }

    /// The counters of the cache.
    pub(crate) fn stats(&self) -> ImageStats {
        let mut stats = ImageStats {
            cache_bytes: self.budget.used(),
            cache_limit: self.budget.limit(),
            table_bytes: self.budget.tables(),
            index_bytes: self.budget.index(),
            cache_miscounts: self.budget.miscounts()
                + self.dirty_bytes.miscounts()
                + self.derived_bytes.miscounts(),
            ..ImageStats::default()
        };
        for shard in self.each(Class::Table).chain(self.each(Class::Derived)) {
            let counters = shard.counters();
            stats.cache_hits += counters.hits;
            stats.cache_misses += counters.misses;
            stats.cache_loads += counters.loads;
            stats.cache_evictions += counters.evictions;
            stats.cache_read_ahead += counters.read_ahead;
        }
        stats
    }

    /// The dirty ids of an owner in a locked shard, which are no longer noted.
    pub(super) fn take_dirty(shard: &mut Shard, owner: u32) -> Vec<u64> {
        shard.take_dirty(|id| is_of(id, owner))
    }

    /// Waits for room for a load of `bytes`, giving up what is unused. Waits for loads only, and for a second at most:
    /// what is changed and not committed yet is not waited for, since its commit may need a load itself.
    pub(crate) async fn room(&self, clock: &impl Clock, bytes: u64) -> Room<'_> {
        self.tidy(Instant::now());
        let room = self.waiting.until(|| self.has_room(bytes).then_some(()));
        if with_patience(clock, room).await.is_none() {
            self.budget.take(bytes);
        }
        self.loads.fetch_add(1, AcqRel);
        Room { store: self, bytes, kind: RoomKind::Load }
    }

    /// Whether there is room, or nothing will make any: the load that is alone gets what it asks for.
    fn has_room(&self, bytes: u64) -> bool {
        if self.make_room(bytes) {
            return true;
        }
        let is_alone = self.loads.load(Acquire) == 0;
        if is_alone {
            self.budget.take(bytes);
        }
        is_alone
    }

    /// Room for a load that nobody waits for, if there is some.
    pub(crate) fn spare_room(&self, bytes: u64) -> Option<Room<'_>> {
        if !self.make_room(bytes) {
            return None;
        }
        self.loads.fetch_add(1, AcqRel);
        Some(Room { store: self, bytes, kind: RoomKind::Load })
    }

    /// Room for what is derived from slices that have to be loaded first, if there is some.
    pub(crate) fn derived_room(&self, bytes: u64) -> Option<Room<'_>> {
        if sabotage::is(Fault::GiveBackUntaken) {
            return self.make_room(bytes).then_some(Room { store: self, bytes, kind: RoomKind::Derived });
        }
        self.make_room(bytes).then(|| Room { store: self, bytes, kind: RoomKind::Derived })
    }

    fn make_room(&self, bytes: u64) -> bool {
        while !self.budget.try_take(bytes) {
            if !self.evict_one() {
                return false;
            }
        }
        true
    }

    /// Room for `bytes` more of the extent index, within its share. No lock is held.
    pub(crate) fn room_for_index(&self, bytes: u64) -> bool {
        while !self.budget.try_take_for_index(bytes) {
            if self.budget.index_is_full(bytes) || !self.evict_one() {
                return false;
            }
        }
        true
    }

    /// Gives one slice up. Those of tables go first, since making a derived one takes a look into the tables of every image;
    /// but not as long as derived ones have more than their share.
    fn evict_one(&self) -> bool {
        let is_full = self.derived_bytes.get() * 4 > self.budget.for_slices() * 3;
        let order = if is_full { [Class::Derived, Class::Table] } else { [Class::Table, Class::Derived] };
        order.into_iter().any(|class| self.evict_one_of(class))
    }

    fn evict_one_of(&self, class: Class) -> bool {
        let start = self.hand.fetch_add(1, Relaxed) as usize % SHARDS;
        let shards = &self.shards[Self::first_of(class)..][..SHARDS];
        for shard in shards[start..].iter().chain(&shards[..start]) {
            let mut shard = shard.lock();
            if let Some(slice) = shard.evict_one() {
                drop(shard);
                self.note_gone(class, slice.cost());
                self.budget.give_back(slice.cost());
                return true;
            }
        }
        false
    }

    /// Notes that a slice was added.
    pub(crate) fn note_added(&self, class: Class, bytes: u64) {
        if class == Class::Derived {
            self.derived_bytes.raise(bytes);
        }
    }

    fn note_gone(&self, class: Class, bytes: u64) {
        if class == Class::Derived {
            self.derived_bytes.lower(bytes);
        }
    }

    /// Gives up what is unused until the budget is kept or nothing more can go. True if memory came free.
    pub(crate) fn shrink_to_budget(&self) -> bool {
        let mut has_given_up = false;
        while self.budget.is_exceeded() && self.evict_one() {
            has_given_up = true;
        }
        self.waiting.wake_all();
        has_given_up
    }

    /// The end of an owner: its slices go, whatever their state.
    pub(crate) fn end_owner(&self, class: Class, owner: u32) {
        let mut freed = 0;
        for mut shard in self.each(class) {
            freed += shard.remove_ended(|id| is_of(id, owner));
        }
        self.note_gone(class, freed);
        self.budget.give_back(freed);
        self.waiting.wake_all();
    }

    /// Gives up all clean slices of an owner.
    pub(crate) fn forget(&self, class: Class, owner: u32) {
        let (mut freed, mut waiting) = (0, Vec::new());
        for mut shard in self.each(class) {
            freed += shard.remove_if(|id, _| is_of(id, owner));
            shard.raise_generation();
            if !sabotage::is(Fault::KeepLoads) {
                waiting.extend(shard.end_loads(|id| is_of(id, owner)));
            }
        }
        waiting.into_iter().for_each(Wakers::wake);
        self.note_gone(class, freed);
        self.budget.give_back(freed);
        self.waiting.wake_all();
    }

    /// How long what is not used is kept; zero: for ever.
    pub(crate) fn interval(&self) -> Duration {
        self.interval
    }

    /// Gives up what was not used since the last time it did so, if that is long enough ago. True if anything went.
    pub(crate) fn tidy(&self, now: Instant) -> bool {
        if self.interval.is_zero() {
            return false;
        }
        {
            let mut tidied = self.tidied.lock();
            if now.saturating_duration_since(*tidied) < self.interval {
                return false;
            }
            *tidied = now;
        }
        let mut freed = 0;
        for class in [Class::Table, Class::Derived] {
            let mut of_class = 0;
            for mut shard in self.each(class) {
                of_class += shard.remove_idle();
            }
            self.note_gone(class, of_class);
            freed += of_class;
        }
        self.budget.give_back(freed);
        self.waiting.wake_all();
        freed > 0
    }
}

/// Whether `id` names a slice of `owner`.
fn is_of(id: u64, owner: u32) -> bool {
    id >> KEY_BITS == u64::from(owner)
}

impl Room<'_> {
    /// Keeps `bytes` of the room for the slice; the rest, its buffer's, goes back.
    pub(crate) fn keep(mut self, bytes: u64) {
        self.bytes -= bytes.min(self.bytes);
    }
}

impl Drop for Room<'_> {
    fn drop(&mut self) {
        self.store.budget.give_back(self.bytes);
        if self.kind == RoomKind::Load {
            self.store.loads.fetch_sub(1, AcqRel);
        }
        self.store.waiting.wake_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qcow2::cache::shard::{SLOT_OVERHEAD, Slice};

    const SLICE: usize = 512;
    const COST: u64 = SLICE as u64 + SLOT_OVERHEAD;

    fn add(store: &SliceStore, class: Class, owner: u32, key: u64) -> u64 {
        let id = SliceStore::id(owner, key);
        store.spare_room(COST).unwrap().keep(COST);
        store.lock(class, id).insert(id, Slice::new(vec![0; SLICE].into()));
        store.note_added(class, COST);
        id
    }

    fn has(store: &SliceStore, class: Class, id: u64) -> bool {
        store.lock(class, id).contains(id)
    }

    #[test]
    fn an_owner_leaves_nothing_behind_and_takes_nothing_with_it() {
        let store = SliceStore::new(64 * COST, Duration::ZERO);
        for class in [Class::Table, Class::Derived] {
            let (ended, other) = (store.new_owner(), store.new_owner());
            let of = |owner| (0..16).map(move |key| (owner, key));
            let ids: Vec<u64> =
                of(ended).chain(of(other)).map(|(owner, key)| add(&store, class, owner, key)).collect();
            for id in &ids {
                let mut shard = store.lock(class, *id);
                let slice = shard.peek(*id).unwrap();
                match id % 3 {
                    2 => continue,
                    kind => {
                        slice.change(0, 1, SLICE, |_| {});
                        if kind == 0 {
                            slice.freeze();
                        }
                    }
                }
                shard.note_dirty(*id);
            }
            store.end_owner(class, ended);
            let left: Vec<u64> = ids.iter().copied().filter(|id| has(&store, class, *id)).collect();
            assert_eq!(left, ids[16..]);
            assert_eq!(store.budget.used(), 16 * COST);
            let dirty = |owner| {
                store
                    .each(class)
                    .map(|mut shard| SliceStore::take_dirty(&mut shard, owner).len())
                    .sum::<usize>()
            };
            assert_eq!((dirty(ended), dirty(other)), (0, ids[16..].iter().filter(|id| *id % 3 != 2).count()));
            store.end_owner(class, other);
            assert_eq!((store.budget.used(), store.derived_bytes.get()), (0, 0));
        }
    }

    #[test]
    fn what_is_clean_is_forgotten_and_its_memory_given_back() {
        let store = SliceStore::new(64 * COST, Duration::ZERO);
        let (owner, other) = (store.new_owner(), store.new_owner());
        let ids: Vec<u64> = (0..8).map(|key| add(&store, Class::Derived, owner, key)).collect();
        add(&store, Class::Derived, other, 0);
        store.lock(Class::Derived, ids[3]).peek(ids[3]).unwrap().change(0, 1, SLICE, |_| {});
        let before: Vec<u64> = store.each(Class::Derived).map(|shard| shard.generation()).collect();
        store.forget(Class::Derived, owner);
        let left: Vec<u64> = ids.iter().copied().filter(|id| has(&store, Class::Derived, *id)).collect();
        assert_eq!(left, [ids[3]]);
        assert_eq!((store.budget.used(), store.derived_bytes.get()), (2 * COST, 2 * COST));
        let after = store.each(Class::Derived).map(|shard| shard.generation());
        assert!(after.zip(before).all(|(after, before)| after > before));
    }

    #[test]
    fn what_is_not_used_for_an_interval_goes() {
        let interval = Duration::from_secs(10);
        let store = SliceStore::new(64 * COST, interval);
        let begin = Instant::now();
        *store.tidied.lock() = begin;
        let ids: Vec<u64> = (0..8).map(|key| add(&store, Class::Table, 0, key)).collect();
        let almost = Duration::from_nanos(9_999_999_999);
        assert!(!store.tidy(begin + almost), "too early");
        assert!(!store.tidy(begin + interval), "all of them were new");
        store.lock(Class::Table, ids[5]).get(ids[5]);
        assert!(!store.tidy(begin + interval + almost), "too early");
        assert!(store.tidy(begin + interval * 2));
        let left: Vec<u64> = ids.iter().copied().filter(|id| has(&store, Class::Table, *id)).collect();
        assert_eq!((left, store.budget.used()), (vec![ids[5]], COST));
        assert_eq!(store.each(Class::Table).map(|shard| shard.counters().evictions).sum::<u64>(), 7);
        assert!(store.tidy(begin + interval * 3));
        assert!(!store.tidy(begin + interval * 4), "nothing is left");
    }

    #[test]
    fn slices_of_tables_go_first_until_derived_ones_have_more_than_their_share() {
        let store = SliceStore::new(8 * COST, Duration::ZERO);
        for key in 0..7 {
            add(&store, Class::Derived, 0, key);
        }
        add(&store, Class::Table, 1, 0);
        let derived = || store.derived_bytes.get() / COST;
        assert!(store.evict_one());
        assert_eq!(derived(), 6, "seven of eight are more than three quarters");
        assert!(store.evict_one());
        assert_eq!((derived(), store.budget.used()), (6, 6 * COST), "six are not");
        assert!(store.evict_one());
        assert_eq!(derived(), 5, "no table is left");
    }
}
