//! Reading and changing reference counts.

use crate::Remedy;
use crate::qcow2::cache::shard::Shard;
use crate::qcow2::cache::slice_cache::SliceCache;
use crate::qcow2::space::HostSpace;
use crate::qcow2::space::free::SpaceContent;
use crate::qcow2::space::metadata_map::Metadata;
use crate::qcow2::space::refcounts::NewBlock;
use crate::{Error, ErrorKind, Result};
use std::ops::Range;
use zebu_qcow2::refcount;
use zebu_storage::Worker;
use zebu_storage::sabotage::{self, Fault};

impl HostSpace {
    /// Refcounts in one slice.
    pub(crate) fn refcounts_per_slice(&self) -> u64 {
        (self.refcounts.cache().slice_bytes() as u64 * 8) >> self.geometry.refcount_order
    }

    /// Slices of one refcount block.
    pub(crate) fn slices_per_block(&self) -> u64 {
        self.geometry.cluster_size() / self.refcounts.cache().slice_bytes() as u64
    }

    /// Clusters that one refcount block counts.
    fn clusters_per_block(&self) -> u64 {
        self.geometry.refcount_entries_per_block()
    }

    async fn load_refcount_slice(&self, worker: &Worker, key: u64) -> Result<Box<[u8]>> {
        let slice_bytes = self.refcounts.cache().slice_bytes();
        let index = key / self.slices_per_block();
        // The table first, as for L2 tables: the note of a new block is made before the table points to it.
        let block = zebu_qcow2::RefTableEntry(self.refcounts.table().entries().get(index));
        if self.refcounts.new_blocks().contains_key(&index) {
            return Ok(vec![0; slice_bytes].into());
        }
        let block = block.checked_block(&self.geometry).map_err(|e| {
            Error::new(ErrorKind::Corrupt, format!("{e} (reftable index: {index:#x}); repair the image"))
                .on(self.files.path())
                .with_remedy(Remedy::Repair)
        })?;
        let Some(block) = block else { return Ok(vec![0; slice_bytes].into()) };
        self.check_own(block.0, Metadata::RefcountBlock)?;
        let offset = block.0 + key % self.slices_per_block() * slice_bytes as u64;
        if offset >= self.files.file().len().next_multiple_of(self.geometry.cluster_size()) {
            let message = "refcount block lies outside the file; repair the image";
            return Err(Error::new(ErrorKind::Corrupt, message).on(self.files.path()).at_host(offset));
        }
        self.files.file().announce("refblock_load");
        let (result, bufs) = worker.read(self.files.file(), offset, worker.buffer(slice_bytes).into()).await;
        result.map_err(|e| Error::from(e).on(self.files.path()))?;
        let mut bytes = vec![0; slice_bytes];
        bufs.copy_to(0, &mut bytes);
        Ok(bytes.into())
    }

    /// Calls `f` with the slice that counts `cluster` and the index in it, loading it as needed.
    pub(crate) async fn with_refcounts<R>(
        &self,
        worker: &Worker,
        cluster: u64,
        mut f: impl FnMut(&SliceCache, &mut Shard, u64, usize) -> Option<R>,
    ) -> Result<R> {
        let key = cluster / self.refcounts_per_slice();
        let index = (cluster % self.refcounts_per_slice()) as usize;
        let cache = self.refcounts.cache();
        let mut _loaded = None;
        loop {
            {
                let mut shard = cache.lock(key);
                if cache.get(&mut shard, key).is_some() {
                    return f(cache, &mut shard, key, index).ok_or_else(|| {
                        let message = "a refcount lies outside of its block; run zebu check";
                        Error::new(ErrorKind::Corrupt, message).on(self.files.path())
                    });
                }
            }
            _loaded = Some(cache.ensure(worker, key, || self.load_refcount_slice(worker, key)).await?);
        }
    }

    /// Runs of clusters in `range` whose refcount is 0.
    pub(crate) async fn zero_refcount_runs(
        &self,
        worker: &Worker,
        range: Range<u64>,
    ) -> Result<Vec<Range<u64>>> {
        self.refcount_runs(worker, range, 0).await
    }

    /// Runs of clusters in `range` whose refcount is `wanted`.
    pub(crate) async fn refcount_runs(
        &self,
        worker: &Worker,
        range: Range<u64>,
        wanted: u64,
    ) -> Result<Vec<Range<u64>>> {
        let mut runs: Vec<Range<u64>> = Vec::new();
        let mut add = |run: Range<u64>| match runs.last_mut() {
            Some(last) if last.end == run.start => last.end = run.end,
            _ => runs.push(run),
        };
        let per_slice = self.refcounts_per_slice();
        let order = self.geometry.refcount_order;
        let mut at = range.start;
        while at < range.end {
            let index = at / self.clusters_per_block();
            let block_end = ((index + 1) * self.clusters_per_block()).min(range.end);
            if self.refcounts.table().entries().get(index) == 0 {
                if wanted == 0 {
                    add(at..block_end);
                }
                at = block_end;
                continue;
            }
            let end = ((at / per_slice + 1) * per_slice).min(range.end);
            let found: Vec<u64> = self
                .with_refcounts(worker, at, |cache, shard, key, first| {
                    let slice = cache.peek(shard, key)?;
                    let found = (0..end - at)
                        .filter(|i| refcount::get(slice.bytes(), first + *i as usize, order) == Some(wanted))
                        .map(|i| at + i);
                    Some(found.collect())
                })
                .await?;
            for cluster in found {
                add(cluster..cluster + 1);
            }
            at = end;
        }
        Ok(runs)
    }

    /// Raises the refcounts of clusters that are 0 now to 1: all of them or, after an error, none. The caller holds
    /// `space_mutex` and saw them 0.
    pub(crate) async fn raise(&self, worker: &Worker, range: Range<u64>) -> Result<()> {
        let Err(stopped) = self.change_refcounts(worker, range.clone(), Change::Raise).await else {
            return Ok(());
        };
        // Nothing is read for it: a slice that was changed stays in memory until a commit, which `space_mutex` keeps out.
        let raised = if sabotage::is(Fault::KeepRaised) { 0..0 } else { range.start..stopped.at };
        if let Err(undone) = self.change_refcounts(worker, raised, Change::Lower).await {
            self.files.poison(&undone.error);
        }
        Err(stopped.error)
    }

    /// Lowers refcounts by one each; returns the runs that are 0 now.
    pub(crate) async fn lower(&self, worker: &Worker, range: Range<u64>) -> Result<Vec<Range<u64>>> {
        self.change_refcounts(worker, range.clone(), Change::Lower).await.map_err(|stopped| stopped.error)?;
        self.zero_refcount_runs(worker, range).await
    }

    async fn change_refcounts(
        &self,
        worker: &Worker,
        range: Range<u64>,
        change: Change,
    ) -> std::result::Result<(), Stopped> {
        let per_slice = self.refcounts_per_slice();
        let order = self.geometry.refcount_order;
        let mut at = range.start;
        while at < range.end {
            let end = ((at / per_slice + 1) * per_slice).min(range.end);
            let count = (end - at) as usize;
            let outcome = self
                .with_refcounts(worker, at, |cache, shard, key, first| {
                    let slice = cache.peek(shard, key)?;
                    let mut bytes = slice.bytes().to_vec();
                    for index in first..first + count {
                        let old = refcount::get(&bytes, index, order)?;
                        let new = match change {
                            // Another count means that the cluster was given to somebody already.
                            Change::Raise if old != 0 => return Some(Err(())),
                            Change::Raise => 1,
                            Change::Lower => match old.checked_sub(1) {
                                Some(new) => new,
                                None => return Some(Err(())),
                            },
                        };
                        if refcount::set(&mut bytes, index, order, new).is_err() {
                            return Some(Err(()));
                        }
                    }
                    let byte_first = (first << order) / 8;
                    let byte_end = ((first + count) << order).div_ceil(8);
                    let changed = bytes.get(byte_first..byte_end)?.to_vec();
                    cache
                        .change(shard, key, byte_first, byte_end - byte_first, |b| {
                            b.copy_from_slice(&changed);
                        })
                        .then_some(Ok(()))
                })
                .await
                .map_err(|error| Stopped { at, error })?;
            if outcome.is_err() {
                let message = match change {
                    Change::Raise => "a cluster that was free has a refcount now; check the image",
                    Change::Lower => "a cluster in use has refcount 0; repair the image",
                };
                let error = Error::new(ErrorKind::Corrupt, message)
                    .on(self.files.path())
                    .at_host(at << self.geometry.cluster_bits)
                    .with_remedy(Remedy::Repair);
                self.files.poison(&error);
                return Err(Stopped { at, error });
            }
            at = end;
        }
        Ok(())
    }

    /// Makes `cluster` a refcount block for table entry `index`, which counts `cluster` itself.
    pub(crate) async fn add_refblock(
        &self,
        worker: &Worker,
        index: u64,
        cluster: u64,
        content: SpaceContent,
    ) -> Result<()> {
        let host = cluster << self.geometry.cluster_bits;
        self.refcounts.new_blocks().insert(index, NewBlock { host, content });
        self.refcounts.table().entries().set(index, host);
        self.note_metadata(host, 1, Metadata::RefcountBlock);
        if sabotage::is(Fault::UncountedBlock) {
            return Ok(());
        }
        self.raise(worker, cluster..cluster + 1).await
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Change {
    Raise,
    Lower,
}

/// The error that ended a change of counts, and the first cluster whose count was not changed.
struct Stopped {
    at: u64,
    error: Error,
}
