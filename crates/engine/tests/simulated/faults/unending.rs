//! A request that never ends, because nobody drives its worker: what needs its end gives it up, and says so.

use crate::crash::guest::Failures;
use crate::crash::setup::{Origin, Setup, TOP};
use crate::faults::bench::{Bench, Outcome, begin};
use std::cell::Cell;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;
use zebu_engine::{Durability, ErrorKind, NewSnapshot, SnapshotRef};
use zebu_sim::{Content, OpClass, OpInfo, SimFileConfig};
use zebu_storage::Worker;
use zebu_storage::commit_steps::{self, CommitStep};

const CLUSTER: u64 = 4096;
const CLUSTERS: u64 = 64;

fn bench(seed: u64) -> Bench {
    let setup = Setup {
        origin: Origin::Own,
        size: CLUSTERS * CLUSTER,
        pattern: 48 * CLUSTER,
        workers: 3,
        ..Setup::plain()
    };
    Bench::new(&setup, seed)
}

/// Worker 0 begins a read, and stops being polled after `steps` steps.
fn sleeping_read(bench: &Bench, steps: u64) -> Outcome<()> {
    let (guest, on) = (bench.guest.clone(), bench.workers[0].clone());
    let read = begin(&bench.workers[0], async move { guest.read(&on, 0, 16 * CLUSTER).await });
    for _ in 0..steps {
        bench.world.step();
    }
    bench.world.pause(0);
    read
}

fn nothing_is_wrong(bench: Bench) {
    assert_eq!(bench.guest.violation.borrow().as_deref(), None);
    if !bench.guest.image.is_closed() {
        bench.read_whole().unwrap();
    }
    bench.close().unwrap();
}

/// The disk is full but for what was given back, which somebody still reads.
#[test]
pub(crate) fn a_full_disk_is_not_waited_for_without_end() {
    let mut refused = 0;
    for steps in 0..12 {
        let bench = bench(steps);
        let worker = &bench.workers[1];
        bench.guest.failures.set(Failures::ForSpace);
        let read = sleeping_read(&bench, steps);
        let len = bench.world.content(TOP).unwrap().len();
        bench.world.open(TOP, SimFileConfig { max_len: Some(len), ..SimFileConfig::default() });
        bench.world.block_on(bench.guest.discard(worker, 0, 16 * CLUSTER)).unwrap();
        let (guest, on) = (bench.guest.clone(), worker.clone());
        let writes = begin(worker, async move {
            for cluster in 48..CLUSTERS {
                guest.write(&on, cluster * CLUSTER, CLUSTER, Durability::Volatile).await;
            }
        });
        bench.end(&writes, "writes on a full disk");
        refused += u64::from(bench.guest.failed.borrow().contains(&ErrorKind::NoSpace));
        bench.world.open(TOP, SimFileConfig::default());
        bench.world.resume(0);
        bench.end(&read, "the read");
        nothing_is_wrong(bench);
    }
    assert!(refused > 0, "no write needed what was read: the test shows nothing");
}

/// Operations that wait to be alone when the image is closed end with an error, and the close with its own result.
#[test]
pub(crate) fn a_close_waits_for_no_operation_that_waits_for_it() {
    for steps in 0..40 {
        let bench = bench(steps);
        let image = bench.guest.image.clone();
        let (guest, on) = (bench.guest.clone(), bench.workers[0].clone());
        bench
            .world
            .block_on(async move { guest.write(&on, 50 * CLUSTER, CLUSTER, Durability::Volatile).await })
            .unwrap();
        let snapshots: Vec<_> = (0..2)
            .map(|number| {
                let (image, on) = (image.clone(), bench.workers[number].clone());
                begin(&bench.workers[number], async move {
                    let name = if number == 0 { "one" } else { "two" };
                    image.create_snapshot(&on, NewSnapshot::named(name)).await.map(drop)
                })
            })
            .collect();
        for _ in 0..steps {
            bench.world.step();
        }
        let (closing, on) = (image.clone(), bench.workers[2].clone());
        let closed = begin(&bench.workers[2], async move { closing.close(&on).await });
        bench.end(&closed, "a close beside operations that wait to be alone").unwrap();
        for snapshot in &snapshots {
            // Taken before the close, or refused because of it.
            if let Err(error) = bench.end(snapshot, "a snapshot beside a close") {
                assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
            }
        }
        let again = begin(&bench.workers[2], {
            let (image, on) = (image.clone(), bench.workers[2].clone());
            async move { image.close(&on).await }
        });
        bench.end(&again, "a second close").unwrap();
        nothing_is_wrong(bench);
    }
}

/// A close waits for the writes before it, says so when one does not end, and after it nothing is changed any more.
#[test]
pub(crate) fn a_close_has_no_writes_beside_it() {
    let mut met = 0;
    for steps in 0..12 {
        let bench = bench(steps);
        let (guest, on) = (bench.guest.clone(), bench.workers[0].clone());
        let is_over = Rc::new(Cell::new(false));
        let flag = is_over.clone();
        let write = begin(&bench.workers[0], async move {
            guest.write(&on, 50 * CLUSTER, 2 * CLUSTER, Durability::Volatile).await;
            flag.set(true);
        });
        for _ in 0..steps {
            bench.world.step();
        }
        bench.world.pause(0);
        let image = bench.guest.image.clone();
        let close = |worker: &Worker| {
            let (image, on) = (image.clone(), worker.clone());
            begin(worker, async move { image.close(&on).await })
        };
        if !is_over.get() {
            let Err(refused) = bench.end(&close(&bench.workers[1]), "a close beside a write that sleeps")
            else {
                assert!(steps == 0, "the write had begun");
                continue;
            };
            assert_eq!(refused.kind(), ErrorKind::Busy, "{refused}");
            met += 1;
            bench.world.block_on(image.flush(&bench.workers[1])).unwrap().unwrap();
        }
        let closing = close(&bench.workers[1]);
        bench.world.resume(0);
        bench.end(&closing, "a close beside a write").unwrap();
        assert!(is_over.get(), "the image is closed, and a write is under way");
        bench.end(&write, "the write");
        // Another program may have it now.
        let (result, _) = bench
            .world
            .block_on(image.write(
                &bench.workers[0],
                0,
                zebu_storage::IoBuf::zeroed(512).into(),
                Durability::Volatile,
            ))
            .unwrap();
        assert_eq!(result.map_err(|error| error.kind()), Err(ErrorKind::InvalidArgument));
        let snapshot = image.create_snapshot(&bench.workers[0], NewSnapshot::named("late"));
        assert!(bench.world.block_on(snapshot).unwrap().is_err());
        assert!(bench.world.block_on(image.flush(&bench.workers[0])).unwrap().is_err());
        assert!(
            bench
                .world
                .block_on(image.resize(
                    &bench.workers[0],
                    80 * CLUSTER,
                    zebu_engine::Shrink::Refuse,
                    zebu_engine::Preallocation::Off
                ))
                .unwrap()
                .is_err()
        );
        nothing_is_wrong(bench);
    }
    assert!(met > 0, "the write was over each time: the test shows nothing");
}

/// A flush that begins before a close has ended has what was written made durable by either, and is not called failed.
#[test]
fn a_flush_beside_a_close_does_not_fail() {
    let mut beside = 0;
    for seed in 0..6 {
        // The close goes as far in so many steps each time.
        let mut is_refused = false;
        for steps in 0..40 {
            let bench = bench(seed);
            let write = bench.guest.write(&bench.workers[0], 50 * CLUSTER, CLUSTER, Durability::Volatile);
            bench.world.block_on(write).unwrap();
            let image = bench.guest.image.clone();
            let (closer, on) = (image.clone(), bench.workers[1].clone());
            let close = begin(&bench.workers[1], async move { closer.close(&on).await });
            for _ in 0..steps {
                bench.world.step();
            }
            let on = bench.workers[0].clone();
            let flush = begin(&bench.workers[0], async move { image.flush(&on).await });
            let flushed = bench.end(&flush, "the flush");
            bench.end(&close, "the close").unwrap();
            match flushed {
                Ok(()) => {
                    assert!(!is_refused, "seed {seed}, {steps} steps: an earlier flush was refused");
                    beside += 1;
                }
                // The close has done its work, and tells its caller next.
                Err(error) => {
                    assert_eq!(
                        error.kind(),
                        ErrorKind::InvalidArgument,
                        "seed {seed}, {steps} steps: {error}"
                    );
                    is_refused = true;
                }
            }
        }
        assert!(is_refused, "seed {seed}: the close takes more steps");
    }
    assert!(beside > 40, "{beside} flushes beside a close");
}

/// A thread has promised to drive its worker, and does something else for minutes while a commit runs there: a flush of another
/// thread and a close wait, and writes go on. All succeed when the commit does.
#[test]
fn a_thread_that_leads_a_commit_is_waited_for() {
    let mut waited = 0;
    for steps in 0..40 {
        let bench = bench(steps);
        let (leader, other) = (&bench.workers[1], &bench.workers[2]);
        assert!(leader.is_driven() && !other.is_driven());
        bench.guest.failures.set(Failures::Closed);
        let write = bench.guest.write(leader, 50 * CLUSTER, 2 * CLUSTER, Durability::Volatile);
        bench.world.block_on(write).unwrap();
        let (guest, on) = (bench.guest.clone(), leader.clone());
        let flush = begin(leader, async move { guest.flush(&on).await });
        for _ in 0..steps {
            bench.world.step();
        }
        bench.world.pause(1);
        let image = bench.guest.image.clone();
        let (flushed, on) = (image.clone(), other.clone());
        let beside = begin(other, async move { flushed.flush(&on).await });
        let (guest, on) = (bench.guest.clone(), other.clone());
        let write = begin(other, async move { guest.write(&on, 0, CLUSTER, Durability::Volatile).await });
        bench.end(&write, "a write beside a commit that stands still");
        let (closing, on) = (image.clone(), other.clone());
        let closed = begin(other, async move { closing.close(&on).await });
        for _ in 0..10 {
            bench.world.run_until_idle().unwrap();
            bench.world.leap(Duration::from_secs(60));
        }
        if beside.borrow().is_none() {
            assert!(closed.borrow().is_none(), "the commit may write yet");
            waited += 1;
            bench.crash_states(steps, 8).unwrap();
        }
        bench.world.resume(1);
        bench.end(&beside, "the flush beside it").unwrap();
        bench.end(&flush, "the flush");
        bench.end(&closed, "the close").unwrap();
        nothing_is_wrong(bench);
    }
    assert!(waited > 0, "the commit was over each time: the test shows nothing");
}

/// The refcount table moves in a commit on the worker of whoever leads it. The image's own worker changes the header: the lock of
/// the header does not depend on a promise.
#[test]
pub(crate) fn a_leader_leaves_the_header_to_the_own_worker() {
    let setup = Setup {
        cluster_size: 512,
        refcount_bits: 64,
        slice_size: Some(512),
        workers: 3,
        size: 8 << 20,
        ..Setup::plain()
    };
    let bench = Bench::new(&setup, 1);
    let moves = Rc::new(Cell::new(false));
    let seen = moves.clone();
    commit_steps::observe(Some(Box::new(move |step| {
        seen.set(seen.get() || step == CommitStep::HeaderOfMovedTable);
    })));
    let leader = &bench.workers[1];
    assert!(leader.is_driven());
    let (guest, on) = (bench.guest.clone(), leader.clone());
    let flush = begin(leader, async move {
        guest.write(&on, 0, 3 << 20, Durability::Volatile).await;
        guest.flush(&on).await;
    });
    bench.world.run_until(|| moves.get()).unwrap();
    commit_steps::observe(None);
    let of_header = |op: &OpInfo| &*op.file == TOP && op.class == OpClass::Write && op.range.start == 0;
    let change = || bench.world.pending().into_iter().map(|(op, _)| op).find(of_header);
    bench.world.run_until(|| change().is_some()).unwrap();
    assert!(bench.workers.iter().all(|worker| worker.id() != change().unwrap().worker));
    bench.end(&flush, "the flush");
    nothing_is_wrong(bench);
}

/// A worker begins a close, and is not polled any more: requests of others end, with an error if the image is closed.
#[test]
pub(crate) fn a_close_whose_worker_stands_still_holds_up_nobody() {
    let mut refused = 0;
    for steps in 0..60 {
        let bench = bench(steps);
        let write = bench.guest.write(&bench.workers[0], 50 * CLUSTER, 2 * CLUSTER, Durability::Volatile);
        bench.world.block_on(write).unwrap();
        let image = bench.guest.image.clone();
        let (closing, on) = (image.clone(), bench.workers[2].clone());
        let closed = begin(&bench.workers[2], async move { closing.close(&on).await });
        for _ in 0..steps {
            bench.world.step();
        }
        bench.world.pause(2);
        let was_under_way = closed.borrow().is_none();
        let (written, on) = (image.clone(), bench.workers[1].clone());
        let write = begin(&bench.workers[1], async move {
            let bytes = zebu_storage::IoBuf::zeroed(512).into();
            written.write(&on, 0, bytes, Durability::Volatile).await.0
        });
        if let Err(error) = bench.end(&write, "a write beside a close that stands still") {
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
            refused += u64::from(was_under_way);
        }
        bench.world.resume(2);
        bench.end(&closed, "the close").unwrap();
    }
    assert!(refused > 0, "no write met a close: the test shows nothing");
}

/// A close gives space back, and so waits for the reads before it. It says so when one does not end.
#[test]
pub(crate) fn a_close_does_not_wait_without_end_for_a_read() {
    let mut refused = 0;
    for steps in 0..12 {
        let bench = bench(steps);
        let worker = &bench.workers[1];
        bench.world.block_on(bench.guest.discard(worker, 20 * CLUSTER, 4 * CLUSTER)).unwrap();
        bench.guest.failures.set(Failures::Closed);
        let read = sleeping_read(&bench, steps);
        let image = bench.guest.image.clone();
        let close = || {
            let (image, on) = (image.clone(), worker.clone());
            begin(worker, async move { image.close(&on).await })
        };
        if let Err(error) = bench.end(&close(), "a close beside a read that sleeps") {
            assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
            refused += 1;
        }
        bench.world.resume(0);
        bench.end(&read, "the read");
        nothing_is_wrong(bench);
    }
    assert!(refused > 0, "the read was over each time: the test shows nothing");
}

/// Operations that are alone with the image wait for a write that sleeps, and say so. They succeed when it is over.
#[test]
pub(crate) fn operations_alone_do_not_wait_without_end_for_a_write() {
    let mut refused = 0;
    for steps in 0..12 {
        let bench = bench(steps);
        let (guest, on) = (bench.guest.clone(), bench.workers[0].clone());
        let write = begin(&bench.workers[0], async move {
            guest.write(&on, 50 * CLUSTER, 2 * CLUSTER, Durability::Volatile).await;
        });
        for _ in 0..steps {
            bench.world.step();
        }
        bench.world.pause(0);
        let image = bench.guest.image.clone();
        let snapshot = |name: &'static str| {
            let (image, on) = (image.clone(), bench.workers[1].clone());
            begin(&bench.workers[1], async move {
                image.create_snapshot(&on, NewSnapshot::named(name)).await.map(drop)
            })
        };
        let first = snapshot("first");
        let (grown, on) = (image.clone(), bench.workers[2].clone());
        let growth = begin(&bench.workers[2], async move {
            grown
                .resize(&on, CLUSTERS * CLUSTER, zebu_engine::Shrink::Refuse, zebu_engine::Preallocation::Off)
                .await
        });
        for outcome in [&first, &growth] {
            if let Err(error) = bench.end(outcome, "an operation beside a write that sleeps") {
                assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
                assert!(error.is_retryable(), "{error}");
                assert!(error.message().contains("queue"), "{error}");
                refused += 1;
            }
        }
        bench.world.resume(0);
        bench.end(&write, "the write");
        bench.end(&snapshot("again"), "a snapshot when the write is over").unwrap();
        nothing_is_wrong(bench);
    }
    assert!(refused > 0, "the write was over each time: the test shows nothing");
}

/// Snapshots are taken, applied and deleted beside a read that begins meanwhile, and whose worker then stands still. Taking
/// one needs no end of the read. What waits for it says so.
#[test]
pub(crate) fn snapshots_do_not_wait_without_end_for_a_read_that_began_meanwhile() {
    let (mut beside, mut refused) = (0, 0);
    for steps in 0..160 {
        let bench = bench(3);
        let image = bench.guest.image.clone();
        let (guest, on) = (bench.guest.clone(), bench.workers[1].clone());
        let write = begin(&bench.workers[1], async move {
            guest.write(&on, 0, CLUSTER, Durability::Durable).await;
        });
        bench.end(&write, "a write");
        let step = |what: SnapshotStep| {
            let (image, on) = (image.clone(), bench.workers[1].clone());
            begin(&bench.workers[1], async move {
                let one = SnapshotRef::Name("one".to_owned());
                match what {
                    SnapshotStep::Take => {
                        image.create_snapshot(&on, NewSnapshot::named("one")).await.map(drop)
                    }
                    SnapshotStep::Apply => image.apply_snapshot(&on, &one).await,
                    SnapshotStep::Delete => image.delete_snapshot(&on, &one).await,
                }
            })
        };
        for what in [SnapshotStep::Take, SnapshotStep::Apply, SnapshotStep::Delete] {
            let operation = step(what);
            for _ in 0..steps {
                bench.world.step();
            }
            let was_under_way = operation.borrow().is_none();
            let read = sleeping_read(&bench, 1 + steps % 3);
            match bench.end(&operation, &format!("{what:?} beside a read that sleeps, {steps} steps")) {
                Ok(()) => beside += u64::from(was_under_way && what == SnapshotStep::Take),
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Busy, "{what:?} {steps}: {error}");
                    refused += 1;
                }
            }
            bench.world.resume(0);
            bench.end(&read, "the read");
            let has_it = image.snapshots().iter().any(|snapshot| snapshot.name == "one");
            if what == SnapshotStep::Take && !has_it {
                bench.end(&step(what), "a snapshot when the read is over").unwrap();
            }
        }
        nothing_is_wrong(bench);
    }
    assert!(beside > 0 && refused > 0, "{beside} beside, {refused} refused: the test shows nothing");
}

/// A copy of the image's file is made beside a read that begins meanwhile, and whose worker then stands still: what is set
/// aside is given back at once, since no read uses it. What the read may use is not given back.
#[test]
pub(crate) fn a_copy_of_the_file_does_not_wait_without_end_for_a_read_that_began_meanwhile() {
    let (mut beside, mut refused) = (0, 0);
    for steps in 0..160 {
        let bench = bench(steps);
        let worker = &bench.workers[1];
        bench.world.block_on(bench.guest.write(worker, 50 * CLUSTER, CLUSTER, Durability::Volatile)).unwrap();
        if steps % 2 == 0 {
            bench.world.block_on(bench.guest.discard(worker, 0, 16 * CLUSTER)).unwrap();
        }
        let copy = bench.world.file("copy", Content::default(), SimFileConfig::default());
        let (image, on) = (bench.guest.image.clone(), worker.clone());
        let copied = begin(worker, async move {
            zebu_engine::jobs::file_snapshot(&on, &image, copy, Path::new("copy")).await
        });
        for _ in 0..steps {
            bench.world.step();
        }
        let was_under_way = copied.borrow().is_none();
        let read = sleeping_read(&bench, 1 + steps % 3);
        match bench.end(&copied, &format!("a copy of the file beside a read that sleeps, {steps} steps")) {
            Ok(()) => beside += u64::from(was_under_way),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Busy, "{steps} steps: {error}");
                refused += 1;
            }
        }
        bench.world.resume(0);
        bench.end(&read, "the read");
        nothing_is_wrong(bench);
    }
    assert!(beside > 0 && refused > 0, "{beside} beside, {refused} refused: the test shows nothing");
}

/// Another backing file is named beside a read that begins meanwhile, and whose worker then stands still. Space that was freed
/// before may not come back until the read has ended.
#[test]
pub(crate) fn another_backing_file_does_not_wait_without_end_for_a_read_that_began_meanwhile() {
    let (mut beside, mut refused) = (0, 0);
    for seed in 0..400 {
        let (bench, steps) = (bench(seed), seed % 40);
        let worker = &bench.workers[1];
        bench.world.block_on(bench.guest.discard(worker, 20 * CLUSTER, 4 * CLUSTER)).unwrap();
        let (image, on) = (bench.guest.image.clone(), worker.clone());
        let named = begin(worker, async move { image.set_backing(&on, None).await });
        for _ in 0..steps {
            bench.world.step();
        }
        let was_under_way = named.borrow().is_none();
        let read = sleeping_read(&bench, 1 + steps % 3);
        match bench.end(&named, &format!("a change of the name beside a read that sleeps, seed {seed}")) {
            Ok(()) => beside += u64::from(was_under_way),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Busy, "seed {seed}: {error}");
                refused += 1;
            }
        }
        bench.world.resume(0);
        bench.end(&read, "the read");
        nothing_is_wrong(bench);
    }
    assert!(beside > 0 && refused > 0, "{beside} beside, {refused} refused: the test shows nothing");
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SnapshotStep {
    Take,
    Apply,
    Delete,
}
