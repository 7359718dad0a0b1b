//! The command `miri`: tests of the format crate and of the buffers, interpreted by Miri, which sees undefined behaviour.

use crate::nightly::{cargo_nightly, ensure};
use clap::Args;
use std::time::Instant;
use zebu_bench::Outcome;
use zebu_bench::process::run;
use zebu_bench::workspace::target_dir;

#[derive(Args)]
#[command(
    after_help = "Miri is some hundred times slower than a processor: what moves megabytes or makes system calls that
it does not know is left out, with `cfg_attr(miri, ignore)` and the reason at the test."
)]
pub(crate) struct MiriArgs {
    /// Cases of each property
    #[arg(long, default_value_t = 4)]
    cases: u32,
}

/// Parts of the storage crate that run without a kernel: the buffers and where they come from, and the two structures that
/// hand wake-ups and claims from thread to thread.
const STORAGE: &[&str] = &["buf::", "memory::", "align::", "unaligned::", "write_table::", "executor::"];

pub(crate) fn command(args: &MiriArgs) -> Outcome {
    ensure(&["miri", "rust-src"])?;
    let target = target_dir()?.join("miri");
    let miri = || {
        let mut command = cargo_nightly();
        command.args(["miri", "test", "--locked", "--target-dir"]).arg(&target);
        // proptest remembers failures in files, and the simulated executor asks for an eventfd.
        command.env("MIRIFLAGS", "-Zmiri-disable-isolation").env("PROPTEST_CASES", args.cases.to_string());
        command
    };
    let start = Instant::now();
    run(miri().args(["-p", "zebu-qcow2", "--lib", "--test", "header_round_trip", "--test", "open_checks"]))?;
    run(miri().args(["-p", "zebu-storage", "--no-default-features", "--lib", "--"]).args(STORAGE))?;
    println!("no undefined behaviour, in {:.0} s", start.elapsed().as_secs_f64());
    Ok(())
}
