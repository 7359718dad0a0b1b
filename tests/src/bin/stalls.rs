//! Stalls of real disks, several at a time.

use clap::Parser;
use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use zebu_tests::qemu::Qemu;
use zebu_tests::stalled_kills::{Kill, Succession};
use zebu_tests::stalls::Stall;

#[derive(Parser)]
#[command(about = "Stall the disks of servers, and judge that nothing fails and nothing is lost")]
struct Options {
    /// The first seed
    #[arg(long, default_value_t = 1)]
    first_seed: u64,
    /// How many stalls
    #[arg(long, default_value_t = 60)]
    count: u64,
    /// Seconds of the longest
    #[arg(long, default_value_t = 300)]
    longest: u64,
    /// Stalls at a time
    #[arg(long, default_value_t = 12)]
    at_once: usize,
    /// Kill each server amid its stall, and start another at once
    #[arg(long)]
    kill: bool,
}

impl Options {
    /// Runs one stall. Its words, and what became of it; with a kill, the way of the successor.
    fn run(&self, qemu: &Qemu, seed: u64) -> (String, Result<Option<Succession>, String>) {
        let longest = Duration::from_secs(self.longest);
        if self.kill {
            let kill = Kill::chosen_by(seed, longest);
            return (kill.to_string(), kill.run(qemu));
        }
        let stall = Stall::chosen_by(seed, longest);
        (stall.to_string(), stall.run(qemu).map(|()| None))
    }
}

fn main() -> ExitCode {
    let options = Options::parse();
    let Options { first_seed, count, longest, at_once, kill } = options;
    let Some(qemu) = Qemu::find() else { return ExitCode::SUCCESS };
    let (next, failures) = (AtomicU64::new(first_seed), AtomicU64::new(0));
    let ways = Mutex::new(BTreeMap::<String, u64>::new());
    std::thread::scope(|scope| {
        for _ in 0..at_once {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Relaxed);
                    if seed >= first_seed + count {
                        return;
                    }
                    match options.run(&qemu, seed) {
                        (stall, Ok(way)) => {
                            let way = way.map_or("ok".to_owned(), |way| format!("{way:?}"));
                            println!("{stall}: {way}");
                            *ways.lock().unwrap_or_else(PoisonError::into_inner).entry(way).or_default() += 1;
                        }
                        (stall, Err(what)) => {
                            failures.fetch_add(1, Relaxed);
                            let kill = if kill { " --kill" } else { "" };
                            eprintln!("{stall}: {what}\n  repeat: cargo xtask stalls{kill} --first-seed {seed} --count 1 --longest {longest}");
                        }
                    }
                }
            });
        }
    });
    let failures = failures.into_inner();
    println!("{count} stalls, {failures} with a failure; {:?}", ways.into_inner().unwrap_or_default());
    if failures == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
