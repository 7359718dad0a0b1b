//! Building what a run needs, once.

use super::job::{Job, Kind};
use crate::Outcome;
use crate::process::{run, shown};
use crate::root;
use crate::toolchain::{cargo, target_dir};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Stdio;

/// Optimised, with assertions and overflow checks kept.
const PROFILE: &str = "torture";

/// Where the built programs are.
pub(super) struct Programs {
    tests: BTreeMap<&'static str, PathBuf>,
    zebu: PathBuf,
    differential: PathBuf,
    fuzz: PathBuf,
}

impl Programs {
    /// Builds what `jobs` need.
    pub(super) fn build(jobs: &[&Job]) -> Outcome<Self> {
        let (mut engine, mut black_box) = (Vec::new(), Vec::new());
        for job in jobs {
            match job.kind {
                Kind::Seeds { target, .. } | Kind::Tests { target, .. } => engine.push(target),
                Kind::BlackBox { target } => black_box.push(target),
                Kind::Differential | Kind::Fuzz => {}
            }
        }
        let mut tests = BTreeMap::new();
        tests.extend(test_programs("zebu", &["--features", "test-faults"], &mut engine)?);
        tests.extend(test_programs("zebu-tests", &[], &mut black_box)?);
        let built = target_dir()?.join(PROFILE);
        let with = |kind| jobs.iter().any(|job| job.kind == kind);
        if with(Kind::Differential) || !black_box.is_empty() {
            let package = ["build", "--quiet", "--locked", "--profile", PROFILE, "--package"];
            run(cargo().args(package).arg("zebu-cli"))?;
            run(cargo().args(package).args(["zebu-tests", "--bin", "differential"]))?;
        }
        let fuzz = target_dir()?.join("fuzz");
        if with(Kind::Fuzz) {
            run(cargo()
                .current_dir(root().join("fuzz"))
                .args(["build", "--quiet", "--locked", "--release", "--example", "steady", "--target-dir"])
                .arg(&fuzz))?;
        }
        Ok(Self {
            tests,
            zebu: built.join("zebu"),
            differential: built.join("differential"),
            fuzz: fuzz.join("release/examples/steady"),
        })
    }

    /// The program of a test target.
    pub(super) fn test(&self, target: &str) -> &Path {
        self.tests.get(target).map_or(Path::new("not-built"), PathBuf::as_path)
    }

    pub(super) fn zebu(&self) -> &Path {
        &self.zebu
    }

    pub(super) fn differential(&self) -> &Path {
        &self.differential
    }

    pub(super) fn fuzz(&self) -> &Path {
        &self.fuzz
    }
}

/// Builds test targets of a package; cargo says where they are.
fn test_programs(
    package: &str,
    more: &[&str],
    targets: &mut Vec<&'static str>,
) -> Outcome<BTreeMap<&'static str, PathBuf>> {
    targets.sort_unstable();
    targets.dedup();
    if targets.is_empty() {
        return Ok(BTreeMap::new());
    }
    let mut command = cargo();
    command.args(["test", "--no-run", "--locked", "--profile", PROFILE, "--message-format=json"]);
    command.args(["--package", package]).args(more);
    for target in &*targets {
        command.args(["--test", target]);
    }
    let out = command
        .stderr(Stdio::inherit())
        .output()
        .map_err(|e| format!("cannot run {}: {e}", shown(&command)))?;
    if !out.status.success() {
        return Err(format!("{}: {}", shown(&command), out.status));
    }
    let mut found = BTreeMap::new();
    for line in String::from_utf8_lossy(&out.stdout).lines() {
        let Ok(message) = serde_json::from_str::<Value>(line) else { continue };
        let name = message["target"]["name"].as_str().unwrap_or_default();
        let program = message["executable"].as_str();
        if let (Some(target), Some(program)) = (targets.iter().find(|t| **t == name), program) {
            found.insert(*target, PathBuf::from(program));
        }
    }
    match targets.iter().find(|target| !found.contains_key(*target)) {
        Some(target) => Err(format!("cargo built no program for the test {target}")),
        None => Ok(found),
    }
}
