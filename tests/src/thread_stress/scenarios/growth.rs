//! Growing beside reads.

use super::stage::{Stage, must, read, shared, worker, write};
use crate::thread_stress::recorder::fail;
use std::sync::atomic::{AtomicBool, Ordering};
use zebu_engine::{CreateOptions, Format, Image, Preallocation, Shrink};

/// The part that an overlay grows by is zero, although its backing file has data there and a reader looks at its last cluster.
pub(super) fn growth_beside_reads(stage: &mut Stage) {
    const KIB: u64 = 1024;
    let worker = worker();
    for round in 0..8 {
        stage.step();
        let base = stage.dir.join("base");
        let end = (512 + 4 * stage.random.between(1, 12)) * KIB;
        let base_cluster = *stage.random.pick(&[512, 4096]);
        worker.block_on(async {
            let options = CreateOptions::default().size(Some(1 << 20)).cluster_size(base_cluster);
            must("create", Image::create(&worker, &base, &options).await);
            let image = must("open", Image::open(&worker, &base, &shared(None)).await);
            write(&worker, &image, end, 576 * KIB - end, 77).await;
            must("close", image.close(&worker).await);
        });
        let options = CreateOptions::default().size(Some(end)).backing(Some(("base".into(), Format::Qcow2)));
        stage.create(&worker, &options);
        let image = stage.open(&worker, &shared(None));
        let (is_over, has_begun) = (AtomicBool::new(false), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let worker = super::stage::worker();
                while !is_over.load(Ordering::SeqCst) {
                    let found = worker.block_on(read(&worker, &image, 512 * KIB, 4096));
                    has_begun.store(true, Ordering::SeqCst);
                    if found.iter().any(|byte| *byte != 0) {
                        fail("what nobody wrote is not zero");
                    }
                }
            });
            while !has_begun.load(Ordering::SeqCst) {
                std::thread::yield_now();
            }
            let result = worker.block_on(image.resize(&worker, 1 << 30, Shrink::Refuse, Preallocation::Off));
            is_over.store(true, Ordering::SeqCst);
            must("resize", result);
        });
        must("close", worker.block_on(image.close(&worker)));
        drop(image);
        let image = stage.open(&worker, &shared(None));
        let found = worker.block_on(read(&worker, &image, end, 576 * KIB - end));
        must("close", worker.block_on(image.close(&worker)));
        if found.iter().any(|byte| *byte != 0) {
            fail(&format!("round {round}: what the disk grew by shows the backing file"));
        }
    }
}
