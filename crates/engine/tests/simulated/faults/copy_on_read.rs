//! Clusters that are filled from the backing image while guests change them.

use crate::crash::setup::{Origin, Setup};
use crate::faults::bench::Bench;
use futures_util::future::join_all;
use zebu_engine::{Durability, ExtentKind, ZeroMode};
use zebu_storage::sabotage::{self, Limit};

const PATTERN: u64 = 64 << 10;

fn setup(seed: u64) -> Setup {
    let origin = [Origin::RawBase, Origin::Qcow2Base, Origin::DeepChain][(seed % 3) as usize];
    let extended_l2 = seed % 5 == 4;
    let cluster_size = if extended_l2 { 16 << 10 } else { 4096 };
    Setup { origin, pattern: PATTERN, workers: 2, extended_l2, cluster_size, ..Setup::plain() }
}

/// Guests zero and write every cluster, each once, while all of them are filled.
fn fill_beside(seed: u64) {
    sabotage::limit(Limit::WindowBytes, 1);
    let bench = Bench::new(&setup(seed), seed);
    let (guest, image) = (bench.guest.clone(), bench.guest.image.clone());
    let tasks = (0..16u64).map(|cluster| {
        let (guest, worker) = (guest.clone(), bench.workers[1].clone());
        bench.workers[1].spawn(async move {
            let offset = cluster * 4096;
            match (cluster + seed) % 4 {
                0 => guest.write(&worker, offset + 512, 1024, Durability::Volatile).await,
                1 => guest.discard(&worker, offset, 4096).await,
                _ => guest.zero(&worker, offset, 4096, ZeroMode::Unmap).await,
            }
        })
    });
    let fills = (0..4u64).map(|part| {
        let (image, worker) = (image.clone(), bench.workers[0].clone());
        bench.workers[0].spawn(async move {
            image.fill_from_backing(&worker, part * (PATTERN / 4), PATTERN / 4).await.unwrap();
        })
    });
    let all: Vec<_> = tasks.chain(fills).collect();
    bench.world.block_on(join_all(all)).unwrap();
    bench.read_whole().unwrap();
    assert_eq!(guest.violation.borrow().as_deref(), None, "seed {seed}");
    bench.flush().unwrap();
    bench.crash_states(seed, 8).unwrap();
    bench.close().unwrap();
    sabotage::limit(Limit::WindowBytes, u64::MAX);
}

#[test]
pub(crate) fn what_is_changed_beside_a_copy_stays() {
    for seed in 0..150 {
        fill_beside(seed);
    }
}

#[test]
fn what_was_filled_is_the_images_own_and_zeroes_take_no_space() {
    for seed in 0..15 {
        let bench = Bench::new(&setup(seed), seed);
        let (image, worker) = (&bench.guest.image, &bench.workers[0]);
        let size = image.virtual_size();
        // A part, around which whole clusters come.
        let first = bench.world.block_on(image.fill_from_backing(worker, 5000, 10)).unwrap().unwrap();
        assert!((512..=16 << 10).contains(&first), "{first}");
        let rest = bench.world.block_on(image.fill_from_backing(worker, 0, size)).unwrap().unwrap();
        assert_eq!(first + rest, PATTERN, "seed {seed}");
        let again = bench.world.block_on(image.fill_from_backing(worker, 0, size)).unwrap().unwrap();
        assert_eq!(again, 0);
        let mut at = 0;
        while at < size {
            let extent = bench.world.block_on(image.extent(worker, at, size - at)).unwrap().unwrap();
            let is_own = extent.depth == 0 && matches!(extent.kind, ExtentKind::Data { .. });
            assert_eq!(is_own, at < PATTERN, "seed {seed}: {extent:?}");
            at = extent.end();
        }
        bench.read_whole().unwrap();
        bench.flush().unwrap();
        bench.crash_states(seed, 30).unwrap();
        bench.close().unwrap();
    }
}
