//! Making everything durable, and changes of the header that come after it.

use crate::qcow2::state::Qcow2;
use crate::sync::atomic::Ordering::Relaxed;
use crate::sync::with_long_patience;
use crate::{Error, Result};
use std::sync::Arc;
use zebu_qcow2::Header;
use zebu_storage::Worker;

impl Qcow2 {
    /// Makes everything that was linked and everything that was freed durable, and everything written before with
    /// them; afterwards nothing is dirty. The caller is alone.
    pub(crate) async fn settle(self: &Arc<Self>, worker: &Worker) -> Result<()> {
        self.end_packing(worker).await?;
        self.commit_until_clean(worker).await?;
        self.files.barrier(worker, self.file()).await
    }

    /// As [`Qcow2::settle`], for an operation that has changed nothing yet.
    ///
    /// # Errors
    /// Failures of the file. `ErrorKind::Busy`: a read keeps what was freed from coming back for half a minute.
    pub(crate) async fn settle_first(self: &Arc<Self>, worker: &Worker) -> Result<()> {
        self.end_packing(worker).await?;
        self.commit(worker).await?;
        let quarantine = self.space.quarantine();
        // A release that only takes long is waited for.
        while with_long_patience(worker, quarantine.releases_done()).await.is_none() {
            if self.releases_held_by_reads.load(Relaxed) > 0 {
                return Err(Error::undriven("the operation can't begin", "a read").on(self.path()));
            }
        }
        self.settle(worker).await
    }

    /// As [`Qcow2::settle`], and gives back what was set aside, so that the file holds nothing that the image does not
    /// use. Later writes set space aside again. The caller is alone.
    pub(crate) async fn settle_as_closed(self: &Arc<Self>, worker: &Worker) -> Result<()> {
        self.check_writable()?;
        if !self.header.preparation().is_metadata_done() {
            return Ok(());
        }
        self.end_packing(worker).await?;
        self.space.drain_windows();
        self.commit_until_clean(worker).await?;
        self.files.barrier(worker, self.file()).await
    }

    /// Changes the header on disk. Everything that was done before is durable before the change is, and the change is
    /// when this returns. What this opening knows of the header stays as it was: it is to be closed. The caller is
    /// alone.
    pub(crate) async fn rewrite_header(
        self: &Arc<Self>,
        worker: &Worker,
        change: impl FnOnce(&mut Header) -> Result<()>,
    ) -> Result<()> {
        self.check_writable()?;
        if self.header.preparation().is_done() {
            self.settle(worker).await?;
        }
        self.header.rewrite(worker, change).await
    }
}
