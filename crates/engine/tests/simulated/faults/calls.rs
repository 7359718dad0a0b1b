//! A thread that calls, as those of a `Disk` do, beside threads that are always driven.

use crate::crash::guest::Guest;
use crate::crash::setup::{Origin, Setup};
use crate::faults::bench::Bench;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;
use zebu_engine::Durability;
use zebu_sim::{Fault, FaultRule, OpClass, OpFilter, Seeds, SimCaller, SimRng, Tally};

/// Streams of requests, one of which is a thread's that makes a call of each, and crashes at random moments.
fn live(seed: u64, tally: &Tally) -> Result<(), String> {
    let mut rng = SimRng::new(seed ^ 0x6361_6c6c);
    let setup = Setup::random(&mut rng);
    let bench = Bench::new(&setup, rng.next_u64());
    bench.count_in(tally);
    let (caller, host) = (bench.world.caller(), bench.world.worker());
    for _ in 0..2 {
        let calls = host.spawn(calls(bench.guest.clone(), caller.clone(), rng.fork(), 12));
        bench.streams_beside(&mut rng, 3, 12, calls)?;
    }
    bench.read_whole()?;
    bench.close().map_err(|violation| format!("{violation}\n{setup:?}"))
}

async fn calls(guest: Rc<Guest>, caller: SimCaller, mut rng: SimRng, calls: u64) {
    for _ in 0..calls {
        if guest.violation.borrow().is_some() {
            return;
        }
        caller.call(async |worker| guest.request(&worker, &mut rng).await);
        // Others come first.
        let mut has_yielded = false;
        poll_fn(|cx| {
            cx.waker().wake_by_ref();
            if std::mem::replace(&mut has_yielded, true) { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }
}

#[test]
fn requests_of_a_thread_that_calls_find_what_they_may() {
    let seeds = Seeds::new(30);
    seeds.run(|seed| live(seed, seeds.tally()).unwrap());
}

/// Reads in sequence begin to read tables ahead. Nobody waits for that; but space that is given up is not used again before it
/// is over, and the thread that has called may never call again.
#[test]
pub(crate) fn a_call_ends_with_what_it_reads_ahead() {
    // A table has eight slices.
    const SLICE: u64 = 256 << 10;
    let setup = Setup {
        origin: Origin::Own,
        size: 8 * SLICE,
        pattern: 8 * SLICE,
        slice_size: Some(512),
        ..Setup::plain()
    };
    for nth in 0..6 {
        let bench = Bench::new(&setup, nth);
        let slow = FaultRule::new(OpFilter::of(OpClass::Read), Fault::Delay(Duration::from_secs(2))).nth(nth);
        bench.world.inject(slow);
        let caller = bench.world.caller();
        for slice in 0..3 {
            caller.call(async |worker| bench.guest.read(&worker, slice * SLICE, 512).await);
        }
        // The thread goes.
        let (guest, worker) = (&bench.guest, &bench.workers[0]);
        bench
            .world
            .block_on(async {
                guest.discard(worker, 6 * SLICE, 64 << 10).await;
                guest.write(worker, 0, 4096, Durability::Volatile).await;
                guest.flush(worker).await;
            })
            .unwrap();
        assert_eq!(guest.violation.borrow().as_deref(), None);
        bench.close().unwrap();
    }
}
