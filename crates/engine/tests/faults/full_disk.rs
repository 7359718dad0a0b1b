//! The disk fills up: whoever needs space is told so, nothing acknowledged is lost, and with space it goes on.

use crate::bench::Bench;
use crate::guest::Failures;
use crate::setup::{DATA, Setup, TOP};
use zebu::storage::sim::{Seeds, SimFileConfig, SimRng};
use zebu::{Durability, ErrorKind};

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
