//! Allocating clusters without guest data: preallocation, and places for data that is cloned in.

use crate::chain;
use crate::node::Node;
use crate::options::Preallocation;
use crate::qcow2::grace::GraceGuard;
use crate::qcow2::state::Qcow2;
use crate::qcow2::write::{Allocation, DataBarrier, Filled, Plan};
use crate::{Error, ErrorKind, Result};
use std::ops::Range;
use std::sync::Arc;
use zebu_storage::{FsKind, IoErrorKind, Worker};

/// Guest bytes with a host range of their own, in which the caller puts their content before it links them.
pub(crate) struct Reserved<'a> {
    _inside: GraceGuard<'a>,
    pub(crate) guest: Range<u64>,
    /// Offset in the data file of `guest.start`.
    pub(crate) host: u64,
    allocation: Option<Allocation>,
    /// Whether the host range reads as zero.
    pub(crate) reads_zero: bool,
}

impl Reserved<'_> {
    /// Makes the content of the whole range visible.
    pub(crate) async fn link(self, worker: &Worker) -> Result<()> {
        match self.allocation {
            Some(allocation) => {
                allocation.link(worker, Filled { range: self.guest, barrier: DataBarrier::Needed }).await
            }
            None => Ok(()),
        }
    }
}

impl Qcow2 {
    /// Host space for `guest..guest + len` (whole clusters but for the end of the disk), or for the first part of it.
    pub(crate) async fn reserve<'a>(
        self: &'a Arc<Self>,
        worker: &Worker,
        guest: u64,
        len: u64,
    ) -> Result<Reserved<'a>> {
        let (inside, plan) = self.plan(worker, guest, len).await?;
        Ok(match plan {
            Plan::InPlace { host, len } => {
                self.check_overlap(host, len, guest)?;
                self.reach(worker, host, len, guest).await?;
                Reserved {
                    _inside: inside,
                    guest: guest..guest + len,
                    host,
                    allocation: None,
                    reads_zero: false,
                }
            }
            Plan::Allocated(allocation) => {
                let end = allocation.guest_range().end.min(guest + len);
                Reserved {
                    _inside: inside,
                    guest: guest..end,
                    host: allocation.host_of(guest),
                    reads_zero: allocation.reads_zero() || allocation.is_external(),
                    allocation: Some(allocation),
                }
            }
        })
    }

    /// Allocates every cluster of `range` that reads as zero now; it still does afterwards.
    pub(crate) async fn preallocate(
        self: &Arc<Self>,
        node: &Node,
        worker: &Worker,
        range: Range<u64>,
        mode: Preallocation,
    ) -> Result<()> {
        let mut at = range.start;
        while at < range.end {
            if node.backing.is_some() && !chain::is_zero(node, worker, at, range.end - at).await? {
                return Err(Error::new(
                    ErrorKind::InvalidArgument,
                    "Backing file and preallocation can only be used at the same time if the range reads as zero",
                )
                .on(&self.path));
            }
            let reserved = self.reserve(worker, at, range.end - at).await?;
            let (host, len) = (reserved.host, reserved.guest.end - reserved.guest.start);
            at = reserved.guest.end;
            let len = len.next_multiple_of(self.geometry.cluster_size());
            match mode {
                Preallocation::Off => return Ok(()),
                Preallocation::Metadata if reserved.reads_zero => {}
                Preallocation::Falloc if reserved.reads_zero => {
                    self.allocate_space(worker, host, len).await?;
                }
                _ => {
                    worker
                        .write_zero_bytes(self.data(), host, len)
                        .await
                        .map_err(|e| Error::from(e).on(&self.path))?;
                }
            }
            reserved.link(worker).await?;
            self.relieve(worker).await;
        }
        Ok(())
    }

    async fn allocate_space(&self, worker: &Worker, host: u64, len: u64) -> Result<()> {
        worker.allocate(self.data(), host, len).await.map_err(|e| {
            if e.kind != IoErrorKind::Unsupported {
                return Error::from(e).on(&self.path);
            }
            let fs = match self.data().fs() {
                FsKind::Tmpfs => "tmpfs",
                FsKind::Btrfs => "btrfs",
                _ => "this file system",
            };
            let message = format!("{fs} can't reserve space (fallocate); use preallocation=full or metadata");
            Error::new(ErrorKind::Unsupported, message).on(&self.path)
        })
    }
}
