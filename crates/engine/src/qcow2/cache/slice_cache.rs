//! The mapping cache: slices of L2 tables, of refcount blocks, and of what is derived from them.
//!
//! A slice is absent, loading, or present. Lookups take one shard's mutex for as long as it takes to read a few
//! entries, never across an await. A load in flight is an entry in the shard's `loading` table with the wakers of
//! those who wait; other slices load and hit meanwhile.
//!
//! A present slice may be dirty (changed since a commit last froze it), or in writing (a commit's copy of it is not durable
//! yet). Only one that is neither may be evicted. So a lookup sees every change, committed or not.
//!
//! Keys are positions, not places: L2 slices are counted by guest address, refcount slices by host cluster. A table
//! that moves keeps its slices. Slices of all images of a chain live in one [`SliceStore`].

use crate::Result;
use crate::chain::map::ChainMap;
use crate::qcow2::cache::shard::{
    BecameDirty, DirtyBlocks, Patience, SLOT_OVERHEAD, Shard, ShardGuard, Slice, Wanted,
};
use crate::qcow2::cache::slice_store::{Class, Room, SliceStore};
use crate::sync::atomic::{AtomicU64, Ordering::Relaxed};
use crate::sync::{Clock, Wakers, with_patience};
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Poll, Waker};
use zebu_storage::IoBuf;
use zebu_storage::sabotage::{self, Fault};

/// Misses remembered to tell a sequence from chance.
const RECENT_MISSES: usize = 8;

/// A dirty slice that a commit writes: its key, its content at the freeze, and which of its blocks have changed.
#[derive(Debug)]
pub(crate) struct FrozenSlice {
    key: u64,
    dirty: DirtyBlocks,
    bytes: Box<[u8]>,
    block_bytes: usize,
}

impl FrozenSlice {
    pub(crate) fn key(&self) -> u64 {
        self.key
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The blocks that changed, with their places in the file, where the slice lies at `start`.
    pub(crate) fn dirty_blocks(&self, start: u64) -> impl Iterator<Item = (u64, IoBuf)> + '_ {
        self.dirty.iter().filter_map(move |block| {
            let at = block * self.block_bytes;
            let end = (at + self.block_bytes).min(self.bytes.len());
            Some((start + at as u64, IoBuf::copy_of(self.bytes.get(at..end)?)))
        })
    }
}

/// The slices of one table. See the module.
#[derive(Debug)]
pub(crate) struct SliceCache {
    store: Arc<SliceStore>,
    class: Class,
    owner: u32,
    slice_bytes: usize,
    block_bytes: usize,
    dirty_slices: AtomicU64,
    /// Told of every change.
    index: Option<Arc<ChainMap>>,
    /// One more than the keys that were missed lately.
    recent_misses: [AtomicU64; RECENT_MISSES],
    next_miss: AtomicU64,
}

/// The duty to load a slice; dropped without [`LoadTicket::finish`], the next one who wants it loads it.
pub(crate) struct LoadTicket<'a> {
    cache: &'a SliceCache,
    key: u64,
    number: u64,
}

/// A slice that is not evicted, so that the request that it was loaded for finds it. It is dropped with no shard locked.
pub(crate) struct Pin<'a> {
    cache: &'a SliceCache,
    key: u64,
}

/// The answer to [`SliceCache::want`].
pub(crate) enum Slot<'a> {
    /// The slice is present.
    Present(Pin<'a>),
    /// The caller has to load it.
    Vacant(LoadTicket<'a>),
}

/// Whether misses follow each other, as those of a reader that goes forward do.
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
    pub(crate) fn watched_by(mut self, index: Option<Arc<ChainMap>>) -> Self {
        self.index = index;
        self
    }

    /// The memory that the slices are in.
    pub(crate) fn store(&self) -> &Arc<SliceStore> {
        &self.store
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
        let (dirty, room) = (self.store.dirty_bytes(), self.store.budget().for_slices());
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
        match slice.change(offset, len, self.block_bytes, f) {
            BecameDirty::Yes => {
                shard.note_dirty(id);
                self.note_dirty_slice();
            }
            BecameDirty::No => {}
            BecameDirty::Forgotten => return true,
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

    /// Makes `key` present, and keeps it so until the pin is dropped: loads it with `load` unless somebody does already.
    /// A failed load is not kept: the next one tries again.
    pub(crate) async fn ensure<F>(
        &self,
        clock: &impl Clock,
        key: u64,
        load: impl Fn() -> F,
    ) -> Result<Pin<'_>>
    where
        F: Future<Output = Result<Box<[u8]>>>,
    {
        // Each further turn is one in which the load of another succeeded and the slice was given up at once.
        loop {
            let ticket = match self.want(clock, key).await {
                Slot::Present(pin) => return Ok(pin),
                Slot::Vacant(ticket) => ticket,
            };
            let room = self.store.room(clock, self.load_cost()).await;
            let bytes = load().await?;
            if let Some(pin) = ticket.finish(bytes, room) {
                return Ok(pin);
            }
        }
    }

    /// Bytes of the budget that a load takes: the slice, and the buffer that it comes through.
    fn load_cost(&self) -> u64 {
        self.slice_cost() + self.slice_bytes as u64
    }

    /// Waits until `key` is present, or nobody loads it, or who does has not come to an end for a second.
    pub(crate) async fn want(&self, clock: &impl Clock, key: u64) -> Slot<'_> {
        let waits = poll_fn(|cx| self.poll_want(cx.waker(), key, Patience::Waits));
        match with_patience(clock, waits).await {
            Some(slot) => slot,
            None => poll_fn(|cx| self.poll_want(cx.waker(), key, Patience::IsOver)).await,
        }
    }

    fn poll_want(&self, waker: &Waker, key: u64, patience: Patience) -> Poll<Slot<'_>> {
        let mut shard = self.lock(key);
        match shard.want(self.id(key), waker, patience) {
            Wanted::Present => Poll::Ready(Slot::Present(Pin { cache: self, key })),
            Wanted::Loading => Poll::Pending,
            Wanted::Yours(number) => {
                shard.count_miss();
                Poll::Ready(Slot::Vacant(LoadTicket { cache: self, key, number }))
            }
        }
    }

    /// The duty to load `key` ahead of use, with its room, if it is neither there nor on its way and there is room.
    pub(crate) fn begin_ahead(&self, key: u64) -> Option<(LoadTicket<'_>, Room<'_>)> {
        let room = self.store.spare_room(self.load_cost())?;
        let mut shard = self.lock(key);
        let id = self.id(key);
        if shard.contains(id) {
            return None;
        }
        let Wanted::Yours(number) = shard.want(id, Waker::noop(), Patience::Waits) else { return None };
        shard.count_read_ahead();
        drop(shard);
        Some((LoadTicket { cache: self, key, number }, room))
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
    /// other means than [`SliceCache::change`]. The next lookup loads them anew, and so does whoever loads one now: what a
    /// load that began before this brings is dropped.
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
            for id in SliceStore::take_dirty(&mut shard, self.owner) {
                let Some(slice) = shard.peek(id) else { continue };
                let (dirty, bytes) = slice.freeze();
                self.dirty_slices.fetch_sub(1, Relaxed);
                self.store.note_clean_bytes(self.slice_cost());
                self.store.budget().take(self.slice_bytes as u64);
                let key = SliceStore::key_of(id);
                frozen.push(FrozenSlice { key, dirty, bytes, block_bytes: self.block_bytes });
            }
        }
        frozen.sort_unstable_by_key(|slice| slice.key);
        frozen
    }

    /// Ends the writing of frozen slices. After a failure their blocks are dirty again.
    pub(crate) fn thaw(&self, frozen: &[FrozenSlice], outcome: Written) {
        for FrozenSlice { key, dirty, .. } in frozen {
            self.store.budget().give_back(self.slice_bytes as u64);
            let mut shard = self.lock(*key);
            let id = self.id(*key);
            let Some(slice) = shard.peek(id) else { continue };
            if slice.thaw((outcome == Written::Failed).then_some(dirty)) == BecameDirty::Yes {
                shard.note_dirty(id);
                self.note_dirty_slice();
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

impl<'a> LoadTicket<'a> {
    /// Makes the slice present, unless another load did already.
    pub(crate) fn finish(self, bytes: Box<[u8]>, room: Room<'_>) -> Option<Pin<'a>> {
        self.insert(bytes, room, |_| true)
    }

    /// As [`LoadTicket::finish`], unless something that the slice is derived from changed since `generation`.
    pub(crate) fn finish_derived(self, bytes: Box<[u8]>, room: Room<'_>, generation: u64) -> Option<Pin<'a>> {
        self.insert(bytes, room, |shard| shard.generation() == generation)
    }

    fn insert(
        self,
        bytes: Box<[u8]>,
        room: Room<'_>,
        is_current: impl FnOnce(&Shard) -> bool,
    ) -> Option<Pin<'a>> {
        let cache = self.cache;
        debug_assert_eq!(bytes.len(), cache.slice_bytes);
        let id = cache.id(self.key);
        let mut shard = cache.lock(self.key);
        if !shard.is_loading(id, self.number) {
            return None;
        }
        if !is_current(&shard) && !sabotage::is(Fault::KeepStaleDerived) {
            return None;
        }
        let mut slice = Slice::new(bytes);
        if !sabotage::is(Fault::LoadUnpinned) {
            slice.pin();
        }
        shard.insert(id, slice);
        // In the same critical section, so that another load of the slice finds that it comes too late.
        let waiting = if sabotage::is(Fault::EndLoadsLate) {
            Wakers::default()
        } else {
            shard.end_load(id, self.number)
        };
        cache.store.note_added(cache.class, cache.slice_cost());
        drop(shard);
        room.keep(cache.slice_cost());
        if !sabotage::is(Fault::ForgetLoadWaiters) {
            waiting.wake();
        }
        Some(Pin { cache, key: self.key })
    }
}

impl Pin<'_> {
    /// Whether the slice is still there. It may have been given up only if the tables were replaced.
    pub(crate) fn holds(&self) -> bool {
        self.cache.lock(self.key).contains(self.cache.id(self.key))
    }

    /// Ends the pin of one who holds the lock of its shard.
    pub(crate) fn end(self, shard: &mut Shard) {
        shard.unpin(self.cache.id(self.key));
        std::mem::forget(self);
    }
}

impl Drop for Pin<'_> {
    fn drop(&mut self) {
        self.cache.lock(self.key).unpin(self.cache.id(self.key));
    }
}

impl Drop for LoadTicket<'_> {
    fn drop(&mut self) {
        let wakers = self.cache.lock(self.key).end_load(self.cache.id(self.key), self.number);
        if !sabotage::is(Fault::ForgetLoadWaiters) {
            wakers.wake();
        }
    }
}

impl Drop for SliceCache {
    fn drop(&mut self) {
        self.store.note_clean_bytes(self.dirty_slices() * self.slice_cost());
        self.store.end_owner(self.class, self.owner);
    }
}
