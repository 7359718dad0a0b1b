//! The snapshot table: as it is known in memory, and replacing it on disk.

use crate::qcow2::header_block::{Patch, field};
use crate::qcow2::metadata_map::Metadata;
use crate::qcow2::open::format_error;
use crate::qcow2::state::{AfterFree, Qcow2};
use crate::{Error, Result};
use std::sync::{Arc, PoisonError};
use zebu_qcow2::snapshot::{SnapshotEntry, encode_table};
use zebu_storage::sabotage::{self, Fault};
use zebu_storage::{IoBuf, Worker};

/// The table and where it lies.
#[derive(Debug, Clone, Default)]
pub(crate) struct SnapshotTable {
    pub(crate) entries: Vec<SnapshotEntry>,
    /// Offset in the file, bytes.
    pub(crate) offset: u64,
    /// Bytes on disk.
    pub(crate) len: u64,
}

impl Qcow2 {
    /// The table as it is now.
    pub(crate) fn snapshots(&self) -> Arc<SnapshotTable> {
        self.snapshots.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Makes `entries` the snapshot table: a new one is written and durable, then the header names it, then the old
    /// one goes. The caller is alone.
    pub(super) async fn replace_snapshots(
        self: &Arc<Self>,
        worker: &Worker,
        entries: Vec<SnapshotEntry>,
    ) -> Result<()> {
        let bytes = encode_table(&entries).map_err(|e| format_error(&self.path, &e))?;
        let bits = self.geometry.cluster_bits;
        let clusters = (bytes.len() as u64).div_ceil(self.geometry.cluster_size());
        let old = self.snapshots();
        let new_place = match clusters {
            0 => None,
            clusters => Some(self.allocate_metadata(worker, clusters).await?),
        };
        let offset = new_place.as_ref().map_or(0, |place| place.range.start << bits);
        let written = async {
            if new_place.is_some() {
                let mut padded = bytes.clone();
                padded.resize((clusters << bits) as usize, 0);
                self.write_at(worker, offset, &padded).await?;
            }
            if sabotage::is(Fault::NameTableEarly) {
                return Ok(());
            }
            self.settle(worker).await
        }
        .await;
        if let Err(error) = written {
            if let Some(place) = new_place {
                self.push_freed(place.range, AfterFree::Reuse);
            }
            return Err(error);
        }
        let count = u32::try_from(entries.len()).unwrap_or(u32::MAX);
        let patches = [Patch::U32(field::NB_SNAPSHOTS, count), Patch::U64(field::SNAPSHOTS_OFFSET, offset)];
        self.switch_header(worker, &patches).await?;
        self.note_metadata(offset, bytes.len() as u64, Metadata::SnapshotTable);
        let table = SnapshotTable { entries, offset, len: bytes.len() as u64 };
        *self.snapshots.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(table);
        self.free_table(old.offset, old.len);
        Ok(())
    }

    /// Gives the clusters of a table back.
    pub(crate) fn free_table(&self, offset: u64, len: u64) {
        if len > 0 && offset > 0 {
            let first = offset >> self.geometry.cluster_bits;
            let clusters = first..first + len.div_ceil(self.geometry.cluster_size());
            self.metadata.remove(clusters.clone());
            self.push_freed(clusters, AfterFree::Reuse);
        }
    }

    /// Changes the header so that it names something else, durably. If that fails, which of the two the disk names is
    /// unknown: nothing may be written any more.
    pub(super) async fn switch_header(&self, worker: &Worker, patches: &[Patch]) -> Result<()> {
        if let Err(error) = self.header_block.write(worker, &self.file, patches).await {
            self.poison(&error);
            return Err(error);
        }
        self.barrier(worker, &self.file).await
    }

    /// Writes bytes of metadata.
    pub(crate) async fn write_at(&self, worker: &Worker, offset: u64, bytes: &[u8]) -> Result<()> {
        const AT_ONCE: usize = 1 << 20;
        for (index, part) in bytes.chunks(AT_ONCE).enumerate() {
            let at = offset + (index * AT_ONCE) as u64;
            let (result, _) = worker.write(&self.file, at, IoBuf::copy_of(part).into()).await;
            result.map_err(|e| Error::from(e).on(&self.path))?;
        }
        Ok(())
    }

    /// Makes everything that was linked and everything that was freed durable, and everything written before with
    /// them; afterwards nothing is dirty. The caller is alone.
    pub(crate) async fn settle(self: &Arc<Self>, worker: &Worker) -> Result<()> {
        /// A commit, its releases, a commit of their decreases; more would be a bug.
        const ROUNDS: usize = 8;
        self.end_gathering(worker).await?;
        for _ in 0..ROUNDS {
            self.commit(worker).await?;
            self.releases_done().await;
            if !self.is_dirty() {
                break;
            }
        }
        self.barrier(worker, &self.file).await
    }
}
