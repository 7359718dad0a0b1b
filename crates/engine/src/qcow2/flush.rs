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
}
