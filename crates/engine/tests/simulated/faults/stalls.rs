//! Disks, threads and machines that stand still for seconds or minutes, and clocks that leap: what is under way waits, nothing
//! fails, and what was flushed is there.

use crate::crash::guest::Guest;
use crate::crash::setup::{BASE, Origin, Setup, TOP};
use crate::faults::bench::{Bench, Outcome, begin};
use std::rc::Rc;
use std::time::Duration;
use zebu_engine::storage::Worker;
use zebu_engine::{Durability, NewBitmap, NewSnapshot, SnapshotRef, ZeroMode};
use zebu_sim::{Fault, FaultRule, HoldId, OpClass, OpFilter, Seeds, SimRng, Step};

const SECOND: Duration = Duration::from_secs(1);
/// The longest stall.
const MINUTES: Duration = Duration::from_secs(300);

/// Seconds that something stands still.
const LENGTHS: [u64; 8] = [1, 5, 29, 31, 45, 62, 120, 300];

/// Steps of an operation's life at which the stall may begin.
const STEPS: u64 = 90;

/// The request that is under way when the stall begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Operation {
    Write,
    Zero,
    Trim,
    Flush,
    Grow,
    Shrink,
    TakeSnapshot,
    ApplySnapshot,
    DeleteSnapshot,
    AddBitmap,
    RemoveBitmap,
}

const OPERATIONS: [Operation; 11] = [
    Operation::Write,
    Operation::Zero,
    Operation::Trim,
    Operation::Flush,
    Operation::Grow,
    Operation::Shrink,
    Operation::TakeSnapshot,
    Operation::ApplySnapshot,
    Operation::DeleteSnapshot,
    Operation::AddBitmap,
    Operation::RemoveBitmap,
];

/// The operation that stands still.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stalled {
    /// One operation of the disk.
    One,
    /// All operations that are under way, and those that come.
    Disk,
    /// A thread that has promised to drive its worker.
    Thread,
    /// All threads, as while a machine sleeps: time goes on when they do.
    Machine,
}

const ALL: [Stalled; 4] = [Stalled::One, Stalled::Disk, Stalled::Thread, Stalled::Machine];

fn setups() -> [Setup; 5] {
    let plain =
        Setup { origin: Origin::Own, size: 64 * 4096, pattern: 48 * 4096, workers: 3, ..Setup::plain() };
    [
        plain.clone(),
        Setup {
            extended_l2: true,
            cluster_size: 16384,
            origin: Origin::Qcow2Base,
            size: 20 * 16384,
            pattern: 16 * 16384,
            ..plain.clone()
        },
        Setup {
            cluster_size: 512,
            refcount_bits: 64,
            slice_size: Some(512),
            size: 256 * 512,
            pattern: 200 * 512,
            ..plain.clone()
        },
        Setup { external_data: true, ..plain.clone() },
        Setup { direct: 4096, ..plain },
    ]
}

/// Snapshots of images with a data file are refused.
fn is_possible(setup: &Setup, operation: Operation) -> bool {
    let is_of_snapshots =
        matches!(operation, Operation::TakeSnapshot | Operation::ApplySnapshot | Operation::DeleteSnapshot);
    !(is_of_snapshots && setup.external_data)
}

/// Makes what the operation needs.
async fn prepare(operation: Operation, guest: &Guest, on: &Worker) -> zebu_engine::Result<()> {
    match operation {
        Operation::ApplySnapshot | Operation::DeleteSnapshot => {
            guest.image.create_snapshot(on, NewSnapshot::named("one")).await.map(drop)
        }
        Operation::RemoveBitmap => guest.image.add_bitmap(on, &NewBitmap::named("one")).await,
        _ => Ok(()),
    }
}

async fn perform(operation: Operation, guest: Rc<Guest>, on: Worker) {
    let (cluster, size) = (guest.cluster, guest.image.virtual_size());
    let one = SnapshotRef::Name("one".to_owned());
    let done = match operation {
        Operation::Write => {
            guest.write(&on, size - 8 * cluster, 3 * cluster, Durability::Durable).await;
            Ok(())
        }
        Operation::Zero => {
            guest.zero(&on, 512, 4 * cluster, ZeroMode::Keep).await;
            guest.write(&on, cluster, 512, Durability::Volatile).await;
            Ok(())
        }
        Operation::Trim => {
            guest.discard(&on, 0, 6 * cluster).await;
            guest.write(&on, cluster, 512, Durability::Volatile).await;
            Ok(())
        }
        Operation::Flush => {
            guest.flush(&on).await;
            Ok(())
        }
        Operation::Grow => {
            guest.resize(&on, size + 64 * cluster).await;
            Ok(())
        }
        Operation::Shrink => {
            guest.resize(&on, size - 2 * cluster).await;
            Ok(())
        }
        Operation::TakeSnapshot => {
            guest.image.create_snapshot(&on, NewSnapshot::named("two")).await.map(drop)
        }
        // What the guest finds after it is not for its model: it is one with what was there before.
        Operation::ApplySnapshot => guest.image.apply_snapshot(&on, &one).await,
        Operation::DeleteSnapshot => guest.image.delete_snapshot(&on, &one).await,
        Operation::AddBitmap => guest.image.add_bitmap(&on, &NewBitmap::named("one")).await,
        Operation::RemoveBitmap => guest.image.remove_bitmap(&on, "one").await,
    };
    if let Err(error) = done {
        guest.blame(format!("{operation:?}: {error}"));
    }
}

/// Requests beside the operation. None beside one after which the disk is another one.
async fn beside(operation: Operation, number: u64, guest: Rc<Guest>, on: Worker) {
    if operation == Operation::ApplySnapshot {
        return;
    }
    let cluster = guest.cluster;
    let at = 8 * cluster * (number + 1);
    guest.read(&on, 0, 8 * cluster).await;
    guest.write(&on, at, 2 * cluster, Durability::Volatile).await;
    guest.flush(&on).await;
    guest.zero(&on, at, cluster, ZeroMode::Keep).await;
    guest.write(&on, at + 512, 512, Durability::Volatile).await;
    guest.discard(&on, at + cluster, cluster).await;
    guest.flush(&on).await;
}

/// The way back from a stall.
enum Standing {
    Nothing,
    Hold(HoldId),
    Workers(Vec<usize>),
}

fn stall(bench: &Bench, what: Stalled, length: Duration, rng: &mut SimRng) -> Standing {
    match what {
        Stalled::One => {
            let rule = FaultRule::new(OpFilter::default(), Fault::Delay(length)).nth(rng.below(4));
            bench.world.inject(rule);
            Standing::Nothing
        }
        Stalled::Disk => Standing::Hold(bench.world.hold(OpFilter::default())),
        Stalled::Thread => {
            bench.world.pause(1);
            Standing::Workers(vec![1])
        }
        Stalled::Machine => {
            // Whoever looks at the clock sees that it has leapt.
            bench.world.leap(length);
            Standing::Nothing
        }
    }
}

fn end_stall(bench: &Bench, standing: Standing) {
    match standing {
        Standing::Nothing => {}
        Standing::Hold(hold) => bench.world.release(hold),
        Standing::Workers(workers) => workers.into_iter().for_each(|worker| bench.world.resume(worker)),
    }
}

/// Runs until all is over; the stall ends after its length. Time leaps now and then.
fn wait_for_all(
    bench: &Bench,
    all: &[Outcome<()>],
    standing: Standing,
    until: Duration,
    rng: &mut SimRng,
) -> Result<(), String> {
    let mut standing = Some(standing);
    for _ in 0..2_000_000 {
        if all.iter().all(|outcome| outcome.borrow().is_some()) && standing.is_none() {
            return Ok(());
        }
        if bench.world.now() >= until
            && let Some(standing) = standing.take()
        {
            end_stall(bench, standing);
        }
        let is_idle = bench.world.step() == Step::Idle;
        if is_idle && standing.is_none() && all.iter().any(|outcome| outcome.borrow().is_none()) {
            return Err(bench.world.deadlock().to_string());
        }
        if is_idle || rng.chance(1, 200) {
            bench.world.leap(SECOND * rng.between(1, 20) as u32);
        }
    }
    Err("no end in sight".to_owned())
}

/// One stall beside one operation. True if something was under way then.
fn run(seed: u64) -> Result<bool, String> {
    let mut rng = SimRng::new(seed ^ 0x7374_616c);
    let operation = OPERATIONS[seed as usize % OPERATIONS.len()];
    let what = ALL[seed as usize / OPERATIONS.len() % ALL.len()];
    let mut setup = rng.pick(&setups()).clone();
    if !is_possible(&setup, operation) {
        setup = setups()[0].clone();
    }
    let length = SECOND * *rng.pick(&LENGTHS) as u32;
    let bench = Bench::new(&setup, rng.next_u64());
    let on = bench.workers[2].clone();
    bench.world.block_on(prepare(operation, &bench.guest, &on)).unwrap().map_err(|e| e.to_string())?;
    let mut all = vec![begin(&bench.workers[2], perform(operation, bench.guest.clone(), on))];
    all.extend((0..2).map(|number: usize| {
        let on = bench.workers[number].clone();
        begin(&bench.workers[number], beside(operation, number as u64, bench.guest.clone(), on))
    }));
    for _ in 0..rng.below(STEPS) {
        bench.world.step();
    }
    let is_under_way = all.iter().any(|outcome| outcome.borrow().is_none());
    let until = bench.world.now() + length;
    let standing = stall(&bench, what, length, &mut rng);
    let told = |why: String| format!("{operation:?} beside {what:?} for {length:?}: {why}");
    wait_for_all(&bench, &all, standing, until, &mut rng).map_err(told)?;
    if let Some(violation) = bench.guest.violation.borrow_mut().take() {
        return Err(told(violation));
    }
    bench.flush().map_err(|error| told(format!("a flush after it: {error}")))?;
    bench.crash_states(seed, 3).map_err(told)?;
    bench.read_whole().map_err(told)?;
    bench.close().map_err(told)?;
    Ok(is_under_way)
}

/// `ZEBU_SEEDS`: more of them.
#[test]
fn nothing_fails_because_something_stands_still() {
    let mut met = 0;
    let seeds = Seeds::new(528).run(|seed| {
        met += u64::from(run(seed).unwrap_or_else(|violation| panic!("{violation}")));
    });
    assert!(met * 2 >= seeds, "{met} of {seeds} stalls met something");
}

fn with_subclusters() -> Bench {
    Bench::new(&setups()[1], 7)
}

/// A read of the backing image takes minutes. Meanwhile a part of a cluster is zeroed, and written at once.
#[test]
pub(crate) fn a_read_that_takes_minutes_holds_up_no_write() {
    let bench = with_subclusters();
    let slow = FaultRule::new(OpFilter::of(OpClass::Read).on_file(BASE).by_worker(0), Fault::Delay(MINUTES));
    let cluster = bench.guest.cluster;
    let (guest, on) = (&bench.guest, &bench.workers[1]);
    bench.world.block_on(guest.write(on, 0, cluster, Durability::Volatile)).unwrap();
    bench.world.inject(slow.nth(0));
    let (theirs, on) = (guest.clone(), bench.workers[0].clone());
    let read = begin(&bench.workers[0], async move { theirs.read(&on, 8 * cluster, cluster).await });
    bench.world.run_until(|| bench.world.pending().iter().any(|(op, _)| &*op.file == BASE)).unwrap();
    let (theirs, on) = (guest.clone(), bench.workers[1].clone());
    let written = begin(&bench.workers[1], async move {
        theirs.zero(&on, 0, 4096, ZeroMode::Keep).await;
        theirs.write(&on, 512, 512, Durability::Volatile).await;
        theirs.flush(&on).await;
    });
    bench.end(&written, "a write beside a read that takes minutes");
    assert!(read.borrow().is_none(), "the write has waited for the read");
    bench.end(&read, "the read");
    assert_eq!(guest.violation.borrow().as_deref(), None);
    bench.read_whole().unwrap();
    bench.close().unwrap();
}

/// A write in its place takes minutes. One into what was zeroed meanwhile waits for it.
#[test]
pub(crate) fn a_write_that_takes_minutes_fails_no_other() {
    let bench = with_subclusters();
    let (guest, on) = (&bench.guest, &bench.workers[1]);
    bench.world.block_on(guest.write(on, 0, guest.cluster, Durability::Volatile)).unwrap();
    let writes = OpFilter::of(OpClass::Write).on_file(TOP).by_worker(0);
    bench.world.inject(FaultRule::new(writes, Fault::Delay(MINUTES)).nth(0));
    let (theirs, on) = (guest.clone(), bench.workers[0].clone());
    let slow =
        begin(&bench.workers[0], async move { theirs.write(&on, 512, 512, Durability::Volatile).await });
    bench.world.run_until(|| !bench.world.pending().is_empty()).unwrap();
    let (theirs, on) = (guest.clone(), bench.workers[1].clone());
    let later = begin(&bench.workers[1], async move {
        theirs.zero(&on, 0, 4096, ZeroMode::Keep).await;
        theirs.write(&on, 1024, 512, Durability::Volatile).await;
    });
    bench.end(&later, "a write into what was zeroed beside another");
    assert!(slow.borrow().is_some(), "it could still land on what was zeroed");
    assert_eq!(guest.violation.borrow().as_deref(), None);
    bench.read_whole().unwrap();
    bench.close().unwrap();
}

/// A thread that has promised to drive its worker stands still for minutes in the midst of a write, or of a flush that it
/// leads. Others wait for it, and nothing fails.
#[test]
pub(crate) fn a_thread_that_has_promised_to_go_on_is_waited_for() {
    let mut waited = [0; 3];
    for steps in 0..60 {
        let bench = Bench::new(&setups()[0], steps);
        let (guest, on) = (bench.guest.clone(), bench.workers[1].clone());
        assert!(on.is_driven() && !bench.workers[2].is_driven());
        let still = begin(&bench.workers[1], async move {
            guest.write(&on, 50 * 4096, 2 * 4096, Durability::Volatile).await;
            guest.flush(&on).await;
        });
        for _ in 0..steps {
            bench.world.step();
        }
        bench.world.pause(1);
        let operations = [Operation::Flush, Operation::TakeSnapshot, Operation::Grow];
        let all = operations.map(|operation| {
            let on = bench.workers[2].clone();
            begin(&bench.workers[2], perform(operation, bench.guest.clone(), on))
        });
        let until = bench.world.now() + MINUTES;
        while bench.world.now() < until {
            if bench.world.step() == Step::Idle {
                bench.world.leap(SECOND);
            }
        }
        for (waited, outcome) in waited.iter_mut().zip(&all) {
            *waited += u32::from(outcome.borrow().is_none());
        }
        bench.crash_states(steps, 2).unwrap();
        bench.world.resume(1);
        for outcome in &all {
            bench.end(outcome, "an operation beside a thread that stood still");
        }
        bench.end(&still, "the flush");
        assert_eq!(bench.guest.violation.borrow().as_deref(), None, "{steps} steps");
        bench.read_whole().unwrap();
        bench.close().unwrap();
    }
    assert!(waited.iter().all(|waited| *waited > 0), "{waited:?}: nobody waited, the test shows nothing");
}
