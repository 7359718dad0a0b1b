//! Zeroing and discarding: changes of the mapping, without data.

use crate::chain;
use crate::node::Node;
use crate::options::ZeroMode;
use crate::qcow2::space::quarantine::FreeMode;
use crate::qcow2::state::Qcow2;
use crate::{Error, Result};
use std::ops::Range;
use std::sync::Arc;
use zebu_qcow2::{L1Entry, L2Entry, Mapping, Version};
use zebu_storage::sabotage::{self, Fault};
use zebu_storage::{IoBuf, IoErrorKind, Worker};

/// Bytes of zeroes written at once where the mapping can't say it.
const ZEROES_AT_ONCE: u64 = 1 << 20;

/// The way of clearing a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Clearing {
    /// It reads as zero; its space may go or has to stay.
    Zero(ZeroMode),
    /// Its space may go; what can't be expressed stays as it is.
    Discard,
    /// Its mapping goes, whatever a backing image holds (the disk ends before it).
    Drop,
}

/// The change of an entry.
enum Change {
    Keep,
    Set(L2Entry),
    /// Not to be expressed in the entry: zeroes have to be written.
    WriteZeroes,
}

impl Qcow2 {
    /// Makes `guest..guest + len` read as zero, down to the byte.
    pub(crate) async fn write_zeroes(
        self: &Arc<Self>,
        node: &Node,
        worker: &Worker,
        guest: u64,
        len: u64,
        mode: ZeroMode,
    ) -> Result<()> {
        let end = guest + len;
        let unit = self.geometry().subcluster_size();
        let inner_start = guest.next_multiple_of(unit).min(end);
        // The last unit of the disk counts as whole.
        let inner_end = if end >= self.virtual_size() { end } else { end & !(unit - 1) }.max(inner_start);
        self.zero_edge(node, worker, guest..inner_start).await?;
        self.clear(node, worker, inner_start..inner_end, Clearing::Zero(mode)).await?;
        self.zero_edge(node, worker, inner_end..end).await?;
        self.wait_if_too_dirty(worker).await;
        Ok(())
    }

    /// Discards whole clusters (subclusters) of `guest..guest + len`.
    pub(crate) async fn discard(
        self: &Arc<Self>,
        node: &Node,
        worker: &Worker,
        guest: u64,
        len: u64,
    ) -> Result<()> {
        let end = guest + len;
        let unit = self.geometry().subcluster_size();
        let start = guest.next_multiple_of(unit);
        let end = if end >= self.virtual_size() { end } else { end & !(unit - 1) };
        if start < end {
            self.clear(node, worker, start..end, Clearing::Discard).await?;
            self.wait_if_too_dirty(worker).await;
        }
        Ok(())
    }

    /// Drops the mapping of `range` (whole clusters but for the end of the disk).
    pub(crate) async fn drop_mapping(
        self: &Arc<Self>,
        node: &Node,
        worker: &Worker,
        range: Range<u64>,
    ) -> Result<()> {
        self.clear(node, worker, range, Clearing::Drop).await
    }

    async fn zero_edge(self: &Arc<Self>, node: &Node, worker: &Worker, range: Range<u64>) -> Result<()> {
        if range.is_empty() {
            return Ok(());
        }
        // While the cluster is being filled its entry does not tell what it will read as: an earlier write in place may
        // have reached the same host cluster after the filling had zeroed it.
        let is_settled = !self.is_in_flight(range.start);
        if is_settled && chain::is_zero(node, worker, range.start, range.end - range.start).await? {
            return Ok(());
        }
        self.write_zero_data(node, worker, range).await
    }

    fn is_in_flight(&self, guest: u64) -> bool {
        let (key, _) = self.map.slice_of(guest);
        self.map.slices().lock(key).in_flight().contains(guest >> self.geometry().cluster_bits)
    }

    /// Writes zeroes as data.
    pub(crate) async fn write_zero_data(
        self: &Arc<Self>,
        node: &Node,
        worker: &Worker,
        range: Range<u64>,
    ) -> Result<()> {
        let mut at = range.start;
        while at < range.end {
            let len = (range.end - at).min(ZEROES_AT_ONCE);
            let (result, _) = self.write(node, worker, at, IoBuf::zeroed(len as usize).into()).await;
            result?;
            at += len;
        }
        Ok(())
    }

    async fn clear(
        self: &Arc<Self>,
        node: &Node,
        worker: &Worker,
        range: Range<u64>,
        what: Clearing,
    ) -> Result<()> {
        let mut at = range.start;
        while at < range.end {
            // Where no table exists and nothing shows through, there is nothing to do for the whole table's range.
            let index = self.map.l1_index(at);
            if L1Entry(self.map.l1().table().get(index)).table().is_none()
                && (!self.has_backing() || what == Clearing::Drop)
            {
                let per_table = self.geometry().guest_bytes_per_l2();
                at = (at / per_table + 1).saturating_mul(per_table);
                continue;
            }
            at = self.clear_in_slice(node, worker, at..range.end, what).await?;
        }
        Ok(())
    }

    /// Clears the part of `range` that the slice of its start maps; returns where the next part begins.
    async fn clear_in_slice(
        self: &Arc<Self>,
        node: &Node,
        worker: &Worker,
        range: Range<u64>,
        what: Clearing,
    ) -> Result<u64> {
        let bits = self.geometry().cluster_bits;
        let entry_size = self.geometry().l2_entry_size as usize;
        let mut write_zeroes = None;
        let mut data_ranges: Vec<Range<u64>> = Vec::new();
        let mut wait_for = None;
        let mut failed = None;
        let mut cleared_in_place: Option<Range<u64>> = None;
        let mut at = range.start;
        {
            let (mut shard, key, first) = self.lock_slice(worker, range.start).await?;
            let end = range.end.min(self.map.slice_end(key));
            while at < end {
                let cluster = at >> bits;
                if shard.in_flight().contains(cluster) {
                    wait_for = Some(cluster);
                    break;
                }
                let index = first + (cluster - (range.start >> bits)) as usize;
                let cluster_end = ((cluster + 1) << bits).min(end);
                let Some(old) = self
                    .map
                    .slices()
                    .peek(&mut shard, key)
                    .and_then(|s| L2Entry::read(s.bytes(), index, self.geometry()))
                else {
                    break;
                };
                let change = match self.clear_entry(old, at..cluster_end, what, &mut data_ranges) {
                    Ok(change) => change,
                    Err(error) => {
                        failed = Some(error);
                        break;
                    }
                };
                match change {
                    Change::Keep => {}
                    Change::WriteZeroes => {
                        write_zeroes = Some(at..cluster_end);
                        break;
                    }
                    Change::Set(new) => {
                        self.map.slices().change(&mut shard, key, index * entry_size, entry_size, |bytes| {
                            let _ = new.write(bytes, 0, self.geometry());
                        });
                        let old_host = old.host(self.geometry());
                        let has_left = old_host.is_some() && new.host(self.geometry()) != old_host;
                        if old.is_compressed() || (has_left && !self.geometry().external_data) {
                            self.free_entry(old, cluster << bits, after_clearing(what));
                        } else if old_host.is_some() {
                            cleared_in_place.get_or_insert(cluster..cluster).end = cluster + 1;
                        }
                    }
                }
                at = cluster_end;
            }
            // After the change: who enters from now on sees it.
            if let Some(clusters) = cleared_in_place
                && let Some(moment) = self.readers().moment_of_writes()
            {
                shard.cleared().note(clusters, moment, |moment| self.readers().have_writes_passed(moment));
            }
        }
        for range in data_ranges {
            self.zero_in_data_file(worker, range, what).await?;
        }
        if let Some(error) = failed {
            return Err(error);
        }
        if let Some(cluster) = wait_for {
            self.wait_for_flight(worker, cluster).await?;
        }
        if let Some(zeroes) = write_zeroes {
            at = zeroes.end;
            self.write_zero_data(node, worker, zeroes).await?;
        }
        Ok(at)
    }

    /// Clears `range` within an entry's cluster.
    fn clear_entry(
        &self,
        old: L2Entry,
        range: Range<u64>,
        what: Clearing,
        data_ranges: &mut Vec<Range<u64>>,
    ) -> Result<Change> {
        let geometry = self.geometry();
        let cluster_start = geometry.cluster_start(range.start);
        let whole = range.start == cluster_start
            && (range.end == cluster_start + geometry.cluster_size() || range.end >= self.virtual_size());
        let mapping = self.decode(old, cluster_start)?;
        if what == Clearing::Drop {
            return Ok(match mapping {
                Mapping::Unallocated => Change::Keep,
                // Until the header says that the disk is shorter, a crash shows these clusters: zeroes are then right
                // (the future content of what was cut off), the backing image's bytes under flushed data are not.
                // Version 2 has no way to say it.
                _ if self.has_backing() && geometry.version == Version::V3 => {
                    Change::Set(if geometry.extended_l2 {
                        L2Entry::subclusters(None, 0, u32::MAX)
                    } else {
                        L2Entry::zero_plain(geometry)
                    })
                }
                _ => Change::Set(L2Entry::unallocated()),
            });
        }
        let may_punch = self.protection().is_none() || sabotage::is(Fault::PunchEncrypted);
        if geometry.external_data && may_punch {
            // The data file itself is zeroed, so that it stays the truth; the entry keeps its place.
            let (mapped, nothing_shows) = match mapping {
                Mapping::Data { .. } => (true, false),
                Mapping::Subclusters { host, alloc, .. } => (host.is_some() && alloc != 0, false),
                Mapping::Zero { .. } => (false, true),
                _ => (false, !self.has_backing()),
            };
            if mapped || self.is_raw_external() {
                data_ranges.push(range.clone());
            }
            if !geometry.extended_l2 {
                return Ok(if mapped || nothing_shows {
                    Change::Keep
                } else {
                    Change::Set(L2Entry::zero_plain(geometry))
                });
            }
        }
        let keep_space = what == Clearing::Zero(ZeroMode::Keep) || geometry.external_data;
        Ok(match mapping {
            Mapping::Subclusters { host, copied, alloc, zero } => {
                let mask = self.subcluster_mask(&range, cluster_start);
                if !self.has_backing() && host.is_none() {
                    return Ok(Change::Keep);
                }
                let (alloc, zero) = (alloc & !mask, zero | mask);
                if alloc == 0 && zero == u32::MAX && !(keep_space && copied) {
                    return Ok(Change::Set(L2Entry::subclusters(None, 0, u32::MAX)));
                }
                Change::Set(L2Entry::subclusters(host, alloc, zero).with_copied(copied && host.is_some()))
            }
            Mapping::Unallocated if !self.has_backing() => Change::Keep,
            Mapping::Zero { host: None, .. } => Change::Keep,
            // Version 2 has no zero entries.
            _ if geometry.version == Version::V2 => match (self.has_backing(), what) {
                (false, _) if whole => Change::Set(L2Entry::unallocated()),
                (_, Clearing::Discard) => Change::Keep,
                _ => Change::WriteZeroes,
            },
            _ if !whole => match what {
                Clearing::Discard => Change::Keep,
                _ => Change::WriteZeroes,
            },
            Mapping::Data { host, copied: true } if keep_space => {
                Change::Set(L2Entry::zero_allocated(host, geometry))
            }
            Mapping::Zero { host: Some(_), copied: true } if keep_space => Change::Keep,
            _ if sabotage::is(Fault::ZeroShowsBacking) => Change::Set(L2Entry::unallocated()),
            _ if geometry.extended_l2 => Change::Set(L2Entry::subclusters(None, 0, u32::MAX)),
            _ => Change::Set(L2Entry::zero_plain(geometry)),
        })
    }

    fn subcluster_mask(&self, range: &Range<u64>, cluster_start: u64) -> u32 {
        let bits = self.geometry().subcluster_bits;
        let first = (range.start - cluster_start) >> bits;
        // Past the end of the disk nothing else is in the cluster.
        let last =
            if range.end >= self.virtual_size() { 31 } else { (range.end - 1 - cluster_start) >> bits };
        (u32::MAX >> (31 - last)) & (u32::MAX << first)
    }

    /// Makes `range` of the data file read as zero.
    pub(crate) async fn zero_in_data_file(
        &self,
        worker: &Worker,
        range: Range<u64>,
        what: Clearing,
    ) -> Result<()> {
        let (start, len) = (range.start, range.end - range.start);
        let unsupported = |e: zebu_storage::IoError| {
            if e.kind == IoErrorKind::Unsupported { Ok(()) } else { Err(Error::from(e).on(self.path())) }
        };
        if what != Clearing::Zero(ZeroMode::Keep) {
            match worker.punch_hole(self.data(), start, len).await {
                Ok(()) => return Ok(()),
                Err(e) => unsupported(e)?,
            }
        }
        match worker.zero_range(self.data(), start, len).await {
            Ok(()) => return Ok(()),
            Err(e) => unsupported(e)?,
        }
        worker.write_zero_bytes(self.data(), start, len).await.map_err(|e| Error::from(e).on(self.path()))
    }
}

/// The treatment of the space of a cleared cluster.
fn after_clearing(what: Clearing) -> FreeMode {
    match what {
        Clearing::Zero(ZeroMode::Keep) => FreeMode::Reuse,
        _ => FreeMode::Punch,
    }
}
