//! Images of every format, intact and damaged: what is intact maps to its disk, and what is damaged ends in an error.

mod samples;

use flate2::{Decompress, FlushDecompress};
use proptest::prelude::*;
use samples::hyper_v::{BLOCK, LOG, METADATA, TABLE, set_vhd_sum, set_vhdx_sum, vhd_footer};
use samples::vmware::descriptor;
use samples::{Sample, put};
use std::cell::RefCell;
use std::collections::BTreeSet;
use zebu_foreign::{Disk, Error, FileIndex, Files, Format, Identity, Kind, Missing, Packing, extent_files};

/// Files in memory. Of each, only those pages are there that were asked for.
struct Memory {
    files: Vec<Vec<u8>>,
    there: RefCell<BTreeSet<(u32, u64)>>,
}

const PAGE: u64 = 1000;

impl Memory {
    fn new(files: Vec<Vec<u8>>) -> Self {
        Self { files, there: RefCell::default() }
    }

    fn ask<T>(&self, work: impl Fn(&Self) -> zebu_foreign::Result<T>) -> zebu_foreign::Result<T> {
        for _ in 0..200 {
            match work(self) {
                Err(Error::Missing(missing)) => {
                    let pages = missing.offset / PAGE..(missing.offset + missing.len as u64).div_ceil(PAGE);
                    let new = pages.map(|page| (missing.file.0, page));
                    let before = self.there.borrow().len();
                    self.there.borrow_mut().extend(new);
                    assert!(self.there.borrow().len() > before, "asks twice for {missing:?}");
                }
                other => return other,
            }
        }
        panic!("asks without end");
    }
}

impl Files for Memory {
    fn len(&self, file: FileIndex) -> u64 {
        self.files.get(file.0 as usize).map_or(0, |bytes| bytes.len() as u64)
    }

    fn read(&self, file: FileIndex, offset: u64, out: &mut [u8]) -> Result<(), Missing> {
        let end = offset + out.len() as u64;
        assert!(end <= self.len(file), "asks for what is not in the file");
        for page in offset / PAGE..end.div_ceil(PAGE) {
            if !self.there.borrow().contains(&(file.0, page)) {
                return Err(Missing { file, offset, len: out.len() });
            }
        }
        out.copy_from_slice(&self.files[file.0 as usize][offset as usize..end as usize]);
        Ok(())
    }
}

fn format(name: &str) -> Format {
    Format::ALL.into_iter().find(|format| format.name() == name).expect("a format")
}

/// Opens a sample with the files that it names.
fn open(sample: &Sample) -> zebu_foreign::Result<(Memory, Disk)> {
    let format = format(sample.format);
    let image = Memory::new(vec![sample.files[0].1.clone()]);
    let names = image.ask(|files| extent_files(format, files))?;
    let named = names.iter().map(|name| {
        let found = sample.files.iter().find(|(known, _)| known == name);
        found.map(|(_, bytes)| bytes.clone()).unwrap_or_default()
    });
    let files = Memory::new(image.files.iter().cloned().chain(named).collect());
    let disk = files.ask(|files| Disk::open(format, files))?;
    Ok((files, disk))
}

/// Reads a disk by its map. Holes are zero.
fn read(files: &Memory, disk: &Disk) -> zebu_foreign::Result<Vec<u8>> {
    let (mut out, mut at) = (Vec::new(), 0);
    while at < disk.virtual_size() {
        let run = files.ask(|files| disk.map(files, at, disk.virtual_size() - at))?;
        assert!(run.len > 0 && at + run.len <= disk.virtual_size());
        let len = run.len as usize;
        match run.kind {
            Kind::Hole | Kind::Zero => out.resize(out.len() + len, 0),
            Kind::Data { file, offset } => {
                out.extend_from_slice(&files.files[file.0 as usize][offset as usize..][..len]);
            }
            Kind::Packed(packed) => {
                let stream =
                    &files.files[packed.file.0 as usize][packed.offset as usize..][..packed.len as usize];
                let mut unit = vec![0; packed.unit as usize];
                let mut inflater = Decompress::new(packed.packing == Packing::Zlib);
                let ended = inflater.decompress(stream, &mut unit, FlushDecompress::Finish);
                ended.map_err(|_| Error::Unsupported { message: "a damaged stream".into() })?;
                out.extend_from_slice(&unit[(at - packed.start) as usize..][..len]);
            }
        }
        at += run.len;
    }
    Ok(out)
}

fn read_sample(sample: &Sample) -> zebu_foreign::Result<Vec<u8>> {
    let (files, disk) = open(sample)?;
    read(&files, &disk)
}

#[test]
fn intact_images_map_to_their_disks() {
    for (name, sample) in samples::all() {
        let found = read_sample(sample).unwrap_or_else(|error| panic!("{name}: {error}"));
        let first = found.iter().zip(&sample.disk).position(|(a, b)| a != b);
        assert!(found == sample.disk, "{name}: {} bytes of {}, {first:?}", found.len(), sample.disk.len());
    }
}

#[test]
fn differencing_images_name_their_parents_and_map_their_own_sectors() {
    for (sample, name, identity) in [
        (samples::vhd_differencing(), "dir/parent.vhd", Identity::Uuid([0xcd; 16])),
        (
            samples::vhdx_differencing(),
            "../base.vhdx",
            Identity::Uuid([4, 3, 2, 1, 6, 5, 8, 7, 9, 10, 11, 12, 13, 14, 15, 16]),
        ),
    ] {
        let (files, disk) = open(&sample).unwrap();
        let parent = disk.parent().unwrap();
        assert_eq!((parent.name.as_str(), &parent.identities[..]), (name, &[identity][..]));
        assert!(read(&files, &disk).unwrap() == sample.disk, "{name}");
    }
}

#[test]
fn a_run_may_begin_and_end_anywhere() {
    for sample in [samples::vhdx_differencing(), samples::flat(), samples::parallels(), samples::dmg()] {
        let (files, disk) = open(&sample).unwrap();
        for guest in (0..disk.virtual_size()).step_by(333) {
            for most in [1, 100, 5000] {
                let run = files.ask(|files| disk.map(files, guest, most)).unwrap();
                assert!(run.len <= most && run.len > 0);
                let expected = &sample.disk[guest as usize..(guest + run.len) as usize];
                match run.kind {
                    Kind::Hole | Kind::Zero => assert!(expected.iter().all(|byte| *byte == 0)),
                    Kind::Data { file, offset } => {
                        assert_eq!(
                            &files.files[file.0 as usize][offset as usize..][..expected.len()],
                            expected
                        );
                    }
                    Kind::Packed(_) => {}
                }
            }
        }
    }
}

/// The damage, the image, what is done to it, and a part of the error.
type Case = (&'static str, fn() -> Sample, fn(&mut Vec<u8>), &'static str);

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

const CASES: &[Case] = &[
    ("vdi-version", samples::vdi, |i| le32(i, 0x44, 0x0002_0000), "version 2.0"),
    ("vdi-differencing", samples::vdi, |i| le32(i, 0x4c, 4), "differencing"),
    ("vdi-map-unaligned", samples::vdi, |i| le32(i, 0x154, 513), "sector"),
    ("vdi-data-unaligned", samples::vdi, |i| le32(i, 0x158, 1), "sector"),
    ("vdi-sector-size", samples::vdi, |i| le32(i, 0x168, 4096), "sector size"),
    ("vdi-block-size-0", samples::vdi, |i| le32(i, 0x178, 0), "block size 0"),
    ("vdi-block-size-odd", samples::vdi, |i| le32(i, 0x178, 1_000_000), "block size"),
    ("vdi-block-extra", samples::vdi, |i| le32(i, 0x17c, 8), "extra data"),
    ("vdi-disk-larger-than-blocks", samples::vdi, |i| le64(i, 0x170, u64::MAX), "larger"),
    ("vdi-blocks-past-file", samples::vdi, |i| le32(i, 0x180, u32::MAX), "cut off"),
    ("vdi-parent", samples::vdi, |i| put(i, 0x1b8, &[1]), "parent UUID"),
    ("vdi-block-past-count", samples::vdi, |i| le32(i, 512, 4), "block 4 of 4"),
    ("vdi-block-past-file", samples::vdi, |i| le32(i, 512, 3), "cut off"),
    ("vhd-footer-sum", samples::vhd_dynamic, |i| i[60 + 20] ^= 1, "checksum"),
    ("vhd-version", samples::vhd_dynamic, |i| vhd(i, FOOTER, 12, &[0, 2]), "version 2"),
    ("vhd-header-nowhere", samples::vhd_dynamic, |i| vhd(i, FOOTER, 16, &[0xff; 8]), "cut off"),
    ("vhd-header-missing", samples::vhd_dynamic, |i| i[512] = 0, "missing"),
    ("vhd-header-sum", samples::vhd_dynamic, |i| i[512 + 40] ^= 1, "checksum"),
    ("vhd-block-size-0", samples::vhd_dynamic, |i| vhd(i, DYNAMIC, 32, &[0; 4]), "block size 0"),
    ("vhd-block-size-huge", samples::vhd_dynamic, |i| vhd(i, DYNAMIC, 32, &[0x80, 0, 0, 0]), "too large"),
    ("vhd-table-too-small", samples::vhd_dynamic, |i| vhd(i, DYNAMIC, 28, &[0, 0, 0, 2]), "too small"),
    ("vhd-table-past-file", samples::vhd_dynamic, |i| vhd(i, DYNAMIC, 28, &[0xff; 4]), "cut off"),
    ("vhd-block-past-file", samples::vhd_dynamic, |i| put(i, 1540, &[0, 0xff, 0, 0]), "cut off"),
    ("vhd-fixed-cut-off", samples::vhd_fixed, |i| drop(i.drain(..512)), "cut off"),
    (
        "vhd-fixed-absurd-geometry",
        samples::vhd_fixed,
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
        samples::vhd_dynamic,
        |i| {
            i.splice(..512, [0; 512]);
        },
        "copy",
    ),
    ("vhd-parent-name-too-long", samples::vhd_differencing, |i| vhd(i, DYNAMIC, 584, &[0xff; 4]), "name"),
    ("vhd-parent-name-nowhere", samples::vhd_differencing, |i| vhd(i, DYNAMIC, 592, &[0xff; 8]), "cut off"),
    ("vhdx-no-header", samples::vhdx, |i| HEADERS.iter().for_each(|at| i[*at] = 0), "No valid VHDX header"),
    ("vhdx-header-sums", samples::vhdx, |i| HEADERS.iter().for_each(|at| i[*at + 300] = 1), "No valid"),
    ("vhdx-version", samples::vhdx, |i| vhdx_both(i, HEADERS, 4096, 66, &[9]), "version 9"),
    (
        "vhdx-headers-contradict",
        samples::vhdx,
        |i| {
            vhdx_both(i, HEADERS, 4096, 8, &[5, 0]);
            vhdx_both(i, [HEADERS[0]; 2], 4096, 32, &[9]);
        },
        "differ",
    ),
    ("vhdx-region-sums", samples::vhdx, |i| REGIONS.iter().for_each(|at| i[*at + 20] ^= 1), "region table"),
    ("vhdx-region-count", samples::vhdx, |i| vhdx_both(i, REGIONS, 65536, 8, &[0, 8]), "2048 entries"),
    ("vhdx-region-unknown", samples::vhdx, |i| vhdx_both(i, REGIONS, 65536, 16, &[9]), "unknown kind"),
    ("vhdx-region-past-file", samples::vhdx, |i| vhdx_both(i, REGIONS, 65536, 36, &[1]), "cut off"),
    ("vhdx-region-in-headers", samples::vhdx, |i| vhdx_both(i, REGIONS, 65536, 32, &[0; 8]), "aligned"),
    ("vhdx-regions-overlap", samples::vhdx, |i| vhdx_both(i, REGIONS, 65536, 34, &[0x20]), "overlap"),
    ("vhdx-metadata-signature", samples::vhdx, |i| i[METADATA] = 0, "signature"),
    ("vhdx-metadata-count", samples::vhdx, |i| put(i, METADATA + 10, &[0xff; 2]), "65535 entries"),
    ("vhdx-metadata-unknown", samples::vhdx, |i| i[METADATA + 32] = 0, "unknown metadata"),
    ("vhdx-metadata-item-outside", samples::vhdx, |i| le32(i, METADATA + 48, u32::MAX), "damaged"),
    ("vhdx-metadata-item-huge", samples::vhdx, |i| le32(i, METADATA + 52, u32::MAX), "damaged"),
    ("vhdx-block-size", samples::vhdx, |i| le32(i, METADATA + 65536, 3 << 20), "block size"),
    ("vhdx-sector-size", samples::vhdx, |i| le32(i, METADATA + 65536 + 8192, 1), "sector size"),
    ("vhdx-disk-size-huge", samples::vhdx, |i| le64(i, METADATA + 65536 + 4096, u64::MAX), "disk size"),
    ("vhdx-table-too-small", samples::vhdx, |i| le64(i, METADATA + 65536 + 4096, 1 << 50), "entries"),
    ("vhdx-parent-without-locator", samples::vhdx, |i| le32(i, METADATA + 65536 + 4, 2), "parent"),
    ("vhdx-block-state", samples::vhdx, |i| le64(i, TABLE, 4), "state 4"),
    ("vhdx-block-partial", samples::vhdx, |i| le64(i, TABLE, 7 | BLOCK as u64), "state 7"),
    ("vhdx-block-past-file", samples::vhdx, |i| le64(i, TABLE, 6 | 1 << 40), "cut off"),
    ("vhdx-block-on-headers", samples::vhdx, |i| le64(i, TABLE, 6), "headers"),
    ("vhdx-bitmap-missing", samples::vhdx_differencing, |i| le64(i, TABLE + 8 * 4096, 0), "bitmap"),
    ("vhdx-log-unaligned", samples::vhdx_with_log, |i| vhdx_both(i, HEADERS, 4096, 72, &[1]), "aligned"),
    ("vhdx-log-huge", samples::vhdx_with_log, |i| vhdx_both(i, HEADERS, 4096, 68, &[0, 0, 0, 0xff]), "log"),
    ("vhdx-log-version", samples::vhdx_with_log, |i| vhdx_both(i, HEADERS, 4096, 64, &[1]), "log version"),
    (
        "vhdx-log-of-a-longer-file",
        samples::vhdx_with_log,
        |i| {
            le64(i, LOG + 48, 1 << 40);
            set_vhdx_sum(i, LOG, 8192);
        },
        "cut off",
    ),
    (
        "vhdx-log-descriptor",
        samples::vhdx_with_log,
        |i| {
            i[LOG + 64] = 0;
            set_vhdx_sum(i, LOG, 8192);
        },
        "entry 42",
    ),
    (
        "vhdx-log-descriptor-count",
        samples::vhdx_with_log,
        |i| {
            le32(i, LOG + 24, u32::MAX);
            set_vhdx_sum(i, LOG, 8192);
        },
        "entry 42",
    ),
    (
        "vhdx-log-changes-data",
        samples::vhdx_with_log,
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
    ("vmdk-version", samples::sparse, |i| le32(i, 4, 4), "version 4"),
    ("vmdk-granularity-0", samples::sparse, |i| le64(i, 20, 0), "granularity 0"),
    ("vmdk-granularity-huge", samples::sparse, |i| le64(i, 20, 1 << 40), "granularity"),
    ("vmdk-table-entries-0", samples::sparse, |i| le32(i, 44, 0), "0 entries"),
    ("vmdk-table-entries-huge", samples::sparse, |i| le32(i, 44, u32::MAX), "entries"),
    ("vmdk-capacity-huge", samples::sparse, |i| le64(i, 12, u64::MAX / 512), "cut off"),
    ("vmdk-capacity-overflow", samples::sparse, |i| le64(i, 12, u64::MAX), "2^64"),
    ("vmdk-directory-nowhere", samples::sparse, |i| le64(i, 56, 1 << 40), "cut off"),
    ("vmdk-directory-overflow", samples::sparse, |i| le64(i, 56, u64::MAX - 1), "2^64"),
    ("vmdk-table-nowhere", samples::sparse, |i| le32(i, 1536, u32::MAX), "cut off"),
    ("vmdk-grain-nowhere", samples::sparse, |i| le32(i, 2048, u32::MAX), "cut off"),
    ("vmdk-descriptor-nowhere", samples::sparse, |i| le64(i, 28, 1 << 40), "cut off"),
    ("vmdk-descriptor-huge", samples::sparse, |i| le64(i, 36, 1 << 40), "descriptor"),
    ("vmdk-stream-without-footer", samples::stream_optimized, |i| i.truncate(i.len() - 512), "footer"),
    (
        "vmdk-stream-footer-of-no-directory",
        samples::stream_optimized,
        |i| {
            let at = i.len() - 1024 + 56;
            le64(i, at, u64::MAX);
        },
        "directory",
    ),
    ("vmdk-stream-algorithm", samples::stream_optimized, |i| put(i, 77, &[2, 0]), "algorithm 2"),
    ("vmdk-grain-marker", samples::stream_optimized, |i| le64(i, 1536, 8), "marked as sector 8"),
    ("vmdk-grain-length-0", samples::stream_optimized, |i| le32(i, 1544, 0), "0 bytes"),
    ("vmdk-grain-length-huge", samples::stream_optimized, |i| le32(i, 1544, u32::MAX), "bytes"),
    ("cowd-version", samples::cowd, |i| le32(i, 4, 2), "version 2"),
    ("cowd-grain-0", samples::cowd, |i| le32(i, 16, 0), "granularity 0"),
    ("cowd-directory-nowhere", samples::cowd, |i| le32(i, 20, u32::MAX), "cut off"),
    ("vmdk-no-version", samples::flat, |i| *i = b"# Disk DescriptorFile\nCID=1\n".to_vec(), "version"),
    (
        "vmdk-device",
        samples::flat,
        |i| *i = descriptor("fullDevice", "", "RW 1 FLAT \"one\" 0"),
        "fullDevice",
    ),
    (
        "vmdk-raw-device-map",
        samples::flat,
        |i| *i = descriptor("vmfs", "", "RW 1 VMFSRDM \"one\""),
        "VMFSRDM",
    ),
    (
        "vmdk-extent-too-short",
        samples::flat,
        |i| *i = descriptor("monolithicFlat", "", "RW 9 FLAT \"one\" 0"),
        "cut off",
    ),
    (
        "vmdk-extent-offset",
        samples::flat,
        |i| *i = descriptor("monolithicFlat", "", "RW 1 FLAT \"one\" 18014398509481984"),
        "cut off",
    ),
    (
        "vmdk-extents-past-2^64",
        samples::flat,
        |i| {
            let line = "RW 36028797018963967 ZERO\n";
            *i = descriptor("vmfs", "", &line.repeat(2));
        },
        "2^64",
    ),
    (
        "vmdk-extent-is-itself",
        samples::flat,
        |i| *i = descriptor("twoGbMaxExtentSparse", "", "RW 8 SPARSE \"image\""),
        "past the end",
    ),
    ("vmdk-no-extents", samples::flat, |i| *i = descriptor("vmfs", "", ""), "no extents"),
    (
        "vmdk-parent-without-name",
        samples::flat,
        |i| *i = b"version=1\nparentCID=1\ncreateType=\"vmfs\"\nRW 1 ZERO\n".to_vec(),
        "does not name it",
    ),
    ("qed-features", samples::qed, |i| le64(i, 16, 8), "features: 8"),
    ("qed-cluster-size", samples::qed, |i| le32(i, 4, 3), "cluster size 3"),
    ("qed-table-size", samples::qed, |i| le32(i, 8, 0), "table size"),
    ("qed-disk-size", samples::qed, |i| le64(i, 48, 1 << 62), "larger"),
    ("qed-l1-unaligned", samples::qed, |i| le64(i, 40, 5000), "cluster"),
    ("qed-l1-nowhere", samples::qed, |i| le64(i, 40, 1 << 40), "cut off"),
    ("qed-l2-nowhere", samples::qed, |i| le64(i, 4096, 1 << 40), "no cluster"),
    ("qed-l2-on-header", samples::qed, |i| le64(i, 4096, 2), "no cluster"),
    ("qed-data-unaligned", samples::qed, |i| le64(i, 8200, 12289), "no cluster"),
    ("qed-data-nowhere", samples::qed, |i| le64(i, 8200, 1 << 40), "no cluster"),
    ("qed-backing-outside-header", samples::qed, |i| put(i, 16, &[1]), "does not name"),
    ("parallels-version", samples::parallels, |i| le32(i, 16, 3), "version 3"),
    ("parallels-block-0", samples::parallels, |i| le32(i, 28, 0), "Zero sectors"),
    ("parallels-block-huge", samples::parallels, |i| le32(i, 28, u32::MAX), "too large"),
    ("parallels-table-past-file", samples::parallels, |i| le32(i, 32, u32::MAX), "cut off"),
    ("parallels-block-past-file", samples::parallels, |i| le32(i, 68, u32::MAX), "cut off"),
    ("qcow-size-0", samples::qcow1_packed, |i| put(i, 24, &[0; 8]), "too small"),
    ("qcow-cluster-bits", samples::qcow1_packed, |i| i[32] = 63, "cluster size"),
    ("qcow-l2-bits", samples::qcow1_packed, |i| i[33] = 60, "L2 table size"),
    ("qcow-encrypted", samples::qcow1_packed, |i| i[39] = 1, "AES"),
    ("qcow-l1-nowhere", samples::qcow1_packed, |i| i[40] = 1, "cut off"),
    ("qcow-size-huge", samples::qcow1_packed, |i| put(i, 24, &[0x7f; 8]), "cut off"),
    ("qcow-l2-nowhere", samples::qcow1_packed, |i| i[48] = 1, "cut off"),
    ("qcow-packed-nowhere", samples::qcow1_packed, |i| i[4100] = 0xff, "does not lie"),
    ("qcow-backing-name", samples::qcow1_packed, |i| put(i, 15, &[8, 0xff]), "too long"),
    ("cloop-block-0", samples::cloop, |i| put(i, 128, &[0; 4]), "block size 0"),
    ("cloop-block-huge", samples::cloop, |i| put(i, 128, &[0x40, 0, 0, 0]), "or less"),
    ("cloop-table-past-file", samples::cloop, |i| put(i, 132, &[0xff; 4]), "cut off"),
    ("cloop-offsets-fall", samples::cloop, |i| put(i, 144, &[0; 8]), "block"),
    ("cloop-offset-nowhere", samples::cloop, |i| i[136] = 0xff, "block 0"),
    ("dmg-no-list", samples::dmg, |i| dmg_trailer(i, 224, 0), "property list"),
    ("dmg-list-huge", samples::dmg, |i| dmg_trailer(i, 224, 1 << 40), "bytes"),
    ("dmg-list-nowhere", samples::dmg, |i| dmg_trailer(i, 216, u64::MAX), "cut off"),
    ("dmg-smaller-than-chunks", samples::dmg, |i| dmg_trailer(i, 492, 3), "past the end"),
    ("dmg-fork-nowhere", samples::dmg, |i| dmg_trailer(i, 24, u64::MAX), "2^64"),
];

fn dmg_trailer(image: &mut Vec<u8>, field: usize, value: u64) {
    let at = image.len() - 512 + field;
    put(image, at, &value.to_be_bytes());
}

#[test]
fn damage_is_told() {
    for (name, make, damage, message) in CASES {
        let mut sample = make();
        damage(sample.image());
        match read_sample(&sample) {
            Ok(_) => panic!("{name}: it can be read"),
            Err(error) => assert!(error.to_string().contains(message), "{name}: {error}"),
        }
    }
}

#[test]
fn chunks_of_a_dmg_that_make_no_sense_are_refused() {
    let data = vec![0; 1024];
    for (chunk, message) in [
        ((0x8000_0007, 0, 2, 0, 1024), "LZFSE"),
        ((0x8000_0004, 0, 2, 0, 1024), "ADC"),
        ((0x8000_0008, 0, 2, 0, 1024), "LZMA"),
        ((7, 0, 2, 0, 1024), "unknown type"),
        ((0x8000_0005, 0, 1 << 20, 0, 1024), "too large"),
        ((0x8000_0005, 0, 2, 0, 0), "empty"),
        ((0x8000_0005, 0, 2, 5000, 1024), "cut off"),
        ((1, 0, 2, 0, 512), "stored chunk"),
        ((1, 0, u64::MAX, 0, 512), "2^64"),
        ((2, u64::MAX, 1, 0, 512), "2^64"),
        ((2, 1, 1, 0, 0), "overlap"),
    ] {
        let image = samples::packed::dmg_of(&data, &[(2, 0, 2, 0, 0), chunk], 100);
        let image = if message == "overlap" { image } else { samples::packed::dmg_of(&data, &[chunk], 100) };
        let error = read_sample(&Sample::one("dmg", image, Vec::new())).unwrap_err();
        assert!(error.to_string().contains(message), "{error}");
    }
}

/// Who wrote a VHD decides which of its two sizes counts.
#[test]
fn the_size_of_a_vhd_follows_its_writer() {
    let size = 5000 * 512u64;
    for (creator, expected) in [
        (b"win ", size),
        (b"qem2", size),
        (b"d2v ", size),
        (b"vbox", size),
        (b"tap\0", size),
        (b"vpc ", 72 * 4 * 17 * 512),
        (b"qemu", 72 * 4 * 17 * 512),
    ] {
        let mut footer = vhd_footer(2, size);
        footer[28..32].copy_from_slice(creator);
        footer[56..60].copy_from_slice(&[0, 72, 4, 17]);
        set_vhd_sum(&mut footer, 64);
        let image = [vec![0; size as usize], footer].concat();
        let (_, disk) = open(&Sample::one("vpc", image, Vec::new())).unwrap();
        assert_eq!(disk.virtual_size(), expected, "{creator:?}");
    }
}

/// What is missing is told; what is left is not read as something else.
#[test]
fn images_that_are_cut_off_end_in_errors_or_in_their_disk() {
    for (name, sample) in samples::all() {
        // The end of a text that names files can't be missed.
        if sample.files.len() > 1 {
            continue;
        }
        let len = sample.files[0].1.len();
        let steps = if len > 100_000 { 12 } else { 200 };
        for step in 0..steps {
            let mut cut = sample.clone();
            cut.image().truncate(len * step / steps);
            if let Ok(found) = read_sample(&cut) {
                assert!(found == sample.disk, "{name} cut to {}", len * step / steps);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]
    #[test]
    fn any_bytes_in_headers_and_tables_end_in_an_error_or_a_disk(
        which in any::<prop::sample::Index>(),
        changes in proptest::collection::vec((0usize..6000, any::<u8>()), 1..12),
        file in any::<prop::sample::Index>(),
    ) {
        let all = samples::all();
        let (_, mut sample) = all[which.index(all.len())].clone();
        let at = file.index(sample.files.len());
        let bytes = &mut sample.files[at].1;
        for (at, byte) in changes {
            // From the end as well, where footers are.
            let at = if at % 3 == 0 { bytes.len().saturating_sub(at / 3 + 1) } else { at % bytes.len() };
            bytes[at] = byte;
        }
        if let Ok((files, disk)) = open(&sample)
            && disk.virtual_size() < 64 << 20
        {
            let _ = read(&files, &disk);
        }
    }
}
