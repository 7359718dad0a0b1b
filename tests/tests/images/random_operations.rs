//! A few thousand random operations, on both kinds of worker, through the page cache and past it, with one queue and
//! several. `cargo xtask differential` runs as many as wanted.

use zebu_engine::CacheMode;
use zebu_engine::storage::Engine;
use zebu_tests::qemu::Qemu;
use zebu_tests::run::Case;

/// Six seeds, which choose what is not given.
fn run(engine: Engine, cache: CacheMode, queues: usize) {
    let Some(qemu) = Qemu::find() else { return };
    for seed in 1..=6 {
        let case = Case { engine, cache, queues, ..Case::chosen_by(seed + 100 * queues as u64, 250) };
        case.run(&qemu).unwrap_or_else(|what| panic!("{what}"));
    }
}

#[test]
fn io_uring_through_the_page_cache() {
    run(Engine::IoUring, CacheMode::Writeback, 1);
}

#[test]
fn io_uring_direct() {
    run(Engine::IoUring, CacheMode::None, 1);
}

#[test]
fn threads_through_the_page_cache() {
    run(Engine::Threads, CacheMode::Writeback, 1);
}

#[test]
fn threads_direct() {
    run(Engine::Threads, CacheMode::None, 1);
}

#[test]
fn two_queues() {
    run(Engine::IoUring, CacheMode::None, 2);
}

#[test]
fn four_queues() {
    run(Engine::Threads, CacheMode::Writeback, 4);
}
