//! Runs cases and scenarios in processes of their own, and judges them.

use super::judge::{Judge, Verdict};
use super::plan::{Case, End, Images};
use super::process::Process;
use super::scenarios::Scenario;
use crate::qemu::Qemu;
use crate::random::Random;
use crate::scratch::Scratch;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// How cases are run.
#[derive(Debug)]
pub struct Runner<'a> {
    /// The program `threads`.
    pub program: PathBuf,
    /// The judge of content.
    pub qemu: &'a Qemu,
    /// How long a thread may do nothing.
    pub patience: Duration,
    /// Requests of a random case, about.
    pub requests: u64,
}

/// How often a process is looked at.
const TICK: Duration = Duration::from_millis(10);

impl Runner<'_> {
    /// Runs the random case of a seed.
    pub fn case(&self, seed: u64, images: Images) -> Verdict {
        let case = Case::chosen_by(seed, self.requests, images);
        let scratch = Scratch::new("threads");
        let mut verdict = self
            .case_in(&case, images, scratch.path())
            .unwrap_or_else(|what| Verdict { violations: vec![what], ..Verdict::default() });
        if !verdict.violations.is_empty() {
            let again = format!(
                "{case}\n  repeat: cargo xtask threads --scenario {} --seed {seed} --requests {} --repeat 20",
                images.name(),
                self.requests
            );
            verdict.violations.push(again);
        }
        verdict
    }

    fn case_in(&self, case: &Case, images: Images, dir: &Path) -> Result<Verdict, String> {
        let mut command = Command::new(&self.program);
        command.args(["work", "--scenario", images.name(), "--seed", &case.seed.to_string()]);
        command.args(["--requests", &self.requests.to_string()]).arg("--dir").arg(dir);
        let mut process =
            Process::start(command, dir).map_err(|e| format!("{}: {e}", self.program.display()))?;
        let judge = Judge::new(self.qemu, case, dir);
        let mut total = Verdict::default();
        let mut random = Random::new(case.seed ^ 0x0063_7261_7368);
        // By progress, not by time.
        let step = self.requests * 60;
        let mut next_copy = random.below(step);
        let mut copies = random.below(4);
        loop {
            if let Some(status) = process.ended().map_err(|e| e.to_string())? {
                if status.success() {
                    let last = judge.closed();
                    total.violations.extend(last.violations);
                    total.counts = last.counts;
                } else {
                    total.violations.push(format!("{status}: {}", process.messages()));
                }
                return Ok(total);
            }
            let progress = process.progress();
            if matches!(case.end, End::Killed(after) if progress > after) {
                process.kill();
                add(&mut total, judge.crashed());
                return Ok(total);
            }
            if copies > 0 && progress > next_copy {
                next_copy = progress + random.below(step);
                copies -= 1;
                if process.stop().is_ok() {
                    add(&mut total, judge.crashed());
                    process.go_on().map_err(|e| e.to_string())?;
                }
            }
            if let Some(who) = process.stuck(self.patience) {
                total.violations.push(format!(
                    "hang: {who} has done nothing for {:?}; under way: {}",
                    self.patience,
                    judge.under_way().join(", ")
                ));
                process.kill();
                add(&mut total, judge.crashed());
                return Ok(total);
            }
            std::thread::sleep(TICK);
        }
    }

    /// Runs a scenario with a seed.
    pub fn scenario(&self, scenario: Scenario, seed: u64) -> Verdict {
        let scratch = Scratch::new("threads");
        let mut violations =
            self.scenario_in(scenario, seed, scratch.path()).map_or_else(|what| vec![what], |()| Vec::new());
        if !violations.is_empty() {
            let name = scenario.name();
            violations
                .push(format!("  repeat: cargo xtask threads --scenario {name} --seed {seed} --repeat 20"));
        }
        Verdict { violations, ..Verdict::default() }
    }

    fn scenario_in(&self, scenario: Scenario, seed: u64, dir: &Path) -> Result<(), String> {
        let mut command = Command::new(&self.program);
        command.args(["work", "--scenario", scenario.name()]).args(["--seed", &seed.to_string()]);
        command.arg("--dir").arg(dir);
        let mut process =
            Process::start(command, dir).map_err(|e| format!("{}: {e}", self.program.display()))?;
        loop {
            if let Some(status) = process.ended().map_err(|e| e.to_string())? {
                if !status.success() {
                    return Err(format!("{}: {status}: {}", scenario.name(), process.messages()));
                }
                return scenario.judge(self.qemu, dir).map_err(|e| format!("{}: {e}", scenario.name()));
            }
            if process.stuck(self.patience).is_some() {
                let messages = process.messages();
                return Err(format!(
                    "{}: hang: nothing was done for {:?}: {messages}",
                    scenario.name(),
                    self.patience
                ));
            }
            std::thread::sleep(TICK);
        }
    }
}

fn add(total: &mut Verdict, other: Verdict) {
    total.violations.extend(other.violations);
    total.crashes += other.crashes;
    total.counts = other.counts;
}
