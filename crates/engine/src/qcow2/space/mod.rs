//! Host space: what is free, the windows that are cut from it, reference counts, and what waits to become free.

pub(crate) mod alloc;
mod counting;
pub(crate) mod free;
mod free_again;
pub(crate) mod frozen_counts;
mod growth;
mod load;
pub(crate) mod overlap_check;
pub(crate) mod quarantine;
pub(crate) mod refcounts;
pub(crate) mod windows;

use crate::Error;
use crate::ErrorKind;
use crate::Result;
use crate::qcow2::files::ImageFiles;
use crate::qcow2::read_barrier::Readers;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use crate::sync::{AsyncMutex, Mutex, MutexGuard};
use free::FreeSpace;
use overlap_check::{Metadata, OverlapCheck};
use quarantine::Quarantine;
use refcounts::Refcounts;
use std::ops::Range;
use windows::Windows;
use zebu_qcow2::Geometry;
use zebu_storage::sabotage::{self, Fault};

/// The host clusters of an image: which are free, which are in use, and which hold metadata.
#[derive(Debug)]
pub(crate) struct HostSpace {
    files: ImageFiles,
    geometry: Geometry,
    refcounts: Refcounts,
    pool: Mutex<Pool>,
    /// Held while windows are refilled, while counts are lowered, and while a commit freezes the refcounts: it never sees half
    /// a window.
    space_mutex: AsyncMutex,
    overlap: OverlapCheck,
    quarantine: Quarantine,
    /// Requests that may use host clusters which are unlinked meanwhile.
    readers: Readers,
    /// No attempt to reserve space failed for want of it lately.
    can_reserve: AtomicBool,
    clusters_allocated: AtomicU64,
}

/// Free space, windows, and how far the file reaches.
#[derive(Debug, Default)]
struct Pool {
    free: FreeSpace,
    windows: Windows,
    /// Clusters that the file holds now (a partial last one counts).
    file_clusters: u64,
    /// Clusters below this were examined for zero refcounts, or are known otherwise.
    scanned: u64,
    /// Clusters that the file held when it was opened: what lies below is never taken for fresh and never cut off.
    clusters_at_open: u64,
}

impl HostSpace {
    fn pool(&self) -> MutexGuard<'_, Pool> {
        self.pool.lock()
    }

    /// The set of clusters that hold metadata.
    pub(crate) fn overlap(&self) -> &OverlapCheck {
        &self.overlap
    }

    pub(crate) fn quarantine(&self) -> &Quarantine {
        &self.quarantine
    }

    #[inline]
    pub(crate) fn readers(&self) -> &Readers {
        &self.readers
    }

    /// Clusters that the file holds now; a partial last one counts.
    pub(crate) fn file_clusters(&self) -> u64 {
        self.pool().file_clusters
    }

    /// Clusters handed out since the open.
    pub(crate) fn allocated(&self) -> u64 {
        self.clusters_allocated.load(Relaxed)
    }

    /// Whether a commit has anything to write of the counts, or to release.
    pub(crate) fn is_dirty(&self) -> bool {
        self.refcounts.is_dirty() || !self.quarantine.is_empty()
    }

    /// Notes the clusters of a table in the overlap check.
    pub(crate) fn note_metadata(&self, host: u64, len: u64, what: Metadata) {
        if len > 0 {
            let bits = self.geometry.cluster_bits;
            self.overlap.insert(host >> bits..(host.saturating_add(len - 1) >> bits) + 1, what);
        }
    }

    /// Gives the clusters of a table back, which nothing refers to any more.
    pub(crate) fn free_table(&self, offset: u64, len: u64) {
        if len > 0 && offset > 0 {
            let first = offset >> self.geometry.cluster_bits;
            let clusters = first..first + len.div_ceil(self.geometry.cluster_size());
            self.overlap.remove(clusters.clone());
            self.quarantine.push_unread(clusters, quarantine::FreeMode::Reuse);
        }
    }

    /// Refuses a write of host bytes that would hit metadata: the image is corrupt.
    pub(crate) fn check_overlap(&self, host: u64, len: u64, guest: u64) -> Result<()> {
        if self.files.data_file().is_some() || len == 0 || sabotage::is(Fault::SkipOverlapCheck) {
            return Ok(());
        }
        let bits = self.geometry.cluster_bits;
        match self.overlap.first_of(host >> bits..((host + len - 1) >> bits) + 1) {
            // Nothing was written, and whose entry leads here is the one concerned.
            Some((cluster, what)) => Err(self.overlap_found(cluster, what).at_guest(guest)),
            None => Ok(()),
        }
    }

    /// Refuses host clusters that were found free if they hold metadata: the refcounts are wrong, which concerns everybody.
    fn check_free(&self, clusters: &Range<u64>, wanted: &str) -> Result<()> {
        match self.overlap.first_of(clusters.clone()) {
            Some((cluster, what)) if !sabotage::is(Fault::SkipOverlapCheck) => {
                let error = match cluster {
                    0 => {
                        let message =
                            format!("Preventing invalid allocation of {wanted} at offset 0; run zebu check");
                        Error::new(ErrorKind::Corrupt, message).on(self.files.path())
                    }
                    _ => self.overlap_found(cluster, what),
                };
                self.files.poison(&error);
                Err(error)
            }
            _ => Ok(()),
        }
    }

    fn overlap_found(&self, cluster: u64, what: Metadata) -> Error {
        let message =
            format!("preventing invalid write on metadata (overlaps with {}); run zebu check", what.name());
        Error::new(ErrorKind::Corrupt, message)
            .on(self.files.path())
            .at_host(cluster << self.geometry.cluster_bits)
    }

    /// Refuses a table whose cluster something else lies in, too: changing it would change that.
    pub(crate) fn check_own(&self, host: u64, what: Metadata) -> Result<()> {
        if !self.overlap.is_shared(host >> self.geometry.cluster_bits) {
            return Ok(());
        }
        Err(self.not_its_own(host, what))
    }

    /// Refuses a table of which a cluster holds anything but `what`: giving it back would give that back.
    pub(crate) fn check_own_table(&self, offset: u64, len: u64, what: Metadata) -> Result<()> {
        let bits = self.geometry.cluster_bits;
        let end = offset.saturating_add(len).div_ceil(self.geometry.cluster_size());
        let clusters = if len == 0 { 0..0 } else { offset >> bits..end };
        for cluster in clusters {
            let found = self.overlap.first_of(cluster..cluster + 1);
            if found.is_none_or(|(_, found)| found != what) && !sabotage::is(Fault::SkipOverlapCheck) {
                return Err(self.not_its_own(cluster << bits, what));
            }
            self.check_own(cluster << bits, what)?;
        }
        Ok(())
    }

    fn not_its_own(&self, host: u64, what: Metadata) -> Error {
        let message = format!("the {} lies where something else is, too; run zebu check", what.name());
        Error::new(ErrorKind::Corrupt, message).on(self.files.path()).at_host(host)
    }
}
