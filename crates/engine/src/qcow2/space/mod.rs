//! Host space: what is free, the windows that are cut from it, reference counts, and what waits to become free.

pub(crate) mod alloc;
mod counting;
pub(crate) mod free;
mod free_again;
pub(crate) mod frozen_counts;
mod growth;
mod load;
pub(crate) mod metadata_map;
mod overlap_check;
pub(crate) mod quarantine;
pub(crate) mod refcounts;
mod room;
mod search;
pub(crate) mod windows;

use crate::qcow2::files::ImageFiles;
use crate::qcow2::read_barrier::Readers;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use crate::sync::{AsyncMutex, Mutex, MutexGuard};
use free::FreeSpace;
use metadata_map::{Metadata, MetadataMap};
use quarantine::Quarantine;
use refcounts::Refcounts;
use std::collections::BTreeSet;
use windows::Windows;
use zebu_qcow2::Geometry;

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
    metadata: MetadataMap,
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
    /// The first cluster behind the look at the counts.
    scan_end: u64,
    /// Clusters that the file held when it was opened: what lies below is never taken for fresh and never cut off.
    clusters_at_open: u64,
    /// Offsets of parts of refcount blocks for which the file system has set room aside since the open.
    has_room: BTreeSet<u64>,
}

impl HostSpace {
    fn pool(&self) -> MutexGuard<'_, Pool> {
        self.pool.lock()
    }

    /// The set of clusters that hold metadata.
    pub(crate) fn metadata(&self) -> &MetadataMap {
        &self.metadata
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
            self.metadata.insert(host >> bits..(host.saturating_add(len - 1) >> bits) + 1, what);
        }
    }

    /// Gives the clusters of a table back, which nothing refers to any more.
    pub(crate) fn free_table(&self, offset: u64, len: u64) {
        if len > 0 && offset > 0 {
            let first = offset >> self.geometry.cluster_bits;
            let clusters = first..first + len.div_ceil(self.geometry.cluster_size());
            self.metadata.remove(clusters.clone());
            self.quarantine.push_unread(clusters, quarantine::FreeMode::Reuse);
        }
    }
}
