//! A failing plan made small: requests are left out as long as it still fails.

use crate::torture::plan::{Phase, Plan};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};
use zebu_sim::{FaultRates, LogKeep, Tally};

/// Orders of events that are tried for each smaller plan: without some requests, the same order is not to be had.
const ORDERS: u64 = 6;
/// Runs that the search may take, and how long it goes on beginning them: whoever waits for it wants to see what failed.
const RUNS: u64 = 1500;
const PATIENCE: Duration = Duration::from_secs(60);
/// Lines of the log that are shown.
const LOG_LINES: usize = 60;

struct Search {
    runs: u64,
    start: Instant,
}

impl Search {
    fn is_over(&self) -> bool {
        self.runs >= RUNS || self.start.elapsed() >= PATIENCE
    }

    /// The plan with an order of events in which it fails, if one is found.
    fn failing(&mut self, plan: &Plan) -> Option<Plan> {
        for order in 0..ORDERS {
            if self.is_over() {
                return None;
            }
            self.runs += 1;
            let plan = Plan { seed: plan.seed.wrapping_add(order), ..plan.clone() };
            if outcome(&plan).is_err() {
                return Some(plan);
            }
        }
        None
    }
}

/// The outcome of a run; a panic is a failure like any other.
pub(crate) fn outcome(plan: &Plan) -> Result<(), String> {
    catch_unwind(AssertUnwindSafe(|| plan.run())).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        Err(text.or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned())).unwrap_or_default())
    })
}

/// Every request of a plan: life, phase, stream, place; a resize as a stream of its own.
pub(crate) fn pieces(plan: &Plan) -> Vec<(usize, usize, usize, usize)> {
    let mut all = Vec::new();
    for (life, phases) in plan.lives.iter().enumerate() {
        for (phase, Phase { streams, resize }) in phases.iter().enumerate() {
            for (stream, requests) in streams.iter().enumerate() {
                all.extend((0..requests.len()).map(|at| (life, phase, stream, at)));
            }
            if resize.is_some() {
                all.push((life, phase, usize::MAX, 0));
            }
        }
    }
    all
}

/// The plan without some of its pieces. Lives, phases and streams that have nothing left go too.
fn without(plan: &Plan, gone: &[(usize, usize, usize, usize)]) -> Plan {
    let stays = |piece| !gone.contains(&piece);
    let lives = plan.lives.iter().enumerate().map(|(life, phases)| {
        let phases = phases.iter().enumerate().map(|(phase, whole)| {
            let streams = whole.streams.iter().enumerate().map(|(stream, requests)| {
                let left = requests.iter().enumerate().filter(|(at, _)| stays((life, phase, stream, *at)));
                left.map(|(_, request)| *request).collect::<Vec<_>>()
            });
            let resize = whole.resize.filter(|_| stays((life, phase, usize::MAX, 0)));
            Phase { streams: streams.filter(|requests| !requests.is_empty()).collect(), resize }
        });
        phases.filter(|phase| !phase.streams.is_empty() || phase.resize.is_some()).collect::<Vec<_>>()
    });
    Plan { lives: lives.filter(|phases| !phases.is_empty()).collect(), ..plan.clone() }
}

/// A small plan that fails, of one that fails.
pub(crate) fn shrunk(plan: &Plan) -> Plan {
    let mut search = Search { runs: 0, start: Instant::now() };
    let mut plan = Plan { tally: Tally::default(), ..plan.clone() };
    let quiet = Plan { rates: FaultRates::default(), ..plan.clone() };
    if let Some(quiet) = search.failing(&quiet) {
        plan = quiet;
    }
    let mut chunk = pieces(&plan).len().div_ceil(2);
    while chunk > 0 {
        let mut at = 0;
        let mut has_shrunk = false;
        loop {
            let all = pieces(&plan);
            let Some(gone) = all.get(at..(at + chunk).min(all.len())).filter(|gone| !gone.is_empty()) else {
                break;
            };
            if let Some(smaller) = search.failing(&without(&plan, gone)) {
                plan = smaller;
                has_shrunk = true;
            } else {
                at += chunk;
            }
        }
        if chunk == 1 && !has_shrunk {
            break;
        }
        chunk = if chunk == 1 { 1 } else { chunk.div_ceil(2) };
        if search.is_over() {
            break;
        }
    }
    plan
}

/// The report of a failing plan: the smallest that was found, what is wrong, and what the disk was asked.
pub(crate) fn report(plan: &Plan, violation: &str) -> String {
    let small = shrunk(plan);
    let (count, of) = (pieces(&small).len(), pieces(plan).len());
    let (again, log) = catch_unwind(AssertUnwindSafe(|| small.run_keeping(LogKeep::All)))
        .unwrap_or_else(|_| (Err("a panic".to_owned()), String::new()));
    let again = again.err().unwrap_or_else(|| violation.to_owned());
    let lines: Vec<&str> = log.lines().collect();
    let tail = lines[lines.len().saturating_sub(LOG_LINES)..].join("\n");
    format!(
        "{violation}\n\nshrunk to {count} of {of} requests, which fail with: {again}\n{small}\nthe disk at the end of it:\n{tail}"
    )
}
