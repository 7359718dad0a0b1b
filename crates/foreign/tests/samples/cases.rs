//! Damaged images: each is a sample with one thing done to it.

use super::hyper_v::{BLOCK, LOG, METADATA, TABLE, set_vhd_sum, set_vhdx_sum};
use super::vmware::descriptor;
use super::{Sample, put};

/// The damage, the image, what is done to it, and a part of the error.
pub type Case = (&'static str, fn() -> Sample, fn(&mut Vec<u8>), &'static str);

fn le32(image: &mut Vec<u8>, at: usize, value: u32) {
    put(image, at, &value.to_le_bytes());
}

fn le64(image: &mut Vec<u8>, at: usize, value: u64) {
    put(image, at, &value.to_le_bytes());
}

/// Changes a structure of a VHD, and makes its sum right.
fn vhd(image: &mut [u8], (at, len, sum): (usize, usize, usize), field: usize, value: &[u8]) {
    image[at + field..at + field + value.len()].copy_from_slice(value);
    set_vhd_sum(&mut image[at..at + len], sum);
}

const FOOTER: (usize, usize, usize) = (0, 512, 64);
const DYNAMIC: (usize, usize, usize) = (512, 1024, 36);

/// Changes both copies of a structure of a VHDX, and makes their sums right.
fn vhdx_both(image: &mut Vec<u8>, places: [usize; 2], len: usize, field: usize, value: &[u8]) {
    for at in places {
        put(image, at + field, value);
        set_vhdx_sum(image, at, len);
    }
}

const HEADERS: [usize; 2] = [64 << 10, 128 << 10];
const REGIONS: [usize; 2] = [192 << 10, 256 << 10];

/// Damage of every format. The names say what is damaged; those of known holes of other programs are in their comments.
pub const CASES: &[Case] = &[
    ("vdi-version", super::vdi, |i| le32(i, 0x44, 0x0002_0000), "version 2.0"),
    ("vdi-differencing", super::vdi, |i| le32(i, 0x4c, 4), "differencing"),
    ("vdi-map-unaligned", super::vdi, |i| le32(i, 0x154, 513), "sector"),
    ("vdi-data-unaligned", super::vdi, |i| le32(i, 0x158, 1), "sector"),
    ("vdi-sector-size", super::vdi, |i| le32(i, 0x168, 4096), "sector size"),
    ("vdi-block-size-0", super::vdi, |i| le32(i, 0x178, 0), "block size 0"),
    ("vdi-block-size-odd", super::vdi, |i| le32(i, 0x178, 1_000_000), "block size"),
    ("vdi-block-extra", super::vdi, |i| le32(i, 0x17c, 8), "extra data"),
    ("vdi-disk-larger-than-blocks", super::vdi, |i| le64(i, 0x170, u64::MAX), "larger"),
    ("vdi-blocks-past-file", super::vdi, |i| le32(i, 0x180, u32::MAX), "cut off"),
    ("vdi-parent", super::vdi, |i| put(i, 0x1b8, &[1]), "parent UUID"),
    ("vdi-block-past-count", super::vdi, |i| le32(i, 512, 4), "block 4 of 4"),
    ("vdi-block-past-file", super::vdi, |i| le32(i, 512, 3), "cut off"),
    ("vhd-footer-sum", super::vhd_dynamic, |i| i[60 + 20] ^= 1, "checksum"),
    ("vhd-version", super::vhd_dynamic, |i| vhd(i, FOOTER, 12, &[0, 2]), "version 2"),
    ("vhd-header-nowhere", super::vhd_dynamic, |i| vhd(i, FOOTER, 16, &[0xff; 8]), "cut off"),
    ("vhd-header-missing", super::vhd_dynamic, |i| i[512] = 0, "missing"),
    ("vhd-header-sum", super::vhd_dynamic, |i| i[512 + 40] ^= 1, "checksum"),
    ("vhd-block-size-0", super::vhd_dynamic, |i| vhd(i, DYNAMIC, 32, &[0; 4]), "block size 0"),
    ("vhd-block-size-huge", super::vhd_dynamic, |i| vhd(i, DYNAMIC, 32, &[0x80, 0, 0, 0]), "too large"),
    ("vhd-table-too-small", super::vhd_dynamic, |i| vhd(i, DYNAMIC, 28, &[0, 0, 0, 2]), "too small"),
    ("vhd-table-past-file", super::vhd_dynamic, |i| vhd(i, DYNAMIC, 28, &[0xff; 4]), "cut off"),
    ("vhd-block-past-file", super::vhd_dynamic, |i| put(i, 1540, &[0, 0xff, 0, 0]), "cut off"),
    ("vhd-fixed-cut-off", super::vhd_fixed, |i| drop(i.drain(..512)), "cut off"),
    (
        "vhd-fixed-absurd-geometry",
        super::vhd_fixed,
        |i| {
            let at = i.len() - 512;
            i[at + 28..at + 32].copy_from_slice(b"vpc ");
            i[at + 56..at + 60].fill(0xff);
            set_vhd_sum(&mut i[at..], 64);
        },
        "cut off",
    ),
    (
        "vhd-dynamic-without-copy",
        super::vhd_dynamic,
        |i| {
            i.splice(..512, [0; 512]);
        },
        "copy",
    ),
    ("vhd-parent-name-too-long", super::vhd_differencing, |i| vhd(i, DYNAMIC, 584, &[0xff; 4]), "name"),
    ("vhd-parent-name-nowhere", super::vhd_differencing, |i| vhd(i, DYNAMIC, 592, &[0xff; 8]), "cut off"),
    ("vhdx-no-header", super::vhdx, |i| HEADERS.iter().for_each(|at| i[*at] = 0), "No valid VHDX header"),
    ("vhdx-header-sums", super::vhdx, |i| HEADERS.iter().for_each(|at| i[*at + 300] = 1), "No valid"),
    ("vhdx-version", super::vhdx, |i| vhdx_both(i, HEADERS, 4096, 66, &[9]), "version 9"),
    (
        "vhdx-headers-contradict",
        super::vhdx,
        |i| {
            vhdx_both(i, HEADERS, 4096, 8, &[5, 0]);
            vhdx_both(i, [HEADERS[0]; 2], 4096, 32, &[9]);
        },
        "differ",
    ),
    ("vhdx-region-sums", super::vhdx, |i| REGIONS.iter().for_each(|at| i[*at + 20] ^= 1), "region table"),
    ("vhdx-region-count", super::vhdx, |i| vhdx_both(i, REGIONS, 65536, 8, &[0, 8]), "2048 entries"),
    ("vhdx-region-unknown", super::vhdx, |i| vhdx_both(i, REGIONS, 65536, 16, &[9]), "unknown kind"),
    ("vhdx-region-past-file", super::vhdx, |i| vhdx_both(i, REGIONS, 65536, 36, &[1]), "cut off"),
    ("vhdx-region-in-headers", super::vhdx, |i| vhdx_both(i, REGIONS, 65536, 32, &[0; 8]), "aligned"),
    ("vhdx-regions-overlap", super::vhdx, |i| vhdx_both(i, REGIONS, 65536, 34, &[0x20]), "overlap"),
    ("vhdx-metadata-signature", super::vhdx, |i| i[METADATA] = 0, "signature"),
    ("vhdx-metadata-count", super::vhdx, |i| put(i, METADATA + 10, &[0xff; 2]), "65535 entries"),
    ("vhdx-metadata-unknown", super::vhdx, |i| i[METADATA + 32] = 0, "unknown metadata"),
    ("vhdx-metadata-item-outside", super::vhdx, |i| le32(i, METADATA + 48, u32::MAX), "damaged"),
    ("vhdx-metadata-item-huge", super::vhdx, |i| le32(i, METADATA + 52, u32::MAX), "damaged"),
    ("vhdx-block-size", super::vhdx, |i| le32(i, METADATA + 65536, 3 << 20), "block size"),
    ("vhdx-sector-size", super::vhdx, |i| le32(i, METADATA + 65536 + 8192, 1), "sector size"),
    ("vhdx-disk-size-huge", super::vhdx, |i| le64(i, METADATA + 65536 + 4096, u64::MAX), "disk size"),
    ("vhdx-table-too-small", super::vhdx, |i| le64(i, METADATA + 65536 + 4096, 1 << 50), "entries"),
    ("vhdx-parent-without-locator", super::vhdx, |i| le32(i, METADATA + 65536 + 4, 2), "parent"),
    ("vhdx-block-state", super::vhdx, |i| le64(i, TABLE, 4), "state 4"),
    ("vhdx-block-partial", super::vhdx, |i| le64(i, TABLE, 7 | BLOCK as u64), "state 7"),
    ("vhdx-block-past-file", super::vhdx, |i| le64(i, TABLE, 6 | 1 << 40), "cut off"),
    ("vhdx-block-on-headers", super::vhdx, |i| le64(i, TABLE, 6), "headers"),
    ("vhdx-bitmap-missing", super::vhdx_differencing, |i| le64(i, TABLE + 8 * 4096, 0), "bitmap"),
    ("vhdx-log-unaligned", super::vhdx_with_log, |i| vhdx_both(i, HEADERS, 4096, 72, &[1]), "aligned"),
    ("vhdx-log-huge", super::vhdx_with_log, |i| vhdx_both(i, HEADERS, 4096, 68, &[0, 0, 0, 0xff]), "log"),
    ("vhdx-log-version", super::vhdx_with_log, |i| vhdx_both(i, HEADERS, 4096, 64, &[1]), "log version"),
    (
        "vhdx-log-of-a-longer-file",
        super::vhdx_with_log,
        |i| {
            le64(i, LOG + 48, 1 << 40);
            set_vhdx_sum(i, LOG, 8192);
        },
        "cut off",
    ),
    (
        "vhdx-log-descriptor",
        super::vhdx_with_log,
        |i| {
            i[LOG + 64] = 0;
            set_vhdx_sum(i, LOG, 8192);
        },
        "entry 42",
    ),
    (
        "vhdx-log-descriptor-count",
        super::vhdx_with_log,
        |i| {
            le32(i, LOG + 24, u32::MAX);
            set_vhdx_sum(i, LOG, 8192);
        },
        "entry 42",
    ),
    (
        "vhdx-log-changes-data",
        super::vhdx_with_log,
        |i| {
            le64(i, TABLE + 8, 6 | BLOCK as u64);
            le64(i, LOG + 80, BLOCK as u64);
            set_vhdx_sum(i, LOG, 8192);
            let first = LOG + (1 << 20) - 4096;
            le64(i, first + 80, BLOCK as u64);
            set_vhdx_sum(i, first, 4096);
        },
        "changes data",
    ),
    ("vmdk-version", super::sparse, |i| le32(i, 4, 4), "version 4"),
    ("vmdk-granularity-0", super::sparse, |i| le64(i, 20, 0), "granularity 0"),
    ("vmdk-granularity-huge", super::sparse, |i| le64(i, 20, 1 << 40), "granularity"),
    ("vmdk-table-entries-0", super::sparse, |i| le32(i, 44, 0), "0 entries"),
    ("vmdk-table-entries-huge", super::sparse, |i| le32(i, 44, u32::MAX), "entries"),
    ("vmdk-capacity-huge", super::sparse, |i| le64(i, 12, u64::MAX / 512), "cut off"),
    ("vmdk-capacity-overflow", super::sparse, |i| le64(i, 12, u64::MAX), "2^64"),
    ("vmdk-directory-nowhere", super::sparse, |i| le64(i, 56, 1 << 40), "cut off"),
    ("vmdk-directory-overflow", super::sparse, |i| le64(i, 56, u64::MAX - 1), "2^64"),
    ("vmdk-table-nowhere", super::sparse, |i| le32(i, 1536, u32::MAX), "cut off"),
    ("vmdk-grain-nowhere", super::sparse, |i| le32(i, 2048, u32::MAX), "cut off"),
    ("vmdk-descriptor-nowhere", super::sparse, |i| le64(i, 28, 1 << 40), "cut off"),
    ("vmdk-descriptor-huge", super::sparse, |i| le64(i, 36, 1 << 40), "descriptor"),
    ("vmdk-stream-without-footer", super::stream_optimized, |i| i.truncate(i.len() - 512), "footer"),
    (
        "vmdk-stream-footer-of-no-directory",
        super::stream_optimized,
        |i| {
            let at = i.len() - 1024 + 56;
            le64(i, at, u64::MAX);
        },
        "directory",
    ),
    ("vmdk-stream-algorithm", super::stream_optimized, |i| put(i, 77, &[2, 0]), "algorithm 2"),
    ("vmdk-grain-marker", super::stream_optimized, |i| le64(i, 1536, 8), "marked as sector 8"),
    ("vmdk-grain-length-0", super::stream_optimized, |i| le32(i, 1544, 0), "0 bytes"),
    ("vmdk-grain-length-huge", super::stream_optimized, |i| le32(i, 1544, u32::MAX), "bytes"),
    ("vmdk-part", super::sparse, |i| le64(i, 28, 0), "part of a VMDK"),
    (
        "vmdk-one-of-several",
        super::sparse,
        |i| put(i, 512, &descriptor("twoGbMaxExtentSparse", "", "RW 33 SPARSE \"a\"\nRW 33 SPARSE \"b\"")),
        "part of a VMDK",
    ),
    ("cowd-alone", super::cowd_alone, |_| (), "part of a VMDK"),
    ("dmg-part", super::dmg, |i| dmg_trailer(i, 56, 2), "part 0 of a DMG of 2 parts"),
    ("cowd-version", super::cowd, |i| le32(i, 4, 2), "version 2"),
    ("cowd-grain-0", super::cowd, |i| le32(i, 16, 0), "granularity 0"),
    ("cowd-directory-nowhere", super::cowd, |i| le32(i, 20, u32::MAX), "cut off"),
    ("vmdk-no-version", super::flat, |i| *i = b"# Disk DescriptorFile\nCID=1\n".to_vec(), "version"),
    ("vmdk-device", super::flat, |i| *i = descriptor("fullDevice", "", "RW 1 FLAT \"one\" 0"), "fullDevice"),
    ("vmdk-raw-device-map", super::flat, |i| *i = descriptor("vmfs", "", "RW 1 VMFSRDM \"one\""), "VMFSRDM"),
    (
        "vmdk-extent-too-short",
        super::flat,
        |i| *i = descriptor("monolithicFlat", "", "RW 9 FLAT \"one\" 0"),
        "cut off",
    ),
    (
        "vmdk-extent-offset",
        super::flat,
        |i| *i = descriptor("monolithicFlat", "", "RW 1 FLAT \"one\" 18014398509481984"),
        "cut off",
    ),
    (
        "vmdk-extents-past-2^64",
        super::flat,
        |i| {
            let line = "RW 36028797018963967 ZERO\n";
            *i = descriptor("vmfs", "", &line.repeat(2));
        },
        "2^64",
    ),
    (
        "vmdk-extent-is-itself",
        super::flat,
        |i| *i = descriptor("twoGbMaxExtentSparse", "", "RW 8 SPARSE \"image\""),
        "past the end",
    ),
    ("vmdk-no-extents", super::flat, |i| *i = descriptor("vmfs", "", ""), "no extents"),
    (
        "vmdk-parent-without-name",
        super::flat,
        |i| *i = b"version=1\nparentCID=1\ncreateType=\"vmfs\"\nRW 1 ZERO\n".to_vec(),
        "does not name it",
    ),
    ("qed-features", super::qed, |i| le64(i, 16, 8), "features: 8"),
    ("qed-cluster-size", super::qed, |i| le32(i, 4, 3), "cluster size 3"),
    ("qed-table-size", super::qed, |i| le32(i, 8, 0), "table size"),
    ("qed-disk-size", super::qed, |i| le64(i, 48, 1 << 62), "larger"),
    ("qed-l1-unaligned", super::qed, |i| le64(i, 40, 5000), "cluster"),
    ("qed-l1-nowhere", super::qed, |i| le64(i, 40, 1 << 40), "cut off"),
    ("qed-l2-nowhere", super::qed, |i| le64(i, 4096, 1 << 40), "no cluster"),
    ("qed-l2-on-header", super::qed, |i| le64(i, 4096, 2), "no cluster"),
    ("qed-data-unaligned", super::qed, |i| le64(i, 8200, 12289), "no cluster"),
    ("qed-data-nowhere", super::qed, |i| le64(i, 8200, 1 << 40), "no cluster"),
    ("qed-backing-outside-header", super::qed, |i| put(i, 16, &[1]), "does not lie in the header"),
    ("parallels-version", super::parallels, |i| le32(i, 16, 3), "version 3"),
    ("parallels-block-0", super::parallels, |i| le32(i, 28, 0), "Zero sectors"),
    ("parallels-block-huge", super::parallels, |i| le32(i, 28, u32::MAX), "too large"),
    ("parallels-table-past-file", super::parallels, |i| le32(i, 32, u32::MAX), "cut off"),
    ("parallels-block-past-file", super::parallels, |i| le32(i, 68, u32::MAX), "cut off"),
    ("qcow-size-0", super::qcow1_packed, |i| put(i, 24, &[0; 8]), "too small"),
    ("qcow-cluster-bits", super::qcow1_packed, |i| i[32] = 63, "cluster size"),
    ("qcow-l2-bits", super::qcow1_packed, |i| i[33] = 60, "L2 table size"),
    ("qcow-encrypted", super::qcow1_packed, |i| i[39] = 1, "AES"),
    ("qcow-l1-nowhere", super::qcow1_packed, |i| i[40] = 1, "cut off"),
    ("qcow-size-huge", super::qcow1_packed, |i| put(i, 24, &[0x7f; 8]), "cut off"),
    ("qcow-l2-nowhere", super::qcow1_packed, |i| i[48] = 1, "cut off"),
    ("qcow-packed-nowhere", super::qcow1_packed, |i| i[4100] = 0xff, "does not lie"),
    ("qcow-backing-name", super::qcow1_packed, |i| put(i, 15, &[8, 0xff]), "too long"),
    ("cloop-block-0", super::cloop, |i| put(i, 128, &[0; 4]), "block size 0"),
    ("cloop-block-huge", super::cloop, |i| put(i, 128, &[0x40, 0, 0, 0]), "or less"),
    ("cloop-table-past-file", super::cloop, |i| put(i, 132, &[0xff; 4]), "cut off"),
    ("cloop-offsets-fall", super::cloop, |i| put(i, 144, &[0; 8]), "block"),
    ("cloop-offset-nowhere", super::cloop, |i| i[136] = 0xff, "block 0"),
    ("dmg-no-list", super::dmg, |i| dmg_trailer(i, 224, 0), "property list"),
    ("dmg-list-huge", super::dmg, |i| dmg_trailer(i, 224, 1 << 40), "bytes"),
    ("dmg-list-nowhere", super::dmg, |i| dmg_trailer(i, 216, u64::MAX), "cut off"),
    ("dmg-smaller-than-chunks", super::dmg, |i| dmg_trailer(i, 492, 3), "past the end"),
    ("dmg-fork-nowhere", super::dmg, |i| dmg_trailer(i, 24, u64::MAX), "cut off"),
];

fn dmg_trailer(image: &mut Vec<u8>, field: usize, value: u64) {
    let at = image.len() - 512 + field;
    put(image, at, &value.to_be_bytes());
}

/// Mistakes of other readers of these formats that became public, and the cases that are made of the same trick.
pub const PUBLIC: &[(&str, &[&str])] = &[
    // Blocks of 0 bytes, by which QEMU divided.
    ("CVE-2014-0142", &["parallels-block-0", "vmdk-granularity-0", "vhd-block-size-0", "vdi-block-size-0"]),
    // Tables whose size in bytes overflows.
    ("CVE-2014-0143", &["parallels-table-past-file", "cloop-table-past-file", "vmdk-capacity-overflow"]),
    // Sizes in headers of cloop, VHD, VHDX, VDI and others that were used unchecked.
    (
        "CVE-2014-0144",
        &[
            "cloop-block-huge",
            "cloop-block-0",
            "vhd-block-size-huge",
            "vhd-table-too-small",
            "vhdx-table-too-small",
            "vdi-blocks-past-file",
            "vdi-disk-larger-than-blocks",
            "dmg-list-huge",
        ],
    ),
    // Chunks of a DMG that are larger than the buffers for them.
    ("CVE-2014-0145", &["dmg-smaller-than-chunks", "dmg-fork-nowhere"]),
    // A VHDX whose block and sector sizes led to an endless loop.
    ("CVE-2014-0148", &["vhdx-block-size", "vhdx-sector-size"]),
    // L2 tables and disks of qcow version 1 that are too large.
    ("CVE-2014-0222", &["qcow-l2-bits", "qcow-cluster-bits"]),
    ("CVE-2014-0223", &["qcow-size-huge", "qcow-l1-nowhere"]),
    // VMDK descriptors that name files of the host, by which clouds gave them away.
    ("CVE-2022-47951", &["vmdk-device", "vmdk-raw-device-map"]),
];
