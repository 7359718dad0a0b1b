//! Writing guest data: plan, data, link.
//!
//! 1. **plan**, under the lock of one slice: what is allocated and unshared is written in place. For the rest, host
//!    clusters are chosen and the guest clusters marked in flight; a request that overlaps waits for them.
//! 2. **data**, under no lock: one vectored write per run, with the copied head and tail merged into it.
//! 3. **link**, under the lock again: the entries are set, what they replaced goes into quarantine. If step 2
//!    failed, nothing is linked: the old content stays readable (invariant I4).

use crate::chain;
use crate::node::Node;
use crate::qcow2::padding::{Padding, padding};
use crate::qcow2::slices::Shard;
use crate::qcow2::space::Content;
use crate::qcow2::state::{AfterFree, Qcow2};
use crate::{Error, Result};
use smallvec::SmallVec;
use std::future::poll_fn;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Release;
use std::task::Poll;
use zebu_qcow2::{HostOffset, L2Entry, Mapping};
use zebu_storage::sabotage::{self, Fault};
use zebu_storage::{IoBuf, IoBufs, Worker};

/// What one step of a write does with the bytes from its start on.
pub(crate) enum Plan {
    /// Written where they are.
    InPlace { host: u64, len: u64 },
    /// Clusters are marked in flight; the data goes there.
    Allocated(Allocation),
}

/// What stands in the way of a plan.
enum Obstacle {
    /// Another request allocates this guest cluster.
    InFlight { cluster: u64 },
    /// The stream needs a window.
    NeedsSpace { cluster: u64, count: u64 },
}

/// Where the host clusters of an allocation come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
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
    content: Content,
    place: Place,
    /// The entries as they were.
    old: SmallVec<[L2Entry; 1]>,
    linked: bool,
}

impl Allocation {
    /// Offset in the data file for `guest`, which lies in the clusters.
    pub(crate) fn host_of(&self, guest: u64) -> u64 {
        self.host + (guest - (self.clusters.start << self.qcow2.geometry.cluster_bits))
    }

    /// Guest bytes of the clusters.
    pub(crate) fn guest_range(&self) -> Range<u64> {
        let bits = self.qcow2.geometry.cluster_bits;
        self.clusters.start << bits..self.clusters.end << bits
    }

    /// What the host clusters hold where nothing is written. Of an external data file nobody knows.
    pub(crate) fn content(&self) -> Content {
        self.content
    }

    /// Whether the place is the external data file.
    pub(crate) fn is_external(&self) -> bool {
        self.place == Place::External
    }

    /// Sets the entries for the guest bytes that were filled.
    pub(crate) async fn link(mut self, worker: &Worker, filled: Filled) -> Result<()> {
        let written = filled.range;
        let qcow2 = self.qcow2.clone();
        let (mut shard, key, first) = qcow2.lock_slice(worker, self.guest_range().start).await?;
        if filled.barrier == DataBarrier::Needed && !sabotage::is(Fault::ForgetDataBarrier) {
            // Under the lock and before the change: whichever commit freezes the change sees the flag.
            qcow2.needs_data_barrier.store(true, Release);
        }
        let geometry = &qcow2.geometry;
        let entry_size = geometry.l2_entry_size as usize;
        let mut new_entries = vec![0; entry_size * self.old.len()];
        for (i, old) in self.old.iter().enumerate() {
            let guest = (self.clusters.start + i as u64) << geometry.cluster_bits;
            let host = HostOffset(self.host + ((i as u64) << geometry.cluster_bits));
            let entry = if geometry.extended_l2 {
                let subclusters = subclusters_in(&qcow2, &written, guest);
                let (alloc, zero) = match (self.place, qcow2.decode(*old, guest)?) {
                    (Place::New, Mapping::Subclusters { host: Some(_), .. })
                    | (_, Mapping::Compressed(_)) => (u32::MAX, 0),
                    (_, Mapping::Subclusters { alloc, zero, .. }) => {
                        (alloc | subclusters, zero & !subclusters)
                    }
                    _ => (subclusters, 0),
                };
                L2Entry::subclusters(Some(host), alloc, zero)
            } else {
                L2Entry::data(host, geometry)
            };
            let _ = entry.write(&mut new_entries, i, geometry);
        }
        qcow2.l2.change(&mut shard, key, first * entry_size, new_entries.len(), |b| {
            b.copy_from_slice(&new_entries);
        });
        if self.place != Place::Existing {
            for (i, old) in self.old.iter().enumerate() {
                qcow2.free_entry(
                    *old,
                    (self.clusters.start + i as u64) << geometry.cluster_bits,
                    AfterFree::Reuse,
                );
            }
        }
        self.linked = true;
        self.end_flight(&mut shard);
        Ok(())
    }

    fn end_flight(&self, shard: &mut Shard) {
        for cluster in self.clusters.clone() {
            for waker in shard.in_flight.end(cluster) {
                if sabotage::is(Fault::ForgetInFlightWaiters) {
                    continue;
                }
                waker.wake();
            }
        }
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if self.linked {
            return;
        }
        let bits = self.qcow2.geometry.cluster_bits;
        if self.place == Place::New {
            let first = self.host >> bits;
            let fresh = sabotage::is(Fault::FailedWriteIsFresh);
            let then = if fresh { AfterFree::Untouched(Content::Fresh) } else { AfterFree::Reuse };
            self.qcow2.push_freed(first..first + (self.clusters.end - self.clusters.start), then);
        }
        let (key, _) = self.qcow2.slice_of(self.clusters.start << bits);
        let mut shard = self.qcow2.l2.lock(key);
        self.end_flight(&mut shard);
    }
}

/// The subclusters of the cluster at `guest` that `range` touches, a bit each.
fn subclusters_in(qcow2: &Qcow2, range: &Range<u64>, guest: u64) -> u32 {
    let bits = qcow2.geometry.subcluster_bits;
    let start = range.start.max(guest);
    let end = range.end.min(guest + qcow2.geometry.cluster_size());
    if start >= end {
        return 0;
    }
    let first = (start - guest) >> bits;
    let last = (end - 1 - guest) >> bits;
    (u32::MAX >> (31 - last)) & (u32::MAX << first)
}

/// How an entry takes a write of some of its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    InPlace { host: u64 },
    Existing { host: u64 },
    New,
}

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
            match step {
                Ok(len) => at += len,
                Err(error) => {
                    done.append(bufs);
                    return (Err(error.on(&self.path).at_guest(at)), done);
                }
            }
        }
        self.relieve(worker).await;
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
                self.check_overlap(host, len, at)?;
                if host + len > self.data().len() {
                    Box::pin(self.reach(worker, host, len, at)).await?;
                }
                let (result, written) = worker.write(self.data(), host, bufs.split_to(len as usize)).await;
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

    async fn fill_and_link(
        &self,
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
                let filled = Filled { range, barrier: DataBarrier::Needed };
                (allocation.link(worker, filled).await.and(Err(error)), data)
            }
            (Err(error), data) => (Err(error), data),
        }
    }

    /// Plans the first step of a write of `len` bytes at `guest`. The guard is held until its I/O is complete.
    pub(crate) async fn plan<'a>(
        self: &'a Arc<Self>,
        worker: &Worker,
        guest: u64,
        len: u64,
    ) -> Result<(crate::qcow2::grace::GraceGuard<'a>, Plan)> {
        loop {
            let obstacle = {
                let inside = self.grace.enter(worker.id());
                if let Some((host, len)) = self.in_place_by_index(guest, len) {
                    return Ok((inside, Plan::InPlace { host, len }));
                }
                if let Some(index) = &self.index {
                    index.extents().top_up();
                }
                let Some((mut shard, key, index)) = self.try_lock_slice(guest)? else {
                    drop(inside);
                    Box::pin(self.prepare_slice(worker, guest)).await?;
                    continue;
                };
                match self.plan_in_slice(&mut shard, key, index, guest, len)? {
                    Ok(plan) => return Ok((inside, plan)),
                    Err(obstacle) => obstacle,
                }
            };
            // No wait for another request or for space from within: those may wait for a grace period.
            match obstacle {
                Obstacle::InFlight { cluster } => Box::pin(self.wait_for_flight(worker, cluster)).await?,
                Obstacle::NeedsSpace { cluster, count } => {
                    Box::pin(self.refill_data(worker, cluster, count)).await?;
                }
            }
        }
    }

    /// Waits until the guest cluster has no allocation in flight. A stream that was gathered for it is written out:
    /// nothing else might do that soon.
    pub(crate) async fn wait_for_flight(self: &Arc<Self>, worker: &Worker, cluster: u64) -> Result<()> {
        let (key, _) = self.slice_of(cluster << self.geometry.cluster_bits);
        loop {
            let gathered = poll_fn(|cx| {
                let mut shard = self.l2.lock(key);
                if self.gatherer.stream(cluster).is_some() {
                    return Poll::Ready(true);
                }
                if shard.in_flight.wait(cluster, cx.waker()) { Poll::Pending } else { Poll::Ready(false) }
            })
            .await;
            if !gathered {
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
    ) -> Result<Result<Plan, Obstacle>> {
        let bits = self.geometry.cluster_bits;
        let end = (guest + len).min(self.slice_end(key));
        let first_cluster = guest >> bits;
        if shard.in_flight.contains(first_cluster) && !sabotage::is(Fault::AllocateTwice) {
            return Ok(Err(Obstacle::InFlight { cluster: first_cluster }));
        }
        let first = self.kind_of(shard, key, index, guest, end)?;
        // How many clusters take the write in the same way, one after the other on the host too.
        let mut clusters = 1;
        while (first_cluster + clusters) << bits < end && !shard.in_flight.contains(first_cluster + clusters)
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
            if let (Some(extents), Some(slice)) = (&self.index, self.l2.peek(shard, key)) {
                self.index_run(extents, slice, index, guest);
            }
            let host = host + (guest & (self.geometry.cluster_size() - 1));
            return Ok(Ok(Plan::InPlace { host, len: run_end - guest }));
        }
        let (place, host, content, taken) = match first {
            Kind::Existing { host } => (Place::Existing, host, Content::Recycled, clusters),
            _ if self.geometry.external_data => {
                (Place::External, first_cluster << bits, Content::Recycled, clusters)
            }
            _ => match self.try_allocate_data(first_cluster, clusters) {
                Some(found) => {
                    let taken = found.range.end - found.range.start;
                    (Place::New, found.range.start << bits, found.content, taken)
                }
                None => return Ok(Err(Obstacle::NeedsSpace { cluster: first_cluster, count: clusters })),
            },
        };
        let mut old = SmallVec::new();
        for i in 0..taken {
            old.push(self.entry_in(shard, key, index + i as usize));
            shard.in_flight.begin(first_cluster + i);
        }
        Ok(Ok(Plan::Allocated(Allocation {
            qcow2: self.clone(),
            clusters: first_cluster..first_cluster + taken,
            host,
            content,
            place,
            old,
            linked: false,
        })))
    }

    pub(crate) fn entry_in(&self, shard: &mut Shard, key: u64, index: usize) -> L2Entry {
        self.l2
            .peek(shard, key)
            .and_then(|slice| L2Entry::read(&slice.bytes, index, &self.geometry))
            .unwrap_or(L2Entry::unallocated())
    }

    /// How the cluster of entry `index` takes a write of its part of `guest..end`.
    fn kind_of(&self, shard: &mut Shard, key: u64, index: usize, guest: u64, end: u64) -> Result<Kind> {
        let cluster_start = self.geometry.cluster_start(guest);
        let mapping = self.decode(self.entry_in(shard, key, index), cluster_start)?;
        Ok(match mapping {
            Mapping::Data { host, copied } if copied || sabotage::is(Fault::WriteSharedInPlace) => {
                Kind::InPlace { host: host.0 }
            }
            Mapping::Data { host, .. } if self.geometry.external_data => Kind::Existing { host: host.0 },
            Mapping::Zero { host: Some(host), copied: true } => Kind::Existing { host: host.0 },
            Mapping::Subclusters { host: Some(host), copied, alloc, .. }
                if copied || self.geometry.external_data =>
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

    /// Writes `data` at `guest` into the allocation, with whatever has to be around it. Returns the guest bytes that
    /// hold what they should afterwards.
    async fn fill(
        &self,
        node: &Node,
        worker: &Worker,
        allocation: &Allocation,
        guest: u64,
        data: IoBufs,
    ) -> (Result<Filled>, IoBufs) {
        let end = guest + data.len() as u64;
        let edges = match self.edges(node, worker, allocation, guest, end).await {
            Ok(edges) => edges,
            Err(error) => return (Err(error), data),
        };
        let filled = Filled { range: edges.start..edges.end, barrier: edges.barrier };
        let write_start = if edges.head.is_some() { edges.start } else { guest };
        let host = allocation.host_of(write_start);
        let write_end = if edges.tail.is_some() { edges.end } else { end };
        if let Err(error) = self.check_overlap(host, write_end - write_start, guest) {
            return (Err(error), data);
        }
        if allocation.place == Place::Existing
            && let Err(error) = self.reach(worker, host, write_end - write_start, guest).await
        {
            return (Err(error), data);
        }
        if edges.zero_first {
            let (start, len) = (allocation.host_of(edges.start), edges.end - edges.start);
            if let Err(e) = worker.zero_range(self.data(), start, len).await {
                if e.kind != zebu_storage::IoErrorKind::Unsupported {
                    return (Err(e.into()), data);
                }
                if let Err(e) = worker.write_zero_bytes(self.data(), start, len).await {
                    return (Err(e.into()), data);
                }
            }
        }
        let (head_len, data_len) = ((guest - write_start) as usize, data.len());
        let mut all = edges.head.map_or_else(IoBufs::new, IoBufs::from);
        all.append(data);
        if let Some(tail) = edges.tail {
            all.push(tail);
        }
        if sabotage::is(Fault::LinkBeforeData) {
            let mut bytes = vec![0; all.len()];
            all.copy_to(0, &mut bytes);
            let (on, file) = (worker.clone(), self.data().clone());
            drop(worker.spawn(async move { on.write(&file, host, IoBuf::copy_of(&bytes).into()).await }));
            drop(all.split_to(head_len));
            return (Ok(filled), all.split_to(data_len));
        }
        let (result, mut all) = worker.write(self.data(), host, all).await;
        drop(all.split_to(head_len));
        let data = all.split_to(data_len);
        (result.map(|()| filled).map_err(Error::from), data)
    }

    /// What has to surround a write of `guest..end` in its clusters.
    async fn edges(
        &self,
        node: &Node,
        worker: &Worker,
        allocation: &Allocation,
        guest: u64,
        end: u64,
    ) -> Result<Edges> {
        let head_from = self.edge_start(allocation, guest)?;
        let tail_to = self.edge_end(allocation, end)?;
        let known_zero =
            sabotage::is(Fault::SkipCopy) || node.backing.is_none() && self.holds_nothing(allocation)?;
        let head_zero = known_zero
            || head_from == guest
            || self.reads_zero(node, worker, allocation, head_from, guest).await?;
        let tail_zero =
            known_zero || tail_to == end || self.reads_zero(node, worker, allocation, end, tail_to).await?;
        let replaces_nothing = allocation.place == Place::New
            && allocation.content.is_fresh()
            && head_zero
            && tail_zero
            && (known_zero || chain::is_zero(node, worker, guest, end - guest).await?);
        let barrier = if replaces_nothing { DataBarrier::NotNeeded } else { DataBarrier::Needed };
        let mut edges =
            Edges { start: head_from, end: tail_to, head: None, tail: None, zero_first: false, barrier };
        if !head_zero {
            edges.head = Some(self.read_old(node, worker, head_from, guest).await?);
        }
        if !tail_zero {
            edges.tail = Some(self.read_old(node, worker, end, tail_to).await?);
        }
        if sabotage::is(Fault::SkipPadding) {
            return Ok(edges);
        }
        let head_pad = if head_zero && !allocation.content.reads_zero() { guest - head_from } else { 0 };
        let tail_pad = if tail_zero && !allocation.content.reads_zero() { tail_to - end } else { 0 };
        match padding(self.zero_policy, self.data(), head_pad + tail_pad) {
            // In a cluster with subclusters in use, zeroing the whole range would wipe durable content before the new
            // one is there: a crash between the two would show neither.
            Padding::ZeroRange
                if !(allocation.place == Place::Existing && self.geometry.extended_l2)
                    || sabotage::is(Fault::ZeroUsedSubclusters) =>
            {
                edges.zero_first = true;
            }
            Padding::ZeroRange | Padding::Write => {
                if head_pad > 0 {
                    edges.head = Some(IoBuf::zeroed(head_pad as usize));
                }
                if tail_pad > 0 {
                    edges.tail = Some(IoBuf::zeroed(tail_pad as usize));
                }
            }
            Padding::None => {}
        }
        Ok(edges)
    }

    /// Whether the entries as they were hold no data at all: without a backing image they read as zero. (Of an external
    /// data file, the bytes count as they are.)
    fn holds_nothing(&self, allocation: &Allocation) -> Result<bool> {
        Ok(allocation.place != Place::External && self.replaces_nothing(allocation)?)
    }

    /// Whether none of the entries as they were refers to data.
    pub(crate) fn replaces_nothing(&self, allocation: &Allocation) -> Result<bool> {
        for (i, old) in allocation.old.iter().enumerate() {
            let guest = (allocation.clusters.start + i as u64) << self.geometry.cluster_bits;
            match self.decode(*old, guest)? {
                Mapping::Unallocated | Mapping::Zero { .. } | Mapping::Subclusters { alloc: 0, .. } => {}
                _ => return Ok(false),
            }
        }
        Ok(true)
    }

    /// Where the bytes begin that must be right when a write from `guest` on is linked.
    fn edge_start(&self, allocation: &Allocation, guest: u64) -> Result<u64> {
        let cluster = self.geometry.cluster_start(guest);
        Ok(match self.edge_unit(allocation, guest)? {
            Edge::Cluster => cluster,
            Edge::Subcluster => guest & !(self.geometry.subcluster_size() - 1),
            Edge::Nothing => guest,
        })
    }

    fn edge_end(&self, allocation: &Allocation, end: u64) -> Result<u64> {
        if end & (self.geometry.subcluster_size() - 1) == 0 && end & (self.geometry.cluster_size() - 1) == 0 {
            return Ok(end);
        }
        Ok(match self.edge_unit(allocation, end)? {
            Edge::Cluster => self.geometry.cluster_start(end) + self.geometry.cluster_size(),
            Edge::Subcluster => end.next_multiple_of(self.geometry.subcluster_size()),
            Edge::Nothing => end,
        })
    }

    /// How much around an edge of a write at `guest` has to be made right.
    fn edge_unit(&self, allocation: &Allocation, guest: u64) -> Result<Edge> {
        let cluster = guest >> self.geometry.cluster_bits;
        let Some(old) = allocation.old.get((cluster - allocation.clusters.start) as usize) else {
            return Ok(Edge::Nothing);
        };
        let mapping = self.decode(*old, cluster << self.geometry.cluster_bits)?;
        Ok(match (allocation.place, mapping) {
            // Shared or compressed content moves whole.
            (Place::New, Mapping::Subclusters { host: Some(_), .. }) | (_, Mapping::Compressed(_)) => {
                Edge::Cluster
            }
            (_, Mapping::Subclusters { alloc, .. }) => {
                let sub = (guest & (self.geometry.cluster_size() - 1)) >> self.geometry.subcluster_bits;
                if alloc >> sub & 1 == 1 { Edge::Nothing } else { Edge::Subcluster }
            }
            // Data that is only marked anew.
            (Place::Existing, Mapping::Data { .. }) => Edge::Nothing,
            _ => Edge::Cluster,
        })
    }

    async fn reads_zero(
        &self,
        node: &Node,
        worker: &Worker,
        allocation: &Allocation,
        from: u64,
        to: u64,
    ) -> Result<bool> {
        // An external raw data file is the truth even where no entry says so; its bytes count as they are.
        if allocation.place == Place::External && self.is_raw_external() {
            return Ok(false);
        }
        chain::is_zero(node, worker, from, to - from).await
    }

    /// The old content of `from..to`; past the end of the disk, zeroes.
    async fn read_old(&self, node: &Node, worker: &Worker, from: u64, to: u64) -> Result<IoBuf> {
        let mut buf = worker.buffer((to - from) as usize);
        let inside = to.min(self.virtual_size()).saturating_sub(from) as usize;
        if let Some(past_end) = buf.as_mut_slice().get_mut(inside..) {
            past_end.fill(0);
        }
        if inside == 0 {
            return Ok(buf);
        }
        let head = buf.split_to(inside);
        let (result, bufs) = chain::read(node, worker, from, head.into()).await;
        if !sabotage::is(Fault::IgnoreFailedCopy) {
            result?;
        }
        let mut bufs = bufs.0.into_iter();
        let Some(mut joined) = bufs.next() else { return Ok(buf) };
        for piece in bufs.chain(std::iter::once(buf)) {
            if let Err(piece) = joined.unsplit(piece) {
                // Pieces of one buffer always join; a copy is right all the same.
                let bytes = [joined.as_slice(), piece.as_slice()].concat();
                joined = IoBuf::copy_of(&bytes);
            }
        }
        Ok(joined)
    }

    /// Puts what `entry` refers to into quarantine; the entry was replaced under the lock that is still held.
    pub(crate) fn free_entry(&self, entry: L2Entry, guest: u64, then: AfterFree) {
        if self.geometry.external_data {
            return;
        }
        let (clusters, then) = match self.decode(entry, guest) {
            Ok(
                Mapping::Data { host, .. }
                | Mapping::Zero { host: Some(host), .. }
                | Mapping::Subclusters { host: Some(host), .. },
            ) => {
                let cluster = host.0 >> self.geometry.cluster_bits;
                (cluster..cluster + 1, then)
            }
            Ok(Mapping::Compressed(stream)) => (stream.host_clusters(&self.geometry), AfterFree::Reuse),
            _ => return,
        };
        // A damaged entry that leads to a table goes; the table stays: it is not data to give away.
        if self.metadata.overlap(clusters.clone()).is_none() || sabotage::is(Fault::SkipOverlapCheck) {
            self.push_freed(clusters, then);
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Edge {
    Cluster,
    Subcluster,
    Nothing,
}

/// What surrounds a write.
struct Edges {
    start: u64,
    end: u64,
    head: Option<IoBuf>,
    tail: Option<IoBuf>,
    /// Zero the whole range first.
    zero_first: bool,
    barrier: DataBarrier,
}

/// Guest bytes that hold what they should, ready to be linked.
pub(crate) struct Filled {
    pub(crate) range: Range<u64>,
    pub(crate) barrier: DataBarrier,
}

/// Whether bytes must be durable before the entry that shows them (invariant I3): all but the first write of zeroes'
/// place into fresh space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DataBarrier {
    Needed,
    NotNeeded,
}
