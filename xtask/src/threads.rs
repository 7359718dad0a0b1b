//! The command `threads`: real threads that share an image, judged by what each of them saw and what a kill left.

use crate::all;
use crate::nightly::{TARGET, cargo_nightly, ensure};
use crate::run_log::{Kept, Origin, by_origin};
use crate::test_programs::BUILT;
use clap::Args;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::process::Command;
use zebu_bench::Outcome;
use zebu_bench::process::{measure, run};
use zebu_bench::table::grouped;
use zebu_bench::workspace::{cargo, target_dir};

#[derive(Args)]
#[command(
    after_help = "Without a time, one seed is run. A violation is printed with a command that repeats its seed; when the threads meet \
                  is not chosen by it, so that it may take several runs (--repeat)."
)]
pub(crate) struct ThreadsArgs {
    /// Run under ThreadSanitizer, with a standard library built with it (nightly Rust)
    #[arg(long)]
    tsan: bool,
    /// Add the counts to docs/records/threads.jsonl, and write the sums into docs/records.md
    #[arg(long)]
    record: bool,
    /// Options of the runner: --minutes N, --hours N, --seed N, --seeds N, --repeat N, --scenario NAME, --keep-going
    /// (`--help` after `--` says more, `list` shows the scenarios)
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<String>,
}

const KEPT: Kept = Kept {
    runs: "docs/records/threads.jsonl",
    page: "docs/records.md",
    begin: "<!-- real threads: written by `cargo xtask threads --record` -->",
    end: "<!-- end of real threads -->",
};

/// Counts of the runner.
#[derive(Debug, Default, Clone, Copy, Serialize, Deserialize)]
struct Counts {
    cases: u64,
    requests: u64,
    flushes: u64,
    sectors: u64,
    crashes: u64,
    violations: u64,
}

/// A kept run.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Run {
    #[serde(flatten)]
    origin: Origin,
    tsan: bool,
    /// Of processors, of all processes of the run.
    cpu_seconds: f64,
    #[serde(flatten)]
    counts: Counts,
}

pub(crate) fn command(args: &ThreadsArgs) -> Outcome {
    let origin = if args.record { Some(Origin::now()?) } else { None };
    let program = build(args.tsan)?;
    let mut command = Command::new(&program);
    if args.tsan {
        command.env("TSAN_OPTIONS", "halt_on_error=1:second_deadlock_stack=1");
    }
    match origin {
        Some(origin) => record(&mut command, args, origin),
        None => run(command.args(&args.args)),
    }
}

/// Builds the runner, and says where it is.
fn build(tsan: bool) -> Outcome<PathBuf> {
    let runner = ["build", "--quiet", "--locked", "--package", "zebu-tests", "--bin", "threads"];
    let dir = target_dir()?;
    if !tsan {
        // Alone: the test programs that other commands build are not needed.
        run(cargo().args(runner))?;
        return Ok(dir.join(BUILT).join("threads"));
    }
    let dir = dir.join("thread");
    run(with_sanitizer()?.args(runner).args(["-Zbuild-std", "--target", TARGET, "--target-dir"]).arg(&dir))?;
    Ok(dir.join(TARGET).join(BUILT).join("threads"))
}

/// Runs it, and keeps what it counted, whatever it found.
fn record(command: &mut Command, args: &ThreadsArgs, origin: Origin) -> Outcome {
    let dir = tempfile::tempdir().map_err(|e| e.to_string())?;
    let report = dir.path().join("report.json");
    let usage = measure(command.args(&args.args).arg("--report").arg(&report))?;
    print!("{}", usage.stdout);
    let counts = counts(&report)?;
    let verdict = match usage.code {
        Some(0) => Ok(()),
        code => Err(format!("{} violations, exit code {code:?}", counts.violations)),
    };
    let run = Run { origin, tsan: args.tsan, cpu_seconds: usage.cpu.as_secs_f64().round(), counts };
    all([verdict, KEPT.add(&run, sums)])
}

fn counts(report: &Path) -> Outcome<Counts> {
    let said = |e: &dyn std::fmt::Display| format!("{}: {e}", report.display());
    let text = std::fs::read_to_string(report).map_err(|e| said(&e))?;
    serde_json::from_str(&text).map_err(|e| said(&e))
}

/// All runs together, with and without ThreadSanitizer, and each commit by itself.
fn sums(runs: &[Run]) -> String {
    let mut text = "| date | commit | | runs | CPU minutes | cases | requests | flushes | sectors seen | crashes judged | violations |\n\
                    |---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|\n"
        .to_owned();
    let kind = |tsan: bool| if tsan { "ThreadSanitizer" } else { "" };
    for (Origin { date, commit }, runs) in by_origin(runs, |run| &run.origin) {
        for tsan in [false, true] {
            let of_kind: Vec<&Run> = runs.iter().copied().filter(|run| run.tsan == tsan).collect();
            if !of_kind.is_empty() {
                text += &row(&[date, commit, kind(tsan)], &of_kind);
            }
        }
    }
    for tsan in [false, true] {
        let of_kind: Vec<&Run> = runs.iter().filter(|run| run.tsan == tsan).collect();
        text += &row(&["all", "", kind(tsan)], &of_kind);
    }
    text
}

fn row(names: &[&str], runs: &[&Run]) -> String {
    let sum = |of: fn(&Counts) -> u64| grouped(runs.iter().map(|run| of(&run.counts)).sum());
    let minutes = runs.iter().map(|run| run.cpu_seconds).sum::<f64>() / 60.0;
    let numbers = [
        grouped(runs.len() as u64),
        grouped(minutes.round() as u64),
        sum(|counts| counts.cases),
        sum(|counts| counts.requests),
        sum(|counts| counts.flushes),
        sum(|counts| counts.sectors),
        sum(|counts| counts.crashes),
        sum(|counts| counts.violations),
    ];
    format!("| {} | {} |\n", names.join(" | "), numbers.join(" | "))
}

fn with_sanitizer() -> Outcome<Command> {
    ensure(&["rust-src"])?;
    let mut command = cargo_nightly();
    command.env("RUSTFLAGS", "-Zsanitizer=thread");
    Ok(command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_says_what_was_run() {
        KEPT.assert_up_to_date(sums);
    }

    #[test]
    fn runs_with_and_without_the_sanitizer_are_added_apart() {
        let run = |tsan| Run {
            origin: Origin { date: "2026-01-01".into(), commit: "a".into() },
            tsan,
            cpu_seconds: 90.0,
            counts: Counts { cases: 700, violations: 1, ..Counts::default() },
        };
        let text = sums(&[run(false), run(true), run(false)]);
        assert!(text.contains("| 2026-01-01 | a |  | 2 | 3 | 1,400 | 0 | 0 | 0 | 0 | 2 |"), "{text}");
        assert!(text.contains("| all |  | ThreadSanitizer | 1 | 2 | 700 |"), "{text}");
    }
}
