//! The simulated world as a place to run workers: order, time, faults, holds, and nothing left to chance.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::task::{Context, Waker};
use std::time::Duration;
use zebu_sim::{
    Content, Facility, FailedEffect, Fault, FaultPlan, FaultRates, FaultRule, LogEvent, OpClass, OpFilter,
    SimConfig, SimDisk, SimFileConfig, SimWorld, StuckCause, Waiting,
};
use zebu_storage::sabotage;
use zebu_storage::{Background, File, FileExtent, IoBuf, IoBufs, IoErrorKind, Worker, WorkerKind};

const FILE: &str = "disk";

fn world(seed: u64) -> (SimWorld, Worker, File) {
    let world = SimWorld::new(seed);
    let file = world.file(FILE, Content::new(), SimFileConfig::default());
    let worker = world.worker();
    (world, worker, file)
}

async fn write(worker: &Worker, file: &File, offset: u64, fill: u8, len: usize) -> Result<(), IoErrorKind> {
    let (result, _) = worker.write(file, offset, IoBuf::copy_of(&vec![fill; len]).into()).await;
    result.map_err(|e| e.kind)
}

async fn read(worker: &Worker, file: &File, offset: u64, len: usize) -> Result<Vec<u8>, IoErrorKind> {
    let (result, bufs) = worker.read(file, offset, IoBuf::copy_of(&vec![0xee; len]).into()).await;
    result.map_err(|e| e.kind)?;
    let mut bytes = vec![0; len];
    bufs.copy_to(0, &mut bytes);
    Ok(bytes)
}

#[test]
fn every_operation_does_what_its_name_says() {
    let (world, worker, file) = world(1);
    assert_eq!(worker.kind(), WorkerKind::Simulated);
    world
        .block_on(async {
            write(&worker, &file, 5000, 7, 10_000).await.unwrap();
            assert_eq!(file.len(), 15_000);
            assert_eq!(read(&worker, &file, 4990, 20).await.unwrap(), [[0; 10], [7; 10]].concat());
            assert_eq!(read(&worker, &file, 14_995, 10).await.unwrap(), [[7; 5], [0; 5]].concat());
            assert_eq!(file.disk_usage().unwrap(), 12_288);
            worker.punch_hole(&file, 8192, 4096).await.unwrap();
            assert_eq!(file.disk_usage().unwrap(), 8192);
            let hole = worker.extent_at(&file, 8192).await.unwrap();
            assert_eq!(hole, FileExtent { offset: 8192, len: 4096, hole: true });
            worker.zero_range(&file, 0, 5010).await.unwrap();
            assert_eq!(read(&worker, &file, 5005, 10).await.unwrap(), [[0; 5], [7; 5]].concat());
            worker.allocate(&file, 0, 20_000).await.unwrap();
            assert_eq!(file.len(), 20_000);
            assert_eq!(file.disk_usage().unwrap(), 20_480);
            worker.set_len(&file, 13_000).await.unwrap();
            worker.set_len(&file, 14_000).await.unwrap();
            assert_eq!(read(&worker, &file, 12_995, 10).await.unwrap(), [[7; 5], [0; 5]].concat());
            worker.write_zero_bytes(&file, 12_288, 100).await.unwrap();
            worker.flush(&file).await.unwrap();

            let copy = world.file("copy", Content::new(), SimFileConfig::default());
            worker.clone_range(&file, 4096, &copy, 8192, 4096).await.unwrap();
            assert_eq!(copy.len(), 12_288);
            assert_eq!(worker.copy_range(&file, 13_000, &copy, 0, 50_000).await.unwrap(), 1000);
            assert_eq!(worker.copy_range(&file, 14_000, &copy, 0, 10).await.unwrap(), 0);
            let refused = worker.clone_range(&file, 4096, &copy, 1, 4096).await.unwrap_err();
            assert_eq!(refused.kind, IoErrorKind::Unsupported);
            assert_eq!(worker.run_blocking(|| 6 * 7).await, 42);
        })
        .unwrap();
    let copy = world.content("copy").unwrap();
    assert_eq!(copy.bytes(8192..12_288), world.content(FILE).unwrap().bytes(4096..8192));
}

#[test]
fn a_file_says_on_any_thread_what_it_takes_as_long_as_its_world_is_there() {
    let (world, worker, file) = world(1);
    world.block_on(write(&worker, &file, 0, 7, 4096)).unwrap().unwrap();
    let ask = |file: &File| std::thread::scope(|scope| scope.spawn(|| file.disk_usage()).join().unwrap());
    assert_eq!(ask(&file).unwrap(), 4096);
    drop((worker, world));
    assert_eq!(ask(&file).unwrap_err().kind, IoErrorKind::Os(libc::EBADF));
}

/// A few tasks on two workers that write, read, flush and wait; what they saw goes into a list.
fn busy_run(seed: u64, faults: FaultRates) -> (Vec<u8>, u64, Vec<u64>) {
    let world = SimWorld::new(seed);
    world.set_faults(FaultPlan::random(faults));
    let file = world.file(FILE, Content::hole(1 << 20), SimFileConfig::default());
    let seen = Rc::new(RefCell::new(Vec::new()));
    for number in 0..2_u64 {
        let worker = world.worker();
        for task in 0..4_u64 {
            let (inner, file, seen) = (worker.clone(), file.clone(), Rc::clone(&seen));
            drop(worker.spawn(async move {
                for round in 0..10_u64 {
                    let offset = (task * 7 + round * 3 + number) % 16 * 4096;
                    let _ = write(&inner, &file, offset, (task * 16 + round) as u8, 8192).await;
                    if round % 3 == 0 {
                        let _ = inner.flush(&file).await;
                    }
                    inner.sleep(Duration::from_micros(task * 50)).await;
                    if let Ok(bytes) = read(&inner, &file, offset, 512).await {
                        seen.borrow_mut().push(u64::from(bytes[0]));
                    }
                }
            }));
        }
    }
    world.run_until_idle().unwrap();
    let seen = seen.borrow().clone();
    (world.log().encode(), world.digest(), seen)
}

#[test]
fn a_seed_gives_the_same_log_byte_for_byte() {
    let faults = FaultRates {
        read_errors: 20,
        write_errors: 50,
        fallocate_errors: 20,
        splits: 100,
        delays: 50,
        ..FaultRates::default()
    };
    let mut digests = BTreeSet::new();
    for seed in 0..10 {
        let first = busy_run(seed, faults);
        assert!(first == busy_run(seed, faults), "seed {seed}");
        digests.insert(first.1);
    }
    assert_eq!(digests.len(), 10, "other seeds give other runs");
}

#[test]
fn what_is_in_flight_together_happens_in_any_order() {
    let mut last_writers = BTreeSet::new();
    let mut seen_by_reader = BTreeSet::new();
    for seed in 0..60 {
        let (world, worker, file) = world(seed);
        for fill in 1..=3 {
            let (inner, file) = (worker.clone(), file.clone());
            drop(worker.spawn(async move { write(&inner, &file, 0, fill, 1024).await.unwrap() }));
        }
        let (inner, other) = (worker.clone(), file.clone());
        let reader = worker.spawn(async move { read(&inner, &other, 0, 1024).await.unwrap() });
        let bytes = world.block_on(reader).unwrap();
        seen_by_reader.insert((bytes[0], bytes[1023]));
        world.run_until_idle().unwrap();
        last_writers.insert(world.content(FILE).unwrap().bytes(0..1)[0]);
    }
    assert_eq!(last_writers, BTreeSet::from([1, 2, 3]));
    for single in 0..=3 {
        assert!(seen_by_reader.contains(&(single, single)), "{seen_by_reader:?}");
    }
    assert!(seen_by_reader.iter().any(|(first, last)| first != last), "reads are not atomic");
}

#[test]
fn a_held_write_lands_after_its_place_was_given_to_another() {
    let (world, worker, file) = world(3);
    let hold = world.hold(OpFilter::of(OpClass::Write).on_file(FILE).touching(0..4096));
    let (inner, held_file) = (worker.clone(), file.clone());
    let late = worker.spawn(async move { write(&inner, &held_file, 0, 1, 4096).await });
    world.run_until(|| world.held(hold).len() == 1).unwrap();
    assert_eq!(world.held(hold)[0].range, 0..4096);
    world.block_on(worker.punch_hole(&file, 0, 4096)).unwrap().unwrap();
    let (inner, other) = (worker.clone(), file.clone());
    let punches = OpFilter::of_any(&[OpClass::Write, OpClass::Punch]).by_worker(1);
    let unrelated = world.hold(punches);
    world.block_on(async move { write(&inner, &other, 8192, 2, 512).await }).unwrap().unwrap();
    let stuck = world.run_until(|| false).unwrap_err();
    assert_eq!(stuck.cause, StuckCause::Deadlock);
    assert_eq!(stuck.operations.len(), 1);
    assert_eq!(stuck.operations[0].1, Waiting::Held(hold));
    assert!(stuck.to_string().contains("Write 0x0..0x1000 of \"disk\" by worker 0"), "{stuck}");
    world.release(unrelated);
    world.release(hold);
    world.block_on(late).unwrap().unwrap();
    assert_eq!(world.content(FILE).unwrap().bytes(0..4096), [1; 4096]);
}

#[test]
fn a_hold_does_not_stop_what_is_half_done() {
    let (world, worker, file) = world(4);
    world.inject(FaultRule::new(OpFilter::of(OpClass::Write), Fault::Split { bytes: 512 }));
    let (inner, other) = (worker.clone(), file.clone());
    let half_done = worker.spawn(async move { write(&inner, &other, 0, 1, 1024).await });
    world.run_until(|| world.content(FILE).unwrap().len() == 512).unwrap();
    let hold = world.hold(OpFilter::of(OpClass::Write));
    assert_eq!(world.held(hold), []);
    world.block_on(half_done).unwrap().unwrap();
    assert_eq!(world.content(FILE).unwrap().bytes(0..1024), [1; 1024]);
}

#[test]
fn a_lost_wake_up_is_reported() {
    let (world, _worker, _file) = world(0);
    let stuck = world.block_on(std::future::pending::<()>()).unwrap_err();
    assert_eq!(stuck.cause, StuckCause::Deadlock);
    assert!(stuck.to_string().contains("no operation in flight"), "{stuck}");
    let circles = SimWorld::with_config(&SimConfig { max_steps: 100, ..SimConfig::seeded(0) });
    let worker = circles.worker();
    let spin = async {
        loop {
            worker.sleep(Duration::from_millis(1)).await;
        }
    };
    let stuck = circles.block_on(spin).unwrap_err();
    assert_eq!(stuck.cause, StuckCause::StepLimit);
}

#[test]
fn scripted_faults_strike_where_told() {
    let (world, worker, file) = world(5);
    let fail = |errno, effect| Fault::Fail { errno, effect };
    let writes = OpFilter::of(OpClass::Write).touching(4096..8192);
    world.inject(FaultRule::new(writes.clone(), fail(libc::EIO, FailedEffect::Nothing)).nth(1));
    world.inject(FaultRule::new(OpFilter::of(OpClass::Write), fail(libc::ENOSPC, FailedEffect::All)).nth(3));
    world.inject(
        FaultRule::new(OpFilter::of(OpClass::Read), fail(libc::EIO, FailedEffect::Nothing)).span(1, 2),
    );
    world
        .block_on(async {
            write(&worker, &file, 4096, 1, 4096).await.unwrap();
            write(&worker, &file, 0, 1, 4096).await.unwrap();
            let failed = write(&worker, &file, 4096, 2, 4096).await;
            assert_eq!(failed, Err(IoErrorKind::Os(libc::EIO)));
            assert_eq!(read(&worker, &file, 4096, 1).await.unwrap(), [1]);
            let failed = write(&worker, &file, 8192, 3, 4096).await;
            assert_eq!(failed, Err(IoErrorKind::Os(libc::ENOSPC)));
            assert!(read(&worker, &file, 0, 1).await.is_err());
            assert!(read(&worker, &file, 0, 1).await.is_err());
            assert_eq!(read(&worker, &file, 8192, 1).await.unwrap(), [3], "it had its effect all the same");
            write(&worker, &file, 4096, 4, 4096).await.unwrap();
        })
        .unwrap();
}

#[test]
fn a_failed_flush_sticks_to_the_handle_and_loses_the_guarantee() {
    let (world, worker, file) = world(6);
    let fail = Fault::Fail { errno: libc::EIO, effect: FailedEffect::Nothing };
    world.inject(FaultRule::new(OpFilter::of(OpClass::Flush), fail).nth(0));
    world
        .block_on(async {
            write(&worker, &file, 0, 1, 512).await.unwrap();
            write(&worker, &file, 1024, 1, 512).await.unwrap();
            assert_eq!(worker.flush(&file).await.unwrap_err().kind, IoErrorKind::Os(libc::EIO));
            assert_eq!(worker.flush(&file).await.unwrap_err().kind, IoErrorKind::FlushFailedBefore);
            let again = world.open(FILE, SimFileConfig::default()).unwrap();
            write(&worker, &again, 512, 2, 1024).await.unwrap();
            worker.flush(&again).await.unwrap();
        })
        .unwrap();
    let contents: BTreeSet<(u8, u8, u8)> = world
        .crash_states(&zebu_sim::CrashOptions::default())
        .map(|state| {
            let bytes = state.file(FILE).unwrap().bytes(0..1536);
            (bytes[0], bytes[512], bytes[1024])
        })
        .collect();
    assert_eq!(contents, BTreeSet::from([(0, 2, 2), (1, 2, 2)]), "what was overwritten since is over");
}

/// The end of a flush, when it has come.
type FlushEnd = Rc<Cell<Option<Result<(), IoErrorKind>>>>;

fn start_flush(worker: &Worker, file: &File) -> FlushEnd {
    let end = FlushEnd::default();
    let (on, file, ended) = (worker.clone(), file.clone(), end.clone());
    drop(worker.spawn(async move { ended.set(Some(on.flush(&file).await.map_err(|e| e.kind))) }));
    end
}

/// A world with two workers, where the disk fails the first flush that takes effect.
fn world_of_a_failing_flush(seed: u64) -> (SimWorld, [Worker; 2], File) {
    let (world, worker, file) = world(seed);
    let other = world.worker();
    let fail = Fault::Fail { errno: libc::EIO, effect: FailedEffect::Nothing };
    world.inject(FaultRule::new(OpFilter::of(OpClass::Flush), fail).nth(0));
    world.block_on(write(&worker, &file, 0, 1, 512)).unwrap().unwrap();
    (world, [worker, other], file)
}

/// How the flushes of two workers end, of which the disk fails one.
fn two_flushes(seed: u64) -> [Result<(), IoErrorKind>; 2] {
    let (world, workers, file) = world_of_a_failing_flush(seed);
    let ends = workers.map(|worker| start_flush(&worker, &file));
    world.run_until(|| ends.iter().all(|end| end.get().is_some())).unwrap();
    ends.map(|end| end.get().unwrap())
}

#[test]
fn no_flush_beside_one_that_fails_succeeds() {
    for seed in 0..200 {
        let ends = two_flushes(seed);
        assert!(ends.iter().all(Result::is_err), "seed {seed}: {ends:?}");
    }
}

#[test]
fn a_flush_that_is_believed_by_itself_is_caught() {
    let is_caught = || (0..200).any(|seed| two_flushes(seed).iter().any(Result::is_ok));
    assert!(sabotage::under(Some(sabotage::Fault::BelieveEachSync), is_caught).0);
}

/// A flush after the request of a write has vanished, whose task goes on and writes later.
fn flush_beside_a_task_that_writes() -> Result<(), IoErrorKind> {
    let world = SimWorld::new(9);
    let file = world.file(FILE, Content::new(), SimFileConfig::direct(4096));
    let worker = world.worker();
    world
        .block_on(async {
            write(&worker, &file, 0, 1, 4096).await.unwrap();
            let mut vanishes = Box::pin(write(&worker, &file, 100, 2, 100));
            assert!(vanishes.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
            drop(vanishes);
            let flushed = worker.flush(&file).await.map_err(|e| e.kind);
            let is_there = async || read(&worker, &file, 100, 1).await.unwrap() == [2];
            while !is_there().await {
                worker.sleep(Duration::from_millis(1)).await;
            }
            flushed
        })
        .unwrap()
}

#[test]
fn a_write_whose_request_vanished_before_its_task_began_is_abandoned() {
    assert_eq!(flush_beside_a_task_that_writes(), Err(IoErrorKind::FlushFailedBefore));
    let believed = sabotage::under(Some(sabotage::Fault::ForgetOwnTask), flush_beside_a_task_that_writes);
    assert_eq!(believed.0, Ok(()));
}

/// The end of a flush beside a failing one of a worker that stands still, and the simulated seconds that it took. When that goes
/// on after `still`, every flush fails.
fn flush_beside_one_that_stands_still(
    is_driven: bool,
    still: Duration,
) -> (Result<(), IoErrorKind>, Duration) {
    let (world, [worker, other], file) = world_of_a_failing_flush(8);
    if is_driven {
        other.promise_to_drive();
    }
    let failed = start_flush(&other, &file);
    other.poll();
    world.pause(other.id());
    world.run_until_idle().unwrap();
    let ended = |flush: &FlushEnd| {
        world.run_until(|| flush.get().is_some()).unwrap();
        flush.get().unwrap()
    };
    let begun = world.now();
    let beside = start_flush(&worker, &file);
    world.run_until(|| beside.get().is_some() || world.now() > begun + still).unwrap();
    let has_ended = beside.get().is_some();
    if has_ended {
        assert_eq!(ended(&start_flush(&worker, &file)), Ok(()), "it is waited for again");
    }
    let took = world.now().saturating_sub(begun);
    world.resume(other.id());
    assert_eq!(ended(&failed), Err(IoErrorKind::Os(libc::EIO)));
    let result = ended(&beside);
    assert_eq!(ended(&start_flush(&worker, &file)), Err(IoErrorKind::FlushFailedBefore));
    (result, took)
}

const STILL: Duration = Duration::from_secs(300);

/// A worker that somebody has promised to drive is waited for: its flush may have been told of the loss.
fn flush_beside_one_that_will_be_driven() -> bool {
    let (result, took) = flush_beside_one_that_stands_still(true, STILL);
    result == Err(IoErrorKind::FlushFailedBefore) && took > STILL
}

#[test]
fn a_flush_beside_one_of_a_worker_that_stands_still_ends() {
    assert!(flush_beside_one_that_will_be_driven());
    let (doubted, felt) =
        sabotage::under(Some(sabotage::Fault::DoubtPromise), flush_beside_one_that_will_be_driven);
    assert!(!doubted && felt > 0);
    let (result, took) = flush_beside_one_that_stands_still(false, STILL);
    assert!(result == Ok(()) && took < STILL, "{result:?} after {took:?}: nobody drives it");
}

/// A flush that takes minutes, of a worker that is polled, and a quick one beside it, while the clock leaps. True if both
/// succeed, and the quick one not before it is known that the other has not been told of a loss.
fn a_flush_waits_for_a_slow_one(promise: bool) -> bool {
    let (world, worker, file) = world(9);
    let slow = world.worker();
    if promise {
        slow.promise_to_drive();
    }
    for (worker, seconds) in [(&slow, 290), (&worker, 2)] {
        let flushes = OpFilter::of(OpClass::Flush).by_worker(worker.id());
        world.inject(FaultRule::new(flushes, Fault::Delay(Duration::from_secs(seconds))));
    }
    let (long, short) = (start_flush(&slow, &file), start_flush(&worker, &file));
    while short.get().is_none() {
        world.leap(Duration::from_millis(700));
        world.step();
    }
    let is_early = long.get().is_none();
    world.run_until(|| long.get().is_some()).unwrap();
    (long.get(), short.get(), is_early) == (Some(Ok(())), Some(Ok(())), false)
}

#[test]
fn a_flush_beside_one_that_takes_minutes_succeeds_after_it() {
    for promise in [true, false] {
        assert!(a_flush_waits_for_a_slow_one(promise));
        let fault = Some(sabotage::Fault::GiveUpOnDriven);
        let (is_right, felt) = sabotage::under(fault, || a_flush_waits_for_a_slow_one(promise));
        assert!(!is_right && felt > 0);
    }
}

#[test]
fn facilities_can_be_refused_one_by_one() {
    let world = SimWorld::new(7);
    let worker = world.worker();
    let refused = SimFileConfig {
        punch: Facility::Refused,
        zero_range: Facility::Refused,
        allocate: Facility::Refused,
        copy: Facility::Refused,
        clone: Facility::Refused,
        ..SimFileConfig::default()
    };
    let file = world.file(FILE, Content::hole(1 << 16), refused);
    world
        .block_on(async {
            let unsupported = |result: Result<(), zebu_storage::IoError>| {
                assert_eq!(result.unwrap_err().kind, IoErrorKind::Unsupported);
            };
            assert!(file.can_punch() && file.can_zero_range() && file.can_allocate(), "not known before");
            unsupported(worker.punch_hole(&file, 0, 4096).await);
            unsupported(worker.zero_range(&file, 0, 4096).await);
            unsupported(worker.allocate(&file, 0, 4096).await);
            unsupported(worker.clone_range(&file, 0, &file, 8192, 4096).await);
            unsupported(worker.copy_range(&file, 0, &file, 8192, 4096).await.map(drop));
            assert!(!file.can_punch() && !file.can_zero_range() && !file.can_allocate());
        })
        .unwrap();
}

#[test]
fn space_and_length_run_out() {
    let world = SimWorld::new(8);
    let worker = world.worker();
    let limited = SimFileConfig { max_len: Some(65_536), space: Some(8192), ..SimFileConfig::default() };
    let file = world.file(FILE, Content::new(), limited);
    let full = Err(IoErrorKind::Os(libc::ENOSPC));
    world
        .block_on(async {
            write(&worker, &file, 0, 1, 8192).await.unwrap();
            assert_eq!(write(&worker, &file, 8192, 1, 1).await, full);
            write(&worker, &file, 100, 2, 4096).await.unwrap();
            assert!(worker.set_len(&file, 65_537).await.is_err());
            worker.set_len(&file, 65_536).await.unwrap();
            worker.punch_hole(&file, 0, 4096).await.unwrap();
            write(&worker, &file, 61_440, 1, 4096).await.unwrap();
            assert_eq!(write(&worker, &file, 0, 1, 1).await, full);
            world.set_space(FILE, None);
            write(&worker, &file, 0, 1, 1).await.unwrap();
            assert_eq!(write(&worker, &file, 65_536, 1, 1).await, full);
        })
        .unwrap();
}

#[test]
fn a_stopped_worker_does_not_stop_the_others() {
    let (world, first, file) = world(9);
    let second = world.worker();
    world.pause(0);
    let done = Rc::new(Cell::new(0));
    for worker in [&first, &second] {
        let (inner, file, done) = (worker.clone(), file.clone(), Rc::clone(&done));
        drop(worker.spawn(async move {
            write(&inner, &file, 0, 1, 512).await.unwrap();
            done.set(done.get() + 1);
        }));
    }
    world.run_until_idle().unwrap();
    assert_eq!(done.get(), 1);
    world.resume(0);
    world.run_until_idle().unwrap();
    assert_eq!(done.get(), 2);
}

#[test]
fn time_is_simulated() {
    let (world, worker, _file) = world(10);
    // Nobody waits for eleven days.
    world.block_on(worker.sleep(Duration::from_secs(1_000_000))).unwrap();
    assert!(world.now() >= Duration::from_secs(1_000_000));
}

struct Guard(Rc<Cell<bool>>);
impl Drop for Guard {
    fn drop(&mut self) {
        self.0.set(true);
    }
}

#[test]
fn the_power_fails_at_once() {
    let (world, worker, file) = world(11);
    let dropped = Rc::new(Cell::new(false));
    let (inner, guard, other) = (worker.clone(), Guard(Rc::clone(&dropped)), file.clone());
    world.hold(OpFilter::of(OpClass::Write));
    drop(worker.spawn(async move {
        let _guard = guard;
        let _ = write(&inner, &other, 0, 1, 512).await;
        unreachable!("nothing runs after the power failed");
    }));
    world.run_until_idle().unwrap();
    drop(world);
    assert!(dropped.get());
    let mut bufs: IoBufs = IoBuf::zeroed(512).into();
    bufs.fill(0, 512, 1);
    let (result, _) = worker.block_on(worker.write(&file, 0, bufs));
    assert_eq!(result.unwrap_err().kind, IoErrorKind::Os(libc::EBADF));
}

#[test]
fn o_direct_requests_are_checked_and_padded_writes_read_first() {
    let world = SimWorld::new(12);
    let worker = world.worker();
    let initial = Content::from_bytes(&[9; 8192]);
    let file = world.file(FILE, initial, SimFileConfig::direct(4096));
    world.block_on(async { write(&worker, &file, 100, 1, 5000).await }).unwrap().unwrap();
    let bytes = world.content(FILE).unwrap().bytes(0..8192);
    assert_eq!(bytes, [vec![9; 100], vec![1; 5000], vec![9; 3092]].concat());
    for event in world.log().events() {
        if let LogEvent::Submitted { what, .. } = event {
            assert!(what.range().start % 4096 == 0 && what.range().end % 4096 == 0, "{what:?}");
        }
    }
}

#[test]
fn a_worker_can_block_on_its_own() {
    let (world, worker, file) = world(13);
    worker.block_on(async {
        write(&worker, &file, 0, 1, 4096).await.unwrap();
        worker.sleep(Duration::from_millis(5)).await;
        assert_eq!(read(&worker, &file, 0, 1).await.unwrap(), [1]);
        assert_eq!(worker.run_blocking(|| 1).await, 1);
    });
    assert!(world.now() >= Duration::from_millis(5));
    let disk: SimDisk = world.disk();
    drop(world);
    assert_eq!(disk.content(FILE).unwrap().len(), 4096);
}

#[test]
fn a_background_is_one_more_worker() {
    let world = SimWorld::new(1);
    let worker = world.worker();
    let background = Background::beside(&worker).unwrap();
    let running = background.run(|on| async move { on.id() });
    assert_eq!(world.block_on(running).unwrap(), Ok(1));
    drop(background);
    world.run_until_idle().unwrap();
}
