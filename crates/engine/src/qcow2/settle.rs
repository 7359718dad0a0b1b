//! Making everything durable, and changes of the header that come after it.

use crate::qcow2::state::Qcow2;
use crate::sync::while_driven;
use crate::{Error, Result};
use std::sync::Arc;
use zebu_qcow2::Header;
use zebu_storage::Worker;
use zebu_storage::sabotage::{self, Fault};

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
    /// As [`Qcow2::free_what_waits`].
    pub(crate) async fn settle_first(self: &Arc<Self>, worker: &Worker) -> Result<()> {
        self.free_what_waits(worker).await?;
        self.settle(worker).await
    }

    /// Commits what was freed before, and waits until it has come back: the operation that follows does not wait for the reads
    /// that hold it.
    ///
    /// # Errors
    /// Failures of the file. `ErrorKind::Busy`: a read holds a release, and nobody drives its worker. What only takes long
    /// is waited for.
    pub(crate) async fn free_what_waits(self: &Arc<Self>, worker: &Worker) -> Result<()> {
        self.end_packing(worker).await?;
        self.commit(worker).await?;
        let releases = self.space.quarantine().releases_done();
        let releases = while_driven(worker, || self.readers().awaited(), releases);
        worker
            .shown(self.file(), "reads that hold space", releases)
            .await
            .ok_or_else(|| Error::undriven("the operation can't begin", "a read").on(self.path()))
    }

    /// As [`Qcow2::settle`], and gives back what was set aside, so that the file holds nothing that the image does not
    /// use. Later writes set space aside again. The caller is alone.
    ///
    /// # Errors
    /// As [`Qcow2::free_what_waits`].
    pub(crate) async fn settle_as_closed(self: &Arc<Self>, worker: &Worker) -> Result<()> {
        self.check_writable()?;
        if !self.header.preparation().is_metadata_done() {
            return Ok(());
        }
        self.free_what_waits(worker).await?;
        self.space.drain_windows();
        self.commit_until_clean(worker).await?;
        self.files.barrier(worker, self.file()).await
    }

    /// Changes the header on disk. Everything that was done before is durable before the change is, and the change is
    /// when this returns. What this opening knows of the header stays as it was: it is to be closed. The caller is
    /// alone.
    ///
    /// # Errors
    /// As [`Qcow2::free_what_waits`]; of `change`; failures of the file.
    pub(crate) async fn rewrite_header(
        self: &Arc<Self>,
        worker: &Worker,
        change: impl FnOnce(&mut Header) -> Result<()>,
    ) -> Result<()> {
        self.check_writable()?;
        if self.header.preparation().is_done() {
            if !sabotage::is(Fault::RenameBesideReads) {
                self.free_what_waits(worker).await?;
            }
            self.settle(worker).await?;
        }
        self.header.rewrite(worker, change).await
    }
}
