//! The end of an opening: commit, give back what was set aside, cut what was grown and not used.

use crate::qcow2::state::Qcow2;
use crate::{Error, Result};
use std::sync::Arc;
use std::sync::atomic::Ordering::Acquire;
use zebu_storage::{FileKind, Worker};

/// Rounds until nothing is dirty: a commit, its releases, a commit of their decreases. More would be a bug.
const ROUNDS: usize = 8;

impl Qcow2 {
    /// Makes everything durable and the image as small as it can be. The caller has no request under way.
    pub(crate) async fn close(self: &Arc<Self>, worker: &Worker) -> Result<()> {
        if !self.writable || !self.metadata_prepared.load(Acquire) {
            return Ok(());
        }
        self.check_writable()?;
        self.end_gathering(worker).await?;
        // If that fails, the bitmaps stay in use; what guests wrote is made durable all the same.
        let bitmaps = self.close_bitmaps(worker).await;
        if self.check_writable().is_err() {
            return bitmaps;
        }
        self.drain_windows();
        for _ in 0..ROUNDS {
            self.commit(worker).await?;
            self.releases_done().await;
            if !self.is_dirty() {
                break;
            }
        }
        self.cut_unused_growth(worker).await.and(bitmaps)
    }

    /// Whether a commit has anything to do.
    pub(crate) fn is_dirty(&self) -> bool {
        self.l2.dirty_slices() > 0
            || self.refcounts.cache.dirty_slices() > 0
            || !self.freed().is_empty()
            || !self.new_tables().is_empty()
            || !self.refcounts.new_blocks().is_empty()
            || self.l1().table.is_dirty()
            || self.refcounts.table().table.is_dirty()
    }

    /// Removes free space at the end of the file, but nothing that was there at open.
    async fn cut_unused_growth(&self, worker: &Worker) -> Result<()> {
        if self.file.kind() == FileKind::BlockDevice {
            return Ok(());
        }
        let end = {
            let mut space = self.space();
            space.free.unpark();
            let used = space.free.tail(space.file_clusters).max(space.clusters_at_open);
            if used >= space.file_clusters {
                return Ok(());
            }
            let cut = used..space.file_clusters;
            space.free.remove(cut);
            space.file_clusters = used;
            used << self.geometry.cluster_bits
        };
        worker.set_len(&self.file, end).await.map_err(|e| Error::from(e).on(&self.path))
    }
}
