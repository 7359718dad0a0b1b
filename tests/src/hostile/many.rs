//! Small files that claim much: bits that are all set, bitmaps by the thousand, the largest disks, tables that stand for
//! many.

use super::Hostile;
use super::base::{BITMAP_TABLE, BITMAPS, CLUSTER, EXTENSIONS, L2, REFBLOCK};
use super::headers::hostile;
use crate::patch::{Patch, header as field};

/// Where the count of bitmaps is in the bitmaps extension; their directory's size and offset follow.
const BITMAP_COUNT: u64 = EXTENSIONS + 8;
/// A place behind all that the intact image has.
const END: u64 = 12 * CLUSTER;
const TIB: u64 = 1 << 40;

/// All of them.
pub const ALL: &[Hostile] = hostile! {
    "a bitmap of 512 MiB in which all bits are set": p => one_table_of_set_bits(p, 1);
    "10 bitmaps of 512 MiB with one table": p => one_table_of_set_bits(p, 10);
    "20,000 bitmaps with one table": p => bitmaps(p, 20_000, 1, 16);
    "an empty disk of 64 TiB": p => empty_disk(p, 64 * TIB);
    "4,096 L1 entries that lead to one L2 table of zeroes": p => one_table_for_all(p, 4096, |_| 1);
    "64 L1 entries that lead to one L2 table of many runs": p => one_table_for_all(p, 64, |cluster| cluster % 2);
};

/// The disk has as many bytes, and nothing in it.
fn empty_disk(p: &Patch, size: u64) {
    let entries = size.div_ceil(CLUSTER * CLUSTER / 8);
    p.set_u64(field::SIZE, size).set_u32(field::L1_SIZE, entries as u32).set_u64(field::L1_TABLE_OFFSET, END);
    p.truncate((END + entries * 8).next_multiple_of(CLUSTER));
    count_clusters(p, END, entries * 8);
}

/// A disk whose L1 entries all lead to one table, which says the same of each part of it.
fn one_table_for_all(p: &Patch, entries: u64, l2_entry: fn(u64) -> u64) {
    empty_disk(p, entries * (CLUSTER / 8) * CLUSTER);
    for entry in 0..entries {
        p.set_u64(END + entry * 8, L2);
    }
    for cluster in 0..CLUSTER / 8 {
        p.set_u64(L2 + cluster * 8, l2_entry(cluster));
    }
    p.set(REFBLOCK + L2 / CLUSTER * 2, &(entries as u16).to_be_bytes());
}

/// Bits for granules of 512 bytes of a disk of 2 TiB, all set, in bitmaps that have the same table.
fn one_table_of_set_bits(p: &Patch, count: u64) {
    empty_disk(p, 2 * TIB);
    for entry in 0..CLUSTER / 8 {
        p.set_u64(BITMAP_TABLE + entry * 8, 1);
    }
    bitmaps(p, count, (CLUSTER / 8) as u32, 9);
}

/// Bitmaps that record writes and lead to the table of the intact image's.
fn bitmaps(p: &Patch, count: u64, entries: u32, granularity_bits: u8) {
    let at = if count == 1 { BITMAPS } else { END + 32 * CLUSTER };
    let mut bytes = Vec::new();
    for number in 0..count {
        // The first is the one that commands name.
        let name = if number == 0 { "bitmap".to_owned() } else { format!("b{number:05}") };
        bytes.extend_from_slice(&BITMAP_TABLE.to_be_bytes());
        bytes.extend_from_slice(&entries.to_be_bytes());
        bytes.extend_from_slice(&2u32.to_be_bytes());
        bytes.extend_from_slice(&[1, granularity_bits, 0, name.len() as u8, 0, 0, 0, 0]);
        bytes.extend_from_slice(name.as_bytes());
        bytes.resize(bytes.len().next_multiple_of(8), 0);
    }
    let len = bytes.len() as u64;
    p.set(at, &bytes).set_u32(BITMAP_COUNT, count as u32);
    p.set_u64(BITMAP_COUNT + 8, len).set_u64(BITMAP_COUNT + 16, at);
    count_clusters(p, at, len);
}

/// The clusters of a place have the refcount 1.
fn count_clusters(p: &Patch, at: u64, len: u64) {
    for cluster in at / CLUSTER..(at + len).div_ceil(CLUSTER) {
        p.set(REFBLOCK + cluster * 2, &[0, 1]);
    }
}
