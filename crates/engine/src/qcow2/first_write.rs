//! What must be done before the first write of an opening.
//!
//! Autoclear bits say that something is consistent with the data as long as nobody who does not know the bit has
//! written. Unknown bits go before the first write. The raw-data bit stays, because writes keep it true, and so does that
//! of the bitmaps, if their directory can be read: those that record writes are marked in use. Durable before anything
//! else is written.

use crate::qcow2::header_block::{Patch, field};
use crate::qcow2::state::Qcow2;
use crate::{Error, Result};
use std::sync::atomic::Ordering::{Acquire, Release};
use zebu_qcow2::{Autoclear, Version};
use zebu_storage::Worker;

impl Qcow2 {
    /// Called before every change; does its work once.
    pub(crate) async fn before_write(&self, worker: &Worker) -> Result<()> {
        self.check_writable()?;
        if self.first_write_done.load(Acquire) {
            return Ok(());
        }
        Box::pin(self.prepare_first_write(worker)).await
    }

    async fn prepare_first_write(&self, worker: &Worker) -> Result<()> {
        let _turn = self.first_write_gate.enter().await;
        if self.first_write_done.load(Acquire) {
            return Ok(());
        }
        self.prepare_metadata(worker).await?;
        self.prepare_bitmaps(worker).await?;
        self.first_write_done.store(true, Release);
        Ok(())
    }

    /// Called before a change that no guest sees: bitmaps that record what guests write need not be in use for it.
    pub(crate) async fn before_metadata_write(&self, worker: &Worker) -> Result<()> {
        self.check_writable()?;
        let _turn = self.first_write_gate.enter().await;
        self.prepare_metadata(worker).await
    }

    /// What is needed before anything is written. The gate of the first write is held.
    async fn prepare_metadata(&self, worker: &Worker) -> Result<()> {
        if self.metadata_prepared.load(Acquire) {
            return Ok(());
        }
        let mut kept = self.header.autoclear & Autoclear::RAW_EXTERNAL_DATA;
        if !self.bitmaps.is_empty() {
            kept |= self.header.autoclear & Autoclear::BITMAPS;
        }
        if self.geometry.version == Version::V3 && kept != self.header.autoclear {
            self.write_header(worker, &[Patch::U64(field::AUTOCLEAR, kept.bits())]).await?;
            worker.flush(&self.file).await.map_err(|e| Error::from(e).on(&self.path))?;
        }
        self.load_for_writing(worker).await?;
        self.round_file_up(worker).await?;
        self.note_bitmap_tables();
        self.metadata_prepared.store(true, Release);
        Ok(())
    }
}
