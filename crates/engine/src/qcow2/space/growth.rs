//! Growth of the image file and of the refcount table, ahead of use.

use crate::Remedy;
use crate::image_worker::MustEnd;
use crate::qcow2::space::HostSpace;
use crate::qcow2::space::free::{Allocated, SpaceContent};
use crate::qcow2::space::metadata_map::Metadata;
use crate::qcow2::space::quarantine::FreeMode;
use crate::qcow2::space::refcounts::{NewBlock, RefTable};
use crate::qcow2::space::search::Otherwise;
use crate::qcow2::turns::Turns;
use crate::{Error, ErrorKind, Result};
use std::ops::Range;
use std::sync::Arc;
use zebu_qcow2::limits;
use zebu_storage::sabotage::{self, Fault, Limit};
use zebu_storage::{FileKind, Worker};

/// Growth of the file in bytes: a sixteenth of it, within these.
const GROWTH_MIN: u64 = 1 << 20;
const GROWTH_MAX: u64 = 64 << 20;
/// Slices of counts past the end of the file of which some may not be 0: a crash leaves less.
const COUNTED_SLICES: u64 = 4096;

impl HostSpace {
    /// The first cluster behind the file. It may have come to be longer than what is known of it; it never gets shorter here.
    fn end_of_file(&self) -> u64 {
        self.file_clusters().max(self.files.file().len().div_ceil(self.geometry.cluster_size()))
    }

    /// Grows the file by at least `clusters` that follow each other and takes these; what it grows by is fresh.
    pub(super) async fn grow(&self, worker: &Worker, clusters: u64) -> Result<Allocated> {
        let bits = self.geometry.cluster_bits;
        let no_space = |what: &str| Error::new(ErrorKind::NoSpace, what.to_owned()).on(self.files.path());
        if self.files.file().kind() == FileKind::BlockDevice {
            return Err(no_space("the block device is full; extend it, or discard data of the guest"));
        }
        let old = self.end_of_file();
        let start = self.room_behind(worker, clusters).await?;
        let extra = ((old << bits) / 16).clamp(GROWTH_MIN, GROWTH_MAX) >> bits;
        let (least, max) = (start + clusters, limits::HOST_OFFSET_END >> bits);
        let mut new = least.max(old + extra).min(max);
        if new < least {
            return Err(no_space("the image file has reached the largest size of the format"));
        }
        if let Err(error) = worker.set_len(self.files.file(), new << bits).await {
            // A limit on the file's size: the growth ahead of use is not worth failing for.
            let retried =
                if new > least { worker.set_len(self.files.file(), least << bits).await } else { Err(error) };
            retried.map_err(|e| Error::from(e).on(self.files.path()))?;
            new = least;
        }
        let runs = self.zero_refcount_runs(worker, old..new).await?;
        let mut pool = self.pool();
        pool.file_clusters = new;
        for run in runs {
            pool.free.insert(run, SpaceContent::Fresh);
        }
        // What was free before it is used first. (What could be forgotten at once is free all the same.)
        let taken = pool.free.take_at(start, clusters);
        let (range, content) = taken.unwrap_or((start..least, SpaceContent::Fresh));
        Ok(Allocated { range, content })
    }

    /// Finds the first `clusters` behind the file of which none is counted. A crash, or a writer that leaves references past
    /// the end, may have left counts there.
    ///
    /// # Errors
    /// More is counted than they leave.
    async fn room_behind(&self, worker: &Worker, clusters: u64) -> Result<u64> {
        let mut at = self.end_of_file();
        if sabotage::is(Fault::GrowIntoCounted) {
            return Ok(at);
        }
        let farthest = at + COUNTED_SLICES * self.refcounts_per_slice();
        while at <= farthest {
            let wanted = at..at + clusters;
            let runs = self.zero_refcount_runs(worker, wanted.clone()).await?;
            at = match runs.last() {
                Some(run) if *run == wanted => return Ok(at),
                Some(run) if run.end == wanted.end => run.start,
                _ => wanted.end,
            };
        }
        let message = "refcounts far past the end of the file are not 0; repair the image";
        Err(Error::new(ErrorKind::Corrupt, message).on(self.files.path()).with_remedy(Remedy::Repair))
    }

    /// The first cluster behind a table of `clusters` and the refcount blocks that it may need, wherever it gets its place.
    async fn end_of_place(&self, worker: &Worker, clusters: u64) -> Result<u64> {
        let wanted = clusters + self.blocks_for(clusters);
        let start = match self.files.file().kind() {
            FileKind::BlockDevice => self.file_clusters(),
            _ => self.room_behind(worker, wanted).await?,
        };
        Ok(start + wanted)
    }

    /// Makes the file reach to the end of `len` host bytes at `host`, where data of `guest` is, if they are in use.
    pub(crate) async fn extend_to(&self, worker: &Worker, host: u64, len: u64, guest: u64) -> Result<()> {
        let bits = self.geometry.cluster_bits;
        let clusters = host >> bits..(host + len).div_ceil(self.geometry.cluster_size());
        let _turn = self.space_mutex.lock().await;
        if let Some(free) = self.zero_refcount_runs(worker, clusters.clone()).await?.first() {
            let message =
                "the mapping points past the end of the file, to a cluster with refcount 0; run zebu check";
            let error = Error::new(ErrorKind::Corrupt, message).on(self.files.path());
            return Err(error.at_guest(guest).at_host((free.start << bits).max(host)));
        }
        if self.files.file().len() < clusters.end << bits {
            worker
                .set_len(self.files.file(), clusters.end << bits)
                .await
                .map_err(|e| Error::from(e).on(self.files.path()))?;
        }
        let mut pool = self.pool();
        pool.file_clusters = pool.file_clusters.max(clusters.end);
        Ok(())
    }

    /// Moves the refcount table to a larger place, so that it has an entry `index`. `space_mutex` is held.
    pub(super) async fn grow_reftable(&self, worker: &Worker, index: u64) -> Result<()> {
        let bits = self.geometry.cluster_bits;
        let per_cluster = self.geometry.reftable_entries_per_cluster();
        let old = self.refcounts.table();
        let old_entries = old.entries().len() as u64;
        let max_clusters = sabotage::at_most(Limit::RefcountTableBytes, limits::MAX_REFTABLE_SIZE) >> bits;
        // Room for what the table and its own refcount blocks add at the end of the file.
        let ahead = (old_entries + old_entries / 2).min(max_clusters * per_cluster);
        let wanted = (index + 1).max(ahead);
        let mut clusters = wanted.div_ceil(per_cluster);
        let mut turns = Turns::at_most(64, "the growth of the refcount table");
        loop {
            turns.take()?;
            let last = self.end_of_place(worker, clusters).await?;
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
            .on(self.files.path()));
        }
        let table = old.entries().resized((clusters * per_cluster) as usize);
        let moved = Arc::new(RefTable::unplaced(table));
        // If this vanishes, a commit that waits for `space_mutex` must not find a table without a place.
        let unended = (!sabotage::is(Fault::PoisonAfterTurn)).then(|| MustEnd::or_poison(&self.files));
        self.refcounts.set_table(moved.clone());
        let placed = self.place_long(worker, clusters).await;
        if let Some(unended) = unended {
            unended.end();
        }
        match placed {
            Ok(Allocated { range: Range { start, .. }, .. }) => {
                moved.place(start << bits);
                self.note_metadata(start << bits, clusters << bits, Metadata::RefcountTable);
            }
            Err(error) => {
                self.refcounts.set_table(old);
                return Err(error);
            }
        }
        let old_first = old.offset() >> bits;
        let old_clusters = old_entries.div_ceil(per_cluster);
        self.metadata.remove(old_first..old_first + old_clusters);
        self.quarantine.push_unread(old_first..old_first + old_clusters, FreeMode::Reuse);
        Ok(())
    }

    /// Refcount blocks that `clusters` more clusters at the end of the file may need, at most.
    fn blocks_for(&self, clusters: u64) -> u64 {
        clusters / (self.geometry.refcount_entries_per_block() - 1) + 2
    }

    /// Claims clusters that follow each other, after the refcount blocks that count them, for tables that are longer than
    /// a window. `space_mutex` is held.
    async fn place_long(&self, worker: &Worker, clusters: u64) -> Result<Allocated> {
        let per_block = self.geometry.refcount_entries_per_block();
        let wanted = self.blocks_for(clusters) + clusters;
        let found = self.find_long(worker, wanted).await?;
        if let Err(error) = self.set_tables_aside(worker, found.range.clone()).await {
            self.give_back(&found);
            return Err(error);
        }
        let Allocated { range: all, content } = found;
        let start = all.start;
        let table = self.refcounts.table();
        // A block may lie in front of what it counts; whatever order they have, all of them count zeroes at first.
        let (missing, existing): (Vec<u64>, Vec<u64>) = (all.start / per_block..=(all.end - 1) / per_block)
            .partition(|index| table.entries().get(*index) == 0);
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
            table.entries().set(*index, host);
            self.note_metadata(host, 1, Metadata::RefcountBlock);
        }
        for index in missing {
            self.raise(worker, counted_by(index)).await?;
        }
        self.pool().free.insert(used.end..all.end, content);
        Ok(Allocated { range: table_start..used.end, content })
    }

    /// `clusters` free ones that follow each other: known ones, or what a file grows by, or of all that a device has.
    async fn find_long(&self, worker: &Worker, clusters: u64) -> Result<Allocated> {
        self.pool().free.restore();
        let is_device = self.files.file().kind() == FileKind::BlockDevice;
        let known = if is_device {
            self.look(worker, clusters, clusters, u64::MAX, Otherwise::NoSpace).await?
        } else {
            let known = self.pool().free.take(clusters, clusters);
            known.map(|(range, content)| Allocated { range, content })
        };
        match known {
            Some(found) if sabotage::is(Fault::PlaceBehindGrowth) && !is_device => self.give_back(&found),
            Some(found) => {
                self.check_free(&found.range, "tables")?;
                return Ok(found);
            }
            None if is_device => {
                let message = format!(
                    "the block device has no {clusters} free clusters in a row, which a table needs; extend it, or \
                     discard data of the guest"
                );
                return Err(Error::new(ErrorKind::NoSpace, message).on(self.files.path()));
            }
            None => {}
        }
        self.grow(worker, clusters).await
    }

    /// Clusters that follow each other for a table of any length; what they hold is unspecified but zero if fresh.
    pub(crate) async fn claim_large(&self, worker: &Worker, count: u64) -> Result<Allocated> {
        let _turn = self.space_mutex.lock().await;
        let mut turns = Turns::at_most(8, "a place for a long table");
        loop {
            turns.take()?;
            let end = self.end_of_place(worker, count).await?;
            let last_index = end / self.geometry.refcount_entries_per_block();
            if last_index < self.refcounts.table().entries().len() as u64 {
                break;
            }
            self.grow_reftable(worker, last_index).await?;
        }
        self.place_long(worker, count).await
    }

    /// Whether `len` host bytes at `host` lie within the file, or it does not matter whether they do.
    pub(crate) fn is_in_file(&self, host: u64, len: u64) -> bool {
        let file = self.files.file();
        host + len <= file.len() || self.files.data_file().is_some() || file.kind() == FileKind::BlockDevice
    }

    /// Makes the file reach to the end of its last cluster, before anything is written past its end.
    pub(crate) async fn round_file_up(&self, worker: &Worker) -> Result<()> {
        let end = self.file_clusters() << self.geometry.cluster_bits;
        let file = self.files.file();
        if file.kind() != FileKind::BlockDevice && file.len() < end {
            worker.set_len(file, end).await.map_err(|e| Error::from(e).on(self.files.path()))?;
        }
        Ok(())
    }

    /// Removes free space at the end of the file, but nothing that was there at open.
    pub(crate) async fn cut_unused_growth(&self, worker: &Worker) -> Result<()> {
        if self.files.file().kind() == FileKind::BlockDevice {
            return Ok(());
        }
        let end = {
            let mut pool = self.pool();
            pool.free.restore();
            let used = pool.free.tail(pool.file_clusters).max(pool.clusters_at_open);
            if used >= pool.file_clusters {
                return Ok(());
            }
            let cut = used..pool.file_clusters;
            pool.free.remove(cut);
            pool.file_clusters = used;
            used << self.geometry.cluster_bits
        };
        worker.set_len(self.files.file(), end).await.map_err(|e| Error::from(e).on(self.files.path()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Access, CreateOptions, Image, OpenOptions};
    use std::future::Future;
    use std::pin::pin;
    use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
    use std::task::{Context, Wake, Waker};
    use zebu_storage::WorkerConfig;
    use zebu_storage::sabotage::under;

    /// Counts how often it was woken, and how often while a commit could have named a refcount table without a place.
    struct Look {
        image: Image,
        woken: AtomicU32,
        unplaced: AtomicU32,
    }

    impl Wake for Look {
        fn wake(self: Arc<Self>) {
            self.woken.fetch_add(1, SeqCst);
            let qcow2 = self.image.qcow2("").unwrap();
            let is_unplaced = qcow2.space.refcounts.table().offset() == 0;
            let is_writable = qcow2.files().check_not_poisoned().is_ok();
            self.unplaced.fetch_add(u32::from(is_unplaced && is_writable), SeqCst);
        }
    }

    /// Counts how often a request that waits for the mutex finds a table without a place, when a move of the table vanishes.
    fn found_unplaced() -> u32 {
        let (worker, dir) = (Worker::new(&WorkerConfig::default()).unwrap(), tempfile::tempdir().unwrap());
        let path = dir.path().join("image");
        let image = worker
            .block_on(async {
                Image::create(&worker, &path, &CreateOptions::default().size(1 << 20)).await?;
                Image::open(&worker, &path, &OpenOptions::default().access(Access::ReadWrite)).await
            })
            .unwrap();
        let look = Arc::new(Look { image: image.clone(), woken: 0.into(), unplaced: 0.into() });
        let waker = Waker::from(look.clone());
        let space = &image.qcow2("").unwrap().space;
        let index = space.refcounts.table().entries().len() as u64;
        let mut waiting = pin!(space.space_mutex.lock());
        {
            let mut moves = pin!(async {
                let _turn = space.space_mutex.lock().await;
                space.grow_reftable(&worker, index).await
            });
            assert!(moves.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
            assert!(waiting.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        }
        assert!(look.woken.load(SeqCst) > 0);
        look.unplaced.load(SeqCst)
    }

    #[test]
    fn a_move_of_the_refcount_table_that_vanishes_is_seen_by_no_commit() {
        assert_eq!(found_unplaced(), 0);
        assert_ne!(under(Some(Fault::PoisonAfterTurn), found_unplaced).0, 0, "nobody could have seen it");
    }
}
