//! Handing out host clusters: windows refilled from free space.
//!
//! A window's refcounts are raised once, for the whole window, and become durable with the first phase of the commit
//! that links any of its clusters. Growth happens before use, so no write and no fallocate ever reaches past the end
//! of the file.

use crate::qcow2::cache::slice_cache::Pressure;
use crate::qcow2::space::free::{Allocated, SpaceContent};
use crate::qcow2::space::quarantine::FreeMode;
use crate::qcow2::space::windows::Stream;
use crate::qcow2::space::{HostSpace, Pool};
use crate::sync::atomic::Ordering::Relaxed;
use crate::{Error, ErrorKind, Result};
use zebu_storage::sabotage::{self, Fault, Limit};
use zebu_storage::{FsKind, IoErrorKind, Worker};

/// Bytes of the first window of a stream; the next ones double.
const WINDOW_MIN: u64 = 64 << 10;
/// Bytes of the largest window.
const WINDOW_MAX: u64 = 16 << 20;

/// The purpose of a window.
#[derive(Debug, Clone, Copy)]
pub(crate) enum WindowFor {
    /// Guest data from this guest cluster on.
    Data { guest_cluster: u64 },
    /// Tables that need all of their clusters in a row.
    Metadata,
    /// Streams of compressed clusters.
    Compressed,
}

impl WindowFor {
    /// The first thing for which a window is asked for.
    fn name(self) -> &'static str {
        match self {
            WindowFor::Data { .. } => "data cluster",
            WindowFor::Metadata => "L2 table",
            WindowFor::Compressed => "compressed cluster",
        }
    }

    /// The stream that it is now, and how many of `count` clusters it needs in a row.
    fn needs(self, pool: &Pool, count: u64) -> (Stream, u64) {
        match self {
            WindowFor::Data { guest_cluster } => (pool.windows.stream_of(guest_cluster), 1),
            WindowFor::Metadata => (Stream::Metadata, count),
            WindowFor::Compressed => (Stream::Compressed, 1),
        }
    }

    /// Where the window begins that its stream has now, and what it held.
    fn window(self, pool: &Pool, count: u64) -> Option<(u64, SpaceContent)> {
        pool.windows.first_of(self.needs(pool, count).0)
    }
}

impl HostSpace {
    fn window_min(&self) -> u64 {
        (sabotage::at_most(Limit::WindowBytes, WINDOW_MIN) >> self.geometry.cluster_bits).max(1)
    }
    fn window_max(&self) -> u64 {
        (sabotage::at_most(Limit::WindowBytes, WINDOW_MAX) >> self.geometry.cluster_bits).max(1)
    }

    /// Host clusters for guest data from `guest_cluster` on, as many of `count` as follow each other. `None`: its
    /// stream needs a new window.
    pub(crate) fn try_allocate_data(&self, guest_cluster: u64, count: u64) -> Option<Allocated> {
        let allocated = self.pool().windows.take_data(guest_cluster, count)?;
        self.clusters_allocated.fetch_add(allocated.range.end - allocated.range.start, Relaxed);
        Some(allocated)
    }

    /// `count` clusters in a row for tables. `None`: their stream needs a new window.
    pub(crate) fn try_allocate_tables(&self, count: u64) -> Option<Allocated> {
        self.pool().windows.take_metadata(count)
    }

    /// Whether a table of `count` clusters gets a place by itself: it is longer than a first window, or one refcount block may
    /// not count all of it.
    pub(crate) fn is_large_table(&self, count: u64) -> bool {
        // The block itself may have to come first.
        count > 1 && (count > self.window_min() || count >= self.geometry.refcount_entries_per_block())
    }

    /// How much of the cache of counts is dirty.
    pub(crate) fn pressure(&self) -> Pressure {
        self.refcounts.cache().pressure()
    }

    /// Whether there is a window for streams of compressed clusters.
    pub(crate) fn has_compressed_window(&self) -> bool {
        self.pool().windows.has(Stream::Compressed, 1)
    }

    /// The window that there is now for what is `wanted`: where it begins, and what it held.
    pub(crate) fn window_for(&self, wanted: WindowFor, count: u64) -> Option<(u64, SpaceContent)> {
        wanted.window(&self.pool(), count)
    }

    /// Host clusters for streams, as many of `count` as follow each other. `None`: they need a new window.
    pub(crate) fn try_allocate_compressed(&self, count: u64) -> Option<Allocated> {
        let allocated = self.pool().windows.take_compressed(count)?;
        self.clusters_allocated.fetch_add(allocated.range.end - allocated.range.start, Relaxed);
        Some(allocated)
    }

    /// The last resort: what other windows have left. False: nothing that would do.
    pub(crate) async fn refill_from_windows(&self, wanted: WindowFor, count: u64) -> bool {
        let _turn = self.space_mutex.lock().await;
        let mut pool = self.pool();
        let (stream, min) = wanted.needs(&pool, count);
        let Some(found) = pool.windows.take_any(count, min) else { return false };
        let leftover = pool.windows.install(stream, found, 1);
        drop(pool);
        if let Some(leftover) = leftover {
            self.quarantine.push_unread(leftover.range, FreeMode::unused(leftover.content));
        }
        true
    }

    /// Sets up a window, unless the stream has another one than the one it had `before`. For compressed streams, always.
    pub(crate) async fn refill_unless_done(
        &self,
        worker: &Worker,
        wanted: WindowFor,
        count: u64,
        before: Option<(u64, SpaceContent)>,
    ) -> Result<()> {
        let _turn = self.space_mutex.lock().await;
        let (stream, min, want) = {
            let pool = self.pool();
            let (stream, min) = wanted.needs(&pool, count);
            // Others of the stream wait for the mutex, too, and the first of them does it.
            let is_done = match wanted {
                WindowFor::Data { .. } | WindowFor::Metadata => {
                    pool.windows.has(stream, min) || wanted.window(&pool, count) != before
                }
                WindowFor::Compressed => false,
            };
            if is_done {
                return Ok(());
            }
            let next = pool.windows.next_size(stream, self.window_min());
            (stream, min, next.max(count.min(self.window_max())).max(min))
        };
        let window = self.claim(worker, wanted, want, min).await?;
        let window = match self.set_window_aside(worker, stream, window).await {
            // There may be room for a smaller one.
            Err(error) if error.kind() == ErrorKind::NoSpace && want > min => {
                let smaller = self.claim(worker, wanted, min, min).await?;
                self.set_window_aside(worker, stream, smaller).await?
            }
            other => other?,
        };
        let leftover = self.pool().windows.install(stream, window, self.window_max());
        if let Some(leftover) = leftover {
            self.quarantine.push_unread(leftover.range, FreeMode::unused(leftover.content));
        }
        Ok(())
    }

    /// Has the file system set room aside for a window, if that is of use. A window for tables that finds none is given
    /// back. `space_mutex` is held.
    ///
    /// Tables: always, so that a commit does not run out of space after requests were acknowledged. Sequential streams
    /// on ext4, if they fill what they get: writes that each take a piece of a hole wait for each other there, and what
    /// several streams take in turn lies in pieces.
    async fn set_window_aside(
        &self,
        worker: &Worker,
        stream: Stream,
        window: Allocated,
    ) -> Result<Allocated> {
        let is_fresh = window.content == SpaceContent::Fresh;
        let is_needed = stream == Stream::Metadata;
        let is_useful = matches!(stream, Stream::Data { .. })
            && is_fresh
            && self.files.file().fs() == FsKind::Ext4
            && self.can_reserve.load(Relaxed);
        let is_wanted = is_needed || is_useful && self.is_filled(worker, stream).await;
        if !is_wanted {
            return Ok(window);
        }
        let bits = self.geometry.cluster_bits;
        let (start, len) = (window.range.start << bits, (window.range.end - window.range.start) << bits);
        let Err(error) = worker.allocate(self.files.file(), start, len).await else {
            self.can_reserve.store(true, Relaxed);
            return Ok(if is_fresh {
                Allocated { content: SpaceContent::Reserved, ..window }
            } else {
                window
            });
        };
        if error.kind == IoErrorKind::Unsupported {
            return Ok(window);
        }
        let error = Error::from(error).on(self.files.path());
        if error.kind() == ErrorKind::NoSpace && is_fresh {
            // A part of it may have been set aside. Whoever wants a single cluster needs it more.
            let _ = worker.punch_hole(self.files.file(), start, len).await;
            self.can_reserve.store(false, Relaxed);
        }
        if error.kind() == ErrorKind::NoSpace && !is_needed {
            return Ok(window);
        }
        // Nobody saw the window: what counts it was in no commit yet.
        let runs = self.lower(worker, window.range).await?;
        let mut pool = self.pool();
        for run in runs {
            pool.free.insert_missing(run, window.content);
        }
        Err(error)
    }

    /// Whether the guest fills the clusters of a stream, as the first one of its window shows. (The end of that one may
    /// still be in flight.) Room set aside for small writes at large steps would be wasted.
    async fn is_filled(&self, worker: &Worker, stream: Stream) -> bool {
        let first = self.pool().windows.first_of(stream);
        let Some((first, _)) = first.filter(|(_, content)| content.is_fresh()) else { return false };
        let start = first << self.geometry.cluster_bits;
        let extent = worker.extent_at(self.files.file(), start).await;
        extent.is_ok_and(|extent| !extent.hole && extent.len >= self.geometry.cluster_size() / 2)
    }

    /// Takes `min` to `want` free clusters that follow each other and raises their refcounts. `space_mutex` is held.
    async fn claim(&self, worker: &Worker, wanted: WindowFor, want: u64, min: u64) -> Result<Allocated> {
        self.pool().free.restore();
        // One more cluster than wanted, in case that a refcount block has to come first.
        let mut search = self.search_for(want + 1, min);
        loop {
            let mut found = self.find_free(worker, &mut search).await?;
            // Metadata whose refcount is 0 is no free space. Were it only kept from writes, a window that is given back
            // would release it, and the overlap check would forget it.
            self.check_free(&found.range, wanted.name())?;
            let per_block = self.geometry.refcount_entries_per_block();
            let index = found.range.start / per_block;
            let table = self.refcounts.table();
            if index >= table.entries().len() as u64 {
                self.give_back(&found);
                match self.grow_reftable(worker, index).await {
                    // Nothing can count those; there may be others, but not where the file grows.
                    Err(error) if error.kind() == ErrorKind::NoSpace => {
                        let counted = self.refcounts.table().entries().len() as u64 * per_block;
                        self.pool().free.set_aside_from(counted);
                        search.stay_below(counted, error);
                    }
                    grown => grown?,
                }
                continue;
            }
            let needs_block = table.entries().get(index) == 0;
            let in_block = found.range.end.min((index + 1) * per_block);
            if in_block < found.range.end {
                self.pool().free.insert(in_block..found.range.end, found.content);
                found.range.end = in_block;
            }
            if found.range.end - found.range.start < min + u64::from(needs_block) {
                // Too short for what was asked for (before the border of two refcount blocks): others may use it.
                self.pool().free.set_aside(found.range, found.content);
                continue;
            }
            return self.count_found(worker, found, index, want).await;
        }
    }

    /// Counts what was found free, but for what is more than `want`, and makes refcount block `index` for it if there is
    /// none. `space_mutex` is held.
    async fn count_found(
        &self,
        worker: &Worker,
        mut found: Allocated,
        index: u64,
        want: u64,
    ) -> Result<Allocated> {
        let needs_block = self.refcounts.table().entries().get(index) == 0;
        let whole = found.clone();
        let room = if needs_block {
            self.set_new_block_aside(worker, index, found.range.start).await
        } else {
            let counted = found.range.start..found.range.end.min(found.range.start + want);
            self.set_counts_aside(worker, index, counted).await
        };
        if let Err(error) = room {
            self.give_back(&whole);
            return Err(error);
        }
        if needs_block {
            let first = found.range.start;
            self.add_refblock(worker, index, first, found.content).await?;
            found.range.start += 1;
        }
        let surplus = found.range.start + want..found.range.end;
        if !surplus.is_empty() {
            self.pool().free.insert(surplus.clone(), found.content);
            found.range.end = surplus.start;
        }
        if sabotage::is(Fault::SkipRaise) {
            return Ok(found);
        }
        if let Err(error) = self.raise(worker, found.range.clone()).await {
            self.give_back(&found);
            return Err(error);
        }
        Ok(found)
    }

    pub(super) fn give_back(&self, unused: &Allocated) {
        self.pool().free.insert(unused.range.clone(), unused.content);
    }

    /// Gives back the rest of the windows (before the image is closed, or grows by other means).
    pub(crate) fn drain_windows(&self) {
        let left = self.pool().windows.drain();
        for Allocated { range, content } in left {
            // Nobody has written or linked them, so no read can use them.
            self.quarantine.push_unread(range, FreeMode::unused(content));
        }
    }
}
