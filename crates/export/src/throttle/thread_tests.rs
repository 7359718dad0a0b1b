//! Limits that real threads wait for.

use super::{ExportThrottle, LimitGroup, Limits};
use crate::metrics::RequestKind;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use std::num::NonZeroU64;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};
use zebu_engine::storage::{Worker, WorkerConfig};

fn some(number: u64) -> Option<NonZeroU64> {
    NonZeroU64::new(number)
}

#[test]
fn waiters_on_threads_keep_the_limit_and_all_go() {
    const THREADS: u64 = 4;
    const EACH: u64 = 50;
    let group = LimitGroup::new("shared", &Limits::default().iops(some(1000)).burst(some(1)));
    let ready = Barrier::new(THREADS as usize);
    let began = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                let worker = Worker::new(&WorkerConfig::default()).unwrap();
                let throttle = ExportThrottle::default();
                throttle.set_group(Some(&group));
                ready.wait();
                worker.block_on(async {
                    let passes: Vec<_> =
                        (0..EACH).map(|_| throttle.pass(&worker, RequestKind::Read, 0)).collect();
                    futures_all(passes).await;
                });
                assert_eq!(throttle.stats().waiting, 0);
            });
        }
    });
    let least = Duration::from_micros((THREADS * EACH - 1) * 1000);
    assert!(began.elapsed() >= least, "{:?}", began.elapsed());
    assert_eq!((group.members(), group.waiting()), (0, 0));
}

/// The limit would have them wait for days: it is changed, and then they are released, while they sleep on another thread.
#[test]
fn limits_that_change_reach_who_sleeps_on_another_thread() {
    let throttle = ExportThrottle::default();
    throttle.set_limits(&Limits::default().iops(some(1)).burst(some(1)));
    let went = AtomicU64::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let worker = Worker::new(&WorkerConfig::default()).unwrap();
            worker.block_on(async {
                let passes: Vec<_> = (0..100_000)
                    .map(|_| async {
                        throttle.pass(&worker, RequestKind::Write, 512).await;
                        went.fetch_add(1, SeqCst);
                    })
                    .collect();
                futures_all(passes).await;
            });
        });
        while throttle.stats().waiting < 99_000 {
            std::thread::yield_now();
        }
        throttle.set_limits(&Limits::default().iops(some(1_000_000)).burst(some(50_000)));
        while went.load(SeqCst) < 50_000 {
            std::thread::yield_now();
        }
        throttle.set_limits(&Limits::default().iops(some(1)));
        throttle.release();
    });
    assert_eq!(went.load(SeqCst), 100_000);
    let stats = throttle.stats();
    assert!(stats.waiting == 0 && stats.waited > 0 && stats.nanoseconds > 0, "{stats:?}");
}

/// Waits for all, looking only at those that were woken.
async fn futures_all<F: Future<Output = ()>>(futures: Vec<F>) {
    let mut all: FuturesUnordered<F> = futures.into_iter().collect();
    while all.next().await.is_some() {}
}
