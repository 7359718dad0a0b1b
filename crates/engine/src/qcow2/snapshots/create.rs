//! Taking a snapshot.

use crate::error::format_error;
use crate::qcow2::snapshots::counts::Flags;
use crate::qcow2::snapshots::walk::entries_of;
use crate::qcow2::space::metadata_map::{MAX_SNAPSHOT_TABLE_CLUSTERS, Metadata};
use crate::qcow2::space::quarantine::FreeMode;
use crate::qcow2::state::Qcow2;
use crate::{Error, ErrorKind, Result};
use std::sync::Arc;
use std::time::Duration;
use zebu_qcow2::snapshot::{NewSnapshot, SnapshotEntry, next_id};
use zebu_qcow2::{FormatError, HostOffset, L1Entry, limits};
use zebu_storage::Worker;
use zebu_storage::sabotage::{self, Fault};

/// Bytes of a name at most: QEMU cuts longer ones off.
const MAX_NAME: usize = 255;

/// A new snapshot as the caller describes it.
#[derive(Debug, Clone)]
pub(crate) struct SnapshotRequest {
    name: Vec<u8>,
    /// Since 1970.
    date: Duration,
    vm_clock_nsec: u64,
    icount: Option<u64>,
}

impl SnapshotRequest {
    /// A snapshot of this name, taken so long after 1970 began.
    pub(crate) fn new(name: String, date: Duration, vm_clock_nsec: u64, icount: Option<u64>) -> Self {
        Self { name: name.into_bytes(), date, vm_clock_nsec, icount }
    }
}

impl Qcow2 {
    /// Fails if the image can't have snapshots.
    pub(super) fn check_may_have_snapshots(&self) -> Result<()> {
        if self.geometry().external_data {
            let message = "internal snapshots are not supported with an external data file";
            return Err(Error::new(ErrorKind::Unsupported, message).on(self.path()));
        }
        Ok(())
    }

    /// Takes a snapshot of what the disk holds now.
    pub(crate) async fn create_snapshot(
        self: &Arc<Self>,
        worker: &Worker,
        request: SnapshotRequest,
    ) -> Result<SnapshotEntry> {
        self.check_may_have_snapshots()?;
        if request.name.len() > MAX_NAME || request.name.contains(&0) {
            let message = format!("a snapshot's name has at most {MAX_NAME} bytes, none of them zero");
            return Err(Error::new(ErrorKind::InvalidArgument, message).on(self.path()));
        }
        self.prepare_write(worker).await?;
        let count = self.snapshots().entries().len();
        if count >= limits::MAX_SNAPSHOTS as usize {
            let error = FormatError::TooManySnapshots { count: count as u32 + 1 };
            return Err(format_error(self.path(), &error).with_errno(27));
        }
        self.check_tables_stay_few()?;
        self.settle_first(worker).await?;
        self.announce_inconsistency(worker).await?;
        match self.share_and_record(worker, request).await {
            Ok(entry) => {
                self.end_inconsistency(worker).await?;
                Ok(entry)
            }
            Err(error) => {
                // If the flags can't be mended now, the dirty bit stays, and the next writer mends them.
                if self.mend(worker).await.is_ok() {
                    self.end_inconsistency(worker).await?;
                }
                Err(error)
            }
        }
    }

    /// Refuses a snapshot whose L1 table would be too much for the next opening for writing.
    fn check_tables_stay_few(&self) -> Result<()> {
        let clusters = |entries: u64| (entries * 8).div_ceil(self.geometry().cluster_size());
        let table = self.snapshots();
        let old: u64 = table.entries().iter().map(|entry| clusters(entry.l1_size.into())).sum();
        if old + clusters(self.map.l1().table().len() as u64) > MAX_SNAPSHOT_TABLE_CLUSTERS {
            let message = format!(
                "the L1 tables of snapshots would take up more than {MAX_SNAPSHOT_TABLE_CLUSTERS} clusters: delete \
                 snapshots first, or convert to an image with larger clusters"
            );
            return Err(Error::new(ErrorKind::Unsupported, message).on(self.path()));
        }
        Ok(())
    }

    async fn share_and_record(
        self: &Arc<Self>,
        worker: &Worker,
        request: SnapshotRequest,
    ) -> Result<SnapshotEntry> {
        let l1 = self.map.l1();
        let mut shared = entries_of(l1.table());
        for entry in &mut shared {
            *entry = L1Entry(*entry).with_copied(false).0;
        }
        self.raise_all(worker, &shared, Flags::ClearCopied).await?;
        for (index, entry) in (0..).zip(&shared) {
            if l1.table().get(index) != *entry {
                l1.table().set(index, *entry);
            }
        }
        self.forget_mapping();
        let before = self.snapshots().entries().len();
        let recorded = self.record(worker, request, &shared).await;
        // A snapshot that the header names keeps its references, whatever failed afterwards.
        let is_named = self.snapshots().entries().len() > before;
        let is_useless = !is_named || sabotage::is(Fault::LowerNamedSnapshot);
        if recorded.is_err() && is_useless && self.check_writable().is_ok() {
            self.lower_all(worker, &shared).await?;
        }
        recorded
    }

    /// Writes the copy of the L1 table and the snapshot table that names it.
    async fn record(
        self: &Arc<Self>,
        worker: &Worker,
        request: SnapshotRequest,
        shared: &[u64],
    ) -> Result<SnapshotEntry> {
        let bits = self.geometry().cluster_bits;
        let l1_bytes: Vec<u8> = shared.iter().flat_map(|entry| entry.to_be_bytes()).collect();
        let clusters = (l1_bytes.len() as u64).div_ceil(self.geometry().cluster_size());
        let place = match clusters {
            0 => None,
            clusters => Some(self.allocate_metadata(worker, clusters).await?.into_range()),
        };
        let offset = place.as_ref().map_or(0, |place| place.start << bits);
        let table = self.snapshots();
        let entry = SnapshotEntry::new(NewSnapshot {
            id: next_id(table.entries()),
            name: request.name,
            l1_table_offset: HostOffset(offset),
            l1_size: shared.len() as u32,
            date_sec: u32::try_from(request.date.as_secs()).unwrap_or(u32::MAX),
            date_nsec: request.date.subsec_nanos(),
            disk_size: self.virtual_size(),
            vm_state_size: 0,
            vm_clock_nsec: request.vm_clock_nsec,
            icount: request.icount,
        });
        let recorded = async {
            let mut padded = l1_bytes;
            padded.resize((clusters << bits) as usize, 0);
            self.files.write_at(worker, offset, &padded).await?;
            let mut entries = table.entries().to_vec();
            entries.push(entry.clone());
            self.replace_snapshots(worker, entries).await?;
            self.space.note_metadata(offset, shared.len() as u64 * 8, Metadata::InactiveL1);
            self.settle(worker).await
        }
        .await;
        match recorded {
            Ok(()) => Ok(entry),
            Err(error) => {
                let is_recorded = self.snapshots().entries().len() > table.entries().len();
                if let Some(place) = place.filter(|_| !is_recorded) {
                    self.space.quarantine().push_unread(place, FreeMode::Reuse);
                }
                Err(error)
            }
        }
    }

    /// After a failure: makes what was raised and lowered again agree with the flags.
    async fn mend(self: &Arc<Self>, worker: &Worker) -> Result<()> {
        self.settle(worker).await?;
        self.refresh_copied(worker).await?;
        self.settle(worker).await
    }
}
