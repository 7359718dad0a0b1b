//! Replacing the snapshot table on disk.

use crate::Result;
use crate::error::format_error;
use crate::qcow2::header::block::{OnFailure, Patch, field};
use crate::qcow2::replace_table::{TableReplacement, Unnamed};
use crate::qcow2::snapshots::table::SnapshotTable;
use crate::qcow2::space::metadata_map::Metadata;
use crate::qcow2::state::Qcow2;
use std::sync::Arc;
use zebu_qcow2::snapshot::{SnapshotEntry, encode_table};
use zebu_storage::Worker;
use zebu_storage::sabotage::{self, Fault};

impl Qcow2 {
    /// The table as it is now.
    pub(crate) fn snapshots(&self) -> Arc<SnapshotTable> {
        self.snapshots.load()
    }

    /// Makes `entries` the snapshot table. The caller is alone.
    pub(super) async fn replace_snapshots(
        self: &Arc<Self>,
        worker: &Worker,
        entries: Vec<SnapshotEntry>,
    ) -> Result<()> {
        let bytes = encode_table(&entries).map_err(|e| format_error(self.path(), &e))?;
        let (len, count) = (bytes.len() as u64, u32::try_from(entries.len()).unwrap_or(u32::MAX));
        let (old_offset, old_len) = self.snapshots().place();
        let table = TableReplacement::new(bytes, Metadata::SnapshotTable, OnFailure::Poison);
        let make_durable = async || -> Result<()> {
            if sabotage::is(Fault::NameTableEarly) {
                return Ok(());
            }
            self.settle(worker).await
        };
        let switch = async |table: Unnamed<'_>| -> Result<()> {
            let offset = table.offset().unwrap_or(0);
            let patches =
                [Patch::U32(field::NB_SNAPSHOTS, count), Patch::U64(field::SNAPSHOTS_OFFSET, offset)];
            table.change_header(&patches).await?;
            self.snapshots.store(SnapshotTable::new(entries, offset, len));
            Ok(())
        };
        self.replace_table(worker, table.in_place_of(old_offset, old_len), make_durable, switch).await
    }
}
