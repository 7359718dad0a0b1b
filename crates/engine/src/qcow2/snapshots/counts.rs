//! Changing the refcounts of everything that an L1 table refers to, in batches sorted by host cluster.

use crate::qcow2::snapshots::walk::{Table, Walk};
use crate::qcow2::space::quarantine::FreeMode;
use crate::qcow2::state::Qcow2;
use crate::{Error, ErrorKind, Result};
use futures_util::future::{join_all, try_join_all};
use std::ops::Range;
use std::sync::Arc;
use zebu_qcow2::refcount;
use zebu_storage::Worker;
use zebu_storage::sabotage::{self, Fault, Limit};

/// Host clusters of a batch, about: a chunk of tables more.
const BATCH: usize = 1 << 16;

/// The change of the tables that are walked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Flags {
    /// They are left as they are.
    Keep,
    /// COPIED is cleared in all entries, in place.
    ClearCopied,
}

/// Why raising stopped.
struct Stopped {
    /// Clusters of the sorted batch that were raised.
    raised: usize,
    error: Error,
}

impl Qcow2 {
    /// Raises the counts of the tables of `entries` and of what they refer to by one for each reference. If one can't
    /// be raised, those that were are lowered again.
    pub(super) async fn raise_all(
        self: &Arc<Self>,
        worker: &Worker,
        entries: &[u64],
        flags: Flags,
    ) -> Result<()> {
        let mut walk = Walk::new(self, entries);
        let mut batches = 0;
        loop {
            let batch = match self.next_batch(worker, &mut walk, flags).await {
                Ok(batch) if batch.is_empty() => return Ok(()),
                Ok(batch) => batch,
                Err(error) => {
                    self.undo_raises(worker, entries, batches).await;
                    return Err(error);
                }
            };
            if let Err(Stopped { raised, error }) = self.raise_batch(worker, &batch).await {
                self.push_references(batch.get(..raised).unwrap_or_default(), FreeMode::Reuse);
                self.undo_raises(worker, entries, batches).await;
                return Err(error);
            }
            batches += 1;
            self.wait_if_too_dirty(worker).await;
        }
    }

    /// Lowers what the first `batches` batches of [`Qcow2::raise_all`] raised. A failure leaks space, nothing else.
    async fn undo_raises(self: &Arc<Self>, worker: &Worker, entries: &[u64], batches: u64) {
        let mut walk = Walk::new(self, entries);
        for _ in 0..batches {
            let Ok(batch) = self.next_batch(worker, &mut walk, Flags::Keep).await else { return };
            self.push_references(&batch, FreeMode::Reuse);
            if self.settle(worker).await.is_err() {
                return;
            }
        }
    }

    /// Lowers the counts of the tables of `entries` and of what they refer to; what nobody refers to any more is
    /// punched and free afterwards.
    pub(super) async fn lower_all(self: &Arc<Self>, worker: &Worker, entries: &[u64]) -> Result<()> {
        let mut walk = Walk::new(self, entries);
        loop {
            let batch = self.next_batch(worker, &mut walk, Flags::Keep).await?;
            if batch.is_empty() {
                return Ok(());
            }
            self.push_references(&batch, FreeMode::Punch);
            self.settle(worker).await?;
        }
    }

    /// The next references of a walk, sorted. Empty at the end.
    async fn next_batch(&self, worker: &Worker, walk: &mut Walk<'_>, flags: Flags) -> Result<Vec<u64>> {
        let mut batch = Vec::new();
        while batch.len() < sabotage::at_most(Limit::CountBatch, BATCH as u64) as usize {
            let mut tables = walk.next(worker).await?;
            if tables.is_empty() {
                break;
            }
            for table in &tables {
                table.push_references(self, &mut batch)?;
            }
            if flags == Flags::ClearCopied {
                let changed =
                    tables.iter_mut().filter_map(|table| table.clear_copied(self).then_some(&*table));
                self.write_tables(worker, changed).await?;
            }
        }
        batch.sort_unstable();
        Ok(batch)
    }

    /// Writes tables back to where they are.
    ///
    /// # Errors
    /// One lies where something else is, too. None is written then.
    pub(super) async fn write_tables<'t>(
        &self,
        worker: &Worker,
        tables: impl Iterator<Item = &'t Table>,
    ) -> Result<()> {
        let tables: Vec<_> = tables.collect();
        for table in &tables {
            self.space.check_own_l2_table(table.host)?;
        }
        let writes = tables.iter().map(|table| self.files.write_at(worker, table.host, &table.bytes));
        let writes: Vec<_> = writes.collect();
        if sabotage::is(Fault::LeaveFailedBatch) {
            return try_join_all(writes).await.map(drop);
        }
        // All of them have ended, well or not, before a guest changes these tables again, or their space has another use.
        join_all(writes).await.into_iter().collect()
    }

    /// Raises the counts of sorted host clusters, a cluster that comes n times by n.
    async fn raise_batch(&self, worker: &Worker, batch: &[u64]) -> Result<(), Stopped> {
        let per_slice = self.space.refcounts_per_slice();
        let mut done = 0;
        while let Some(first) = batch.get(done) {
            let slice = first / per_slice;
            let rest = batch.get(done..).unwrap_or_default();
            let group = rest.partition_point(|cluster| cluster / per_slice == slice);
            let clusters = rest.get(..group).unwrap_or_default();
            self.raise_in_slice(worker, clusters).await.map_err(|error| Stopped { raised: done, error })?;
            done += group;
        }
        Ok(())
    }

    /// Raises counts within one slice, all or none.
    async fn raise_in_slice(&self, worker: &Worker, clusters: &[u64]) -> Result<()> {
        let (Some(first), order) = (clusters.first(), self.geometry().refcount_order) else { return Ok(()) };
        let outcome = self
            .space
            .with_refcounts(worker, *first, |cache, shard, key, first_index| {
                let mut bytes = cache.get(shard, key)?.bytes().to_vec();
                for cluster in clusters {
                    let index = first_index + (cluster - first) as usize;
                    let old = refcount::get(&bytes, index, order)?;
                    if old == 0 {
                        return Some(Err((ErrorKind::Corrupt, *cluster)));
                    }
                    if old == self.geometry().refcount_max()
                        || refcount::set(&mut bytes, index, order, old + 1).is_err()
                    {
                        return Some(Err((ErrorKind::Unsupported, *cluster)));
                    }
                }
                let first_byte = (first_index << order) / 8;
                let last_index = first_index + (clusters.last()? - first) as usize;
                let end_byte = ((last_index + 1) << order).div_ceil(8);
                let changed = bytes.get(first_byte..end_byte)?.to_vec();
                cache
                    .change(shard, key, first_byte, changed.len(), |place| place.copy_from_slice(&changed))
                    .then_some(Ok(()))
            })
            .await?;
        outcome.map_err(|(kind, cluster)| {
            let bits = self.geometry().refcount_bits();
            let message = if kind == ErrorKind::Corrupt {
                "a cluster in use has refcount 0; repair the image".to_owned()
            } else if bits == 1 {
                "refcounts of 1 bit can't count a second reference: an image with refcount_bits=1 can't have internal \
                 snapshots; convert it to one with wider refcounts"
                    .to_owned()
            } else {
                format!(
                    "a refcount of {bits} bits can't grow beyond {}: delete a snapshot, or convert the image to one \
                     with wider refcounts",
                    self.geometry().refcount_max()
                )
            };
            let error = Error::new(kind, message).on(self.path());
            // What QEMU's commands answer to an overflow.
            let error = if kind == ErrorKind::Corrupt { error } else { error.with_errno(22) };
            error.at_host(cluster << self.geometry().cluster_bits)
        })
    }

    /// Puts sorted references in quarantine, one decrease for each. They are those of a snapshot, or of a mapping that no
    /// read uses any more.
    fn push_references(&self, sorted: &[u64], then: FreeMode) {
        let mut layer = sorted.to_vec();
        while !layer.is_empty() {
            let mut again = Vec::new();
            let mut run: Option<Range<u64>> = None;
            for cluster in layer {
                match &mut run {
                    Some(run) if run.end == cluster => run.end += 1,
                    Some(run) if run.end == cluster + 1 => again.push(cluster),
                    _ => {
                        if let Some(run) = run.replace(cluster..cluster + 1) {
                            self.space.quarantine().push_unread(run, then);
                        }
                    }
                }
            }
            if let Some(run) = run {
                self.space.quarantine().push_unread(run, then);
            }
            layer = again;
        }
    }

    /// The counts of sorted host clusters.
    pub(super) async fn counts_of(&self, worker: &Worker, sorted: &[u64]) -> Result<Vec<u64>> {
        let per_slice = self.space.refcounts_per_slice();
        let order = self.geometry().refcount_order;
        let mut counts = Vec::with_capacity(sorted.len());
        while let Some(first) = sorted.get(counts.len()) {
            let rest = sorted.get(counts.len()..).unwrap_or_default();
            let slice = first / per_slice;
            let group = rest.partition_point(|cluster| cluster / per_slice == slice);
            let clusters = rest.get(..group).unwrap_or_default();
            let found: Vec<u64> = self
                .space
                .with_refcounts(worker, *first, |cache, shard, key, first_index| {
                    let slice = cache.get(shard, key)?;
                    let count = |cluster: &u64| {
                        refcount::get(slice.bytes(), first_index + (cluster - first) as usize, order)
                    };
                    Some(clusters.iter().map(|cluster| count(cluster).unwrap_or(0)).collect())
                })
                .await?;
            counts.extend(found);
        }
        Ok(counts)
    }
}
