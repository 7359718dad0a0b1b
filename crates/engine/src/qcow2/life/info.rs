//! Facts about a qcow2 image, for `info`.

use crate::qcow2::fork_seal::overlay_path;
use crate::qcow2::life::open::full_cache_bytes;
use crate::qcow2::state::Qcow2;
use crate::qcow2::text::text;
use crate::status::{BitmapInfo, ImageStats, Qcow2Info, SnapshotInfo};
use zebu_qcow2::snapshot::SnapshotEntry;
use zebu_qcow2::{Autoclear, BackupMark, Compatible, Encryption, Header, Incompatible, SealState};

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

/// Facts from the header and the small tables.
pub(crate) fn qcow2_info(
    header: &Header,
    snapshots: &[SnapshotEntry],
    bitmaps: Vec<BitmapInfo>,
    backup: Option<BackupMark>,
    seal: &SealState,
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
    if incompatible.contains(Incompatible::CORRUPT) {
        limitations.push("marked corrupt: opened for reading only until it is repaired".to_owned());
    }
    if bitmaps.is_empty() && header.bitmaps().is_some() {
        limitations.push("a damaged bitmap directory: its bitmaps are lost with the first write".to_owned());
    }
    if *seal == SealState::Unreadable {
        limitations.push(
            "a seal that can't be read: its disk goes on in an overlay, and it is only read".to_owned(),
        );
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
        backup_id: backup.map(|mark| mark.id),
        backup_stands_on: backup.and_then(|mark| mark.stands_on),
        sealed_by: match seal {
            SealState::Sealed(seal) => Some(overlay_path(seal)),
            SealState::Open | SealState::Unreadable => None,
        },
        full_cache_bytes: full_cache_bytes(header),
        limitations,
    }
}

impl Qcow2 {
    /// Counters.
    pub(crate) fn stats(&self) -> ImageStats {
        ImageStats {
            index_hits: self.map.chain().map_or(0, |chain| chain.extents().hits()),
            commits: self.commit.commits(),
            clusters_allocated: self.space.allocated(),
            clusters_freed: self.space.quarantine().freed(),
            clusters_released: self.space.quarantine().released(),
            ..self.map.store().stats()
        }
    }
}
