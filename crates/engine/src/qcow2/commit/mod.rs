//! Commit by epochs: making what was linked durable, in an order that every crash survives.
//!
//! | phase | written | needs durable before it |
//! |---|---|---|
//! | 0 | new refcount blocks, whole; then the table entries (or the moved table, then the header) that point to them | the blocks |
//! | 1 | changed refcount blocks (increases; decreases of earlier epochs), new L2 tables: whole, or in fresh space the changed parts | |
//! | barrier 1 | data and phases 0 and 1 are durable | |
//! | 2 | changed blocks of existing L2 tables, L1 entries | barrier 1 |
//! | barrier 2 | the epoch is durable; the flush is answered | |
//! | release | after a grace period: punches, decreases in the cache, space is free | barrier 2 |
//!
//! **Freeze.** A commit works on copies taken at its start, one after the other, while other threads go on. Each copy is
//! at least as new as what points to it: freed clusters, L1, L2 slices, new tables, refcounts. So every frozen pointer's
//! target is in the frozen set or on disk, and every frozen decrease's unlinking is. The new tables come after the slices:
//! a frozen slice whose table is new finds it among them, and is written as a part of it. A table that was made after L1
//! was copied is written one epoch before anything points to it. What is linked meanwhile belongs to the next epoch.
//!
//! **Barrier 1 is left out** when nothing needs it: no phase 0 or 1, and no link whose bytes must be durable before
//! it (`needs_data_barrier`: copied or replaced content, recycled space).
//!
//! A failure before the last barrier keeps the epoch: everything frozen is dirty again and the next flush repeats it.
//! A failed sync is final: what is durable is unknown.

mod metadata_writes;
pub(crate) mod queue;
mod release;

use crate::image_worker::vanished;
use crate::qcow2::cache::slice_cache::{Pressure, Written};
use crate::qcow2::commit::metadata_writes::{in_pieces, joined};
use crate::qcow2::commit::queue::Lead;
use crate::qcow2::header::block::{OnFailure, Patch, field};
use crate::qcow2::map::frozen_map::FrozenMap;
use crate::qcow2::space::frozen_counts::FrozenCounts;
use crate::qcow2::space::quarantine::Quarantined;
use crate::qcow2::state::Qcow2;
use crate::{Error, ErrorKind, Result};
use futures_util::future::{join_all, try_join_all};
use std::sync::Arc;
use zebu_storage::commit_steps::{CommitStep, begins};
use zebu_storage::sabotage::{self, Fault, Limit};
use zebu_storage::{IoBuf, Worker};

/// Commits until nothing is dirty: one, its releases, one for their decreases. More are needed where others fail.
const ROUNDS: usize = 8;
/// Bytes of one metadata write at most.
const MAX_WRITE: usize = 1 << 20;
/// Metadata writes in flight at once.
const WRITES_AT_ONCE: usize = 32;

/// The frozen set of a commit.
struct Frozen {
    quarantined: Vec<Quarantined>,
    map: FrozenMap,
    counts: FrozenCounts,
    needs_data_barrier: bool,
}

/// The duty to end an epoch. A commit that vanishes (its task panicked, or was dropped) ends it with an error: what it had
/// under way may still land, so nothing is written any more.
struct LedCommit {
    image: Arc<Qcow2>,
    has_ended: bool,
}

impl LedCommit {
    fn end(mut self, result: Result<()>) {
        self.has_ended = true;
        self.image.commit.end(result);
    }
}

impl Drop for LedCommit {
    fn drop(&mut self) {
        if !self.has_ended {
            let error = vanished(self.image.path());
            self.image.files.poison(&error);
            self.image.commit.end(Err(error));
        }
    }
}

impl Qcow2 {
    /// Makes everything that completed before the call durable.
    pub(crate) async fn commit(self: &Arc<Self>, worker: &Worker) -> Result<()> {
        let (epoch, lead) = self.commit.join();
        if lead == Lead::No {
            match worker.shown(self.file(), "a commit", self.commit.ended(&epoch)).await {
                (result, Lead::No) => return result,
                (_, Lead::Yes) => {}
            }
        }
        self.start_commit(worker);
        self.commit.ended(&epoch).await.0
    }

    /// Waits for the end of the commit that runs now. It has one: it runs on the image's own worker, or on one whose thread
    /// has promised to drive it.
    pub(crate) async fn running_commit(&self) {
        self.commit.running_ended().await;
    }

    /// Commits until nothing is dirty and nothing waits in quarantine. Nobody else changes the image.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`]: commits of others fail again and again beside it.
    pub(crate) async fn commit_until_clean(self: &Arc<Self>, worker: &Worker) -> Result<()> {
        for _ in 0..ROUNDS {
            self.commit(worker).await?;
            self.space.quarantine().releases_done().await;
            let failed = self.commit.failed();
            if self.map.is_dirty() || self.space.is_dirty() {
                continue;
            }
            if sabotage::is(Fault::CloseBesideCommit) {
                return Ok(());
            }
            // Another's commit may have frozen what the last releases changed. It is clean once that commit has succeeded; had
            // it failed, it would be dirty again. A commit that begins after it has nothing to write.
            self.running_commit().await;
            if self.commit.failed() == failed {
                return Ok(());
            }
        }
        let message = "the image does not become clean: commits of others fail beside this one";
        Err(Error::new(ErrorKind::Busy, message).on(self.path()))
    }

    /// Has the commit run that the caller leads: on its worker, if the thread of that has promised to drive it, else on the
    /// image's own.
    fn start_commit(self: &Arc<Self>, worker: &Worker) {
        let led = LedCommit { image: self.clone(), has_ended: false };
        if worker.is_driven() || sabotage::is(Fault::RunOnCaller) {
            drop(worker.spawn_with(|on| async move {
                // A commit that is dropped halfway stops all writing, and this one may wait for the image's own worker.
                let _awaited = on.awaited_by_others();
                let result = led.image.clone().run_commit(&on).await;
                led.end(result);
            }));
            return;
        }
        match self.own_worker.start(worker) {
            Ok(own) => {
                drop(own.run(move |on| async move {
                    let result = led.image.clone().run_commit(&on).await;
                    led.end(result);
                }));
            }
            Err(error) => led.end(Err(error.on(self.path()))),
        }
    }

    /// Keeps what is dirty within bounds, after a change was made: starts a commit when more than a quarter of the cache
    /// is dirty, and waits for one when more than half of it is. The caller holds no mutex and no epoch guard. A commit
    /// that fails is reported by the next flush, not here: the change itself was made.
    pub(crate) async fn wait_if_too_dirty(self: &Arc<Self>, worker: &Worker) {
        if sabotage::is(Fault::ReleaseWithoutCommit) {
            self.start_release(worker, self.space.quarantine().take());
        }
        let pressure = self.map.slices().pressure().max(self.space.pressure());
        if pressure == Pressure::None {
            return;
        }
        if pressure == Pressure::Over {
            let _ = Box::pin(self.commit(worker)).await;
            return;
        }
        if !self.commit.is_running() {
            let (_, lead) = self.commit.join();
            if lead == Lead::Yes {
                self.start_commit(worker);
            }
        }
    }

    async fn run_commit(self: Arc<Self>, worker: &Worker) -> Result<()> {
        self.commit.set_frozen();
        let mut frozen = self.freeze().await;
        let result = match self.files.check_not_poisoned() {
            Ok(()) => self.write_frozen(worker, &frozen).await,
            Err(error) => Err(error),
        };
        match &result {
            Ok(()) => {
                self.commit.note_done();
                self.thaw(&frozen);
                if sabotage::is(Fault::FreezeFreedLast) {
                    let mut late = self.space.quarantine().take();
                    if !frozen.quarantined.is_empty() && !late.is_empty() {
                        self.space.quarantine().end_release();
                    }
                    frozen.quarantined.append(&mut late);
                }
                self.start_release(worker, frozen.quarantined);
            }
            Err(_) => self.restore(frozen),
        }
        result
    }

    async fn freeze(&self) -> Frozen {
        let mut needs_data_barrier = self.commit.take_data_barrier();
        let quarantined = self.space.quarantine().take();
        let map = self.map.freeze();
        needs_data_barrier |= self.commit.needs_data_barrier();
        let counts = self.space.freeze().await;
        Frozen { quarantined, map, counts, needs_data_barrier }
    }

    async fn write_frozen(self: &Arc<Self>, worker: &Worker, frozen: &Frozen) -> Result<()> {
        let counts = &frozen.counts;
        let has_phase_0 = counts.has_new_blocks();
        let is_counted_late = !has_phase_0 || sabotage::is(Fault::NameUncounted);
        if has_phase_0 {
            begins(CommitStep::NewRefcountBlocks);
            self.write_all(worker, self.space.new_block_writes(counts), "refblock_alloc_write").await?;
            // A block, or a table that has moved, may lie where another block counts it: before anything names it.
            if !is_counted_late {
                self.write_counts(worker, counts).await?;
            }
            begins(CommitStep::Barrier0);
            if !sabotage::is(Fault::SkipBarrier0) {
                self.files.barrier(worker, self.file()).await?;
            }
            if let Some((offset, bytes)) = counts.moved_table() {
                self.write_moved_reftable(worker, offset, bytes).await?;
                counts.note_named();
            } else {
                begins(CommitStep::RefcountTableEntries);
                self.write_all(worker, counts.table_writes(), "refblock_alloc_hookup").await?;
            }
        }
        let has_phase_1 = counts.has_counts() || frozen.map.has_new_tables();
        let has_phase_2 = self.map.has_links(&frozen.map);
        if sabotage::is(Fault::L1BeforeItsTable) {
            self.write_links(worker, frozen).await?;
        }
        if is_counted_late {
            self.write_counts(worker, counts).await?;
        }
        begins(CommitStep::NewTables);
        self.write_new_tables(worker, frozen).await?;
        if has_phase_0 || has_phase_1 || (frozen.needs_data_barrier && has_phase_2) {
            if let Some(data_file) = self.data_file() {
                begins(CommitStep::BarrierOfDataFile);
                self.files.barrier(worker, data_file).await?;
            }
            begins(CommitStep::Barrier1);
            let fault = if has_phase_2 { Fault::SkipBarrier1 } else { Fault::SkipOnlyBarrier };
            if !sabotage::is(fault) {
                self.files.barrier(worker, self.file()).await?;
            }
            if !has_phase_2 {
                return Ok(());
            }
            // From here on they may be reachable: a write of an L1 entry that fails may have reached the disk all the same.
            // What changes in them after this is written behind the barrier, as in any table.
            self.map.publish(&frozen.map);
            self.write_links(worker, frozen).await?;
            return self.last_barrier(worker).await;
        }
        self.write_links(worker, frozen).await?;
        if let Some(data_file) = self.data_file() {
            begins(CommitStep::BarrierOfDataFile);
            self.files.barrier(worker, data_file).await?;
            if !has_phase_2 {
                return Ok(());
            }
        }
        self.last_barrier(worker).await
    }

    /// Writes the counts in blocks that are on disk.
    async fn write_counts(&self, worker: &Worker, counts: &FrozenCounts) -> Result<()> {
        begins(CommitStep::RefcountBlocks);
        self.write_all(worker, self.space.count_writes(counts), "refblock_update").await
    }

    async fn last_barrier(&self, worker: &Worker) -> Result<()> {
        if sabotage::is(Fault::SkipBarrier2) {
            return Ok(());
        }
        begins(CommitStep::Barrier2);
        self.files.barrier(worker, self.file()).await
    }

    async fn write_moved_reftable(
        self: &Arc<Self>,
        worker: &Worker,
        offset: u64,
        bytes: &[u8],
    ) -> Result<()> {
        begins(CommitStep::MovedRefcountTable);
        self.write_all(worker, in_pieces(offset, bytes, MAX_WRITE), "reftable_update").await?;
        begins(CommitStep::BarrierOfMovedTable);
        if !sabotage::is(Fault::SkipMovedTableBarrier) {
            self.files.barrier(worker, self.file()).await?;
        }
        let clusters = bytes.len() as u64 >> self.geometry().cluster_bits;
        let patches = [
            Patch::U64(field::REFTABLE_OFFSET, offset),
            Patch::U32(field::REFTABLE_CLUSTERS, clusters as u32),
        ];
        begins(CommitStep::HeaderOfMovedTable);
        if sabotage::is(Fault::ChangeHeaderOnLeader) {
            return self.header.change(worker, &patches, OnFailure::Restore).await;
        }
        // By the image's own worker: nobody in the header depends on a promise.
        let image = self.clone();
        let change = async move |on: Worker| image.header.change(&on, &patches, OnFailure::Restore).await;
        self.own_worker.run(worker, self.path(), change).await
    }

    async fn write_new_tables(&self, worker: &Worker, frozen: &Frozen) -> Result<()> {
        let read = async |table| self.read_table(worker, table).await;
        let writes = self.map.new_table_writes(&frozen.map, read).await?;
        self.write_all(worker, writes, "l2_alloc_write").await
    }

    async fn read_table(&self, worker: &Worker, offset: u64) -> Result<Vec<u8>> {
        let len = self.geometry().cluster_size() as usize;
        self.file().announce("l2_alloc_cow_read");
        let (result, bufs) = worker.read(self.file(), offset, worker.buffer(len).into()).await;
        result.map_err(|e| Error::from(e).on(self.path()))?;
        let mut bytes = vec![0; len];
        bufs.copy_to(0, &mut bytes);
        Ok(bytes)
    }

    async fn write_links(&self, worker: &Worker, frozen: &Frozen) -> Result<()> {
        let mut writes = self.map.entry_writes(&frozen.map);
        if sabotage::is(Fault::WriteTheLiveBlock) {
            self.map.take_live_blocks(&frozen.map, &mut writes);
        }
        begins(CommitStep::Links);
        let l1_writes = frozen.map.l1_writes();
        let purpose = if writes.is_empty() { "l1_update" } else { "l2_update" };
        writes.extend(l1_writes);
        self.write_all(worker, writes, purpose).await
    }

    /// Writes pieces of metadata, neighbours together, several at once. They are for `purpose`, a word of [`File::announce`].
    ///
    /// [`File::announce`]: zebu_storage::File::announce
    async fn write_all(
        &self,
        worker: &Worker,
        writes: Vec<(u64, IoBuf)>,
        purpose: &'static str,
    ) -> Result<()> {
        let at_once = sabotage::at_most(Limit::CommitWrites, WRITES_AT_ONCE as u64) as usize;
        let mut merged = joined(writes, MAX_WRITE).into_iter().peekable();
        while merged.peek().is_some() {
            let batch = merged.by_ref().take(at_once).map(|(offset, bufs)| async move {
                self.file().announce(purpose);
                let (result, _) = worker.write(self.file(), offset, bufs).await;
                result.map_err(|e| Error::from(e).on(self.path()))
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

    fn thaw(&self, frozen: &Frozen) {
        self.map.publish(&frozen.map);
        self.space.publish(&frozen.counts);
        self.map.thaw(&frozen.map, Written::Durable);
        self.space.thaw(&frozen.counts, Written::Durable);
    }

    fn restore(&self, frozen: Frozen) {
        if sabotage::is(Fault::ForgetFailedCommit) {
            self.thaw(&frozen);
            if !frozen.quarantined.is_empty() {
                self.space.quarantine().end_release();
            }
            return;
        }
        self.map.thaw(&frozen.map, Written::Failed);
        self.space.thaw(&frozen.counts, Written::Failed);
        self.space.quarantine().put_back(frozen.quarantined);
        if frozen.needs_data_barrier {
            self.commit.need_data_barrier();
        }
    }
}
