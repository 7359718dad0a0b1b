//! Seeded random damage: one bit or one word of one table. The numbers must be QEMU's.

use crate::support::{Random, TestImage, skipped, tool};
use zebu_engine::check::{FindingKind, Repair};

const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;

fn images() -> Vec<(String, TestImage)> {
    let mut images = Vec::new();
    for (options, size) in [
        ("cluster_size=512", "300k"),
        ("cluster_size=4096,refcount_bits=1", "4M"),
        ("cluster_size=4096,refcount_bits=64", "4M"),
        ("cluster_size=65536", "64M"),
        ("cluster_size=65536,compat=0.10", "64M"),
        ("cluster_size=16384,extended_l2=on", "16M"),
        ("cluster_size=65536,refcount_bits=2", "64M"),
    ] {
        let image = TestImage::new(
            &["-o", options],
            size,
            &["write -P 1 0 100k", "write -P 2 150k 70k", "write -z 10k 9k"],
        );
        let compressed: &[&str] = match options {
            "cluster_size=512" => &["write -c 256k 512", "write -c 257k 512"],
            "cluster_size=65536" => &["write -c 1M 64k", "write -c 1088k 64k"],
            _ => &[],
        };
        image.io(compressed);
        if !options.contains("refcount_bits=1") {
            image.snapshot(&["-c", "one"]);
            image.io(&["write -P 3 20k 50k"]);
        }
        image.assert_clean(options);
        images.push((options.to_owned(), image));
    }
    images
}

/// Where a table is, in bytes, and the length of its interesting part.
fn tables(image: &TestImage) -> Vec<(&'static str, u64, u64)> {
    let snapshot_l1 = image.word(image.snapshots());
    let mut tables = vec![
        ("L1", image.l1(), 8 * u64::from(image.u32(36))),
        ("L2", image.l2(0), 8 * 30),
        ("refcount table", image.reftable(), 16),
        ("refcount block", image.refblock(0), 64),
    ];
    if image.u32(60) > 0 {
        tables.push(("snapshot L1", snapshot_l1, 8));
        tables.push(("snapshot L2", image.word(snapshot_l1) & OFFSET, 8 * 30));
    }
    tables
}

/// The reserved bits of an L2 entry that QEMU's check looks at; ours knows that bit 0 may be one too.
const QEMU_RESERVED: u64 = 0x3f00_0000_0000_01fe;

/// Whether only our check looks for it, see `damage.rs`.
fn only_ours(kind: &FindingKind) -> bool {
    matches!(kind, FindingKind::L2ReservedBits { entry, .. } if entry & QEMU_RESERVED == 0)
}

/// Damage that QEMU goes on from where we don't, or the other way round, see `damage.rs`: L1 entries that lead to no
/// table, compressed clusters with a subcluster bitmap, and blocks used twice where one bit must count that.
fn is_known_difference(image: &TestImage) -> bool {
    let one_bit = image.u32(4) == 3 && image.u32(96) == 0;
    image.check().findings.iter().any(|finding| match finding.kind {
        FindingKind::L1CopiedWithoutTable { .. }
        | FindingKind::L2TableUnaligned { .. }
        | FindingKind::CompressedWithSubclusters { .. } => true,
        FindingKind::L1ReservedBits { entry } => entry & OFFSET == 0,
        FindingKind::RefblockShared { .. } => one_bit,
        _ => false,
    })
}

#[test]
fn one_bit() {
    if skipped() {
        return;
    }
    let rounds = std::env::var("ZEBU_LONG_TESTS").map_or(25, |_| 600);
    let (mut compared, mut different) = (0, 0);
    for (number, (name, image)) in images().into_iter().enumerate() {
        let mut random = Random(number as u64);
        for round in 0..rounds {
            let (table, start, len) = tables(&image)[random.below(tables(&image).len() as u64) as usize];
            let at = start + random.below(len);
            let old = image.bytes(at, 1)[0];
            let bit = random.below(8);
            image.write(at, &[old ^ 1 << bit]);
            let what = format!("{name}, round {round}: {table}, byte {} bit {bit}", at - start);
            if is_known_difference(&image) {
                different += 1;
                image.check();
            } else {
                image.assert_same_verdict_but(&what, only_ours);
                compared += 1;
            }
            image.write(at, &[old]);
        }
        image.assert_clean(&name);
    }
    assert!(compared > 4 * different, "{compared} compared, {different} not");
}

#[test]
fn one_word() {
    if skipped() {
        return;
    }
    let rounds = std::env::var("ZEBU_LONG_TESTS").map_or(12, |_| 300);
    for (number, (name, image)) in images().into_iter().enumerate() {
        let mut random = Random(1000 + number as u64);
        let (cluster, clusters) = (image.cluster_size(), image.len() / image.cluster_size());
        for round in 0..rounds {
            let (table, start, len) = tables(&image)[random.below(tables(&image).len() as u64) as usize];
            let at = start + random.below(len / 8) * 8;
            let old = image.word(at);
            let cluster_at = random.below(clusters + 2) * cluster;
            let new = match random.below(5) {
                0 => 0,
                1 => cluster_at | 1 << 63,
                2 => cluster_at,
                3 => cluster_at | 1 << 62 | (random.next() & 0x3fff) << 40,
                _ => random.next(),
            };
            image.set_word(at, new);
            if !is_known_difference(&image) {
                let what = format!("{name}, round {round}: {table}, word {} {new:#x}", at - start);
                image.assert_same_verdict_but(&what, only_ours);
            }
            image.set_word(at, old);
        }
        image.assert_clean(&name);
    }
}

/// Whether QEMU can read all of the disk.
fn readable(image: &TestImage) -> bool {
    let path = image.path();
    let raw = image.sibling("all.raw");
    let args = ["convert", "-O", "raw", path.to_str().unwrap(), raw.to_str().unwrap()];
    tool("qemu-img", &args).status.success()
}

/// Where QEMU's repair leaves nothing wrong, ours doesn't either, and the disks are the same.
#[test]
fn repairs() {
    if skipped() {
        return;
    }
    let rounds = std::env::var("ZEBU_LONG_TESTS").map_or(8, |_| 60);
    let (mut both, mut ours_only) = (0, 0);
    for (number, (name, image)) in images().into_iter().enumerate() {
        let mut random = Random(2000 + number as u64);
        for round in 0..rounds {
            let (ours, theirs) = (image.copy(), image.copy());
            let mut what = format!("{name}, round {round}");
            for _ in 0..=random.below(3) {
                let all = tables(&image);
                let (table, start, len) = all[random.below(all.len() as u64) as usize];
                let (mut at, mut bit) = (start + random.below(len), random.below(8));
                if table.contains('L') && random.below(4) > 0 {
                    // Most other bits of these lead elsewhere, which nobody can repair: COPIED.
                    (at, bit) = (at & !7, 7);
                }
                what += &format!(", {table} byte {} bit {bit}", at - start);
                for damaged in [&ours, &theirs] {
                    damaged.write(at, &[damaged.bytes(at, 1)[0] ^ (1 << bit)]);
                }
            }
            if is_known_difference(&ours) {
                continue;
            }
            let report = ours.repair(Repair::All);
            let verdict = theirs.qemu_check(&["-r", "all"]);
            if verdict.code == 0 {
                assert_eq!(
                    ours.qemu_check(&[]).code,
                    0,
                    "{what}: {:?}\nQEMU: {}",
                    report.findings,
                    verdict.said
                );
                assert!(report.counts.corruptions == 0 || report.findings.iter().all(|f| only_ours(&f.kind)));
                // A cluster that was made "compressed" can't be read by anyone; where both can be, they are equal.
                if readable(&ours) {
                    ours.assert_same_content(&theirs, &what);
                    both += 1;
                }
            } else if report.is_clean() {
                assert_eq!(ours.qemu_check(&[]).code, 0, "{what}");
                ours_only += 1;
            }
            // A second repair finds nothing to do.
            let again = ours.repair(Repair::All);
            assert!(again.repair.is_none(), "{what}: {:?}", again.repair);
        }
    }
    assert!(both > rounds && ours_only > 0, "{both} repaired by both, {ours_only} by us alone");
}

/// Findings are told in words, up to the bound, and all of them counted.
#[test]
fn findings_are_bounded() {
    if skipped() {
        return;
    }
    let image = TestImage::new(&["-o", "cluster_size=4096"], "4M", &["write 0 4M"]);
    image.set_word(image.reftable(), 0);
    let options = zebu_engine::check::CheckOptions::default().max_findings(7);
    let report = image.check_with(&options);
    assert_eq!(report.findings.len(), 7);
    assert!(matches!(report.findings[0].kind, FindingKind::RefcountTooLow { .. }));
    assert_eq!(report.findings_left_out + 7, report.counts.corruptions);
    assert!(report.counts.corruptions > 1000);
}
