//! Tables that are read ahead on a worker which then stands still: the guess is the engine's own, and holds nobody up.

use crate::crash::guest::Failures;
use crate::crash::setup::{Origin, Setup, TOP};
use crate::faults::bench::{Bench, begin};
use std::time::Duration;
use zebu::{Durability, NewBitmap, NewSnapshot, Shrink, SnapshotRef};
use zebu_sim::{HoldId, OpClass, OpFilter, SimFileConfig, Step};

const CLUSTER: u64 = 4096;
/// Bytes of the disk that a slice maps; a table has eight slices.
const SLICE: u64 = 64 * CLUSTER;

fn setup() -> Setup {
    Setup {
        origin: Origin::Own,
        size: 8 * SLICE,
        pattern: 7 * SLICE,
        slice_size: Some(512),
        workers: 3,
        ..Setup::plain()
    }
}

/// Reads in sequence on the first worker until a read-ahead is under way, which is held, and no read is.
fn begin_read_ahead(bench: &Bench) -> HoldId {
    bench.world.block_on(bench.guest.read(&bench.workers[0], 0, 512)).unwrap();
    // The load of one slice is let through, that of several is not.
    let after = bench.world.hold(OpFilter::of(OpClass::Read).on_file(TOP).by_worker(0));
    let (guest, on) = (bench.guest.clone(), bench.workers[0].clone());
    let read = begin(&bench.workers[0], async move { guest.read(&on, SLICE, 512).await });
    while bench.world.held(after).len() < 2 {
        assert_ne!(bench.world.step(), Step::Idle, "nothing is read ahead");
    }
    let held = bench.world.held(after);
    let ahead = held.iter().find(|op| op.range.end - op.range.start > 512).expect("several slices at once");
    let of_ahead = OpFilter::of(OpClass::Read).on_file(TOP).by_worker(0).touching(ahead.range.clone());
    let hold = bench.world.hold(of_ahead);
    bench.world.release(after);
    bench.end(&read, "the read of the guest");
    assert_eq!(bench.world.held(hold).len(), 1);
    hold
}

#[test]
fn nothing_waits_for_what_is_read_ahead() {
    let names = ["close", "apply", "shrink", "bitmap", "snapshot"];
    for (nth, name) in names.into_iter().enumerate() {
        let bench = Bench::new(&setup(), nth as u64);
        let (image, on) = (bench.guest.image.clone(), bench.workers[1].clone());
        let taken = image.create_snapshot(&bench.workers[1], NewSnapshot::named("one"));
        bench.world.block_on(taken).unwrap().unwrap();
        begin_read_ahead(&bench);
        bench.world.pause(0);
        bench.world.block_on(bench.guest.discard(&on, 7 * SLICE / 2, 4 * CLUSTER)).unwrap();
        let start = bench.world.now();
        let done = begin(&bench.workers[1], async move {
            match name {
                "close" => image.close(&on).await,
                "apply" => image.apply_snapshot(&on, &SnapshotRef::Name("one".to_owned())).await,
                "shrink" => image.resize(&on, 2 * SLICE, Shrink::Allow, zebu::Preallocation::Off).await,
                "bitmap" => image.add_bitmap(&on, &NewBitmap::named("new")).await,
                _ => image.create_snapshot(&on, NewSnapshot::named("two")).await.map(drop),
            }
        });
        let result = bench.end(&done, name);
        assert!(result.is_ok(), "{name}: {}", result.unwrap_err());
        // What needs slices that are read ahead waits a second for the first of them, and for no other.
        let took = bench.world.now().saturating_sub(start);
        assert!(took < Duration::from_secs(2), "{name} took {took:?}");
    }
}

/// A table is copied and gives its place up while slices of it are read ahead, and what is read is what lies there later.
#[test]
pub(crate) fn what_is_read_ahead_of_a_place_that_was_given_up_is_dropped() {
    let setup = Setup { size: 16 * SLICE, pattern: 8 * SLICE, ..setup() };
    let mut files = setup.make(8);
    // The table is not marked as the image's alone, as other writers leave it when a snapshot has gone. It will be copied.
    let top = &mut files[0].1;
    let word = |bytes: Vec<u8>| u64::from_be_bytes(bytes.try_into().unwrap());
    let l1 = word(top.bytes(40..48));
    let entry = word(top.bytes(l1..l1 + 8));
    top.write(l1, &(entry & !(1 << 63)).to_be_bytes());
    let table = entry & 0x00ff_ffff_ffff_fe00;
    let bench = Bench::with_files(&setup, &files, 8);
    let max_len = Some(bench.world.content(TOP).unwrap().len() + 40 * CLUSTER);
    bench.world.open(TOP, SimFileConfig { max_len, ..Default::default() });
    let own = &bench.workers[1];
    let hold = begin_read_ahead(&bench);
    let before = bench.world.content(TOP).unwrap().bytes(table..table + CLUSTER);
    assert!((table..table + CLUSTER).contains(&bench.world.held(hold)[0].range.start));
    bench.world.block_on(bench.guest.write(own, CLUSTER, CLUSTER, Durability::Volatile)).unwrap();
    for _ in 0..2 {
        bench.world.block_on(bench.guest.flush(own)).unwrap();
        // The release comes after it.
        bench.world.run_until_idle().unwrap();
    }
    // Whatever is free is used, to the last cluster.
    bench.guest.failures.set(Failures::ForSpace);
    bench
        .world
        .block_on(async {
            for cluster in 0..64 {
                bench.guest.write(own, 8 * SLICE + cluster * CLUSTER, CLUSTER, Durability::Volatile).await;
            }
        })
        .unwrap();
    assert!(!bench.guest.failed.borrow().is_empty(), "the disk is not full");
    let now = bench.world.content(TOP).unwrap().bytes(table..table + CLUSTER);
    assert_ne!(now, before, "the place of the table is not used again");
    assert_eq!(bench.world.held(hold).len(), 1, "what is read ahead is still under way");
    bench.world.release(hold);
    bench.world.run_until_idle().unwrap();
    bench.read_whole().unwrap();
    bench.flush().unwrap();
    bench.close().unwrap();
}
