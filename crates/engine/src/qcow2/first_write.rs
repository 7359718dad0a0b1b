//! What must be done before the first write of an opening.
//!
//! Autoclear bits say that something is consistent with the data as long as nobody who does not know the bit has
//! written. zebu does not track bitmaps, so their bit goes before the first write, as unknown bits do; the raw-data
//! bit stays, because writes keep it true. Durable before anything else is written.

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
        let kept = self.header.autoclear & Autoclear::RAW_EXTERNAL_DATA;
        if self.geometry.version == Version::V3 && kept != self.header.autoclear {
            self.write_header(worker, &[Patch::U64(field::AUTOCLEAR, kept.bits())]).await?;
            worker.flush(&self.file).await.map_err(|e| Error::from(e).on(&self.path))?;
        }
        self.load_for_writing(worker).await?;
        self.round_file_up(worker).await?;
        self.first_write_done.store(true, Release);
        Ok(())
    }
}
