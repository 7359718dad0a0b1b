//! Guest clusters in flight, and linking them to their new places.

use crate::Result;
use crate::qcow2::cache::shard::ShardGuard;
use crate::qcow2::space::free::SpaceContent;
use crate::qcow2::space::quarantine::FreeMode;
use crate::qcow2::state::Qcow2;
use crate::sync::Wakers;
use smallvec::SmallVec;
use std::ops::Range;
use std::sync::Arc;
use zebu_qcow2::{HostOffset, L2Entry, Mapping};
use zebu_storage::Worker;
use zebu_storage::sabotage::{self, Fault};

/// Where the host clusters of an allocation come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Placement {
    /// New ones.
    New,
    /// The ones that the entries have: they only change state.
    Existing,
    /// The external data file, at the guest's own offset.
    External,
}

/// Guest clusters in flight, with the host clusters chosen for them. Dropped without [`Allocation::link`], the host
/// clusters go back and the guest clusters keep what they had.
pub(crate) struct Allocation {
    qcow2: Arc<Qcow2>,
    /// Guest cluster numbers.
    clusters: Range<u64>,
    /// Offset in the data file of the first cluster.
    host: u64,
    content: SpaceContent,
    placement: Placement,
    /// The entries as they were.
    old: SmallVec<[L2Entry; 1]>,
    linked: bool,
}

impl Allocation {
    /// Of guest clusters that were just marked in flight.
    pub(super) fn new(
        qcow2: Arc<Qcow2>,
        clusters: Range<u64>,
        host: u64,
        content: SpaceContent,
        placement: Placement,
        old: SmallVec<[L2Entry; 1]>,
    ) -> Self {
        Self { qcow2, clusters, host, content, placement, old, linked: false }
    }

    pub(super) fn placement(&self) -> Placement {
        self.placement
    }

    /// The entries as they were, each with the guest offset of its cluster.
    pub(super) fn old_entries(&self) -> impl Iterator<Item = (u64, L2Entry)> + '_ {
        let bits = self.qcow2.geometry().cluster_bits;
        (self.clusters.start..).map(move |cluster| cluster << bits).zip(self.old.iter().copied())
    }

    /// The entry of a guest cluster as it was.
    pub(super) fn old_entry(&self, cluster: u64) -> Option<L2Entry> {
        self.old.get((cluster - self.clusters.start) as usize).copied()
    }

    /// Offset in the data file for `guest`, which lies in the clusters.
    pub(crate) fn host_of(&self, guest: u64) -> u64 {
        self.host + (guest - (self.clusters.start << self.qcow2.geometry().cluster_bits))
    }

    /// Guest bytes of the clusters.
    pub(crate) fn guest_range(&self) -> Range<u64> {
        let bits = self.qcow2.geometry().cluster_bits;
        self.clusters.start << bits..self.clusters.end << bits
    }

    /// The content of the host clusters where nothing is written. Of an external data file nobody knows.
    pub(crate) fn content(&self) -> SpaceContent {
        self.content
    }

    /// Whether the place is the external data file.
    pub(crate) fn is_external(&self) -> bool {
        self.placement == Placement::External
    }

    /// Sets the entries for the guest bytes that were filled.
    pub(crate) async fn link(mut self, worker: &Worker, filled: Filled) -> Result<()> {
        let written = filled.range.clone();
        let qcow2 = self.qcow2.clone();
        let (mut shard, key, first) = qcow2.lock_slice(worker, self.guest_range().start).await?;
        if filled.barrier == DataBarrier::Needed && !sabotage::is(Fault::ForgetDataBarrier) {
            // Under the lock and before the change: whichever commit freezes the change sees the flag.
            qcow2.commit.need_data_barrier();
        }
        let geometry = qcow2.geometry();
        let entry_size = geometry.l2_entry_size as usize;
        let mut new_entries = vec![0; entry_size * self.old.len()];
        for (i, old) in self.old.iter().enumerate() {
            let guest = (self.clusters.start + i as u64) << geometry.cluster_bits;
            let host = HostOffset(self.host + ((i as u64) << geometry.cluster_bits));
            let entry = if geometry.extended_l2 {
                let subclusters = subclusters_in(&qcow2, &written, guest);
                // A cluster that leaves a place which it shares is filled whole, unless only a place is given to it.
                let fills_all = !written.is_empty() || sabotage::is(Fault::ShowEmptyPlace);
                let (alloc, zero) = match (self.placement, qcow2.decode(*old, guest)?) {
                    (Placement::New, Mapping::Subclusters { host: Some(_), .. }) if fills_all => {
                        (u32::MAX, 0)
                    }
                    (_, Mapping::Compressed(_)) => (u32::MAX, 0),
                    (_, Mapping::Subclusters { alloc, zero, .. }) => {
                        (alloc | subclusters, zero & !subclusters)
                    }
                    _ => (subclusters, 0),
                };
                let (alloc, zero) = match filled.content {
                    Content::Data => (alloc, zero),
                    Content::Zeroes => (alloc & !subclusters, zero | subclusters),
                };
                L2Entry::subclusters(Some(host), alloc, zero)
            } else if filled.content == Content::Zeroes {
                L2Entry::zero_allocated(host, geometry)
            } else {
                L2Entry::data(host, geometry)
            };
            let _ = entry.write(&mut new_entries, i, geometry);
        }
        qcow2.map.slices().change(&mut shard, key, first * entry_size, new_entries.len(), |b| {
            b.copy_from_slice(&new_entries);
        });
        if self.placement != Placement::Existing {
            for (i, old) in self.old.iter().enumerate() {
                qcow2.free_entry(
                    *old,
                    (self.clusters.start + i as u64) << geometry.cluster_bits,
                    FreeMode::Reuse,
                );
            }
        }
        self.linked = true;
        self.end_flight(shard);
        Ok(())
    }

    fn end_flight(&self, mut shard: ShardGuard<'_>) {
        let mut waiting = Wakers::default();
        for cluster in self.clusters.clone() {
            waiting = waiting.and(shard.in_flight().end(cluster));
        }
        drop(shard);
        if !sabotage::is(Fault::ForgetInFlightWaiters) {
            waiting.wake();
        }
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if self.linked {
            return;
        }
        let bits = self.qcow2.geometry().cluster_bits;
        if self.placement == Placement::New {
            let first = self.host >> bits;
            let fresh = sabotage::is(Fault::FailedWriteIsFresh);
            let then = if fresh { FreeMode::Untouched(SpaceContent::Fresh) } else { FreeMode::Reuse };
            self.qcow2
                .space
                .quarantine()
                .push(first..first + (self.clusters.end - self.clusters.start), then);
        }
        let (key, _) = self.qcow2.map.slice_of(self.clusters.start << bits);
        self.end_flight(self.qcow2.map.slices().lock(key));
    }
}

/// The subclusters of the cluster at `guest` that `range` touches, a bit each.
pub(super) fn subclusters_in(qcow2: &Qcow2, range: &Range<u64>, guest: u64) -> u32 {
    let bits = qcow2.geometry().subcluster_bits;
    let start = range.start.max(guest);
    let end = range.end.min(guest + qcow2.geometry().cluster_size());
    if start >= end {
        return 0;
    }
    let first = (start - guest) >> bits;
    let last = (end - 1 - guest) >> bits;
    (u32::MAX >> (31 - last)) & (u32::MAX << first)
}

/// Guest bytes that hold what they should, ready to be linked.
pub(crate) struct Filled {
    range: Range<u64>,
    barrier: DataBarrier,
    content: Content,
}

/// The way in which guest bytes hold what they should.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Content {
    /// By what was written.
    Data,
    /// By an entry that says that they are zero.
    Zeroes,
}

impl Filled {
    pub(crate) fn new(range: Range<u64>, barrier: DataBarrier) -> Self {
        Self { range, barrier, content: Content::Data }
    }

    /// Bytes that are zero whatever their space holds.
    pub(crate) fn with_zeroes(range: Range<u64>) -> Self {
        Self { range, barrier: DataBarrier::NotNeeded, content: Content::Zeroes }
    }
}

/// Whether bytes must be durable before the entry that shows them (invariant I3). Always needed, except when
/// fresh space replaces a range that read as zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DataBarrier {
    Needed,
    NotNeeded,
}
