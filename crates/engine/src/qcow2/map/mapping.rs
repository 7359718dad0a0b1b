//! Looking guest offsets up: from L2 entries to runs of one kind.

use crate::chain::extents::MIN_UNITS;
use crate::chain::map::{ChainMap, DerivedFrom};
use crate::chain::place::{ClusterPlace, PlaceKind};
use crate::qcow2::cache::shard::Slice;
use crate::qcow2::cache::slice_cache::{Pattern, Pin};
use crate::qcow2::map::active_map::TableSource;
use crate::qcow2::space::metadata_map::Metadata;
use crate::qcow2::state::Qcow2;
use crate::{Error, ErrorKind, Result};
use std::sync::Arc;
use zebu_qcow2::{CompressedRange, EntryError, GuestOffset, L1Entry, L2Entry, Mapping};
use zebu_storage::Worker;
use zebu_storage::sabotage::{self, Fault, Limit};

/// Entries looked at on either side of a cluster for the length of its run.
const LONGEST_LOOK: usize = 1024;

fn longest_look() -> usize {
    sabotage::at_most(Limit::LongestLook, LONGEST_LOOK as u64) as usize
}

/// The mapping of a run of guest bytes in one image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Run {
    /// Nothing: look in the backing image.
    Unallocated,
    /// Zeroes; space may be kept at this file offset.
    Zero { host: Option<u64> },
    /// Data at this file offset.
    Data { host: u64 },
    /// A compressed cluster; the run lies within it.
    Compressed { stream: CompressedRange },
    /// Data at this offset of one of the files that the image consists of, beside the image file.
    Elsewhere { file: u32, host: u64 },
    /// A compressed unit of an image of another program; the run lies within it.
    Packed(zebu_foreign::Packed),
}

impl Run {
    /// Whether `next`, `len` bytes on, continues the run.
    fn continues_with(self, len: u64, next: Run) -> bool {
        match (self, next) {
            (Run::Unallocated, Run::Unallocated) | (Run::Zero { host: None }, Run::Zero { host: None }) => {
                true
            }
            (Run::Zero { host: Some(a) }, Run::Zero { host: Some(b) })
            | (Run::Data { host: a }, Run::Data { host: b }) => a + len == b,
            _ => false,
        }
    }
}

impl Qcow2 {
    /// The mapping of `guest` as the tables have it, and for how many bytes it holds (at most `max_len`).
    pub(crate) async fn map_tables(
        self: &Arc<Self>,
        worker: &Worker,
        guest: u64,
        max_len: u64,
    ) -> Result<(Run, u64)> {
        if let Some(chain_index) = self.map.chain() {
            chain_index.extents().top_up();
        }
        let mut _loaded = None;
        // A further turn follows if the tables were replaced in between.
        loop {
            if let Some(found) = self.map_cached(guest, max_len) {
                return found;
            }
            let index = self.map.l1_index(guest);
            if self.map.l1().table().get(index) == 0 {
                let per_table = self.geometry().guest_bytes_per_l2();
                // The end of the table's range may lie past 2^64.
                let rest = per_table - guest % per_table;
                return Ok((Run::Unallocated, rest.min(max_len)));
            }
            // Boxed, as what is long and rare: the task of a read that hits stays small.
            _loaded = Some(Box::pin(self.load_slice_of(worker, guest)).await?);
        }
    }

    /// The same from the cache alone; `None` if the slice is not there.
    pub(crate) fn map_cached(&self, guest: u64, max_len: u64) -> Option<Result<(Run, u64)>> {
        let (key, index) = self.map.slice_of(guest);
        let mut shard = self.map.slices().lock(key);
        let slice = self.map.slices().get(&mut shard, key)?;
        let found = self.run_in_slice(slice, index, guest, max_len);
        if let Some(chain_index) = self.map.chain()
            && chain_index.derived_from() == DerivedFrom::Tables
            && found.is_ok()
            && !chain_index.extents().has(guest >> self.geometry().cluster_bits)
        {
            self.index_run(chain_index, slice, index, guest);
        }
        Some(found)
    }

    /// Puts the run around entry `at` into the index if it is a long one. The slice's lock is held.
    pub(crate) fn index_run(&self, chain_index: &ChainMap, slice: &Slice, at: usize, guest: u64) {
        let unit = guest >> self.geometry().cluster_bits;
        let Some(place) = self.place_of(slice, at, unit) else { return };
        let cluster = self.geometry().cluster_size();
        let mut before = 0;
        while before < at.min(longest_look()) {
            let back = (before + 1) as u64;
            match self.place_of(slice, at - back as usize, unit - back) {
                Some(previous) if previous.advanced(back * cluster) == place => before += 1,
                _ => break,
            }
        }
        let mut after = 1;
        let last_unit = self.virtual_size().div_ceil(cluster);
        while at + after < (self.map.entries_per_slice() as usize).min(at + longest_look())
            && unit + (after as u64) < last_unit
        {
            match self.place_of(slice, at + after, unit + after as u64) {
                Some(next) if place.advanced(after as u64 * cluster) == next => after += 1,
                _ => break,
            }
        }
        if (before + after) as u64 >= MIN_UNITS {
            let place = match place.kind {
                PlaceKind::Zero => place,
                PlaceKind::Data { host, copied } => {
                    // In place only if the table is ours alone, too.
                    let copied =
                        copied && L1Entry(self.map.l1().table().get(self.map.l1_index(guest))).copied();
                    ClusterPlace {
                        kind: PlaceKind::Data { host: host - before as u64 * cluster, copied },
                        ..place
                    }
                }
            };
            chain_index.extents().insert(unit - before as u64..unit + after as u64, place);
        }
    }

    /// Where the whole cluster `unit` of entry `index` is, in an image that stands alone; `None` if it is not of one
    /// kind, or damaged.
    fn place_of(&self, slice: &Slice, index: usize, unit: u64) -> Option<ClusterPlace> {
        let entry = L2Entry::read(slice.bytes(), index, self.geometry())?;
        let kind = match self.decode(entry, unit << self.geometry().cluster_bits).ok()? {
            Mapping::Unallocated | Mapping::Zero { .. } | Mapping::Subclusters { alloc: 0, .. } => {
                PlaceKind::Zero
            }
            Mapping::Data { host, copied }
            | Mapping::Subclusters { host: Some(host), copied, alloc: u32::MAX, .. } => {
                PlaceKind::Data { host: host.0, copied }
            }
            Mapping::Subclusters { .. } | Mapping::Compressed(_) => return None,
        };
        Some(ClusterPlace { kind, depth: 0 })
    }

    fn run_in_slice(&self, slice: &Slice, mut index: usize, guest: u64, max_len: u64) -> Result<(Run, u64)> {
        let cluster = self.geometry().cluster_size();
        let in_cluster = guest & (cluster - 1);
        let (run, mut len) = self.run_in_cluster(slice, index, in_cluster, guest)?;
        while len < max_len && (guest + len) & (cluster - 1) == 0 && !matches!(run, Run::Compressed { .. }) {
            index += 1;
            if index as u64 >= self.map.entries_per_slice() {
                break;
            }
            // A damaged entry further on is the business of the request that reaches it.
            let Ok((next, next_len)) = self.run_in_cluster(slice, index, 0, guest + len) else { break };
            if !run.continues_with(len, next) {
                break;
            }
            len += next_len;
        }
        Ok((run, len.min(max_len)))
    }

    /// The run at `in_cluster` bytes into the cluster of entry `index`, within that cluster.
    fn run_in_cluster(&self, slice: &Slice, index: usize, in_cluster: u64, guest: u64) -> Result<(Run, u64)> {
        let entry = L2Entry::read(slice.bytes(), index, self.geometry()).unwrap_or(L2Entry::unallocated());
        let rest = self.geometry().cluster_size() - in_cluster;
        let mapping = self.decode(entry, guest - in_cluster)?;
        Ok(match mapping {
            Mapping::Unallocated => (Run::Unallocated, rest),
            Mapping::Zero { host, .. } => (Run::Zero { host: host.map(|h| h.0 + in_cluster) }, rest),
            Mapping::Data { host, .. } => (Run::Data { host: host.0 + in_cluster }, rest),
            Mapping::Compressed(stream) => (Run::Compressed { stream }, rest),
            Mapping::Subclusters { host, alloc, zero, .. } => {
                let bits = self.geometry().subcluster_bits;
                let first = (in_cluster >> bits) as u32;
                let kind = |sub: u32| (alloc >> sub & 1, zero >> sub & 1);
                let mut end = first + 1;
                while end < 32 && kind(end) == kind(first) {
                    end += 1;
                }
                let run = match (kind(first), host) {
                    ((1, _), Some(host)) => Run::Data { host: host.0 + in_cluster },
                    ((_, 1), host) => Run::Zero { host: host.map(|h| h.0 + in_cluster) },
                    _ => Run::Unallocated,
                };
                (run, (u64::from(end) << bits) - in_cluster)
            }
        })
    }

    /// Decodes an entry for the guest cluster at `guest`; a damaged one is an error of this request only.
    pub(crate) fn decode(&self, entry: L2Entry, guest: u64) -> Result<Mapping> {
        let corrupt = |e: EntryError| {
            Error::new(ErrorKind::Corrupt, format!("{e}; run zebu check")).on(self.path()).at_guest(guest)
        };
        let mapping = entry.decode(self.geometry()).map_err(corrupt)?;
        if let Mapping::Data { host, .. } | Mapping::Subclusters { host: Some(host), .. } = mapping
            && self.geometry().external_data
        {
            zebu_qcow2::l2::check_data_file_offset(host, GuestOffset(guest), self.geometry())
                .map_err(corrupt)?;
        }
        Ok(mapping)
    }

    /// Makes the slice that maps `guest` present, for as long as it is pinned; its table exists.
    pub(crate) async fn load_slice_of(self: &Arc<Self>, worker: &Worker, guest: u64) -> Result<Pin<'_>> {
        let (key, _) = self.map.slice_of(guest);
        if self.map.slices().note_miss(key) == Pattern::Sequential {
            self.read_ahead(worker, key);
        }
        self.map
            .slices()
            .ensure(worker, key, || self.read_slice(worker, key))
            .await
            .map_err(|e| e.at_guest(guest))
    }

    /// Has the slice that maps `guest` loaded if there is one; a failure is told to whoever wants it.
    pub(crate) async fn warm_up(&self, worker: &Worker, guest: u64) {
        let (key, _) = self.map.slice_of(guest);
        if self.map.l1().table().get(self.map.l1_index(guest)) != 0 && !self.map.slices().has(key) {
            let _ = self.map.slices().ensure(worker, key, || self.read_slice(worker, key)).await;
        }
    }

    async fn read_slice(&self, worker: &Worker, key: u64) -> Result<Box<[u8]>> {
        self.read_slices(worker, key, 1).await
    }

    /// The content of `count` slices that follow each other in one table.
    pub(crate) async fn read_slices(&self, worker: &Worker, key: u64, count: usize) -> Result<Box<[u8]>> {
        // The place that is read may belong to a table that was copied and is being given up.
        let _inside = (!sabotage::is(Fault::LoadOutsideGrace)).then(|| self.readers().enter(worker));
        let slice_bytes = self.map.slices().slice_bytes();
        let bytes = slice_bytes * count;
        let index = key / self.map.slices_per_table();
        let source = self.map.source_of(index);
        let table = match source {
            TableSource::New(copied_from) => copied_from,
            TableSource::Entry(entry) => entry
                .checked_table(self.geometry())
                .map_err(|e| {
                    let message = format!("{e} (L1 index: {index:#x}); run zebu check");
                    Error::new(ErrorKind::Corrupt, message).on(self.path())
                })?
                .map(|table| table.0),
        };
        let is_new = matches!(source, TableSource::New(_));
        let Some(table) = table else { return Ok(vec![0; bytes].into()) };
        let offset = table + key % self.map.slices_per_table() * slice_bytes as u64;
        if !is_new && offset >= self.file().len().max(1).next_multiple_of(self.geometry().cluster_size()) {
            let message = "L2 table lies outside the file; run zebu check";
            return Err(Error::new(ErrorKind::Corrupt, message).on(self.path()).at_host(offset));
        }
        if !is_new {
            let cluster = offset >> self.geometry().cluster_bits;
            let there = self.space.metadata().first_of(cluster..cluster + 1);
            if let Some((_, what)) = there.filter(|(_, what)| *what != Metadata::ActiveL2) {
                let message = format!("L2 table lies where the {} is; run zebu check", what.name());
                return Err(Error::new(ErrorKind::Corrupt, message).on(self.path()).at_host(offset));
            }
        }
        self.file().announce("l2_load");
        let (result, bufs) = worker.read(self.file(), offset, worker.buffer(bytes).into()).await;
        result.map_err(|e| Error::from(e).on(self.path()))?;
        let mut content = vec![0; bytes];
        bufs.copy_to(0, &mut content);
        Ok(content.into())
    }
}
