//! The command `fuzz`: the fuzz targets in turns, guided by coverage.

use crate::all;
use crate::nightly::{TARGET, cargo_nightly, ensure, ensure_subcommand};
use crate::run_log::{Kept, Origin, by_origin};
use clap::Args;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use zebu_bench::Outcome;
use zebu_bench::process::{find, measure, run};
use zebu_bench::table::{Table, grouped};
use zebu_bench::workspace::root;
use zebu_bench::workspace::target_dir;

/// A target's turn.
const TURN: Duration = Duration::from_secs(60);
/// Bytes that the committed corpus of a target may take.
const SEEDS: u64 = 200 << 10;

/// The codes with which libFuzzer ends for an input: it took too long, took too much memory, failed.
const FAILED: [i32; 3] = [70, 71, 77];

#[derive(Args)]
#[command(after_help = "Examples:
  cargo xtask fuzz --minutes 60
  cargo xtask fuzz --minutes 10 image_write image_read
  cargo xtask fuzz --minutes 1 --keep           # what was found goes to fuzz/seeds, made small
  cargo xtask fuzz --minutes 60 --record        # adds the counts to docs/records.md

An input that fails stays in target/fuzz/failures; the program there runs it again:
  target/fuzz/x86_64-unknown-linux-gnu/release/TARGET FILE")]
pub(crate) struct FuzzArgs {
    /// How long, in minutes of the clock, on one processor
    #[arg(long)]
    minutes: f64,
    /// Put the inputs that reach something of their own into fuzz/seeds when the time is over
    #[arg(long)]
    keep: bool,
    /// Add the counts to docs/records/fuzz.jsonl, and write the sums into docs/records.md
    #[arg(long)]
    record: bool,
    /// The targets; all if none is named
    targets: Vec<String>,
}

const KEPT: Kept = Kept {
    runs: "docs/records/fuzz.jsonl",
    page: "docs/records.md",
    begin: "<!-- fuzz: written by `cargo xtask fuzz --record` -->",
    end: "<!-- end of fuzz -->",
};

/// Counts of a target.
#[derive(Debug, Default, Clone, Copy, Serialize, Deserialize)]
struct Done {
    /// Of a processor.
    seconds: f64,
    inputs: u64,
    /// Places of the code that were reached.
    edges: u64,
    /// Turns that a failing input ended; a target has no turn after one.
    failures: u64,
}

impl Done {
    fn add(&mut self, other: &Self) {
        self.seconds += other.seconds;
        self.inputs += other.inputs;
        self.edges = self.edges.max(other.edges);
        self.failures += other.failures;
    }
}

/// A kept run.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Run {
    #[serde(flatten)]
    origin: Origin,
    targets: BTreeMap<String, Done>,
}

pub(crate) fn command(args: &FuzzArgs) -> Outcome {
    const PLAIN: &str = "without it: cd fuzz && cargo run --release --example steady -- SECONDS";
    let is_there = ensure(&["rust-src"]).and_then(|()| ensure_subcommand("fuzz"));
    is_there.map_err(|missing| format!("{missing}\n{PLAIN}"))?;
    let built = target_dir()?.join("fuzz");
    let known = targets()?;
    if let Some(unknown) = args.targets.iter().find(|name| !known.contains(name)) {
        return Err(format!("there is no target {unknown}; there are: {}", known.join(", ")));
    }
    let chosen = if args.targets.is_empty() { known } else { args.targets.clone() };
    let origin = if args.record { Origin::now()? } else { Origin::or_unknown() };
    run(cargo_nightly()
        .current_dir(root().join("fuzz"))
        .args(["fuzz", "build", "--sanitizer", "none", "--target-dir"])
        .arg(&built))?;
    let total = Duration::from_secs_f64((args.minutes * 60.0).clamp(1.0, 1e7));
    let mut done = chosen.iter().map(|target| (target.clone(), Done::default())).collect();
    let fuzzed = take_turns(&built, &chosen, total, &mut done);
    let mut table = Table::new(["target", "CPU seconds", "inputs", "edges", "failures"]);
    for (target, done) in &done {
        let cpu = format!("{:.0}", done.seconds);
        let numbers = [done.inputs, done.edges, done.failures].map(|number| number.to_string());
        table.row([target.clone(), cpu].into_iter().chain(numbers));
    }
    println!("{}", table.render());
    let failures: u64 = done.values().map(|done| done.failures).sum();
    let verdict = fuzzed.and_then(|()| match failures {
        0 => Ok(()),
        failures => Err(format!("{failures} inputs fail, in {}", built.join("failures").display())),
    });
    let recorded = if args.record { KEPT.add(&Run { origin, targets: done }, sums) } else { Ok(()) };
    let kept = if args.keep { chosen.iter().try_for_each(|target| keep(&built, target)) } else { Ok(()) };
    all([verdict, recorded, kept])
}

/// Gives each target its turn until the time is over. One that has failed gets no more turns: it would fail at once,
/// over what it found.
fn take_turns(
    built: &Path,
    chosen: &[String],
    total: Duration,
    done: &mut BTreeMap<String, Done>,
) -> Outcome {
    let start = Instant::now();
    let turn = TURN.min(total / chosen.len() as u32).max(Duration::from_secs(1));
    let mut failed = BTreeSet::new();
    while start.elapsed() < total && failed.len() < chosen.len() {
        for target in chosen {
            if failed.contains(target) {
                continue;
            }
            let of_turn = one_turn(built, target, turn)?;
            if of_turn.failures > 0 {
                failed.insert(target);
            }
            done.entry(target.clone()).or_default().add(&of_turn);
        }
    }
    Ok(())
}

/// Sums of all runs, by target, and by the commit that was run.
fn sums(runs: &[Run]) -> String {
    let mut targets = BTreeMap::<&str, Done>::new();
    for (target, done) in runs.iter().flat_map(|run| &run.targets) {
        targets.entry(target).or_default().add(done);
    }
    let minutes = |done: &Done| grouped((done.seconds / 60.0).round() as u64);
    let mut text =
        "| target | CPU minutes | inputs | edges | failures |\n|---|---:|---:|---:|---:|\n".to_owned();
    let mut all = Done::default();
    for (target, done) in &targets {
        let (inputs, edges) = (grouped(done.inputs), grouped(done.edges));
        text += &format!("| `{target}` | {} | {inputs} | {edges} | {} |\n", minutes(done), done.failures);
        all.add(done);
    }
    text += &format!("| all | {} | {} | | {} |\n", minutes(&all), grouped(all.inputs), all.failures);
    text += "\n| date | commit | CPU minutes | inputs | failures |\n|---|---|---:|---:|---:|\n";
    for (Origin { date, commit }, runs) in by_origin(runs, |run| &run.origin) {
        let mut sum = Done::default();
        runs.iter().flat_map(|run| run.targets.values()).for_each(|done| sum.add(done));
        let inputs = grouped(sum.inputs);
        text += &format!("| {date} | {commit} | {} | {inputs} | {} |\n", minutes(&sum), sum.failures);
    }
    text
}

/// The names of the targets: their files.
fn targets() -> Outcome<Vec<String>> {
    let dir = root().join("fuzz/fuzz_targets");
    let entries = std::fs::read_dir(&dir).map_err(|e| format!("{}: {e}", dir.display()))?;
    let mut names: Vec<String> =
        entries.filter_map(|entry| Some(entry.ok()?.path().file_stem()?.to_str()?.to_owned())).collect();
    names.sort_unstable();
    Ok(names)
}

fn program(built: &Path, target: &str) -> PathBuf {
    built.join(TARGET).join("release").join(target)
}

fn dirs(built: &Path, target: &str) -> Outcome<[PathBuf; 3]> {
    let dirs =
        [built.join("corpus").join(target), root().join("fuzz/seeds").join(target), built.join("failures")];
    for dir in &dirs {
        std::fs::create_dir_all(dir).map_err(|e| format!("{}: {e}", dir.display()))?;
    }
    Ok(dirs)
}

fn one_turn(built: &Path, target: &str, turn: Duration) -> Outcome<Done> {
    let [corpus, seeds, failures] = dirs(built, target)?;
    // Two runs may be at the same target.
    let log = built.join(format!("{target}-{}.log", std::process::id()));
    // Its log goes to standard error; the failures' names begin with the target's.
    let shell = find("sh").ok_or("there is no sh")?;
    let words: [OsString; 8] = [
        program(built, target).into(),
        corpus.into(),
        seeds.into(),
        format!("-max_total_time={}", turn.as_secs()).into(),
        "-rss_limit_mb=512".into(),
        "-timeout=60".into(),
        "-print_final_stats=1".into(),
        format!("-artifact_prefix={}/{target}-", failures.display()).into(),
    ];
    let mut command = Command::new(shell);
    command.args(["-c", "log=$1; shift; exec \"$@\" 2>\"$log\"", "sh"]).arg(&log).args(words);
    let usage = measure(&mut command)?;
    let said = std::fs::read(&log).map_err(|e| format!("{}: {e}", log.display()))?;
    let said = String::from_utf8_lossy(&said);
    let is_failure = usage.code != Some(0);
    if is_failure {
        let end: Vec<&str> = said.lines().rev().take(40).collect();
        println!("{target} failed:\n{}", end.into_iter().rev().collect::<Vec<_>>().join("\n"));
        if !usage.code.is_some_and(|code| FAILED.contains(&code)) {
            return Err(format!(
                "{target} did not run to its end (exit code {:?}): {}",
                usage.code,
                log.display()
            ));
        }
    }
    let number = |label: &str| match number_after(&said, label) {
        // What fails while the seeds are read has no final figures.
        None if !is_failure => Err(format!("{}: there is no {label:?} in it", log.display())),
        number => Ok(number.unwrap_or(0)),
    };
    let done = Done {
        seconds: usage.cpu.as_secs_f64(),
        inputs: number("stat::number_of_executed_units:")?,
        edges: number(" cov:")?,
        failures: u64::from(is_failure),
    };
    let _ = std::fs::remove_file(&log);
    Ok(done)
}

/// The number behind the last `label`.
fn number_after(text: &str, label: &str) -> Option<u64> {
    text.rsplit_once(label)?.1.split_whitespace().next()?.parse().ok()
}

/// Replaces the seeds of a target by the smallest inputs that reach all that is reached, as many as may be committed.
fn keep(built: &Path, target: &str) -> Outcome {
    let [corpus, seeds, _] = dirs(built, target)?;
    let merged = tempfile::tempdir_in(built).map_err(|e| format!("{}: {e}", built.display()))?;
    run(Command::new(program(built, target)).args(["-merge=1", "-verbosity=0"]).args([
        merged.path(),
        &corpus,
        &seeds,
    ]))?;
    let said = |e: std::io::Error| format!("{}: {e}", seeds.display());
    let mut inputs: Vec<(u64, PathBuf)> = std::fs::read_dir(&merged)
        .map_err(said)?
        .filter_map(|entry| {
            let entry = entry.ok()?;
            Some((entry.metadata().ok()?.len(), entry.path()))
        })
        .collect();
    inputs.sort_unstable();
    for entry in std::fs::read_dir(&seeds).map_err(said)?.flatten() {
        // What has a name of its own was a fault once, and stays.
        let name = entry.file_name();
        if name.len() == 40 && name.to_string_lossy().bytes().all(|byte| byte.is_ascii_hexdigit()) {
            std::fs::remove_file(entry.path()).map_err(said)?;
        }
    }
    let mut taken = 0;
    for (len, path) in inputs {
        taken += len;
        if taken > SEEDS {
            break;
        }
        std::fs::copy(&path, seeds.join(path.file_name().unwrap_or_default())).map_err(said)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_found_behind_their_labels() {
        let log = "#2 INITED cov: 12 ft: 13\n#9 DONE   cov: 57 ft: 80 corp: 3\nstat::number_of_executed_units: 99\n";
        assert_eq!(number_after(log, " cov:"), Some(57));
        assert_eq!(number_after(log, "stat::number_of_executed_units:"), Some(99));
        assert_eq!(number_after(log, "stat::peak_rss_mb:"), None);
    }

    #[test]
    fn runs_of_one_commit_are_added_up() {
        let done = Done { seconds: 90.0, inputs: 1500, edges: 7, failures: 1 };
        let run = |commit: &str, target: &str| Run {
            origin: Origin { date: "2026-01-01".into(), commit: commit.into() },
            targets: [(target.to_owned(), done)].into(),
        };
        let text = sums(&[run("a", "header"), run("a", "image_read"), run("b", "header")]);
        assert!(text.contains("| `header` | 3 | 3,000 | 7 | 2 |"), "{text}");
        assert!(text.contains("| all | 5 | 4,500 | | 3 |"), "{text}");
        assert!(text.contains("| 2026-01-01 | a | 3 | 3,000 | 2 |"), "{text}");
    }

    #[test]
    fn the_page_says_what_was_run() {
        KEPT.assert_up_to_date(sums);
    }

    #[test]
    fn there_are_targets() {
        assert!(targets().is_ok_and(|names| names.iter().any(|name| name == "image_write")));
    }
}
