//! The state of a virtual machine, in the clusters past the end of its disk.
//!
//! A snapshot of a running machine keeps it there (the qcow2 document calls it VM state): it begins behind the last L2
//! table that the disk needs. The size of the disk does not count it, and neither do dirty bitmaps.

use crate::chain;
use crate::node::Node;
use crate::qcow2::state::Qcow2;
use crate::{Error, ErrorKind, Image, Result};
use std::sync::Arc;
use zebu_storage::{IoBufs, Worker};

/// Whether the L1 table may grow for a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Growth {
    Allowed,
    Needless,
}

impl Image {
    /// Writes `bufs` at `offset` bytes of the VM state. No other change is under way meanwhile.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`]: the format has no VM state, or the image has an external data file. A part may have been
    /// written otherwise.
    pub async fn write_vm_state(&self, worker: &Worker, offset: u64, bufs: IoBufs) -> Result<()> {
        let qcow2 = self.with_vm_state()?.clone();
        self.alone(worker, async move |me: &Image, on: &Worker| {
            me.0.check_open()?;
            qcow2.prepare_write(on).await?;
            let node = me.0.clone();
            let len = bufs.len() as u64;
            let write = async |at: u64| qcow2.write(&node, on, at, bufs).await.0;
            qcow2.at_vm_state(&node, on, offset, len, Growth::Allowed, write).await
        })
        .await
    }

    /// Reads `bufs.len()` bytes at `offset` bytes of the VM state; what nobody wrote reads as zero.
    ///
    /// # Errors
    /// As of [`Image::write_vm_state`].
    pub async fn read_vm_state(&self, worker: &Worker, offset: u64, bufs: IoBufs) -> Result<IoBufs> {
        let qcow2 = self.with_vm_state()?.clone();
        self.alone(worker, async move |me: &Image, on: &Worker| {
            me.0.check_open()?;
            let node = me.0.clone();
            let len = bufs.len() as u64;
            let read = async |at: u64| {
                let (result, bufs) = chain::read(&node, on, at, bufs).await;
                result.map(|()| bufs)
            };
            qcow2.at_vm_state(&node, on, offset, len, Growth::Needless, read).await
        })
        .await
    }

    fn with_vm_state(&self) -> Result<&Arc<Qcow2>> {
        let qcow2 = self.qcow2("VM state")?;
        if qcow2.data_file().is_some() {
            let message = "an image with an external data file has no room for VM state";
            return Err(Error::new(ErrorKind::Unsupported, message).on(self.path()));
        }
        Ok(qcow2)
    }
}

impl Qcow2 {
    /// Calls `transfer` with the place of `offset` bytes of the VM state. Until it has ended the disk counts as long enough,
    /// in memory alone. The caller is alone with the image.
    async fn at_vm_state<T>(
        self: &Arc<Self>,
        node: &Node,
        worker: &Worker,
        offset: u64,
        len: u64,
        growth: Growth,
        transfer: impl AsyncFnOnce(u64) -> Result<T>,
    ) -> Result<T> {
        let too_far = || {
            Error::new(ErrorKind::OutOfRange, "the VM state would reach too far")
                .with_errno(27)
                .on(&node.path)
        };
        let size = self.virtual_size();
        let per_table = self.geometry().cluster_size() * self.geometry().l2_entries();
        let start = size
            .div_ceil(per_table)
            .checked_mul(per_table)
            .and_then(|start| start.checked_add(offset))
            .ok_or_else(too_far)?;
        let end = start
            .checked_add(len)
            .and_then(|end| end.checked_next_multiple_of(self.geometry().cluster_size()))
            .ok_or_else(too_far)?;
        if growth == Growth::Allowed {
            self.make_room_in_l1(worker, end).await?;
        }
        self.count_as_long(end);
        let result = transfer(start).await;
        self.count_as_long(size);
        result
    }
}
