//! `compare` finds what `qemu-img compare` finds.

use crate::matrix::open;
use crate::support::{Images, Seeded, disk, on_worker, qemu_img, text, tool, write_sparse};
use crate::variants::{Variant, all};
use std::path::{Path, PathBuf};
use zebu_engine::ErrorKind;
use zebu_engine::jobs::{
    CompareOptions, CompareReport, CompareStage, Comparison, JobControl, Strictness, compare,
};

fn compare_two(a: (&Path, &str), b: (&Path, &str), options: &CompareOptions) -> CompareReport {
    on_worker(async |worker| {
        let (first, second) = (open(worker, a.0, a.1).await, open(worker, b.0, b.1).await);
        compare(worker, &first, &second, options).await.unwrap()
    })
}

/// The answer of `qemu-img compare`: its exit code and the offset of a difference in the content.
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
        let options = CompareOptions::default().requests(1 + random.below(8) as usize);
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
        let strict = CompareOptions::default().strictness(Strictness::Allocation);
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
        let options = CompareOptions::default().requests(16).buffer_memory(4 << 20);
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
    let strict = CompareOptions::default().strictness(Strictness::Allocation);
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
        let options = CompareOptions::default().control(control);
        let error = compare(worker, &a, &b, &options).await.unwrap_err();
        assert_eq!((error.stage, error.error.kind()), (CompareStage::Control, ErrorKind::Cancelled));
        let options = CompareOptions::default().requests(0);
        let error = compare(worker, &a, &b, &options).await.unwrap_err();
        assert_eq!((error.stage, error.error.kind()), (CompareStage::Control, ErrorKind::InvalidArgument));
    });
}

/// A compressed image of which no cluster can be read; its tables are whole.
fn with_damaged_data(images: &Images, bytes: &[u8]) -> PathBuf {
    let (plain, path) = (images.path("plain"), images.path("damaged"));
    write_sparse(&plain, bytes);
    qemu_img(&["convert", "-c", "-f", "raw", "-O", "qcow2", text(&plain), text(&path)]);
    let map = qemu_img(&["map", "-f", "qcow2", "--output", "json", text(&path)]);
    assert!(map.contains("\"compressed\": true"));
    let mut file = std::fs::read(&path).unwrap();
    // All streams behind the first tables: 0xff begins no block of deflate.
    file[5 << 16..].fill(0xff);
    std::fs::write(&path, file).unwrap();
    path
}

#[test]
fn failures_say_at_which_stage_and_a_difference_below_them_comes_first() {
    let images = Images::new();
    let mut bytes = vec![0; 4 << 20];
    bytes[1 << 20..].chunks_mut(2).for_each(|pair| pair[0] = 5);
    let damaged = with_damaged_data(&images, &bytes);
    let plain = images.path("plain");
    let run = |first: (&Path, &str), second: (&Path, &str)| {
        on_worker(async |worker| {
            let (a, b) = (open(worker, first.0, first.1).await, open(worker, second.0, second.1).await);
            compare(worker, &a, &b, &CompareOptions::default()).await
        })
    };

    let error = run((&plain, "raw"), (&damaged, "qcow2")).unwrap_err();
    assert_eq!((error.stage, error.image.as_deref()), (CompareStage::Read, Some(&*damaged)));
    assert_eq!(oracle((&plain, "raw"), (&damaged, "qcow2"), false).0, 4);

    // A difference before the damage decides, as it does there.
    let other = images.path("other");
    let mut changed = bytes.clone();
    changed[700_000] = 1;
    write_sparse(&other, &changed);
    let report = run((&other, "raw"), (&damaged, "qcow2")).unwrap();
    assert_eq!(report.result, Comparison::ContentMismatch { offset: 700_000 / 512 * 512 });

    // An L2 table that is none: the first L1 entry points into the middle of a cluster.
    let broken = images.path("broken");
    qemu_img(&["convert", "-f", "raw", "-O", "qcow2", text(&plain), text(&broken)]);
    let mut file = std::fs::read(&broken).unwrap();
    let l1 = u64::from_be_bytes(file[40..48].try_into().unwrap()) as usize;
    file[l1 + 6] |= 0x02;
    std::fs::write(&broken, file).unwrap();
    let error = run((&broken, "qcow2"), (&plain, "raw")).unwrap_err();
    assert_eq!((error.stage, error.image.as_deref()), (CompareStage::Status, Some(&*broken)));
    assert_eq!(error.error.kind(), ErrorKind::Corrupt);
    assert_eq!(oracle((&broken, "qcow2"), (&plain, "raw"), false).0, 3);
}
