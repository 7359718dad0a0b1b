//! Errors and warnings of the format: one variant for each thing that can be wrong, so that code can match it.
//!
//! The checks made when an image is opened keep QEMU's order and say what QEMU says, so that users and tools
//! recognise them. Numbers in parentheses are the place of a check in that order.

use crate::limits;
use crate::version::Version;

/// An index or a range that lies outside the slice that was given.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("index outside the table")]
pub struct OutOfBounds;

/// Text from an image, with control characters escaped: an image must not write to a user's terminal.
fn printable(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() {
            out.extend(c.escape_default());
        } else {
            out.push(c);
        }
    }
    out
}

/// Why an image or a part of its metadata is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FormatError {
    /// (1) The header could not be read from the file.
    #[error("Could not read qcow2 header")]
    HeaderUnreadable,
    /// (2) The magic number is missing.
    #[error("Image is not in qcow2 format")]
    NotQcow2,
    /// (3) Neither version 2 nor 3.
    #[error("Unsupported qcow2 version {version}")]
    UnsupportedVersion {
        /// The version in the header.
        version: u32,
    },
    /// (4) Clusters smaller than 512 bytes or larger than 2 MiB.
    #[error("Unsupported cluster size: 2^{cluster_bits}")]
    UnsupportedClusterSize {
        /// log2 of the cluster size in the header.
        cluster_bits: u32,
    },
    /// (5) A version 3 header of less than 104 bytes.
    #[error("qcow2 header too short")]
    HeaderTooShort {
        /// The length in the header, in bytes.
        header_length: u32,
    },
    /// (6) A header longer than a cluster.
    #[error("qcow2 header exceeds cluster size")]
    HeaderExceedsCluster {
        /// The length in the header, in bytes.
        header_length: u32,
    },
    /// (7) The header fields past the known ones could not be read from the file.
    #[error("Could not read unknown qcow2 header fields")]
    UnknownFieldsUnreadable,
    /// (8) The backing file name lies outside the first cluster.
    #[error("Invalid backing file offset")]
    BackingOffsetInvalid {
        /// The offset in the header, in bytes.
        offset: u64,
    },
    /// (9) A compression type that the format does not define.
    #[error("qcow2: unknown compression type: {code}")]
    UnknownCompression {
        /// The byte in the header.
        code: u8,
    },
    /// (10) Deflate, yet the compression type bit is set.
    #[error("qcow2: Compression type incompatible feature bit must not be set")]
    CompressionBitSet,
    /// (11) Not deflate, yet the compression type bit is clear.
    #[error("qcow2: Compression type incompatible feature bit must be set")]
    CompressionBitClear,
    /// (12) The image uses features that are not known.
    #[error("Unsupported qcow2 feature(s): {}", feature_list(names, *unnamed))]
    UnsupportedFeatures {
        /// Names from the image's feature name table, in its order.
        names: Vec<String>,
        /// The unknown bits that the table does not name.
        unnamed: u64,
    },
    /// (13) The corrupt bit is set and the image was to be written.
    #[error("qcow2: Image is corrupt; cannot be opened read/write")]
    CorruptImage,
    /// (14) Extended L2 entries with clusters below 16 KiB.
    #[error("Unsupported subcluster size: {subcluster_size}")]
    UnsupportedSubclusterSize {
        /// Bytes that a subcluster would have.
        subcluster_size: u64,
    },
    /// (15) Refcounts of more than 64 bits.
    #[error("Reference count entry width too large; may not exceed 64 bits")]
    RefcountWidthTooLarge,
    /// (16) Legacy AES encryption, where guest data is needed.
    #[error("AES-CBC encrypted qcow2 images are not supported")]
    AesEncrypted,
    /// LUKS encryption, where guest data is needed; QEMU opens these.
    #[error("LUKS encrypted qcow2 images are not supported")]
    LuksEncrypted,
    /// (17) The refcount table has no clusters.
    #[error("Image does not contain a reference count table")]
    NoReftable,
    /// (18) The refcount table is larger than 8 MiB.
    #[error("Reference count table too large")]
    ReftableTooLarge {
        /// Clusters in the header.
        clusters: u32,
    },
    /// (19) The refcount table is not aligned, or ends past 2^63.
    #[error("Reference count table offset invalid")]
    ReftableOffsetInvalid {
        /// The offset in the header, in bytes.
        offset: u64,
    },
    /// (20) More than 65536 snapshots.
    #[error("Snapshot table too large")]
    TooManySnapshots {
        /// Snapshots in the header.
        count: u32,
    },
    /// (21) The snapshot table is not aligned, or ends past 2^63.
    #[error("Snapshot table offset invalid")]
    SnapshotTableOffsetInvalid {
        /// The offset in the header, in bytes.
        offset: u64,
    },
    /// (22) The L1 table is larger than 32 MiB.
    #[error("Active L1 table too large")]
    L1TooLarge {
        /// Entries in the header.
        entries: u32,
    },
    /// (23) The L1 table is not aligned, or ends past 2^63.
    #[error("Active L1 table offset invalid")]
    L1OffsetInvalid {
        /// The offset in the header, in bytes.
        offset: u64,
    },
    /// (24) The virtual size needs more L1 entries than can be counted.
    #[error("Image is too big")]
    ImageTooBig {
        /// Virtual size in the header, in bytes.
        size: u64,
    },
    /// (25) The L1 table does not cover the virtual size.
    #[error("L1 table is too small")]
    L1TooSmall {
        /// Entries in the header.
        entries: u32,
        /// Entries that the virtual size needs.
        needed: u64,
    },
    /// (26) No memory for the L1 table.
    #[error("Could not allocate L1 table")]
    L1Allocation,
    /// (26) The L1 table could not be read from the file.
    #[error("Could not read L1 table")]
    L1Unreadable,
    /// (27) An option given at open does not fit the image.
    #[error(transparent)]
    Option(#[from] OptionError),
    /// (28) The refcount table could not be loaded.
    #[error("Could not initialize refcount handling")]
    RefcountInit,
    /// (29) A header extension ends outside its area.
    #[error("Header extension too large")]
    ExtensionTooLarge {
        /// Where the extension starts, in bytes.
        offset: u64,
    },
    /// (30) The name of the backing format is longer than 15 bytes.
    #[error("ERROR: ext_backing_format: len={len} too large (>=16)")]
    BackingFormatTooLong {
        /// Its length in bytes.
        len: u32,
    },
    /// (31) A LUKS pointer in an image that is not encrypted with LUKS.
    #[error("CRYPTO header extension only expected with LUKS encryption method")]
    LuksPointerUnexpected,
    /// (32) A LUKS pointer of the wrong size.
    #[error("CRYPTO header extension size {len}, but expected size 16")]
    LuksPointerLength {
        /// Its length in bytes.
        len: u32,
    },
    /// (33) The LUKS header is not aligned.
    #[error("Encryption header offset '{offset}' is not a multiple of cluster size '{cluster_size}'")]
    LuksOffsetUnaligned {
        /// The offset in the extension, in bytes.
        offset: u64,
        /// Bytes of a cluster.
        cluster_size: u64,
    },
    /// (34) A bitmaps extension of the wrong size.
    #[error("bitmaps_ext: Invalid extension length")]
    BitmapsLength {
        /// Its length in bytes.
        len: u32,
    },
    /// (36) The reserved field of the bitmaps extension is set.
    #[error("bitmaps_ext: Reserved field is not zero")]
    BitmapsReserved,
    /// (37) More than 65535 bitmaps.
    #[error("bitmaps_ext: Image has {count} bitmaps, exceeding the QEMU supported maximum of 65535")]
    TooManyBitmaps {
        /// Bitmaps in the extension.
        count: u32,
    },
    /// (38) A bitmaps extension without bitmaps.
    #[error("found bitmaps extension with zero bitmaps")]
    NoBitmaps,
    /// (39) The bitmap directory is not aligned.
    #[error("bitmaps_ext: invalid bitmap directory offset")]
    BitmapDirectoryOffset {
        /// The offset in the extension, in bytes.
        offset: u64,
    },
    /// (40) The bitmap directory is too large.
    #[error(
        "bitmaps_ext: bitmap directory size ({size}) exceeds the maximum supported size ({})",
        limits::MAX_BITMAP_DIRECTORY_SIZE
    )]
    BitmapDirectorySize {
        /// The size in the extension, in bytes.
        size: u64,
    },
    /// (41) Guest data lies in an external file, and none was given or named.
    #[error("'data-file' is required for this image")]
    DataFileRequired,
    /// (41) A data file was given for an image that has none.
    #[error("'data-file' can only be set for images with an external data file")]
    DataFileUnexpected,
    /// (42) The raw data file bit without an external data file.
    #[error("data-file-raw requires a data file")]
    DataFileRawWithoutDataFile,
    /// (43) LUKS encryption without the pointer to its header.
    #[error("Missing CRYPTO header for crypt method {method}")]
    LuksPointerMissing {
        /// The method in the header.
        method: u32,
    },
    /// (44, but made between 25 and 29) An encryption method that the format does not define.
    // QEMU prints the field as a signed number.
    #[error("Unsupported encryption method {}", *method as i32)]
    UnsupportedEncryption {
        /// The method in the header.
        method: u32,
    },
    /// (45) The backing file name is longer than 1023 bytes, or leaves the first cluster.
    #[error("Backing file name too long")]
    BackingNameTooLong {
        /// Its length in bytes.
        len: u64,
    },
    /// (45) The backing file name could not be read from the file.
    #[error("Could not read backing file name")]
    BackingNameUnreadable,
    /// (46) The snapshot table could not be read from the file.
    #[error("Failed to read snapshot table")]
    SnapshotTableUnreadable,
    /// (46) More than 1024 bytes of extra data in an entry.
    #[error("Too much extra metadata in snapshot table entry {index}")]
    SnapshotExtraTooLarge {
        /// Index of the entry.
        index: u32,
        /// Bytes of extra data.
        len: u32,
    },
    /// (46) The snapshot table is larger than 64 MiB.
    #[error("Snapshot table is too big")]
    SnapshotTableTooBig,
    /// (47) Refcounts of an image that was not closed cleanly could not be rebuilt.
    #[error("Could not repair dirty image")]
    DirtyImage,

    /// A snapshot's L1 table is larger than 32 MiB.
    #[error("Snapshot L1 table too large")]
    SnapshotL1TooLarge {
        /// Entries of the table.
        entries: u32,
    },
    /// A snapshot's L1 table is not aligned, or ends past 2^63.
    #[error("Snapshot L1 table offset invalid")]
    SnapshotL1OffsetInvalid {
        /// Offset in bytes.
        offset: u64,
    },
    /// A field of a snapshot table entry does not fit its width on disk.
    #[error("Snapshot table entry does not fit the format: {field:?}")]
    SnapshotFieldTooLong {
        /// Which field.
        field: SnapshotField,
    },

    /// The size of the bitmap directory is zero.
    #[error("Requested bitmap directory size is zero")]
    BitmapDirectoryEmpty,
    /// An entry ends outside the bitmap directory.
    #[error("Broken bitmap directory")]
    BitmapDirectoryBroken,
    /// The directory holds more bitmaps than the extension says.
    #[error("More bitmaps found than specified in header extension")]
    MoreBitmapsThanExpected,
    /// The directory holds fewer bitmaps than the extension says.
    #[error("Less bitmaps found than specified in header extension")]
    FewerBitmapsThanExpected,
    /// A bitmap has extra data, whose meaning is unknown.
    #[error("Bitmap extra data is not supported")]
    BitmapExtraData,
    /// A field of a bitmap's directory entry is out of range.
    #[error("Bitmap '{}' doesn't satisfy the constraints", printable(name))]
    BitmapConstraints {
        /// The bitmap's name.
        name: String,
    },

    /// Header, extensions and backing file name do not fit into the first cluster.
    #[error("The header needs {needed} bytes, more than the {cluster_size} bytes of a cluster")]
    HeaderDoesNotFit {
        /// Bytes needed.
        needed: u64,
        /// Bytes of a cluster.
        cluster_size: u64,
    },
    /// Two extensions that say where the bitmaps are.
    #[error("bitmaps_ext: the header has more than one bitmaps extension")]
    BitmapsTwice,
    /// A header field that version 2 does not have.
    #[error("{field} needs version 3 (compat=1.1)")]
    NeedsVersion3 {
        /// Which field.
        field: Version3Field,
    },
    /// A name or data of an extension is longer than its 32-bit length field allows.
    #[error("Header extension of {len} bytes is too long")]
    ExtensionTooLong {
        /// Length in bytes.
        len: u64,
    },
    /// A new image whose virtual size has no L1 or refcount table within the limits.
    #[error("The image size is too large for file format 'qcow2' (try using a larger cluster size)")]
    SizeTooLarge {
        /// Virtual size in bytes.
        size: u64,
    },
    /// A cluster size that is not a power of two between 512 bytes and 2 MiB.
    #[error("Cluster size must be a power of two between 512 and 2048k")]
    ClusterSizeInvalid {
        /// The size in bytes.
        cluster_size: u64,
    },
    /// A refcount width that is not a power of two up to 64 bits.
    #[error("Refcount width must be a power of two and may not exceed 64 bits")]
    RefcountBitsInvalid {
        /// The width in bits.
        bits: u64,
    },
    /// An L1, L2, refcount table or bitmap table entry is wrong.
    #[error(transparent)]
    Entry(#[from] EntryError),
}

/// A header field that only version 3 has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Version3Field {
    /// Any feature bit.
    #[error("A feature bit")]
    Features,
    /// A refcount width other than 16 bits.
    #[error("A refcount width other than 16 bits")]
    RefcountOrder,
    /// A compression type other than zlib.
    #[error("Non-zlib compression type")]
    Compression,
    /// Header fields that are not known.
    #[error("An unknown header field")]
    UnknownFields,
}

/// A field of a snapshot table entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum SnapshotField {
    /// The identifier, at most 65535 bytes.
    Id,
    /// The name, at most 65535 bytes.
    Name,
    /// The extra data, at most 1024 bytes.
    Extra,
}

/// An option given at open that the image does not allow.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OptionError {
    /// All three cache sizes at once.
    #[error("cache-size, l2-cache-size and refcount-cache-size may not be set at the same time")]
    CacheSizesOverdetermined,
    /// The L2 cache alone exceeds the whole.
    #[error("l2-cache-size may not exceed cache-size")]
    L2CacheExceedsTotal,
    /// The refcount cache alone exceeds the whole.
    #[error("refcount-cache-size may not exceed cache-size")]
    RefcountCacheExceedsTotal,
    /// The slice size is not a power of two between 512 bytes and the cluster size.
    #[error("L2 cache entry size must be a power of two between 512 and the cluster size ({cluster_size})")]
    SliceSize {
        /// Bytes of a cluster.
        cluster_size: u64,
    },
    /// Lazy refcounts asked for in a version 2 image.
    #[error("Lazy refcounts require a qcow2 image with at least qemu 1.1 compatibility level")]
    LazyRefcounts,
    /// discard-no-unref asked for in a version 2 image.
    #[error("discard-no-unref is only supported since qcow2 version 3")]
    DiscardNoUnref,
}

/// Why an entry of a table cannot be trusted. The caller adds the position.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EntryError {
    /// Reserved bits are set.
    #[error("entry {word:#x} has reserved bits set")]
    ReservedBits {
        /// The entry.
        word: u64,
    },
    /// The L2 table of an L1 entry is not aligned to a cluster.
    #[error("L2 table offset {offset:#x} unaligned")]
    TableUnaligned {
        /// Host offset in bytes.
        offset: u64,
    },
    /// The refcount block of a refcount table entry is not aligned to a cluster.
    #[error("Refblock offset {offset:#x} unaligned")]
    RefcountBlockUnaligned {
        /// Host offset in bytes.
        offset: u64,
    },
    /// The data cluster is not aligned to a cluster.
    #[error("Cluster allocation offset {offset:#x} unaligned")]
    ClusterUnaligned {
        /// Host offset in bytes.
        offset: u64,
    },
    /// A zero cluster in a version 2 image.
    #[error("Zero cluster entry found in pre-v3 image")]
    ZeroInVersion2,
    /// A compressed cluster in an image with an external data file.
    #[error("Compressed cluster entry found in image with external data file")]
    CompressedWithDataFile,
    /// A compressed cluster that starts beyond what its descriptor or the format can hold.
    #[error("Compressed cluster offset {offset:#x} is too large")]
    CompressedOffsetTooLarge {
        /// Host offset in bytes.
        offset: u64,
    },
    /// A compressed stream that is empty or has more sectors than its descriptor can hold.
    #[error("Compressed cluster of {len} bytes does not fit its descriptor")]
    CompressedLength {
        /// Length in bytes.
        len: u64,
    },
    /// A subcluster is both allocated and zero, or allocated without a host cluster.
    #[error("Invalid cluster entry found: subclusters allocated {alloc:#010x}, zero {zero:#010x}")]
    InvalidSubclusters {
        /// Allocation bits.
        alloc: u32,
        /// Zero bits.
        zero: u32,
    },
    /// The host offset in an external data file is not the guest offset.
    #[error(
        "External data file host cluster offset {host:#x} does not match guest cluster offset: {guest:#x}"
    )]
    DataFileOffset {
        /// Host offset in bytes.
        host: u64,
        /// Guest offset of the cluster in bytes.
        guest: u64,
    },
    /// The data cluster of a bitmap is not aligned, or its entry is otherwise wrong.
    #[error("Bitmap table entry {word:#x} is invalid")]
    BitmapTable {
        /// The entry.
        word: u64,
    },
}

/// Something that does not stop an image from being opened, but that the user should know.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Warning {
    /// (35) The bitmaps extension is there, but the bit that says it is consistent is clear.
    #[error("{}", stale_bitmaps_text(*version))]
    BitmapsInconsistent {
        /// Version of the image.
        version: Version,
    },
}

fn stale_bitmaps_text(version: Version) -> &'static str {
    match version {
        Version::V2 => {
            "This qcow2 v2 image contains bitmaps, but they may have been modified by a program without \
             persistent bitmap support; so now they must all be considered inconsistent"
        }
        Version::V3 => {
            "a program lacking bitmap support modified this file, so all bitmaps are now considered inconsistent"
        }
    }
}

fn feature_list(names: &[String], unnamed: u64) -> String {
    let mut parts: Vec<String> = names.iter().map(|name| printable(name)).collect();
    if unnamed != 0 {
        parts.push(format!("Unknown incompatible feature: {unnamed:x}"));
    }
    parts.join(", ")
}

impl FormatError {
    /// The errno that QEMU returns for the same condition.
    pub fn errno(&self) -> i32 {
        match self {
            Self::UnsupportedVersion { .. }
            | Self::UnknownCompression { .. }
            | Self::UnsupportedFeatures { .. }
            | Self::LuksEncrypted => libc::ENOTSUP,
            Self::AesEncrypted => libc::ENOSYS,
            Self::CorruptImage => libc::EACCES,
            Self::ReftableTooLarge { .. }
            | Self::TooManySnapshots { .. }
            | Self::L1TooLarge { .. }
            | Self::ImageTooBig { .. }
            | Self::SnapshotExtraTooLarge { .. }
            | Self::SnapshotTableTooBig
            | Self::SnapshotL1TooLarge { .. }
            | Self::SizeTooLarge { .. } => libc::EFBIG,
            Self::HeaderUnreadable
            | Self::UnknownFieldsUnreadable
            | Self::L1Unreadable
            | Self::RefcountInit
            | Self::BackingNameUnreadable
            | Self::SnapshotTableUnreadable
            | Self::DirtyImage
            | Self::Entry(_) => libc::EIO,
            Self::L1Allocation => libc::ENOMEM,
            Self::HeaderDoesNotFit { .. } => libc::ENOSPC,
            _ => libc::EINVAL,
        }
    }

    /// The remedy for the user, where there is one.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::SnapshotExtraTooLarge { .. } | Self::SnapshotTableTooBig => {
                Some("Repair the snapshot table")
            }
            Self::CorruptImage => Some("Open it read-only, or repair it"),
            _ => None,
        }
    }
}

impl EntryError {
    /// The errno of a request that meets the entry: the image is corrupt there.
    pub fn errno(&self) -> i32 {
        libc::EIO
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_features_are_listed_as_qemu_lists_them() {
        let error =
            FormatError::UnsupportedFeatures { names: vec!["one".into(), "two\n".into()], unnamed: 0x8000 };
        assert_eq!(
            error.to_string(),
            "Unsupported qcow2 feature(s): one, two\\n, Unknown incompatible feature: 8000"
        );
    }

    #[test]
    fn names_from_an_image_cannot_reach_the_terminal_raw() {
        let error = FormatError::BitmapConstraints { name: "a\x1b[31m".into() };
        assert_eq!(error.to_string(), "Bitmap 'a\\u{1b}[31m' doesn't satisfy the constraints");
    }
}
