//! The mapping cache: slices of L2 tables, of refcount blocks, and of what is derived from them.
//!
//! A slice is absent, loading, or present. Lookups take one shard's mutex for as long as it takes to read a few
//! entries, never across an await. A load in flight is an entry in the shard's `loading` table with the wakers of
//! those who wait; other slices load and hit meanwhile. A present slice may be dirty (changed since the last commit
//! froze it) or in writing (a running commit holds a copy that is not durable yet); only one that is neither may be
//! evicted, so whoever looks a slice up sees every change that was made, committed or not.
//!
//! Keys are positions, not places: L2 slices are counted by guest address, refcount slices by host cluster. A table
//! that moves keeps its slices. Slices of all images of a chain live in one [`SliceStore`].

use crate::Result;
use crate::qcow2::index::ChainIndex;
use crate::qcow2::store::{Class, Room, SLOT_OVERHEAD, SliceStore, Wanted};
use crate::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;
use zebu_storage::sabotage::{self, Fault};

pub(crate) use crate::qcow2::store::{DirtyBlocks, Shard, ShardGuard, Slice};

/// Misses remembered to tell a sequence from chance.
const RECENT_MISSES: usize = 8;

/// A block of a slice that a commit writes: its key, its place in the slice, its content at the freeze.
#[derive(Debug)]
pub(crate) struct FrozenSlice {
    pub(crate) key: u64,
    pub(crate) dirty: DirtyBlocks,
    pub(crate) bytes: Box<[u8]>,
}

/// The slices of one table. See the module.
#[derive(Debug)]
pub(crate) struct SliceCache {
    pub(crate) store: Arc<SliceStore>,
    class: Class,
    owner: u32,
    slice_bytes: usize,
    block_bytes: usize,
    dirty_slices: AtomicU64,
    /// Told of every change.
    index: Option<Arc<ChainIndex>>,
    /// One more than the keys that were missed lately.
    recent_misses: [AtomicU64; RECENT_MISSES],
    next_miss: AtomicU64,
}

/// The duty to load a slice; dropped without [`LoadTicket::finish`], the next one who wants it loads it.
pub(crate) struct LoadTicket<'a> {
    cache: &'a SliceCache,
    key: u64,
}

/// What a miss says about those to come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pattern {
    Scattered,
    /// The slice before it was missed lately.
    Sequential,
}

impl SliceCache {
    pub(crate) fn new(store: Arc<SliceStore>, class: Class, slice_bytes: usize) -> Self {
        let owner = store.new_owner();
        Self::of_owner(store, class, owner, slice_bytes)
    }

    /// The slices of an owner that has its number already.
    pub(crate) fn of_owner(store: Arc<SliceStore>, class: Class, owner: u32, slice_bytes: usize) -> Self {
        Self {
            store,
            class,
            owner,
            slice_bytes,
            block_bytes: slice_bytes.min(4096),
            dirty_slices: AtomicU64::new(0),
            index: None,
            recent_misses: Default::default(),
            next_miss: AtomicU64::new(0),
        }
    }

    /// The same; `index` is told of every change, in the critical section of the change.
    pub(crate) fn watched_by(mut self, index: Option<Arc<ChainIndex>>) -> Self {
        self.index = index;
        self
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
    /// Bytes of the budget that a present slice takes.
    pub(crate) fn slice_cost(&self) -> u64 {
        self.slice_bytes as u64 + SLOT_OVERHEAD
    }
    /// How much of the cache is dirty, and so can't be evicted before a commit. A commit holds copies, so what is
    /// dirty counts twice.
    pub(crate) fn pressure(&self) -> Pressure {
        let (dirty, room) = (self.store.dirty_bytes(), self.store.budget.for_slices());
        if dirty * 2 > room {
            Pressure::Over
        } else if dirty * 4 > room {
            Pressure::High
        } else {
            Pressure::None
        }
    }

    fn id(&self, key: u64) -> u64 {
        SliceStore::id(self.owner, key)
    }

    /// Locks the shard of `key`.
    #[inline]
    pub(crate) fn lock(&self, key: u64) -> ShardGuard<'_> {
        self.store.lock(self.class, self.id(key))
    }

    /// Whether `key` is present now.
    pub(crate) fn has(&self, key: u64) -> bool {
        self.lock(key).contains(self.id(key))
    }

    /// The slice `key` in its locked shard; counts a hit.
    #[inline]
    pub(crate) fn get<'s>(&self, shard: &'s mut Shard, key: u64) -> Option<&'s mut Slice> {
        shard.get(self.id(key))
    }

    /// The same for a further look of one request, which is not counted.
    pub(crate) fn peek<'s>(&self, shard: &'s mut Shard, key: u64) -> Option<&'s mut Slice> {
        shard.peek(self.id(key))
    }

    /// Changes bytes of a present slice, and what was derived from them; `false` if it is absent.
    pub(crate) fn change(
        &self,
        shard: &mut Shard,
        key: u64,
        offset: usize,
        len: usize,
        f: impl FnOnce(&mut [u8]),
    ) -> bool {
        let id = self.id(key);
        let Some(slice) = shard.peek(id) else { return false };
        slice.referenced = true;
        if let Some(bytes) = slice.bytes.get_mut(offset..offset + len) {
            f(bytes);
        }
        if slice.in_writing && sabotage::is(Fault::ForgetChangeInWriting) {
            return true;
        }
        let was_clean = slice.dirty.is_empty();
        for block in offset / self.block_bytes..=(offset + len - 1) / self.block_bytes {
            slice.dirty.set(block);
        }
        if was_clean {
            shard.note_dirty(id);
            self.note_dirty_slice();
        }
        if let Some(index) = &self.index {
            index.forget_entries(key * self.slice_bytes as u64 + offset as u64, len as u64);
        }
        true
    }

    fn note_dirty_slice(&self) {
        self.dirty_slices.fetch_add(1, Relaxed);
        self.store.note_dirty_bytes(self.slice_cost());
    }

    /// Makes sure that `key` is present: loads it with `load` unless somebody does already. The content may be gone
    /// again when this returns (evicted): look again and repeat. What fails to load is not kept: the next one tries
    /// again.
    pub(crate) async fn ensure<F>(&self, key: u64, load: impl Fn() -> F) -> Result<()>
    where
        F: Future<Output = Result<Box<[u8]>>>,
    {
        let Some(ticket) = self.want(key).await else { return Ok(()) };
        let room = self.store.room(self.load_cost()).await;
        let bytes = load().await?;
        ticket.finish(bytes, room);
        Ok(())
    }

    /// Bytes of the budget that a load takes: the slice, and the buffer that it comes through.
    fn load_cost(&self) -> u64 {
        self.slice_cost() + self.slice_bytes as u64
    }

    /// Waits until `key` is present (`None`), or nobody loads it: then the caller has to.
    pub(crate) async fn want(&self, key: u64) -> Option<LoadTicket<'_>> {
        poll_fn(|cx| {
            let mut shard = self.lock(key);
            match shard.want(self.id(key), cx.waker()) {
                Wanted::Present => Poll::Ready(None),
                Wanted::Loading => Poll::Pending,
                Wanted::Yours => {
                    shard.counters.misses += 1;
                    shard.counters.loads += 1;
                    Poll::Ready(Some(LoadTicket { cache: self, key }))
                }
            }
        })
        .await
    }

    /// The duty to load `key` ahead of use, with its room, if it is neither there nor on its way and there is room.
    pub(crate) fn begin_ahead(&self, key: u64) -> Option<(LoadTicket<'_>, Room<'_>)> {
        let room = self.store.spare_room(self.load_cost())?;
        let mut shard = self.lock(key);
        let Wanted::Yours = shard.want(self.id(key), std::task::Waker::noop()) else { return None };
        shard.counters.loads += 1;
        shard.counters.read_ahead += 1;
        drop(shard);
        Some((LoadTicket { cache: self, key }, room))
    }

    /// Notes that `key` was missed.
    pub(crate) fn note_miss(&self, key: u64) -> Pattern {
        let expects = |next: u64| self.recent_misses.iter().find(|expected| expected.load(Relaxed) == next);
        if expects(key + 1).is_some() {
            // Others wait for the same slice.
            return Pattern::Scattered;
        }
        if let Some(expected) = expects(key).filter(|_| key > 0) {
            expected.store(key + 1, Relaxed);
            return Pattern::Sequential;
        }
        let at = self.next_miss.fetch_add(1, Relaxed) as usize % RECENT_MISSES;
        self.recent_misses[at].store(key + 1, Relaxed);
        Pattern::Scattered
    }

    /// Notes that what follows `key` was loaded ahead, up to `next`: a miss of `next` goes on with the sequence.
    pub(crate) fn note_read_ahead(&self, key: u64, next: u64) {
        for expected in &self.recent_misses {
            let _ = expected.compare_exchange(key + 1, next, Relaxed, Relaxed);
        }
    }

    /// Gives up every slice that a commit does not need, and all that was derived from them: tables were changed by
    /// other means than [`SliceCache::change`]. The next lookup loads them anew.
    pub(crate) fn forget_all(&self) {
        self.store.forget(self.class, self.owner);
        if let Some(index) = &self.index {
            index.clear();
        }
    }

    /// Takes copies of all dirty slices for a commit; they count as clean but stay until [`SliceCache::thaw`].
    pub(crate) fn freeze(&self) -> Vec<FrozenSlice> {
        let mut frozen = Vec::new();
        for mut shard in self.store.each(self.class) {
            for id in shard.take_dirty(self.owner) {
                let Some(slice) = shard.peek(id) else { continue };
                slice.in_writing = !sabotage::is(Fault::EvictInWriting);
                self.dirty_slices.fetch_sub(1, Relaxed);
                self.store.note_clean_bytes(self.slice_cost());
                self.store.budget.take(self.slice_bytes as u64);
                frozen.push(FrozenSlice {
                    key: SliceStore::key_of(id),
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
            self.store.budget.give_back(self.slice_bytes as u64);
            let mut shard = self.lock(*key);
            let id = self.id(*key);
            let Some(slice) = shard.peek(id) else { continue };
            slice.in_writing = false;
            if outcome == Written::Failed {
                let was_clean = slice.dirty.is_empty();
                for block in dirty.iter() {
                    slice.dirty.set(block);
                }
                if was_clean && !slice.dirty.is_empty() {
                    shard.note_dirty(id);
                    self.note_dirty_slice();
                }
            }
        }
        self.store.shrink_to_budget();
    }
}

/// How much of the cache waits for a commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Pressure {
    /// Less than a quarter.
    None,
    /// More than a quarter.
    High,
    /// More than half.
    Over,
}

/// How a commit's write ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Written {
    Durable,
    Failed,
}

impl LoadTicket<'_> {
    /// Makes the slice present.
    pub(crate) fn finish(self, bytes: Box<[u8]>, room: Room<'_>) {
        self.insert(bytes, room, |_| true);
    }

    /// As [`LoadTicket::finish`], unless something that the slice is derived from changed since `generation`.
    pub(crate) fn finish_derived(self, bytes: Box<[u8]>, room: Room<'_>, generation: u64) {
        self.insert(bytes, room, |shard| shard.generation == generation);
    }

    fn insert(self, bytes: Box<[u8]>, room: Room<'_>, is_current: impl FnOnce(&Shard) -> bool) {
        debug_assert_eq!(bytes.len(), self.cache.slice_bytes);
        let mut shard = self.cache.lock(self.key);
        if !is_current(&shard) && !sabotage::is(Fault::KeepStaleDerived) {
            return;
        }
        shard.insert(self.cache.id(self.key), Slice::new(bytes));
        self.cache.store.note_added(self.cache.class, self.cache.slice_cost());
        drop(shard);
        room.keep(self.cache.slice_cost());
        // The drop of the ticket wakes those who wait.
    }
}

impl Drop for LoadTicket<'_> {
    fn drop(&mut self) {
        let wakers = self.cache.lock(self.key).end_load(self.cache.id(self.key));
        for waker in wakers.into_iter().filter(|_| !sabotage::is(Fault::ForgetLoadWaiters)) {
            waker.wake();
        }
    }
}

impl Drop for SliceCache {
    fn drop(&mut self) {
        self.store.note_clean_bytes(self.dirty_slices() * self.slice_cost());
        self.store.end_owner(self.class, self.owner);
    }
}
