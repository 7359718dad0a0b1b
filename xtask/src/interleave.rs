//! The command `interleave`: what threads do to each other, under schedules that shuttle chooses.

use crate::all;
use crate::run_log::{Kept, Origin, by_origin};
use crate::tenth::Tenth;
use clap::Args;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;
use zebu_bench::Outcome;
use zebu_bench::process::{measure, run};
use zebu_bench::table::grouped;
use zebu_bench::workspace::{cargo, target_dir};

/// Names the scenarios of the whole engine.
const ENGINE: &str = "engine";

#[derive(Args)]
#[command(
    after_help = "A schedule that fails is printed as a string. To repeat one of the whole engine, put it into a file:
  ZEBU_PAIR='write+flush' ZEBU_REPLAY=/PATH/FILE RUSTFLAGS='--cfg shuttle' cargo test \\
    --target-dir target/interleave -p zebu-engine --test simulated schedules::pairs
And one of a part:
  ZEBU_REPLAY=/PATH/FILE cargo xtask interleave cache::a_slice_that_many_want_is_loaded_once_and_all_are_woken
docs/testing.md has more."
)]
pub(crate) struct InterleaveArgs {
    /// Schedules of each kind for each test of a part; executions of each pair of operations for the whole engine
    #[arg(long, default_value_t = 10_000)]
    schedules: u32,
    /// Number that the schedules follow from [default: another in each run]
    #[arg(long)]
    seed: Option<u64>,
    /// Add the counts of the whole engine to docs/records/schedules.jsonl, and write the sums into docs/records.md
    #[arg(long)]
    record: bool,
    /// Only these: `engine` (the whole engine), a part (`stream_packer`), or a test of it (`stream_packer::streams`)
    scenario: Option<String>,
}

const KEPT: Kept = Kept {
    runs: "docs/records/schedules.jsonl",
    page: "docs/records.md",
    begin: "<!-- chosen schedules: written by `cargo xtask interleave --record engine` -->",
    end: "<!-- end of chosen schedules -->",
};

/// Counts of executions of the whole engine.
#[derive(Debug, Default, Clone, Copy, Serialize, Deserialize)]
struct Counts {
    pairs: u64,
    /// Of each pair, at least.
    of_each: u64,
    /// Of all pairs and of the named scenarios.
    executions: u64,
    failed: u64,
}

/// By step of a commit and operation: how often another thread was in the middle of it when the step began.
type Beside = BTreeMap<String, BTreeMap<String, u64>>;

/// The report of a test when it is over.
#[derive(Debug, Default, Deserialize)]
struct Part {
    #[serde(flatten)]
    counts: Counts,
    #[serde(default)]
    beside: Beside,
}

/// A kept run.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Run {
    #[serde(flatten)]
    origin: Origin,
    /// Of processors.
    cpu_seconds: f64,
    #[serde(flatten)]
    counts: Counts,
    #[serde(default)]
    beside: Beside,
}

/// The schedules of each test or pair of operations.
#[derive(Clone, Copy)]
struct Schedules {
    count: u32,
    /// The number that they follow from, if it is not to be another in each run.
    seed: Option<u64>,
}

/// The part that a run of all checks has: even tenths have what threads share, part by part, odd ones the whole engine. A tenth has
/// the same schedules each time, and no other has them.
pub(crate) fn slice(tenth: Tenth) -> Outcome {
    const PARTS: u32 = 300;
    const ENGINE: u32 = 50;
    for number in (0..10).filter(|number| tenth.has(*number)) {
        let seed = Some(number + 1);
        if number % 2 == 0 {
            parts(Schedules { count: PARTS, seed }, "")?;
        } else {
            none_failed(&engine(Schedules { count: ENGINE, seed })?.1)?;
        }
    }
    Ok(())
}

/// An error if a pair of operations or a scenario failed.
fn none_failed(part: &Part) -> Outcome {
    match part.counts.failed {
        0 => Ok(()),
        failed => Err(format!("{failed} pairs of operations or scenarios failed")),
    }
}

pub(crate) fn command(args: &InterleaveArgs) -> Outcome {
    let whole = args.scenario.as_deref().is_none_or(|scenario| scenario == ENGINE);
    if args.record && !whole {
        return Err("only the counts of the whole engine are kept: --record engine".into());
    }
    let origin = if args.record { Some(Origin::now()?) } else { None };
    let schedules = Schedules { count: args.schedules, seed: args.seed };
    match args.scenario.as_deref() {
        Some(ENGINE) => {}
        Some(part) => parts(schedules, part)?,
        None => parts(schedules, "")?,
    }
    if !whole {
        return Ok(());
    }
    let (cpu_seconds, part) = engine(schedules)?;
    let verdict = none_failed(&part);
    let Part { counts, beside } = part;
    let kept = origin.map_or(Ok(()), |origin| KEPT.add(&Run { origin, cpu_seconds, counts, beside }, sums));
    all([verdict, kept])
}

/// Runs the scenarios of what threads share, each part by itself.
fn parts(schedules: Schedules, scenario: &str) -> Outcome {
    let start = Instant::now();
    let mut command = tests(schedules)?;
    if let Some(seed) = schedules.seed {
        // Shuttle's own: it counts for all that a part explores.
        command.env("SHUTTLE_RANDOM_SEED", seed.to_string());
    }
    command.arg("--lib");
    // One after the other: statics of the program are shared, and a lock of one exploration is nothing to another.
    command.arg("--").arg(format!("interleavings::{scenario}")).arg("--test-threads=1");
    run(&mut command)?;
    println!("no schedule failed, every fault was caught, in {:.0} s", start.elapsed().as_secs_f64());
    Ok(())
}

/// Runs the whole engine: so many executions of every pair of operations, and the scenarios of deliberate faults. Says how many
/// seconds of processors that took, and what was executed.
fn engine(schedules: Schedules) -> Outcome<(f64, Part)> {
    let dir = target_dir()?.join("interleave").join("reports");
    let of_engine = || -> Outcome<Command> {
        let mut command = tests(schedules)?;
        if let Some(seed) = schedules.seed {
            command.env("ZEBU_SCHEDULE_SEED", seed.to_string());
        }
        command.args(["--quiet", "--test", "simulated"]);
        Ok(command)
    };
    run(of_engine()?.arg("--no-run"))?;
    let said = |e: std::io::Error| format!("{}: {e}", dir.display());
    if dir.exists() {
        std::fs::remove_dir_all(&dir).map_err(said)?;
    }
    std::fs::create_dir_all(&dir).map_err(said)?;
    let usage = measure(of_engine()?.arg("schedules::").env("ZEBU_COVERAGE", &dir))?;
    print!("{}", usage.stdout);
    let (mut counts, mut beside) = (Counts::default(), Beside::new());
    for name in ["pairs", "scenarios"] {
        let Part { counts: part, beside: seen } = read(&dir.join(format!("{name}.json")))?;
        add(&mut beside, &seen);
        counts.pairs += part.pairs;
        counts.of_each = counts.of_each.max(part.of_each);
        counts.executions += part.executions;
        counts.failed += part.failed;
    }
    println!(
        "the whole engine: {} executions, at least {} of each of {} pairs of operations; {} failed; {:.0} s of processors",
        counts.executions,
        counts.of_each,
        counts.pairs,
        counts.failed,
        usage.cpu.as_secs_f64()
    );
    match usage.code {
        Some(0) => Ok((usage.cpu.as_secs_f64().round(), Part { counts, beside })),
        _ if counts.failed > 0 => Ok((usage.cpu.as_secs_f64().round(), Part { counts, beside })),
        code => Err(format!("the whole engine: exit code {code:?}")),
    }
}

fn add(sum: &mut Beside, other: &Beside) {
    for (step, operations) in other {
        let of_step = sum.entry(step.clone()).or_default();
        for (operation, count) in operations {
            *of_step.entry(operation.clone()).or_default() += count;
        }
    }
}

fn read(report: &Path) -> Outcome<Part> {
    let said = |e: &dyn std::fmt::Display| format!("{}: {e}", report.display());
    let text = std::fs::read_to_string(report).map_err(|e| said(&e))?;
    serde_json::from_str(&text).map_err(|e| said(&e))
}

/// Each commit by itself, and all runs together.
fn sums(runs: &[Run]) -> String {
    let mut text =
        "| date | commit | runs | CPU minutes | executions | of each pair of operations | failed |\n\
                    |---|---|---:|---:|---:|---:|---:|\n"
            .to_owned();
    for (Origin { date, commit }, runs) in by_origin(runs, |run| &run.origin) {
        text += &row(&[date, commit], &runs);
    }
    text += &row(&["all", ""], &runs.iter().collect::<Vec<_>>());
    let mut beside = Beside::new();
    for run in runs {
        add(&mut beside, &run.beside);
    }
    text + &steps(&beside)
}

/// A table of what other threads were in the middle of when each step of a commit began.
fn steps(beside: &Beside) -> String {
    let operations: BTreeSet<&String> = beside.values().flat_map(BTreeMap::keys).collect();
    if operations.is_empty() {
        return String::new();
    }
    let names: Vec<&str> = operations.iter().map(|name| name.as_str()).collect();
    let mut text = "\nAnother thread here: how often it was in the middle of an operation when a step of a commit began.\n\n"
        .to_owned();
    text += &format!("| step | {} |\n|---|{}\n", names.join(" | "), "---:|".repeat(names.len()));
    for (step, of_step) in beside {
        let counts: Vec<String> = operations
            .iter()
            .map(|name| of_step.get(*name).map_or("–".to_owned(), |count| grouped(*count)))
            .collect();
        text += &format!("| {step} | {} |\n", counts.join(" | "));
    }
    text
}

fn row(names: &[&str], runs: &[&Run]) -> String {
    let sum = |of: fn(&Counts) -> u64| grouped(runs.iter().map(|run| of(&run.counts)).sum());
    let minutes = runs.iter().map(|run| run.cpu_seconds).sum::<f64>() / 60.0;
    let numbers = [
        grouped(runs.len() as u64),
        grouped(minutes.round() as u64),
        sum(|counts| counts.executions),
        sum(|counts| counts.of_each),
        sum(|counts| counts.failed),
    ];
    format!("| {} | {} |\n", names.join(" | "), numbers.join(" | "))
}

/// A command that builds and runs tests with shuttle's locks and atomics.
fn tests(schedules: Schedules) -> Outcome<Command> {
    let mut command = cargo();
    // Both each time: with other packages, what they share has other features, and is built once more.
    command.args(["test", "--locked", "--package", "zebu-storage", "--package", "zebu-engine"]);
    command.env("RUSTC_WORKSPACE_WRAPPER", compiler()?);
    command.env("ZEBU_SCHEDULES", schedules.count.to_string());
    // It warns of orders weaker than `SeqCst`, of which it knows none, and says where each caught panic was.
    command.env("SHUTTLE_SILENCE_WARNINGS", "1").env("RUST_BACKTRACE", "0");
    Ok(command)
}

/// A compiler with `cfg(shuttle)` for the crates of this workspace. What they depend on is built as for all tests.
fn compiler() -> Outcome<PathBuf> {
    const SCRIPT: &str = "#!/bin/sh\nexec \"$@\" --cfg shuttle\n";
    let path = target_dir()?.join("rustc-with-shuttle");
    let said = |e: std::io::Error| format!("{}: {e}", path.display());
    // Cargo builds all once more with a newer one.
    if !std::fs::read_to_string(&path).is_ok_and(|script| script == SCRIPT) {
        std::fs::create_dir_all(target_dir()?).map_err(said)?;
        std::fs::write(&path, SCRIPT).map_err(said)?;
        std::fs::set_permissions(&path, Permissions::from_mode(0o755)).map_err(said)?;
    }
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_says_what_was_run() {
        KEPT.assert_up_to_date(sums);
    }

    #[test]
    fn runs_are_added_up() {
        let run = |commit: &str| Run {
            origin: Origin { date: "2026-01-01".into(), commit: commit.into() },
            cpu_seconds: 90.0,
            counts: Counts { pairs: 66, of_each: 1000, executions: 70_000, failed: 0 },
            beside: [("Links".to_owned(), [("write".to_owned(), 600)].into())].into(),
        };
        let text = sums(&[run("a"), run("b"), run("a")]);
        assert!(text.contains("| 2026-01-01 | a | 2 | 3 | 140,000 | 2,000 | 0 |"), "{text}");
        assert!(text.contains("| all |  | 3 | 5 | 210,000 | 3,000 | 0 |"), "{text}");
        assert!(text.contains("| step | write |\n|---|---:|\n| Links | 1,800 |"), "{text}");
    }
}
