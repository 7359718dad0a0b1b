//! A write of guest data.

use crate::crypt::sectors::SectorOffsets;
use crate::node::Node;
use crate::qcow2::state::Qcow2;
use crate::qcow2::write::allocation::{Allocation, DataBarrier, Filled};
use crate::qcow2::write::plan::Plan;
use crate::{Error, ErrorKind, Result};
use std::sync::Arc;
use zebu_storage::sabotage::{self, Fault};
use zebu_storage::{IoBufs, Worker};

impl Qcow2 {
    /// Writes `bufs` at `guest`; the range lies on the disk.
    pub(crate) async fn write(
        self: &Arc<Self>,
        node: &Node,
        worker: &Worker,
        guest: u64,
        mut bufs: IoBufs,
    ) -> (Result<()>, IoBufs) {
        let mut done = IoBufs::new();
        let mut at = guest;
        while !bufs.is_empty() {
            let step = self.write_step(node, worker, at, &mut bufs, &mut done).await;
            let error = match step {
                Ok(len) => {
                    at += len;
                    continue;
                }
                Err(error) => error,
            };
            done.append(bufs);
            let is_full = error.kind() == ErrorKind::NoSpace;
            match if is_full { Box::pin(self.has_space_returned(worker)).await } else { Ok(false) } {
                Ok(true) => {
                    let mut whole = done;
                    done = whole.split_to((at - guest) as usize);
                    bufs = whole;
                }
                Ok(false) => return (Err(error.on(self.path()).at_guest(at)), done),
                Err(failed) => return (Err(failed.on(self.path()).at_guest(at)), done),
            }
        }
        self.wait_if_too_dirty(worker).await;
        (Ok(()), done)
    }

    async fn write_step(
        self: &Arc<Self>,
        node: &Node,
        worker: &Worker,
        at: u64,
        bufs: &mut IoBufs,
        done: &mut IoBufs,
    ) -> Result<u64> {
        let want = bufs.len() as u64;
        let (_inside, plan) = self.plan(worker, at, want).await?;
        match plan {
            Plan::InPlace { host, len } => {
                self.space.check_overlap(host, len, at)?;
                if host + len > self.data().len() {
                    Box::pin(self.ensure_file_covers(worker, host, len, at)).await?;
                }
                let part = bufs.split_to(len as usize);
                if !self.protection().is_none() {
                    let (result, written) =
                        Box::pin(self.write_protected(worker, SectorOffsets { host, guest: at }, part)).await;
                    done.append(written);
                    return result.map(|()| len);
                }
                let (result, written) = worker.write(self.data(), host, part).await;
                done.append(written);
                result.map_err(Error::from)?;
                Ok(len)
            }
            // Boxed, as all that is long and rare here: the task of a write in place stays small, and cheap to make.
            Plan::Allocated(allocation) => {
                let end = allocation.guest_range().end.min(at + want);
                let data = bufs.split_to((end - at) as usize);
                let (result, data) = Box::pin(self.fill_and_link(node, worker, allocation, at, data)).await;
                done.append(data);
                result.map(|()| end - at)
            }
        }
    }

    /// Writes guest data of an encrypted image at its place.
    pub(super) async fn write_protected(
        &self,
        worker: &Worker,
        place: SectorOffsets,
        bufs: IoBufs,
    ) -> (Result<()>, IoBufs) {
        self.protection().write(worker, self.data(), place, bufs).await
    }

    /// Writes the data of an allocation and links it.
    pub(super) async fn fill_and_link(
        self: &Arc<Self>,
        node: &Node,
        worker: &Worker,
        allocation: Allocation,
        at: u64,
        data: IoBufs,
    ) -> (Result<()>, IoBufs) {
        match self.fill(node, worker, &allocation, at, data).await {
            (Ok(filled), data) => (allocation.link(worker, filled).await, data),
            (Err(error), data) if sabotage::is(Fault::LinkAfterFailedWrite) => {
                let range = at..at + data.len() as u64;
                let filled = Filled::new(range, DataBarrier::Needed);
                (allocation.link(worker, filled).await.and(Err(error)), data)
            }
            (Err(error), data) => (Err(error), data),
        }
    }
}
