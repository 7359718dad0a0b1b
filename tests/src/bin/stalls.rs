//! Stalls of real disks, several at a time.

use clap::Parser;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use zebu_tests::qemu::Qemu;
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
}

fn main() -> ExitCode {
    let Options { first_seed, count, longest, at_once } = Options::parse();
    let Some(qemu) = Qemu::find() else { return ExitCode::SUCCESS };
    let (next, failures) = (AtomicU64::new(first_seed), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for _ in 0..at_once {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Relaxed);
                    if seed >= first_seed + count {
                        return;
                    }
                    let stall = Stall::chosen_by(seed, Duration::from_secs(longest));
                    match stall.run(&qemu) {
                        Ok(()) => println!("{stall}: ok"),
                        Err(what) => {
                            failures.fetch_add(1, Relaxed);
                            eprintln!("{stall}: {what}\n  repeat: cargo xtask stalls --first-seed {seed} --count 1 --longest {longest}");
                        }
                    }
                }
            });
        }
    });
    let failures = failures.into_inner();
    println!("{count} stalls, {failures} with a failure");
    if failures == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
