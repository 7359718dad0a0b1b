//! Repairs: QEMU finds nothing wrong afterwards, and the disk shows what it showed.

use crate::support::{LUKS_SECRET, Random, TestImage, on_worker, qemu_img, skipped};
use std::sync::{Arc, Mutex};
use zebu_engine::check::{CheckOptions, Repair, check_file, rebuild_refcounts};
use zebu_engine::jobs::{JobControl, Progress};
use zebu_engine::storage::{Access, Create, File, LockMode, OpenFlags};
use zebu_engine::{CacheMode, ErrorKind};

const COPIED: u64 = 1 << 63;

/// Damage: its name, and the function that does it.
type Damage<'a> = (&'a str, &'a dyn Fn(&TestImage));

fn filled(options: &str) -> TestImage {
    let image = TestImage::new(
        &["-o", options],
        "16M",
        &["write -P 1 0 300k", "write -P 2 1M 700k", "write -z 64k 128k", "write -P 3 9M 64k"],
    );
    if !options.contains("refcount_bits=1") && !options.contains("data_file") {
        image.snapshot(&["-c", "one"]);
        image.io(&["write -P 4 200k 300k"]);
        image.snapshot(&["-c", "two"]);
        image.io(&["write -P 5 1200k 64k"]);
    }
    image
}

const KINDS: [&str; 9] = [
    "cluster_size=512",
    "cluster_size=4096,refcount_bits=1",
    "cluster_size=4096,refcount_bits=2",
    "cluster_size=4096,refcount_bits=64",
    "cluster_size=65536",
    "cluster_size=65536,compat=0.10",
    "cluster_size=65536,refcount_bits=8",
    "cluster_size=16384,extended_l2=on",
    "cluster_size=2M",
];

/// That a repair of `damaged` leaves nothing wrong, and the same disk and snapshots as in `intact`.
fn mends(damaged: &TestImage, intact: &TestImage, repair: Repair, what: &str) {
    mends_with(damaged, intact, &CheckOptions::default().repair(repair), what);
}

fn mends_with(damaged: &TestImage, intact: &TestImage, options: &CheckOptions, what: &str) {
    let before = damaged.check();
    assert!(!before.is_clean(), "{what}: nothing is wrong");
    let report = damaged.check_with(options);
    let list: Vec<String> = report.findings.iter().map(ToString::to_string).collect();
    assert!(report.is_clean(), "{what}: {:?} {list:?}", report.counts);
    assert!(report.counts.corruptions_fixed + report.counts.leaks_fixed > 0, "{what}");
    assert!(report.repair.is_some(), "{what}");
    damaged.assert_clean(what);
    damaged.assert_same_content(intact, what);
    if intact.u32(60) > 0 {
        for image in [damaged, intact] {
            qemu_img(&[
                "convert",
                "-O",
                "raw",
                "-l",
                "one",
                image.path().to_str().unwrap(),
                image.sibling("one.raw").to_str().unwrap(),
            ]);
        }
        let same = std::fs::read(damaged.sibling("one.raw")).unwrap()
            == std::fs::read(intact.sibling("one.raw")).unwrap();
        assert!(same, "{what}: the snapshot changed");
    }
    // A guest can go on writing, and the image stays in order.
    damaged.io(&["write -P 9 5M 300k", "write -P 9 100k 64k", "discard 1M 128k"]);
    damaged.assert_clean(what);
}

/// Sets the refcount of a cluster to `value`, cut to its width.
fn set_refcount(image: &TestImage, cluster: u64, value: u64) {
    let order = if image.u32(4) == 2 { 4 } else { image.u32(96) };
    let per_block = (image.cluster_size() * 8) >> order;
    let block = image.refblock(cluster / per_block);
    let index = cluster % per_block;
    if order < 3 {
        let bits = 1 << order;
        let at = block + index * bits / 8;
        let shift = index * bits % 8;
        let mask = (1u8 << bits) - 1;
        let old = image.bytes(at, 1)[0];
        image.write(at, &[old & !(mask << shift) | (value as u8 & mask) << shift]);
    } else {
        let width = 1u64 << (order - 3);
        let bytes = value.to_be_bytes();
        image.write(block + index * width, &bytes[8 - width as usize..]);
    }
}

#[test]
fn leaks() {
    if skipped() {
        return;
    }
    for options in KINDS {
        let intact = filled(options);
        intact.assert_clean(options);
        let damaged = intact.copy();
        // The file is longer by clusters that have refcounts and no references.
        let (cluster, end) = (damaged.cluster_size(), damaged.len().div_ceil(damaged.cluster_size()));
        damaged.write(end * cluster, &vec![7; 5 * cluster as usize]);
        for n in 0..5 {
            set_refcount(&damaged, end + n, 1 + n);
        }
        set_refcount(&damaged, end + 1, 1);
        let other = damaged.copy();
        mends(&damaged, &intact, Repair::Leaks, &format!("leaks, {options}"));
        mends(&other, &intact, Repair::All, &format!("all, {options}"));
    }
}

#[test]
fn wrong_refcounts_of_clusters_in_use() {
    if skipped() {
        return;
    }
    for options in KINDS {
        if options.contains("refcount_bits=1") {
            continue;
        }
        let intact = filled(options);
        let mut random = Random(7);
        let damaged = intact.copy();
        let clusters = damaged.len() / damaged.cluster_size();
        for _ in 0..20 {
            set_refcount(&damaged, random.below(clusters), 1 + random.below(3));
        }
        mends(&damaged, &intact, Repair::All, &format!("wrong refcounts, {options}"));
    }
}

#[test]
fn refcounts_that_are_gone() {
    if skipped() {
        return;
    }
    for options in KINDS {
        let intact = filled(options);
        let damages: [Damage<'_>; 6] = [
            ("no block", &|i| i.set_word(i.reftable(), 0)),
            ("block outside", &|i| i.set_word(i.reftable(), 1 << 40)),
            ("block unaligned", &|i| i.set_word(i.reftable(), (i.refblock(0) + 512 * 3 / 2) & !0x1ff | 1)),
            ("block of zeroes", &|i| i.write(i.refblock(0), &vec![0; i.cluster_size() as usize])),
            ("block twice", &|i| i.set_word(i.reftable() + 8 * 7, i.refblock(0))),
            ("no table", &|i| i.set_u32(56, 0)),
        ];
        for (what, damage) in damages {
            let what = format!("{what}, {options}");
            let damaged = intact.copy();
            damage(&damaged);
            let before = damaged.copy();
            let report = damaged.repair(Repair::Leaks);
            assert_eq!(report.exit_code(), damaged.check().exit_code(), "{what}");
            assert_eq!(report.counts.leaks_fixed, 0, "{what}: leaks cannot be told from lost blocks");
            let same = std::fs::read(before.path()).unwrap() == std::fs::read(damaged.path()).unwrap();
            assert!(same, "{what}: -r leaks wrote something");
            mends(&damaged, &intact, Repair::All, &what);
        }
    }
}

#[test]
fn copied_flags() {
    if skipped() {
        return;
    }
    for options in KINDS {
        let intact = filled(options);
        let damaged = intact.copy();
        damaged.set_word(damaged.l1(), damaged.word(damaged.l1()) ^ COPIED);
        let table = damaged.l2(0);
        let stride = if options.contains("extended") { 16 } else { 8 };
        for index in 0..4 {
            let at = table + index * stride;
            if damaged.word(at) & 0x00ff_ffff_ffff_fe00 != 0 {
                damaged.set_word(at, damaged.word(at) ^ COPIED);
            }
        }
        let other = damaged.copy();
        mends(&damaged, &intact, Repair::Leaks, &format!("leaks, {options}"));
        mends(&other, &intact, Repair::All, &format!("all, {options}"));
    }
}

#[test]
fn shared_by_mistake() {
    if skipped() {
        return;
    }
    // Two guest clusters with the same host cluster: both keep their bytes, and are copied when written.
    let image = TestImage::new(&[], "16M", &["write -P 1 0 64k", "write -P 2 64k 64k"]);
    image.set_word(image.l2(0) + 8, image.word(image.l2(0)));
    let intact = TestImage::new(&[], "16M", &["write -P 1 0 128k"]);
    let report = image.repair(Repair::All);
    assert!(report.is_clean());
    image.assert_clean("shared");
    image.assert_same_content(&intact, "shared");
    image.io(&["write -P 7 64k 64k"]);
    intact.io(&["write -P 7 64k 64k"]);
    image.assert_same_content(&intact, "written after the repair");
}

#[test]
fn space_that_cannot_be_used() {
    if skipped() {
        return;
    }
    for options in ["cluster_size=65536", "extended_l2=on"] {
        let image = TestImage::new(&["-o", options], "16M", &["write -P 1 0 200k"]);
        let intact = TestImage::new(&["-o", options], "16M", &["write -P 1 0 200k", "write -z 0 64k"]);
        image.set_word(image.l2(0), COPIED | 0x50200 | u64::from(options.starts_with("cluster")));
        if options.starts_with("ext") {
            image.set_word(image.l2(0) + 8, 0xffff_ffff << 32);
        }
        mends(&image, &intact, Repair::All, options);
    }
}

#[test]
fn snapshot_tables() {
    if skipped() {
        return;
    }
    let damages: [Damage<'_>; 2] = [
        ("incomplete", &|i| {
            // The first entry loses its extra data; what follows is shifted by its length.
            let at = i.snapshots();
            let extra = i.u32(at + 36);
            let rest = i.bytes(at + 40 + u64::from(extra), 200);
            i.set_u32(at + 36, 0);
            let names = u64::from(i.u32(at + 12) >> 16) + u64::from(i.u32(at + 12) & 0xffff);
            let entry = (40 + names).next_multiple_of(8);
            let old_entry = (40 + u64::from(extra) + names).next_multiple_of(8);
            let next = i.bytes(at + old_entry, 120);
            i.write(at + 40, &rest[..names as usize]);
            i.write(at + entry, &next);
        }),
        ("extra data", &|i| {
            let at = i.snapshots();
            let entries = i.bytes(at, 300);
            let extra = i.u32(at + 36);
            i.set_u32(at + 36, extra + 1600);
            i.write(at + 40 + u64::from(extra), &[0; 1600]);
            i.write(at + 1600 + 40 + u64::from(extra), &entries[40 + extra as usize..]);
        }),
    ];
    for (what, damage) in damages {
        let intact = filled("cluster_size=65536");
        let damaged = intact.copy();
        damage(&damaged);
        mends(&damaged, &intact, Repair::All, what);
    }
}

#[test]
fn too_many_snapshots() {
    if skipped() {
        return;
    }
    let image = filled("cluster_size=65536");
    image.set_u32(60, 65540);
    let report = image.repair(Repair::All);
    assert!(report.is_clean(), "{:?}", report.counts);
    assert_eq!(image.u32(60), 65536);
    assert_eq!(image.qemu_check(&[]).code, 0);
}

#[test]
fn dirty_images() {
    if skipped() {
        return;
    }
    let intact = filled("cluster_size=65536,lazy_refcounts=on");
    let image = intact.copy();
    image.set_word(72, image.word(72) | 1);
    let clusters = image.len() / image.cluster_size();
    for cluster in 0..clusters {
        set_refcount(&image, cluster, u64::from(cluster < 20));
    }
    let open = |access| {
        let flags = OpenFlags::default().access(access).create(Create::No).lock(LockMode::Write);
        File::open(&image.path(), &flags).unwrap()
    };
    let file = open(Access::ReadWrite);
    let report =
        on_worker(async |worker| rebuild_refcounts(worker, &file, &CheckOptions::default()).await.unwrap());
    file.unlock().unwrap();
    assert!(report.is_clean() && report.counts.corruptions_fixed > 0);
    assert_eq!(image.word(72) & 1, 0, "the dirty bit");
    image.assert_clean("dirty");
    image.assert_same_content(&intact, "dirty");

    // Nothing is left of the dirty bit of an image in order, and it stays on one that cannot be mended.
    image.set_word(72, image.word(72) | 3);
    assert!(image.repair(Repair::All).is_clean());
    assert_eq!(image.word(72) & 3, 0);
    image.set_word(72, image.word(72) | 3);
    image.set_word(image.l1(), image.word(image.l1()) | 0x200);
    let file = open(Access::ReadWrite);
    let error = on_worker(async |worker| {
        rebuild_refcounts(worker, &file, &CheckOptions::default()).await.unwrap_err()
    });
    file.unlock().unwrap();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    assert_eq!(image.word(72) & 3, 3);
}

#[test]
fn unknown_autoclear_bits_go_before_the_first_write() {
    if skipped() {
        return;
    }
    let intact = filled("cluster_size=65536");
    let image = intact.copy();
    image.set_word(88, 1 << 20);
    image.repair(Repair::All);
    assert_eq!(image.word(88), 1 << 20, "nothing was written");
    set_refcount(&image, 1, 2);
    mends(&image, &intact, Repair::All, "autoclear");
    assert_eq!(image.word(88), 0);
}

#[test]
fn counts_in_several_passes() {
    if skipped() {
        return;
    }
    // 512-byte clusters and a memory of a few chunks: many passes over 40,000 clusters.
    let intact = TestImage::new(
        &["-o", "cluster_size=512,refcount_bits=8"],
        "24M",
        &["write -P 1 0 20M", "write -z 3M 1M"],
    );
    intact.snapshot(&["-c", "one"]);
    intact.io(&["write -P 2 10M 5M"]);
    // Counts that outgrow the budget: clusters with more than 63 references take wide chunks.
    for _ in 0..3 {
        intact.snapshot(&["-c", "more"]);
    }
    let options = CheckOptions::default().memory(0);
    let whole = intact.check();
    assert!(whole.is_clean());
    assert_eq!(intact.check_with(&options), whole);
    let mut random = Random(3);
    for damage in 0..4 {
        let damaged = intact.copy();
        let clusters = damaged.len() / damaged.cluster_size();
        for _ in 0..50 {
            set_refcount(
                &damaged,
                random.below(clusters),
                if damage < 2 { 1 + random.below(9) } else { random.below(9) },
            );
        }
        let flag = damaged.l2(3) + 64;
        damaged.set_word(flag, damaged.word(flag) ^ COPIED);
        assert_eq!(damaged.check_with(&options).counts, damaged.check().counts);
        let options = options.clone().repair(Repair::All);
        mends_with(&damaged, &intact, &options, &format!("damage {damage}"));
    }
}

#[test]
fn o_direct() {
    if skipped() {
        return;
    }
    let intact = filled("cluster_size=65536");
    let damaged = intact.copy();
    damaged.set_word(damaged.reftable(), 0);
    let cache = CacheMode::None;
    let options = CheckOptions::default().repair(Repair::All).cache(cache);
    mends_with(&damaged, &intact, &options, "rebuild with O_DIRECT");
    let damaged = intact.copy();
    set_refcount(&damaged, 5, 9);
    damaged.set_word(damaged.l1(), damaged.word(damaged.l1()) ^ COPIED);
    mends_with(&damaged, &intact, &options, "in place with O_DIRECT");
}

#[test]
fn a_repair_needs_write_access_and_can_be_cancelled() {
    if skipped() {
        return;
    }
    let image = filled("cluster_size=65536");
    let file = File::open(&image.path(), &OpenFlags::default()).unwrap();
    let repair = CheckOptions::default().repair(Repair::All);
    let error = on_worker(async |worker| check_file(worker, &file, &repair).await.unwrap_err());
    assert_eq!(error.kind(), ErrorKind::ReadOnly);
    file.unlock().unwrap();

    let options = CheckOptions::default();
    options.control.cancel.cancel();
    let error = on_worker(async |worker| {
        zebu_engine::check::check(worker, &image.path(), &options).await.unwrap_err()
    });
    assert_eq!(error.kind(), ErrorKind::Cancelled);
}

#[test]
fn progress_goes_up_to_the_end() {
    if skipped() {
        return;
    }
    let image = filled("cluster_size=512");
    let seen = Arc::new(Mutex::new(Vec::new()));
    let sink = seen.clone();
    let progress = move |progress: Progress| sink.lock().unwrap().push(progress);
    let control = JobControl::default().progress(progress);
    image.check_with(&CheckOptions::default().control(control));
    let seen = seen.lock().unwrap();
    for pair in seen.windows(2) {
        assert!(pair[0].phase != pair[1].phase || pair[0].done < pair[1].done);
    }
    assert!(seen.len() > 10 && seen.last().is_some_and(|last| last.done == last.total));
}

/// The clusters behind a header pointer that is too short look like leaks. They hold key slots, and stay.
#[test]
fn key_slots_behind_a_short_pointer_are_not_freed() {
    if skipped() {
        return;
    }
    let options = "cluster_size=4096,encrypt.format=luks,encrypt.key-secret=s0,encrypt.iter-time=10";
    let image = TestImage::new(&["--object", LUKS_SECRET, "-o", options], "1M", &[]);
    assert!(image.check().is_clean());
    let first = image.bytes(0, 4096);
    let extension = first.windows(4).position(|bytes| bytes == [0x05, 0x37, 0xbe, 0x77]).unwrap() as u64;
    let intact = image.bytes(0, image.len() as usize);
    image.set_word(extension + 16, 8192);
    let damaged = image.bytes(0, image.len() as usize);
    for repair in [Repair::Leaks, Repair::All] {
        let report = image.repair(repair);
        let list: Vec<String> = report.findings.iter().map(ToString::to_string).collect();
        assert!(list.iter().any(|line| line.contains("LUKS header at offset")), "{repair:?}: {list:?}");
        assert!(!report.is_clean() && report.counts.leaks_fixed == 0, "{repair:?}: {list:?}");
        let now = image.bytes(0, image.len() as usize);
        assert!(now == damaged, "{repair:?} changed the image");
    }
    image.write(0, &intact);
    assert!(image.check().is_clean());
}
