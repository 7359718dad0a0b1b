//! Seeded random damage: one bit or one word of one table. The numbers must be QEMU's.

use crate::support::{Random, TestImage, skipped};
use zebu::check::FindingKind;

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

/// Damage for which the difference to QEMU is meant, see `damage.rs`: L1 entries that lead to no table, and bit 0
/// where it is reserved.
fn is_known_difference(image: &TestImage, table: &str, at: u64) -> bool {
    let entry = image.word(at & !7);
    let cluster = image.cluster_size();
    let reserved_zero = image.u32(4) == 2 || image.word(72) & 16 != 0;
    match table {
        "L1" | "snapshot L1" => {
            let offset = entry & OFFSET;
            !offset.is_multiple_of(cluster) || offset == 0 && entry != 0
        }
        "L2" | "snapshot L2" => {
            let index = (at & !7) % cluster / 8;
            let first_word = image.word(72) & 16 == 0 || image.u32(4) == 2 || index.is_multiple_of(2);
            let compressed_with_bitmap =
                image.u32(4) == 3 && image.word(72) & 16 != 0 && image.word(at & !15) & 1 << 62 != 0;
            first_word && reserved_zero && entry & 1 != 0 || compressed_with_bitmap
        }
        _ => false,
    }
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
            if is_known_difference(&image, table, at) {
                different += 1;
                image.check();
            } else {
                image.assert_same_verdict(&what);
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
            if !is_known_difference(&image, table, at) {
                image.assert_same_verdict(&format!(
                    "{name}, round {round}: {table}, word {} {new:#x}",
                    at - start
                ));
            }
            image.set_word(at, old);
        }
        image.assert_clean(&name);
    }
}

/// What is found is said in words, up to the bound, and all of it counted.
#[test]
fn findings_are_bounded() {
    if skipped() {
        return;
    }
    let image = TestImage::new(&["-o", "cluster_size=4096"], "4M", &["write 0 4M"]);
    image.set_word(image.reftable(), 0);
    let options = zebu::check::CheckOptions { max_findings: 7, ..Default::default() };
    let report = image.check_with(&options);
    assert_eq!(report.findings.len(), 7);
    assert!(matches!(report.findings[0].kind, FindingKind::RefcountTooLow { .. }));
    assert_eq!(report.findings_left_out + 7, report.counts.corruptions);
    assert!(report.counts.corruptions > 1000);
}
