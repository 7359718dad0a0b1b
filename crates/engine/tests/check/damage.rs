//! Each kind of damage, done by hand: the same numbers and exit code as QEMU, or a difference with its reason.

use crate::support::{TestImage, qemu_img, skipped};
use zebu_engine::check::{CheckReport, FindingKind, Repair};

const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;
const IO: [&str; 2] = ["write 0 200k", "write 1M 64k"];

fn plain() -> TestImage {
    TestImage::new(&[], "64M", &IO)
}

fn extended() -> TestImage {
    TestImage::new(&["-o", "extended_l2=on"], "64M", &["write 0 200k", "write 1M 4k"])
}

fn with_snapshot() -> TestImage {
    let image = plain();
    image.snapshot(&["-c", "one"]);
    image
}

fn has(report: &CheckReport, what: impl Fn(&FindingKind) -> bool) -> bool {
    report.findings.iter().any(|finding| what(&finding.kind))
}

/// That a damage gives the same numbers as in QEMU, and that `kind` is among the findings.
fn same(image: TestImage, what: &str, damage: impl Fn(&TestImage), kind: impl Fn(&FindingKind) -> bool) {
    image.assert_clean(what);
    damage(&image);
    let report = image.assert_same_verdict(what);
    assert!(has(&report, kind), "{what}: {:?}", report.findings);
}

#[test]
fn refcounts() {
    if skipped() {
        return;
    }
    let set = |image: &TestImage, cluster: u64, value: u16| {
        image.write(image.refblock(0) + cluster * 2, &value.to_be_bytes());
    };
    same(
        plain(),
        "leak",
        |i| set(i, 9, 2),
        |k| matches!(k, FindingKind::Leak { cluster: 9, refcount: 2, references: 1 }),
    );
    same(
        plain(),
        "leak of an unused cluster",
        |i| {
            i.write(i.len(), &vec![1; 65536 * 3]);
            set(i, 11, 3);
        },
        |k| matches!(k, FindingKind::Leak { cluster: 11, refcount: 3, references: 0 }),
    );
    same(
        plain(),
        "a refcount past the end of the file is not looked at",
        |i| {
            set(i, 9, 0);
            set(i, 5000, 1);
        },
        |k| matches!(k, FindingKind::RefcountTooLow { cluster: 9, refcount: 0, references: 1 }),
    );
    same(
        with_snapshot(),
        "too low",
        |i| set(i, 6, 1),
        |k| matches!(k, FindingKind::RefcountTooLow { cluster: 6, refcount: 1, references: 2 }),
    );
    for bits in [1, 2, 4] {
        let options = format!("refcount_bits={bits}");
        let image = TestImage::new(&["-o", &options], "64M", &IO);
        // Two clusters of the same data: more references than one bit counts.
        same(
            image,
            &options,
            |i| i.set_word(i.l2(0), i.word(i.l2(0) + 8)),
            |k| match bits {
                1 => matches!(k, FindingKind::RefcountOverflow { references: 2, .. }),
                _ => matches!(k, FindingKind::RefcountTooLow { refcount: 1, references: 2, .. }),
            },
        );
    }
}

#[test]
fn l1_entries() {
    if skipped() {
        return;
    }
    same(
        plain(),
        "reserved bits",
        |i| i.set_word(i.l1(), i.word(i.l1()) | 1 << 56),
        |k| matches!(k, FindingKind::L1ReservedBits { .. }),
    );
    same(
        plain(),
        "past the end",
        |i| i.set_word(i.l1(), COPIED | 1 << 40),
        |k| matches!(k, FindingKind::PastEnd { offset: 0x100_0000_0000, .. }),
    );
    same(
        plain(),
        "COPIED missing",
        |i| i.set_word(i.l1(), i.l2(0)),
        |k| matches!(k, FindingKind::CopiedFlagL1 { l1_index: 0, refcount: 1, .. }),
    );
    same(
        with_snapshot(),
        "COPIED set",
        |i| i.set_word(i.l1(), COPIED | i.l2(0)),
        |k| matches!(k, FindingKind::CopiedFlagL1 { l1_index: 0, refcount: 2, .. }),
    );
    let two = || TestImage::new(&[], "2G", &["write 0 64k", "write 600M 64k"]);
    same(
        two(),
        "one table twice",
        |i| i.set_word(i.l1() + 8, COPIED | i.l2(0)),
        |k| matches!(k, FindingKind::RefcountTooLow { references: 2, .. }),
    );
    same(
        two(),
        "the L1 table as its own L2 table",
        |i| i.set_word(i.l1(), COPIED | i.l1()),
        |k| matches!(k, FindingKind::RefcountTooLow { .. }),
    );
    same(
        two(),
        "a refcount block as an L2 table",
        |i| i.set_word(i.l1(), COPIED | i.refblock(0)),
        |k| matches!(k, FindingKind::RefblockShared { .. }),
    );
}

/// QEMU takes what lies at an unaligned offset, and at offset 0, for a table and counts what it finds there. No
/// program can use such a table. Ours says that the entry is damaged, and frees nothing that it may have led to.
#[test]
fn l1_entries_that_lead_to_no_table() {
    if skipped() {
        return;
    }
    for (entry, what) in [(COPIED, "no offset"), (COPIED | 0x40200, "unaligned")] {
        let image = plain();
        image.set_word(image.l1(), entry);
        assert_eq!(image.qemu_check(&[]).code, 2, "{what}");
        let report = image.check();
        assert_eq!(report.exit_code(), 2, "{what}");
        assert!(has(&report, |k| matches!(
            k,
            FindingKind::L1CopiedWithoutTable { .. } | FindingKind::L2TableUnaligned { offset: 0x40200 }
        )));
        assert!(report.counts.leaks >= 4, "{what}: the clusters of the lost table");
        for repair in [Repair::Leaks, Repair::All] {
            let repaired = image.repair(repair);
            assert!(repaired.counts.leaks >= 4 && repaired.counts.leaks_fixed == 0, "{what} {repaired:?}");
        }
        image.set_word(image.l1(), COPIED | 0x40000);
        image.repair(Repair::All);
        image.assert_clean(what);
    }
}

#[test]
fn l2_entries() {
    if skipped() {
        return;
    }
    let set = |entry: u64| move |i: &TestImage| i.set_word(i.l2(0), entry);
    same(plain(), "reserved bits", set(COPIED | 0x50000 | 2), |k| {
        matches!(k, FindingKind::L2ReservedBits { index: 0, .. })
    });
    same(plain(), "COPIED missing", set(0x50000), |k| {
        matches!(k, FindingKind::CopiedFlagL2 { index: 0, refcount: 1, .. })
    });
    same(with_snapshot(), "COPIED set", set(COPIED | 0x50000), |k| {
        matches!(k, FindingKind::CopiedFlagL2 { index: 0, refcount: 2, .. })
    });
    same(plain(), "data unaligned", set(COPIED | 0x50200), |k| {
        matches!(k, FindingKind::DataClusterUnaligned { index: 0, offset: 0x50200, .. })
    });
    same(plain(), "preallocated unaligned", set(COPIED | 0x50200 | 1), |k| {
        matches!(k, FindingKind::ZeroClusterUnaligned { index: 0, offset: 0x50200, .. })
    });
    same(plain(), "twice the same cluster", set(COPIED | 0x60000), |k| {
        matches!(k, FindingKind::RefcountTooLow { cluster: 6, refcount: 1, references: 2 })
    });
    same(plain(), "the header as data", set(COPIED), |k| matches!(k, FindingKind::Leak { .. }));
    same(plain(), "the L1 table as data", set(COPIED | 0x30000), |k| {
        matches!(k, FindingKind::RefcountTooLow { cluster: 3, .. })
    });
    same(plain(), "the L2 table as its own data", set(COPIED | 0x40000), |k| {
        matches!(k, FindingKind::RefcountTooLow { cluster: 4, .. })
    });
    let end = plain().len();
    for (offset, what) in [(end, "the end"), (end + 65536, "past the end"), (1 << 55, "far past the end")] {
        same(plain(), what, set(COPIED | offset), |k| matches!(k, FindingKind::PastEnd { .. }));
    }
    for offset in [end - 512, end + 512] {
        same(plain(), "unaligned at the end", set(COPIED | offset), |k| {
            matches!(k, FindingKind::DataClusterUnaligned { .. })
        });
    }
}

#[test]
fn compressed_entries() {
    if skipped() {
        return;
    }
    let image = || TestImage::new(&[], "64M", &["write -c 0 64k", "write -c 64k 64k", "write 128k 64k"]);
    same(
        image(),
        "COPIED",
        |i| i.set_word(i.l2(0), i.word(i.l2(0)) | COPIED),
        |k| matches!(k, FindingKind::CopiedFlagCompressed { index: 0, .. }),
    );
    same(
        image(),
        "past the end",
        |i| i.set_word(i.l2(0), COMPRESSED | (i.len() + 65536)),
        |k| matches!(k, FindingKind::PastEnd { .. }),
    );
    same(
        image(),
        "far past the end",
        |i| i.set_word(i.l2(0), COMPRESSED | ((1 << 54) - 512)),
        |k| matches!(k, FindingKind::PastEnd { .. }),
    );
    // The largest length: it reaches into the next cluster.
    same(
        image(),
        "longer",
        |i| i.set_word(i.l2(0), i.word(i.l2(0)) | 0xff << 54),
        |k| matches!(k, FindingKind::RefcountTooLow { .. }),
    );
}

#[test]
fn extended_entries() {
    if skipped() {
        return;
    }
    same(
        extended(),
        "allocated and zero",
        |i| i.set_word(i.l2(0) + 8, 0x1_ffff_ffff),
        |k| matches!(k, FindingKind::SubclustersContradict { index: 0, .. }),
    );
    same(
        extended(),
        "allocated without a cluster",
        |i| {
            let table = i.l2(0);
            i.write(table + 16 * 40, &[0; 8]);
            i.set_word(table + 16 * 40 + 8, 1);
        },
        |k| matches!(k, FindingKind::SubclustersWithoutCluster { index: 40, .. }),
    );
    same(
        extended(),
        "preallocated unaligned",
        |i| {
            i.set_word(i.l2(0), COPIED | 0x50200);
            i.set_word(i.l2(0) + 8, 0xffff_ffff << 32);
        },
        |k| matches!(k, FindingKind::ZeroClusterUnaligned { .. }),
    );
    same(
        extended(),
        "COPIED missing",
        |i| i.set_word(i.l2(0), 0x50000),
        |k| matches!(k, FindingKind::CopiedFlagL2 { index: 0, .. }),
    );
}

/// QEMU does not count the stream of a compressed cluster with a subcluster bitmap (which nobody looks at), calls its
/// clusters leaked, and frees data that can be read. Ours counts the stream.
#[test]
fn compressed_with_subclusters() {
    if skipped() {
        return;
    }
    let image = TestImage::new(&["-o", "extended_l2=on"], "64M", &["write -c -P 7 0 64k"]);
    let before = image.copy();
    image.set_word(image.l2(0) + 8, 1);
    assert_eq!(image.qemu_check(&[]).code, 2);
    let report = image.check();
    assert_eq!((report.exit_code(), report.counts.corruptions, report.counts.leaks), (2, 1, 0));
    assert!(image.repair(Repair::All).is_clean());
    image.assert_clean("repaired");
    image.assert_same_content(&before, "repaired");
}

/// Bit 0 of an entry means "zero" only in version 3 without extended entries; QEMU's check does not look, but its
/// driver takes a version 2 image for corrupt when it meets such an entry.
#[test]
fn zero_bit_where_it_is_reserved() {
    if skipped() {
        return;
    }
    for image in [extended(), TestImage::new(&["-o", "compat=0.10"], "64M", &IO)] {
        image.set_word(image.l2(0), image.word(image.l2(0)) | 1);
        assert_eq!(image.qemu_check(&[]).code, 0);
        let report = image.check();
        assert_eq!((report.exit_code(), report.counts.corruptions), (2, 1));
        assert!(has(&report, |k| matches!(k, FindingKind::L2ReservedBits { index: 0, .. })));
    }
}

#[test]
fn data_file() {
    if skipped() {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let options = format!("data_file={}", place.path().join("data").display());
    let image = || TestImage::new(&["-o", &options], "64M", &["write 64k 64k"]);
    same(
        image(),
        "COPIED missing",
        |i| i.set_word(i.l2(0) + 8, 0x10000),
        |k| matches!(k, FindingKind::CopiedFlagL2 { index: 1, refcount: 1, .. }),
    );
    same(
        image(),
        "compressed",
        |i| i.set_word(i.l2(0) + 8, COMPRESSED | 0x10000),
        |k| matches!(k, FindingKind::CompressedWithDataFile { index: 1, .. }),
    );
    // QEMU's check is content with a cluster at another place, but its driver gives an I/O error for it.
    let image = image();
    image.set_word(image.l2(0) + 8, COPIED | 0x20000);
    assert_eq!(image.qemu_check(&[]).code, 0);
    let report = image.check();
    assert_eq!(report.exit_code(), 2);
    assert!(has(&report, |k| *k == FindingKind::DataFileOffset { guest: 0x10000, offset: 0x20000 }));
}

#[test]
fn refcount_table() {
    if skipped() {
        return;
    }
    same(
        plain(),
        "reserved bits",
        |i| i.set_word(i.reftable(), i.refblock(0) | 1),
        |k| matches!(k, FindingKind::ReftableReservedBits { index: 0, .. }),
    );
    same(
        plain(),
        "unaligned",
        |i| i.set_word(i.reftable(), i.refblock(0) | 512),
        |k| matches!(k, FindingKind::RefblockUnaligned { index: 0, .. }),
    );
    same(
        plain(),
        "no block",
        |i| i.set_word(i.reftable(), 0),
        |k| matches!(k, FindingKind::RefcountTooLow { cluster: 0, refcount: 0, references: 1 }),
    );
    for offset in [1 << 40, 1 << 63, !0x1ff & !0xffff] {
        same(
            plain(),
            "outside",
            |i| i.set_word(i.reftable(), offset),
            |k| matches!(k, FindingKind::RefblockOutside { index: 0, .. }),
        );
    }
    same(
        plain(),
        "outside, further on",
        |i| i.set_word(i.reftable() + 80, 1 << 40),
        |k| matches!(k, FindingKind::RefblockOutside { index: 10, .. }),
    );
    same(
        plain(),
        "twice",
        |i| i.set_word(i.reftable() + 8, i.refblock(0)),
        |k| matches!(k, FindingKind::RefblockShared { index: 1, references: 2, .. }),
    );
    same(
        plain(),
        "three times",
        |i| {
            i.set_word(i.reftable() + 8, i.refblock(0));
            i.set_word(i.reftable() + 16, i.refblock(0));
        },
        |k| matches!(k, FindingKind::RefblockShared { index: 2, references: 3, .. }),
    );
    same(
        plain(),
        "the L2 table as a block",
        |i| i.set_word(i.reftable(), i.l2(0)),
        |k| matches!(k, FindingKind::RefblockShared { index: 0, .. }),
    );
    same(
        plain(),
        "the table as its own block",
        |i| i.set_word(i.reftable(), i.reftable()),
        |k| matches!(k, FindingKind::RefblockShared { index: 0, .. }),
    );
}

#[test]
fn header_fields() {
    if skipped() {
        return;
    }
    same(
        plain(),
        "L1 table past the end",
        |i| i.set_word(40, 1 << 40),
        |k| matches!(k, FindingKind::PastEnd { offset: 0x100_0000_0000, .. }),
    );
    same(
        plain(),
        "L1 table at the refcount table",
        |i| i.set_word(40, i.reftable()),
        |k| matches!(k, FindingKind::RefcountTooLow { .. }),
    );
    same(
        plain(),
        "no refcount table",
        |i| i.set_u32(56, 0),
        |k| matches!(k, FindingKind::RefcountTooLow { .. }),
    );
    same(plain(), "refcount table elsewhere", |i| i.set_word(48, i.l1()), |_| true);
}

#[test]
fn snapshots() {
    if skipped() {
        return;
    }
    same(
        with_snapshot(),
        "L1 table unaligned",
        |i| i.set_word(i.snapshots(), i.word(i.snapshots()) + 8),
        |k| matches!(k, FindingKind::SnapshotL1Unaligned { index: 0, .. }),
    );
    same(
        with_snapshot(),
        "L1 table too large",
        |i| i.set_u32(i.snapshots() + 8, 0x50_0000),
        |k| matches!(k, FindingKind::SnapshotL1TooLarge { index: 0, entries: 0x50_0000 }),
    );
    same(
        with_snapshot(),
        "L1 table past the end",
        |i| i.set_word(i.snapshots(), 1 << 40),
        |k| matches!(k, FindingKind::PastEnd { .. }),
    );
    same(
        with_snapshot(),
        "incomplete",
        |i| i.set_u32(i.snapshots() + 36, 8),
        |k| matches!(k, FindingKind::SnapshotIncomplete { index: 0 }),
    );
    same(
        with_snapshot(),
        "one snapshot forgotten",
        |i| i.set_u32(60, 0),
        |k| matches!(k, FindingKind::Leak { .. }),
    );
    same(
        with_snapshot(),
        "one more than there is",
        |i| i.set_u32(60, 2),
        |k| matches!(k, FindingKind::SnapshotIncomplete { index: 1 }),
    );
}

/// QEMU gives up on these; ours says what is wrong, checks the rest, and exits as QEMU does where the snapshots are
/// not known. Nothing is freed then.
#[test]
fn snapshot_tables_that_qemu_refuses() {
    if skipped() {
        return;
    }
    let image = with_snapshot();
    image.set_word(64, image.snapshots() + 8);
    assert_eq!(image.qemu_check(&[]).code, 1);
    let report = image.check();
    assert_eq!(report.exit_code(), 1);
    assert!(has(&report, |k| matches!(k, FindingKind::SnapshotTableInvalid { .. })));
    assert_eq!(image.repair(Repair::Leaks).counts.leaks_fixed, 0);

    let image = with_snapshot();
    image.set_u32(60, 0x2_0000);
    assert_eq!(image.qemu_check(&[]).code, 1);
    let report = image.check();
    assert_eq!(report.exit_code(), 2);
    assert!(has(&report, |k| *k == FindingKind::SnapshotsOverhanging { count: 0x1_0000 }));

    let image = with_snapshot();
    image.set_u32(image.snapshots() + 36, 2000);
    assert_eq!(image.qemu_check(&[]).code, 1);
    let report = image.check();
    assert_eq!(report.exit_code(), 2);
    assert!(has(&report, |k| *k == FindingKind::SnapshotExtraData { index: 0, bytes: 2000 }));
}

/// A damaged length hides the snapshots behind it. When the byte is put right again, they are all there: no repair has
/// freed what they use, or written the table anew without them. (QEMU's loses them.)
#[test]
fn a_damaged_length_costs_no_snapshot() {
    if skipped() {
        return;
    }
    let image = plain();
    for name in ["one", "two", "three"] {
        image.io(&[&format!("write -P {} 0 300k", name.len() + 1)]);
        image.snapshot(&["-c", name]);
    }
    image.io(&["write -P 9 0 300k"]);
    let disks = |image: &TestImage| -> Vec<Vec<u8>> {
        let out = image.sibling("raw");
        let path = image.path();
        let mut all = Vec::new();
        for name in ["", "one", "two", "three"] {
            let mut args = vec!["convert", "-f", "qcow2", "-O", "raw"];
            if !name.is_empty() {
                args.extend(["-l", name]);
            }
            args.extend([path.to_str().unwrap(), out.to_str().unwrap()]);
            qemu_img(&args);
            all.push(std::fs::read(&out).unwrap());
        }
        all
    };
    let before = disks(&image);
    let header = image.bytes(60, 12);
    let mut at = image.snapshots();
    let mut tried = 0;
    for index in 0..3 {
        let (id, name) = (image.u32(at + 12) >> 16, image.u32(at + 12) & 0xffff);
        for (field, len) in [(12, 2), (14, 2), (36, 4)] {
            for place in at + field..at + field + len {
                let right = image.bytes(place, 1)[0];
                for wrong in [0, right ^ 0x10, right.wrapping_add(72), 0xff] {
                    if wrong == right {
                        continue;
                    }
                    let what = format!("entry {index}, byte {}: {wrong:#x}", place - at);
                    let damaged = image.copy();
                    damaged.write(place, &[wrong]);
                    let first = damaged.repair(Repair::All);
                    damaged.repair(Repair::Leaks);
                    damaged.write(60, &header);
                    damaged.write(place, &[right]);
                    let found = damaged.qemu_check(&[]);
                    assert!([0, 3].contains(&found.code), "{what}: {found:?} {first:?}");
                    // What is counted is not written; some are looked at all the same.
                    tried += 1;
                    assert!(tried % 24 != 0 || disks(&damaged) == before, "{what}: {first:?}");
                }
            }
        }
        at = (at + 40 + u64::from(image.u32(at + 36) + id + name)).next_multiple_of(8);
    }
}

/// QEMU does not open these at all.
#[test]
fn bitmaps() {
    if skipped() {
        return;
    }
    let image = || {
        let image = plain();
        image.bitmap("b0");
        image.io(&["write 0 1M"]);
        image.assert_clean("bitmap");
        image
    };
    let table = |i: &TestImage| i.word(i.bitmap_directory());
    let broken = image();
    broken.set_word(table(&broken), 2);
    assert_eq!(broken.qemu_check(&[]).code, 1);
    let report = broken.check();
    assert_eq!(report.exit_code(), 2);
    assert!(has(&report, |k| matches!(k, FindingKind::BitmapTableEntry { entry: 2, .. })));

    let broken = image();
    broken.set_word(broken.bitmap_directory(), 8);
    assert_eq!(broken.qemu_check(&[]).code, 1);
    let report = broken.check();
    assert_eq!(report.exit_code(), 2);
    assert!(has(&report, |k| matches!(k, FindingKind::BitmapDirectoryInvalid { .. })));
    assert!(report.counts.leaks > 0);
    assert_eq!(broken.repair(Repair::Leaks).counts.leaks_fixed, 0);

    // A bitmap that another program made stale: its clusters are nobody's.
    let image = image();
    image.set_word(88, 0);
    let report = image.assert_same_verdict("stale bitmap");
    assert_eq!(report.exit_code(), 3);
}
