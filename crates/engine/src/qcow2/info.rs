//! What is said of a qcow2 image.

use crate::qcow2::open::full_cache_bytes;
use crate::qcow2::state::Qcow2;
use crate::status::{BitmapInfo, ImageStats, Qcow2Info, SnapshotInfo};
use std::sync::atomic::Ordering::Relaxed;
use zebu_qcow2::snapshot::SnapshotEntry;
use zebu_qcow2::{Autoclear, Compatible, Encryption, Header, Incompatible};

/// Text of the image as text of ours.
pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

pub(crate) fn snapshot_info(entry: &SnapshotEntry, header: &Header) -> SnapshotInfo {
    SnapshotInfo {
        id: text(&entry.id),
        name: text(&entry.name),
        vm_state_size: entry.vm_state_size(),
        date_sec: entry.date_sec,
        date_nsec: entry.date_nsec,
        vm_clock_nsec: entry.vm_clock_nsec,
        icount: entry.icount(),
        disk_size: entry.disk_size().unwrap_or(header.virtual_size()),
    }
}

/// What the header and the small tables say.
pub(crate) fn qcow2_info(
    header: &Header,
    snapshots: &[SnapshotEntry],
    bitmaps: Vec<BitmapInfo>,
) -> Qcow2Info {
    let geometry = header.geometry();
    let incompatible = header.incompatible();
    let mut limitations = Vec::new();
    let encryption = match header.encryption {
        Encryption::None => None,
        Encryption::Aes => Some("aes"),
        Encryption::Luks => Some("luks"),
        Encryption::Unknown(_) => Some("unknown"),
    };
    if encryption.is_some() {
        limitations.push("encrypted: zebu neither reads nor writes the data".to_owned());
    }
    if incompatible.contains(Incompatible::CORRUPT) {
        limitations.push("marked corrupt: opened for reading only; zebu check -r all".to_owned());
    }
    if bitmaps.is_empty() && header.bitmaps().is_some() {
        limitations.push("a damaged bitmap directory: its bitmaps are lost with the first write".to_owned());
    }
    Qcow2Info {
        version: header.version().number(),
        cluster_size: geometry.cluster_size(),
        compression: header.compression(),
        refcount_bits: geometry.refcount_bits(),
        lazy_refcounts: header.compatible.contains(Compatible::LAZY_REFCOUNTS),
        dirty: incompatible.contains(Incompatible::DIRTY),
        corrupt: incompatible.contains(Incompatible::CORRUPT),
        extended_l2: geometry.extended_l2,
        encryption,
        data_file: header.data_file_name().map(text),
        data_file_raw: header.autoclear.contains(Autoclear::RAW_EXTERNAL_DATA),
        snapshots: snapshots.iter().map(|entry| snapshot_info(entry, header)).collect(),
        bitmaps,
        full_cache_bytes: full_cache_bytes(header),
        limitations,
    }
}

impl Qcow2 {
    /// Counters.
    pub(crate) fn stats(&self) -> ImageStats {
        let counters = self.l2.store.counters();
        let budget = &self.l2.store.budget;
        ImageStats {
            cache_hits: counters.hits,
            cache_misses: counters.misses,
            cache_loads: counters.loads,
            cache_read_ahead: counters.read_ahead,
            cache_evictions: counters.evictions,
            cache_bytes: budget.used(),
            cache_limit: budget.limit(),
            table_bytes: budget.tables(),
            index_hits: self.index.as_ref().map_or(0, |index| index.extents().hits()),
            index_bytes: budget.index(),
            commits: self.commit.commits.load(Relaxed),
            clusters_allocated: self.clusters_allocated.load(Relaxed),
            clusters_freed: self.clusters_freed.load(Relaxed),
            clusters_released: self.clusters_released.load(Relaxed),
            ..ImageStats::default()
        }
    }
}
