//! Going back to a snapshot.

use crate::qcow2::cache::resident_table::ResidentTable;
use crate::qcow2::header::block::{OnFailure, Patch, field};
use crate::qcow2::map::active_map::L1;
use crate::qcow2::replace_table::{TableReplacement, Unnamed};
use crate::qcow2::snapshots::counts::Flags;
use crate::qcow2::snapshots::walk::entries_of;
use crate::qcow2::space::metadata_map::Metadata;
use crate::qcow2::state::Qcow2;
use crate::{Error, ErrorKind, Remedy, Result};
use std::sync::Arc;
use zebu_qcow2::L1Entry;
use zebu_qcow2::snapshot::SnapshotEntry;
use zebu_storage::Worker;

impl Qcow2 {
    /// Makes the disk hold what it held when the snapshot that `find` finds was taken, its size included.
    pub(crate) async fn apply_snapshot(
        self: &Arc<Self>,
        worker: &Worker,
        find: impl Fn(&[SnapshotEntry]) -> Option<usize>,
    ) -> Result<()> {
        self.check_may_have_snapshots()?;
        if !self.bitmaps.info().is_empty() {
            // They would not know what changes; QEMU refuses too, and with this error.
            let message =
                "the image has dirty bitmaps, which an older state would make wrong: remove them first";
            return Err(Error::new(ErrorKind::Unsupported, message)
                .with_errno(16)
                .on(self.path())
                .with_remedy(Remedy::RemoveBitmap));
        }
        let table = self.snapshots();
        let entry = find(table.entries())
            .and_then(|index| table.entries().get(index))
            .ok_or_else(|| Error::new(ErrorKind::NotFound, "snapshot not found").on(self.path()))?;
        self.prepare_write(worker).await?;
        self.settle_first(worker).await?;
        let size = entry.disk_size().unwrap_or(self.virtual_size());
        let too_small = || {
            let message = "the snapshot's L1 table is too small for its disk; run zebu check";
            Error::new(ErrorKind::Corrupt, message).on(self.path())
        };
        let needed = self.geometry().l1_entries_for(size).ok_or_else(too_small)?;
        let mut shared = self.read_snapshot_l1(worker, entry).await?;
        if needed > shared.len() as u64 {
            return Err(too_small());
        }
        for entry in &mut shared {
            *entry = L1Entry(*entry).with_copied(false).0;
        }
        self.raise_all(worker, &shared, Flags::ClearCopied).await?;
        let before = match self.switch_to(worker, &shared, size).await {
            Ok(before) => before,
            Err(error) => {
                // A failure leaks space, nothing else.
                if self.check_writable().is_ok() {
                    let _ = self.lower_all(worker, &shared).await;
                }
                return Err(error);
            }
        };
        self.lower_all(worker, &before).await?;
        self.settle(worker).await
    }

    /// Makes `shared` the active L1 table, and `size` the size of the disk; returns the entries that were active, whose
    /// references are to be lowered. An error: nothing has changed, or nothing can be written any more.
    pub(super) async fn switch_to(
        self: &Arc<Self>,
        worker: &Worker,
        shared: &[u64],
        size: u64,
    ) -> Result<Vec<u64>> {
        let old = self.map.l1();
        let table = ResidentTable::new(shared.len(), old.table().block_bytes(), self.map.store());
        table.fill(0, &shared.iter().flat_map(|entry| entry.to_be_bytes()).collect::<Vec<u8>>());
        let mut new = TableReplacement::new(table.to_bytes(), Metadata::ActiveL1, OnFailure::Poison);
        if !shared.is_empty() {
            new = new.in_place_of(old.offset(), old.table().len() as u64 * 8);
        }
        let switch = async |new: Unnamed<'_>| -> Result<Vec<u64>> {
            let old_entries = entries_of(old.table());
            let offset = new.offset().unwrap_or(old.offset());
            let stopped = self.readers().stop(worker).await;
            let _stopped = stopped
                .ok_or_else(|| Error::undriven("the snapshot can't be applied", "a read").on(self.path()))?;
            new.change_header(&[
                Patch::U64(field::SIZE, size),
                Patch::U32(field::L1_SIZE, shared.len() as u32),
                Patch::U64(field::L1_OFFSET, offset),
            ])
            .await?;
            self.disk.set_size(size);
            self.map.replace_l1(L1::new(table, offset));
            self.map.slices().forget_all();
            Ok(old_entries)
        };
        let old_entries = self.replace_table(worker, new, async || self.settle(worker).await, switch).await?;
        for table in shared.iter().filter_map(|entry| L1Entry(*entry).table()) {
            self.space.note_metadata(table.0, 1, Metadata::ActiveL2);
        }
        Ok(old_entries)
    }
}
