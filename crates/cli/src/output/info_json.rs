//! The JSON of `info`: QEMU's keys first, zebu's after them.

use super::encryption::{Encrypt, LuksData};
use super::info_node::{InfoNode, Kind};
use super::json::path_text;
use crate::backing::resolve;

use crate::sector_size::unusual;
use serde::Serialize;
use std::path::Path;
use zebu_disks::Program;
use zebu_engine::{EncryptionInfo, ImageInfo, Qcow2Info, SnapshotInfo, VmdkInfo};

/// One image.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct ImageNode {
    filename: String,
    format: &'static str,
    virtual_size: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    actual_size: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cluster_size: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dirty_flag: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    encrypted: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    backing_filename: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    full_backing_filename: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    backing_filename_format: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    snapshots: Vec<Snapshot>,
    #[serde(skip_serializing_if = "Option::is_none")]
    format_specific: Option<FormatSpecific>,
    children: Vec<Child>,
    #[serde(skip_serializing_if = "Option::is_none")]
    logical_sector_size: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    full_cache_size: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    limitations: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    fragmentation: Option<Fragmentation>,
}

/// How the data of a disk lies in its file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Fragmentation {
    /// Bytes of uncompressed data.
    pub(crate) data_bytes: u64,
    /// Pieces that they lie in, in the order of the disk.
    pub(crate) extents: u64,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Snapshot {
    id: String,
    name: String,
    vm_state_size: u64,
    date_sec: u32,
    date_nsec: u32,
    vm_clock_sec: u64,
    vm_clock_nsec: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    icount: Option<u64>,
}

#[derive(Debug, Serialize)]
#[serde(tag = "type", content = "data", rename_all = "kebab-case")]
enum FormatSpecific {
    Qcow2(Box<Qcow2Data>),
    Luks(Box<LuksData>),
    Vmdk(VmdkData),
    File(FileData),
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Qcow2Data {
    compat: &'static str,
    compression_type: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    lazy_refcounts: Option<bool>,
    refcount_bits: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    corrupt: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    extended_l2: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    data_file: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    data_file_raw: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bitmaps: Option<Vec<Bitmap>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    backup_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    backup_stands_on: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sealed_by: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    encrypt: Option<Encrypt>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct VmdkData {
    create_type: String,
    cid: u32,
    parent_cid: u32,
    extents: Vec<VmdkExtent>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct VmdkExtent {
    #[serde(skip_serializing_if = "Option::is_none")]
    filename: Option<String>,
    format: &'static str,
    virtual_size: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    cluster_size: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    compressed: Option<bool>,
}

impl VmdkData {
    fn new(vmdk: &VmdkInfo) -> Self {
        let extents = vmdk.extents.iter().map(|extent| VmdkExtent {
            filename: extent.path.as_deref().map(path_text),
            format: extent.kind,
            virtual_size: extent.len,
            cluster_size: extent.grain,
            compressed: extent.is_compressed.then_some(true),
        });
        Self {
            create_type: vmdk.create_type.clone(),
            cid: vmdk.cid,
            // As the format writes it.
            parent_cid: vmdk.parent_cid.unwrap_or(u32::MAX),
            extents: extents.collect(),
        }
    }
}

#[derive(Debug, Serialize)]
struct Bitmap {
    name: String,
    granularity: u64,
    flags: Vec<&'static str>,
    #[serde(rename = "recovered-granularity", skip_serializing_if = "Option::is_none")]
    recovered_granularity: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    base: Option<String>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct FileData {
    #[serde(skip_serializing_if = "Option::is_none")]
    extent_size_hint: Option<u32>,
}

#[derive(Debug, Serialize)]
struct Child {
    name: String,
    info: ImageNode,
}

impl ImageNode {
    /// The object for a node, with zebu's own keys where zebu is not called by a name of QEMU.
    pub(crate) fn new(dialect: Program, node: &InfoNode, fragmentation: Option<Fragmentation>) -> Self {
        let mut told = Self::of(node);
        let qcow2 = node.image().and_then(|info| info.qcow2.as_ref());
        if let Some(qcow2) = qcow2.filter(|_| !dialect.is_qemu()) {
            told.full_cache_size = Some(qcow2.full_cache_bytes);
            told.limitations = Some(qcow2.limitations.clone());
        }
        told.fragmentation = fragmentation;
        told
    }

    fn of(node: &InfoNode) -> Self {
        let info = node.image();
        let qcow2 = info.and_then(|info| info.qcow2.as_ref());
        let encryption = info.and_then(|info| info.encryption.as_ref());
        let is_encrypted = qcow2.is_some_and(|q| q.encryption.is_some()) || encryption.is_some();
        Self {
            filename: node.filename.clone(),
            format: node.format,
            virtual_size: node.virtual_size,
            actual_size: node.actual_size,
            cluster_size: node.cluster_size,
            dirty_flag: node.dirty,
            encrypted: is_encrypted.then_some(true),
            backing_filename: info.and_then(|info| info.backing_file.clone()),
            full_backing_filename: info.and_then(full_backing_name),
            backing_filename_format: info.and_then(|info| info.backing_format.clone()),
            snapshots: qcow2.map(|q| q.snapshots.iter().map(Snapshot::new).collect()).unwrap_or_default(),
            format_specific: FormatSpecific::of(node),
            children: node
                .children
                .iter()
                .map(|(name, below)| Child { name: name.clone(), info: Self::of(below) })
                .collect(),
            logical_sector_size: info.and_then(|info| unusual(info.logical_sector_size)),
            full_cache_size: None,
            limitations: None,
            fragmentation: None,
        }
    }
}

impl FormatSpecific {
    fn of(node: &InfoNode) -> Option<Self> {
        let info = match &node.kind {
            Kind::Image(info) => info,
            Kind::File { extent_size_hint } => {
                let extent_size_hint = extent_size_hint.filter(|&bytes| bytes != 0);
                return Some(Self::File(FileData { extent_size_hint }));
            }
            Kind::Driver => return None,
        };
        match (&info.qcow2, &info.encryption) {
            (Some(qcow2), encryption) => {
                Some(Self::Qcow2(Box::new(Qcow2Data::new(qcow2, encryption.as_ref()))))
            }
            (None, Some(EncryptionInfo::Luks(luks))) => Some(Self::Luks(Box::new(LuksData::new(luks)))),
            (None, _) => {
                let vmdk = info.foreign.as_ref().and_then(|foreign| foreign.vmdk.as_ref());
                vmdk.map(|vmdk| Self::Vmdk(VmdkData::new(vmdk)))
            }
        }
    }
}

/// The path of the parent of an image of another program, if it is elsewhere than the image says.
pub(crate) fn parent_elsewhere(info: &ImageInfo) -> Option<&Path> {
    let found = info.foreign.as_ref().and(info.backing_path.as_deref())?;
    let is_as_told = info.backing_file.as_ref().is_some_and(|name| found.ends_with(name));
    (!is_as_told).then_some(found)
}

/// Where the name of the backing file leads, from where the image was opened. A name that is no path stays as it is.
pub(crate) fn full_backing_name(info: &ImageInfo) -> Option<String> {
    let name = info.backing_file.as_ref()?;
    Some(match (parent_elsewhere(info), &info.backing_path) {
        (Some(found), _) => path_text(found),
        (_, Some(_)) => path_text(&resolve(&info.filename, name)),
        (_, None) => name.clone(),
    })
}

/// The list of `zebu snapshot --output json`, as `info` has it.
pub(crate) fn snapshot_list(snapshots: &[SnapshotInfo]) -> impl Serialize {
    snapshots.iter().map(Snapshot::new).collect::<Vec<_>>()
}

impl Snapshot {
    fn new(snapshot: &SnapshotInfo) -> Self {
        Self {
            id: snapshot.id.clone(),
            name: snapshot.name.clone(),
            vm_state_size: snapshot.vm_state_size,
            date_sec: snapshot.date_sec,
            date_nsec: snapshot.date_nsec,
            vm_clock_sec: snapshot.vm_clock_nsec / 1_000_000_000,
            vm_clock_nsec: snapshot.vm_clock_nsec % 1_000_000_000,
            icount: snapshot.icount,
        }
    }
}

impl Qcow2Data {
    /// Version 2 has none of the flags, so QEMU leaves them out.
    fn new(info: &Qcow2Info, encryption: Option<&EncryptionInfo>) -> Self {
        let v3 = info.version >= 3;
        Self {
            compat: compat_text(info),
            compression_type: info.compression.name(),
            lazy_refcounts: v3.then_some(info.lazy_refcounts),
            refcount_bits: info.refcount_bits,
            corrupt: v3.then_some(info.corrupt),
            extended_l2: v3.then_some(info.extended_l2),
            data_file: info.data_file.clone(),
            data_file_raw: info.data_file.as_ref().map(|_| info.data_file_raw),
            bitmaps: (!info.bitmaps.is_empty()).then(|| {
                info.bitmaps
                    .iter()
                    .map(|bitmap| Bitmap {
                        name: bitmap.name.clone(),
                        granularity: bitmap.granularity,
                        flags: bitmap_flags(bitmap),
                        recovered_granularity: bitmap.recovered,
                        base: bitmap.base.map(|base| base.to_string()),
                    })
                    .collect()
            }),
            backup_id: info.backup_id.map(|id| id.to_string()),
            backup_stands_on: info.backup_stands_on.map(|id| id.to_string()),
            sealed_by: info.sealed_by.as_ref().map(|overlay| overlay.to_string_lossy().into_owned()),
            encrypt: info.encryption.map(|method| Encrypt::new(method, encryption)),
        }
    }
}

/// `compat` as the create option has it.
pub(crate) fn compat_text(info: &Qcow2Info) -> &'static str {
    if info.version >= 3 { "1.1" } else { "0.10" }
}

/// The flags of a bitmap by QEMU's names.
pub(crate) fn bitmap_flags(bitmap: &zebu_engine::BitmapInfo) -> Vec<&'static str> {
    let mut flags = Vec::new();
    if bitmap.in_use {
        flags.push("in-use");
    }
    if bitmap.auto {
        flags.push("auto");
    }
    flags
}
