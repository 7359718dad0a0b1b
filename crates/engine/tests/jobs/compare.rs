//! `compare` finds what `qemu-img compare` finds.

use crate::matrix::open;
use crate::support::{Images, Seeded, disk, on_worker, text, tool, write_sparse};
use crate::variants::{Variant, all};
use std::path::Path;
use zebu::ErrorKind;
use zebu::jobs::{CompareOptions, CompareReport, CompareStage, Comparison, JobControl, Strictness, compare};

fn compare_two(a: (&Path, &str), b: (&Path, &str), options: &CompareOptions) -> CompareReport {
    on_worker(async |worker| {
        let (first, second) = (open(worker, a.0, a.1).await, open(worker, b.0, b.1).await);
        compare(worker, &first, &second, options).await.unwrap()
    })
}

/// What `qemu-img compare` says: its exit code and the offset of a difference in the content.
fn oracle(a: (&Path, &str), b: (&Path, &str), strict: bool) -> (i32, Option<u64>) {
    let mut args = vec!["compare", "-f", a.1, "-F", b.1];
    args.extend(strict.then_some("-s"));
    args.extend([text(a.0), text(b.0)]);
    let output = tool("qemu-img", &args);
    let said = String::from_utf8(output.stdout).unwrap();
    let offset = said
        .lines()
        .find_map(|line| line.strip_prefix("Content mismatch at offset ")?.strip_suffix('!')?.parse().ok());
    (output.status.code().unwrap(), offset)
}

fn assert_as_oracle(report: &CompareReport, oracle: (i32, Option<u64>), what: &str) {
    let found = match report.result {
        Comparison::Identical => (0, None),
        Comparison::ContentMismatch { offset } => (1, Some(offset)),
        Comparison::SizeMismatch | Comparison::StatusMismatch { .. } => (1, None),
    };
    assert_eq!(found, oracle, "{what}: {report:?}");
}

#[test]
fn forms_of_one_disk_are_identical_and_one_byte_makes_a_difference() {
    let images = Images::new();
    let changed = images.path("changed.raw");
    let mut random = Seeded(1);
    for variant in all(&images, 6) {
        let Variant { name, path, format, bytes } = &variant;
        let options = CompareOptions { requests: 1 + random.below(8) as usize, ..CompareOptions::default() };
        write_sparse(&changed, bytes);
        let same = compare_two((path, format), (&changed, "raw"), &options);
        assert_eq!((same.result, same.sizes), (Comparison::Identical, [bytes.len() as u64; 2]), "{name}");

        let mut other = bytes.clone();
        for _ in 0..3 {
            other[random.below(bytes.len() as u64) as usize] ^= 0x55;
        }
        write_sparse(&changed, &other);
        for pair in [((&**path, *format), (&*changed, "raw")), ((&*changed, "raw"), (&**path, *format))] {
            let report = compare_two(pair.0, pair.1, &options);
            assert_as_oracle(&report, oracle(pair.0, pair.1, false), name);
        }
    }
}

#[test]
fn the_tail_of_the_larger_image_must_be_zero() {
    let images = Images::new();
    let (short, long) = (images.path("short"), images.path("long"));
    let bytes = disk(9, 5000);
    write_sparse(&short, &bytes);
    for (at, value) in [(0, 0), (0, 1), (511, 1), (3 << 20, 1)] {
        let mut longer = bytes.clone();
        longer.resize(bytes.len() + (4 << 20), 0);
        longer[bytes.len() + at] = value;
        // Zeroes that are written: only reading shows them.
        std::fs::write(&long, &longer).unwrap();
        for pair in [((&*short, "raw"), (&*long, "raw")), ((&*long, "raw"), (&*short, "raw"))] {
            let report = compare_two(pair.0, pair.1, &CompareOptions::default());
            assert_as_oracle(&report, oracle(pair.0, pair.1, false), &format!("{at} {value}"));
            assert_eq!(report.sizes.iter().max(), Some(&(longer.len() as u64)));
        }
        let strict = CompareOptions { strictness: Strictness::Allocation, ..CompareOptions::default() };
        let report = compare_two((&short, "raw"), (&long, "raw"), &strict);
        assert_eq!(report.result, Comparison::SizeMismatch);
        assert_eq!(oracle((&short, "raw"), (&long, "raw"), true).0, 1);
    }
}

#[test]
fn the_lowest_of_many_differences_is_reported_however_reads_are_ordered() {
    let images = Images::new();
    let (a, b) = (images.path("a"), images.path("b"));
    for seed in 0..20 {
        let mut random = Seeded(seed);
        let bytes = disk(seed, 30_000);
        let mut other = bytes.clone();
        let mut lowest = bytes.len();
        for _ in 0..=random.below(200) {
            let at = random.below(bytes.len() as u64) as usize;
            other[at] = !bytes[at];
            lowest = lowest.min(at);
        }
        write_sparse(&a, &bytes);
        write_sparse(&b, &other);
        let options = CompareOptions { requests: 16, buffer_memory: 4 << 20, ..CompareOptions::default() };
        let report = compare_two((&a, "raw"), (&b, "raw"), &options);
        let offset = lowest as u64 / 512 * 512;
        assert_eq!(report.result, Comparison::ContentMismatch { offset }, "seed {seed}");
    }
}

#[test]
fn allocation_counts_only_when_strict() {
    let images = Images::new();
    let (hole, written) = (images.path("hole"), images.path("written"));
    write_sparse(&hole, &vec![0; 1 << 20]);
    std::fs::write(&written, vec![0; 1 << 20]).unwrap();
    let strict = CompareOptions { strictness: Strictness::Allocation, ..CompareOptions::default() };
    let pair = ((&*hole, "raw"), (&*written, "raw"));
    assert_eq!(compare_two(pair.0, pair.1, &CompareOptions::default()).result, Comparison::Identical);
    assert_eq!(compare_two(pair.0, pair.1, &strict).result, Comparison::StatusMismatch { offset: 0 });
    assert_eq!(oracle(pair.0, pair.1, true).0, 1);
    assert_eq!(compare_two(pair.0, pair.0, &strict).result, Comparison::Identical);
}

#[test]
fn a_cancelled_comparison_and_bad_options_are_no_result() {
    let images = Images::new();
    let path = images.path("a");
    std::fs::write(&path, vec![1; 1 << 20]).unwrap();
    on_worker(async |worker| {
        let (a, b) = (open(worker, &path, "raw").await, open(worker, &path, "raw").await);
        let control = JobControl::default();
        control.cancel.cancel();
        let options = CompareOptions { control, ..CompareOptions::default() };
        let error = compare(worker, &a, &b, &options).await.unwrap_err();
        assert_eq!((error.stage, error.error.kind()), (CompareStage::Control, ErrorKind::Cancelled));
        let options = CompareOptions { requests: 0, ..CompareOptions::default() };
        let error = compare(worker, &a, &b, &options).await.unwrap_err();
        assert_eq!((error.stage, error.error.kind()), (CompareStage::Control, ErrorKind::InvalidArgument));
    });
}
