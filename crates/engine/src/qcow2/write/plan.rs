//! The plan of a write: in place, or into clusters that are marked in flight.

use crate::chain::place::{ClusterPlace, PlaceKind};
use crate::qcow2::cache::shard::Shard;
use crate::qcow2::cache::slice_cache::Pin;
use crate::qcow2::space::alloc::WindowFor;
use crate::qcow2::space::free::{Allocated, SpaceContent};
use crate::qcow2::state::Qcow2;
use crate::qcow2::write::allocation::{Allocation, Placement, subclusters_in};
use crate::sync::{Moment, while_driven};
use crate::{Error, Result};
use smallvec::SmallVec;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;
use zebu_qcow2::Mapping;
use zebu_storage::Worker;
use zebu_storage::sabotage::{self, Fault};

/// Turns of a plan that can't be explained any more; assertions look for them.
const MOST_TURNS: u32 = 100_000;

/// The first step of a write.
pub(crate) enum Plan {
    /// Written where they are.
    InPlace { host: u64, len: u64 },
    /// Clusters are marked in flight; the data goes there.
    Allocated(Allocation),
}

/// An obstacle to a plan.
enum Obstacle {
    /// Another request allocates this guest cluster.
    InFlight { cluster: u64 },
    /// The stream needs a window.
    NeedsSpace { cluster: u64, count: u64 },
    /// Writes that were under way at this moment may still reach the place.
    StillReached { since: Moment },
}

/// Whether an allocation has failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Space {
    MayBeThere,
    IsGone,
}

/// How an entry takes a write of some of its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    InPlace { host: u64 },
    Existing { host: u64 },
    New,
}

impl Qcow2 {
    /// The place of a write in place at `guest`, as the chain's map knows it: host offset and
    /// length, at most `max_len`. The caller is inside a grace section.
    pub(crate) fn in_place_by_index(&self, guest: u64, max_len: u64) -> Option<(u64, u64)> {
        if self.has_packed(guest, max_len) {
            return None;
        }
        let (place, len) = self.map.chain()?.find(guest, max_len)?;
        match place {
            ClusterPlace { kind: PlaceKind::Data { host, copied: true }, depth: 0 } => Some((host, len)),
            _ => None,
        }
    }

    /// Plans the first step of a write of `len` bytes at `guest`. The guard is held until its I/O is complete.
    pub(crate) async fn plan<'a>(
        self: &'a Arc<Self>,
        worker: &Worker,
        guest: u64,
        len: u64,
    ) -> Result<(crate::sync::EpochGuard<'a>, Plan)> {
        let mut pin: Option<Pin<'_>> = None;
        // Memory for the index may cost slices, so it is asked for before the slice is there.
        let mut has_topped_up = false;
        // Another request may have allocated the cluster with the last space there was: a second look decides.
        let mut no_space = None;
        // Each turn but the last waits for something, or finds the slice that it loaded.
        let mut turns = 0;
        loop {
            turns += 1;
            debug_assert!(turns < MOST_TURNS, "a write at {guest} makes no progress");
            let obstacle = {
                let inside = self.readers().enter_to_write(worker);
                if let Some((host, len)) = self.in_place_by_index(guest, len) {
                    return Ok((inside, Plan::InPlace { host, len }));
                }
                if let Some(index) = self.map.chain().filter(|_| !has_topped_up) {
                    index.extents().top_up();
                    has_topped_up = !sabotage::is(Fault::LoadUnpinned);
                }
                let Some((mut shard, key, index)) = self.try_lock_slice(guest)? else {
                    drop(inside);
                    // No table is replaced beside a request that changes the image.
                    debug_assert!(pin.as_ref().is_none_or(Pin::holds), "a pinned slice was evicted");
                    pin = Some(Box::pin(self.prepare_slice(worker, guest)).await?);
                    continue;
                };
                if let Some(pin) = pin.take() {
                    pin.end(&mut shard);
                }
                let space = if no_space.is_some() { Space::IsGone } else { Space::MayBeThere };
                match self.plan_in_slice(&mut shard, key, index, guest, len, space)? {
                    Ok(plan) => return Ok((inside, plan)),
                    Err(obstacle) => obstacle,
                }
            };
            // No wait for another request or for space from within: those may wait for a grace period.
            match obstacle {
                Obstacle::InFlight { cluster } => {
                    Box::pin(self.wait_for_flight(worker, cluster)).await?;
                    no_space = None;
                }
                Obstacle::NeedsSpace { cluster, count } => match no_space {
                    Some(error) => return Err(error),
                    None => no_space = Box::pin(self.refill_window(worker, cluster, count)).await.err(),
                },
                Obstacle::StillReached { since } => Box::pin(self.wait_for_writes_of(worker, since)).await?,
            }
        }
    }

    /// Waits until the writes that were under way at a moment have ended.
    async fn wait_for_writes_of(self: &Arc<Self>, worker: &Worker, since: Moment) -> Result<()> {
        let passed = self.on_own_worker(worker, move |me, on| async move {
            me.readers().wait_for_writes_of(&on, since).await;
            Ok(())
        });
        let passed = while_driven(worker, || self.readers().writes_awaited(), passed);
        worker.shown(self.data(), "earlier writes into a cluster", passed).await.unwrap_or_else(|| {
            let unended = "a write that was under way when the cluster was zeroed";
            Err(Error::undriven("the cluster can't be written", unended))
        })
    }

    /// Waits until the guest cluster has no allocation in flight. A stream that was packed for it is written out:
    /// nothing else might do that soon.
    pub(crate) async fn wait_for_flight(self: &Arc<Self>, worker: &Worker, cluster: u64) -> Result<()> {
        let (key, _) = self.map.slice_of(cluster << self.geometry().cluster_bits);
        loop {
            let is_packed = poll_fn(|cx| {
                let mut shard = self.map.slices().lock(key);
                if self.compressed.packer().stream(cluster).is_some() {
                    return Poll::Ready(true);
                }
                if shard.in_flight().wait(cluster, cx.waker()) { Poll::Pending } else { Poll::Ready(false) }
            })
            .await;
            if !is_packed {
                return Ok(());
            }
            self.write_out(worker).await?;
        }
    }

    fn plan_in_slice(
        self: &Arc<Self>,
        shard: &mut Shard,
        key: u64,
        index: usize,
        guest: u64,
        len: u64,
        space: Space,
    ) -> Result<Result<Plan, Obstacle>> {
        let bits = self.geometry().cluster_bits;
        let end = (guest + len).min(self.map.slice_end(key));
        let first_cluster = guest >> bits;
        if shard.in_flight().contains(first_cluster) && !sabotage::is(Fault::AllocateTwice) {
            return Ok(Err(Obstacle::InFlight { cluster: first_cluster }));
        }
        let mut first = self.kind_of(shard, key, index, guest, end)?;
        // How many clusters take the write in the same way, one after the other on the host too.
        let mut clusters = 1;
        while (first_cluster + clusters) << bits < end
            && !shard.in_flight().contains(first_cluster + clusters)
        {
            let next =
                self.kind_of(shard, key, index + clusters as usize, (first_cluster + clusters) << bits, end);
            let ahead = clusters << bits;
            let continues = match (first, next) {
                (Kind::New, Ok(Kind::New)) => true,
                (Kind::InPlace { host: a }, Ok(Kind::InPlace { host: b }))
                | (Kind::Existing { host: a }, Ok(Kind::Existing { host: b })) => a + ahead == b,
                _ => false,
            };
            if !continues {
                break;
            }
            clusters += 1;
        }
        let run_end = ((first_cluster + clusters) << bits).min(end);
        if let Kind::InPlace { host } = first {
            // What the top image holds is what the chain holds, whichever slices the index is made of.
            if let (Some(extents), Some(slice)) = (self.map.chain(), self.map.slices().peek(shard, key)) {
                self.index_run(extents, slice, index, guest);
            }
            let host = host + (guest & (self.geometry().cluster_size() - 1));
            return Ok(Ok(Plan::InPlace { host, len: run_end - guest }));
        }
        let written = first_cluster..first_cluster + clusters;
        if (matches!(first, Kind::Existing { .. }) || self.geometry().external_data)
            && let Some(since) =
                shard.cleared().latest(&written, |moment| self.readers().have_writes_passed(moment))
            && !sabotage::is(Fault::WriteWhereOthersReach)
        {
            // With subclusters, others of the cluster may still be written where they are.
            let can_move = !self.geometry().external_data && !self.geometry().extended_l2;
            if !can_move || space == Space::IsGone {
                return Ok(Err(Obstacle::StillReached { since }));
            }
            first = Kind::New;
        }
        let (place, host, content, taken) = match first {
            Kind::Existing { host } => (Placement::Existing, host, SpaceContent::Recycled, clusters),
            _ if self.geometry().external_data => {
                (Placement::External, first_cluster << bits, SpaceContent::Recycled, clusters)
            }
            _ => match self.try_allocate(first_cluster, clusters) {
                Some(found) => {
                    let (range, content) = found.into_parts();
                    (Placement::New, range.start << bits, content, range.end - range.start)
                }
                None => return Ok(Err(Obstacle::NeedsSpace { cluster: first_cluster, count: clusters })),
            },
        };
        let mut old = SmallVec::new();
        for i in 0..taken {
            old.push(self.entry_in(shard, key, index + i as usize));
            shard.in_flight().begin(first_cluster + i);
        }
        let taken = first_cluster..first_cluster + taken;
        Ok(Ok(Plan::Allocated(Allocation::new(self.clone(), taken, host, content, place, old))))
    }

    /// How the cluster of entry `index` takes a write of its part of `guest..end`.
    fn kind_of(&self, shard: &mut Shard, key: u64, index: usize, guest: u64, end: u64) -> Result<Kind> {
        let cluster_start = self.geometry().cluster_start(guest);
        let mapping = self.decode(self.entry_in(shard, key, index), cluster_start)?;
        Ok(match mapping {
            Mapping::Data { host, copied } if copied || sabotage::is(Fault::WriteSharedInPlace) => {
                Kind::InPlace { host: host.0 }
            }
            Mapping::Data { host, .. } if self.geometry().external_data => Kind::Existing { host: host.0 },
            Mapping::Zero { host: Some(host), copied: true } => Kind::Existing { host: host.0 },
            Mapping::Subclusters { host: Some(host), copied, alloc, .. }
                if copied || self.geometry().external_data =>
            {
                let touched = subclusters_in(self, &(guest..end), cluster_start);
                if touched & !alloc == 0 && copied {
                    Kind::InPlace { host: host.0 }
                } else {
                    Kind::Existing { host: host.0 }
                }
            }
            _ => Kind::New,
        })
    }

    /// Host clusters for guest data from `guest_cluster` on, as many of `count` as follow each other. `None`: call
    /// [`Qcow2::refill_window`] and come again.
    fn try_allocate(&self, guest_cluster: u64, count: u64) -> Option<Allocated> {
        if self.compressed.packer().is_used() {
            // Beside streams, which come from all over the disk, plain clusters share their window: a window of
            // their own for each place would leave an image full of gaps.
            return self.space.try_allocate_compressed(count);
        }
        self.space.try_allocate_data(guest_cluster, count)
    }

    /// Sets up the window that [`Qcow2::try_allocate`] takes from. No lock is held and no epoch guard.
    async fn refill_window(self: &Arc<Self>, worker: &Worker, guest_cluster: u64, count: u64) -> Result<()> {
        if self.compressed.packer().is_used() {
            return self.make_room(worker).await;
        }
        self.refill(worker, WindowFor::Data { guest_cluster }, count).await
    }
}
