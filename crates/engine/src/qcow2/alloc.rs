//! Handing out host clusters: windows refilled from free space, growth of the file ahead of use.
//!
//! A window's refcounts are raised once, for the whole window, and become durable with the first phase of the commit
//! that links any of its clusters. Growth happens before use, so no write and no fallocate ever reaches past the end
//! of the file.

use crate::qcow2::metadata_map::Metadata;
use crate::qcow2::refcounts::{NewBlock, RefTable};
use crate::qcow2::space::{Allocated, Content, Stream};
use crate::qcow2::state::{AfterFree, Qcow2};
use crate::{Error, ErrorKind, Result};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, PoisonError};
use zebu_qcow2::limits;
use zebu_storage::sabotage::{self, Fault};
use zebu_storage::{FileKind, IoErrorKind, Worker};

/// Bytes of the first window of a stream; the next ones double.
const WINDOW_MIN: u64 = 64 << 10;
/// Bytes of the largest window.
const WINDOW_MAX: u64 = 16 << 20;
/// Growth of the file in bytes: a sixteenth of it, within these.
const GROWTH_MIN: u64 = 1 << 20;
const GROWTH_MAX: u64 = 64 << 20;
/// Clusters whose refcounts are looked at, at most, before the file grows instead.
const SCAN_SLICES: u64 = 16;

impl Qcow2 {
    fn window_min(&self) -> u64 {
        (WINDOW_MIN.min(sabotage::window_limit()) >> self.geometry.cluster_bits).max(1)
    }
    fn window_max(&self) -> u64 {
        (WINDOW_MAX.min(sabotage::window_limit()) >> self.geometry.cluster_bits).max(1)
    }

    /// Host clusters for guest data from `guest_cluster` on, as many of `count` as follow each other. `None`: call
    /// [`Qcow2::refill_data`] and come again.
    pub(crate) fn try_allocate_data(&self, guest_cluster: u64, count: u64) -> Option<Allocated> {
        if self.gatherer.is_used() {
            // Beside streams, which come from all over the disk, plain clusters share their window: a window of
            // their own for each place would leave an image full of gaps.
            return self.try_allocate_compressed(count);
        }
        let allocated = self.space().windows.take_data(guest_cluster, count)?;
        self.clusters_allocated.fetch_add(allocated.range.end - allocated.range.start, Relaxed);
        Some(allocated)
    }

    /// Sets up a window for guest data from `guest_cluster` on. No lock is held and no grace guard.
    pub(crate) async fn refill_data(
        self: &Arc<Self>,
        worker: &Worker,
        guest_cluster: u64,
        count: u64,
    ) -> Result<()> {
        if self.gatherer.is_used() {
            return self.make_room(worker).await;
        }
        let stream = Stream::Data { next_guest_cluster: guest_cluster };
        self.refill(worker, stream, count).await
    }

    /// Host clusters for streams, as many of `count` as follow each other. `None`: call
    /// [`Qcow2::refill_compressed`] and come again.
    pub(crate) fn try_allocate_compressed(&self, count: u64) -> Option<Allocated> {
        let allocated = self.space().windows.take_compressed(count)?;
        self.clusters_allocated.fetch_add(allocated.range.end - allocated.range.start, Relaxed);
        Some(allocated)
    }

    /// Sets up a window for streams. No lock is held and no grace guard.
    pub(crate) async fn refill_compressed(self: &Arc<Self>, worker: &Worker, count: u64) -> Result<()> {
        self.refill(worker, Stream::Compressed, count).await
    }

    /// `count` clusters that follow each other, for a table.
    pub(crate) async fn allocate_metadata(
        self: &Arc<Self>,
        worker: &Worker,
        count: u64,
    ) -> Result<Allocated> {
        if count > self.window_min() && count > 1 {
            return self.claim_large(worker, count).await;
        }
        loop {
            if let Some(allocated) = self.space().windows.take_metadata(count) {
                return Ok(allocated);
            }
            self.refill(worker, Stream::Metadata, count).await?;
        }
    }

    async fn refill(self: &Arc<Self>, worker: &Worker, stream: Stream, count: u64) -> Result<()> {
        match self.refill_once(worker, stream, count).await {
            Err(error) if error.kind() == ErrorKind::NoSpace => {
                // Space may wait in quarantine, or in the windows of other streams.
                if self.freed().is_empty() && self.releases.load(Relaxed) == 0 {
                    return self.refill_from_windows(worker, stream, count, error).await;
                }
                self.commit(worker).await?;
                self.releases_done().await;
                match self.refill_once(worker, stream, count).await {
                    Err(error) if error.kind() == ErrorKind::NoSpace => {
                        self.refill_from_windows(worker, stream, count, error).await
                    }
                    other => other,
                }
            }
            other => other,
        }
    }

    /// The last resort: what other windows have left.
    async fn refill_from_windows(&self, _: &Worker, stream: Stream, count: u64, error: Error) -> Result<()> {
        let _turn = self.space_gate.enter().await;
        let mut space = self.space();
        let min = if stream == Stream::Metadata { count } else { 1 };
        let Some(found) = space.windows.take_any(count) else { return Err(error) };
        if found.range.end - found.range.start < min {
            drop(space);
            self.push_freed(found.range, AfterFree::Untouched(found.content));
            return Err(error);
        }
        let leftover = space.windows.install(stream, found, 1);
        drop(space);
        if let Some(leftover) = leftover {
            self.push_freed(leftover.range, AfterFree::Untouched(leftover.content));
        }
        Ok(())
    }

    async fn refill_once(self: &Arc<Self>, worker: &Worker, stream: Stream, count: u64) -> Result<()> {
        let _turn = self.space_gate.enter().await;
        let min = match stream {
            Stream::Metadata => count,
            Stream::Data { .. } | Stream::Compressed => 1,
        };
        let want = {
            let space = self.space();
            let next = match stream {
                Stream::Data { next_guest_cluster } => {
                    space.windows.next_data_size(next_guest_cluster, self.window_min())
                }
                Stream::Metadata | Stream::Compressed => space.windows.next_size(stream, self.window_min()),
            };
            next.max(count.min(self.window_max())).max(min)
        };
        let allocated = self.claim(worker, want, min).await?;
        if stream == Stream::Metadata && allocated.content == Content::Fresh {
            // Reserved now, so that a commit does not run out of space after requests were acknowledged.
            let bits = self.geometry.cluster_bits;
            let (start, end) = (allocated.range.start << bits, allocated.range.end << bits);
            if let Err(e) = worker.allocate(&self.file, start, end - start).await
                && e.kind != IoErrorKind::Unsupported
            {
                self.push_freed(allocated.range, AfterFree::Untouched(allocated.content));
                return Err(Error::from(e).on(&self.path));
            }
        }
        let leftover = self.space().windows.install(stream, allocated, self.window_max());
        if let Some(leftover) = leftover {
            self.push_freed(leftover.range, AfterFree::Untouched(leftover.content));
        }
        Ok(())
    }

    /// Takes `min` to `want` free clusters that follow each other and raises their refcounts. The space gate is held.
    async fn claim(self: &Arc<Self>, worker: &Worker, want: u64, min: u64) -> Result<Allocated> {
        self.space().free.unpark();
        loop {
            // One more cluster than wanted, in case that a refcount block has to come first.
            let Some(mut found) = self.find_free(worker, want + 1, min).await? else { continue };
            // Metadata whose refcount is 0 is no free space. Were it only kept from writes, a window that is given back
            // would release it, and the overlap check would forget it.
            self.check_free(&found.range)?;
            let per_block = self.geometry.refcount_entries_per_block();
            let index = found.range.start / per_block;
            let table = self.refcounts.table();
            if index >= table.table.len() as u64 {
                self.give_back(&found);
                self.grow_reftable(worker, index).await?;
                continue;
            }
            let needs_block = table.table.get(index) == 0;
            let in_block = found.range.end.min((index + 1) * per_block);
            if in_block < found.range.end {
                self.space().free.insert(in_block..found.range.end, found.content);
                found.range.end = in_block;
            }
            if found.range.end - found.range.start < min + u64::from(needs_block) {
                // Too short for what was asked for (before the border of two refcount blocks): others may use it.
                self.park(found.range, found.content);
                continue;
            }
            if needs_block {
                let first = found.range.start;
                self.add_refblock(worker, index, first, found.content).await?;
                found.range.start += 1;
            }
            let surplus = found.range.start + want..found.range.end;
            if !surplus.is_empty() {
                self.space().free.insert(surplus.clone(), found.content);
                found.range.end = surplus.start;
            }
            if sabotage::is(Fault::SkipRaise) {
                return Ok(found);
            }
            if let Err(error) = self.raise(worker, found.range.clone()).await {
                self.give_back(&found);
                return Err(error);
            }
            return Ok(found);
        }
    }

    fn give_back(&self, unused: &Allocated) {
        self.space().free.insert(unused.range.clone(), unused.content);
    }

    /// Leaves a short run out of the rest of this search.
    fn park(&self, run: Range<u64>, content: Content) {
        self.space().free.insert_parked(run, content);
    }

    /// Free clusters: known ones first, then what a bounded scan of the refcounts finds, then growth. `None`: look
    /// again (something was found out meanwhile).
    async fn find_free(&self, worker: &Worker, want: u64, min: u64) -> Result<Option<Allocated>> {
        let usable = min.max(want / 8);
        if let Some((range, content)) = self.space().free.take(want, usable) {
            return Ok(Some(Allocated { range, content }));
        }
        if self.scan(worker).await? {
            return Ok(None);
        }
        match self.grow(worker, want).await {
            Ok(()) => Ok(None),
            Err(error) if error.kind() == ErrorKind::NoSpace => {
                let taken = self.space().free.take(want, min);
                if let Some((range, content)) = taken {
                    return Ok(Some(Allocated { range, content }));
                }
                if self.scan_rest(worker).await? {
                    return Ok(None);
                }
                // The file may grow by less than a window.
                if want > min + 1 && self.grow(worker, min + 1).await.is_ok() {
                    let taken = self.space().free.take(min + 1, min);
                    return Ok(taken.map(|(range, content)| Allocated { range, content }));
                }
                Err(error)
            }
            Err(error) => Err(error),
        }
    }

    /// Looks at the refcounts of some more clusters that existed at open. True: free ones were found.
    async fn scan(&self, worker: &Worker) -> Result<bool> {
        let (from, to) = {
            let space = self.space();
            (space.scanned, space.clusters_at_open)
        };
        if from >= to {
            return Ok(false);
        }
        let to = to.min(from + SCAN_SLICES * self.refcounts_per_slice());
        let runs = self.zero_refcount_runs(worker, from..to).await?;
        let mut space = self.space();
        space.scanned = to;
        let found = !runs.is_empty();
        for run in runs {
            // What was freed since the open is known already.
            space.free.insert_missing(run, Content::Recycled);
        }
        Ok(found)
    }

    async fn scan_rest(&self, worker: &Worker) -> Result<bool> {
        loop {
            if self.scan(worker).await? {
                return Ok(true);
            }
            let space = self.space();
            if space.scanned >= space.clusters_at_open {
                return Ok(false);
            }
        }
    }

    /// Grows the file by at least `clusters`; the new space is free and fresh.
    async fn grow(&self, worker: &Worker, clusters: u64) -> Result<()> {
        let bits = self.geometry.cluster_bits;
        // The file may have come to be longer than what is known of it; it never gets shorter here.
        let old = self.space().file_clusters.max(self.file.len().div_ceil(self.geometry.cluster_size()));
        let no_space = |what: &str| Error::new(ErrorKind::NoSpace, what.to_owned()).on(&self.path);
        if self.file.kind() == FileKind::BlockDevice {
            return Err(no_space("the block device is full; extend it, or discard data of the guest"));
        }
        let extra = ((old << bits) / 16).clamp(GROWTH_MIN, GROWTH_MAX) >> bits;
        let max = limits::HOST_OFFSET_END >> bits;
        let mut new = (old + clusters.max(extra)).min(max);
        if new < old + clusters {
            return Err(no_space("the image file has reached the largest size of the format"));
        }
        loop {
            match worker.set_len(&self.file, new << bits).await {
                Ok(()) => break,
                // A limit on the file's size: the growth ahead of use is not worth failing for.
                Err(_) if new > old + clusters => new = old + clusters,
                Err(e) => return Err(Error::from(e).on(&self.path)),
            }
        }
        // A crash, or a writer that leaves references past the end, may have left counts there.
        let runs = self.zero_refcount_runs(worker, old..new).await?;
        let mut space = self.space();
        space.file_clusters = new;
        for run in runs {
            space.free.insert(run, Content::Fresh);
        }
        Ok(())
    }

    /// Sees to it that the file reaches to the end of `len` host bytes at `host`, where an entry says that data of
    /// `guest` is. (A copy of a file may have been cut short.) Where nothing is allocated, it is refused: the space
    /// would be given to somebody else as well.
    pub(crate) async fn reach(&self, worker: &Worker, host: u64, len: u64, guest: u64) -> Result<()> {
        if host + len <= self.file.len()
            || self.data_file.is_some()
            || self.file.kind() == FileKind::BlockDevice
        {
            return Ok(());
        }
        let bits = self.geometry.cluster_bits;
        let clusters = host >> bits..(host + len).div_ceil(self.geometry.cluster_size());
        let _turn = self.space_gate.enter().await;
        if let Some(free) = self.zero_refcount_runs(worker, clusters.clone()).await?.first() {
            let message =
                "the mapping points past the end of the file, to a cluster with refcount 0; run zebu check";
            let error = Error::new(ErrorKind::Corrupt, message).on(&self.path);
            return Err(error.at_guest(guest).at_host((free.start << bits).max(host)));
        }
        if self.file.len() < clusters.end << bits {
            worker
                .set_len(&self.file, clusters.end << bits)
                .await
                .map_err(|e| Error::from(e).on(&self.path))?;
        }
        let mut space = self.space();
        space.file_clusters = space.file_clusters.max(clusters.end);
        Ok(())
    }

    /// Moves the refcount table to a larger place, so that it has an entry `index`. The space gate is held.
    async fn grow_reftable(self: &Arc<Self>, worker: &Worker, index: u64) -> Result<()> {
        let bits = self.geometry.cluster_bits;
        let per_cluster = self.geometry.reftable_entries_per_cluster();
        let old = self.refcounts.table();
        let old_entries = old.table.len() as u64;
        let max_clusters = limits::MAX_REFTABLE_SIZE >> bits;
        // Room for what the table and its own refcount blocks add at the end of the file.
        let wanted = (index + 1).max(old_entries + old_entries / 2);
        let mut clusters = wanted.div_ceil(per_cluster);
        loop {
            let last = self.space().file_clusters + clusters + self.blocks_for(clusters);
            let needed = (last / self.geometry.refcount_entries_per_block() + 1).div_ceil(per_cluster);
            if needed <= clusters {
                break;
            }
            clusters = needed;
        }
        if clusters > max_clusters {
            return Err(Error::new(
                ErrorKind::NoSpace,
                "the refcount table has reached the largest size of the format; use larger clusters",
            )
            .on(&self.path));
        }
        let table = old.table.resized((clusters * per_cluster) as usize);
        let moved = Arc::new(RefTable { table, offset: AtomicU64::new(0), moved: AtomicBool::new(true) });
        *self.refcounts.table.write().unwrap_or_else(PoisonError::into_inner) = moved.clone();
        match self.place_at_end(worker, clusters).await {
            Ok(start) => {
                moved.offset.store(start << bits, Relaxed);
                self.note_metadata(start << bits, clusters << bits, Metadata::RefcountTable);
            }
            Err(error) => {
                *self.refcounts.table.write().unwrap_or_else(PoisonError::into_inner) = old;
                return Err(error);
            }
        }
        let old_first = old.offset.load(Relaxed) >> bits;
        let old_clusters = old_entries.div_ceil(per_cluster);
        self.metadata.remove(old_first..old_first + old_clusters);
        self.push_freed(old_first..old_first + old_clusters, AfterFree::Reuse);
        Ok(())
    }

    /// Refcount blocks that `clusters` more clusters at the end of the file may need, at most.
    fn blocks_for(&self, clusters: u64) -> u64 {
        clusters / (self.geometry.refcount_entries_per_block() - 1) + 2
    }

    /// Claims clusters that follow each other at the end of the file, after the refcount blocks that count them; for
    /// tables that are longer than a window. The space gate is held.
    async fn place_at_end(&self, worker: &Worker, clusters: u64) -> Result<u64> {
        let per_block = self.geometry.refcount_entries_per_block();
        let start = self.space().file_clusters;
        let all = start..start + self.blocks_for(clusters) + clusters;
        self.grow(worker, all.end - all.start).await?;
        if self.zero_refcount_runs(worker, all.clone()).await?.as_slice() != std::slice::from_ref(&all) {
            return Err(Error::new(
                ErrorKind::Corrupt,
                "refcounts past the end of the file are not 0; run zebu check -r all",
            )
            .on(&self.path));
        }
        self.space().free.remove(all.clone());
        let table = self.refcounts.table();
        // A block may lie in front of what it counts; whatever order they have, all of them count zeroes at first.
        let (missing, existing): (Vec<u64>, Vec<u64>) = (all.start / per_block..=(all.end - 1) / per_block)
            .partition(|index| table.table.get(*index) == 0);
        let table_start = start + missing.len() as u64;
        let used = start..table_start + clusters;
        let counted_by =
            |index: u64| (index * per_block).max(used.start)..((index + 1) * per_block).min(used.end);
        // What can fail comes first: new blocks need no reading, and a failure now leaks space and nothing else.
        for index in existing {
            self.raise(worker, counted_by(index)).await?;
        }
        for (host, index) in (start..).zip(&missing) {
            let host = host << self.geometry.cluster_bits;
            self.refcounts.new_blocks().insert(*index, NewBlock { host, content: Content::Fresh });
            table.table.set(*index, host);
            self.note_metadata(host, 1, Metadata::RefcountBlock);
        }
        for index in missing {
            self.raise(worker, counted_by(index)).await?;
        }
        self.space().free.insert(used.end..all.end, Content::Fresh);
        Ok(table_start)
    }

    /// Clusters that follow each other for a table of any length; what they hold is unspecified but zero if fresh.
    async fn claim_large(self: &Arc<Self>, worker: &Worker, count: u64) -> Result<Allocated> {
        let _turn = self.space_gate.enter().await;
        loop {
            let end = self.space().file_clusters + count + self.blocks_for(count);
            let last_index = end / self.geometry.refcount_entries_per_block();
            if last_index < self.refcounts.table().table.len() as u64 {
                break;
            }
            self.grow_reftable(worker, last_index).await?;
        }
        let start = self.place_at_end(worker, count).await?;
        Ok(Allocated { range: start..start + count, content: Content::Fresh })
    }

    /// What the windows have left goes back (before the image is closed, or grows by other means).
    pub(crate) fn drain_windows(&self) {
        let left = self.space().windows.drain();
        for Allocated { range, content } in left {
            self.push_freed(range, AfterFree::Untouched(content));
        }
    }
}
