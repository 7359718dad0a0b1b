//! Where the slices of a whole chain live: one hashed table in shards under one budget, with CLOCK eviction.
//!
//! All images of a chain share it, so the slices that are used most stay, whichever image they belong to. A shard's
//! mutex is held for as long as it takes to look at a few entries, never across an await.
//!
//! Constant cost at any size: a lookup is one hash, one probe; an eviction moves the hand of one shard over slots in an
//! array, and each slot that it passes was used since it was passed last.

use crate::qcow2::budget::Budget;
use crate::qcow2::inflight::InFlight;
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed};
use crate::sync::{Mutex, MutexGuard};
use foldhash::fast::FixedState;
use smallvec::SmallVec;
use std::collections::HashMap;
use std::future::poll_fn;
use std::sync::PoisonError;
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};
use zebu_storage::sabotage::{self, Fault};

/// Shards of each class.
const SHARDS: usize = crate::sync::spread(64);

/// Bytes that a slice costs beyond its content: its slot and its place in the hash table, both with the room that
/// growing arrays keep, and the allocator's own.
pub(crate) const SLOT_OVERHEAD: u64 = 160;

/// Bits of a key; above them, the owner.
const KEY_BITS: u32 = 44;

/// Which shards an owner's slices live in. Locks of the first class are taken before those of the second.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Class {
    /// Tables of an image.
    Table,
    /// What is derived from the tables of several images.
    Derived,
}

/// Which blocks of a slice changed since they were last frozen, a bit each.
#[derive(Debug, Clone, Default)]
pub(crate) struct DirtyBlocks(SmallVec<[u64; 1]>);

impl DirtyBlocks {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.iter().all(|word| *word == 0)
    }
    pub(crate) fn set(&mut self, block: usize) {
        let word = block / 64;
        if self.0.len() <= word {
            self.0.resize(word + 1, 0);
        }
        if let Some(bits) = self.0.get_mut(word) {
            *bits |= 1 << (block % 64);
        }
    }
    /// The numbers of the dirty blocks.
    pub(crate) fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        self.0.iter().enumerate().flat_map(|(word, bits)| {
            (0..64).filter(move |bit| bits >> bit & 1 == 1).map(move |bit| word * 64 + bit)
        })
    }
}

/// A present slice.
#[derive(Debug)]
pub(crate) struct Slice {
    /// Its content as on disk (big endian).
    pub(crate) bytes: Box<[u8]>,
    pub(crate) dirty: DirtyBlocks,
    pub(crate) in_writing: bool,
    /// Looked at since the CLOCK's hand passed.
    pub(crate) referenced: bool,
    /// Looked at since the last look for what is unused.
    used_lately: bool,
    /// Not looked at since it was loaded: the look that caused the load is no hit.
    fresh: bool,
}

impl Slice {
    pub(crate) fn new(bytes: Box<[u8]>) -> Self {
        Self {
            bytes,
            dirty: DirtyBlocks::default(),
            in_writing: false,
            referenced: false,
            used_lately: true,
            fresh: true,
        }
    }
    fn is_evictable(&self) -> bool {
        !self.in_writing && self.dirty.is_empty()
    }
    fn cost(&self) -> u64 {
        self.bytes.len() as u64 + SLOT_OVERHEAD
    }
}

/// Counters of one shard; their sums are the cache's.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Counters {
    pub(crate) hits: u64,
    pub(crate) misses: u64,
    pub(crate) loads: u64,
    pub(crate) evictions: u64,
    pub(crate) read_ahead: u64,
}

#[derive(Debug)]
struct Slot {
    id: u64,
    slice: Slice,
}

/// One shard: slices, loads in flight, and (for L2) the in-flight allocations of the guest clusters that its slices
/// map.
#[derive(Debug, Default)]
pub(crate) struct Shard {
    by_id: HashMap<u64, u32, FixedState>,
    slots: Vec<Slot>,
    hand: usize,
    loading: HashMap<u64, Vec<Waker>, FixedState>,
    /// Ids of slices that became dirty since they were last frozen.
    dirty: Vec<u64>,
    pub(crate) in_flight: InFlight,
    pub(crate) counters: Counters,
    /// Raised when something changes that a slice of this shard was derived from.
    pub(crate) generation: u64,
}

/// What is known of a slice that somebody wants.
pub(crate) enum Wanted {
    Present,
    Loading,
    /// Nobody loads it: the caller does, and ends with [`Shard::end_load`].
    Yours,
}

impl Shard {
    /// The slice `id`; counts a hit unless the slice was just loaded for this look.
    pub(crate) fn get(&mut self, id: u64) -> Option<&mut Slice> {
        let at = *self.by_id.get(&id)?;
        let slice = &mut self.slots.get_mut(at as usize)?.slice;
        if std::mem::take(&mut slice.fresh) {
            // Its miss is counted already.
        } else {
            self.counters.hits += 1;
        }
        slice.referenced = true;
        slice.used_lately = true;
        Some(slice)
    }

    /// The same without counting: a further look of the same request.
    pub(crate) fn peek(&mut self, id: u64) -> Option<&mut Slice> {
        let at = *self.by_id.get(&id)?;
        Some(&mut self.slots.get_mut(at as usize)?.slice)
    }

    pub(crate) fn contains(&self, id: u64) -> bool {
        self.by_id.contains_key(&id)
    }

    /// Begins the load of `id`, or has `waker` woken when the one under way has ended.
    pub(crate) fn want(&mut self, id: u64, waker: &Waker) -> Wanted {
        if self.contains(id) {
            return Wanted::Present;
        }
        if let Some(waiting) = self.loading.get_mut(&id).filter(|_| !sabotage::is(Fault::LoadTwice)) {
            if !waiting.iter().any(|w| w.will_wake(waker)) {
                waiting.push(waker.clone());
            }
            return Wanted::Loading;
        }
        self.loading.insert(id, Vec::new());
        Wanted::Yours
    }

    /// Ends the load of `id`; those who wait are to be woken after the lock is released.
    pub(crate) fn end_load(&mut self, id: u64) -> Vec<Waker> {
        self.loading.remove(&id).unwrap_or_default()
    }

    /// Adds a slice that is not there.
    pub(crate) fn insert(&mut self, id: u64, slice: Slice) {
        let at = self.slots.len() as u32;
        self.slots.push(Slot { id, slice });
        self.by_id.insert(id, at);
    }

    pub(crate) fn note_dirty(&mut self, id: u64) {
        self.dirty.push(id);
    }

    /// The dirty ids of one owner, which are no longer noted.
    pub(crate) fn take_dirty(&mut self, owner: u32) -> Vec<u64> {
        let (theirs, others) = self.dirty.drain(..).partition(|id| id >> KEY_BITS == u64::from(owner));
        self.dirty = others;
        theirs
    }

    fn remove_at(&mut self, at: usize) -> Slice {
        let slot = self.slots.swap_remove(at);
        self.by_id.remove(&slot.id);
        if let Some(moved) = self.slots.get(at) {
            self.by_id.insert(moved.id, at as u32);
        }
        // What grew for more than there is now is not kept.
        if self.slots.len() * 4 < self.slots.capacity() {
            self.slots.shrink_to(self.slots.len() * 2);
            self.by_id.shrink_to(self.slots.len() * 2);
        }
        slot.slice
    }

    /// Takes the first slice out that the hand finds unused and clean.
    fn evict_one(&mut self) -> Option<Slice> {
        for _ in 0..self.slots.len() * 2 {
            if self.hand >= self.slots.len() {
                self.hand = 0;
            }
            let slice = &mut self.slots.get_mut(self.hand)?.slice;
            if slice.is_evictable() && !std::mem::take(&mut slice.referenced) {
                return Some(self.remove_at(self.hand));
            }
            self.hand += 1;
        }
        None
    }

    /// Takes all clean slices out of which `wanted` says so.
    fn remove_if(&mut self, mut wanted: impl FnMut(u64, &mut Slice) -> bool) -> u64 {
        let mut freed = 0;
        let mut at = 0;
        while let Some(slot) = self.slots.get_mut(at) {
            if slot.slice.is_evictable() && wanted(slot.id, &mut slot.slice) {
                freed += self.remove_at(at).cost();
            } else {
                at += 1;
            }
        }
        freed
    }
}

/// A shard, locked.
pub(crate) type ShardGuard<'a> = MutexGuard<'a, Shard>;

/// See the module.
#[derive(Debug)]
pub(crate) struct SliceStore {
    /// First those of [`Class::Table`], then those of [`Class::Derived`].
    shards: Box<[Mutex<Shard>]>,
    pub(crate) budget: Budget,
    owners: AtomicU32,
    hand: AtomicU64,
    /// Bytes of slices changed since they were last frozen.
    dirty_bytes: AtomicU64,
    /// Bytes of the slices of [`Class::Derived`].
    derived_bytes: AtomicU64,
    /// Reservations of loads under way.
    loads: AtomicU64,
    /// Who waits for room.
    waiting: Mutex<Vec<Waker>>,
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
            dirty_bytes: AtomicU64::new(0),
            derived_bytes: AtomicU64::new(0),
            loads: AtomicU64::new(0),
            waiting: Mutex::default(),
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
        self.shards[Self::first_of(class) + in_class].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where the shards of a class begin.
    fn first_of(class: Class) -> usize {
        if class == Class::Table { 0 } else { SHARDS }
    }

    /// The shards of a class, one after the other.
    pub(crate) fn each(&self, class: Class) -> impl Iterator<Item = ShardGuard<'_>> {
        self.shards[Self::first_of(class)..][..SHARDS]
            .iter()
            .map(|shard| shard.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn note_dirty_bytes(&self, bytes: u64) {
        self.dirty_bytes.fetch_add(bytes, Relaxed);
    }
    pub(crate) fn note_clean_bytes(&self, bytes: u64) {
        self.dirty_bytes.fetch_sub(bytes, Relaxed);
    }
    pub(crate) fn dirty_bytes(&self) -> u64 {
        self.dirty_bytes.load(Relaxed)
    }

    /// The sums of the counters.
    pub(crate) fn counters(&self) -> Counters {
        let mut sum = Counters::default();
        for shard in self.each(Class::Table).chain(self.each(Class::Derived)) {
            sum.hits += shard.counters.hits;
            sum.misses += shard.counters.misses;
            sum.loads += shard.counters.loads;
            sum.evictions += shard.counters.evictions;
            sum.read_ahead += shard.counters.read_ahead;
        }
        sum
    }

    /// Waits for room for a load of `bytes`, giving up what is unused. Waits for loads only: what is changed and not
    /// committed yet is not waited for, since its commit may need a load itself.
    pub(crate) async fn room(&self, bytes: u64) -> Room<'_> {
        self.tidy(Instant::now());
        poll_fn(|cx| {
            let mut registered = false;
            loop {
                if self.budget.try_take(bytes) {
                    break;
                }
                if self.evict_one() {
                    continue;
                }
                if self.loads.load(Acquire) == 0 {
                    self.budget.take(bytes);
                    break;
                }
                if registered {
                    return Poll::Pending;
                }
                // A load may have ended since: look again after the waker is where its end finds it.
                self.waiting.lock().unwrap_or_else(PoisonError::into_inner).push(cx.waker().clone());
                if sabotage::is(Fault::LookOnce) {
                    return Poll::Pending;
                }
                registered = true;
            }
            self.loads.fetch_add(1, AcqRel);
            Poll::Ready(Room { store: self, bytes, kind: RoomKind::Load })
        })
        .await
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
        self.make_room(bytes).then_some(Room { store: self, bytes, kind: RoomKind::Derived })
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
        let is_full = self.derived_bytes.load(Relaxed) * 4 > self.budget.for_slices() * 3;
        let order = if is_full { [Class::Derived, Class::Table] } else { [Class::Table, Class::Derived] };
        order.into_iter().any(|class| self.evict_one_of(class))
    }

    fn evict_one_of(&self, class: Class) -> bool {
        let start = self.hand.fetch_add(1, Relaxed) as usize % SHARDS;
        let shards = &self.shards[Self::first_of(class)..][..SHARDS];
        for shard in shards[start..].iter().chain(&shards[..start]) {
            let mut shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(slice) = shard.evict_one() {
                shard.counters.evictions += 1;
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
            self.derived_bytes.fetch_add(bytes, Relaxed);
        }
    }

    fn note_gone(&self, class: Class, bytes: u64) {
        if class == Class::Derived {
            self.derived_bytes.fetch_sub(bytes, Relaxed);
        }
    }

    /// Gives up what is unused until the budget is kept or nothing more can go. True if memory came free.
    pub(crate) fn shrink_to_budget(&self) -> bool {
        let mut has_given_up = false;
        while self.budget.is_exceeded() && self.evict_one() {
            has_given_up = true;
        }
        self.wake_waiting();
        has_given_up
    }

    fn wake_waiting(&self) {
        let waiting = std::mem::take(&mut *self.waiting.lock().unwrap_or_else(PoisonError::into_inner));
        for waker in waiting {
            waker.wake();
        }
    }

    /// The end of an owner: its slices go, whatever their state.
    pub(crate) fn end_owner(&self, class: Class, owner: u32) {
        let mut freed = 0;
        for mut shard in self.each(class) {
            let shard = &mut *shard;
            shard.dirty.retain(|id| id >> KEY_BITS != u64::from(owner));
            for slot in &mut shard.slots {
                if slot.id >> KEY_BITS == u64::from(owner) {
                    slot.slice.dirty = DirtyBlocks::default();
                    slot.slice.in_writing = false;
                }
            }
            freed += shard.remove_if(|id, _| id >> KEY_BITS == u64::from(owner));
        }
        self.note_gone(class, freed);
        self.budget.give_back(freed);
        self.wake_waiting();
    }

    /// Gives up all clean slices of an owner.
    pub(crate) fn forget(&self, class: Class, owner: u32) {
        let mut freed = 0;
        for mut shard in self.each(class) {
            freed += shard.remove_if(|id, _| id >> KEY_BITS == u64::from(owner));
            shard.generation += 1;
        }
        self.note_gone(class, freed);
        self.budget.give_back(freed);
        self.wake_waiting();
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
            let mut tidied = self.tidied.lock().unwrap_or_else(PoisonError::into_inner);
            if now.saturating_duration_since(*tidied) < self.interval {
                return false;
            }
            *tidied = now;
        }
        let mut freed = 0;
        for class in [Class::Table, Class::Derived] {
            let mut of_class = 0;
            for mut shard in self.each(class) {
                let before = shard.slots.len();
                of_class += shard.remove_if(|_, slice| !std::mem::take(&mut slice.used_lately));
                let gone = before - shard.slots.len();
                shard.counters.evictions += gone as u64;
            }
            self.note_gone(class, of_class);
            freed += of_class;
        }
        self.budget.give_back(freed);
        self.wake_waiting();
        freed > 0
    }
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
        self.store.wake_waiting();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dirty_blocks_of_the_largest_slices_are_told_apart() {
        let blocks = [0, 1, 5, 63, 64, 100, 127, 128, 4095];
        let mut dirty = DirtyBlocks::default();
        assert!(dirty.is_empty());
        for block in blocks.into_iter().rev() {
            dirty.set(block);
            assert!(!dirty.is_empty());
        }
        dirty.set(63);
        assert_eq!(dirty.iter().collect::<Vec<_>>(), blocks);
    }

    #[test]
    fn the_hand_passes_what_was_looked_at_and_what_is_dirty() {
        let mut shard = Shard::default();
        for id in 0..9 {
            shard.insert(id, Slice::new(vec![id as u8; 512].into()));
        }
        for id in [0, 3, 6] {
            shard.get(id);
        }
        for id in [1, 4] {
            shard.peek(id).unwrap().dirty.set(0);
        }
        let evicted: Vec<u8> = std::iter::from_fn(|| Some(shard.evict_one()?.bytes[0])).collect();
        assert_eq!(evicted.len(), 7, "{evicted:?}");
        let (mut unused, mut looked_at) = (evicted[..4].to_vec(), evicted[4..].to_vec());
        unused.sort_unstable();
        looked_at.sort_unstable();
        assert_eq!((unused, looked_at), (vec![2, 5, 7, 8], vec![0, 3, 6]));
        assert!(shard.contains(1) && shard.contains(4));
    }

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
                    0 => slice.in_writing = true,
                    1 => slice.dirty.set(0),
                    _ => continue,
                }
                shard.note_dirty(*id);
            }
            store.end_owner(class, ended);
            let left: Vec<u64> = ids.iter().copied().filter(|id| has(&store, class, *id)).collect();
            assert_eq!(left, ids[16..]);
            assert_eq!(store.budget.used(), 16 * COST);
            let dirty =
                |owner| store.each(class).map(|mut shard| shard.take_dirty(owner).len()).sum::<usize>();
            assert_eq!((dirty(ended), dirty(other)), (0, ids[16..].iter().filter(|id| *id % 3 != 2).count()));
            store.end_owner(class, other);
            assert_eq!((store.budget.used(), store.derived_bytes.load(Relaxed)), (0, 0));
        }
    }

    #[test]
    fn what_is_clean_is_forgotten_and_its_memory_given_back() {
        let store = SliceStore::new(64 * COST, Duration::ZERO);
        let (owner, other) = (store.new_owner(), store.new_owner());
        let ids: Vec<u64> = (0..8).map(|key| add(&store, Class::Derived, owner, key)).collect();
        add(&store, Class::Derived, other, 0);
        store.lock(Class::Derived, ids[3]).peek(ids[3]).unwrap().dirty.set(0);
        let before: Vec<u64> = store.each(Class::Derived).map(|shard| shard.generation).collect();
        store.forget(Class::Derived, owner);
        let left: Vec<u64> = ids.iter().copied().filter(|id| has(&store, Class::Derived, *id)).collect();
        assert_eq!(left, [ids[3]]);
        assert_eq!((store.budget.used(), store.derived_bytes.load(Relaxed)), (2 * COST, 2 * COST));
        let after = store.each(Class::Derived).map(|shard| shard.generation);
        assert!(after.zip(before).all(|(after, before)| after > before));
    }

    #[test]
    fn what_is_not_used_for_an_interval_goes() {
        let interval = Duration::from_secs(10);
        let store = SliceStore::new(64 * COST, interval);
        let begin = Instant::now();
        *store.tidied.lock().unwrap() = begin;
        let ids: Vec<u64> = (0..8).map(|key| add(&store, Class::Table, 0, key)).collect();
        let almost = Duration::from_nanos(9_999_999_999);
        assert!(!store.tidy(begin + almost), "too early");
        assert!(!store.tidy(begin + interval), "all of them were new");
        store.lock(Class::Table, ids[5]).get(ids[5]);
        assert!(!store.tidy(begin + interval + almost), "too early");
        assert!(store.tidy(begin + interval * 2));
        let left: Vec<u64> = ids.iter().copied().filter(|id| has(&store, Class::Table, *id)).collect();
        assert_eq!((left, store.budget.used()), (vec![ids[5]], COST));
        assert_eq!(store.each(Class::Table).map(|shard| shard.counters.evictions).sum::<u64>(), 7);
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
        let derived = || store.derived_bytes.load(Relaxed) / COST;
        assert!(store.evict_one());
        assert_eq!(derived(), 6, "seven of eight are more than three quarters");
        assert!(store.evict_one());
        assert_eq!((derived(), store.budget.used()), (6, 6 * COST), "six are not");
        assert!(store.evict_one());
        assert_eq!(derived(), 5, "no table is left");
    }
}
