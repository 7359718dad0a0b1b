//! Repairs that are cut off: after a crash at any moment, in any state that a disk may then be in, the image shows
//! the same disk, is no more damaged than before, and can be repaired. The same after any failed operation.

use crate::support::{TestImage, skipped};
use zebu_engine::check::{CheckOptions, CheckReport, FindingKind, Repair, check_file};
use zebu_engine::storage::FileKind;
use zebu_sim::{
    Content, CrashOptions, FailedEffect, Fault, FaultRule, LogCursor, OpClass, OpFilter, SimFileConfig,
    SimWorld,
};

const COPIED: u64 = 1 << 63;
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
const NAME: &str = "image";

fn word(bytes: &[u8], at: u64) -> u64 {
    let mut out = [0; 8];
    for (to, from) in out.iter_mut().zip(bytes.iter().skip(at as usize)) {
        *to = *from;
    }
    u64::from_be_bytes(out)
}

/// The disk of a guest with this L1 table: an image without backing file, compression and subclusters.
fn disk(image: &[u8], l1: u64) -> Vec<u8> {
    let cluster = 1u64 << (word(image, 20) >> 32);
    let (size, per_table) = (word(image, 24), cluster / 8);
    let mut disk = vec![0; size as usize];
    for (n, to) in disk.chunks_mut(cluster as usize).enumerate() {
        let n = n as u64;
        let table = word(image, l1 + n / per_table * 8) & OFFSET;
        if table == 0 {
            continue;
        }
        let entry = word(image, table + n % per_table * 8);
        let from = (entry & OFFSET) as usize;
        if entry & 1 == 0 && from != 0 && from < image.len() {
            let len = to.len().min(image.len() - from);
            to[..len].copy_from_slice(&image[from..from + len]);
        }
    }
    disk
}

/// The disk, and that of the first snapshot.
fn disks(content: &Content) -> (Vec<u8>, Vec<u8>) {
    let image = content.bytes(0..content.len());
    let snapshot_l1 = word(&image, word(&image, 64));
    (disk(&image, word(&image, 40)), disk(&image, snapshot_l1))
}

fn config(kind: FileKind) -> SimFileConfig {
    SimFileConfig { kind, ..SimFileConfig::default() }
}

/// Runs a check of `content` in a world of its own.
fn run(content: &Content, kind: FileKind, repair: Repair) -> (CheckReport, Content) {
    let world = SimWorld::new(1);
    let file = world.disk().file(NAME, content.clone(), config(kind));
    let worker = world.worker();
    let options = CheckOptions::default().repair(repair);
    let report = world.block_on(check_file(&worker, &file, &options)).unwrap().unwrap();
    (report, world.disk().content(NAME).unwrap())
}

/// An image with a snapshot, small enough to look at all of it in each of thousands of states.
fn small(options: &str) -> TestImage {
    let image = TestImage::new(
        &["-o", options],
        "256k",
        &["write -P 1 0 100k", "write -P 2 150k 20k", "write -z 10k 9k"],
    );
    image.snapshot(&["-c", "one"]);
    image.io(&["write -P 3 20k 50k", "write -P 4 200k 8k"]);
    image
}

type Damage<'a> = (&'a str, &'a dyn Fn(&TestImage));

/// Damages that a repair mends without loss.
const DAMAGES: [Damage<'_>; 6] = [
    ("wrong refcounts", &|i| {
        let block = i.refblock(0);
        for n in 0..(i.len() / i.cluster_size()).min(i.cluster_size() / 2) {
            i.write(block + n * 2, &(1 + n as u16 * 7 % 4).to_be_bytes());
        }
    }),
    ("no refcount block", &|i| i.set_word(i.reftable(), 0)),
    ("refcounts of zero", &|i| i.write(i.refblock(0), &[0; 512])),
    ("flags", &|i| {
        i.set_word(i.l1(), i.word(i.l1()) ^ COPIED);
        for n in 0..20 {
            let at = i.l2(0) + n * 8;
            if i.word(at) & OFFSET != 0 {
                i.set_word(at, i.word(at) ^ COPIED);
            }
        }
    }),
    ("space that cannot be used", &|i| {
        // A zero cluster that keeps an unaligned place, with refcounts that count this use; and a leak.
        let at = (0..60).map(|n| i.l2(0) + n * 8).find(|at| i.word(*at) & 1 != 0).unwrap();
        let place = i.l2(0) + 512;
        i.set_word(at, (place & OFFSET) | 1);
        for cluster in [place / i.cluster_size(), place.div_ceil(i.cluster_size())] {
            let refcount = i.bytes(i.refblock(0) + cluster * 2 + 1, 1)[0];
            i.write(i.refblock(0) + cluster * 2 + 1, &[refcount + 1]);
        }
        i.write(i.refblock(0) + 6, &9u16.to_be_bytes());
    }),
    ("snapshot table and refcounts", &|i| {
        i.set_u32(60, 2);
        i.write(i.refblock(0) + 6, &9u16.to_be_bytes());
    }),
];

fn damaged(options: &str, damage: &Damage<'_>) -> (TestImage, TestImage) {
    let intact = small(options);
    let image = intact.copy();
    damage.1(&image);
    (intact, image)
}

fn content(image: &TestImage) -> Content {
    Content::from_bytes(&std::fs::read(image.path()).unwrap())
}

/// That `state`, met in the course of a repair, is no worse than `before`, and can be repaired.
fn no_worse(state: &Content, kind: FileKind, before: &CheckReport, shown: &(Vec<u8>, Vec<u8>), what: &str) {
    assert!(disks(state) == *shown, "{what}: the disk changed");
    let (report, _) = run(state, kind, Repair::None);
    for finding in &report.findings {
        let is_old = before.findings.iter().any(|old| match (&finding.kind, &old.kind) {
            (
                FindingKind::RefcountTooLow { cluster, refcount, references },
                FindingKind::RefcountTooLow { cluster: c, refcount: r, references: n },
            ) => cluster == c && refcount >= r && references == n,
            (kind, old) => kind == old,
        });
        // Flags are corrected last. Until then they contradict refcounts that are right already.
        let comes_last = matches!(
            finding.kind,
            FindingKind::CopiedFlagL1 { .. } | FindingKind::CopiedFlagL2 { .. } | FindingKind::Leak { .. }
        );
        assert!(is_old || comes_last, "{what}: {finding}, before: {:?}", before.findings);
    }
    let (repaired, after) = run(state, kind, Repair::All);
    assert!(repaired.is_clean(), "{what}: {:?}", repaired.findings);
    assert!(disks(&after) == *shown, "{what}: the second repair changed the disk");
}

/// With 512-byte clusters a table is more than one, and what a crash tears are single clusters.
const SIZES: [&str; 2] = ["cluster_size=512", "cluster_size=4096"];

#[test]
fn crashes_in_a_repair() {
    if skipped() {
        return;
    }
    let long = std::env::var_os("ZEBU_LONG_TESTS").is_some();
    let mut states = 0;
    for options in SIZES {
        for damage in &DAMAGES {
            let (intact, image) = damaged(options, damage);
            let start = content(&image);
            let (before, _) = run(&start, FileKind::Simulated, Repair::None);
            assert!(!before.is_clean(), "{}", damage.0);
            let shown = disks(&content(&intact));

            let world = SimWorld::new(states);
            let file = world.disk().file(NAME, start, config(FileKind::Simulated));
            let worker = world.worker();
            let repair = CheckOptions::default().repair(Repair::All);
            let report = world.block_on(check_file(&worker, &file, &repair)).unwrap().unwrap();
            assert!(report.is_clean(), "{}: {:?}", damage.0, report.findings);

            let log = world.disk().log();
            let mut cursor = LogCursor::new(&log);
            let end = log.events().len();
            let step = if long { 1 } else { (end / 60).max(1) };
            for position in (1..=end).step_by(step) {
                cursor.advance_to(position);
                let crash = CrashOptions { max_states: 6, seed: position as u64, ..CrashOptions::default() };
                for state in cursor.crash_states(&crash) {
                    let what = format!("{options}, {}, before event {position} of {end}", damage.0);
                    no_worse(state.file(NAME).unwrap(), FileKind::Simulated, &before, &shown, &what);
                    states += 1;
                }
            }
        }
    }
    assert!(states > 1000, "{states}");
}

#[test]
fn failed_operations_in_a_repair() {
    if skipped() {
        return;
    }
    for options in SIZES {
        for damage in &DAMAGES {
            let (intact, image) = damaged(options, damage);
            let (before, _) = run(&content(&image), FileKind::Simulated, Repair::None);
            let shown = disks(&content(&intact));
            for (class, errno) in [(OpClass::Write, libc_enospc()), (OpClass::Flush, 5), (OpClass::SetLen, 5)]
            {
                for n in 0..12 {
                    let world = SimWorld::new(n);
                    let file = world.disk().file(NAME, content(&image), config(FileKind::Simulated));
                    let fault = Fault::Fail { errno, effect: FailedEffect::Part };
                    world.disk().inject(FaultRule::new(OpFilter::of(class), fault).nth(n));
                    let worker = world.worker();
                    let repair = CheckOptions::default().repair(Repair::All);
                    let result = world.block_on(check_file(&worker, &file, &repair)).unwrap();
                    let what = format!("{options}, {}, {class:?} {n} failed", damage.0);
                    let state = world.disk().content(NAME).unwrap();
                    no_worse(&state, FileKind::Simulated, &before, &shown, &what);
                    if let Ok(report) = result {
                        assert!(report.is_clean(), "{what}");
                        break;
                    }
                }
            }
        }
    }
}

/// ENOSPC, as Linux numbers it.
fn libc_enospc() -> i32 {
    28
}

/// A read that fails leaves the references unknown: nothing is repaired, and the report says so.
#[test]
fn failed_reads() {
    if skipped() {
        return;
    }
    for options in SIZES {
        for damage in &DAMAGES {
            let (intact, image) = damaged(options, damage);
            let shown = disks(&content(&intact));
            for n in 0..40 {
                let world = SimWorld::new(n);
                let file = world.disk().file(NAME, content(&image), config(FileKind::Simulated));
                let fault = Fault::Fail { errno: 5, effect: FailedEffect::Nothing };
                world.disk().inject(FaultRule::new(OpFilter::of(OpClass::Read), fault).nth(n));
                let worker = world.worker();
                let repair = CheckOptions::default().repair(Repair::All);
                let result = world.block_on(check_file(&worker, &file, &repair)).unwrap();
                let what = format!("{options}, {}, read {n} failed: {result:?}", damage.0);
                let state = world.disk().content(NAME).unwrap();
                assert!(disks(&state) == shown, "{what}");
                let (repaired, after) = run(&state, FileKind::Simulated, Repair::All);
                assert!(repaired.is_clean(), "{what}: {:?}", repaired.findings);
                assert!(disks(&after) == shown, "{what}");
            }
        }
    }
}

/// A device cannot grow: new structures go behind what is in use, if there is room.
#[test]
fn block_devices() {
    if skipped() {
        return;
    }
    for damage in &DAMAGES[..5] {
        let (intact, image) = damaged("cluster_size=4096", damage);
        let shown = disks(&content(&intact));
        let mut device = content(&image);
        device.set_len(4 << 20);
        let (report, after) = run(&device, FileKind::BlockDevice, Repair::All);
        assert!(report.is_clean(), "{}: {:?}", damage.0, report.findings);
        assert_eq!(after.len(), 4 << 20);
        assert!(disks(&after) == shown, "{}", damage.0);
    }
    let (_, image) = damaged("cluster_size=4096", &DAMAGES[1]);
    let full = content(&image);
    let world = SimWorld::new(0);
    let file = world.disk().file(NAME, full.clone(), config(FileKind::BlockDevice));
    let worker = world.worker();
    let repair = CheckOptions::default().repair(Repair::All);
    let error = world.block_on(check_file(&worker, &file, &repair)).unwrap().unwrap_err();
    assert_eq!(error.kind(), zebu_engine::ErrorKind::NoSpace, "{error}");
    assert!(world.disk().content(NAME).unwrap().same_bytes(&full), "nothing was written");
}
