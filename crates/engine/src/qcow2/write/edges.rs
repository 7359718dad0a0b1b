//! The surroundings of a write in its clusters: copied or zeroed heads and tails.

use crate::chain::{self, CutOff};
use crate::crypt::sectors::SectorOffsets;
use crate::node::Node;
use crate::options::ZeroPolicy;
use crate::qcow2::state::Qcow2;
use crate::qcow2::write::allocation::{Allocation, DataBarrier, Filled, Placement};
use crate::qcow2::write::padding::{Padding, padding};
use crate::{Error, Result};
use std::sync::Arc;
use zebu_qcow2::Mapping;
use zebu_storage::sabotage::{self, Fault};
use zebu_storage::{IoBuf, IoBufs, Worker};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Edge {
    Cluster,
    Subcluster,
    Nothing,
}

/// The bytes around a write.
struct Edges {
    start: u64,
    end: u64,
    head: Option<IoBuf>,
    tail: Option<IoBuf>,
    /// Zero the whole range first.
    zero_first: bool,
    barrier: DataBarrier,
}

impl Qcow2 {
    /// Writes `data` at `guest` into the allocation, with whatever has to be around it. Returns the guest bytes that
    /// hold what they should afterwards.
    pub(super) async fn fill(
        self: &Arc<Self>,
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
        let filled = Filled::new(edges.start..edges.end, edges.barrier);
        let write_start = if edges.head.is_some() { edges.start } else { guest };
        let host = allocation.host_of(write_start);
        let write_end = if edges.tail.is_some() { edges.end } else { end };
        if let Err(error) = self.space.check_overlap(host, write_end - write_start, guest) {
            return (Err(error), data);
        }
        if allocation.placement() == Placement::Existing
            && let Err(error) = self.ensure_file_covers(worker, host, write_end - write_start, guest).await
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
            let (on, file) = (worker.uncounted(), self.data().clone());
            drop(worker.spawn(async move { on.write(&file, host, IoBuf::copy_of(&bytes).into()).await }));
            drop(all.split_to(head_len));
            return (Ok(filled), all.split_to(data_len));
        }
        let (result, mut all) = if self.protection().is_none() {
            let (result, all) = worker.write(self.data(), host, all).await;
            (result.map_err(Error::from), all)
        } else {
            self.write_protected(worker, SectorOffsets { host, guest: write_start }, all).await
        };
        drop(all.split_to(head_len));
        let data = all.split_to(data_len);
        (result.map(|()| filled), data)
    }

    /// Finds the bytes that have to surround a write of `guest..end` in its clusters.
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
        // In an encrypted image, space that nobody wrote is noise to the guest.
        let reads_zero = allocation.content().reads_zero()
            && (self.protection().is_none() || sabotage::is(Fault::PlainPadding));
        let replaces_nothing = (self.protection().is_none() || sabotage::is(Fault::PlainBarrier))
            && allocation.placement() == Placement::New
            && allocation.content().is_fresh()
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
        let head_pad = if head_zero && !reads_zero { guest - head_from } else { 0 };
        let tail_pad = if tail_zero && !reads_zero { tail_to - end } else { 0 };
        let zero_policy =
            if self.protection().is_none() { self.disk.zero_policy() } else { ZeroPolicy::Write };
        match padding(zero_policy, self.data(), head_pad + tail_pad) {
            // In a cluster with subclusters in use, zeroing the whole range would wipe durable content before the new
            // one is there: a crash between the two would show neither.
            Padding::ZeroRange
                if !(allocation.placement() == Placement::Existing && self.geometry().extended_l2)
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
        Ok(allocation.placement() != Placement::External && self.replaces_nothing(allocation)?)
    }

    /// Whether none of the entries as they were refers to data.
    pub(crate) fn replaces_nothing(&self, allocation: &Allocation) -> Result<bool> {
        for (guest, old) in allocation.old_entries() {
            match self.decode(old, guest)? {
                Mapping::Unallocated | Mapping::Zero { .. } | Mapping::Subclusters { alloc: 0, .. } => {}
                _ => return Ok(false),
            }
        }
        Ok(true)
    }

    /// Where the bytes begin that must be right when a write from `guest` on is linked.
    fn edge_start(&self, allocation: &Allocation, guest: u64) -> Result<u64> {
        let cluster = self.geometry().cluster_start(guest);
        Ok(match self.edge_unit(allocation, guest)? {
            Edge::Cluster => cluster,
            Edge::Subcluster => guest & !(self.geometry().subcluster_size() - 1),
            Edge::Nothing => guest,
        })
    }

    fn edge_end(&self, allocation: &Allocation, end: u64) -> Result<u64> {
        if end & (self.geometry().subcluster_size() - 1) == 0
            && end & (self.geometry().cluster_size() - 1) == 0
        {
            return Ok(end);
        }
        Ok(match self.edge_unit(allocation, end)? {
            Edge::Cluster => self.geometry().cluster_start(end) + self.geometry().cluster_size(),
            Edge::Subcluster => end.next_multiple_of(self.geometry().subcluster_size()),
            Edge::Nothing => end,
        })
    }

    /// How much around an edge of a write at `guest` has to be made right.
    fn edge_unit(&self, allocation: &Allocation, guest: u64) -> Result<Edge> {
        let cluster = guest >> self.geometry().cluster_bits;
        let Some(old) = allocation.old_entry(cluster) else {
            return Ok(Edge::Nothing);
        };
        let mapping = self.decode(old, cluster << self.geometry().cluster_bits)?;
        Ok(match (allocation.placement(), mapping) {
            // Shared or compressed content moves whole.
            (Placement::New, Mapping::Subclusters { host: Some(_), .. }) | (_, Mapping::Compressed(_)) => {
                Edge::Cluster
            }
            (_, Mapping::Subclusters { alloc, .. }) => {
                let sub = (guest & (self.geometry().cluster_size() - 1)) >> self.geometry().subcluster_bits;
                if alloc >> sub & 1 == 1 { Edge::Nothing } else { Edge::Subcluster }
            }
            // Data that is only marked anew.
            (Placement::Existing, Mapping::Data { .. }) => Edge::Nothing,
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
        if allocation.placement() == Placement::External && self.is_raw_external() {
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
        let (result, bufs) = chain::read(node, worker, from, head.into(), CutOff::ReadsAsZero).await;
        if !sabotage::is(Fault::IgnoreFailedCopy) {
            result?;
        }
        let mut bufs = bufs.into_iter();
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
}
