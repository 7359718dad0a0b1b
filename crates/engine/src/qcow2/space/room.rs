//! Room in the file system for metadata that a commit writes in its place.
//!
//! A file system may be full when a commit begins. What it writes then has its room already: else no flush succeeds, and
//! what the guest gives back never becomes free.

use crate::qcow2::space::HostSpace;
use crate::sync::AsyncMutexGuard;
use crate::{Error, ErrorKind, Result};
use std::ops::Range;
use zebu_storage::sabotage::{self, Fault};
use zebu_storage::{FileKind, Worker};

/// Bytes of a refcount block, or of the table, for which room is set aside at once.
const PIECE: u64 = 64 << 10;

impl HostSpace {
    /// Has the file system set room aside for `len` bytes of metadata at `offset`, as far as the file reaches.
    ///
    /// # Errors
    /// There is none. Other failures, also of a file system that can't do it, are left to the write.
    pub(crate) async fn set_metadata_aside(&self, worker: &Worker, offset: u64, len: u64) -> Result<()> {
        let file = self.files.file();
        let len = len.min(file.len().saturating_sub(offset));
        if file.kind() == FileKind::BlockDevice || sabotage::is(Fault::CommitWithoutRoom) {
            return Ok(());
        }
        match worker.allocate(file, offset, len).await.map_err(|e| Error::from(e).on(self.files.path())) {
            Err(error) if error.kind() == ErrorKind::NoSpace => Err(error),
            _ => Ok(()),
        }
    }

    /// Keeps others from taking and looking for space.
    pub(crate) async fn hold_space(&self) -> AsyncMutexGuard<'_> {
        self.space_mutex.lock().await
    }

    /// Sets room aside for the counts of `clusters` in refcount block `index`, once in each opening.
    pub(super) async fn set_counts_aside(
        &self,
        worker: &Worker,
        index: u64,
        clusters: Range<u64>,
    ) -> Result<()> {
        let first = index * self.geometry.refcount_entries_per_block();
        let byte = |cluster: u64| ((cluster - first) << self.geometry.refcount_order) / 8;
        let (from, to) = (byte(clusters.start), byte(clusters.end.max(clusters.start + 1) - 1));
        let is_new = self.refcounts.new_blocks().contains_key(&index);
        let block = zebu_qcow2::RefTableEntry(self.refcounts.table().entries().get(index)).block();
        let Some(block) = block.filter(|_| !is_new) else { return Ok(()) };
        for piece in from / PIECE..=to / PIECE {
            let place = block.0 + piece * PIECE;
            if self.pool().has_room.contains(&place) {
                continue;
            }
            let len = PIECE.min(self.geometry.cluster_size() - piece * PIECE);
            self.set_metadata_aside(worker, place, len).await?;
            self.pool().has_room.insert(place);
        }
        Ok(())
    }

    /// Sets room aside for entry `index` of the refcount table.
    async fn set_entry_aside(&self, worker: &Worker, index: u64) -> Result<()> {
        let table = self.refcounts.table();
        // What has moved is written as a whole, and has its room.
        if table.is_moved() {
            return Ok(());
        }
        let len = PIECE.min(self.geometry.cluster_size());
        self.set_metadata_aside(worker, table.offset() + index * 8 / len * len, len).await
    }

    /// Sets room aside for a new refcount block at `cluster`, and for its entry `index` in the table.
    pub(super) async fn set_new_block_aside(&self, worker: &Worker, index: u64, cluster: u64) -> Result<()> {
        self.set_entry_aside(worker, index).await?;
        let size = self.geometry.cluster_size();
        self.set_metadata_aside(worker, cluster << self.geometry.cluster_bits, size).await
    }

    /// Sets room aside for tables at `clusters` with the refcount blocks among them, and for what counts them.
    pub(super) async fn set_tables_aside(&self, worker: &Worker, clusters: Range<u64>) -> Result<()> {
        let (bits, per_block) = (self.geometry.cluster_bits, self.geometry.refcount_entries_per_block());
        let len = (clusters.end - clusters.start) << bits;
        self.set_metadata_aside(worker, clusters.start << bits, len).await?;
        for index in clusters.start / per_block..=(clusters.end - 1) / per_block {
            let of_block = index * per_block..(index + 1) * per_block;
            let counted = clusters.start.max(of_block.start)..clusters.end.min(of_block.end);
            if self.refcounts.table().entries().get(index) == 0 {
                self.set_entry_aside(worker, index).await?;
            } else {
                self.set_counts_aside(worker, index, counted).await?;
            }
        }
        Ok(())
    }
}
