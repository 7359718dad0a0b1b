//! A worker that stops being polled, whatever it has begun, holds up nobody else.

use crate::crash::guest::Guest;
use crate::crash::setup::{Origin, Setup};
use crate::faults::bench::Bench;
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;
use zebu_engine::storage::Worker;
use zebu_engine::{Durability, NewSnapshot, ZeroMode};

const CLUSTER: u64 = 4096;
/// The first half of the disk is the idle worker's, the second one the other's.
const HALF: u64 = 32 * CLUSTER;

/// An operation that the idle worker has under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Begun {
    Write,
    WriteCompressed,
    Discard,
    Zero,
    Read,
    Flush,
    Snapshot,
    Resize,
}

const ALL: [Begun; 8] = [
    Begun::Write,
    Begun::WriteCompressed,
    Begun::Discard,
    Begun::Zero,
    Begun::Read,
    Begun::Flush,
    Begun::Snapshot,
    Begun::Resize,
];

impl Begun {
    /// Whether operations that are alone with the image have to wait for its end.
    fn is_request(self) -> bool {
        !matches!(self, Begun::Flush | Begun::Snapshot | Begun::Resize)
    }
}

async fn begin(begun: Begun, guest: Rc<Guest>, worker: Worker) {
    match begun {
        Begun::Write => guest.write(&worker, 512, 3 * CLUSTER, Durability::Volatile).await,
        Begun::WriteCompressed => {
            guest.write_compressed(&worker, 4 * CLUSTER, 4 * CLUSTER, Durability::Volatile).await;
        }
        Begun::Discard => guest.discard(&worker, 0, 8 * CLUSTER).await,
        Begun::Zero => guest.zero(&worker, 512, 6 * CLUSTER, ZeroMode::Unmap).await,
        Begun::Read => guest.read(&worker, 0, 16 * CLUSTER).await,
        Begun::Flush => guest.flush(&worker).await,
        Begun::Snapshot => drop(guest.image.create_snapshot(&worker, NewSnapshot::named("idle")).await),
        Begun::Resize => guest.resize(&worker, 80 * CLUSTER).await,
    }
}

async fn go_on(begun: Begun, guest: Rc<Guest>, worker: Worker) {
    guest.read(&worker, HALF, 8 * CLUSTER).await;
    guest.write(&worker, HALF + 512, 2 * CLUSTER, Durability::Volatile).await;
    guest.discard(&worker, HALF + 8 * CLUSTER, 8 * CLUSTER).await;
    guest.flush(&worker).await;
    guest.write_compressed(&worker, HALF + 16 * CLUSTER, 4 * CLUSTER, Durability::Volatile).await;
    guest.flush(&worker).await;
    if !begun.is_request() {
        guest.image.create_snapshot(&worker, NewSnapshot::named("other")).await.unwrap();
    }
}

fn setup() -> Setup {
    Setup {
        origin: Origin::Own,
        size: 2 * HALF,
        pattern: 2 * HALF,
        slice_size: Some(512),
        cache_size: Some(8 << 10),
        gather_memory: Some(16 << 10),
        ..Setup::plain()
    }
}

/// Worker 0 begins something and is not polled any more after `steps` steps; worker 1 goes on. True if worker 0 was still
/// at it.
fn run(begun: Begun, steps: u64) -> bool {
    let bench = Bench::new(&setup(), steps);
    // Something to commit and to release.
    bench.world.block_on(bench.guest.discard(&bench.workers[0], 20 * CLUSTER, 4 * CLUSTER)).unwrap();
    bench
        .world
        .block_on(bench.guest.write(&bench.workers[0], 28 * CLUSTER, CLUSTER, Durability::Volatile))
        .unwrap();
    let over = Rc::new(Cell::new([false; 2]));
    let (guest, on, flag) = (bench.guest.clone(), bench.workers[0].clone(), over.clone());
    drop(bench.workers[0].spawn(async move {
        begin(begun, guest, on).await;
        flag.set([true, flag.get()[1]]);
    }));
    for _ in 0..steps {
        bench.world.step();
    }
    bench.world.pause(0);
    let was_under_way = !over.get()[0];
    let (guest, on, flag) = (bench.guest.clone(), bench.workers[1].clone(), over.clone());
    drop(bench.workers[1].spawn(async move {
        go_on(begun, guest, on).await;
        flag.set([flag.get()[0], true]);
    }));
    let went_on = bench.world.run_until(|| over.get()[1]);
    assert!(went_on.is_ok(), "{begun:?}, idle after {steps} steps: {}", went_on.unwrap_err());
    bench.crash_states(steps, 8).unwrap();
    bench.world.resume(0);
    bench.world.run_until(|| over.get()[0]).unwrap();
    assert_eq!(bench.guest.violation.borrow().as_deref(), None, "{begun:?}, idle after {steps} steps");
    bench.read_whole().unwrap();
    bench.close().unwrap();
    was_under_way
}

#[test]
pub(crate) fn a_worker_that_is_not_polled_holds_up_nobody_else() {
    for begun in ALL {
        let under_way = (0..40).filter(|steps| run(begun, steps * 3)).count();
        assert!(under_way > 0, "{begun:?} was over each time: the test shows nothing");
    }
}

/// Worker 0 begins a request and is not polled any more after `steps` steps; worker 1 wants to be alone with the image, and
/// has space released; worker 2 goes on. True if worker 1 had to wait for worker 0.
fn run_beside_one_who_wants_to_be_alone(begun: Begun, wants: Begun, steps: u64) -> bool {
    let bench = Bench::new(&Setup { workers: 3, ..setup() }, steps);
    bench
        .world
        .block_on(bench.guest.write(&bench.workers[0], 28 * CLUSTER, CLUSTER, Durability::Volatile))
        .unwrap();
    let over = Rc::new(Cell::new([false; 3]));
    let set = |flag: &Cell<[bool; 3]>, index: usize| {
        let mut all = flag.get();
        all[index] = true;
        flag.set(all);
    };
    let (guest, on, flag) = (bench.guest.clone(), bench.workers[0].clone(), over.clone());
    drop(bench.workers[0].spawn(async move {
        begin(begun, guest, on).await;
        set(&flag, 0);
    }));
    for _ in 0..steps {
        bench.world.step();
    }
    bench.world.pause(0);
    let (guest, on, flag) = (bench.guest.clone(), bench.workers[1].clone(), over.clone());
    drop(bench.workers[1].spawn(async move {
        guest.discard(&on, 20 * CLUSTER, 4 * CLUSTER).await;
        guest.flush(&on).await;
        begin(wants, guest, on).await;
        set(&flag, 1);
    }));
    let (guest, on, flag) = (bench.guest.clone(), bench.workers[2].clone(), over.clone());
    drop(bench.workers[2].spawn(async move {
        for _ in 0..3 {
            // By then the other one wants to be alone.
            on.sleep(Duration::from_secs(1)).await;
            go_on(begun, guest.clone(), on.clone()).await;
        }
        set(&flag, 2);
    }));
    let went_on = bench.world.run_until(|| over.get()[2]);
    let had_to_wait = !over.get()[1];
    assert!(
        went_on.is_ok(),
        "{begun:?}, idle after {steps} steps, beside {wants:?}: {}",
        went_on.unwrap_err()
    );
    bench.world.resume(0);
    bench.world.run_until(|| over.get() == [true; 3]).unwrap();
    assert_eq!(bench.guest.violation.borrow().as_deref(), None, "{begun:?}, idle after {steps} steps");
    bench.read_whole().unwrap();
    bench.close().unwrap();
    had_to_wait
}

#[test]
pub(crate) fn one_who_has_to_wait_for_a_worker_that_is_not_polled_holds_up_nobody_else() {
    // A discard of what is in the cache is over at once.
    for begun in [Begun::Write, Begun::WriteCompressed, Begun::Zero, Begun::Read] {
        for wants in [Begun::Snapshot, Begun::Resize] {
            let waited = (0..20)
                .filter(|steps| run_beside_one_who_wants_to_be_alone(begun, wants, steps * 5 + 1))
                .count();
            assert!(waited > 0, "{wants:?} never waited for {begun:?}: the test shows nothing");
        }
    }
}
