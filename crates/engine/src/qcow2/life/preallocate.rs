//! Allocating clusters without guest data: preallocation.

use crate::chain;
use crate::node::Node;
use crate::options::{Format, Preallocation, ZeroMode};
use crate::progress::{JobControl, Phase, Tracker};
use crate::qcow2::space::free::SpaceContent;
use crate::qcow2::state::Qcow2;
use crate::qcow2::write::zero::Clearing;
use crate::qcow2::write::{Allocation, DataBarrier, Filled, Plan};
use crate::reservation::Reservation;
use crate::sync::EpochGuard;
use crate::{Error, ErrorKind, Result};
use std::ops::Range;
use std::sync::Arc;
use zebu_qcow2::Version;
use zebu_storage::Worker;
use zebu_storage::sabotage::{self, Fault};

/// Guest bytes with a host range of their own, in which the caller puts their content before it links them.
pub(crate) struct Reserved<'a> {
    _inside: EpochGuard<'a>,
    guest: Range<u64>,
    /// Offset in the data file of `guest.start`.
    host: u64,
    allocation: Option<Allocation>,
}

impl Reserved<'_> {
    /// Makes the content of the whole range visible.
    pub(crate) async fn link(self, worker: &Worker) -> Result<()> {
        let range = self.guest.clone();
        self.link_filled(worker, range).await
    }

    /// Gives the clusters their places, and has them read as zero whatever these hold.
    async fn link_zeroes(self, worker: &Worker) -> Result<()> {
        match self.allocation {
            Some(allocation) => allocation.link(worker, Filled::with_zeroes(self.guest.clone())).await,
            None => Ok(()),
        }
    }

    /// Gives the clusters their places and makes nothing visible (with subclusters only).
    async fn link_place(self, worker: &Worker) -> Result<()> {
        let nothing = self.guest.start..self.guest.start;
        self.link_filled(worker, nothing).await
    }

    async fn link_filled(self, worker: &Worker, range: Range<u64>) -> Result<()> {
        match self.allocation {
            Some(allocation) => allocation.link(worker, Filled::new(range, DataBarrier::Needed)).await,
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
                self.space.check_overlap(host, len, guest)?;
                self.ensure_file_covers(worker, host, len, guest).await?;
                Reserved { _inside: inside, guest: guest..guest + len, host, allocation: None }
            }
            Plan::Allocated(allocation) => {
                let end = allocation.guest_range().end.min(guest + len);
                Reserved {
                    _inside: inside,
                    guest: guest..end,
                    host: allocation.host_of(guest),
                    allocation: Some(allocation),
                }
            }
        })
    }

    /// Gives every cluster of `range` that holds nothing a place of its own; all of it still reads as it did. Where
    /// `range` starts within a cluster, in which the disk ended, that one may hold something, or show what the backing
    /// image holds: it is left alone then.
    ///
    /// With subclusters a backing image shows through; without them a cluster that has a place hides it, so that it has
    /// to read as zero. `external`: what an external data file holds in `range`.
    pub(crate) async fn preallocate(
        self: &Arc<Self>,
        node: &Node,
        worker: &Worker,
        range: Range<u64>,
        mode: Preallocation,
        external: SpaceContent,
        control: &JobControl,
    ) -> Result<()> {
        if mode == Preallocation::Off {
            return Ok(());
        }
        let first = self.geometry().cluster_start(range.start);
        let tracker = Tracker::catching(control, Phase::Reserving, range.end.saturating_sub(first));
        let space = Reservation { worker, file: self.data(), format: Format::Qcow2, tracker: &tracker };
        let shows_through = node.backing.is_some() && self.geometry().extended_l2;
        let mut at = first;
        while at < range.end {
            tracker.check()?;
            let most = if at == first { self.geometry().cluster_size() } else { u64::MAX };
            let reserved = self.reserve(worker, at, (range.end - at).min(most)).await?;
            let guest = reserved.guest.clone();
            at = guest.end;
            let allocation = match &reserved.allocation {
                Some(allocation) if self.replaces_nothing(allocation)? => allocation,
                _ => {
                    tracker.advance(guest.end - guest.start);
                    continue;
                }
            };
            if node.backing.is_some()
                && !shows_through
                && !chain::is_zero(node, worker, guest.start, guest.end - guest.start).await?
            {
                if guest.start < range.start {
                    tracker.advance(guest.end - guest.start);
                    continue;
                }
                return Err(Error::new(
                    ErrorKind::InvalidArgument,
                    "Backing file and preallocation can only be used at the same time if extended_l2 is enabled, or \
                     if the range reads as zero",
                )
                .on(self.path())
                .at_guest(guest.start));
            }
            if !self.protection().is_none() && self.geometry().version == Version::V2 {
                // It has no zero clusters, and zeroes in the file would be decrypted to noise: encrypted zeroes are written.
                drop(reserved);
                self.write_zero_data(node, worker, guest.clone()).await?;
                tracker.advance(guest.end - guest.start);
                continue;
            }
            let content = if !allocation.is_external() {
                allocation.content()
            } else if guest.start < range.start && !sabotage::is(Fault::OldEndIsFresh) {
                // Before the old end there may be what a write left that was never linked.
                SpaceContent::Recycled
            } else {
                external
            };
            // What is behind subclusters that are not allocated nobody sees.
            let is_hidden = shows_through || !self.protection().is_none();
            self.set_aside(&space, &reserved, mode, is_hidden || content.reads_zero()).await?;
            if shows_through {
                reserved.link_place(worker).await?;
            } else if !self.protection().is_none() {
                // Zeroes in the file would be decrypted to noise.
                reserved.link_zeroes(worker).await?;
            } else {
                reserved.link(worker).await?;
            }
            self.wait_if_too_dirty(worker).await;
        }
        tracker.finish(None);
        tracker.check_reports()
    }

    /// Gives whole clusters their space as `mode` says, and zeroes unless they read as zero anyway.
    async fn set_aside(
        &self,
        space: &Reservation<'_>,
        reserved: &Reserved<'_>,
        mode: Preallocation,
        is_zero: bool,
    ) -> Result<()> {
        let host = reserved.host;
        let whole =
            (reserved.guest.end - reserved.guest.start).next_multiple_of(self.geometry().cluster_size());
        // An external data file ends with the disk.
        let len = if self.data_file().is_some() {
            whole.min(self.data().len().saturating_sub(host))
        } else {
            whole
        };
        if mode == Preallocation::Full {
            return space.write_zeroes(host..host + len).await;
        }
        if !is_zero {
            let unmap = Clearing::Zero(ZeroMode::Unmap);
            self.zero_in_data_file(space.worker, host..host + len, unmap).await?;
        }
        if mode == Preallocation::Falloc {
            return space.allocate(host..host + len).await;
        }
        space.tracker.advance(len);
        Ok(())
    }
}
