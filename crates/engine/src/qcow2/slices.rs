//! The mapping cache: slices of L2 tables and of refcount blocks.
//!
//! A slice is absent, loading, or present. Lookups take one shard's mutex for as long as it takes to read a few
//! entries, never across an await. A load in flight is an entry in the shard's `loading` table with the wakers of
//! those who wait; other slices load and hit meanwhile. A present slice may be dirty (changed since the last commit
//! froze it) or in writing (a running commit holds a copy that is not durable yet); only one that is neither may be
//! evicted, so whoever looks a slice up sees every change that was made, committed or not.
//!
//! Keys are positions, not places: L2 slices are counted by guest address, refcount slices by host cluster. A table
//! that moves keeps its slices.

use crate::Result;
use crate::qcow2::inflight::InFlight;
use foldhash::fast::FixedState;
use smallvec::SmallVec;
use std::collections::HashMap;
use std::future::poll_fn;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};
use zebu_storage::sabotage::{self, Fault};

const SHARDS: usize = 64;

/// Bytes that a slice costs beyond its content.
const SLOT_OVERHEAD: u64 = 96;

/// The byte budget that all slices of an image and its backing chain share.
#[derive(Debug)]
pub(crate) struct Budget {
    limit: AtomicU64,
    used: AtomicU64,
}

impl Budget {
    pub(crate) fn new(limit: u64) -> Self {
        Self { limit: AtomicU64::new(limit), used: AtomicU64::new(0) }
    }
    pub(crate) fn used(&self) -> u64 {
        self.used.load(Relaxed)
    }
    /// Whether one more slice of `bytes` is too much.
    fn is_full_for(&self, bytes: u64) -> bool {
        self.used() + bytes > self.limit.load(Relaxed)
    }
}

/// Which blocks of a slice changed since they were last frozen, a bit each.
#[derive(Debug, Clone, Default)]
pub(crate) struct DirtyBlocks(SmallVec<[u64; 1]>);

impl DirtyBlocks {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.iter().all(|word| *word == 0)
    }
    fn set(&mut self, block: usize) {
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
    dirty: DirtyBlocks,
    in_writing: bool,
    referenced: bool,
}

impl Slice {
    /// Marks the bytes at `offset..offset + len` as changed.
    pub(crate) fn mark_dirty(&mut self, offset: usize, len: usize, block_bytes: usize) {
        for block in offset / block_bytes..=(offset + len - 1) / block_bytes {
            self.dirty.set(block);
        }
    }
    fn is_evictable(&self) -> bool {
        !self.in_writing && self.dirty.is_empty()
    }
}

/// One shard: slices by key, loads in flight, and (for L2) the in-flight allocations of the guest clusters that its
/// slices map.
#[derive(Debug, Default)]
pub(crate) struct Shard {
    present: HashMap<u64, Slice, FixedState>,
    loading: HashMap<u64, Vec<Waker>, FixedState>,
    /// Keys in the order of insertion, for the CLOCK.
    clock: std::collections::VecDeque<u64>,
    dirty_keys: Vec<u64>,
    pub(crate) in_flight: InFlight,
}

/// A block of a slice that a commit writes: its key, its place in the slice, its content at the freeze.
#[derive(Debug)]
pub(crate) struct FrozenSlice {
    pub(crate) key: u64,
    pub(crate) dirty: DirtyBlocks,
    pub(crate) bytes: Box<[u8]>,
}

/// Counters.
#[derive(Debug, Default)]
pub(crate) struct CacheCounters {
    pub(crate) hits: AtomicU64,
    pub(crate) misses: AtomicU64,
    pub(crate) loads: AtomicU64,
    pub(crate) evictions: AtomicU64,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct SliceCache {
    shards: Box<[Mutex<Shard>]>,
    slice_bytes: usize,
    block_bytes: usize,
    budget: Arc<Budget>,
    dirty_slices: AtomicU64,
    hand: AtomicU64,
    pub(crate) counters: CacheCounters,
}

/// What [`SliceCache::begin_load`] found.
enum Begin<'a> {
    Present,
    Loading,
    Mine(LoadTicket<'a>),
}

/// The duty to load a slice; dropped without [`LoadTicket::finish`], the next one who wants it loads it.
struct LoadTicket<'a> {
    cache: &'a SliceCache,
    key: u64,
}

/// A shard, locked.
pub(crate) type ShardGuard<'a> = MutexGuard<'a, Shard>;

impl SliceCache {
    pub(crate) fn new(slice_bytes: usize, budget: Arc<Budget>) -> Self {
        Self {
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            slice_bytes,
            block_bytes: slice_bytes.min(4096),
            budget,
            dirty_slices: AtomicU64::new(0),
            hand: AtomicU64::new(0),
            counters: CacheCounters::default(),
        }
    }

    pub(crate) fn slice_bytes(&self) -> usize {
        self.slice_bytes
    }
    pub(crate) fn block_bytes(&self) -> usize {
        self.block_bytes
    }
    /// Slices changed since they were last frozen.
    pub(crate) fn dirty_slices(&self) -> u64 {
        self.dirty_slices.load(Relaxed)
    }
    /// How much of the budget is dirty, and so can't be evicted before a commit.
    pub(crate) fn pressure(&self) -> Pressure {
        let dirty = self.dirty_slices() * (self.slice_bytes as u64 + SLOT_OVERHEAD);
        let limit = self.budget.limit.load(Relaxed);
        if dirty > limit {
            Pressure::Over
        } else if dirty * 2 > limit {
            Pressure::High
        } else {
            Pressure::None
        }
    }
    /// Bytes of the budget in use, by all who share it.
    pub(crate) fn budget_used(&self) -> u64 {
        self.budget.used()
    }

    fn shard_of(&self, key: u64) -> &Mutex<Shard> {
        &self.shards[(key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 58) as usize % SHARDS]
    }

    /// Locks the shard of `key`.
    pub(crate) fn lock(&self, key: u64) -> ShardGuard<'_> {
        self.shard_of(key).lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The slice `key` in its locked shard; counts a hit.
    pub(crate) fn get<'s>(&self, shard: &'s mut Shard, key: u64) -> Option<&'s mut Slice> {
        let slice = shard.present.get_mut(&key)?;
        slice.referenced = true;
        self.counters.hits.fetch_add(1, Relaxed);
        Some(slice)
    }

    /// Changes bytes of a present slice; `false` if it is absent.
    pub(crate) fn change(
        &self,
        shard: &mut Shard,
        key: u64,
        offset: usize,
        len: usize,
        f: impl FnOnce(&mut [u8]),
    ) -> bool {
        let Some(slice) = shard.present.get_mut(&key) else { return false };
        slice.referenced = true;
        if let Some(bytes) = slice.bytes.get_mut(offset..offset + len) {
            f(bytes);
        }
        if slice.in_writing && sabotage::is(Fault::ForgetChangeInWriting) {
            return true;
        }
        let was_clean = slice.dirty.is_empty();
        slice.mark_dirty(offset, len, self.block_bytes);
        if was_clean {
            shard.dirty_keys.push(key);
            self.dirty_slices.fetch_add(1, Relaxed);
        }
        true
    }

    /// Makes sure that `key` is present: loads it with `load` unless somebody does already. The content may be gone
    /// again when this returns (evicted): look again and repeat.
    pub(crate) async fn ensure<F>(&self, key: u64, load: impl Fn() -> F) -> Result<()>
    where
        F: Future<Output = Result<Box<[u8]>>>,
    {
        loop {
            let begin = poll_fn(|cx| {
                let begin = self.begin_load(key, cx.waker());
                if matches!(begin, Begin::Loading) { Poll::Pending } else { Poll::Ready(begin) }
            })
            .await;
            match begin {
                Begin::Present => return Ok(()),
                Begin::Loading => {}
                Begin::Mine(ticket) => {
                    self.counters.loads.fetch_add(1, Relaxed);
                    let bytes = load().await?;
                    // Room first: the new slice must not be the one to go before it was used.
                    self.evict();
                    ticket.finish(bytes);
                    return Ok(());
                }
            }
        }
    }

    fn begin_load(&self, key: u64, waker: &Waker) -> Begin<'_> {
        let mut shard = self.lock(key);
        if shard.present.contains_key(&key) {
            return Begin::Present;
        }
        if let Some(waiting) = shard.loading.get_mut(&key) {
            if !waiting.iter().any(|w| w.will_wake(waker)) {
                waiting.push(waker.clone());
            }
            return Begin::Loading;
        }
        self.counters.misses.fetch_add(1, Relaxed);
        shard.loading.insert(key, Vec::new());
        Begin::Mine(LoadTicket { cache: self, key })
    }

    /// Evicts by CLOCK until the budget has room for one more slice or nothing more can go.
    pub(crate) fn evict(&self) {
        let mut fruitless = 0;
        while self.budget.is_full_for(self.slice_bytes as u64 + SLOT_OVERHEAD) && fruitless < SHARDS {
            let index = self.hand.fetch_add(1, Relaxed) as usize % SHARDS;
            let mut shard = self.shards[index].lock().unwrap_or_else(PoisonError::into_inner);
            if self.evict_one(&mut shard) {
                fruitless = 0;
            } else {
                fruitless += 1;
            }
        }
    }

    fn evict_one(&self, shard: &mut Shard) -> bool {
        for _ in 0..shard.clock.len() * 2 {
            let Some(key) = shard.clock.pop_front() else { return false };
            let Some(slice) = shard.present.get_mut(&key) else { continue };
            if slice.is_evictable() && !slice.referenced {
                shard.present.remove(&key);
                self.budget.used.fetch_sub(self.slice_bytes as u64 + SLOT_OVERHEAD, Relaxed);
                self.counters.evictions.fetch_add(1, Relaxed);
                return true;
            }
            if slice.is_evictable() {
                slice.referenced = false;
            }
            shard.clock.push_back(key);
        }
        false
    }

    /// Takes copies of all dirty slices for a commit; they count as clean but stay until [`SliceCache::thaw`].
    pub(crate) fn freeze(&self) -> Vec<FrozenSlice> {
        let mut frozen = Vec::new();
        for shard in &self.shards {
            let mut shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            for key in std::mem::take(&mut shard.dirty_keys) {
                let Some(slice) = shard.present.get_mut(&key) else { continue };
                slice.in_writing = !sabotage::is(Fault::EvictInWriting);
                self.dirty_slices.fetch_sub(1, Relaxed);
                frozen.push(FrozenSlice {
                    key,
                    dirty: std::mem::take(&mut slice.dirty),
                    bytes: slice.bytes.clone(),
                });
            }
        }
        frozen.sort_unstable_by_key(|slice| slice.key);
        frozen
    }

    /// Ends the writing of frozen slices. After a failure their blocks are dirty again.
    pub(crate) fn thaw(&self, frozen: &[FrozenSlice], outcome: Written) {
        for FrozenSlice { key, dirty, .. } in frozen {
            let mut shard = self.lock(*key);
            let Some(slice) = shard.present.get_mut(key) else { continue };
            slice.in_writing = false;
            if outcome == Written::Failed {
                let was_clean = slice.dirty.is_empty();
                for block in dirty.iter() {
                    slice.dirty.set(block);
                }
                if was_clean && !slice.dirty.is_empty() {
                    shard.dirty_keys.push(*key);
                    self.dirty_slices.fetch_add(1, Relaxed);
                }
            }
        }
        self.evict();
    }
}

/// How much of the cache waits for a commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Pressure {
    /// Less than half of the budget.
    None,
    /// More than half.
    High,
    /// More than the budget.
    Over,
}

/// How a commit's write ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Written {
    Durable,
    Failed,
}

impl LoadTicket<'_> {
    fn finish(self, bytes: Box<[u8]>) {
        debug_assert_eq!(bytes.len(), self.cache.slice_bytes);
        let mut shard = self.cache.lock(self.key);
        shard.present.insert(
            self.key,
            Slice { bytes, dirty: DirtyBlocks::default(), in_writing: false, referenced: true },
        );
        shard.clock.push_back(self.key);
        self.cache.budget.used.fetch_add(self.cache.slice_bytes as u64 + SLOT_OVERHEAD, Relaxed);
        drop(shard);
        // The drop below wakes those who wait.
    }
}

impl Drop for LoadTicket<'_> {
    fn drop(&mut self) {
        let wakers = self.cache.lock(self.key).loading.remove(&self.key);
        for waker in wakers.into_iter().flatten().filter(|_| !sabotage::is(Fault::ForgetLoadWaiters)) {
            waker.wake();
        }
    }
}

impl Drop for SliceCache {
    fn drop(&mut self) {
        let held: usize =
            self.shards.iter().map(|s| s.lock().unwrap_or_else(PoisonError::into_inner).present.len()).sum();
        self.budget.used.fetch_sub(held as u64 * (self.slice_bytes as u64 + SLOT_OVERHEAD), Relaxed);
    }
}
