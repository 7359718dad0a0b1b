//! The disk fills up: whoever needs space is told so, nothing acknowledged is lost, and with space it goes on.

use crate::crash::guest::Failures;
use crate::crash::limits::Limits;
use crate::crash::setup::{DATA, Setup, TOP};
use crate::faults::bench::{Bench, begin};
use futures_util::future::join_all;
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;
use zebu_engine::storage::FsKind;
use zebu_engine::{Durability, ErrorKind};
use zebu_sim::{Fault, FaultRule, OpClass, OpFilter, Seeds, SimFileConfig, SimRng};
use zebu_storage::sabotage::{Limit, limit};

pub(crate) fn fill_up(seed: u64) -> Result<usize, String> {
    let mut rng = SimRng::new(seed ^ 0x6675_6c6c_0000);
    let setup = Setup::random(&mut rng);
    let bench = Bench::new(&setup, seed);
    let said = |e: String| format!("{e}\n{setup:?}");
    bench.streams(&mut rng, 3, 6, Failures::Forbidden).map_err(said)?;
    for _ in 0..2 {
        let file = if setup.external_data && rng.chance(1, 2) { DATA } else { TOP };
        let used = bench.world.content(file).unwrap().disk_usage();
        bench.world.set_space(file, Some(used + rng.below(setup.cluster_size * 8) / 512 * 512));
        bench.streams(&mut rng, 3, 16, Failures::ForSpace).map_err(said)?;
        bench.read_whole().map_err(said)?;
        let _ = bench.flush();
        bench.crash_states(rng.next_u64(), 6).map_err(said)?;
        bench.world.set_space(file, None);
        bench.streams(&mut rng, 3, 6, Failures::Forbidden).map_err(said)?;
        bench.flush().map_err(|e| said(format!("with space again: {e}")))?;
    }
    let failed = bench.guest.failed.borrow().len();
    bench.close().map_err(said)?;
    Ok(failed)
}

#[test]
fn the_file_system_is_full_for_a_while() {
    let mut failed = 0;
    let ran = Seeds::new(80).run(|seed| match fill_up(seed) {
        Ok(requests) => failed += requests,
        Err(violation) => panic!("seed {seed}: {violation}"),
    });
    eprintln!("{failed} requests failed in {ran} seeds");
    assert!(failed > 0 || ran < 80, "the disk was never full");
}

/// The file may not grow (a quota, a limit on sizes): what is free in it is used to the last cluster, then requests
/// that need more fail; overwriting and reading go on.
#[test]
fn the_file_may_not_grow() {
    let setup = Setup { workers: 1, ..Setup::plain() };
    let bench = Bench::new(&setup, 1);
    let len = bench.world.content(TOP).unwrap().len();
    bench.world.open(TOP, SimFileConfig { max_len: Some(len + 6 * 4096), ..SimFileConfig::default() });
    bench.guest.failures.set(Failures::ForSpace);
    let write = |offset: u64| {
        bench
            .world
            .block_on(bench.guest.write(&bench.workers[0], offset, 4096, Durability::Volatile))
            .unwrap();
    };
    for cluster in 0..8 {
        write(cluster * 4096);
    }
    assert!(bench.guest.failed.borrow().iter().all(|kind| *kind == ErrorKind::NoSpace));
    let failed = bench.guest.failed.borrow().len();
    assert!(
        (1..=4).contains(&failed),
        "{failed} of 8 writes failed; 6 clusters were left, one of them for a table"
    );
    bench.flush().unwrap();
    write(0);
    assert_eq!(bench.guest.failed.borrow().len(), failed, "what is allocated can be overwritten");
    bench.read_whole().unwrap();
    // Discarded space can be used again at once.
    bench.world.block_on(bench.guest.discard(&bench.workers[0], 0, 4096)).unwrap();
    write(15 * 4096);
    assert_eq!(bench.guest.failed.borrow().len(), failed, "freed space is found when the file may not grow");
    bench.crash_states(1, 100).unwrap();
    bench.world.open(TOP, SimFileConfig::default());
    for cluster in 0..32 {
        write(cluster * 4096);
    }
    assert_eq!(bench.guest.failed.borrow().len(), failed, "works again when the limit is gone");
    bench.close().unwrap();
}

/// Many requests at once want the last clusters, while commits give some back: as long as there are as many as are
/// wanted, nobody is told that there is none.
#[test]
fn the_last_cluster_is_found_whoever_holds_it() {
    the_last_clusters_are_enough(1);
}

/// Requests that share a cluster need one of them together, so one that found no space looks at the cluster again.
#[test]
fn the_last_cluster_is_enough_for_all_requests_of_a_guest_cluster() {
    the_last_clusters_are_enough(4);
}

/// Writes each guest cluster by `parts` requests at once, where there are exactly as many host clusters.
fn the_last_clusters_are_enough(parts: u64) {
    Seeds::new(300).run(|seed| {
        let mut rng = SimRng::new(seed ^ 0x6c61_7374);
        let setup = Setup { workers: 2, ..Setup::plain() };
        let bench = Bench::new(&setup, seed);
        let clusters = setup.size / setup.cluster_size;
        let len = bench.world.content(TOP).unwrap().len();
        // One for the only L2 table.
        let max_len = Some(len + (clusters + 1) * setup.cluster_size);
        bench.world.open(TOP, SimFileConfig { max_len, ..SimFileConfig::default() });
        let mut missing: Vec<u64> = (0..clusters).collect();
        for round in 0..3 {
            rng.shuffle(&mut missing);
            let len = setup.cluster_size / parts;
            let places = missing
                .iter()
                .flat_map(|cluster| (0..parts).map(move |part| cluster * setup.cluster_size + part * len));
            let writes = places.enumerate().map(|(i, at)| {
                let worker = &bench.workers[i % bench.workers.len()];
                let (guest, on) = (bench.guest.clone(), worker.clone());
                let flushes = rng.chance(1, 8);
                worker.spawn(async move {
                    guest.write(&on, at, len, Durability::Volatile).await;
                    if flushes {
                        guest.flush(&on).await;
                    }
                })
            });
            bench.world.block_on(join_all(writes.collect::<Vec<_>>())).unwrap();
            if let Some(violation) = bench.guest.violation.borrow_mut().take() {
                panic!("seed {seed}, round {round}: {violation}");
            }
            missing = (0..clusters).filter(|_| rng.chance(1, 2)).collect();
            for cluster in &missing {
                let discard =
                    bench.guest.discard(&bench.workers[0], cluster * setup.cluster_size, setup.cluster_size);
                bench.world.block_on(discard).unwrap();
            }
        }
        bench.read_whole().unwrap();
        bench.close().unwrap();
    });
}

/// A read that takes minutes holds what the guest gave back. A write that finds a full file system waits for it, as QEMU's
/// succeeds.
#[test]
pub(crate) fn what_is_given_back_beside_a_slow_read_is_waited_for() {
    const PIECE: u64 = 64 << 10;
    Limits::ORDINARY.set();
    limit(Limit::WindowBytes, u64::MAX);
    let bench = Bench::new(&Setup { size: 8 << 20, workers: 2, ..Setup::plain() }, 1);
    bench.guest.failures.set(Failures::ForSpace);
    let write = |at: u64| {
        let write = bench.guest.write(&bench.workers[0], at, PIECE, Durability::Volatile);
        bench.world.block_on(write).unwrap();
    };
    (0..1 << 20).step_by(PIECE as usize).for_each(write);
    bench.flush().unwrap();
    let used = bench.world.content(TOP).unwrap().disk_usage();
    bench.world.set_space(TOP, Some(used + 4 * PIECE));
    let failed = || bench.guest.failed.borrow().len();
    let full = (1 << 20..8 << 20).step_by(PIECE as usize).find(|at| {
        write(*at);
        failed() > 0
    });
    let (full, before) = (full.expect("the file system is full"), failed());
    let reads = OpFilter::of(OpClass::Read).on_file(TOP).by_worker(1);
    bench.world.inject(FaultRule::new(reads, Fault::Delay(Duration::from_secs(300))).nth(0));
    let (guest, on) = (bench.guest.clone(), bench.workers[1].clone());
    let read = begin(&bench.workers[1], async move { guest.read(&on, 8 * PIECE, 4096).await });
    bench.world.run_until(|| !bench.world.pending().is_empty()).unwrap();
    bench.world.block_on(bench.guest.discard(&bench.workers[0], 0, 4 * PIECE)).unwrap();
    write(full);
    assert_eq!(failed(), before, "there was room once the read had ended");
    assert!(read.borrow().is_some(), "what was given back was used beside the read");
    // Nothing is on its way back now: others fail at once, however many there are.
    let both = [1, 2].map(|piece| {
        bench.guest.write(&bench.workers[0], full + piece * 8 * PIECE, 5 * PIECE, Durability::Volatile)
    });
    bench.world.block_on(join_all(both)).unwrap();
    assert_eq!(failed(), before + 2);
    bench.flush().unwrap();
    bench.crash_states(1, 8).unwrap();
    bench.read_whole().unwrap();
    bench.close().unwrap();
}

/// The room of tables is set aside when their window is made. Where there is none, or less than a window, the request
/// says so, or takes a smaller one; it does not try for ever.
#[test]
fn no_room_for_the_first_table() {
    for fs in [FsKind::Xfs, FsKind::Ext4] {
        for room in [0, 2, 5, 10, 40] {
            let setup = Setup { workers: 1, fs, ..Setup::plain() };
            let bench = Bench::new(&setup, 1);
            bench.guest.failures.set(Failures::ForSpace);
            let used = bench.world.content(TOP).unwrap().disk_usage();
            bench.world.set_space(TOP, Some(used + room * setup.cluster_size));
            let write = |cluster: u64| {
                let offset = cluster * setup.cluster_size;
                bench
                    .world
                    .block_on(bench.guest.write(
                        &bench.workers[0],
                        offset,
                        setup.cluster_size,
                        Durability::Volatile,
                    ))
                    .unwrap();
            };
            for cluster in 0..8 {
                write(cluster);
            }
            let failed = bench.guest.failed.borrow().len();
            // One for the table, one for its refcounts if they were in a hole, one for each write.
            let expected = 8u64.saturating_sub(room.saturating_sub(1)) as usize;
            assert!(
                (expected..=expected + 1).contains(&failed),
                "{fs:?}, room for {room} clusters: {failed} of 8 writes failed, not {expected}"
            );
            bench.world.set_space(TOP, None);
            for cluster in 0..8 {
                write(cluster);
            }
            assert_eq!(bench.guest.failed.borrow().len(), failed, "works again");
            bench.flush().unwrap();
            bench.read_whole().unwrap();
            bench.close().unwrap();
        }
    }
}

/// Where one commit follows the other and each gives something back, a release is always under way. Whoever needs a
/// cluster gets one of the first that are released, and does not wait for the end of it all.
#[test]
fn a_write_does_not_wait_for_the_end_of_all_discards() {
    let mut late = Vec::new();
    let ran = Seeds::new(50).run(|seed| {
        let setup = Setup { workers: 2, ..Setup::plain() };
        let bench = Bench::new(&setup, seed);
        let clusters = setup.size / setup.cluster_size;
        let len = bench.world.content(TOP).unwrap().len();
        let max_len = Some(len + clusters * setup.cluster_size);
        bench.world.open(TOP, SimFileConfig { max_len, ..SimFileConfig::default() });
        let at = |cluster: u64| cluster * setup.cluster_size;
        let write = |cluster: u64| {
            let (guest, on) = (bench.guest.clone(), bench.workers[0].clone());
            let (at, len) = (at(cluster), setup.cluster_size);
            bench.workers[0].spawn(async move { guest.write(&on, at, len, Durability::Volatile).await })
        };
        // All but one: there is no room for the last.
        for cluster in 0..clusters - 1 {
            bench.world.block_on(write(cluster)).unwrap();
        }
        let discarded = Rc::new(Cell::new(0));
        let discards: Vec<_> = (0..2)
            .map(|half| {
                let (guest, on) = (bench.guest.clone(), bench.workers[half as usize].clone());
                let (discarded, size) = (discarded.clone(), setup.cluster_size);
                bench.workers[half as usize].spawn(async move {
                    for cluster in half * clusters / 2..(half + 1) * clusters / 2 - 1 {
                        guest.discard(&on, cluster * size, size).await;
                        discarded.set(discarded.get() + 1);
                        guest.flush(&on).await;
                    }
                })
            })
            .collect();
        let last = write(clusters - 1);
        bench.world.block_on(last).unwrap();
        let before = discarded.get();
        bench.world.block_on(join_all(discards)).unwrap();
        if let Some(violation) = bench.guest.violation.borrow_mut().take() {
            panic!("seed {seed}: {violation}");
        }
        if before >= clusters / 2 {
            late.push((seed, before));
        }
        bench.read_whole().unwrap();
        bench.close().unwrap();
    });
    // In few orders of events, others come first again and again.
    assert!(late.len() as u64 <= 1 + ran / 10, "seeds, and clusters that were discarded first: {late:?}");
}

/// A stream on ext4 that finds no room for a whole window gives back what it got of it, and others use it.
#[test]
fn what_was_set_aside_of_a_window_that_did_not_fit_is_given_back() {
    let setup = Setup { workers: 1, fs: FsKind::Ext4, size: 1 << 20, ..Setup::plain() };
    let bench = Bench::new(&setup, 1);
    let write = |cluster: u64| {
        let write = bench.guest.write(
            &bench.workers[0],
            cluster * setup.cluster_size,
            setup.cluster_size,
            Durability::Volatile,
        );
        bench.world.block_on(write).unwrap();
    };
    // Its windows have 16, 32, 64 clusters; the first ones are used up, and the disk is written to beside it.
    for cluster in 0..48 {
        write(cluster);
    }
    let used = || bench.world.content(TOP).unwrap().disk_usage();
    let room = 20;
    bench.world.set_space(TOP, Some(used() + room * setup.cluster_size));
    let before = used();
    for cluster in 48..50 {
        write(cluster);
    }
    assert!(used() - before <= 4 * setup.cluster_size, "{} bytes taken for two clusters", used() - before);
    // Scattered ones have what is left.
    for cluster in (100..100 + 8 * 12).step_by(12) {
        write(cluster);
    }
    bench.flush().unwrap();
    bench.world.set_space(TOP, None);
    bench.read_whole().unwrap();
    bench.close().unwrap();
}
