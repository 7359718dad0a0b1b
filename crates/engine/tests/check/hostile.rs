//! Images made to waste time and memory: bounded work, whatever they say. (Memory: `check_memory.rs`.)

use crate::support::TestImage;
use std::time::{Duration, Instant};
use zebu_engine::check::{CheckOptions, CheckReport, FindingKind, Repair};

const COPIED: u64 = 1 << 63;
/// Much more than any of these takes, much less than following them one by one would.
const LONG: Duration = Duration::from_secs(600);

/// A version 3 image of nothing but a header and what is written by hand.
struct Crafted {
    image: TestImage,
    cluster: u64,
}

impl Crafted {
    fn new(cluster_bits: u32) -> Self {
        let mut header = vec![0; 112];
        header[..8].copy_from_slice(&[b'Q', b'F', b'I', 0xfb, 0, 0, 0, 3]);
        header[20..24].copy_from_slice(&cluster_bits.to_be_bytes());
        header[24..32].copy_from_slice(&(1u64 << 20).to_be_bytes());
        header[96..100].copy_from_slice(&4u32.to_be_bytes());
        header[100..104].copy_from_slice(&112u32.to_be_bytes());
        let crafted = Self { image: TestImage::from_bytes(&header), cluster: 1 << cluster_bits };
        crafted.set_len(crafted.cluster);
        crafted
    }

    fn set_len(&self, len: u64) {
        let file = std::fs::OpenOptions::new().write(true).open(self.image.path()).unwrap();
        file.set_len(len).unwrap();
    }

    fn l1(&self, offset: u64, entries: u32) {
        self.image.set_u32(36, entries);
        self.image.set_word(40, offset);
    }

    fn reftable(&self, offset: u64, clusters: u32) {
        self.image.set_word(48, offset);
        self.image.set_u32(56, clusters);
    }

    fn snapshots(&self, offset: u64, count: u32) {
        self.image.set_u32(60, count);
        self.image.set_word(64, offset);
    }

    /// `count` equal words at `offset`.
    fn words(&self, offset: u64, count: usize, word: u64) {
        let bytes: Vec<u8> = std::iter::repeat_n(word.to_be_bytes(), count).flatten().collect();
        self.image.write(offset, &bytes);
    }

    fn check(&self, what: &str) -> CheckReport {
        let start = Instant::now();
        let report = self.image.check_with(&CheckOptions::default().max_findings(5000));
        assert!(start.elapsed() < LONG, "{what}: {:?}", start.elapsed());
        assert!(report.findings.len() <= 5000);
        report
    }

    /// Repairs end too, and a second one finds nothing more to do.
    fn repair(&self, what: &str) {
        for _ in 0..2 {
            let start = Instant::now();
            let options = CheckOptions::default().repair(Repair::All);
            let result = crate::support::on_worker(async |worker| {
                zebu_engine::check::check(worker, &self.image.path(), &options).await
            });
            assert!(start.elapsed() < LONG, "{what}: {:?}", start.elapsed());
            if let Ok(report) = result {
                let again = self.image.check();
                assert_eq!(again.exit_code(), report.exit_code(), "{what}");
            }
        }
    }
}

/// An L1 table of 4 Mi entries that all point at one L2 table, whose entries all point at it again; and 65536
/// snapshots that have the same L1 table: 2^56 references to one cluster.
#[test]
fn multiplication() {
    let crafted = Crafted::new(16);
    let (l1, l2, snapshots) = (1 << 16, 40 << 20, 48 << 20);
    crafted.set_len(64 << 20);
    crafted.words(l1, 4 << 20, COPIED | l2);
    crafted.words(l2, 8192, COPIED | l2);
    crafted.l1(l1, 4 << 20);
    let mut entry = vec![0; 56];
    entry[..8].copy_from_slice(&l1.to_be_bytes());
    entry[8..12].copy_from_slice(&(4u32 << 20).to_be_bytes());
    entry[36..40].copy_from_slice(&16u32.to_be_bytes());
    let table: Vec<u8> = std::iter::repeat_n(entry, 65536).flatten().collect();
    crafted.image.write(snapshots, &table);
    crafted.snapshots(snapshots, 65536);
    let report = crafted.check("multiplication");
    let references = (4u64 << 20) * 65537 * 8193;
    let overflow = FindingKind::RefcountOverflow { cluster: l2 >> 16, references };
    assert!(report.findings.iter().any(|finding| finding.kind == overflow), "{:?}", &report.findings[..5]);
    assert_eq!(report.exit_code(), 2);
    crafted.repair("multiplication");
}

/// Snapshots whose L1 tables overlap each other in every possible way.
#[test]
fn overlapping_l1_tables() {
    let crafted = Crafted::new(9);
    let (l1, snapshots) = (1 << 9, 40 << 20);
    crafted.set_len(64 << 20);
    crafted.words(l1, 4 << 20, 3 << 20);
    crafted.l1(l1, 4 << 20);
    let mut table = Vec::new();
    for n in 0..65536u64 {
        let mut entry = vec![0; 56];
        entry[..8].copy_from_slice(&(l1 + n * 512).to_be_bytes());
        entry[8..12].copy_from_slice(&((4u32 << 20) - n as u32 * 64).to_be_bytes());
        entry[36..40].copy_from_slice(&16u32.to_be_bytes());
        table.extend(entry);
    }
    crafted.image.write(snapshots, &table);
    crafted.snapshots(snapshots, 65536);
    assert_eq!(crafted.check("overlapping").exit_code(), 2);
}

/// A refcount table of a million entries that all name the same block of the largest size.
#[test]
fn one_block_for_everything() {
    let crafted = Crafted::new(21);
    let (table, block) = (2 << 21, 8 << 21);
    crafted.set_len(1 << 42);
    crafted.image.set_word(24, 0);
    crafted.words(table, 1 << 20, block);
    crafted.words(block, 1 << 18, u64::MAX);
    crafted.reftable(table, 4);
    let report = crafted.check("one block");
    assert_eq!(report.exit_code(), 1, "{:?}", report.counts);
    crafted.repair("one block");
}

/// Tables that point at themselves and at each other.
#[test]
fn circles() {
    for bits in [9, 12, 16, 21] {
        let crafted = Crafted::new(bits);
        let cluster = crafted.cluster;
        crafted.set_len(cluster * 8);
        crafted.l1(cluster, 32);
        crafted.reftable(cluster, 1);
        crafted.snapshots(cluster, 7);
        let words: Vec<u8> =
            (0..cluster / 8).flat_map(|n| (COPIED | (n % 8 * cluster)).to_be_bytes()).collect();
        for n in 1..8 {
            crafted.image.write(n * cluster, &words);
        }
        let report = crafted.check("circles");
        assert_ne!(report.exit_code(), 0);
        crafted.repair("circles");
    }
}

/// A small file whose header claims the largest tables, inside it and past its end.
#[test]
fn gigantic_header() {
    for offset in [1 << 16, 1 << 40, 1 << 62] {
        let crafted = Crafted::new(16);
        crafted.l1(offset, 4 << 20);
        crafted.reftable(offset, 128);
        crafted.snapshots(offset, u32::MAX);
        crafted.image.set_word(24, 1 << 40);
        let report = crafted.check("gigantic");
        assert_ne!(report.exit_code(), 0);
        crafted.repair("gigantic");
    }
}

/// A file of 8 TiB that is one hole but for a table: what lies in holes is not read.
#[test]
fn tables_in_holes() {
    let crafted = Crafted::new(21);
    let l1 = 1 << 21;
    crafted.set_len(8 << 40);
    let entries: Vec<u8> = (0..1u64 << 22).flat_map(|n| (COPIED | n << 21).to_be_bytes()).collect();
    crafted.image.write(l1, &entries);
    crafted.l1(l1, 4 << 20);
    let report = crafted.check("holes");
    assert_eq!(report.exit_code(), 2);
    assert!(report.counts.corruptions >= 4 << 20);
}

/// Each flipped byte of the first clusters ends in a report or an error, and so does a repair of it.
#[test]
fn any_byte() {
    let image = TestImage::from_bytes(&small_image());
    assert!(image.check().is_clean());
    let mut random = crate::support::Random(5);
    for _ in 0..400 {
        let copy = image.copy();
        for _ in 0..=random.below(4) {
            let at = random.below(8 * 512);
            copy.write(at, &[random.next() as u8]);
        }
        for repair in [Repair::None, Repair::Leaks, Repair::All, Repair::All] {
            let options = CheckOptions::default().repair(repair);
            let _ = crate::support::on_worker(async |worker| {
                zebu_engine::check::check(worker, &copy.path(), &options).await
            });
        }
    }
}

/// An image of 512-byte clusters: header, refcount table, refcount block, L1 table, L2 table, data.
fn small_image() -> Vec<u8> {
    let mut bytes = vec![0; 8 * 512];
    bytes[..8].copy_from_slice(&[b'Q', b'F', b'I', 0xfb, 0, 0, 0, 3]);
    let put =
        |bytes: &mut Vec<u8>, at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
    put(&mut bytes, 20, &9u32.to_be_bytes());
    put(&mut bytes, 24, &(32u64 << 10).to_be_bytes());
    put(&mut bytes, 36, &1u32.to_be_bytes());
    put(&mut bytes, 40, &(3u64 * 512).to_be_bytes());
    put(&mut bytes, 48, &512u64.to_be_bytes());
    put(&mut bytes, 56, &1u32.to_be_bytes());
    put(&mut bytes, 96, &4u32.to_be_bytes());
    put(&mut bytes, 100, &112u32.to_be_bytes());
    put(&mut bytes, 512, &1024u64.to_be_bytes());
    for cluster in 0..8 {
        put(&mut bytes, 1024 + cluster * 2, &1u16.to_be_bytes());
    }
    put(&mut bytes, 3 * 512, &(COPIED | (4 * 512)).to_be_bytes());
    for n in 0..3u64 {
        put(&mut bytes, 4 * 512 + n as usize * 8, &(COPIED | ((5 + n) * 512)).to_be_bytes());
    }
    bytes
}
