//! The command `sanitize`: tests of storage, engine and servers under AddressSanitizer and ThreadSanitizer.

use crate::nightly::{TARGET, cargo_nightly, ensure};
use clap::{Args, ValueEnum};
use std::time::Instant;
use zebu_bench::Outcome;
use zebu_bench::process::run;
use zebu_bench::workspace::target_dir;

#[derive(Args)]
#[command(
    after_help = "The standard library is built with the sanitizer too; C code (libdeflate, zstd) with AddressSanitizer only.
Whatever a sanitizer reports fails the test program that it is found in."
)]
pub(crate) struct SanitizeArgs {
    /// Which; both if none is named
    #[arg(value_enum)]
    sanitizers: Vec<Sanitizer>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Sanitizer {
    /// Accesses outside of an allocation or after its end, leaks
    Address,
    /// Accesses of two threads that nothing orders
    Thread,
}

/// Without QEMU, and without the tests that measure memory: a sanitizer's own is many times what they allow.
const TESTS: [(&str, &[&str]); 4] = [
    ("zebu-storage", &["direct_io", "opening", "operations", "sockets", "workers"]),
    (
        "zebu-engine",
        &["bitmaps", "jobs", "mapping_cache", "mapping_pressure", "random_operations", "simulated"],
    ),
    ("zebu-sim", &["crash_states", "direct_io", "read_modify_write", "worlds"]),
    ("zebu-export", &[]),
];

pub(crate) fn command(args: &SanitizeArgs) -> Outcome {
    ensure(&["rust-src"])?;
    let chosen = if args.sanitizers.is_empty() { Sanitizer::value_variants() } else { &args.sanitizers };
    for sanitizer in chosen {
        let start = Instant::now();
        let name = match sanitizer {
            Sanitizer::Address => "address",
            Sanitizer::Thread => "thread",
        };
        for (package, tests) in TESTS {
            let mut command = cargo_nightly();
            command.args(["test", "--locked", "-Zbuild-std", "--target", TARGET]);
            command.args(["--no-fail-fast", "--package", package, "--lib", "--target-dir"]);
            command.arg(target_dir()?.join(name));
            for test in tests {
                command.args(["--test", test]);
            }
            command.env("RUSTFLAGS", format!("-Zsanitizer={name}"));
            match sanitizer {
                Sanitizer::Address => {
                    // libdeflate compiles one source several times, with the same static tables.
                    command.env("ASAN_OPTIONS", "detect_odr_violation=0");
                    // Some versions of GCC take static tables in functions for variables whose scope has ended.
                    let flags = std::env::var("CFLAGS").unwrap_or_default();
                    command.env("CFLAGS", format!("{flags} -fno-sanitize-address-use-after-scope"));
                }
                Sanitizer::Thread => {
                    command.env("TSAN_OPTIONS", "halt_on_error=1:second_deadlock_stack=1");
                }
            }
            // Too slow for it, and no place for other memory or threads than those of the rest.
            command.args(["--", "--skip", "mutants::", "--skip", "torture::"]);
            run(&mut command)?;
        }
        println!("{name}: nothing found, in {:.0} s", start.elapsed().as_secs_f64());
    }
    Ok(())
}
