//! Operations that are alone with the image beside a read or a flush whose worker stands still.

use crate::crash::setup::{Origin, Setup, TOP};
use crate::faults::bench::{Bench, Outcome, begin};
use std::time::Duration;
use zebu_engine::{Durability, ErrorKind, NewBitmap, NewSnapshot, SnapshotRef};
use zebu_sim::{OpClass, OpFilter, OpInfo};

const CLUSTER: u64 = 4096;

fn sleeping_read(bench: &Bench, steps: u64, len: u64) -> Outcome<()> {
    let (guest, on) = (bench.guest.clone(), bench.workers[0].clone());
    let read = begin(&bench.workers[0], async move { guest.read(&on, 0, len).await });
    for _ in 0..steps {
        bench.world.step();
    }
    bench.world.pause(0);
    read
}

/// A bitmap is added after a discard, beside a read that begins meanwhile, and whose worker then stands still.
#[test]
fn a_bitmap_does_not_wait_without_end_for_a_read_that_began_meanwhile() {
    let mut stuck = Vec::new();
    for steps in 0..120 {
        let setup = Setup {
            origin: Origin::Own,
            size: 64 * CLUSTER,
            pattern: 48 * CLUSTER,
            workers: 3,
            ..Setup::plain()
        };
        let bench = Bench::new(&setup, 3);
        bench.world.block_on(bench.guest.discard(&bench.workers[1], 20 * CLUSTER, 4 * CLUSTER)).unwrap();
        let (image, on) = (bench.guest.image.clone(), bench.workers[1].clone());
        let added =
            begin(&bench.workers[1], async move { image.add_bitmap(&on, &NewBitmap::named("one")).await });
        for _ in 0..steps {
            bench.world.step();
        }
        let read = sleeping_read(&bench, 1 + steps % 3, 16 * CLUSTER);
        if bench.world.run_until(|| added.borrow().is_some()).is_err() {
            stuck.push(steps);
            continue;
        }
        bench.world.resume(0);
        bench.end(&read, "the read");
    }
    assert!(stuck.is_empty(), "without end, beside a read that began after so many steps: {stuck:?}");
}

/// The same for a snapshot that needs more clusters for its L1 table than the window for tables has left.
#[test]
fn a_snapshot_does_not_wait_without_end_for_a_read_that_began_meanwhile() {
    let mut stuck = Vec::new();
    for tables in 124..128 {
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
            bench.end(&read, "the read");
            if !was_under_way {
                break;
            }
        }
    }
    assert!(stuck.is_empty(), "without end (tables, steps): {stuck:?}");
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Operation {
    Apply,
    Take,
    Delete,
    AddBitmap,
    Grow,
}

/// An operation beside a flush that a worker leads, and whose thread then stands still for minutes. It waits, and succeeds. What
/// is flushed afterwards is there after a crash.
fn the_header_and_memory_agree(operation: Operation) {
    let mut waited = 0;
    for (nth, steps) in (1..5).flat_map(|nth| (0..36).map(move |steps| (nth, steps))) {
        let setup = Setup {
            origin: Origin::Own,
            size: 64 * CLUSTER,
            pattern: 48 * CLUSTER,
            workers: 3,
            ..Setup::plain()
        };
        let (seed, steps) = (steps / 12, steps % 12);
        let bench = Bench::new(&setup, seed);
        let image = bench.guest.image.clone();
        let on = bench.workers[2].clone();
        bench.world.block_on(image.create_snapshot(&on, NewSnapshot::named("zero"))).unwrap().unwrap();
        bench.world.block_on(image.create_snapshot(&on, NewSnapshot::named("one"))).unwrap().unwrap();
        if operation != Operation::Apply {
            // The model of the guest knows nothing of going back.
            bench.world.block_on(bench.guest.write(&on, 0, 4 * CLUSTER, Durability::Volatile)).unwrap();
            bench.world.block_on(bench.guest.flush(&on)).unwrap();
        }
        let theirs = image.clone();
        let done = begin(&bench.workers[2], async move {
            let one = SnapshotRef::Name("one".to_owned());
            match operation {
                Operation::Apply => theirs.apply_snapshot(&on, &one).await,
                Operation::Take => theirs.create_snapshot(&on, NewSnapshot::named("two")).await.map(drop),
                Operation::Delete => theirs.delete_snapshot(&on, &one).await,
                Operation::AddBitmap => theirs.add_bitmap(&on, &NewBitmap::named("one")).await,
                Operation::Grow => {
                    theirs
                        .resize(&on, 4 << 30, zebu_engine::Shrink::Refuse, zebu_engine::Preallocation::Off)
                        .await
                }
            }
        });
        let of_header = |op: &OpInfo| &*op.file == TOP && op.class == OpClass::Write && op.range.start == 0;
        let is_named = || bench.world.pending().into_iter().any(|(op, _)| of_header(&op));
        for _ in 0..nth {
            bench.world.run_until(|| !is_named() || done.borrow().is_some()).unwrap();
            bench.world.run_until(|| is_named() || done.borrow().is_some()).unwrap();
        }
        let (guest, on) = (bench.guest.clone(), bench.workers[1].clone());
        let flushed = begin(&bench.workers[1], async move { guest.flush(&on).await });
        for _ in 0..steps {
            bench.world.step();
        }
        bench.world.pause(1);
        for _ in 0..5 {
            bench.world.run_until_idle().unwrap();
            bench.world.leap(Duration::from_secs(60));
        }
        waited += u32::from(done.borrow().is_none());
        bench.world.resume(1);
        let result = bench.end(&done, "the operation");
        assert!(result.is_ok(), "{operation:?}, {nth}, {steps}: {}", result.unwrap_err());
        bench.end(&flushed, "the flush");
        let on = &bench.workers[0];
        for cluster in 0..24 {
            let write = bench.guest.write(on, cluster * CLUSTER, CLUSTER, Durability::Volatile);
            bench.world.block_on(write).unwrap();
        }
        bench.world.block_on(bench.guest.flush(on)).unwrap();
        assert_eq!(bench.guest.violation.borrow().as_deref(), None, "{operation:?}, {nth}, {steps}");
        let mut sound = bench.read_whole().and_then(|()| guests_data_after_a_crash(&bench));
        if operation != Operation::Grow {
            // The model of the guest knows nothing of the growth.
            sound = sound.and_then(|()| bench.crash_states(1, 4));
        }
        sound.unwrap_or_else(|violation| {
            panic!("{operation:?}, header write {nth}, {steps} steps: {violation}");
        });
    }
    assert!(waited > 0, "never in the way: the test shows nothing");
}

/// Checks the disk after the image was opened again to be written, which mends what a dirty bit tells of.
fn guests_data_after_a_crash(bench: &Bench) -> Result<(), String> {
    for state in bench.world.crash_states(&zebu_sim::CrashOptions {
        max_states: 4,
        tear: zebu_sim::Tear::Sector,
        seed: 1,
    }) {
        let files = state.files().to_vec();
        let world = bench.setup.world(&files, 0);
        let worker = world.worker();
        let image = bench.setup.open(&world, &worker)?;
        let len = image.virtual_size().min(bench.guest.model.borrow().len());
        let read = crate::crash::judge::read_all(&worker, &image, len);
        let bytes = world.block_on(read).map_err(|stuck| stuck.to_string())??;
        bench.guest.model.borrow().check(0, &bytes).map_err(|v| v.to_string())?;
    }
    Ok(())
}

#[test]
fn the_header_and_memory_agree_after_an_apply() {
    the_header_and_memory_agree(Operation::Apply);
}
#[test]
fn the_header_and_memory_agree_after_a_snapshot() {
    the_header_and_memory_agree(Operation::Take);
}
#[test]
fn the_header_and_memory_agree_after_a_delete() {
    the_header_and_memory_agree(Operation::Delete);
}
#[test]
fn the_header_and_memory_agree_after_a_bitmap() {
    the_header_and_memory_agree(Operation::AddBitmap);
}
#[test]
fn the_header_and_memory_agree_after_growth() {
    the_header_and_memory_agree(Operation::Grow);
}

/// A snapshot after a discard whose punch takes long, with no read anywhere.
#[test]
fn a_slow_punch_is_not_called_a_read() {
    let setup = Setup {
        origin: Origin::Own,
        size: 64 * CLUSTER,
        pattern: 48 * CLUSTER,
        workers: 3,
        ..Setup::plain()
    };
    let bench = Bench::new(&setup, 3);
    let hold = bench.world.hold(OpFilter::of(OpClass::Punch).on_file(TOP));
    bench.world.block_on(bench.guest.discard(&bench.workers[1], 20 * CLUSTER, 4 * CLUSTER)).unwrap();
    bench.world.block_on(bench.guest.flush(&bench.workers[1])).unwrap();
    let (image, on) = (bench.guest.image.clone(), bench.workers[1].clone());
    let taken = begin(&bench.workers[1], async move {
        image.create_snapshot(&on, NewSnapshot::named("one")).await.map(drop)
    });
    let until = bench.world.now() + Duration::from_secs(100);
    while taken.borrow().is_none() && bench.world.now() < until && bench.world.step() != zebu_sim::Step::Idle
    {
    }
    let told = taken.borrow_mut().take();
    bench.world.release(hold);
    let told = told.unwrap_or_else(|| bench.end(&taken, "the snapshot"));
    assert!(told.is_ok(), "{}", told.unwrap_err());
}

/// After a close that says Busy, the image is open (docs of `Disk::close`), and a later close does it.
#[test]
fn a_close_that_is_busy_can_be_done_again() {
    let (mut busy, mut closed) = (0, Vec::new());
    for steps in 0..200 {
        let (seed, steps, more) = (steps / 100, steps / 10 % 10 * 3, steps % 10);
        let setup = Setup {
            origin: Origin::Own,
            size: 64 * CLUSTER,
            pattern: 48 * CLUSTER,
            workers: 3,
            ..Setup::plain()
        };
        let bench = Bench::new(&setup, seed);
        bench.guest.failures.set(crate::crash::guest::Failures::Closed);
        let image = bench.guest.image.clone();
        let write = bench.guest.write(&bench.workers[2], 50 * CLUSTER, 4 * CLUSTER, Durability::Volatile);
        bench.world.block_on(write).unwrap();
        let close = || {
            let (image, on) = (image.clone(), bench.workers[2].clone());
            begin(&bench.workers[2], async move { image.close(&on).await })
        };
        let first = close();
        for _ in 0..steps {
            bench.world.step();
        }
        let (guest, on) = (bench.guest.clone(), bench.workers[0].clone());
        let written = begin(&bench.workers[0], async move {
            guest.write(&on, 20 * CLUSTER, CLUSTER, Durability::Volatile).await;
        });
        for _ in 0..more {
            bench.world.step();
        }
        bench.world.pause(0);
        let result = bench.end(&first, "the close");
        bench.world.resume(0);
        bench.end(&written, "the write");
        let Err(error) = result else { continue };
        assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
        busy += 1;
        if let Err(again) = bench.end(&close(), "the second close") {
            closed.push((seed, steps, more, error.to_string(), again.to_string()));
        }
    }
    assert!(closed.is_empty() && busy > 0, "{} of {busy}: {:#?}", closed.len(), closed.first());
}
