//! Kinds of work: tests over seeds, the comparison with QEMU, the fuzz targets, the hostile images.

use super::programs::{Kind, Programs};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use zebu_bench::workspace::root;

/// No piece is shorter: it would begin and end with nothing between.
pub(super) const SHORTEST: Duration = Duration::from_secs(2);
const LONGEST: Duration = Duration::from_secs(60);

/// Every step of a commit with every failure.
pub(crate) const STEPS_OF_A_COMMIT: &str = "torture::steps::every_step_survives_every_failure";

/// The simulated tests of the deliberate faults.
const FAULTS: &str = "mutants::killed::";

/// One thing to run, again and again or once.
pub(super) struct Job {
    pub(super) name: &'static str,
    pub(super) kind: Kind,
    /// How often in a round; 0: once, at the beginning.
    pub(super) weight: u32,
    /// The least length of a run: work that runs once is left out of shorter runs.
    pub(super) worth_it: Duration,
}

const fn seeds(name: &'static str, test: &'static str, weight: u32) -> Job {
    Job { name, kind: Kind::Seeds { test }, weight, worth_it: Duration::ZERO }
}

const fn once(name: &'static str, kind: Kind, worth_it: u64) -> Job {
    Job { name, kind, weight: 0, worth_it: Duration::from_secs(worth_it) }
}

/// All jobs. Weights: crash states are the dearest to make.
pub(super) const JOBS: &[Job] = &[
    once("steps of a commit", Kind::Seeds { test: STEPS_OF_A_COMMIT }, 0),
    once("mutants", Kind::Faults, 600),
    once("hostile images", Kind::BlackBox { target: "formats", module: "strangers::" }, 600),
    once("losses of QEMU", Kind::BlackBox { target: "losses", module: "losses::" }, 600),
    once(
        "real files behind a recording layer",
        Kind::BlackBox { target: "losses", module: "recorded::" },
        1800,
    ),
    once("servers killed", Kind::BlackBox { target: "nbd", module: "nbd_crash::" }, 1800),
    once(
        "compressed rewrites killed, full disks",
        Kind::BlackBox { target: "losses", module: "compressed_crash::" },
        1800,
    ),
    once("backups killed, full disks", Kind::BlackBox { target: "backup", module: "backup_crash::" }, 1800),
    once("chain operations", Kind::BlackBox { target: "images", module: "chain_operations::" }, 1800),
    once("full disks", Kind::BlackBox { target: "images", module: "full_disk::" }, 1800),
    seeds("crash states", "torture::runs::crash_states", 9),
    seeds("random operations", "torture::runs::random_operations", 4),
    seeds("invariants at every step", "torture::runs::invariants_at_every_step", 2),
    seeds(
        "invariants at every step, crowded",
        "torture::runs::invariants_at_every_step_of_crowded_images",
        2,
    ),
    seeds("crash states, copy-on-read", "torture::runs::crash_states_with_copies_on_read", 1),
    seeds("random operations, copy-on-read", "torture::runs::random_operations_with_copies_on_read", 1),
    seeds("crash states, encrypted", "torture::runs::crash_states_of_encrypted_images", 2),
    seeds("random operations, encrypted", "torture::runs::random_operations_on_encrypted_images", 1),
    seeds(
        "invariants at every step, encrypted",
        "torture::runs::invariants_at_every_step_of_encrypted_images",
        1,
    ),
    seeds("encrypted in larger sectors, XTS", "torture::large_sectors::parts_of_sectors_in_xts", 1),
    seeds("encrypted in larger sectors, CBC", "torture::large_sectors::whole_sectors_in_cbc", 1),
    seeds("crashes of every image", "crash::replay::every_image_survives_crashes", 1),
    seeds("requests beside resizes", "crash::resizes::a_resize_is_alone", 1),
    seeds(
        "crashes of snapshot operations",
        "crash::snapshot_operations::snapshots_survive_crashes_of_what_is_done_to_them",
        1,
    ),
    seeds(
        "requests beside snapshots",
        "crash::snapshot_operations::requests_go_on_beside_snapshot_operations",
        1,
    ),
    seeds("calls of a disk", "faults::calls::requests_of_a_thread_that_calls_find_what_they_may", 1),
    seeds("a write fails", "faults::nth_operation::a_write_fails", 1),
    seeds("a read fails", "faults::nth_operation::a_read_fails", 1),
    seeds("a sync fails", "faults::nth_operation::a_sync_fails", 1),
    seeds("no space for a write", "faults::nth_operation::a_write_finds_no_space", 1),
    seeds("everything fails", "faults::nth_operation::everything_fails_now_and_then", 1),
    Job { name: "differential", kind: Kind::Differential, weight: 1, worth_it: Duration::ZERO },
    Job { name: "fuzz", kind: Kind::Fuzz, weight: 3, worth_it: Duration::ZERO },
];

/// Counts of a piece of work.
#[derive(Debug, Default)]
pub(super) struct Done {
    pub(super) counts: BTreeMap<String, u64>,
    /// A table that the piece made.
    pub(super) coverage: Option<Value>,
    /// Its output, if it failed.
    pub(super) failure: Option<String>,
}

impl Done {
    /// One line about it.
    pub(super) fn brief(&self) -> String {
        if self.failure.is_some() {
            return "FAILED".into();
        }
        let shown = ["seeds", "requests", "moments", "crash_states", "tests", "inputs"];
        let said: Vec<String> = shown
            .iter()
            .filter_map(|name| self.counts.get(*name).filter(|n| **n > 0).map(|n| format!("{n} {name}")))
            .collect();
        said.join(", ").replace('_', " ")
    }
}

/// How long one piece runs, of a run of `total`.
pub(super) fn share(total: Duration) -> Duration {
    (total / 40).clamp(SHORTEST, LONGEST)
}

impl Job {
    /// Runs a piece with seeds from `first` on, for about `time`.
    pub(super) fn run(&self, programs: &Programs, first: u64, time: Duration) -> Done {
        let start = Instant::now();
        let mut done = match self.kind {
            Kind::Seeds { test } => seeds_of(programs, test, first, time, self.weight == 0),
            Kind::Faults => programs.simulated().map_or_else(failed, |mut tests| tests_of(tests.arg(FAULTS))),
            Kind::BlackBox { target, module } => {
                programs.black_box(target, module).map_or_else(failed, |mut tests| tests_of(&mut tests))
            }
            Kind::Differential => differential(programs, first, time),
            Kind::Fuzz => fuzz(programs, first, time),
        };
        done.counts.insert("milliseconds".into(), start.elapsed().as_millis() as u64);
        done.counts.insert("pieces".into(), 1);
        done
    }
}

fn output(command: &mut Command) -> Result<(bool, String), String> {
    let out = command.stdin(Stdio::null()).output().map_err(|e| format!("{command:?}: {e}"))?;
    let text = String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
    Ok((out.status.success(), text))
}

fn failed(what: String) -> Done {
    Done { failure: Some(what), ..Done::default() }
}

fn seeds_of(programs: &Programs, test: &str, first: u64, time: Duration, as_many_as_it_has: bool) -> Done {
    let files = match tempfile::tempdir() {
        Ok(dir) => dir,
        Err(e) => return failed(e.to_string()),
    };
    let (tally, coverage) = (files.path().join("tally"), files.path().join("coverage"));
    let mut command = match programs.simulated() {
        Ok(command) => command,
        Err(e) => return failed(e),
    };
    command.args(["--exact", test, "--nocapture", "--test-threads", "1"]);
    command.env("ZEBU_TALLY", &tally).env("ZEBU_COVERAGE", &coverage);
    command.env_remove("ZEBU_SEED").env_remove("ZEBU_SEEDS").env_remove("ZEBU_SECONDS");
    if !as_many_as_it_has {
        command.env("ZEBU_SEEDS", format!("{first}..{}", u64::MAX));
        command.env("ZEBU_SECONDS", time.as_secs().max(1).to_string());
    }
    let (ok, said) = match output(&mut command) {
        Ok(out) => out,
        Err(e) => return failed(e),
    };
    let mut done = Done::default();
    for line in std::fs::read_to_string(&tally).unwrap_or_default().lines() {
        let counted: Map<String, Value> = serde_json::from_str(line).unwrap_or_default();
        for (name, number) in counted.iter().filter_map(|(name, n)| Some((name, n.as_u64()?))) {
            if name != "failed_seed" {
                *done.counts.entry(name.clone()).or_default() += number;
            }
        }
    }
    done.coverage = std::fs::read_to_string(&coverage).ok().and_then(|text| serde_json::from_str(&text).ok());
    if !ok {
        done.failure = Some(said);
    } else if done.counts.is_empty() {
        done.failure = Some(format!("{test} counted nothing: has it another name?\n{said}"));
    }
    done
}

/// Runs tests, and counts those that passed.
fn tests_of(command: &mut Command) -> Done {
    let (ok, said) = match output(command) {
        Ok(out) => out,
        Err(e) => return failed(e),
    };
    let passed = said.lines().filter_map(|line| line.strip_prefix("test result: ok. ")?.split(' ').next());
    let passed: u64 = passed.filter_map(|number| number.parse::<u64>().ok()).sum();
    let mut done = Done::default();
    done.counts.insert("tests".into(), passed);
    if !ok || passed == 0 {
        done.failure = Some(said);
    }
    done
}

/// The number before a word, as in `20 seeds, 400 operations`.
fn number_before(text: &str, word: &str) -> Option<u64> {
    let words: Vec<&str> = text.split_whitespace().map(|w| w.trim_matches(',')).collect();
    words.windows(2).find(|pair| pair[1] == word).and_then(|pair| pair[0].parse().ok())
}

fn differential(programs: &Programs, first: u64, time: Duration) -> Done {
    const SEEDS: u64 = 4;
    let start = Instant::now();
    let mut done = Done::default();
    let mut at = first;
    while start.elapsed() < time && done.failure.is_none() {
        let mut command = Command::new(programs.differential());
        command.env("ZEBU_BIN", programs.zebu()).current_dir(root());
        command.args(["--first-seed", &at.to_string(), "--seeds", &SEEDS.to_string()]);
        command.args(["--ops", "400", "--jobs", "1"]);
        match output(&mut command) {
            Ok((true, said)) => {
                for (word, name) in [("seeds", "seeds"), ("operations", "requests")] {
                    *done.counts.entry(name.into()).or_default() += number_before(&said, word).unwrap_or(0);
                }
            }
            Ok((false, said)) => done.failure = Some(said),
            Err(e) => done.failure = Some(e),
        }
        at += SEEDS;
    }
    done
}

fn fuzz(programs: &Programs, first: u64, time: Duration) -> Done {
    let mut command = Command::new(programs.fuzz());
    command.args([time.as_secs().max(1).to_string(), first.to_string()]).current_dir(root().join("fuzz"));
    let (ok, said) = match output(&mut command) {
        Ok(out) => out,
        Err(e) => return failed(e),
    };
    let mut done = Done::default();
    // "N inputs, each for M targets"
    let inputs = number_before(&said, "inputs").unwrap_or(0) * number_before(&said, "targets:").unwrap_or(0);
    done.counts.insert("inputs".into(), inputs);
    if !ok || inputs == 0 {
        done.failure = Some(said);
    }
    done
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_found_before_their_words() {
        let said = "12 inputs, each for 6 targets: no fault (seeds 1 to 12)";
        assert_eq!(number_before(said, "inputs"), Some(12));
        assert_eq!(number_before(said, "targets:"), Some(6));
        assert_eq!(number_before("20 seeds, 400 operations, 0 failures", "operations"), Some(400));
        assert_eq!(number_before(said, "operations"), None);
    }

    #[test]
    fn names_are_different() {
        let mut names: Vec<_> = JOBS.iter().map(|job| job.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), JOBS.len());
    }
}
