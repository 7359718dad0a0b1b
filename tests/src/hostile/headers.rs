//! The checks made when an image is opened, one image for each: sizes, offsets and feature bits of the header.

use super::Hostile;
use super::base::{EXTENSIONS, NAME};
use crate::patch::header as field;

macro_rules! hostile {
    ($($name:literal: $patch:ident => $damage:expr;)*) => {
        &[$(Hostile { name: $name, damage: |$patch| { $damage; } }),*]
    };
}
pub(super) use hostile;

/// The fields of the header.
pub const ALL: &[Hostile] = hostile! {
    "open 1: cut off within the header": p => p.truncate(50);
    "open 1: an empty file": p => p.truncate(0);
    "open 2: another magic": p => p.set(0, b"QED\0");
    "open 3: version 1": p => p.set_u32(4, 1);
    "open 3: version 4 (CVE-2014-0144)": p => p.set_u32(4, 4);
    "open 3: the largest version": p => p.set_u32(4, u32::MAX);
    "open 4: cluster bits 0 (CVE-2014-0142)": p => p.set_u32(field::CLUSTER_BITS, 0);
    "open 4: cluster bits 8": p => p.set_u32(field::CLUSTER_BITS, 8);
    "open 4: cluster bits 22": p => p.set_u32(field::CLUSTER_BITS, 22);
    "open 4: cluster bits 64 (CVE-2014-0143)": p => p.set_u32(field::CLUSTER_BITS, 64);
    "open 4: the most cluster bits": p => p.set_u32(field::CLUSTER_BITS, u32::MAX);
    "the smallest clusters": p => p.set_u32(field::CLUSTER_BITS, 9);
    "the largest clusters": p => p.set_u32(field::CLUSTER_BITS, 21);
    "open 5: a short header": p => p.set_u32(field::HEADER_LENGTH, 103);
    "open 6: a header longer than a cluster": p => p.set_u32(field::HEADER_LENGTH, 65537);
    "open 6: the longest header": p => p.set_u32(field::HEADER_LENGTH, u32::MAX);
    "open 8: the backing name past the first cluster (CVE-2014-0144)": p => p.set_u64(8, 1 << 20);
    "open 8: the backing name at the largest offset": p => p.set_u64(8, u64::MAX);
    "open 9: an unknown compression type": p => p.set(field::COMPRESSION_TYPE, &[9]);
    "open 10: the bit of the compression type alone": p => p.set_u64(field::INCOMPATIBLE, 8);
    "open 11: the compression type without its bit": p => p.set(field::COMPRESSION_TYPE, &[1]);
    "zstd said of a deflate stream": p => p.set(field::COMPRESSION_TYPE, &[1]).set_u64(field::INCOMPATIBLE, 8);
    "open 12: an unknown incompatible feature": p => p.set_u64(field::INCOMPATIBLE, 1 << 40);
    "open 12: all incompatible features": p => p.set_u64(field::INCOMPATIBLE, u64::MAX);
    "open 13: corrupt": p => p.set_u64(field::INCOMPATIBLE, 2);
    "open 14: extended entries in small clusters": p => p.set_u64(field::INCOMPATIBLE, 16).set_u32(field::CLUSTER_BITS, 13);
    "extended entries said of plain ones": p => p.set_u64(field::INCOMPATIBLE, 16);
    "open 15: refcounts of 128 bits": p => p.set_u32(96, 7);
    "open 15: the widest refcounts": p => p.set_u32(96, u32::MAX);
    "refcounts of 1 bit said of 16": p => p.set_u32(96, 0);
    "open 16: AES": p => p.set_u32(field::CRYPT_METHOD, 1);
    "open 17: no refcount table": p => p.set_u32(field::REFCOUNT_TABLE_CLUSTERS, 0);
    "open 18: a refcount table above the limit (CVE-2014-0144)": p => p.set_u32(field::REFCOUNT_TABLE_CLUSTERS, 129);
    "open 18: the largest refcount table": p => p.set_u32(field::REFCOUNT_TABLE_CLUSTERS, u32::MAX);
    "a refcount table of 8 MiB in a small file": p => p.set_u32(field::REFCOUNT_TABLE_CLUSTERS, 128);
    "open 19: the refcount table unaligned": p => p.set_u64(field::REFCOUNT_TABLE_OFFSET, 65537);
    "open 19: the refcount table past 2^63": p => p.set_u64(field::REFCOUNT_TABLE_OFFSET, 0xffff_ffff_ffff_0000);
    "the refcount table on the header": p => p.set_u64(field::REFCOUNT_TABLE_OFFSET, 0);
    "the refcount table far past the file": p => p.set_u64(field::REFCOUNT_TABLE_OFFSET, 1 << 50);
    "open 20: more snapshots than allowed": p => p.set_u32(field::SNAPSHOT_COUNT, 65537);
    "open 20: the most snapshots (CVE-2014-0145)": p => p.set_u32(field::SNAPSHOT_COUNT, u32::MAX);
    "65536 snapshots in a small file": p => p.set_u32(field::SNAPSHOT_COUNT, 65536);
    "open 21: the snapshot table unaligned": p => p.set_u64(field::SNAPSHOTS_OFFSET, 512);
    "the snapshot table far past the file": p => p.set_u64(field::SNAPSHOTS_OFFSET, 1 << 60);
    "open 22: an L1 table above the limit (CVE-2014-0145)": p => p.set_u32(field::L1_SIZE, (4 << 20) + 1);
    "open 22: the largest L1 table": p => p.set_u32(field::L1_SIZE, u32::MAX);
    "an L1 table of 32 MiB in a small file (CVE-2018-10908)": p => p.set_u32(field::L1_SIZE, 4 << 20);
    "open 23: the L1 table unaligned": p => p.set_u64(field::L1_TABLE_OFFSET, 196_609);
    "open 23: the L1 table past 2^63": p => p.set_u64(field::L1_TABLE_OFFSET, 0xffff_ffff_ffff_0000);
    "the L1 table on the header": p => p.set_u64(field::L1_TABLE_OFFSET, 0);
    "the L1 table far past the file": p => p.set_u64(field::L1_TABLE_OFFSET, 1 << 50);
    "open 24: the largest disk (CVE-2014-0223)": p => p.set_u64(field::SIZE, u64::MAX);
    "open 24: a disk of 2^63 bytes": p => p.set_u64(field::SIZE, 1 << 63);
    "a disk of 2 PiB in a small file (CVE-2015-5162)": p => p.set_u64(field::SIZE, 1 << 51).set_u32(field::L1_SIZE, 4 << 20);
    "open 25: an L1 table too small (CVE-2014-0222)": p => p.set_u64(field::SIZE, 1 << 40);
    "open 25: no L1 table": p => p.set_u32(field::L1_SIZE, 0);
    "an empty disk": p => p.set_u64(field::SIZE, 0);
    "a disk of one byte more": p => p.set_u64(field::SIZE, super::base::SIZE + 1);
    "open 44: an unknown encryption": p => p.set_u32(field::CRYPT_METHOD, u32::MAX);
    "open 47: dirty": p => p.set_u64(field::INCOMPATIBLE, 1);
};

/// The header extensions.
pub const EXTENSION_FIELDS: &[Hostile] = hostile! {
    "open 29: an extension longer than its area": p => p.set_u32(EXTENSIONS + 4, u32::MAX);
    "open 30: a long backing format": p => p.set_u32(EXTENSIONS, 0xe279_2aca);
    "open 31: a LUKS header without LUKS": p => p.set_u32(EXTENSIONS, 0x0537_be77).set_u32(EXTENSIONS + 4, 16);
    "open 32: a LUKS pointer of another length": p => p.set_u32(field::CRYPT_METHOD, 2).set_u32(EXTENSIONS, 0x0537_be77);
    "open 33: a LUKS header that is unaligned": p =>
        p.set_u32(field::CRYPT_METHOD, 2).set_u32(EXTENSIONS, 0x0537_be77).set_u32(EXTENSIONS + 4, 16).set_u64(EXTENSIONS + 8, 1);
    "a LUKS header far past the file": p =>
        p.set_u32(field::CRYPT_METHOD, 2).set_u32(EXTENSIONS, 0x0537_be77).set_u32(EXTENSIONS + 4, 16)
            .set_u64(EXTENSIONS + 8, 1 << 50).set_u64(EXTENSIONS + 16, 1 << 20);
    "a LUKS header of 2^64 bytes": p =>
        p.set_u32(field::CRYPT_METHOD, 2).set_u32(EXTENSIONS, 0x0537_be77).set_u32(EXTENSIONS + 4, 16)
            .set_u64(EXTENSIONS + 8, 65536).set_u64(EXTENSIONS + 16, u64::MAX);
    "a LUKS header that is the header of the image": p =>
        p.set_u32(field::CRYPT_METHOD, 2).set_u32(EXTENSIONS, 0x0537_be77).set_u32(EXTENSIONS + 4, 16)
            .set_u64(EXTENSIONS + 8, 0).set_u64(EXTENSIONS + 16, 65536);
    "open 34: a bitmaps extension of another length": p => p.set_u32(EXTENSIONS + 4, 23);
    "open 35: bitmaps without their bit": p => p.set_u64(field::AUTOCLEAR, 0);
    "open 36: the reserved field of the bitmaps": p => p.set_u32(EXTENSIONS + 12, 1);
    "open 37: too many bitmaps": p => p.set_u32(EXTENSIONS + 8, 65536);
    "open 38: no bitmaps": p => p.set_u32(EXTENSIONS + 8, 0);
    "open 39: the bitmap directory unaligned": p => p.set_u64(EXTENSIONS + 24, 8);
    "open 40: a bitmap directory above the limit": p => p.set_u64(EXTENSIONS + 16, u64::MAX);
    "a bitmap directory of 64 MiB in a small file": p => p.set_u64(EXTENSIONS + 16, 67_107_840);
    "the bitmap directory far past the file": p => p.set_u64(EXTENSIONS + 24, 1 << 60);
    "a bitmap table of 2^27 entries": p => p.set_u32(super::base::BITMAPS + 8, 1 << 27);
    "a bitmap table far past the file": p => p.set_u64(super::base::BITMAPS, 1 << 60);
    "a bitmap of granularity 2^255": p => p.set(super::base::BITMAPS + 17, &[255]);
    "a bitmap entry with a long name": p => p.set(super::base::BITMAPS + 18, &[255, 255]);
    "a bitmap entry with 4 GiB of extra data": p => p.set_u32(super::base::BITMAPS + 20, u32::MAX);
    "open 41: a data file without a name": p => p.set_u64(field::INCOMPATIBLE, 4);
    "open 42: a raw data file without its bit": p => p.set_u64(field::AUTOCLEAR, 3);
    "open 43: LUKS without its header": p => p.set_u32(field::CRYPT_METHOD, 2);
    "open 45: a long backing name": p => p.set_u64(8, NAME).set_u32(field::BACKING_FILE_SIZE, 1024);
    "open 45: the longest backing name": p => p.set_u64(8, NAME).set_u32(field::BACKING_FILE_SIZE, u32::MAX);
    "a backing name of zeroes": p => p.set_u64(8, NAME).set_u32(field::BACKING_FILE_SIZE, 16);
};
