//! Filling clusters with blocks that another file holds, shared by the file system instead of copied.
//!
//! The order is that of a write: plan, data, link. Only the middle step differs.

use crate::Result;
use crate::qcow2::state::Qcow2;
use crate::qcow2::write::{DataBarrier, Filled, Plan};
use std::ops::Range;
use std::sync::Arc;
use zebu_storage::{File, IoError, Worker};

impl Qcow2 {
    /// Shares the blocks of `source` at `source_offset` into the guest range, which consists of whole clusters.
    /// Returns how many bytes were shared before the file system refused to share more, and why it did.
    ///
    /// Host clusters are aligned to the cluster size, so the file system can share if `source_offset` is aligned to
    /// its blocks and a cluster is not smaller than one.
    pub(crate) async fn share_from(
        self: &Arc<Self>,
        worker: &Worker,
        source: &File,
        source_offset: u64,
        guest: Range<u64>,
    ) -> Result<(u64, Option<IoError>)> {
        debug_assert!(self.geometry.cluster_start(guest.start) == guest.start);
        let mut at = guest.start;
        while at < guest.end {
            let from = source_offset + (at - guest.start);
            match self.share_step(worker, source, from, at..guest.end).await {
                Ok(Ok(len)) => at += len,
                Ok(Err(refusal)) => return Ok((at - guest.start, Some(refusal))),
                Err(error) => return Err(error.on(&self.path).at_guest(at)),
            }
        }
        self.relieve(worker).await;
        Ok((at - guest.start, None))
    }

    async fn share_step(
        self: &Arc<Self>,
        worker: &Worker,
        source: &File,
        from: u64,
        guest: Range<u64>,
    ) -> Result<Result<u64, IoError>> {
        let (_inside, plan) = self.plan(worker, guest.start, guest.end - guest.start).await?;
        match plan {
            Plan::InPlace { host, len } => {
                self.check_overlap(host, len, guest.start)?;
                Ok(worker.clone_range(source, from, self.data(), host, len).await.map(|()| len))
            }
            Plan::Allocated(allocation) => {
                let end = allocation.guest_range().end.min(guest.end);
                let (host, len) = (allocation.host_of(guest.start), end - guest.start);
                self.check_overlap(host, len, guest.start)?;
                if let Err(refusal) = worker.clone_range(source, from, self.data(), host, len).await {
                    return Ok(Err(refusal));
                }
                let filled = Filled { range: guest.start..end, barrier: DataBarrier::Needed };
                allocation.link(worker, filled).await?;
                Ok(Ok(len))
            }
        }
    }
}
