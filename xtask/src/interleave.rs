//! The command `interleave`: what threads do to each other, under schedules that shuttle chooses.

use crate::Outcome;
use crate::process::run;
use crate::toolchain::{cargo, target_dir};
use clap::Args;
use std::time::Instant;

#[derive(Args)]
#[command(
    after_help = "A schedule that fails is printed with a string that `shuttle::replay` repeats it from."
)]
pub(crate) struct InterleaveArgs {
    /// Schedules of each kind for each test
    #[arg(long, default_value_t = 10_000)]
    schedules: u32,
    /// Only this scenario (`gather`), or a test of it (`gather::streams`)
    scenario: Option<String>,
}

/// What every run of all checks has of it.
pub(crate) fn slice() -> Outcome {
    command(&InterleaveArgs { schedules: 300, scenario: None })
}

pub(crate) fn command(args: &InterleaveArgs) -> Outcome {
    let start = Instant::now();
    let mut command = cargo();
    command.args(["test", "--locked", "--package", "zebu-storage", "--package", "zebu", "--lib"]);
    command.args(["--features", "test-faults", "--profile", "torture", "--target-dir"]);
    command.arg(target_dir()?.join("interleave"));
    command.arg("--").arg(format!("interleavings::{}", args.scenario.as_deref().unwrap_or_default()));
    command.env("RUSTFLAGS", "--cfg shuttle").env("ZEBU_SCHEDULES", args.schedules.to_string());
    // It warns of orders weaker than `SeqCst`, of which it knows none, and says where each caught panic was.
    command.env("SHUTTLE_SILENCE_WARNINGS", "1").env("RUST_BACKTRACE", "0");
    run(&mut command)?;
    println!("no schedule failed, every fault was caught, in {:.0} s", start.elapsed().as_secs_f64());
    Ok(())
}
