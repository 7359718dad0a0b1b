//! Images made by QEMU in every shape, written by zebu with seeded streams: equal to a model by QEMU's comparison, and
//! clean by QEMU's check, without leaks.

use zebu_engine::CacheMode;
use zebu_engine::storage::Engine;
use zebu_tests::images::Shape;
use zebu_tests::qemu::Qemu;
use zebu_tests::run::Case;
use zebu_tests::tenth;

/// A tenth of the shapes of a version with one cluster size; the kinds of worker and of cache take turns.
fn matrix(version: u32, cluster: u64) {
    let Some(qemu) = Qemu::find() else { return };
    let mut failures = Vec::new();
    let shapes = (1..).zip(Shape::all(version, cluster));
    for (seed, shape) in tenth::of(shapes, Shape::first(version, cluster)) {
        let case = Case {
            shape,
            engine: if seed % 2 == 0 { Engine::Threads } else { Engine::IoUring },
            cache: if seed % 4 < 2 { CacheMode::None } else { CacheMode::Writeback },
            seed,
            ops: 120,
            depth: 8,
            queues: 1,
            cache_size: None,
        };
        if let Err(what) = case.run(&qemu) {
            failures.push(format!("{shape}: {what}"));
        }
    }
    assert!(failures.is_empty(), "{} shapes fail\n{}", failures.len(), failures.join("\n\n"));
}

#[test]
fn version_2_clusters_of_512_bytes() {
    matrix(2, 512);
}

#[test]
fn version_2_clusters_of_4_kib() {
    matrix(2, 4096);
}

#[test]
fn version_2_clusters_of_64_kib() {
    matrix(2, 65536);
}

#[test]
fn version_2_clusters_of_2_mib() {
    matrix(2, 2 << 20);
}

#[test]
fn version_3_clusters_of_512_bytes() {
    matrix(3, 512);
}

#[test]
fn version_3_clusters_of_4_kib() {
    matrix(3, 4096);
}

#[test]
fn version_3_clusters_of_64_kib() {
    matrix(3, 65536);
}

#[test]
fn version_3_clusters_of_2_mib() {
    matrix(3, 2 << 20);
}
