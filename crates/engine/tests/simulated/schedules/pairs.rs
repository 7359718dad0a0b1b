//! Every pair of operations, in two threads or three.

use crate::schedules::explore::{executions, explore, tell_how_to_repeat};
use crate::schedules::ground::{self, Ground};
use crate::schedules::plan::{KINDS, Kind, Plan};
use crate::schedules::report::Report;
use crate::schedules::run::run;
use shuttle::rand::RngCore;
use std::sync::Mutex;
use std::sync::atomic::Ordering;
use std::time::Instant;
use zebu_sim::SimRng;

/// One execution of a pair, on an image and with a plan that the schedule's random numbers choose.
fn meet(grounds: &[Ground], kinds: [Kind; 2]) {
    let mut rng = SimRng::new(shuttle::rand::thread_rng().next_u64());
    let ground = rng.pick(grounds);
    let plan = Plan::random(&mut rng, ground, kinds);
    run(ground, &plan);
}

/// `ZEBU_PAIR=write+flush`: this pair alone. `ZEBU_REPLAY`: a schedule, or the name of a file with one.
#[test]
fn every_pair_of_operations() {
    let all: Vec<Ground> = ground::all().into_iter().filter(Ground::is_small).collect();
    ground::make(&all);
    let only = std::env::var("ZEBU_PAIR").ok();
    let mut pairs = Vec::new();
    for (index, (first, first_name)) in KINDS.iter().enumerate() {
        for (second, second_name) in &KINDS[index..] {
            let name = format!("{first_name}+{second_name}");
            let kinds = [*first, *second];
            let grounds: Vec<Ground> =
                all.iter().filter(|ground| kinds.iter().all(|kind| kind.suits(ground))).cloned().collect();
            if only.as_ref().is_none_or(|only| *only == name) {
                pairs.push((name, kinds, grounds));
            }
        }
    }
    assert!(!pairs.is_empty(), "no such pair: {only:?}");
    let count = pairs.len();
    let report = Report::of_pairs(count);
    let left = Mutex::new(pairs);
    let lanes = std::thread::available_parallelism().map_or(1, std::num::NonZero::get).min(count);
    std::thread::scope(|scope| {
        for _ in 0..lanes {
            scope.spawn(|| {
                loop {
                    let Some((name, kinds, grounds)) = left.lock().unwrap().pop() else { return };
                    let began = Instant::now();
                    let counted = report.counter();
                    let done = std::panic::catch_unwind(|| {
                        explore(executions(), move || {
                            counted.fetch_add(1, Ordering::Relaxed);
                            meet(&grounds, kinds);
                        });
                    });
                    if done.is_err() {
                        report.fail();
                        tell_how_to_repeat(&format!("ZEBU_PAIR='{name}'"), "pairs");
                    }
                    report.note_steps();
                    let each = began.elapsed().as_secs_f64() * 1e6 / executions() as f64;
                    eprintln!("{name}: {} executions, {each:.0} us each", executions());
                }
            });
        }
    });
    report.finish("pairs");
}
