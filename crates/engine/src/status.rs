//! The state of ranges of a virtual disk.

use crate::Format;
use crate::crypt::EncryptionInfo;
use std::path::PathBuf;
use zebu_qcow2::BackupId;
use zebu_storage::IoStats;

/// The kind of storage behind a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum ExtentKind {
    /// Data in the file at this offset.
    Data {
        /// Offset in bytes, in the image file or the external data file.
        host: u64,
    },
    /// Data in one of the files that the image consists of, beside the image file (extents of a VMDK).
    Elsewhere {
        /// The file: 1 is the first that the image names.
        file: u32,
        /// Offset in bytes, in that file.
        host: u64,
    },
    /// Compressed clusters.
    Compressed,
    /// Encrypted data: the bytes of the file are not those of the disk.
    Encrypted,
    /// Reads as zero; space may be kept for it at this offset.
    Zero {
        /// Offset in bytes of the space kept.
        host: Option<u64>,
    },
    /// Nothing in any image of the chain: reads as zero.
    #[default]
    Unallocated,
}

/// A run of the virtual disk of one kind, all from one image of the chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Extent {
    /// Offset in bytes on the virtual disk.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// Which image it comes from: 0 is the opened one, 1 its backing file, and so on.
    pub depth: u32,
    /// The kind of storage.
    pub kind: ExtentKind,
    /// For data in a file: a hole there, so that it reads as zero without being read.
    pub hole: bool,
}

impl Extent {
    /// Whether the range is known to read as zero.
    pub fn is_zero(&self) -> bool {
        self.hole || matches!(self.kind, ExtentKind::Zero { .. } | ExtentKind::Unallocated)
    }
    /// Offset in bytes just past the range.
    pub fn end(&self) -> u64 {
        self.offset + self.len
    }
}

/// An internal snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct SnapshotInfo {
    /// Id, a decimal number in text.
    pub id: String,
    /// Name.
    pub name: String,
    /// Bytes of VM state.
    pub vm_state_size: u64,
    /// Time of creation: seconds since 1970.
    pub date_sec: u32,
    /// And nanoseconds.
    pub date_nsec: u32,
    /// Running time of the VM in nanoseconds.
    pub vm_clock_nsec: u64,
    /// Instruction count, if recorded.
    pub icount: Option<u64>,
    /// Bytes of the virtual disk at that time.
    pub disk_size: u64,
}

/// A persistent bitmap.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct BitmapInfo {
    /// Name.
    pub name: String,
    /// Bytes that a bit stands for.
    pub granularity: u64,
    /// Not closed properly: only to be removed.
    pub in_use: bool,
    /// Tracks writes.
    pub auto: bool,
    /// A backup that is under way has what was in it, so that its bits can't be looked at.
    pub lent: bool,
    /// Bytes of the granules in which a crash left what was written last. It marks all that has changed, and may mark more. `None`:
    /// it is exact, or begun anew since.
    pub recovered: Option<u64>,
    /// The backup since which it knows of everything that was written, as far as that is known.
    pub base: Option<BackupId>,
}

/// Facts that `info` tells about a qcow2 image.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Qcow2Info {
    /// 2 or 3.
    pub version: u32,
    /// Bytes.
    pub cluster_size: u64,
    /// Compression type.
    pub compression: zebu_qcow2::Compression,
    /// Bits of a refcount.
    pub refcount_bits: u32,
    /// Compatible bit 0.
    pub lazy_refcounts: bool,
    /// Incompatible bit 0.
    pub dirty: bool,
    /// Incompatible bit 1.
    pub corrupt: bool,
    /// Extended L2 entries.
    pub extended_l2: bool,
    /// `aes` or `luks`.
    pub encryption: Option<&'static str>,
    /// Name of the external data file.
    pub data_file: Option<String>,
    /// The data file is raw.
    pub data_file_raw: bool,
    /// Internal snapshots.
    pub snapshots: Vec<SnapshotInfo>,
    /// Persistent bitmaps.
    pub bitmaps: Vec<BitmapInfo>,
    /// The backup that the image is, if it was made with a bitmap. What it stands on is not looked at ([`crate::Image::backup_id`]).
    pub backup_id: Option<BackupId>,
    /// The backup that the backing file of that backup was.
    pub backup_stands_on: Option<BackupId>,
    /// The overlay in which the disk goes on: the image is sealed, and only read.
    pub sealed_by: Option<PathBuf>,
    /// Bytes of cache that hold the whole mapping.
    pub full_cache_bytes: u64,
    /// Content of the image that zebu can read but not write, or not at all; each in words.
    pub limitations: Vec<String>,
}

/// Facts about an opened image that need no guest data.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ImageInfo {
    /// As opened.
    pub filename: PathBuf,
    /// Format.
    pub format: Format,
    /// Bytes of the virtual disk.
    pub virtual_size: u64,
    /// Bytes of a logical sector ([`crate::Image::logical_sector_size`]), as far as the images that are open tell.
    pub logical_sector_size: u32,
    /// Bytes of the file.
    pub file_length: u64,
    /// Bytes of disk that the file occupies.
    pub actual_size: u64,
    /// Backing file as the image names it.
    pub backing_file: Option<String>,
    /// The same, resolved against the directory of the image. Of an image of another program, where its parent was found, if that is open.
    pub backing_path: Option<PathBuf>,
    /// Its format, if named.
    pub backing_format: Option<String>,
    /// Extent size hint in bytes, if the file has one.
    pub extent_size_hint: Option<u32>,
    /// For qcow2.
    pub qcow2: Option<Qcow2Info>,
    /// For a format of another program.
    pub foreign: Option<ForeignInfo>,
    /// How the image is encrypted; `None` if it is not, or its LUKS header can't be read ([`Qcow2Info::limitations`]).
    pub encryption: Option<EncryptionInfo>,
}

/// Facts of the images of a chain, as far as they can be looked at.
#[derive(Debug)]
#[non_exhaustive]
pub struct ChainInfo {
    /// The images, top first.
    pub images: Vec<ImageInfo>,
    /// Why the image below the last one can't be looked at; `None` if there is none below it.
    pub end: Option<crate::Error>,
}

/// Facts of an image of another program.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ForeignInfo {
    /// The kind of image within its format, as QEMU's option `subformat` calls it.
    pub variant: &'static str,
    /// Bytes of the unit of allocation, if there is one.
    pub unit: Option<u64>,
    /// For a VMDK that was opened to be inspected ([`Purpose::Inspect`](crate::Purpose::Inspect)).
    pub vmdk: Option<VmdkInfo>,
}

/// Facts that a VMDK tells.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct VmdkInfo {
    /// The content's number; 0 if the image tells none.
    pub cid: u32,
    /// The content's number of the parent; `None` if there is no parent.
    pub parent_cid: Option<u32>,
    /// Kind of the image, as the image itself calls it; empty if it tells none.
    pub create_type: String,
    /// The parts of the disk, in order.
    pub extents: Vec<VmdkExtent>,
}

/// A part of a VMDK's disk.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct VmdkExtent {
    /// Bytes of the disk.
    pub len: u64,
    /// File of the extent: its name beside the image; `None` for zeroes.
    pub path: Option<PathBuf>,
    /// Kind, by the word of VMware's description; empty if the image file is itself the extent.
    pub kind: &'static str,
    /// Bytes of a grain, if the image file tells them.
    pub grain: Option<u64>,
    /// Whether grains are compressed.
    pub is_compressed: bool,
}

/// Counters of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct ImageStats {
    /// Lookups of a mapping slice that was in the cache, or on its way. This and the next ones are of the whole chain.
    pub cache_hits: u64,
    /// And that was not.
    pub cache_misses: u64,
    /// Slices loaded.
    pub cache_loads: u64,
    /// Slices that were loaded ahead of use.
    pub cache_read_ahead: u64,
    /// Slices given up for others, or because they were not used.
    pub cache_evictions: u64,
    /// Bytes of the budget in use, tables and index included.
    pub cache_bytes: u64,
    /// Bytes of the budget.
    pub cache_limit: u64,
    /// How often the count of these bytes would have wrapped. It stays within bounds, but the cache may take too much memory
    /// or too little from then on. More than 0 is a bug of this library: please report it.
    pub cache_miscounts: u64,
    /// Bytes that tables held in memory whole take of it.
    pub table_bytes: u64,
    /// Lookups that the extent index answered; no slice was looked at.
    pub index_hits: u64,
    /// Bytes that the extent index takes of the budget.
    pub index_bytes: u64,
    /// Commits of metadata.
    pub commits: u64,
    /// Host clusters allocated.
    pub clusters_allocated: u64,
    /// Host clusters freed.
    pub clusters_freed: u64,
    /// Freed clusters that left quarantine: what freed them is durable and their space is punched, free or
    /// another owner's. The rest waits for the next commit, or for I/O that is under way.
    pub clusters_released: u64,
    /// Operations of the worker that ran the image's requests, where asked with one.
    pub io: IoStats,
}
