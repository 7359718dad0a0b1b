//! Filling clusters with what the backing image shows in them, so that the image has it itself.
//!
//! The content of the disk stays as it is; so no bitmap marks it, and no backup copies it before. It is a write that
//! takes only what has no entry: plan, data, link. The clusters are in flight from the plan on, and whoever changes
//! them waits for the link. What somebody changed before the plan has an entry, and is passed over.

use crate::Result;
use crate::chain::{self, CutOff};
use crate::node::Node;
use crate::qcow2::map::mapping::Run;
use crate::qcow2::state::Qcow2;
use crate::qcow2::write::allocation::{Allocation, subclusters_in};
use crate::qcow2::write::plan::Plan;
use std::ops::Range;
use std::sync::Arc;
use zebu_qcow2::Mapping;
use zebu_storage::Worker;
use zebu_storage::sabotage::{self, Fault};

/// Bytes that are copied at once.
const AT_ONCE: u64 = 1 << 20;

/// Bytes around a range that are filled with it: a cluster, but of large clusters with subclusters so much only.
const AROUND: u64 = 64 << 10;

/// A part of the disk that is done.
struct Step {
    len: u64,
    copied: bool,
}

impl Step {
    fn past(len: u64) -> Self {
        Self { len, copied: false }
    }
}

impl Qcow2 {
    /// Whether a part of the range has no entry.
    pub(crate) async fn has_gaps(&self, node: &Node, worker: &Worker, range: Range<u64>) -> Result<bool> {
        let _inside = self.readers().begin(worker).await;
        let mut at = range.start;
        while at < range.end {
            let (run, len) = node.map(worker, at, range.end - at).await?;
            if run == Run::Unallocated {
                return Ok(true);
            }
            at += len;
        }
        Ok(false)
    }

    /// Copies what the backing images hold in the range and around it, and the image does not; bytes that were
    /// copied. Runs that read as zero are left out.
    pub(crate) async fn fill_from_backing(
        self: &Arc<Self>,
        node: &Node,
        worker: &Worker,
        range: Range<u64>,
    ) -> Result<u64> {
        let unit = self.geometry().cluster_size().min(AROUND).max(self.geometry().subcluster_size());
        let end = range.end.next_multiple_of(unit).min(self.virtual_size());
        let mut at = range.start / unit * unit;
        let mut copied = 0;
        while at < end {
            let step = Box::pin(self.fill_step(node, worker, at..end)).await;
            let Step { len, copied: is_copied } = step.map_err(|e| e.on(self.path()).at_guest(at))?;
            copied += if is_copied { len } else { 0 };
            at += len;
        }
        if copied > 0 {
            self.wait_if_too_dirty(worker).await;
        }
        Ok(copied)
    }

    async fn fill_step(self: &Arc<Self>, node: &Node, worker: &Worker, range: Range<u64>) -> Result<Step> {
        let at = range.start;
        let len = match self.gap(node, worker, range).await? {
            Gap::None { len } => return Ok(Step::past(len)),
            Gap::Data { len } => len,
        };
        if sabotage::is(Fault::FillAsAGuest) {
            let (result, bufs) =
                chain::read(node, worker, at, worker.buffer(len as usize).into(), CutOff::Fails).await;
            result?;
            self.write(node, worker, at, bufs).await.0?;
            return Ok(Step { len, copied: true });
        }
        let early = if sabotage::is(Fault::FillFromEarlier) {
            Some(chain::read(node, worker, at, worker.buffer(len as usize).into(), CutOff::Fails).await.1)
        } else {
            None
        };
        let (_inside, plan) = self.plan(worker, at, len).await?;
        let allocation = match plan {
            // Somebody wrote there since.
            Plan::InPlace { len, .. } => return Ok(Step::past(len)),
            Plan::Allocated(allocation) => allocation,
        };
        let end = allocation.guest_range().end.min(at + len);
        if early.is_none() && !self.are_gaps(&allocation, at..end)? {
            // Somebody changed a part of it since. The next look finds what is left.
            return Ok(Step::past(0));
        }
        // Nothing of it is linked: the old mapping shows the backing image. Not before the plan: it may be changed until then.
        let bufs = if let Some(mut earlier) = early {
            earlier.split_to((end - at) as usize)
        } else {
            let buf = worker.buffer((end - at) as usize);
            let (result, bufs) = chain::read(node, worker, at, buf.into(), CutOff::Fails).await;
            result?;
            bufs
        };
        let (result, _) = self.fill_and_link(node, worker, allocation, at, bufs).await;
        result.map(|()| Step { len: end - at, copied: true })
    }

    /// The first run of `range` in which the image has nothing and its backing something, or has something itself.
    async fn gap(&self, node: &Node, worker: &Worker, range: Range<u64>) -> Result<Gap> {
        let _inside = self.readers().begin(worker).await;
        let (at, len) = (range.start, range.end - range.start);
        let (run, len) = node.map(worker, at, len).await?;
        let (Run::Unallocated, Some(backing)) = (run, &node.backing) else { return Ok(Gap::None { len }) };
        let unit = self.geometry().subcluster_size();
        let extent = chain::extent(backing, worker, at, len.min(AT_ONCE.max(unit)), CutOff::Fails).await?;
        let is_end = at + extent.len >= self.virtual_size();
        if extent.is_zero() {
            let whole = if is_end { extent.len } else { (at + extent.len) / unit * unit - at };
            if whole > 0 {
                return Ok(Gap::None { len: whole });
            }
        }
        Ok(Gap::Data { len: (at + extent.len).next_multiple_of(unit).min(at + len) - at })
    }

    /// Whether no entry of the allocation had anything in the range.
    fn are_gaps(&self, allocation: &Allocation, range: Range<u64>) -> Result<bool> {
        for (guest, old) in allocation.old_entries() {
            let is_gap = match self.decode(old, guest)? {
                Mapping::Unallocated => true,
                Mapping::Subclusters { alloc, zero, .. } => {
                    (alloc | zero) & subclusters_in(self, &range, guest) == 0
                }
                _ => false,
            };
            if !is_gap {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// The beginning of a range, as far as filling goes.
enum Gap {
    /// There is nothing to copy in so many bytes.
    None { len: u64 },
    /// So many bytes are to be copied: whole units, but for the end of the disk.
    Data { len: u64 },
}
