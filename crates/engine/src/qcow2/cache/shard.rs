//! A shard of the slice store: slices by their ids, and loads under way.

use crate::qcow2::cache::cleared_in_place::ClearedInPlace;
use crate::qcow2::cache::in_flight::InFlight;
use crate::sync::{MutexGuard, WaitList, Wakers};
use foldhash::fast::FixedState;
use smallvec::SmallVec;
use std::collections::HashMap;
use std::task::Waker;
use zebu_storage::sabotage::{self, Fault};

/// Bytes that a slice costs beyond its content: its slot and its place in the hash table, both with the room that
/// growing arrays keep, and the allocator's own.
pub(crate) const SLOT_OVERHEAD: u64 = 160;

/// Which blocks of a slice changed since they were last frozen, a bit each.
#[derive(Debug, Clone, Default)]
pub(super) struct DirtyBlocks(SmallVec<[u64; 1]>);

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
    bytes: Box<[u8]>,
    dirty: DirtyBlocks,
    in_writing: bool,
    /// Looked at since the CLOCK's hand passed.
    referenced: bool,
    /// Looked at since the last look for what is unused.
    used_lately: bool,
    /// Not looked at since it was loaded: the look that caused the load is no hit.
    fresh: bool,
    /// Requests that loaded it, or waited for it, and have not looked at it yet.
    pins: u32,
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
            pins: 0,
        }
    }

    /// Its content as on disk (big endian).
    #[inline]
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The content of a slice that is derived, and so is never written.
    pub(crate) fn derived_bytes(&mut self) -> &mut [u8] {
        &mut self.bytes
    }

    /// Changes bytes, and marks the blocks of `block_bytes` that they lie in.
    pub(super) fn change(
        &mut self,
        offset: usize,
        len: usize,
        block_bytes: usize,
        f: impl FnOnce(&mut [u8]),
    ) -> BecameDirty {
        self.referenced = true;
        if let Some(bytes) = self.bytes.get_mut(offset..offset + len) {
            f(bytes);
        }
        if self.in_writing && sabotage::is(Fault::ForgetChangeInWriting) {
            return BecameDirty::Forgotten;
        }
        self.mark_dirty(offset / block_bytes..=(offset + len - 1) / block_bytes)
    }

    fn mark_dirty(&mut self, blocks: impl IntoIterator<Item = usize>) -> BecameDirty {
        let was_clean = self.dirty.is_empty();
        for block in blocks {
            self.dirty.set(block);
        }
        if was_clean && !self.dirty.is_empty() { BecameDirty::Yes } else { BecameDirty::No }
    }

    /// Copies the slice for a commit. It counts as clean, and stays until [`Slice::thaw`].
    pub(super) fn freeze(&mut self) -> (DirtyBlocks, Box<[u8]>) {
        self.in_writing = !sabotage::is(Fault::EvictInWriting);
        (std::mem::take(&mut self.dirty), self.bytes.clone())
    }

    /// Ends the writing of a copy; `again` are the blocks that are dirty again.
    pub(super) fn thaw(&mut self, again: Option<&DirtyBlocks>) -> BecameDirty {
        self.in_writing = false;
        again.map_or(BecameDirty::No, |dirty| self.mark_dirty(dirty.iter()))
    }

    /// Makes it stay until it is unpinned.
    pub(super) fn pin(&mut self) {
        self.pins += 1;
    }

    /// Whether nobody has looked at it since the last time this was asked.
    fn is_idle(&mut self) -> bool {
        self.pins == 0 && !std::mem::take(&mut self.used_lately)
    }

    fn is_clean(&self) -> bool {
        !self.in_writing && self.dirty.is_empty()
    }
    fn is_evictable(&self) -> bool {
        self.pins == 0 && self.is_clean()
    }
    pub(super) fn cost(&self) -> u64 {
        self.bytes.len() as u64 + SLOT_OVERHEAD
    }
}

/// Whether a change made a clean slice dirty.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BecameDirty {
    Yes,
    No,
    /// A deliberate fault lost the change.
    Forgotten,
}

/// Counters of one shard; their sums are the cache's.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Counters {
    pub(super) hits: u64,
    pub(super) misses: u64,
    pub(super) loads: u64,
    pub(super) evictions: u64,
    pub(super) read_ahead: u64,
}

#[derive(Debug)]
struct Slot {
    id: u64,
    slice: Slice,
}

/// A slice on its way.
#[derive(Debug, Default)]
struct Loading {
    /// Loads under way, by number. More than one if the worker of the first was not polled for a while.
    loads: SmallVec<[u64; 1]>,
    waiting: WaitList,
}

/// One shard: slices, loads in flight, and (for L2) the in-flight allocations of the guest clusters that its slices
/// map.
#[derive(Debug, Default)]
pub(crate) struct Shard {
    by_id: HashMap<u64, u32, FixedState>,
    slots: Vec<Slot>,
    hand: usize,
    loading: HashMap<u64, Loading, FixedState>,
    loads_begun: u64,
    /// Ids of slices that became dirty since they were last frozen.
    dirty: Vec<u64>,
    in_flight: InFlight,
    cleared: ClearedInPlace,
    counters: Counters,
    generation: u64,
}

/// The state of a wanted slice.
pub(crate) enum Wanted {
    Present,
    Loading,
    /// Nobody loads it: the caller does, and ends with [`Shard::end_load`]. The load's number.
    Yours(u64),
}

/// Whether a load that another has under way is waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Patience {
    Waits,
    /// It has waited for long: the other's worker may not be polled.
    IsOver,
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

    /// Begins the load of `id`, or has `waker` woken when the one under way has ended. A present slice is pinned.
    pub(crate) fn want(&mut self, id: u64, waker: &Waker, patience: Patience) -> Wanted {
        if let Some(slice) = self.peek(id) {
            slice.pins += 1;
            return Wanted::Present;
        }
        let loading = self.loading.entry(id).or_default();
        let is_awaited = !loading.loads.is_empty() && patience == Patience::Waits;
        if is_awaited && !sabotage::is(Fault::LoadTwice) {
            loading.waiting.add(waker);
            return Wanted::Loading;
        }
        self.loads_begun += 1;
        loading.loads.push(self.loads_begun);
        Wanted::Yours(self.loads_begun)
    }

    /// Whether the load `number` of `id` may still make the slice present. Not once another load has: the slice may have
    /// been changed, written and evicted since, and what this load read is older.
    pub(crate) fn is_loading(&self, id: u64, number: u64) -> bool {
        self.loading.get(&id).is_some_and(|loading| loading.loads.contains(&number))
    }

    /// Ends the load `number` of `id`, and with one that made the slice present all others. Those who wait are to be woken
    /// after the lock is released.
    pub(crate) fn end_load(&mut self, id: u64, number: u64) -> Wakers {
        let is_present = self.contains(id);
        let Some(loading) = self.loading.get_mut(&id) else { return Wakers::default() };
        loading.loads.retain(|load| *load != number);
        if is_present || loading.loads.is_empty() {
            return self.loading.remove(&id).map(|mut loading| loading.waiting.take()).unwrap_or_default();
        }
        Wakers::default()
    }

    /// Ends all loads of the ids that `are_ended`: what they read is not current any more. Those who load and those who wait
    /// begin anew; the latter are to be woken after the lock is released.
    pub(super) fn end_loads(&mut self, are_ended: impl Fn(u64) -> bool) -> Vec<Wakers> {
        let ended = self.loading.extract_if(|id, _| are_ended(*id));
        ended.map(|(_, mut loading)| loading.waiting.take()).collect()
    }

    /// Ends a pin. The slice may have been given up meanwhile (tables were replaced): a pin serves progress, nothing else.
    pub(crate) fn unpin(&mut self, id: u64) {
        if let Some(slice) = self.peek(id) {
            slice.pins = slice.pins.saturating_sub(1);
        }
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

    /// The dirty ids that `are_wanted`, which are no longer noted.
    pub(super) fn take_dirty(&mut self, are_wanted: impl Fn(u64) -> bool) -> Vec<u64> {
        let (wanted, others) = self.dirty.drain(..).partition(|id| are_wanted(*id));
        self.dirty = others;
        wanted
    }

    pub(super) fn counters(&self) -> Counters {
        self.counters
    }

    /// Counts a load that somebody waits for.
    pub(super) fn count_miss(&mut self) {
        self.counters.misses += 1;
        self.counters.loads += 1;
    }

    /// Counts a load ahead of use.
    pub(super) fn count_read_ahead(&mut self) {
        self.counters.loads += 1;
        self.counters.read_ahead += 1;
    }

    /// A number that rises when something changes that a slice of this shard was derived from.
    pub(crate) fn generation(&self) -> u64 {
        self.generation
    }

    pub(crate) fn raise_generation(&mut self) {
        self.generation += 1;
    }

    /// Allocations in flight of the guest clusters that the shard's slices map.
    #[inline]
    pub(crate) fn in_flight(&mut self) -> &mut InFlight {
        &mut self.in_flight
    }

    /// Guest clusters that were cleared and kept their place.
    pub(crate) fn cleared(&mut self) -> &mut ClearedInPlace {
        &mut self.cleared
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
    pub(super) fn evict_one(&mut self) -> Option<Slice> {
        for _ in 0..self.slots.len() * 2 {
            if self.hand >= self.slots.len() {
                self.hand = 0;
            }
            let slice = &mut self.slots.get_mut(self.hand)?.slice;
            if slice.is_evictable() && !std::mem::take(&mut slice.referenced) {
                self.counters.evictions += 1;
                return Some(self.remove_at(self.hand));
            }
            self.hand += 1;
        }
        None
    }

    /// Takes out the slices that nobody used since the last time, and tells what they cost.
    pub(super) fn remove_idle(&mut self) -> u64 {
        let before = self.slots.len();
        let freed = self.remove_if(|_, slice| slice.is_idle());
        self.counters.evictions += (before - self.slots.len()) as u64;
        freed
    }

    /// Takes out the slices whose ids `is_ended` finds, whatever their state, and tells what they cost.
    pub(super) fn remove_ended(&mut self, is_ended: impl Fn(u64) -> bool) -> u64 {
        self.dirty.retain(|id| !is_ended(*id));
        for slot in &mut self.slots {
            if is_ended(slot.id) {
                slot.slice.dirty = DirtyBlocks::default();
                slot.slice.in_writing = false;
            }
        }
        self.remove_if(|id, _| is_ended(id))
    }

    /// Takes all clean slices out of which `wanted` says so.
    pub(super) fn remove_if(&mut self, mut wanted: impl FnMut(u64, &mut Slice) -> bool) -> u64 {
        let mut freed = 0;
        let mut at = 0;
        while let Some(slot) = self.slots.get_mut(at) {
            if slot.slice.is_clean() && wanted(slot.id, &mut slot.slice) {
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
}
