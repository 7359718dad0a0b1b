//! A write of a table that fails while a snapshot is taken or deleted: the others have ended before guests go on.

use crate::crash::guest::Failures;
use crate::crash::judge::read_all;
use crate::crash::setup::{Origin, Setup, TOP};
use crate::faults::bench::{Bench, begin};
use rustix::io::Errno;
use zebu_engine::{Durability, NewSnapshot, SnapshotRef};
use zebu_sim::{Content, FailedEffect, Fault, FaultPlan, FaultRule, GuestRequest, OpClass, OpFilter};

const CLUSTER: u64 = 512;
/// Bytes that a table maps.
const TABLE: u64 = 32 << 10;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Operation {
    Take,
    Delete,
}

fn word(file: &Content, offset: u64) -> u64 {
    u64::from_be_bytes(file.bytes(offset..offset + 8).try_into().unwrap())
}

/// Where the first and the last of the four tables lie.
fn tables(bench: &Bench) -> [std::ops::Range<u64>; 2] {
    let file = bench.world.content(TOP).unwrap();
    let l1 = word(&file, 40);
    [0, 3].map(|index| {
        let host = word(&file, l1 + index * 8) & 0x00ff_ffff_ffff_fe00;
        host..host + CLUSTER
    })
}

/// The write of the first table fails, that of the last one is slow. A guest links clusters in the last one meanwhile, and
/// flushes.
fn a_slow_table(operation: Operation) {
    let setup = Setup {
        origin: Origin::Own,
        cluster_size: CLUSTER,
        size: 4 * TABLE,
        pattern: 112 << 10,
        workers: 2,
        ..Setup::plain()
    };
    let bench = Bench::new(&setup, 1);
    bench.guest.failures.set(Failures::OfTheDisk);
    let (image, guests, theirs) = (bench.guest.image.clone(), &bench.workers[0], bench.workers[1].clone());
    if operation == Operation::Delete {
        bench.world.block_on(image.create_snapshot(&theirs, NewSnapshot::named("one"))).unwrap().unwrap();
    }
    let [first, last] = tables(&bench);
    let to_last = OpFilter::of(OpClass::Write).on_file(TOP).touching(last);
    let hold = bench.world.hold(to_last.clone());
    let failure = Fault::Fail { errno: Errno::IO.raw_os_error(), effect: FailedEffect::Nothing };
    let rule = FaultRule::new(OpFilter::of(OpClass::Write).on_file(TOP).touching(first), failure).nth(0);
    bench.world.set_faults(FaultPlan::none().with(rule));
    let done = begin(&bench.workers[1], async move {
        match operation {
            Operation::Take => image.create_snapshot(&theirs, NewSnapshot::named("two")).await.map(drop),
            Operation::Delete => image.delete_snapshot(&theirs, &SnapshotRef::Name("one".to_owned())).await,
        }
    });
    bench.world.run_until(|| !bench.world.held(hold).is_empty() || done.borrow().is_some()).unwrap();
    let held = bench.world.held(hold);
    assert!(!held.is_empty(), "the table is not written: {:?}", done.borrow());
    // Only the write that is under way is slow.
    let slow = bench.world.hold(to_last.by_worker(held[0].worker));
    bench.world.release(hold);
    // If the operation waits for it, its end is the next that happens.
    if bench.world.run_until(|| done.borrow().is_some()).is_err() {
        bench.world.release(slow);
    }
    assert!(bench.end(&done, "the operation").is_err(), "a write of it failed");
    bench.world.set_faults(FaultPlan::none());
    for cluster in 0..8 {
        let at = setup.pattern + cluster * 2 * CLUSTER;
        bench.world.block_on(bench.guest.write(guests, at, CLUSTER, Durability::Volatile)).unwrap();
    }
    assert!(bench.world.block_on(bench.guest.try_flush(guests)).unwrap(), "the flush fails");
    bench.world.release(slow);
    bench.world.run_until_idle().unwrap();
    bench.world.block_on(bench.guest.image.close(guests)).unwrap().unwrap();
    bench.guest.model.borrow_mut().apply(GuestRequest::Flush);
    let files = bench.files();
    let world = setup.world(&files, 0);
    let worker = world.worker();
    let image = setup.open(&world, &worker).unwrap();
    let bytes = world.block_on(read_all(&worker, &image, setup.size)).unwrap().unwrap();
    let judged = bench.guest.model.borrow().check(0, &bytes);
    assert!(judged.is_ok(), "{operation:?}: {}", judged.unwrap_err());
}

#[test]
pub(crate) fn a_table_of_a_snapshot_that_failed_never_lands_on_a_later_one() {
    a_slow_table(Operation::Take);
}

#[test]
pub(crate) fn a_table_of_a_deletion_that_failed_never_lands_on_a_later_one() {
    a_slow_table(Operation::Delete);
}
