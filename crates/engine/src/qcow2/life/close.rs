//! The end of an opening: commit, give back what was set aside, cut what was grown and not used.

use crate::qcow2::state::Qcow2;
use crate::{ErrorKind, Result};
use std::sync::Arc;
use zebu_storage::Worker;

impl Qcow2 {
    /// Makes everything durable and the image as small as it can be. The caller has no request under way.
    pub(crate) async fn close(self: &Arc<Self>, worker: &Worker) -> Result<()> {
        if !self.is_writable() {
            return Ok(());
        }
        if !self.header.preparation().is_metadata_done() {
            if !self.bitmaps.are_recovered() {
                return Ok(());
            }
            // Others are to find them as any bitmap.
            return match self.store_recovered(worker).await {
                Err(error) if error.kind() == ErrorKind::NoSpace => Ok(()),
                stored => stored,
            };
        }
        self.on_own_worker(worker, |me, on| async move { me.make_durable_and_small(&on).await }).await
    }

    async fn store_recovered(self: &Arc<Self>, worker: &Worker) -> Result<()> {
        self.before_metadata_write(worker).await?;
        self.on_own_worker(worker, |me, on| async move { me.make_durable_and_small(&on).await }).await
    }

    async fn make_durable_and_small(self: &Arc<Self>, worker: &Worker) -> Result<()> {
        self.check_writable()?;
        self.end_packing(worker).await?;
        // If that fails, the bitmaps stay in use; what guests wrote is made durable all the same.
        let bitmaps = self.close_bitmaps(worker).await;
        if self.check_writable().is_err() {
            return bitmaps;
        }
        self.space.drain_windows();
        self.commit_until_clean(worker).await?;
        self.space.cut_unused_growth(worker).await.and(bitmaps)
    }
}
