//! An intact image with one of each: data, a compressed and a zero cluster, a snapshot, a bitmap. Cluster by cluster,
//! so that damage can name its place.

/// Bytes of a cluster.
pub const CLUSTER: u64 = 1 << 16;
/// Bytes of the disk.
pub const SIZE: u64 = 4 << 20;
/// Where each thing lies, bytes.
pub const REFTABLE: u64 = CLUSTER;
/// The refcount block.
pub const REFBLOCK: u64 = 2 * CLUSTER;
/// The active L1 table.
pub const L1: u64 = 3 * CLUSTER;
/// Its L2 table: data, compressed, zero, data.
pub const L2: u64 = 4 * CLUSTER;
/// The data of guest cluster 0.
pub const DATA: u64 = 5 * CLUSTER;
/// The compressed stream of guest cluster 1.
pub const STREAM: u64 = 6 * CLUSTER;
/// The snapshot table.
pub const SNAPSHOTS: u64 = 7 * CLUSTER;
/// The L1 table of the snapshot, with no entry set.
pub const SNAPSHOT_L1: u64 = 8 * CLUSTER;
/// The bitmap directory.
pub const BITMAPS: u64 = 9 * CLUSTER;
/// The table of the bitmap.
pub const BITMAP_TABLE: u64 = 10 * CLUSTER;
/// The data of guest cluster 3.
pub const DATA_2: u64 = 11 * CLUSTER;
/// Where the first header extension starts: the bitmaps extension.
pub const EXTENSIONS: u64 = 112;
/// A place in the first cluster for names.
pub const NAME: u64 = 4096;

const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;
/// 70 minus the cluster bits: where the number of sectors starts in an entry of a compressed cluster.
const SECTORS_SHIFT: u64 = 54;

/// The entry for a compressed stream at `offset` of `sectors` additional sectors.
pub fn compressed(offset: u64, sectors: u64) -> u64 {
    COMPRESSED | (sectors << SECTORS_SHIFT) | offset
}

/// `bytes` as a raw deflate stream, as long as they compress well.
pub fn deflated(bytes: &[u8]) -> Vec<u8> {
    let mut stream = vec![0; bytes.len() / 50 + 4096];
    let mut compress = flate2::Compress::new_with_window_bits(flate2::Compression::best(), false, 12);
    let status = compress.compress(bytes, &mut stream, flate2::FlushCompress::Finish);
    assert_eq!(status.expect("memory is enough"), flate2::Status::StreamEnd, "it compresses well");
    stream.truncate(compress.total_out() as usize);
    stream
}

/// A zstd frame without its content's size, a window of 2 to the power of `window` bytes, and `len` times `byte` in blocks
/// of at most 128 KiB (RFC 8878, 3.1.1).
pub fn zstd_run(window: u32, byte: u8, len: usize) -> Vec<u8> {
    let mut frame = vec![0x28, 0xb5, 0x2f, 0xfd, 0, ((window - 10) << 3) as u8];
    let mut left = len;
    loop {
        let block = left.min(128 << 10);
        left -= block;
        // Its last bit says whether it is the last block, the next two that it is one byte, repeated.
        let header = (block as u32) << 3 | 1 << 1 | u32::from(left == 0);
        frame.extend_from_slice(&header.to_le_bytes()[..3]);
        frame.push(byte);
        if left == 0 {
            return frame;
        }
    }
}

/// The image.
pub fn image() -> Vec<u8> {
    let mut image = vec![0; 12 * CLUSTER as usize];
    let mut set =
        |at: u64, bytes: &[u8]| image[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
    let words: [(u64, u32); 11] = [
        (0, 0x5146_49fb),
        (4, 3),
        (20, 16),
        (36, 1),
        (56, 1),
        (60, 1),
        (96, 4),
        (100, 112),
        (EXTENSIONS, 0x2385_2875),
        (EXTENSIONS + 4, 24),
        (EXTENSIONS + 8, 1),
    ];
    for (at, value) in words {
        set(at, &value.to_be_bytes());
    }
    let longs: [(u64, u64); 16] = [
        (24, SIZE),
        (40, L1),
        (48, REFTABLE),
        (64, SNAPSHOTS),
        (88, 1),
        (EXTENSIONS + 16, 32),
        (EXTENSIONS + 24, BITMAPS),
        (REFTABLE, REFBLOCK),
        (L1, L2 | COPIED),
        (L2, DATA | COPIED),
        (L2 + 8, compressed(STREAM, 0)),
        (L2 + 16, 1),
        (L2 + 24, DATA_2 | COPIED),
        // A snapshot with 24 bytes of extra data, named "s".
        (SNAPSHOTS, SNAPSHOT_L1),
        (SNAPSHOTS + 48, SIZE),
        (BITMAPS, BITMAP_TABLE),
    ];
    for (at, value) in longs {
        set(at, &value.to_be_bytes());
    }
    for cluster in 0..12 {
        set(REFBLOCK + cluster * 2, &1u16.to_be_bytes());
    }
    set(SNAPSHOTS + 8, &1u32.to_be_bytes());
    set(SNAPSHOTS + 12, &[0, 1, 0, 1]);
    set(SNAPSHOTS + 36, &24u32.to_be_bytes());
    set(SNAPSHOTS + 64, b"1s");
    // One entry, which says that no bit is set; tracking writes, of 64 KiB each, named "bitmap".
    set(BITMAPS + 8, &1u32.to_be_bytes());
    set(BITMAPS + 12, &2u32.to_be_bytes());
    set(BITMAPS + 16, &[1, 16, 0, 6]);
    set(BITMAPS + 24, b"bitmap");
    set(DATA, &vec![0x11; CLUSTER as usize]);
    set(DATA_2, &vec![0x33; CLUSTER as usize]);
    set(STREAM, &deflated(&vec![0x22; CLUSTER as usize]));
    image
}
