//! Going through the L2 tables of an L1 table, and what their entries refer to.

use crate::error::format_error;
use crate::qcow2::cache::resident_table::ResidentTable;
use crate::qcow2::read_tables::read_table;
use crate::qcow2::space::metadata_map::Metadata;
use crate::qcow2::state::Qcow2;
use crate::{Error, ErrorKind, Result};
use futures_util::future::try_join_all;
use zebu_qcow2::snapshot::SnapshotEntry;
use zebu_qcow2::{GuestOffset, L1Entry, L2Entry, Mapping};
use zebu_storage::Worker;
use zebu_storage::sabotage::{self, Fault, Limit};

/// Bytes of tables read at once.
const BYTES_AT_ONCE: u64 = 4 << 20;
/// Tables read at once at most.
const TABLES_AT_ONCE: u64 = 32;

impl Qcow2 {
    /// The L1 table of a snapshot as it is on disk.
    pub(super) async fn read_snapshot_l1(&self, worker: &Worker, entry: &SnapshotEntry) -> Result<Vec<u64>> {
        entry.check_l1(self.geometry()).map_err(|e| format_error(self.path(), &e))?;
        if entry.l1_size > 0 && entry.l1_table_offset.0 >= self.file().len() {
            let message = "the snapshot's L1 table lies outside the file; run zebu check";
            return Err(Error::new(ErrorKind::Corrupt, message)
                .on(self.path())
                .at_host(entry.l1_table_offset.0));
        }
        let table =
            ResidentTable::new(entry.l1_size as usize, self.map.l1().table().block_bytes(), self.map.store());
        read_table(worker, self.file(), entry.l1_table_offset.0, &table).await?;
        Ok(entries_of(&table))
    }
}

/// An L2 table as it is on disk.
pub(super) struct Table {
    /// Index of its L1 entry.
    pub(super) l1_index: u64,
    /// Offset in the file, bytes.
    pub(super) host: u64,
    pub(super) bytes: Vec<u8>,
}

/// Walks the tables of `entries`, which are those of an L1 table, a chunk at a time. The order is always the same.
pub(super) struct Walk<'a> {
    qcow2: &'a Qcow2,
    entries: &'a [u64],
    next: usize,
}

impl<'a> Walk<'a> {
    pub(super) fn new(qcow2: &'a Qcow2, entries: &'a [u64]) -> Self {
        Self { qcow2, entries, next: 0 }
    }

    /// The next tables; none at the end.
    pub(super) async fn next(&mut self, worker: &Worker) -> Result<Vec<Table>> {
        let geometry = self.qcow2.geometry();
        let most = sabotage::at_most(Limit::TablesAtOnce, TABLES_AT_ONCE);
        let at_once = (BYTES_AT_ONCE / geometry.cluster_size()).clamp(1, most) as usize;
        let mut wanted = Vec::with_capacity(at_once);
        while wanted.len() < at_once
            && let Some(entry) = self.entries.get(self.next)
        {
            let l1_index = self.next as u64;
            self.next += 1;
            let table = L1Entry(*entry).checked_table(geometry).map_err(|e| {
                let message = format!("{e} (L1 index: {l1_index:#x}); run zebu check");
                Error::new(ErrorKind::Corrupt, message).on(self.qcow2.path())
            })?;
            if let Some(table) = table {
                wanted.push((l1_index, table.0));
            }
        }
        let qcow2 = self.qcow2;
        let reads = wanted.into_iter().map(|(l1_index, host)| async move {
            let bytes = qcow2.read_whole_table(worker, host).await?;
            Ok::<_, Error>(Table { l1_index, host, bytes })
        });
        try_join_all(reads.collect::<Vec<_>>()).await
    }
}

impl Table {
    /// Calls `f` with each entry, its index and what it means.
    pub(super) fn for_each(&self, qcow2: &Qcow2, mut f: impl FnMut(usize, L2Entry, Mapping)) -> Result<()> {
        let geometry = qcow2.geometry();
        for index in 0..geometry.l2_entries() as usize {
            let Some(entry) = L2Entry::read(&self.bytes, index, geometry) else { break };
            if entry == L2Entry::unallocated() {
                continue;
            }
            // The offset is only told in errors; that of VM state may lie past what can be addressed.
            let guest = geometry.guest_offset(self.l1_index, index as u64).unwrap_or(GuestOffset(0));
            f(index, entry, qcow2.decode(entry, guest.0)?);
        }
        Ok(())
    }

    /// Appends the host clusters that the table refers to, and its own; one that is referred to twice comes twice. A damaged
    /// entry may lead to metadata, which is not the snapshot's to count or to free: that is left out.
    pub(super) fn push_references(&self, qcow2: &Qcow2, clusters: &mut Vec<u64>) -> Result<()> {
        let bits = qcow2.geometry().cluster_bits;
        let metadata = qcow2.space.metadata();
        let other = |cluster: u64| {
            let found = metadata.first_of(cluster..cluster + 1).map(|(_, what)| what);
            found.filter(|_| !sabotage::is(Fault::TakeMetadata))
        };
        let own = self.host >> bits;
        if other(own).is_none_or(|what| what == Metadata::ActiveL2) {
            clusters.push(own);
        }
        self.for_each(qcow2, |_, _, mapping| {
            let data = match mapping {
                Mapping::Compressed(stream) => stream.host_clusters(qcow2.geometry()),
                mapping => host_of(&mapping).map_or(0..0, |host| host >> bits..(host >> bits) + 1),
            };
            clusters.extend(data.filter(|cluster| other(*cluster).is_none()));
        })
    }

    /// Clears the COPIED flag of every entry; whether any had it.
    pub(super) fn clear_copied(&mut self, qcow2: &Qcow2) -> bool {
        let geometry = qcow2.geometry();
        let mut changed = false;
        for index in 0..geometry.l2_entries() as usize {
            if let Some(entry) = L2Entry::read(&self.bytes, index, geometry)
                && entry.copied()
                && !entry.is_compressed()
            {
                changed |= entry.with_copied(false).write(&mut self.bytes, index, geometry).is_ok();
            }
        }
        changed
    }
}

/// The host offset of an entry that owns a whole cluster, whether it holds data or is kept for it.
pub(super) fn host_of(mapping: &Mapping) -> Option<u64> {
    match mapping {
        Mapping::Data { host, .. }
        | Mapping::Zero { host: Some(host), .. }
        | Mapping::Subclusters { host: Some(host), .. } => Some(host.0),
        _ => None,
    }
}

/// All entries of an L1 table.
pub(super) fn entries_of(table: &ResidentTable) -> Vec<u64> {
    let mut entries = vec![0; table.len()];
    for (index, entry) in table.iter_set() {
        if let Some(place) = entries.get_mut(index) {
            *place = entry;
        }
    }
    entries
}

impl Qcow2 {
    /// An L2 table as it is on disk.
    async fn read_whole_table(&self, worker: &Worker, host: u64) -> Result<Vec<u8>> {
        let len = self.geometry().cluster_size() as usize;
        if host >= self.file().len() {
            let message = "L2 table lies outside the file; run zebu check";
            return Err(Error::new(ErrorKind::Corrupt, message).on(self.path()).at_host(host));
        }
        let (result, bufs) = worker.read(self.file(), host, worker.buffer(len).into()).await;
        result.map_err(|e| Error::from(e).on(self.path()).at_host(host))?;
        let mut bytes = vec![0; len];
        bufs.copy_to(0, &mut bytes);
        Ok(bytes)
    }
}
