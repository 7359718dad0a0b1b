//! A machine that is busy: the tests shall pass on it, too.

use crate::nextest::Tests;
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use zebu_bench::Outcome;
use zebu_bench::workspace::target_dir;

/// Threads that never give their processor up.
const SPINNERS: usize = 30;
/// Tests at once.
const AT_ONCE: usize = 16;
/// Runs of each watched test.
const TIMES: u32 = 20;
/// The file that is written again and again, in MiB.
const WRITTEN: usize = 64;

/// Runs the watched tests 20 times, then all tests once, beside 30 busy threads and a writer to the disk.
pub(crate) fn command(tests: Tests) -> Outcome {
    println!("{SPINNERS} busy threads and a writer; each watched test {TIMES} times, then all tests once");
    let scratch = tempfile::tempdir_in(target_dir()?).map_err(|e| e.to_string())?;
    let path = scratch.path().join("written");
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..SPINNERS {
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
        let outcome = tests.under_load(AT_ONCE, TIMES);
        over.store(true, Ordering::Relaxed);
        let wrote = writer.join().map_err(|_| "the writer panicked".to_owned());
        outcome.and(wrote?.map_err(|e| format!("{}: {e}", path.display())))
    })
}
