//! An operation that takes for ever holds up only who needs it, and a request that nobody waits for any more hangs
//! nobody.

use crate::crash::guest::Guest;
use crate::crash::setup::{DATA, Origin, Setup, TOP};
use crate::faults::bench::Bench;
use std::cell::Cell;
use std::rc::Rc;
use zebu_engine::storage::{IoBuf, Worker};
use zebu_engine::{Durability, ZeroMode};
use zebu_sim::{HoldId, OpClass, OpFilter, Step};

const CLUSTER: u64 = 4096;

fn patterned() -> Setup {
    Setup { origin: Origin::Own, pattern: 128 << 10, ..Setup::plain() }
}

/// Starts something; the flag says when it is over.
fn start<F: Future<Output = ()> + 'static>(
    bench: &Bench,
    worker: usize,
    work: impl FnOnce(Rc<Guest>, Worker) -> F,
) -> Rc<Cell<bool>> {
    let over = Rc::new(Cell::new(false));
    let (worker, flag) = (bench.workers[worker].clone(), over.clone());
    let work = work(bench.guest.clone(), worker.clone());
    drop(worker.spawn(async move {
        work.await;
        flag.set(true);
    }));
    over
}

fn write(bench: &Bench, worker: usize, offset: u64, len: u64) -> Rc<Cell<bool>> {
    start(bench, worker, move |guest, worker| async move {
        guest.write(&worker, offset, len, Durability::Volatile).await;
    })
}

fn settle(bench: &Bench) {
    bench.world.run_until_idle().unwrap();
    assert_eq!(bench.guest.violation.borrow().as_deref(), None);
}

/// Runs until nothing happens but the end of somebody's patience.
fn until_time_passes(bench: &Bench) {
    while !matches!(bench.world.step(), Step::Time | Step::Idle) {}
}

fn let_go(bench: &Bench, hold: HoldId) {
    assert!(!bench.world.held(hold).is_empty(), "nothing was held: the test shows nothing");
    bench.world.release(hold);
    settle(bench);
}

#[test]
pub(crate) fn a_write_that_allocates_holds_up_only_what_overlaps() {
    let bench = Bench::new(&Setup::plain(), 1);
    let hold = bench.world.hold(OpFilter::of(OpClass::Write).on_file(TOP));
    let first = write(&bench, 0, 0, CLUSTER);
    settle(&bench);
    let held = bench.world.held(hold);
    assert_eq!(held.len(), 1, "the data of the first write");
    // From here on, only that one is held.
    let only = bench.world.hold(OpFilter::of(OpClass::Write).on_file(TOP).touching(held[0].range.clone()));
    bench.world.release(hold);
    let overlapping = [write(&bench, 1, 512, 1024), write(&bench, 0, 2048, 2 * CLUSTER)];
    let zeroing = start(&bench, 1, |guest, worker| async move {
        guest.zero(&worker, 0, CLUSTER, ZeroMode::Unmap).await;
    });
    let others = [
        write(&bench, 1, 8 * CLUSTER, CLUSTER),
        start(&bench, 1, |guest, worker| async move { guest.flush(&worker).await }),
        start(&bench, 0, |guest, worker| async move { guest.read(&worker, 0, 4 * CLUSTER).await }),
    ];
    settle(&bench);
    assert!(!first.get() && overlapping.iter().all(|over| !over.get()) && !zeroing.get());
    assert!(others.iter().all(|over| over.get()), "requests that don't overlap go on");
    bench.crash_states(1, 100).unwrap();
    let_go(&bench, only);
    assert!(first.get() && overlapping.iter().all(|over| over.get()) && zeroing.get());
    bench.read_whole().unwrap();
    bench.close().unwrap();
}

#[test]
pub(crate) fn a_punch_holds_up_only_the_reuse_of_its_space() {
    let bench = Bench::new(&patterned(), 2);
    let hold = bench.world.hold(OpFilter::of(OpClass::Punch).on_file(TOP));
    bench.world.block_on(bench.guest.discard(&bench.workers[0], 0, 4 * CLUSTER)).unwrap();
    bench.flush().unwrap();
    settle(&bench);
    let punched = bench.world.held(hold)[0].range.clone();
    let writes: Vec<_> = (0..24).map(|i| write(&bench, i % 2, (40 + i as u64) * CLUSTER, CLUSTER)).collect();
    let again = write(&bench, 1, 0, 4 * CLUSTER);
    settle(&bench);
    assert!(writes.iter().all(|over| over.get()) && again.get());
    bench.flush().unwrap();
    let content = bench.world.content(TOP).unwrap().bytes(punched);
    assert!(
        content.iter().any(|byte| *byte != 0),
        "the discarded bytes are still there: nobody wrote over them"
    );
    bench.crash_states(2, 50).unwrap();
    let_go(&bench, hold);
    bench.read_whole().unwrap();
    bench.close().unwrap();
}

/// Slices of 512 bytes map 64 clusters each.
fn sliced() -> Setup {
    Setup { size: 1 << 20, pattern: 1 << 20, slice_size: Some(512), ..patterned() }
}

#[test]
pub(crate) fn a_slice_that_loads_holds_up_only_who_needs_it() {
    let bench = Bench::new(&sliced(), 3);
    let hold = bench.world.hold(OpFilter::of(OpClass::Read).on_file(TOP));
    let first = start(&bench, 0, |guest, worker| async move { guest.read(&worker, 0, 512).await });
    settle(&bench);
    let slice = bench.world.held(hold)[0].range.clone();
    assert_eq!(slice.end - slice.start, 512);
    let only = bench.world.hold(OpFilter::of(OpClass::Read).on_file(TOP).touching(slice));
    bench.world.release(hold);
    let same = [
        start(&bench, 1, |guest, worker| async move { guest.read(&worker, CLUSTER, 512).await }),
        write(&bench, 1, 2 * CLUSTER, CLUSTER),
    ];
    let others = [
        start(&bench, 1, |guest, worker| async move { guest.read(&worker, 70 * CLUSTER, 512).await }),
        write(&bench, 0, 140 * CLUSTER, CLUSTER),
        start(&bench, 0, |guest, worker| async move { guest.flush(&worker).await }),
    ];
    // As long as nobody has to wait for the clock.
    until_time_passes(&bench);
    assert!(!first.get() && same.iter().all(|over| !over.get()));
    assert!(others.iter().all(|over| over.get()), "other slices load and hit meanwhile");
    assert_eq!(bench.world.held(only).len(), 1, "one load for all who wait");
    settle(&bench);
    assert!(!first.get() && same.iter().all(|over| !over.get()));
    assert_eq!(bench.world.held(only).len(), 3, "whoever has waited for long loads for itself");
    let_go(&bench, only);
    assert!(first.get() && same.iter().all(|over| over.get()));
    bench.read_whole().unwrap();
    bench.close().unwrap();
}

#[test]
pub(crate) fn a_slice_that_fails_to_load_fails_one_and_the_next_loads_it() {
    let bench = Bench::new(&sliced(), 4);
    bench.guest.failures.set(crate::crash::guest::Failures::OfTheDisk);
    bench.world.inject(
        zebu_sim::FaultRule::new(
            OpFilter::of(OpClass::Read).on_file(TOP),
            zebu_sim::Fault::Fail {
                errno: rustix::io::Errno::IO.raw_os_error(),
                effect: zebu_sim::FailedEffect::Nothing,
            },
        )
        .nth(0),
    );
    let both = [0, 1].map(|i| {
        start(&bench, i, move |guest, worker| async move {
            guest.read(&worker, i as u64 * CLUSTER, 512).await;
        })
    });
    settle(&bench);
    assert!(both.iter().all(|over| over.get()));
    assert_eq!(bench.guest.failed.borrow().len(), 1);
    bench.read_whole().unwrap();
    bench.close().unwrap();
}

/// The future of a request is dropped while its data, or the load of its slice, is under way: the request ends all
/// the same, and who waits for it goes on.
#[test]
pub(crate) fn a_future_that_is_dropped_hangs_nobody() {
    for class in [OpClass::Write, OpClass::Read] {
        let bench = Bench::new(&sliced(), 5);
        let hold = bench.world.hold(OpFilter::of(class).on_file(TOP));
        {
            let bytes = IoBuf::copy_of(&vec![7; 512]).into();
            let mut dropped =
                Box::pin(bench.guest.image.write(&bench.workers[0], 512, bytes, Durability::Volatile));
            let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
            assert!(dropped.as_mut().poll(&mut cx).is_pending());
            settle(&bench);
        }
        let waiting = write(&bench, 1, 0, CLUSTER);
        settle(&bench);
        let_go(&bench, hold);
        assert!(waiting.get(), "{class:?}");
        bench.flush().unwrap();
        bench.read_whole().unwrap();
        bench.close().unwrap();
    }
}

/// A worker that is not polled any more owns the load that others wait for: after a while they load for themselves.
/// Requests that need nothing of it do not wait.
#[test]
pub(crate) fn a_worker_that_stands_still_holds_up_only_who_needs_it() {
    let bench = Bench::new(&sliced(), 6);
    let hold = bench.world.hold(OpFilter::of(OpClass::Read).on_file(TOP));
    let first = start(&bench, 0, |guest, worker| async move { guest.read(&worker, 0, 512).await });
    settle(&bench);
    bench.world.pause(0);
    bench.world.release(hold);
    let needs_it = start(&bench, 1, |guest, worker| async move { guest.read(&worker, CLUSTER, 512).await });
    let others = [
        write(&bench, 1, 140 * CLUSTER, CLUSTER),
        start(&bench, 1, |guest, worker| async move { guest.flush(&worker).await }),
        start(&bench, 1, |guest, worker| async move { guest.read(&worker, 70 * CLUSTER, 512).await }),
    ];
    until_time_passes(&bench);
    assert!(others.iter().all(|over| over.get()) && !first.get() && !needs_it.get());
    settle(&bench);
    assert!(!first.get() && needs_it.get());
    bench.world.resume(0);
    settle(&bench);
    assert!(first.get() && needs_it.get());
    bench.close().unwrap();
}

/// A commit's write fails while others of it are still under way: they must not land on what a later commit writes.
#[test]
pub(crate) fn a_write_of_a_failed_commit_never_lands_on_a_later_one() {
    use zebu_sim::{FailedEffect, Fault, FaultRule};
    // Two L2 tables of 512-byte clusters, so that the links of a commit are two writes.
    let setup = Setup {
        cluster_size: 512,
        origin: Origin::Own,
        size: 128 << 10,
        pattern: 128 << 10,
        ..Setup::plain()
    };
    let bench = Bench::new(&setup, 7);
    let mode = ZeroMode::Unmap;
    let zero = |offset: u64| {
        bench.world.block_on(bench.guest.zero(&bench.workers[0], offset, 512, mode)).unwrap();
    };
    zero(0);
    zero(96 << 10);
    bench.guest.failures.set(crate::crash::guest::Failures::OfTheDisk);
    let hold = bench.world.hold(OpFilter::of(OpClass::Write).on_file(TOP));
    let fault = Fault::Fail { errno: rustix::io::Errno::IO.raw_os_error(), effect: FailedEffect::Nothing };
    bench.world.inject(FaultRule::new(OpFilter::of(OpClass::Write).on_file(TOP), fault).nth(1));
    let flushed = start(&bench, 0, |guest, worker| async move { guest.flush(&worker).await });
    settle(&bench);
    let held = bench.world.held(hold);
    assert_eq!(held.len(), 2, "{held:?}");
    let (slow, failing) = (held[0].range.clone(), held[1].range.clone());
    assert_ne!(slow, failing);
    let slow_only = bench.world.hold(OpFilter::of(OpClass::Write).on_file(TOP).touching(slow));
    bench.world.release(hold);
    settle(&bench);
    // The first write of the commit is still under way. What it would do must not come after the next commit's.
    zero(512);
    let again = start(&bench, 1, |guest, worker| async move { guest.flush(&worker).await });
    settle(&bench);
    let early = (flushed.get(), again.get());
    let held = bench.world.held(slow_only);
    assert_eq!(
        held.len(),
        1,
        "a second write of the same block while the first is under way: {held:?} {early:?}"
    );
    let_go(&bench, slow_only);
    assert!(flushed.get() && again.get());
    bench.flush().unwrap();
    bench.crash_states(7, 100).unwrap();
    bench.close().unwrap();
}

/// A table that is copied is given up when the copy is durable, but not while a slice is still being read from it.
#[test]
pub(crate) fn a_table_is_not_used_again_while_a_slice_is_read_from_it() {
    let setup = Setup { pattern: 512 << 10, ..sliced() };
    let mut files = setup.make(8);
    // The table is not marked as ours alone (as other writers leave it after a snapshot went away): it will be copied.
    let top = &mut files[0].1;
    let word = |bytes: Vec<u8>| u64::from_be_bytes(bytes.try_into().unwrap());
    let l1 = word(top.bytes(40..48));
    let entry = word(top.bytes(l1..l1 + 8));
    assert_ne!(entry >> 63, 0);
    top.write(l1, &(entry & !(1 << 63)).to_be_bytes());
    let table = entry & 0x00ff_ffff_ffff_fe00;
    let bench = Bench::with_files(&setup, &files, 8);
    let max_len = Some(bench.world.content(TOP).unwrap().len() + 40 * CLUSTER);
    bench.world.open(TOP, zebu_sim::SimFileConfig { max_len, ..Default::default() });
    let first = write(&bench, 1, 140 * CLUSTER, CLUSTER);
    settle(&bench);
    assert!(first.get());
    let hold = bench.world.hold(OpFilter::of(OpClass::Read).on_file(TOP).by_worker(0));
    let late = write(&bench, 0, 0, 512);
    settle(&bench);
    assert!(bench.world.held(hold)[0].range.start == table, "the first slice is read from the old table");
    for _ in 0..2 {
        let flushed = start(&bench, 1, |guest, worker| async move { guest.flush(&worker).await });
        settle(&bench);
        assert!(flushed.get());
    }
    // Whatever is free is used, to the last cluster.
    bench.guest.failures.set(crate::crash::guest::Failures::ForSpace);
    let writes = start(&bench, 1, |guest, worker| async move {
        for cluster in 128..256 {
            guest.write(&worker, cluster * CLUSTER, CLUSTER, Durability::Volatile).await;
        }
    });
    settle(&bench);
    let_go(&bench, hold);
    assert!(late.get() && writes.get() && !bench.guest.failed.borrow().is_empty());
    bench.read_whole().unwrap();
    bench.flush().unwrap();
    bench.close().unwrap();
}

/// A write that has begun is over before the disk gets shorter. One that comes meanwhile may go first, but not once the
/// resize is alone.
#[test]
pub(crate) fn a_resize_waits_for_writes_and_writes_for_it() {
    let bench = Bench::new(&patterned(), 9);
    let hold = bench.world.hold(OpFilter::of(OpClass::Write).on_file(TOP).touching(65536..u64::MAX));
    let before = write(&bench, 0, 30 * CLUSTER, CLUSTER);
    settle(&bench);
    assert!(!before.get());
    let resized = start(&bench, 1, |guest, worker| async move {
        guest.resize(&worker, 20 * CLUSTER).await;
    });
    until_time_passes(&bench);
    let after = write(&bench, 1, 0, 512);
    let read = start(&bench, 0, |guest, worker| async move { guest.read(&worker, 0, 4 * CLUSTER).await });
    until_time_passes(&bench);
    assert!(!resized.get() && read.get(), "a resize waits for the write, and no read for it");
    let_go(&bench, hold);
    assert!(before.get() && resized.get() && after.get());

    let header = bench.world.hold(OpFilter::of(OpClass::Write).on_file(TOP).touching(0..512));
    let resized = start(&bench, 1, |guest, worker| async move {
        guest.resize(&worker, 64 * CLUSTER).await;
    });
    settle(&bench);
    let after = write(&bench, 0, 0, 512);
    let read = start(&bench, 0, |guest, worker| async move { guest.read(&worker, 0, 4 * CLUSTER).await });
    settle(&bench);
    assert!(
        !resized.get() && !after.get() && read.get(),
        "a write waits for a resize that is alone, and no read"
    );
    let_go(&bench, header);
    assert!(resized.get() && after.get());
    bench.read_whole().unwrap();
    bench.close().unwrap();
}

/// Space that was given up is not used again while a request still reads from it.
#[test]
pub(crate) fn a_cluster_is_not_used_again_while_it_is_read() {
    let bench = Bench::new(&patterned(), 10);
    bench.read_whole().unwrap();
    let hold = bench.world.hold(OpFilter::of(OpClass::Read).on_file(TOP).by_worker(0));
    let late = start(&bench, 0, |guest, worker| async move { guest.read(&worker, 0, 8 * CLUSTER).await });
    settle(&bench);
    let given_up = start(&bench, 1, |guest, worker| async move {
        guest.discard(&worker, 0, 8 * CLUSTER).await;
        guest.flush(&worker).await;
    });
    settle(&bench);
    assert!(given_up.get());
    let writes = start(&bench, 1, |guest, worker| async move {
        for cluster in 40..64 {
            guest.write(&worker, cluster * CLUSTER, CLUSTER, Durability::Volatile).await;
        }
    });
    settle(&bench);
    assert!(writes.get() && !late.get());
    let_go(&bench, hold);
    assert!(late.get());
    bench.read_whole().unwrap();
    bench.close().unwrap();
}

/// A write in place that is held, and the zeroing of its cluster, which is over.
fn zeroed_beside_a_write(bench: &Bench, file: &str) -> (HoldId, Rc<Cell<bool>>) {
    bench.read_whole().unwrap();
    let hold = bench.world.hold(OpFilter::of(OpClass::Write).on_file(file).by_worker(0));
    let earlier = write(bench, 0, 512, 1024);
    settle(bench);
    let zeroing = start(bench, 1, |guest, worker| async move {
        guest.zero(&worker, 0, CLUSTER, ZeroMode::Keep).await;
    });
    settle(bench);
    assert!(zeroing.get() && !earlier.get());
    (hold, earlier)
}

#[test]
pub(crate) fn a_cluster_zeroed_in_its_place_is_left_to_earlier_writes() {
    let bench = Bench::new(&patterned(), 11);
    let (hold, earlier) = zeroed_beside_a_write(&bench, TOP);
    let later = write(&bench, 1, 2048, 1024);
    settle(&bench);
    assert!(later.get(), "it takes another place");
    let_go(&bench, hold);
    assert!(earlier.get());
    let (result, bufs) = bench
        .world
        .block_on(bench.guest.image.read(&bench.workers[0], 512, IoBuf::zeroed(1024).into()))
        .unwrap();
    result.unwrap();
    let mut found = [1; 1024];
    bufs.copy_to(0, &mut found);
    assert!(found == [0; 1024], "what the earlier write left is shown after the zeroes");
    bench.read_whole().unwrap();
    bench.close().unwrap();
}

#[test]
pub(crate) fn a_place_that_a_cluster_must_keep_is_waited_for() {
    let subclusters = Setup { extended_l2: true, cluster_size: 16384, ..patterned() };
    let data_file = Setup { external_data: true, ..patterned() }.encrypted();
    for (setup, file) in [(subclusters, TOP), (data_file, DATA)] {
        let bench = Bench::new(&setup, 12);
        let (hold, earlier) = zeroed_beside_a_write(&bench, file);
        let later = write(&bench, 1, 1024, 1024);
        let elsewhere = write(&bench, 1, 4 * 16384, CLUSTER);
        until_time_passes(&bench);
        assert!(!later.get(), "{file}: the earlier write could land on it, and be shown in its cluster");
        assert!(elsewhere.get());
        let_go(&bench, hold);
        assert!(earlier.get() && later.get());
        bench.read_whole().unwrap();
        bench.close().unwrap();
    }
}
