//! Damage that is found when tables are used: entries that are unaligned, past the end, on metadata, or in a circle.

use super::Hostile;
use super::base::{
    BITMAP_TABLE, BITMAPS, CLUSTER, DATA, DATA_2, L1, L2, REFBLOCK, REFTABLE, SNAPSHOT_L1, SNAPSHOTS, STREAM,
    compressed, deflated, zstd_run,
};
use super::headers::hostile;
use crate::patch::{COPIED, Patch, header as field};

/// L1 and L2 tables.
pub const MAPPING: &[Hostile] = hostile! {
    "run: an L2 table unaligned": p => p.set_u64(L1, (L2 + 512) | COPIED);
    "run: an L2 table on the header (cloud-hypervisor 8008)": p => p.set_u64(L1, COPIED);
    "an L2 table that is the L1 table": p => p.set_u64(L1, L1 | COPIED);
    "an L2 table that is the refcount table": p => p.set_u64(L1, REFTABLE | COPIED);
    "an L2 table far past the file": p => p.set_u64(L1, (1 << 55) | COPIED);
    "all bits of an L1 entry": p => p.set_u64(L1, u64::MAX);
    "run: data unaligned": p => p.set_u64(L2, (DATA + 512) | COPIED);
    "run: data at offset 0": p => p.set_u64(L2, COPIED);
    "run: data on the L1 table": p => p.set_u64(L2, L1 | COPIED);
    "run: data on its own L2 table": p => p.set_u64(L2, L2 | COPIED);
    "run: data on the refcount table": p => p.set_u64(L2, REFTABLE | COPIED);
    "run: data on a refcount block": p => p.set_u64(L2, REFBLOCK | COPIED);
    "run: data on the snapshot table": p => p.set_u64(L2, SNAPSHOTS | COPIED);
    "run: data on a snapshot's L1 table": p => p.set_u64(L2, SNAPSHOT_L1 | COPIED);
    "data far past the file": p => p.set_u64(L2, (1 << 55) | COPIED);
    "two guest clusters on one": p => p.set_u64(L2 + 8, DATA | COPIED);
    "all bits of an L2 entry": p => p.set_u64(L2, u64::MAX);
    "the reserved bits of an L2 entry": p => p.set_u64(L2, (0x3f << 56) | DATA | COPIED);
    "run: a preallocated zero cluster unaligned": p => p.set_u64(L2 + 16, 0x201);
    "run: a zero cluster in version 2": p => p.set_u32(4, 2);
    "an L2 table full of one cluster": p => for entry in 0..CLUSTER / 8 { p.set_u64(L2 + entry * 8, DATA | COPIED); };
    "run: a compressed cluster with a data file": p => p.set_u64(field::INCOMPATIBLE, 4);
    "run: data on an L2 table of a snapshot": p => p.set_u64(SNAPSHOT_L1, DATA_2 | COPIED);
    "run: data on the bitmap directory": p => p.set_u64(L2, BITMAPS | COPIED);
    "run: data on a bitmap's table": p => p.set_u64(L2, BITMAP_TABLE | COPIED);
    "run: a subcluster that is data and zero": p => subclusters(p, DATA | COPIED, u64::MAX);
    "run: subclusters of data with no place": p => subclusters(p, 0, 0xffff_ffff);
    "run: subclusters of data on the header": p => subclusters(p, COPIED, 0xffff_ffff);
    "run: a compressed cluster with subclusters": p => subclusters(p, compressed(STREAM, 0), 0x5555);
    "cut off within the L2 table": p => p.truncate(L2 + 4);
    "cut off within the data": p => p.truncate(DATA + 4);
};

/// Refcounts.
pub const REFCOUNTS: &[Hostile] = hostile! {
    "run: a refcount block unaligned": p => p.set_u64(REFTABLE, REFBLOCK + 512);
    "run: no references in the refcount table": p => p.set_u64(REFTABLE, 0);
    "run: a refcount block on the header": p => p.set_u64(REFTABLE, 0x1ff);
    "a refcount block that is the refcount table": p => p.set_u64(REFTABLE, REFTABLE);
    "a refcount block far past the file": p => p.set_u64(REFTABLE, 1 << 62);
    "a refcount block past what an L2 entry can name": p => p.set_u64(REFTABLE, 1 << 56 | REFBLOCK);
    "no refcount at all, and a damaged stream": p => p.set(REFBLOCK, &[0; 24]).set(STREAM, &[255; 64]);
    "a refcount block for clusters far past the file": p => p.set_u64(REFTABLE + 8 * 8191, REFBLOCK);
    "a refcount table full of one block": p => for entry in 0..CLUSTER / 8 { p.set_u64(REFTABLE + entry * 8, REFBLOCK); };
    "the largest refcount of data": p => p.set(REFBLOCK + 10, &[255, 255]);
    "the largest refcount of every cluster": p => p.set(REFBLOCK, &[255; CLUSTER as usize]);
    "no refcount for data": p => p.set(REFBLOCK + 10, &[0, 0]);
    "no refcount at all, so that metadata is taken for free space": p => p.set(REFBLOCK, &[0; 24]);
    "no refcount for an L2 table": p => p.set(REFBLOCK + 8, &[0, 0]);
};

/// Snapshots.
pub const INTERNAL_SNAPSHOTS: &[Hostile] = hostile! {
    "open 46: 4 GiB of extra data": p => p.set_u32(SNAPSHOTS + 36, u32::MAX);
    "open 46: 1025 bytes of extra data": p => p.set_u32(SNAPSHOTS + 36, 1025);
    "open 46: no extra data": p => p.set_u32(SNAPSHOTS + 36, 0);
    "a snapshot with a long id and name": p => p.set(SNAPSHOTS + 12, &[255; 4]);
    "a snapshot's L1 table unaligned (CVE-2014-0147)": p => p.set_u64(SNAPSHOTS, SNAPSHOT_L1 + 8);
    "a snapshot's L1 table far past the file": p => p.set_u64(SNAPSHOTS, 1 << 60);
    "a snapshot's L1 table above the limit (CVE-2014-0143)": p => p.set_u32(SNAPSHOTS + 8, u32::MAX);
    "a snapshot's L1 table of 32 MiB": p => p.set_u32(SNAPSHOTS + 8, 4 << 20);
    "a snapshot's L1 table at the end of all addresses": p => p.set_u64(SNAPSHOTS, u64::MAX);
    "a snapshot's L1 table of 32 GiB in clusters of 512 bytes": p => p.truncate(0).set(0, &small_clusters(1));
    "1000 snapshots' L1 tables of 32 GiB in clusters of 512 bytes": p => p.truncate(0).set(0, &small_clusters(1000));
    "a snapshot's L1 table on the header": p => p.set_u64(SNAPSHOTS, 0);
    "a snapshot that is the active disk": p => p.set_u64(SNAPSHOTS, L1);
    "a snapshot of the largest disk": p => p.set_u64(SNAPSHOTS + 48, u64::MAX);
    "the snapshot table on the L1 table": p => p.set_u64(field::SNAPSHOTS_OFFSET, L1);
    "the snapshot table on the header": p => p.set_u64(field::SNAPSHOTS_OFFSET, 0);
};

/// An empty disk of 4 MiB in clusters of 512 bytes, with snapshots whose L1 tables begin in the file and have as many
/// entries as can be said.
fn small_clusters(snapshots: u32) -> Vec<u8> {
    const CLUSTER: usize = 512;
    // Header, refcount table, refcount blocks for 1024 clusters, L1 table of 128 entries, then the snapshots.
    let (blocks, l1, table) = (2, 6, 8);
    let mut image = vec![0; table * CLUSTER + snapshots as usize * 40];
    image.resize(image.len().next_multiple_of(CLUSTER), 0);
    let mut set = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
    for (at, value) in
        [(0, 0x5146_49fb), (4, 3), (20, 9), (36, 128), (56, 1), (60, snapshots), (96, 4), (100, 104u32)]
    {
        set(at, &value.to_be_bytes());
    }
    for (at, cluster) in [(40, l1), (48, 1), (64, table)] {
        set(at, &(cluster as u64 * CLUSTER as u64).to_be_bytes());
    }
    set(24, &(4u64 << 20).to_be_bytes());
    for block in 0..4 {
        set(CLUSTER + block * 8, &((blocks + block) as u64 * CLUSTER as u64).to_be_bytes());
        set((blocks + block) * CLUSTER, &[0, 1].repeat(CLUSTER / 2));
    }
    for number in 0..snapshots as usize {
        let at = table * CLUSTER + number * 40;
        set(at, &(((number % 4) * CLUSTER) as u64).to_be_bytes());
        set(at + 8, &u32::MAX.to_be_bytes());
    }
    image
}

/// Compressed clusters.
pub const COMPRESSED: &[Hostile] = hostile! {
    "a stream of garbage": p => p.set(STREAM, &[0x5a; 512]);
    "a stream on the header": p => p.set_u64(L2 + 8, compressed(0, 255));
    "a stream far past the file": p => p.set_u64(L2 + 8, compressed(1 << 53, 255));
    "a stream cut off": p => p.set(STREAM + 20, &[0; 492]);
    "a stream of one cluster too little": p => p.set(STREAM, &deflated(&[0x22; 512]));
    "a bomb: a stream of 16 MiB for one cluster": p => p.set(STREAM, &deflated(&vec![0; 16 << 20])).set_u64(L2 + 8, compressed(STREAM, 255));
    "a table full of one stream": p => for entry in 0..64 { p.set_u64(L2 + entry * 8, compressed(STREAM, 0)); };
    "a stream with the copied bit": p => p.set_u64(L2 + 8, COPIED | compressed(STREAM, 0));
    "zstd: garbage": p => zstd(p, &[0x5a; 512]);
    "zstd: a frame of one cluster too little": p => zstd(p, &zstd_run(16, 7, 512));
    "zstd: a bomb: a frame of 1 GiB for one cluster": p => zstd(p, &zstd_run(30, 0, 1 << 30)).set_u64(L2 + 8, compressed(STREAM, 255));
    "zstd: a window of 128 MiB": p => zstd(p, &zstd_run(27, 7, CLUSTER as usize));
    "zstd: a window of 2 TiB": p => zstd(p, &zstd_run(41, 7, CLUSTER as usize));
    "zstd: frames without content": p => zstd(p, &zstd_run(10, 7, 0).repeat(6000)).set_u64(L2 + 8, compressed(STREAM, 255));
    "zstd: a frame to be skipped that is longer than the file": p => zstd(p, &[0x50, 0x2a, 0x4d, 0x18, 255, 255, 255, 255]);
    "zstd: a dictionary that nobody has": p => zstd(p, &[0x28, 0xb5, 0x2f, 0xfd, 3, 0x30, 1, 2, 3, 4, 3, 0, 8, 7]);
};

/// The image has extended entries, of which the first is these two words and the others say that nothing is there.
fn subclusters(p: &Patch, entry: u64, bitmap: u64) -> &Patch {
    p.set_u64(field::INCOMPATIBLE, 16).set(L2, &[0; 256]).set_u64(L2, entry).set_u64(L2 + 8, bitmap)
}

/// The image says that it is compressed by zstd, and `stream` lies where its only stream does.
fn zstd<'a>(p: &'a Patch, stream: &[u8]) -> &'a Patch {
    p.set(field::COMPRESSION_TYPE, &[1]).set_u64(field::INCOMPATIBLE, 8).set(STREAM, stream)
}
