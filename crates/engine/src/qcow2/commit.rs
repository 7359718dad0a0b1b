//! Commit by epochs: making what was linked durable, in an order that every crash survives.
//!
//! | phase | written | needs durable before it |
//! |---|---|---|
//! | 0 | new refcount blocks, whole; then the table entries (or the moved table, then the header) that point to them | the blocks |
//! | 1 | changed refcount blocks (increases; decreases of earlier epochs), new L2 tables, whole | |
//! | barrier 1 | data and phases 0 and 1 are durable | |
//! | 2 | changed blocks of existing L2 tables, L1 entries | barrier 1 |
//! | barrier 2 | the epoch is durable; the flush is answered | |
//! | release | after a grace period: punches, decreases in the cache, space is free | barrier 2 |
//!
//! **Freeze.** A commit works on copies taken at its start, in an order that makes each copy at least as new as
//! what points to it: freed clusters, L1, new tables, L2 slices, refcounts. So every frozen pointer's target is in the
//! frozen set or on disk, and every frozen decrease's unlinking is. What is linked meanwhile belongs to the next
//! epoch.
//!
//! **Barrier 1 is left out** when nothing needs it: no phase 0 or 1, and no link whose bytes must be durable before
//! it (`needs_data_barrier`: copied or replaced content, recycled space).
//!
//! A failure before the last barrier keeps the epoch: everything frozen is dirty again and the next flush repeats it.
//! A failed sync is final: what is durable is unknown.

use crate::qcow2::epochs::Lead;
use crate::qcow2::header_block::{Patch, field};
use crate::qcow2::metadata_writes::{blocks_of, in_pieces, joined};
use crate::qcow2::refcounts::{NewBlock, RefTable};
use crate::qcow2::slices::{FrozenSlice, Pressure, Written};
use crate::qcow2::state::{Freed, L1, NewTable, Qcow2};
use crate::qcow2::top_table::FrozenBlock;
use crate::{Error, Result};
use futures_util::future::{join_all, try_join_all};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use zebu_storage::commit_steps::{CommitStep, begins};
use zebu_storage::sabotage::{self, Fault};
use zebu_storage::{File, IoBuf, Worker};

/// Bytes of one metadata write at most.
const MAX_WRITE: usize = 1 << 20;
/// Metadata writes in flight at once.
const WRITES_AT_ONCE: usize = 32;

/// What a commit froze.
struct Frozen {
    freed: Vec<Freed>,
    l1: Arc<L1>,
    l1_blocks: Vec<FrozenBlock>,
    new_tables: BTreeMap<u64, NewTable>,
    l2: Vec<FrozenSlice>,
    refcounts: Vec<FrozenSlice>,
    new_blocks: BTreeMap<u64, NewBlock>,
    reftable: Arc<RefTable>,
    reftable_blocks: Vec<FrozenBlock>,
    /// The whole table, if the header does not name its place yet.
    moved_reftable: Option<Vec<u8>>,
    needs_data_barrier: bool,
}

impl Qcow2 {
    /// Makes everything that completed before the call durable.
    pub(crate) async fn commit(self: &Arc<Self>, worker: &Worker) -> Result<()> {
        let (epoch, mut lead) = self.commit.join();
        loop {
            if lead == Lead::Yes {
                // Detached: the commit goes on whatever becomes of the request that started it.
                let me = self.clone();
                let on = worker.clone();
                drop(worker.spawn(async move { me.run_commit(&on).await }));
            }
            let (result, next) = self.commit.ended(&epoch).await;
            if next == Lead::No {
                return result;
            }
            lead = next;
        }
    }

    /// Keeps what is dirty within bounds, after a change was made: starts a commit when half of the cache can't be
    /// evicted, and waits for one when more than all of it can't. The caller holds no gate and no grace guard. A
    /// commit that fails is reported by the next flush, not here: the change itself was made.
    pub(crate) async fn relieve(self: &Arc<Self>, worker: &Worker) {
        if sabotage::is(Fault::ReleaseWithoutCommit) {
            let (me, on, freed) = (self.clone(), worker.clone(), self.take_freed());
            if !freed.is_empty() {
                drop(worker.spawn(async move { me.release(&on, freed).await }));
            }
        }
        let pressure = self.l2.pressure().max(self.refcounts.cache.pressure());
        if pressure == Pressure::None {
            return;
        }
        if pressure == Pressure::Over {
            let _ = Box::pin(self.commit(worker)).await;
            return;
        }
        if !self.commit.is_running() {
            let (me, on) = (self.clone(), worker.clone());
            drop(worker.spawn(async move { me.commit(&on).await }));
        }
    }

    async fn run_commit(self: Arc<Self>, worker: &Worker) {
        self.commit.set_frozen();
        let mut frozen = self.freeze().await;
        let result = match self.check_not_poisoned() {
            Ok(()) => self.write_frozen(worker, &frozen).await,
            Err(error) => Err(error),
        };
        match &result {
            Ok(()) => {
                self.commit.commits.fetch_add(1, Relaxed);
                self.thaw(&frozen);
                if sabotage::is(Fault::FreezeFreedLast) {
                    let mut late = self.take_freed();
                    if !frozen.freed.is_empty() && !late.is_empty() {
                        self.releases.fetch_sub(1, AcqRel);
                    }
                    frozen.freed.append(&mut late);
                }
                if !frozen.freed.is_empty() {
                    let (me, on) = (self.clone(), worker.clone());
                    drop(worker.spawn(async move { me.release(&on, frozen.freed).await }));
                }
            }
            Err(_) => self.restore(frozen),
        }
        self.commit.end(result);
    }

    fn check_not_poisoned(&self) -> Result<()> {
        if self.writable { self.check_writable() } else { Ok(()) }
    }

    /// What is freed, to be released by the caller; counted as a release from now on, so that who runs out of space
    /// waits for it.
    fn take_freed(&self) -> Vec<Freed> {
        let mut freed = self.freed();
        if !freed.is_empty() {
            self.releases.fetch_add(1, Relaxed);
        }
        std::mem::take(&mut *freed)
    }

    async fn freeze(&self) -> Frozen {
        let mut needs_data_barrier = self.needs_data_barrier.swap(false, Acquire);
        let freed = self.take_freed();
        let l1 = self.l1();
        let l1_blocks = l1.table.freeze();
        let new_tables = self.new_tables().clone();
        let l2 = self.l2.freeze();
        needs_data_barrier |= self.needs_data_barrier.load(Acquire);
        let _no_refill = self.space_gate.enter().await;
        let refcounts = self.refcounts.cache.freeze();
        let new_blocks = self.refcounts.new_blocks().clone();
        let reftable = self.refcounts.table();
        let reftable_blocks = reftable.table.freeze();
        let moved_reftable = reftable.moved.load(Acquire).then(|| reftable.table.to_bytes());
        Frozen {
            freed,
            l1,
            l1_blocks,
            new_tables,
            l2,
            refcounts,
            new_blocks,
            reftable,
            reftable_blocks,
            moved_reftable,
            needs_data_barrier,
        }
    }

    async fn write_frozen(&self, worker: &Worker, frozen: &Frozen) -> Result<()> {
        let reftable = &frozen.reftable;
        let has_phase_0 = !frozen.new_blocks.is_empty()
            || !frozen.reftable_blocks.is_empty()
            || frozen.moved_reftable.is_some();
        if has_phase_0 {
            begins(CommitStep::NewRefcountBlocks);
            self.write_new_blocks(worker, frozen).await?;
            begins(CommitStep::Barrier0);
            if !sabotage::is(Fault::SkipBarrier0) {
                self.barrier(worker, &self.file).await?;
            }
            if let Some(bytes) = &frozen.moved_reftable {
                self.write_moved_reftable(worker, reftable, bytes).await?;
            } else {
                begins(CommitStep::RefcountTableEntries);
                self.write_blocks(
                    worker,
                    reftable.offset.load(Acquire),
                    reftable.table.block_bytes(),
                    &frozen.reftable_blocks,
                )
                .await?;
            }
        }
        let has_phase_1 = !frozen.refcounts.is_empty() || !frozen.new_tables.is_empty();
        let has_phase_2 = !frozen.l1_blocks.is_empty()
            || frozen
                .l2
                .iter()
                .any(|slice| !frozen.new_tables.contains_key(&(slice.key / self.slices_per_table())));
        if sabotage::is(Fault::L1BeforeItsTable) {
            self.write_links(worker, frozen).await?;
        }
        begins(CommitStep::RefcountBlocks);
        self.write_refcounts(worker, frozen).await?;
        begins(CommitStep::NewTables);
        self.write_new_tables(worker, frozen).await?;
        if has_phase_0 || has_phase_1 || (frozen.needs_data_barrier && has_phase_2) {
            if let Some(data_file) = &self.data_file {
                begins(CommitStep::BarrierOfDataFile);
                self.barrier(worker, data_file).await?;
            }
            begins(CommitStep::Barrier1);
            if !(sabotage::is(Fault::SkipBarrier1) && has_phase_2) {
                self.barrier(worker, &self.file).await?;
            }
            if !has_phase_2 {
                return Ok(());
            }
            self.publish(frozen);
            self.write_links(worker, frozen).await?;
            return self.last_barrier(worker).await;
        }
        self.write_links(worker, frozen).await?;
        if let Some(data_file) = &self.data_file {
            begins(CommitStep::BarrierOfDataFile);
            self.barrier(worker, data_file).await?;
            if !has_phase_2 {
                return Ok(());
            }
        }
        self.last_barrier(worker).await
    }

    async fn last_barrier(&self, worker: &Worker) -> Result<()> {
        if sabotage::is(Fault::SkipBarrier2) {
            return Ok(());
        }
        begins(CommitStep::Barrier2);
        self.barrier(worker, &self.file).await
    }

    /// Makes what was written to `file` durable. A failed sync leaves unknown what is durable: final.
    pub(crate) async fn barrier(&self, worker: &Worker, file: &File) -> Result<()> {
        if sabotage::is(Fault::SkipDataFileBarrier)
            && self.data_file.as_ref().is_some_and(|d| d.id() == file.id())
        {
            return Ok(());
        }
        worker.flush(file).await.map_err(|e| {
            let error = Error::from(e).on(&self.path);
            self.poison(&error);
            error
        })
    }

    async fn write_new_blocks(&self, worker: &Worker, frozen: &Frozen) -> Result<()> {
        let per_block = self.slices_per_refblock();
        let cluster = self.geometry.cluster_size() as usize;
        let slice_bytes = self.refcounts.cache.slice_bytes();
        let mut writes = Vec::new();
        for (index, block) in &frozen.new_blocks {
            let slices = frozen.refcounts.iter().filter(|s| s.key / per_block == *index);
            if block.content.is_fresh() {
                // The rest of the block reads as zero already.
                writes.extend(slices.map(|s| {
                    (block.host + s.key % per_block * slice_bytes as u64, IoBuf::copy_of(&s.bytes))
                }));
                continue;
            }
            let mut bytes = vec![0; cluster];
            for slice in slices {
                let at = (slice.key % per_block) as usize * slice_bytes;
                if let Some(place) = bytes.get_mut(at..at + slice_bytes) {
                    place.copy_from_slice(&slice.bytes);
                }
            }
            writes.push((block.host, IoBuf::copy_of(&bytes)));
        }
        self.write_all(worker, writes).await
    }

    async fn write_moved_reftable(&self, worker: &Worker, reftable: &RefTable, bytes: &[u8]) -> Result<()> {
        let offset = reftable.offset.load(Acquire);
        begins(CommitStep::MovedRefcountTable);
        self.write_all(worker, in_pieces(offset, bytes, MAX_WRITE)).await?;
        begins(CommitStep::BarrierOfMovedTable);
        if !sabotage::is(Fault::SkipMovedTableBarrier) {
            self.barrier(worker, &self.file).await?;
        }
        let clusters = bytes.len() as u64 >> self.geometry.cluster_bits;
        let patches = [
            Patch::U64(field::REFTABLE_OFFSET, offset),
            Patch::U32(field::REFTABLE_CLUSTERS, clusters as u32),
        ];
        begins(CommitStep::HeaderOfMovedTable);
        self.write_header(worker, &patches).await?;
        reftable.moved.store(false, Relaxed);
        Ok(())
    }

    async fn write_refcounts(&self, worker: &Worker, frozen: &Frozen) -> Result<()> {
        let reftable = &frozen.reftable;
        let per_block = self.slices_per_refblock();
        let existing =
            frozen.refcounts.iter().filter(|s| !frozen.new_blocks.contains_key(&(s.key / per_block)));
        let writes = blocks_of(existing, self.refcounts.cache.block_bytes(), |key| {
            let block = reftable.table.get(key / per_block) & !511;
            block + key % per_block * self.refcounts.cache.slice_bytes() as u64
        });
        self.write_all(worker, writes).await
    }

    async fn write_new_tables(&self, worker: &Worker, frozen: &Frozen) -> Result<()> {
        let per_table = self.slices_per_table();
        let slice_bytes = self.l2.slice_bytes();
        let mut by_table: BTreeMap<u64, Vec<&FrozenSlice>> = BTreeMap::new();
        for slice in &frozen.l2 {
            by_table.entry(slice.key / per_table).or_default().push(slice);
        }
        let mut writes = Vec::new();
        for (l1_index, table) in &frozen.new_tables {
            let slices = by_table.get(l1_index).map_or(&[][..], Vec::as_slice);
            if table.source.is_none() && table.content.is_fresh() {
                writes.extend(blocks_of(slices.iter().copied(), self.l2.block_bytes(), |key| {
                    table.host + key % per_table * slice_bytes as u64
                }));
                continue;
            }
            let cluster = self.geometry.cluster_size() as usize;
            let mut bytes = match table.source {
                Some(source) => self.read_table(worker, source).await?,
                None => vec![0; cluster],
            };
            for slice in slices {
                let at = (slice.key % per_table) as usize * slice_bytes;
                if let Some(place) = bytes.get_mut(at..at + slice_bytes) {
                    place.copy_from_slice(&slice.bytes);
                }
            }
            writes.push((table.host, IoBuf::copy_of(&bytes)));
        }
        self.write_all(worker, writes).await
    }

    async fn read_table(&self, worker: &Worker, offset: u64) -> Result<Vec<u8>> {
        let len = self.geometry.cluster_size() as usize;
        let (result, bufs) = worker.read(&self.file, offset, worker.buffer(len).into()).await;
        result.map_err(|e| Error::from(e).on(&self.path))?;
        let mut bytes = vec![0; len];
        bufs.copy_to(0, &mut bytes);
        Ok(bytes)
    }

    async fn write_links(&self, worker: &Worker, frozen: &Frozen) -> Result<()> {
        let per_table = self.slices_per_table();
        let existing = frozen.l2.iter().filter(|s| !frozen.new_tables.contains_key(&(s.key / per_table)));
        let mut writes = blocks_of(existing, self.l2.block_bytes(), |key| {
            let table = zebu_qcow2::L1Entry(frozen.l1.table.get(key / per_table)).table().map_or(0, |t| t.0);
            table + key % per_table * self.l2.slice_bytes() as u64
        });
        if sabotage::is(Fault::WriteTheLiveBlock) {
            self.take_live_blocks(frozen, &mut writes);
        }
        begins(CommitStep::Links);
        let l1_block_bytes = frozen.l1.table.block_bytes() as u64;
        writes.extend(frozen.l1_blocks.iter().map(|block| {
            (frozen.l1.offset + block.block as u64 * l1_block_bytes, IoBuf::copy_of(&block.bytes))
        }));
        self.write_all(worker, writes).await
    }

    /// What the blocks of links hold now, in place of what they held at the freeze.
    fn take_live_blocks(&self, frozen: &Frozen, writes: &mut [(u64, IoBuf)]) {
        let per_table = self.slices_per_table();
        for slice in &frozen.l2 {
            let table =
                zebu_qcow2::L1Entry(frozen.l1.table.get(slice.key / per_table)).table().map_or(0, |t| t.0);
            let start = table + slice.key % per_table * self.l2.slice_bytes() as u64;
            let mut shard = self.l2.lock(slice.key);
            let Some(live) = self.l2.get(&mut shard, slice.key) else { continue };
            for (offset, buf) in &mut *writes {
                let at = offset.wrapping_sub(start) as usize;
                if let Some(bytes) = live.bytes.get(at..at.saturating_add(buf.len())) {
                    *buf = IoBuf::copy_of(bytes);
                }
            }
        }
    }

    async fn write_blocks(
        &self,
        worker: &Worker,
        offset: u64,
        block_bytes: usize,
        blocks: &[FrozenBlock],
    ) -> Result<()> {
        let writes = blocks
            .iter()
            .map(|block| (offset + (block.block * block_bytes) as u64, IoBuf::copy_of(&block.bytes)))
            .collect();
        self.write_all(worker, writes).await
    }

    /// Writes pieces of metadata, neighbours together, several at once.
    async fn write_all(&self, worker: &Worker, writes: Vec<(u64, IoBuf)>) -> Result<()> {
        let mut merged = joined(writes, MAX_WRITE).into_iter().peekable();
        while merged.peek().is_some() {
            let batch = merged.by_ref().take(WRITES_AT_ONCE).map(|(offset, bufs)| async move {
                let (result, _) = worker.write(&self.file, offset, bufs).await;
                result.map_err(|e| Error::from(e).on(&self.path))
            });
            // All of them have ended, well or not, before anybody writes these places again: one that was still under
            // way could land on what a later commit writes.
            if sabotage::is(Fault::LeaveFailedBatch) {
                try_join_all(batch.collect::<Vec<_>>()).await?;
                continue;
            }
            join_all(batch.collect::<Vec<_>>()).await.into_iter().collect::<Result<()>>()?;
        }
        Ok(())
    }

    /// The new tables are whole on the disk, and from here on may be reachable: a write of an L1 entry that fails may have
    /// reached the disk all the same. What changes in them after this is written behind the barrier, as in any table.
    fn publish(&self, frozen: &Frozen) {
        let mut new_tables = self.new_tables();
        for (l1_index, table) in &frozen.new_tables {
            if new_tables.get(l1_index) == Some(table) {
                new_tables.remove(l1_index);
            }
        }
    }

    fn thaw(&self, frozen: &Frozen) {
        self.publish(frozen);
        {
            let mut new_blocks = self.refcounts.new_blocks();
            for index in frozen.new_blocks.keys() {
                new_blocks.remove(index);
            }
        }
        self.l2.thaw(&frozen.l2, Written::Durable);
        self.refcounts.cache.thaw(&frozen.refcounts, Written::Durable);
    }

    fn restore(&self, frozen: Frozen) {
        if sabotage::is(Fault::ForgetFailedCommit) {
            self.thaw(&frozen);
            self.releases.fetch_sub(usize::from(!frozen.freed.is_empty()), AcqRel);
            return;
        }
        self.l2.thaw(&frozen.l2, Written::Failed);
        self.refcounts.cache.thaw(&frozen.refcounts, Written::Failed);
        frozen.l1.table.refreeze(&frozen.l1_blocks);
        frozen.reftable.table.refreeze(&frozen.reftable_blocks);
        if !frozen.freed.is_empty() {
            self.freed().extend(frozen.freed);
            self.releases.fetch_sub(1, AcqRel);
        }
        if frozen.needs_data_barrier {
            self.needs_data_barrier.store(true, Relaxed);
        }
    }
}
