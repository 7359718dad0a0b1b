//! What a reader of the change that bounds waits for reads looked for.

use crate::crash::setup::{Origin, Setup, TOP};
use crate::faults::bench::Bench;
use std::cell::RefCell;
use std::rc::Rc;
use zebu::{Durability, ErrorKind, NewBitmap, NewSnapshot, SnapshotRef};
use zebu_sim::{OpClass, OpInfo};
use zebu_storage::Worker;

const CLUSTER: u64 = 4096;

type Outcome<T> = Rc<RefCell<Option<T>>>;

fn begin<T: 'static>(worker: &Worker, work: impl Future<Output = T> + 'static) -> Outcome<T> {
    let outcome = Outcome::default();
    let theirs = outcome.clone();
    drop(worker.spawn(async move { *theirs.borrow_mut() = Some(work.await) }));
    outcome
}

fn end<T>(bench: &Bench, outcome: &Outcome<T>, what: &str) -> T {
    let ended = bench.world.run_until(|| outcome.borrow().is_some());
    assert!(ended.is_ok(), "{what}: {}", ended.unwrap_err());
    outcome.borrow_mut().take().expect("it has ended")
}

fn sleeping_read(bench: &Bench, steps: u64, len: u64) -> Outcome<()> {
    let (guest, on) = (bench.guest.clone(), bench.workers[0].clone());
    let read = begin(&bench.workers[0], async move { guest.read(&on, 0, len).await });
    for _ in 0..steps {
        bench.world.step();
    }
    bench.world.pause(0);
    read
}

/// F1: a bitmap is added after a discard, beside a read that begins meanwhile, and whose worker then stands still.
#[test]
fn a_bitmap_does_not_wait_without_end_for_a_read_that_began_meanwhile() {
    let mut stuck = Vec::new();
    for steps in 0..120 {
        let setup =
            Setup { origin: Origin::Own, size: 64 * CLUSTER, pattern: 48 * CLUSTER, workers: 3, ..Setup::plain() };
        let bench = Bench::new(&setup, 3);
        bench.world.block_on(bench.guest.discard(&bench.workers[1], 20 * CLUSTER, 4 * CLUSTER)).unwrap();
        let (image, on) = (bench.guest.image.clone(), bench.workers[1].clone());
        let added = begin(&bench.workers[1], async move { image.add_bitmap(&on, &NewBitmap::named("one")).await });
        for _ in 0..steps {
            bench.world.step();
        }
        let read = sleeping_read(&bench, 1 + steps % 3, 16 * CLUSTER);
        if bench.world.run_until(|| added.borrow().is_some()).is_err() {
            stuck.push(steps);
            continue;
        }
        bench.world.resume(0);
        end(&bench, &read, "the read");
    }
    assert!(stuck.is_empty(), "without end, beside a read that began after so many steps: {stuck:?}");
}

/// F2: the same for a snapshot that needs more clusters for its L1 table than the window for tables has left.
#[test]
fn a_snapshot_does_not_wait_without_end_for_a_read_that_began_meanwhile() {
    let mut stuck = Vec::new();
    for tables in 110..130 {
        for steps in (0..200).step_by(4) {
            let setup = Setup { cluster_size: 512, size: 8 << 20, workers: 3, ..Setup::plain() };
            let bench = Bench::new(&setup, 3);
            for table in 0..tables {
                let write = bench.guest.write(&bench.workers[1], table * 32768, 512, Durability::Volatile);
                bench.world.block_on(write).unwrap();
            }
            bench.world.block_on(bench.guest.flush(&bench.workers[1])).unwrap();
            let (image, on) = (bench.guest.image.clone(), bench.workers[1].clone());
            let taken = begin(&bench.workers[1], async move {
                image.create_snapshot(&on, NewSnapshot::named("one")).await.map(drop)
            });
            for _ in 0..steps {
                bench.world.step();
            }
            let was_under_way = taken.borrow().is_none();
            let read = sleeping_read(&bench, 1 + steps % 3, 65536);
            if bench.world.run_until(|| taken.borrow().is_some()).is_err() {
                stuck.push((tables, steps));
                continue;
            }
            bench.world.resume(0);
            end(&bench, &read, "the read");
            if !was_under_way {
                break;
            }
        }
    }
    assert!(stuck.is_empty(), "without end (tables, steps): {stuck:?}");
}

/// F3: a snapshot is applied beside a flush that a worker leads, and whose thread then breaks its promise. If the
/// operation says that it failed and the image is still written, what is flushed afterwards is there after a crash.
#[test]
fn what_the_header_may_name_is_not_given_back() {
    let (mut busy, mut wrong) = (0, Vec::new());
    for steps in 0..60 {
        let setup =
            Setup { origin: Origin::Own, size: 64 * CLUSTER, pattern: 48 * CLUSTER, workers: 3, ..Setup::plain() };
        let bench = Bench::new(&setup, 3);
        let image = bench.guest.image.clone();
        let on = bench.workers[2].clone();
        bench.world.block_on(image.create_snapshot(&on, NewSnapshot::named("one"))).unwrap().unwrap();
        bench.world.block_on(bench.guest.write(&on, 0, 4 * CLUSTER, Durability::Volatile)).unwrap();
        bench.world.block_on(bench.guest.flush(&on)).unwrap();
        bench.guest.failures.set(crate::crash::guest::Failures::OfTheDisk);
        let applying = image.clone();
        let applied = begin(&bench.workers[2], async move {
            applying.apply_snapshot(&on, &SnapshotRef::Name("one".to_owned())).await
        });
        let of_header = |op: &OpInfo| &*op.file == TOP && op.class == OpClass::Write && op.range.start == 0;
        let is_named = || bench.world.pending().into_iter().any(|(op, _)| of_header(&op));
        bench.world.run_until(|| is_named() || applied.borrow().is_some()).unwrap();
        let (guest, on) = (bench.guest.clone(), bench.workers[1].clone());
        let flushed = begin(&bench.workers[1], async move { guest.try_flush(&on).await });
        for _ in 0..steps {
            bench.world.step();
        }
        bench.world.pause(1);
        bench.world.run_until(|| applied.borrow().is_some()).unwrap();
        let result = applied.borrow_mut().take().unwrap();
        bench.world.resume(1);
        end(&bench, &flushed, "the flush");
        let Err(error) = result else { continue };
        if error.kind() != ErrorKind::Busy {
            continue;
        }
        busy += 1;
        eprintln!("{steps}: {error}");
        let on = &bench.workers[0];
        if !bench.world.block_on(bench.guest.try_flush(on)).unwrap() {
            continue; // poisoned
        }
        for cluster in 0..24 {
            let write = bench.guest.write(on, cluster * CLUSTER, CLUSTER, Durability::Volatile);
            bench.world.block_on(write).unwrap();
        }
        if !bench.world.block_on(bench.guest.try_flush(on)).unwrap() {
            continue;
        }
        if let Err(violation) = bench.read_whole() {
            wrong.push((steps, violation));
        } else if let Err(violation) = bench.crash_states(1, 4) {
            wrong.push((steps, violation));
        }
    }
    assert!(wrong.is_empty(), "{busy} busy, wrong: {wrong:#?}");
    assert!(busy > 0, "never busy");
}
