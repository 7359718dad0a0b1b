//! A machine that is busy: the tests shall pass on it, too.

use crate::nextest::{Busy, Tests};
use crate::tenth::Tenth;
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use zebu_bench::Outcome;
use zebu_bench::workspace::target_dir;

/// The load of the machine: tests at once, with the threads that do nothing else.
const LOAD: usize = 30;
/// The file that is written again and again, in MiB.
const WRITTEN: usize = 64;

/// Runs the watched tests so many times, each time those of another tenth, then all tests of `tests` once, beside a writer to the disk
/// and a thread for each processor that never gives it up. A round that
/// fails ends none of the others.
pub(crate) fn command(tests: Tests, rounds: u64) -> Outcome {
    let spinners = std::thread::available_parallelism().map_or(1, usize::from);
    let at_once = LOAD.saturating_sub(spinners + 1).max(1);
    println!("{spinners} busy threads, a writer, {at_once} tests at once");
    let busy = Busy::new(at_once)?;
    beside_load(spinners, || {
        let mut failed = Vec::new();
        let mut note = |what: String, outcome: Outcome| {
            let said = if outcome.is_ok() { "passed" } else { "failed" };
            println!("== {what}: {said}");
            failed.extend(outcome.is_err().then_some(what));
        };
        for round in 0..rounds {
            let what = format!("watched tests, round {} of {rounds}", round + 1);
            println!("== {what}");
            note(what, Tests { tenth: Tenth::One(round % 10), ..tests }.watched(&busy));
        }
        println!("== all tests");
        note("all tests".to_owned(), tests.all_of(&busy));
        if failed.is_empty() { Ok(()) } else { Err(format!("failed under load: {}", failed.join("; "))) }
    })
}

/// Does `work` on a machine that has no processor and no disk to spare.
fn beside_load(spinners: usize, work: impl FnOnce() -> Outcome) -> Outcome {
    let scratch = tempfile::tempdir_in(target_dir()?).map_err(|e| e.to_string())?;
    let path = scratch.path().join("written");
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..spinners {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        let writer = scope.spawn(|| {
            let piece = vec![0x5a; 1 << 20];
            while !over.load(Ordering::Relaxed) {
                let mut file = std::fs::File::create(&path)?;
                (0..WRITTEN).try_for_each(|_| file.write_all(&piece))?;
                file.sync_all()?;
            }
            Ok::<(), std::io::Error>(())
        });
        let outcome = work();
        over.store(true, Ordering::Relaxed);
        let wrote = writer.join().map_err(|_| "the writer panicked".to_owned());
        outcome.and(wrote?.map_err(|e| format!("{}: {e}", path.display())))
    })
}
