//! Handing out host clusters: windows refilled from free space, growth of the file ahead of use.
//!
//! A window's refcounts are raised once, for the whole window, and become durable with the first phase of the commit
//! that links any of its clusters. Growth happens before use, so no write and no fallocate ever reaches past the end
//! of the file.

use crate::qcow2::metadata_map::Metadata;
use crate::qcow2::refcounts::{NewBlock, RefTable};
use crate::qcow2::space::{Allocated, Content, Space, Stream};
use crate::qcow2::state::{AfterFree, Qcow2};
use crate::{Error, ErrorKind, Result};
use std::ops::Range;
use std::sync::atomic::{
    AtomicBool, AtomicU64,
    Ordering::{Acquire, Relaxed},
};
use std::sync::{Arc, PoisonError};
use zebu_qcow2::limits;
use zebu_storage::sabotage::{self, Fault};
use zebu_storage::{FileKind, FsKind, IoErrorKind, Worker};

/// Bytes of the first window of a stream; the next ones double.
const WINDOW_MIN: u64 = 64 << 10;
/// Bytes of the largest window.
const WINDOW_MAX: u64 = 16 << 20;
/// Growth of the file in bytes: a sixteenth of it, within these.
const GROWTH_MIN: u64 = 1 << 20;
const GROWTH_MAX: u64 = 64 << 20;
/// Clusters whose refcounts are looked at, at most, before the file grows instead.
const SCAN_SLICES: u64 = 16;

/// What a window is wanted for.
#[derive(Debug, Clone, Copy)]
enum Purpose {
    /// Guest data from this guest cluster on.
    Data { guest_cluster: u64 },
    /// Tables that need all of their clusters in a row.
    Metadata,
    /// Streams of compressed clusters.
    Compressed,
}

impl Purpose {
    /// The stream that it is now, and how many of `count` clusters it needs in a row.
    fn needs(self, space: &Space, count: u64) -> (Stream, u64) {
        match self {
            Purpose::Data { guest_cluster } => (space.windows.stream_of(guest_cluster), 1),
            Purpose::Metadata => (Stream::Metadata, count),
            Purpose::Compressed => (Stream::Compressed, 1),
        }
    }
}

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
        self.refill(worker, Purpose::Data { guest_cluster }, count).await
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
        self.refill(worker, Purpose::Compressed, count).await
    }

    /// `count` clusters that follow each other, for a table.
    pub(crate) async fn allocate_metadata(
        self: &Arc<Self>,
        worker: &Worker,
        count: u64,
    ) -> Result<Allocated> {
        // A window lies within what one refcount block counts, which may have to come first.
        let is_large = count > self.window_min() || count >= self.geometry.refcount_entries_per_block();
        if is_large && count > 1 {
            return self.claim_large(worker, count).await;
        }
        loop {
            if let Some(allocated) = self.space().windows.take_metadata(count) {
                return Ok(allocated);
            }
            self.refill(worker, Purpose::Metadata, count).await?;
        }
    }

    /// Gives out-of-space only when nothing is free, nothing is on its way back, and no window has anything left.
    async fn refill(self: &Arc<Self>, worker: &Worker, purpose: Purpose, count: u64) -> Result<()> {
        loop {
            // Read first: what comes back while we look elsewhere is a reason to look again.
            let released = self.clusters_released.load(Acquire);
            let error = match self.refill_once(worker, purpose, count).await {
                Err(error) if error.kind() == ErrorKind::NoSpace => error,
                other => return other,
            };
            if self.space_is_awaited() {
                self.commit(worker).await?;
                self.some_are_released(released).await;
            }
            if self.clusters_released.load(Acquire) != released {
                continue;
            }
            if self.refill_from_windows(purpose, count).await {
                return Ok(());
            }
            // Another may have taken it from the windows, and given back what it did not need.
            if self.clusters_released.load(Acquire) == released && !self.space_is_awaited() {
                return Err(error);
            }
        }
    }

    /// Whether clusters are on their way back: they wait for a commit, or for the end of one and what follows it.
    fn space_is_awaited(&self) -> bool {
        let freed = self.freed();
        !freed.is_empty() || self.releases.load(Acquire) != 0
    }

    /// The last resort: what other windows have left. False: nothing that would do.
    async fn refill_from_windows(&self, purpose: Purpose, count: u64) -> bool {
        let _turn = self.space_gate.enter().await;
        let mut space = self.space();
        let (stream, min) = purpose.needs(&space, count);
        let Some(found) = space.windows.take_any(count, min) else { return false };
        let leftover = space.windows.install(stream, found, 1);
        drop(space);
        if let Some(leftover) = leftover {
            self.push_freed(leftover.range, AfterFree::unused(leftover.content));
        }
        true
    }

    async fn refill_once(self: &Arc<Self>, worker: &Worker, purpose: Purpose, count: u64) -> Result<()> {
        let window_of = |space: &Space| space.windows.first_of(purpose.needs(space, count).0);
        let before = window_of(&self.space());
        let _turn = self.space_gate.enter().await;
        let (stream, min, want) = {
            let space = self.space();
            let (stream, min) = purpose.needs(&space, count);
            if matches!(purpose, Purpose::Data { .. })
                && (space.windows.has(stream) || window_of(&space) != before)
            {
                // Others of the stream waited for the gate, too, and the first of them did it.
                return Ok(());
            }
            let next = space.windows.next_size(stream, self.window_min());
            (stream, min, next.max(count.min(self.window_max())).max(min))
        };
        let window = self.claim(worker, want, min).await?;
        let window = match self.set_window_aside(worker, stream, window).await {
            // There may be room for a smaller one.
            Err(error) if error.kind() == ErrorKind::NoSpace && want > min => {
                let smaller = self.claim(worker, min, min).await?;
                self.set_window_aside(worker, stream, smaller).await?
            }
            other => other?,
        };
        let leftover = self.space().windows.install(stream, window, self.window_max());
        if let Some(leftover) = leftover {
            self.push_freed(leftover.range, AfterFree::unused(leftover.content));
        }
        Ok(())
    }

    /// Has the file system set room aside for a window, if that is of use. A window for tables that finds none is given
    /// back. The space gate is held.
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
        let is_fresh = window.content == Content::Fresh;
        let is_needed = stream == Stream::Metadata;
        let is_useful = matches!(stream, Stream::Data { .. })
            && is_fresh
            && self.file.fs() == FsKind::Ext4
            && self.is_roomy.load(Relaxed);
        let is_wanted = is_needed || is_useful && self.is_filled(worker, stream).await;
        if !is_wanted {
            return Ok(window);
        }
        let bits = self.geometry.cluster_bits;
        let (start, len) = (window.range.start << bits, (window.range.end - window.range.start) << bits);
        let Err(error) = worker.allocate(&self.file, start, len).await else {
            self.is_roomy.store(true, Relaxed);
            return Ok(if is_fresh { Allocated { content: Content::Reserved, ..window } } else { window });
        };
        if error.kind == IoErrorKind::Unsupported {
            return Ok(window);
        }
        let error = Error::from(error).on(&self.path);
        if error.kind() == ErrorKind::NoSpace && is_fresh {
            // A part of it may have been set aside. Whoever wants a single cluster needs it more.
            let _ = worker.punch_hole(&self.file, start, len).await;
            self.is_roomy.store(false, Relaxed);
        }
        if error.kind() == ErrorKind::NoSpace && !is_needed {
            return Ok(window);
        }
        // Nobody saw the window: what counts it was in no commit yet.
        let runs = self.lower(worker, window.range).await?;
        let mut space = self.space();
        for run in runs {
            space.free.insert_missing(run, window.content);
        }
        Err(error)
    }

    /// Whether the guest fills the clusters of a stream, as the first one of its window shows. (The end of that one may
    /// still be in flight.) Room set aside for small writes at large steps would be wasted.
    async fn is_filled(&self, worker: &Worker, stream: Stream) -> bool {
        let first = self.space().windows.first_of(stream);
        let Some((first, _)) = first.filter(|(_, content)| content.is_fresh()) else { return false };
        let start = first << self.geometry.cluster_bits;
        let extent = worker.extent_at(&self.file, start).await;
        extent.is_ok_and(|extent| !extent.hole && extent.len >= self.geometry.cluster_size() / 2)
    }

    /// Takes `min` to `want` free clusters that follow each other and raises their refcounts. The space gate is held.
    async fn claim(self: &Arc<Self>, worker: &Worker, want: u64, min: u64) -> Result<Allocated> {
        self.space().free.unpark();
        let mut uncounted = None;
        loop {
            // One more cluster than wanted, in case that a refcount block has to come first.
            let found = self.find_free(worker, want + 1, min, uncounted.as_ref()).await?;
            let Some(mut found) = found else { continue };
            // Metadata whose refcount is 0 is no free space. Were it only kept from writes, a window that is given back
            // would release it, and the overlap check would forget it.
            self.check_free(&found.range)?;
            let per_block = self.geometry.refcount_entries_per_block();
            let index = found.range.start / per_block;
            let table = self.refcounts.table();
            if index >= table.table.len() as u64 {
                self.give_back(&found);
                match self.grow_reftable(worker, index).await {
                    // Nothing can count those; there may be others, but not where the file grows.
                    Err(error) if error.kind() == ErrorKind::NoSpace => {
                        self.space().free.park_from(self.refcounts.table().table.len() as u64 * per_block);
                        uncounted = Some(error);
                    }
                    grown => grown?,
                }
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

    /// Free clusters: known ones first, then what a bounded scan of the refcounts finds, then growth, unless nothing
    /// can count what is at the end of the file, as `uncounted` says. `None`: look again (something was found out
    /// meanwhile).
    async fn find_free(
        &self,
        worker: &Worker,
        want: u64,
        min: u64,
        uncounted: Option<&Error>,
    ) -> Result<Option<Allocated>> {
        let usable = min.max(want / 8);
        if let Some((range, content)) = self.space().free.take(want, usable) {
            return Ok(Some(Allocated { range, content }));
        }
        if self.scan(worker).await? {
            return Ok(None);
        }
        let grown = match uncounted {
            Some(error) => Err(error.clone()),
            None => self.grow(worker, want).await,
        };
        match grown {
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
                if uncounted.is_none() && want > min + 1 && self.grow(worker, min + 1).await.is_ok() {
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
            if space.free.is_full() {
                return Ok(false);
            }
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
            if self.can_scan_no_further() {
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
        let max_clusters = limits::MAX_REFTABLE_SIZE.min(sabotage::refcount_table_limit()) >> bits;
        // Room for what the table and its own refcount blocks add at the end of the file.
        let ahead = (old_entries + old_entries / 2).min(max_clusters * per_cluster);
        let wanted = (index + 1).max(ahead);
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
        match self.place_long(worker, clusters).await {
            Ok(Allocated { range: Range { start, .. }, .. }) => {
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

    /// Claims clusters that follow each other, after the refcount blocks that count them, for tables that are longer than
    /// a window: at the end of the file, or wherever there is room on a block device. The space gate is held.
    async fn place_long(&self, worker: &Worker, clusters: u64) -> Result<Allocated> {
        let per_block = self.geometry.refcount_entries_per_block();
        let wanted = self.blocks_for(clusters) + clusters;
        let Allocated { range: all, content } = if self.file.kind() == FileKind::BlockDevice {
            self.find_on_device(worker, wanted).await?
        } else {
            let start = self.space().file_clusters;
            self.grow(worker, wanted).await?;
            Allocated { range: start..start + wanted, content: Content::Fresh }
        };
        let start = all.start;
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
            self.refcounts.new_blocks().insert(*index, NewBlock { host, content });
            table.table.set(*index, host);
            self.note_metadata(host, 1, Metadata::RefcountBlock);
        }
        for index in missing {
            self.raise(worker, counted_by(index)).await?;
        }
        self.space().free.insert(used.end..all.end, content);
        Ok(Allocated { range: table_start..used.end, content })
    }

    /// `clusters` free ones that follow each other, of all that a device has. They stay free.
    async fn find_on_device(&self, worker: &Worker, clusters: u64) -> Result<Allocated> {
        loop {
            self.space().free.unpark();
            let found = self.space().free.take(clusters, clusters);
            if let Some((range, content)) = found {
                self.check_free(&range)?;
                let found = Allocated { range, content };
                self.give_back(&found);
                return Ok(found);
            }
            if !self.scan(worker).await? && self.can_scan_no_further() {
                let message = format!(
                    "the block device has no {clusters} free clusters in a row, which a table needs; extend it, or \
                     discard data of the guest"
                );
                return Err(Error::new(ErrorKind::NoSpace, message).on(&self.path));
            }
        }
    }

    fn can_scan_no_further(&self) -> bool {
        let space = self.space();
        space.scanned >= space.clusters_at_open || space.free.is_full()
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
        self.place_long(worker, count).await
    }

    /// What the windows have left goes back (before the image is closed, or grows by other means).
    pub(crate) fn drain_windows(&self) {
        let left = self.space().windows.drain();
        for Allocated { range, content } in left {
            self.push_freed(range, AfterFree::unused(content));
        }
    }
}
