//! More requests than the mapping cache has slices.

use super::stage::{Stage, content, must, shared, worker};
use crate::random::Random;
use crate::thread_stress::recorder::fail;
use std::cell::Cell;
use std::rc::Rc;
use zebu_engine::storage::{IoBuf, Worker};
use zebu_engine::{CacheMode, CreateOptions, Durability, Format, Image};

const DISK: u64 = 1 << 40;
const UNIT: u64 = 65536;

fn overlay(stage: &Stage, worker: &Worker) {
    let base = CreateOptions::default().size(Some(DISK));
    must("create", worker.block_on(Image::create(worker, &stage.dir.join("base"), &base)));
    let backing = Some(("base".into(), Format::Qcow2));
    stage.create(worker, &CreateOptions::default().size(Some(DISK)).backing(backing));
}

/// Random requests of 4 KiB all over the disk, so many at once on one worker and so many in all; each is a read or a
/// write.
fn requests(stage: &mut Stage, image: &Image, at_once: u64, count: u64, reads: u64) {
    let worker = worker();
    let left = Rc::new(Cell::new(count));
    let lanes: Vec<_> = (0..at_once)
        .map(|lane| {
            let (on, image, left) = (worker.clone(), image.clone(), left.clone());
            let mut random = Random::new(stage.random.bits() + lane);
            worker.spawn(async move {
                while left.get() > 0 {
                    left.set(left.get() - 1);
                    let offset = random.below(DISK / UNIT) * UNIT;
                    if random.chance(reads) {
                        must("read", image.read(&on, offset, IoBuf::zeroed(4096).into()).await.0);
                    } else {
                        let bufs = IoBuf::copy_of(&content(offset | 1, offset, 4096)).into();
                        must("write", image.write(&on, offset, bufs, Durability::Volatile).await.0);
                    }
                }
            })
        })
        .collect();
    worker.block_on(async {
        for lane in lanes {
            lane.await;
        }
    });
    stage.step();
}

/// An overlay with a cache of so many bytes. What is not synced is not waited for: how long a disk takes for that is
/// nothing that is looked at here.
fn opened(stage: &Stage, worker: &Worker, cache_size: Option<u64>) -> Image {
    overlay(stage, worker);
    stage.open(worker, &shared(cache_size).cache(CacheMode::Unsafe))
}

pub(super) fn small_cache(stage: &mut Stage) {
    let first = worker();
    let (cache_size, at_once) = *stage.random.pick(&[
        (Some(150_000), 3),
        (Some(4_000_000), 32),
        (Some(16_000_000), 128),
        (None, 512),
    ]);
    let image = opened(stage, &first, cache_size);
    for _ in 0..10 {
        requests(stage, &image, at_once, 300.max(4 * at_once), 25);
    }
    must("close", first.block_on(image.close(&first)));
}

pub(super) fn cache_limit(stage: &mut Stage) {
    let first = worker();
    let (cache_size, at_once) =
        *stage.random.pick(&[(70_000, 2), (200_000, 4), (1_000_000, 16), (1_000_000, 512)]);
    let image = opened(stage, &first, Some(cache_size));
    for _ in 0..16 {
        requests(stage, &image, at_once, 200.max(2 * at_once), 25);
        let stats = image.stats();
        if stats.cache_bytes > 2 * stats.cache_limit + (1 << 20) {
            fail(&format!("the cache holds {} bytes, its limit is {}", stats.cache_bytes, stats.cache_limit));
        }
    }
    must("close", first.block_on(image.close(&first)));
}
