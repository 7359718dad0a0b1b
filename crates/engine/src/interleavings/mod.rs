//! Effects of threads on each other, under schedules that shuttle chooses: at random, and (PCT) with a few switches at the
//! worst places. Every lock and every atomic of [`crate::sync`] is a place where another thread may go on; when all wait,
//! that is an error, so that a wake-up which is lost is seen at once.
//!
//! Shuttle has one memory: orders weaker than `SeqCst` are treated as that. `cargo xtask interleave` runs this; each
//! test has a counterpart that takes a defence away and must fail.

mod cache;
mod space;
mod stream_packer;
mod sync;

use shuttle::scheduler::ReplayScheduler;
use shuttle::{Config, Runner};
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::task::Poll;
use zebu_storage::sabotage::{Fault, under};

pub(super) use shuttle::future::block_on;
pub(super) use shuttle::thread::spawn;

/// How many switches at the wrong places PCT looks for.
const DEPTHS: [usize; 2] = [3, 5];

fn schedules() -> usize {
    std::env::var("ZEBU_SCHEDULES").ok().and_then(|text| text.parse().ok()).unwrap_or(1000)
}

/// Runs `scenario` under schedules of both kinds, or under that of `ZEBU_REPLAY` alone.
fn explore(scenario: fn()) {
    if is_repeated(scenario) {
        return;
    }
    explore_fairly(scenario);
    for depth in DEPTHS {
        shuttle::check_pct(scenario, schedules(), depth);
    }
}

/// Runs a `scenario` in which threads may undo each other's progress for as long as the schedule has it so: PCT, which
/// is not fair, would have it so for ever.
fn explore_fairly(scenario: fn()) {
    if !is_repeated(scenario) {
        shuttle::check_random(scenario, schedules());
    }
}

/// Runs `scenario` under the schedule of `ZEBU_REPLAY`, a string as it was printed or the path of a file that has it;
/// whether there is one.
fn is_repeated(scenario: fn()) -> bool {
    let Ok(schedule) = std::env::var("ZEBU_REPLAY") else { return false };
    // No schedule has a slash in it.
    let text = if schedule.contains('/') {
        std::fs::read_to_string(&schedule).expect("ZEBU_REPLAY names a file that can't be read")
    } else {
        schedule
    };
    let mut replay = ReplayScheduler::new_from_encoded(text.trim());
    // A scenario that no longer fails goes on behind it.
    replay.set_allow_incomplete();
    Runner::new(replay, Config::default()).run(scenario);
    true
}

/// Requires that some schedule shows that a defence is missing. Many more are tried than of the sound code.
fn is_caught(fault: Fault, scenario: fn()) {
    let attempts = schedules().max(1000) * 50;
    let fails = |run: &dyn Fn()| under(Some(fault), || catch_unwind(AssertUnwindSafe(run)).is_err()).0;
    let caught = DEPTHS.iter().any(|depth| fails(&|| shuttle::check_pct(scenario, attempts, *depth)))
        || fails(&|| shuttle::check_random(scenario, attempts));
    assert!(caught, "{fault:?} survives {attempts} schedules of each kind");
}

/// Polls a future once, with the waker of the thread's own task; then it is dropped.
async fn give_up_after_one_poll<F: Future>(future: F) {
    let mut future = Box::pin(future);
    std::future::poll_fn(|cx| {
        let _ = Pin::new(&mut future).poll(cx);
        Poll::Ready(())
    })
    .await;
}
