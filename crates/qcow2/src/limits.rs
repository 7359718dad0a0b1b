//! Limits of the format, and those that QEMU adds to it: an image beyond them would not open there.

/// log2 of the smallest cluster, 512 bytes (format).
pub const MIN_CLUSTER_BITS: u32 = 9;
/// log2 of the largest cluster, 2 MiB (QEMU; the format itself has no upper bound).
pub const MAX_CLUSTER_BITS: u32 = 21;
/// log2 of the smallest cluster with extended L2 entries: 32 subclusters of at least 512 bytes.
pub const MIN_CLUSTER_BITS_EXTENDED_L2: u32 = 14;
/// Subclusters in a cluster with extended L2 entries (format).
pub const SUBCLUSTERS_PER_CLUSTER: u32 = 32;
/// log2 of [`SUBCLUSTERS_PER_CLUSTER`].
pub const SUBCLUSTERS_PER_CLUSTER_BITS: u32 = 5;
/// The sector of the compressed cluster descriptor and of a virtual size, in bytes (format).
pub const SECTOR_SIZE: u64 = 512;
/// log2 of [`SECTOR_SIZE`].
pub const SECTOR_BITS: u32 = 9;

/// log2 of the widest refcount, 64 bits (format).
pub const MAX_REFCOUNT_ORDER: u32 = 6;
/// log2 of the refcount width of version 2 images and the default of version 3: 16 bits (format).
pub const DEFAULT_REFCOUNT_ORDER: u32 = 4;

/// Bytes of the active L1 table, and of a snapshot's (QEMU).
pub const MAX_L1_SIZE: u64 = 32 << 20;
/// Entries of an L1 table that hold within [`MAX_L1_SIZE`].
pub const MAX_L1_ENTRIES: u64 = MAX_L1_SIZE / 8;
/// Bytes of the refcount table (QEMU).
pub const MAX_REFTABLE_SIZE: u64 = 8 << 20;
/// First host offset that no L1 or L2 entry can express: 2^56 (format).
pub const HOST_OFFSET_END: u64 = 1 << 56;

/// Internal snapshots of an image (QEMU).
pub const MAX_SNAPSHOTS: u32 = 65536;
/// Bytes of a snapshot table entry without extra data, identifier and name (format).
pub const MIN_SNAPSHOT_ENTRY: u64 = 40;
/// Bytes of extra data of one snapshot table entry (QEMU).
pub const MAX_SNAPSHOT_EXTRA: u32 = 1024;
/// Bytes of the snapshot table (QEMU).
pub const MAX_SNAPSHOT_TABLE_SIZE: u64 = MAX_SNAPSHOT_EXTRA as u64 * MAX_SNAPSHOTS as u64;

/// Bytes of a backing file name (format).
pub const MAX_BACKING_NAME: u32 = 1023;
/// Bytes of a backing format name (QEMU).
pub const MAX_BACKING_FORMAT: u32 = 15;

/// Bitmaps of an image (QEMU).
pub const MAX_BITMAPS: u32 = 65535;
/// Bytes of the bitmap directory (QEMU).
pub const MAX_BITMAP_DIRECTORY_SIZE: u64 = 67_107_840;
/// Entries of one bitmap's table (QEMU).
pub const MAX_BITMAP_TABLE_ENTRIES: u32 = 1 << 27;
/// Bytes of one bitmap's data on disk (QEMU).
pub const MAX_BITMAP_DATA_SIZE: u64 = 512 << 20;
/// Bytes of a bitmap's name (format: 1023, QEMU the same).
pub const MAX_BITMAP_NAME: u32 = 1023;
/// log2 of the finest granularity of a bitmap, in bytes (format).
pub const MIN_BITMAP_GRANULARITY_BITS: u8 = 9;
/// log2 of the coarsest granularity of a bitmap, in bytes (format).
pub const MAX_BITMAP_GRANULARITY_BITS: u8 = 31;

/// Host clusters that QEMU's consistency check can count.
pub const MAX_CHECKED_CLUSTERS: u64 = i32::MAX as u64;
