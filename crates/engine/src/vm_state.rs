//! The state of a virtual machine, in the clusters past the end of its disk.
//!
//! A snapshot of a running machine keeps it there (the qcow2 document calls it VM state): it begins behind the last L2
//! table that the disk needs. The size of the disk does not count it, and neither do dirty bitmaps. A backing image does not
//! show through it, however long that image is.
//!
//! Its place depends on the size of the disk: when that changes, the state of the disk in use may be lost. A growing disk drops
//! what it finds there, since a guest may not see it. A snapshot keeps its own.

use crate::chain::{self, CutOff};
use crate::node::Node;
use crate::options::ZeroMode;
use crate::qcow2::map::mapping::Run;
use crate::qcow2::state::Qcow2;
use crate::{Error, ErrorKind, Image, Result};
use std::ops::Range;
use std::sync::Arc;
use zebu_storage::sabotage::{self, Fault};
use zebu_storage::{IoBufs, Worker};

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
            let place = qcow2.vm_state_place(&me.0, offset, bufs.len() as u64)?;
            qcow2.make_room_in_l1(on, place.end).await?;
            let _longer = LongerDisk::to(&qcow2, place.end);
            qcow2.hide_backing(&me.0, on, place.clone()).await?;
            qcow2.write(&me.0, on, place.start, bufs).await.0
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
            let place = qcow2.vm_state_place(&me.0, offset, bufs.len() as u64)?;
            let _longer = LongerDisk::to(&qcow2, place.end);
            qcow2.read_own(&me.0, on, place.start, bufs).await
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
    /// The place of `len` bytes at `offset` of the VM state, as if it were on the disk.
    fn vm_state_place(&self, node: &Node, offset: u64, len: u64) -> Result<Range<u64>> {
        let per_table = self.geometry().guest_bytes_per_l2();
        let start = self.virtual_size().checked_next_multiple_of(per_table);
        let start = start.and_then(|start| start.checked_add(offset));
        // The last cluster counts as whole.
        let end = start.and_then(|start| start.checked_add(len)).filter(|end| {
            let whole = end.checked_next_multiple_of(self.geometry().cluster_size());
            whole.is_some_and(|end| i64::try_from(end).is_ok())
        });
        let (Some(start), Some(end)) = (start, end) else {
            let error = Error::new(ErrorKind::OutOfRange, "the VM state would reach too far");
            return Err(error.with_errno(27).on(&node.path));
        };
        Ok(start..end)
    }

    /// Zeroes the clusters of `place` that nobody wrote, if a backing image is long enough to show there.
    async fn hide_backing(self: &Arc<Self>, node: &Node, worker: &Worker, place: Range<u64>) -> Result<()> {
        let backed = node.backing.as_ref().map_or(0, |backing| backing.virtual_size());
        let cluster = self.geometry().cluster_size();
        let mut at = place.start / cluster * cluster;
        let end = place.end.next_multiple_of(cluster).min(backed.next_multiple_of(cluster));
        while at < end && !sabotage::is(Fault::VmStateShowsBacking) {
            let (run, len) = node.map(worker, at, end - at).await?;
            if run == Run::Unallocated {
                self.write_zeroes(node, worker, at, len, ZeroMode::Unmap).await?;
            }
            at += len;
        }
        Ok(())
    }

    /// Reads what the image itself has, zeroes where it has nothing.
    async fn read_own(&self, node: &Node, worker: &Worker, start: u64, mut bufs: IoBufs) -> Result<IoBufs> {
        let mut at = start;
        let mut read = IoBufs::new();
        while !bufs.is_empty() {
            let (run, len) = node.map(worker, at, bufs.len() as u64).await?;
            let mut part = bufs.split_to(len as usize);
            if run == Run::Unallocated && !sabotage::is(Fault::VmStateShowsBacking) {
                part.fill(0, len as usize, 0);
            } else {
                let result;
                (result, part) = chain::read(node, worker, at, part, CutOff::Fails).await;
                result?;
            }
            read.append(part);
            at += len;
        }
        Ok(read)
    }
}

/// A disk that counts as longer than it is, in memory alone and not for requests, until this is dropped.
#[must_use]
struct LongerDisk<'a> {
    qcow2: &'a Qcow2,
    size: u64,
}

impl<'a> LongerDisk<'a> {
    /// Has the disk reach to the end of the cluster of `end`. The caller is alone with the image.
    fn to(qcow2: &'a Qcow2, end: u64) -> Self {
        let size = qcow2.virtual_size();
        qcow2.set_reach(end.next_multiple_of(qcow2.geometry().cluster_size()));
        Self { qcow2, size }
    }
}

impl Drop for LongerDisk<'_> {
    fn drop(&mut self) {
        if !sabotage::is(Fault::KeepReach) {
            self.qcow2.set_reach(self.size);
        }
    }
}
