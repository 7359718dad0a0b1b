//! Deleting a snapshot.

use crate::qcow2::space::metadata_map::Metadata;
use crate::qcow2::state::Qcow2;
use crate::{Error, ErrorKind, Remedy, Result};
use std::sync::Arc;
use zebu_qcow2::L1Entry;
use zebu_qcow2::snapshot::SnapshotEntry;
use zebu_storage::Worker;
use zebu_storage::sabotage::{self, Fault};

impl Qcow2 {
    /// Deletes the snapshot that `find` finds, and gives back what only it refers to.
    pub(crate) async fn delete_snapshot(
        self: &Arc<Self>,
        worker: &Worker,
        find: impl Fn(&[SnapshotEntry]) -> Option<usize>,
    ) -> Result<()> {
        self.check_may_have_snapshots()?;
        let table = self.snapshots();
        let index = find(table.entries())
            .ok_or_else(|| Error::new(ErrorKind::NotFound, "snapshot not found").on(self.path()))?;
        let mut entries = table.entries().to_vec();
        let entry = entries.remove(index);
        self.prepare_write(worker).await?;
        self.settle_first(worker).await?;
        let shared = self.read_snapshot_l1(worker, &entry).await?;
        let (table, table_len) = (entry.l1_table_offset, u64::from(entry.l1_size) * 8);
        self.space.check_own_table(table.0, table_len, Metadata::InactiveL1)?;
        let shared: Vec<u64> = shared.iter().map(|entry| L1Entry(*entry).with_copied(false).0).collect();
        self.announce_inconsistency(worker).await?;
        // From here on an error leaves the dirty bit: the next writer makes counts and flags right.
        if sabotage::is(Fault::LowerBeforeDeletion) {
            self.lower_all(worker, &shared).await?;
        }
        let replaced = self.replace_snapshots(worker, entries).await;
        replaced.map_err(|error| self.told_if_half_named(error))?;
        self.file().announce("cluster_free");
        let released = async {
            if !sabotage::is(Fault::LowerBeforeDeletion) {
                self.lower_all(worker, &shared).await?;
            }
            self.space.free_table(table.0, table_len);
            self.settle(worker).await?;
            self.refresh_copied(worker).await?;
            self.settle(worker).await?;
            self.end_inconsistency(worker).await
        }
        .await;
        released.map_err(|error| {
            let told = |why: &str| {
                format!(
                    "the snapshot is deleted, but not all of its space was given back: {why}; space may be leaked, and COPIED \
                     flags may be wrong, until the image is repaired"
                )
            };
            error.after_the_change(told).on(self.path()).with_remedy(Remedy::RepairLeaks)
        })
    }

    /// The error of a table that was not replaced, as far as that is known.
    fn told_if_half_named(&self, error: Error) -> Error {
        if self.check_writable().is_ok() {
            return error;
        }
        // The header on disk may name either table.
        let told = |why: &str| {
            format!(
                "it is not known whether the snapshot is deleted: {why}; the list of snapshots shows it when the image is \
                 opened again"
            )
        };
        error.after_the_change(told).on(self.path())
    }
}
