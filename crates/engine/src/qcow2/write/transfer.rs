//! Filling clusters from another file within the kernel: blocks that the file system shares, or copies itself.
//!
//! The order is that of a write: plan, data, link. Only the middle step differs.

use crate::qcow2::state::Qcow2;
use crate::qcow2::write::{DataBarrier, Filled, Plan};
use crate::transfer::{FileRange, Transfer, transfer};
use crate::{Error, Result};
use std::ops::Range;
use std::sync::Arc;
use zebu_storage::Worker;

impl Qcow2 {
    /// Moves `source` into the guest range of the same length, which consists of whole clusters. Returns how many
    /// bytes were moved before the file system refused to move more, and why it did.
    ///
    /// Host clusters are aligned to the cluster size, so blocks can be shared if the source's offset is aligned to
    /// those of the file system and a cluster is not smaller than one.
    pub(crate) async fn transfer_from(
        self: &Arc<Self>,
        worker: &Worker,
        how: Transfer,
        source: &FileRange,
        guest: Range<u64>,
    ) -> Result<(u64, Option<Error>)> {
        debug_assert!(self.geometry().cluster_start(guest.start) == guest.start);
        let mut at = guest.start;
        while at < guest.end {
            let rest = source.from(at - guest.start);
            match self.transfer_step(worker, how, &rest, at..guest.end).await {
                Ok(Ok(len)) => at += len,
                Ok(Err(refusal)) => return Ok((at - guest.start, Some(refusal))),
                Err(error) => return Err(error.on(self.path()).at_guest(at)),
            }
        }
        self.wait_if_too_dirty(worker).await;
        Ok((at - guest.start, None))
    }

    async fn transfer_step(
        self: &Arc<Self>,
        worker: &Worker,
        how: Transfer,
        source: &FileRange,
        guest: Range<u64>,
    ) -> Result<Result<u64>> {
        let (_inside, plan) = self.plan(worker, guest.start, guest.end - guest.start).await?;
        match plan {
            Plan::InPlace { host, len } => {
                self.space.check_overlap(host, len, guest.start)?;
                self.ensure_file_covers(worker, host, len, guest.start).await?;
                Ok(transfer(worker, how, &source.first(len), self.data(), host).await.map(|()| len))
            }
            Plan::Allocated(allocation) => {
                let end = allocation.guest_range().end.min(guest.end);
                let (host, len) = (allocation.host_of(guest.start), end - guest.start);
                self.space.check_overlap(host, len, guest.start)?;
                self.ensure_file_covers(worker, host, len, guest.start).await?;
                if let Err(refusal) = transfer(worker, how, &source.first(len), self.data(), host).await {
                    return Ok(Err(refusal));
                }
                let filled = Filled::new(guest.start..end, DataBarrier::Needed);
                allocation.link(worker, filled).await?;
                Ok(Ok(len))
            }
        }
    }
}
