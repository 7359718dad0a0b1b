//! A write that fails while a snapshot is taken.

use crate::crash::judge::read_all;
use crate::crash::setup::{Origin, Setup, TOP};
use crate::faults::bench::Bench;
use rustix::io::Errno;
use zebu_engine::{Durability, NewSnapshot, Remedy, SnapshotRef};
use zebu_sim::{FailedEffect, Fault, FaultPlan, FaultRule, OpClass, OpFilter};

const SIZE: u64 = 64 << 10;

/// Any one write fails. A snapshot that the header names keeps what it shows, whatever is written afterwards.
#[test]
pub(crate) fn a_named_snapshot_keeps_its_references() {
    let mut failed_late = 0;
    for nth in 0..40 {
        let setup = Setup { origin: Origin::Own, size: SIZE, pattern: SIZE, ..Setup::plain() };
        let bench = Bench::new(&setup, nth);
        let (image, worker) = (&bench.guest.image, &bench.workers[0]);
        let take =
            |name| bench.world.block_on(image.create_snapshot(worker, NewSnapshot::named(name))).unwrap();
        let read = || bench.world.block_on(read_all(worker, image, SIZE)).unwrap().unwrap();
        let overwrite = || {
            let write = bench.guest.write(worker, 0, SIZE, Durability::Durable);
            bench.world.block_on(write).unwrap();
        };
        take("one").unwrap();
        overwrite();
        let shown = read();

        let failure = Fault::Fail { errno: Errno::IO.raw_os_error(), effect: FailedEffect::Nothing };
        let rule = FaultRule::new(OpFilter::of(OpClass::Write).on_file(TOP), failure).nth(nth);
        bench.world.set_faults(FaultPlan::none().with(rule));
        let taken = take("two");
        bench.world.set_faults(FaultPlan::none());
        let is_named = image.snapshots().iter().any(|snapshot| snapshot.name == "two");
        assert!(taken.is_err() || is_named);
        if !is_named || bench.world.block_on(image.flush(worker)).unwrap().is_err() {
            continue;
        }
        failed_late += u64::from(taken.is_err());
        // What lost its references would be freed, and written over.
        (0..4).for_each(|_| overwrite());
        let two = SnapshotRef::Name("two".to_owned());
        bench.world.block_on(image.apply_snapshot(worker, &two)).unwrap().unwrap();
        assert!(read() == shown, "the snapshot shows something else, write {nth} failed: {taken:?}");
        bench.world.block_on(image.close(worker)).unwrap().unwrap();
    }
    assert!(failed_late > 0, "no write failed after the header named the snapshot: the test shows nothing");
}

/// Any one write or sync fails. The error says whether the snapshot is deleted, and is no reason to delete it again if it is.
#[test]
pub(crate) fn a_deletion_that_fails_late_says_that_the_snapshot_is_deleted() {
    let mut late = 0;
    for (class, nth) in
        [OpClass::Write, OpClass::Flush].into_iter().flat_map(|c| (0..30).map(move |n| (c, n)))
    {
        let setup = Setup { origin: Origin::Own, size: SIZE, pattern: SIZE, ..Setup::plain() };
        let bench = Bench::new(&setup, nth);
        let (image, worker) = (&bench.guest.image, &bench.workers[0]);
        let new = NewSnapshot::named("one");
        bench.world.block_on(image.create_snapshot(worker, new)).unwrap().unwrap();
        bench.world.block_on(bench.guest.write(worker, 0, SIZE, Durability::Durable)).unwrap();
        let failure = Fault::Fail { errno: Errno::NOSPC.raw_os_error(), effect: FailedEffect::Nothing };
        let rule = FaultRule::new(OpFilter::of(class).on_file(TOP), failure).nth(nth);
        bench.world.set_faults(FaultPlan::none().with(rule));
        let one = SnapshotRef::Name("one".to_owned());
        let Err(error) = bench.world.block_on(image.delete_snapshot(worker, &one)).unwrap() else { continue };
        let is_deleted = image.snapshots().is_empty();
        let what = format!("{class:?} {nth}: {error}");
        assert_eq!(error.message().contains("the snapshot is deleted, but"), is_deleted, "{what}");
        assert_eq!(error.remedy() == Some(&Remedy::RepairLeaks), is_deleted, "{what}");
        assert!(!(is_deleted && error.is_retryable()), "{what}");
        late += u64::from(is_deleted);
    }
    assert!(late > 2, "{late} failures after the deletion: the test shows nothing");
}

/// A read loads a slice of the mapping before a snapshot makes its clusters shared, and ends after that. The next write must
/// not take the clusters for its own.
#[test]
pub(crate) fn what_was_read_of_a_table_before_a_snapshot_is_dropped() {
    let mut beside = 0;
    for (before, meanwhile) in (0..100).flat_map(|before| [(before, 3), (before, 6), (before, 9)]) {
        let setup = Setup { origin: Origin::Own, size: SIZE, pattern: SIZE, workers: 2, ..Setup::plain() };
        let bench = Bench::new(&setup, 1);
        let (image, worker) = (&bench.guest.image, &bench.workers[1]);
        let read = || bench.world.block_on(read_all(worker, image, SIZE)).unwrap().unwrap();
        let (taken, on) = (image.clone(), worker.clone());
        let snapshot =
            worker.spawn(async move { taken.create_snapshot(&on, NewSnapshot::named("one")).await });
        for _ in 0..before {
            bench.world.step();
        }
        let (guest, on) = (bench.guest.clone(), bench.workers[0].clone());
        let slow = bench.workers[0].spawn(async move { guest.read(&on, 0, 4096).await });
        for _ in 0..meanwhile {
            bench.world.step();
        }
        bench.world.pause(0);
        let taken = bench.world.block_on(snapshot).unwrap();
        bench.world.resume(0);
        bench.world.block_on(slow).unwrap();
        if taken.is_err() {
            continue;
        }
        beside += 1;
        let shown = read();
        bench.world.block_on(bench.guest.write(worker, 0, 4096, Durability::Volatile)).unwrap();
        let one = SnapshotRef::Name("one".to_owned());
        bench.world.block_on(image.apply_snapshot(worker, &one)).unwrap().unwrap();
        assert!(read() == shown, "the snapshot was written to, {before} and {meanwhile} steps");
    }
    assert!(beside > 100, "{beside} snapshots beside the read");
}
