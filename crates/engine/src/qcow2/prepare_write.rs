//! Work before the first write of an opening.
//!
//! Autoclear bits say that something is consistent with the data as long as nobody who does not know the bit has
//! written. Unknown bits go before the first write. The raw-data bit stays, because writes keep it true, and so does that
//! of the bitmaps, if their directory can be read: those that record writes are marked in use. Durable before anything
//! else is written.

use crate::qcow2::header::block::{OnFailure, Patch, field};
use crate::qcow2::state::Qcow2;
use crate::{Error, Result};
use std::sync::Arc;
use zebu_qcow2::{Autoclear, L1Entry, Version};
use zebu_storage::sabotage::{self, Fault};
use zebu_storage::{FileKind, Worker};

impl Qcow2 {
    /// Called before every change; does its work once.
    pub(crate) async fn prepare_write(self: &Arc<Self>, worker: &Worker) -> Result<()> {
        self.check_writable()?;
        if self.header.preparation().is_done() {
            return Ok(());
        }
        Box::pin(self.on_own_worker(worker, |me, on| async move {
            let (metadata, data) =
                (async || me.prepare_metadata(&on).await, async || me.prepare_data(&on).await);
            me.header.preparation().for_data(metadata, data).await
        }))
        .await
    }

    /// Called before a change that no guest sees: bitmaps that record what guests write need not be in use for it.
    pub(crate) async fn before_metadata_write(self: &Arc<Self>, worker: &Worker) -> Result<()> {
        self.check_writable()?;
        self.on_own_worker(worker, |me, on| async move {
            me.header.preparation().for_metadata(async || me.prepare_metadata(&on).await).await
        })
        .await
    }

    /// Does what is needed before the disk changes.
    async fn prepare_data(self: &Arc<Self>, worker: &Worker) -> Result<()> {
        if self.backup_mark().is_some() && !sabotage::is(Fault::KeepBackupMark) {
            // It is no longer what that backup was.
            self.write_backup_mark(worker, None).await?;
        }
        self.prepare_bitmaps(worker).await
    }

    /// Does what is needed before anything is written.
    async fn prepare_metadata(&self, worker: &Worker) -> Result<()> {
        let autoclear = self.header.opened().autoclear;
        let mut kept = autoclear & Autoclear::RAW_EXTERNAL_DATA;
        if !self.bitmaps.is_empty() {
            kept |= autoclear & Autoclear::BITMAPS;
        }
        if self.geometry().version == Version::V3 && kept != autoclear {
            let patches = [Patch::U64(field::AUTOCLEAR, kept.bits())];
            self.header.change(worker, &patches, OnFailure::Restore).await?;
            worker.flush(self.file()).await.map_err(|e| Error::from(e).on(self.path()))?;
        }
        self.load_for_writing(worker).await?;
        self.space.round_file_up(worker).await?;
        self.cover_disk(worker).await?;
        self.note_bitmap_tables();
        Ok(())
    }

    /// Does what a first write needs and a read doesn't: reads the refcount table, and notes for the overlap check
    /// where all tables lie.
    async fn load_for_writing(&self, worker: &Worker) -> Result<()> {
        let l1 = self.map.l1();
        let tables = l1.table().iter_set().filter_map(|(_, entry)| L1Entry(entry).table());
        let tables = tables.map(|table| table.0);
        self.space.load(worker, self.header.opened(), tables, self.map.store()).await?;
        self.map.store().shrink_to_budget();
        Ok(())
    }

    /// Makes an external data file as long as the disk.
    async fn cover_disk(&self, worker: &Worker) -> Result<()> {
        if let Some(data_file) = self.data_file()
            && data_file.kind() != FileKind::BlockDevice
            && data_file.len() < self.virtual_size()
        {
            worker
                .set_len(data_file, self.virtual_size())
                .await
                .map_err(|e| Error::from(e).on(data_file.path()))?;
        }
        Ok(())
    }
}
