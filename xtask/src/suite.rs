//! The command `test`: every check, in the order in which a mistake shows soonest.

use crate::interleave;
use crate::process::{output, run};
use crate::setup::{self, Need};
use crate::table::Table;
use crate::toolchain::{self, cargo, target_dir};
use crate::torture;
use crate::{Outcome, root};
use clap::Args;
use std::process::Command;
use std::time::{Duration, Instant};

/// The matrix moves gigabytes: its programs are optimised, with assertions and overflow checks kept.
const PROFILE: &str = "torture";

#[derive(Args)]
pub(crate) struct TestArgs {
    /// Leave out the matrix against QEMU, the static binary and the oldest supported Rust
    #[arg(long, conflicts_with = "long")]
    quick: bool,
    /// Run the long random-operation comparison too: 200 seeds, 200,000 operations and more
    #[arg(long)]
    long: bool,
    /// Run only what needs no QEMU
    #[arg(long)]
    skip_qemu: bool,
}

/// One step: what it is called and what it does.
type Step<'a> = (&'a str, Box<dyn Fn() -> Outcome<Verdict> + 'a>);

/// How a step ended, if not with an error.
enum Verdict {
    Passed,
    Skipped(String),
}

pub(crate) fn run_all(args: &TestArgs) -> Outcome {
    let with_qemu = !args.quick && !args.skip_qemu;
    // What the matrix needs is built anyway, and the simulated crashes run many times faster in it.
    let profile = if with_qemu { PROFILE } else { "dev" };
    let mut steps: Vec<Step<'_>> = vec![
        ("format", Box::new(|| passed(run(cargo().args(["fmt", "--all", "--check"]))))),
        ("lints", Box::new(|| passed(lints()))),
        ("unit and integration tests", Box::new(move || passed(unit_tests(profile)))),
        ("documentation", Box::new(|| passed(documentation()))),
    ];
    if with_qemu {
        steps.insert(0, ("set-up", Box::new(|| passed(setup::ensure(Need::Tests)))));
        steps.push(("matrix against QEMU", Box::new(|| passed(matrix()))));
    }
    if !args.quick {
        steps.push(("deliberate faults", Box::new(|| passed(mutants("1")))));
        steps.push(("torture, five minutes", Box::new(|| passed(torture_slice()))));
        steps.push(("chosen schedules", Box::new(|| passed(interleave::slice()))));
    }
    if args.long {
        steps.push(("deliberate faults, long", Box::new(|| passed(mutants("10")))));
        let long = ["--seeds", "250", "--ops", "1000"].map(String::from);
        steps.push(("random operations, long", Box::new(move || passed(differential(&long)))));
    }
    if !args.quick {
        steps.push(("static binary", Box::new(static_binary)));
        steps.push(("oldest supported Rust", Box::new(oldest_rust)));
    }
    let mut table = Table::new(["step", "time", ""]);
    let mut failure = None;
    for (name, step) in steps {
        println!("== {name}");
        let start = Instant::now();
        let verdict = step();
        let said = match &verdict {
            Ok(Verdict::Passed) => "ok".to_owned(),
            Ok(Verdict::Skipped(why)) => format!("skipped: {why}"),
            Err(_) => "FAILED".to_owned(),
        };
        table.row([name.to_owned(), seconds(start.elapsed()), said]);
        if let Err(error) = verdict {
            failure = Some(format!("{name}: {error}"));
            break;
        }
    }
    println!("\n{}", table.render());
    failure.map_or(Ok(()), Err)
}

/// The random-operation comparison by itself; `args` go to its runner.
pub(crate) fn differential(args: &[String]) -> Outcome {
    build_command()?;
    run(cargo()
        .args(["run", "--quiet", "--locked", "--package", "zebu-tests", "--bin", "differential"])
        .args(["--profile", PROFILE, "--"])
        .args(args))
}

fn lints() -> Outcome {
    // Workspaces of their own, which nothing here builds: their lock files have to follow ours.
    for dir in ["fuzz", "bench/peers"] {
        output(cargo().current_dir(root().join(dir)).args([
            "metadata",
            "--locked",
            "--format-version",
            "1",
        ]))?;
    }
    run(cargo().args(["clippy", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"]))?;
    // What is there for tests of the tests only.
    run(cargo()
        .args(["clippy", "--package", "zebu", "--features", "test-faults", "--all-targets", "--locked"])
        .args(["--", "-D", "warnings"]))
}

fn unit_tests(profile: &str) -> Outcome {
    run(cargo().args(["test", "--workspace", "--locked", "--exclude", "zebu-tests"]).args([
        "--profile",
        profile,
        "--no-fail-fast",
    ]))
}

/// Each defence of the engine is taken away in turn and must be missed, so many times over.
fn mutants(rounds: &str) -> Outcome {
    run(test_with_faults("mutants").env("ZEBU_MUTANT_ROUNDS", rounds).arg("killed"))
}

/// That the checks of the simulation see what is wrong, and limits that take large files otherwise; then simulated
/// operations, crash states and steps of a commit.
fn torture_slice() -> Outcome {
    run(test_with_faults("torture").arg("notices"))?;
    run(test_with_faults("faults").arg("space"))?;
    torture::slice()
}

/// One of the engine's tests that need deliberate faults.
fn test_with_faults(test: &str) -> Command {
    let mut command = cargo();
    command.args(["test", "--locked", "--package", "zebu", "--features", "test-faults"]);
    command.args(["--profile", PROFILE, "--test", test]);
    command
}

fn documentation() -> Outcome {
    run(cargo().env("RUSTDOCFLAGS", "-D warnings").args([
        "doc",
        "--workspace",
        "--no-deps",
        "--locked",
        "--document-private-items",
    ]))
}

fn build_command() -> Outcome {
    run(cargo().args(["build", "--quiet", "--locked", "--package", "zebu-cli", "--profile", PROFILE]))
}

fn matrix() -> Outcome {
    build_command()?;
    let binary = target_dir()?.join(PROFILE).join("zebu");
    run(cargo().env("ZEBU_BIN", binary).args([
        "test",
        "--locked",
        "--package",
        "zebu-tests",
        "--profile",
        PROFILE,
        "--no-fail-fast",
    ]))
}

fn static_binary() -> Outcome<Verdict> {
    match toolchain::musl_obstacle() {
        Some(obstacle) => Ok(Verdict::Skipped(obstacle)),
        None => passed(toolchain::musl()),
    }
}

fn oldest_rust() -> Outcome<Verdict> {
    match toolchain::msrv_obstacle() {
        Some(obstacle) => Ok(Verdict::Skipped(obstacle)),
        None => passed(toolchain::msrv()),
    }
}

fn passed(outcome: Outcome) -> Outcome<Verdict> {
    outcome.map(|()| Verdict::Passed)
}

fn seconds(duration: Duration) -> String {
    format!("{:.1} s", duration.as_secs_f64())
}
