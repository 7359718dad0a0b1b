//! A small cache of inflated clusters, one for a chain.
//!
//! A cluster that is read piece by piece is inflated once: the first reader inflates, others wait for it, and the
//! result stays in a bounded cache. Entries are dropped when the host space of their stream is released.

use crate::sync::atomic::{AtomicU32, Ordering::Relaxed};
use crate::sync::{Clock, with_patience};
use crate::sync::{Mutex, MutexGuard, WaitList};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::future::poll_fn;
use std::ops::Range;
use std::sync::Arc;
use std::task::Poll;
use zebu_qcow2::CompressedRange;
use zebu_storage::sabotage::{self, Fault};

/// Bytes of inflated clusters kept for a chain, however many images it has.
const CAPACITY: usize = 4 << 20;
/// Buffers of clusters that were given up, kept for the next ones: a fresh one costs the kernel its pages.
const SPARE: usize = 8;
/// Most bytes of them.
const SPARE_BYTES: usize = 1 << 20;

/// An inflated cluster.
pub(crate) type Inflated = Arc<Vec<u8>>;

/// The inflated clusters of a chain.
#[derive(Debug, Default)]
pub(crate) struct InflatedClusters {
    state: Mutex<State>,
    owners: AtomicU32,
}

/// The inflated clusters of one image.
#[derive(Debug)]
pub(crate) struct ClusterCache {
    all: Arc<InflatedClusters>,
    owner: u32,
}

/// Image, offset and length of a stream.
type Key = (u32, u64, u64);

#[derive(Debug, Default)]
struct State {
    ready: BTreeMap<Key, Entry>,
    /// Keys in the order in which they are looked at for eviction; some may be gone.
    clock: VecDeque<Key>,
    bytes: usize,
    loading: HashMap<Key, WaitList>,
    spare: Vec<Vec<u8>>,
}

#[derive(Debug)]
struct Entry {
    bytes: Inflated,
    /// Used since the clock passed it.
    used: bool,
}

pub(crate) enum Inflation<'a> {
    Ready(Inflated),
    /// The caller inflates it; others wait for that if there is a ticket.
    Mine(Option<InflateTicket<'a>>),
}

/// The duty to inflate a cluster; others wait until it is dropped.
pub(crate) struct InflateTicket<'a> {
    cache: &'a ClusterCache,
    key: Key,
}

impl State {
    fn get(&mut self, key: Key) -> Option<Inflated> {
        let entry = self.ready.get_mut(&key)?;
        entry.used = true;
        Some(entry.bytes.clone())
    }

    fn insert(&mut self, key: Key, bytes: Inflated) {
        while self.bytes + bytes.len() > CAPACITY {
            let Some(key) = self.clock.pop_front() else { break };
            match self.ready.get_mut(&key) {
                Some(entry) if entry.used => {
                    entry.used = false;
                    self.clock.push_back(key);
                }
                Some(_) => self.remove(key),
                None => {}
            }
        }
        self.bytes += bytes.len();
        match self.ready.insert(key, Entry { bytes, used: false }) {
            Some(before) => self.bytes -= before.bytes.len(),
            None => self.clock.push_back(key),
        }
    }

    fn remove(&mut self, key: Key) {
        let Some(entry) = self.ready.remove(&key) else { return };
        self.bytes -= entry.bytes.len();
        if self.spare.len() < SPARE
            && (self.spare.len() + 1) * entry.bytes.len() <= SPARE_BYTES
            && let Some(buffer) = Arc::into_inner(entry.bytes)
        {
            self.spare.push(buffer);
        }
    }
}

impl ClusterCache {
    /// That of another image of the chain.
    pub(crate) fn new(all: Arc<InflatedClusters>) -> Self {
        let owner = all.owners.fetch_add(1, Relaxed);
        Self { all, owner }
    }

    fn key(&self, stream: CompressedRange) -> Key {
        (self.owner, stream.offset.0, stream.len)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.all.state.lock()
    }

    pub(crate) async fn lookup(&self, clock: &impl Clock, stream: CompressedRange) -> Inflation<'_> {
        let key = self.key(stream);
        let found = poll_fn(|cx| {
            let mut state = self.state();
            if let Some(bytes) = state.get(key) {
                return Poll::Ready(Inflation::Ready(bytes));
            }
            if let Some(waiting) = state.loading.get_mut(&key) {
                waiting.add(cx.waker());
                return Poll::Pending;
            }
            state.loading.insert(key, WaitList::default());
            Poll::Ready(Inflation::Mine(Some(InflateTicket { cache: self, key })))
        });
        with_patience(clock, found).await.unwrap_or(Inflation::Mine(None))
    }

    pub(crate) fn insert(&self, stream: CompressedRange, bytes: Inflated) {
        self.state().insert(self.key(stream), bytes);
    }

    /// A buffer for a result; what it holds is of no interest.
    pub(crate) fn buffer(&self) -> Vec<u8> {
        self.state().spare.pop().unwrap_or_default()
    }

    /// Forgets streams that touch these host clusters.
    pub(crate) fn forget(&self, clusters: &Range<u64>, cluster_bits: u32) {
        if sabotage::is(Fault::KeepInflated) {
            return;
        }
        let (start, end) = (clusters.start << cluster_bits, clusters.end << cluster_bits);
        // A descriptor reaches over two clusters at most.
        let first = start.saturating_sub(2 << cluster_bits);
        let mut state = self.state();
        let touched: Vec<Key> = state
            .ready
            .range((self.owner, first, 0)..(self.owner, end, 0))
            .map(|(key, _)| *key)
            .filter(|(_, offset, len)| offset + len > start)
            .collect();
        Self::remove_all(&mut state, touched);
    }

    /// Forgets all streams of the image.
    pub(crate) fn forget_all(&self) {
        let mut state = self.state();
        let all = (self.owner, 0, 0)..=(self.owner, u64::MAX, u64::MAX);
        let touched: Vec<Key> = state.ready.range(all).map(|(key, _)| *key).collect();
        Self::remove_all(&mut state, touched);
    }

    fn remove_all(state: &mut State, keys: Vec<Key>) {
        for key in keys {
            state.remove(key);
            // A place is used again and again: the clock must not fill up with what is gone.
            state.clock.retain(|at| *at != key);
        }
    }
}

impl Drop for InflateTicket<'_> {
    fn drop(&mut self) {
        let waiting = self.cache.state().loading.remove(&self.key);
        if let Some(mut waiting) = waiting {
            waiting.take().wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zebu_qcow2::HostOffset;

    fn stream(offset: u64) -> CompressedRange {
        CompressedRange { offset: HostOffset(offset), len: 1024 - offset % 512 }
    }

    #[test]
    fn the_cache_keeps_to_its_bytes_and_what_was_used_last() {
        let cache = ClusterCache::new(Arc::default());
        let at = |i: u64| cache.key(stream(i << 20));
        let mut state = cache.state();
        let cluster = CAPACITY / 8;
        for i in 0..8 {
            state.insert(at(i), Arc::new(vec![i as u8; cluster]));
        }
        assert!(state.get(at(3)).is_some_and(|bytes| bytes[0] == 3));
        for i in 8..15 {
            state.insert(at(i), Arc::new(vec![i as u8; cluster]));
            assert!(state.bytes <= CAPACITY && state.ready.len() <= 8);
        }
        assert!(state.get(at(3)).is_some(), "it was used since it was inserted");
        assert!(state.get(at(0)).is_none());
        assert_eq!(state.ready.values().map(|entry| entry.bytes.len()).sum::<usize>(), state.bytes);
    }

    #[test]
    fn released_clusters_are_forgotten_and_no_others() {
        let all = Arc::new(InflatedClusters::default());
        let (other, cache) = (ClusterCache::new(all.clone()), ClusterCache::new(all));
        let offsets = [0x1_0000, 0x1_fe00, 0x2_0000, 0x2_8000, 0x3_0000];
        for offset in offsets {
            cache.insert(stream(offset), Arc::new(vec![0; 65536]));
            other.insert(stream(offset), Arc::new(vec![1; 65536]));
        }
        cache.forget(&(2..3), 16);
        let mut state = cache.state();
        let left: Vec<bool> =
            offsets.iter().map(|offset| state.get(cache.key(stream(*offset))).is_some()).collect();
        // The second one reaches into the released cluster.
        assert_eq!(left, [true, false, false, false, true]);
        assert_eq!(state.bytes, 7 * 65536, "those of the other image stay");
        assert!(
            offsets.iter().all(|offset| state.get(other.key(stream(*offset))).is_some_and(|b| b[0] == 1))
        );
        assert_eq!(state.spare.len(), 3, "their memory is used again");
    }
}
