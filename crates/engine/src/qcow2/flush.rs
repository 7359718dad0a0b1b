//! A guest's flush.

use crate::Result;
use crate::qcow2::state::Qcow2;
use std::sync::Arc;
use zebu_storage::Worker;

impl Qcow2 {
    /// Makes everything that completed before the call durable.
    pub(crate) async fn flush(self: &Arc<Self>, worker: &Worker) -> Result<()> {
        if self.own_worker.get().is_none() {
            // Nothing was changed by this opening.
            return self.files.sync(worker).await;
        }
        if !self.compressed.packer().is_empty() {
            self.write_out(worker).await?;
        }
        self.commit(worker).await
    }

    /// Writes the mapping of everything that completed before the call.
    pub(crate) async fn write_back(self: &Arc<Self>, worker: &Worker) -> Result<()> {
        if self.own_worker.get().is_none() {
            // Nothing was changed by this opening.
            return Ok(());
        }
        if !self.compressed.packer().is_empty() {
            self.write_out(worker).await?;
        }
        loop {
            let failed = self.commit.failed();
            if self.map.is_dirty() {
                return self.commit(worker).await;
            }
            // What it froze is clean already, and dirty again if it fails.
            self.running_commit().await;
            if self.commit.failed() == failed {
                return Ok(());
            }
        }
    }
}
