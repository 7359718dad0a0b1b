//! The command `test`: every check, in the order in which a mistake shows soonest.

use crate::all;
use crate::interleave;
use crate::iotests;
use crate::setup::{self, Need};
use crate::side_by_side::{Named, run_side_by_side};
use crate::test_programs::{Qemu, TestProgram, TestPrograms, cargo_test, targets_without_qemu};
use crate::toolchain;
use crate::torture;
use clap::Args;
use std::process::Command;
use std::time::{Duration, Instant};
use zebu_bench::Outcome;
use zebu_bench::process::{output, run};
use zebu_bench::table::Table;
use zebu_bench::workspace::cargo;
use zebu_bench::workspace::root;
use zebu_source::structure;

#[derive(Args)]
pub(crate) struct TestArgs {
    /// Leave out the matrix against QEMU, the static binary and the oldest supported Rust; install nothing
    #[arg(long, conflicts_with = "long")]
    quick: bool,
    /// Run the long ones too: torture on all processors, each deliberate fault ten times, 250 seeds of random operations
    #[arg(long)]
    long: bool,
    /// Run only what needs no QEMU (with `--quick`, too)
    #[arg(long)]
    skip_qemu: bool,
    /// Run only the steps whose names contain this; may be given again
    #[arg(long = "step", value_name = "TEXT")]
    steps: Vec<String>,
}

/// How a step ended, if not with an error.
enum Verdict {
    Passed,
    Skipped(String),
}

/// A step: its name and its work.
struct Step {
    name: &'static str,
    work: Box<dyn Fn() -> Outcome<Verdict> + Send>,
}

/// A step that can't be skipped.
fn step(name: &'static str, work: impl Fn() -> Outcome + Send + 'static) -> Step {
    Step { name, work: Box::new(move || work().map(|()| Verdict::Passed)) }
}

/// A step that says itself whether it could be done.
fn optional(name: &'static str, work: fn() -> Outcome<Verdict>) -> Step {
    Step { name, work: Box::new(work) }
}

/// Steps that run one after the other.
type Lane = Vec<Step>;

/// All steps. The lanes of a stage run side by side.
///
/// A second lane is for compilers and for computations on one thread. Servers and clients whose time is watched have
/// the machine to themselves.
fn stages(args: &TestArgs) -> Vec<Vec<Lane>> {
    let qemu = if args.skip_qemu { Qemu::LeftOut } else { Qemu::Asked };
    let with_matrix = !args.quick && qemu == Qemu::Asked;
    let mut first = Vec::new();
    if with_matrix {
        first.push(step("set-up", || setup::ensure(Need::Tests)));
    }
    first.push(step("format", || run(cargo().args(["fmt", "--all", "--check"]))));
    first.push(step("structure", structure::command));
    first.push(step("lints", lints));
    if args.quick {
        first.push(step("unit and integration tests", move || quick_tests(qemu)));
        first.push(step("documentation", documentation));
        return vec![vec![first]];
    }
    first.push(step("build of all tests", || TestPrograms::build().map(drop)));
    first.push(step("unit and integration tests", move || unit_tests(qemu)));
    if with_matrix {
        first.push(step("matrix against QEMU", matrix));
        first.push(optional("QEMU's own tests, a selection", suite_of_qemu));
    }
    let beside = vec![
        step("documentation", documentation),
        optional("oldest supported Rust", oldest_rust),
        optional("static binary", static_binary),
        step("packages as they are published", toolchain::publish),
        step("chosen schedules", interleave::slice),
    ];
    let mut stages =
        vec![vec![first], vec![vec![step("torture, three minutes", move || torture::slice(qemu))], beside]];
    if args.long {
        let mut long = vec![
            step("torture, five minutes on all processors", move || torture::long_slice(qemu)),
            step("deliberate faults, ten times", move || faults_ten_times(qemu)),
        ];
        if with_matrix {
            let random = || differential(&["--seeds", "250", "--ops", "1000"].map(String::from));
            long.push(step("random operations, long", random));
        }
        stages.push(vec![long]);
    }
    stages
}

/// The steps whose names contain one of these texts; all if there is none.
fn chosen(mut stages: Vec<Vec<Lane>>, texts: &[String]) -> Outcome<Vec<Vec<Lane>>> {
    if texts.is_empty() {
        return Ok(stages);
    }
    let all: Vec<&str> = stages.iter().flatten().flatten().map(|step| step.name).collect();
    if let Some(unknown) = texts.iter().find(|text| !all.iter().any(|name| name.contains(*text))) {
        return Err(format!("no step has '{unknown}' in its name: {}", all.join(", ")));
    }
    for lane in stages.iter_mut().flatten() {
        lane.retain(|step| texts.iter().any(|text| step.name.contains(text)));
    }
    Ok(stages)
}

pub(crate) fn run_all(args: &TestArgs) -> Outcome {
    let mut table = Table::new(["step", "time", ""]);
    let mut failures = Vec::new();
    for lanes in chosen(stages(args), &args.steps)? {
        let ended: Vec<Vec<Ended>> = std::thread::scope(|scope| {
            let lanes: Vec<_> = lanes.into_iter().map(|lane| scope.spawn(move || run_lane(&lane))).collect();
            lanes.into_iter().map(|lane| lane.join().expect("a step returns its failure")).collect()
        });
        for step in ended.into_iter().flatten() {
            table.row([step.name.to_owned(), seconds(step.took), step.said]);
            failures.extend(step.error.map(|error| format!("{}: {error}", step.name)));
        }
        if !failures.is_empty() {
            break;
        }
    }
    println!("\n{}", table.render());
    if failures.is_empty() { Ok(()) } else { Err(failures.join("\n")) }
}

/// The end of a step.
struct Ended {
    name: &'static str,
    took: Duration,
    said: String,
    error: Option<String>,
}

/// Runs steps until one fails.
fn run_lane(lane: &[Step]) -> Vec<Ended> {
    let mut ended = Vec::new();
    for Step { name, work } in lane {
        println!("== {name}");
        let start = Instant::now();
        let (said, error) = match work() {
            Ok(Verdict::Passed) => ("ok".to_owned(), None),
            Ok(Verdict::Skipped(why)) => (format!("skipped: {why}"), None),
            Err(error) => ("FAILED".to_owned(), Some(error)),
        };
        let failed = error.is_some();
        ended.push(Ended { name, took: start.elapsed(), said, error });
        if failed {
            break;
        }
    }
    ended
}

/// The random-operation comparison by itself; `args` go to its runner.
pub(crate) fn differential(args: &[String]) -> Outcome {
    let tests = TestPrograms::build()?;
    run(Command::new(tests.binary("differential")).env("ZEBU_BIN", tests.binary("zebu")).args(args))
}

fn lints() -> Outcome {
    zebu_source::prose::check()?;
    // Workspaces of their own, which nothing here builds: their lock files have to follow ours.
    for dir in ["fuzz", "bench/peers"] {
        output(cargo().current_dir(root().join(dir)).args([
            "metadata",
            "--locked",
            "--format-version",
            "1",
        ]))?;
    }
    run(cargo().args(["clippy", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"]))
}

/// The tests that show a mistake soonest, without optimisation.
fn quick_tests(qemu: Qemu) -> Outcome {
    let tests = || {
        let mut command = cargo();
        command.args(["test", "--workspace", "--locked", "--exclude", "zebu-tests", "--no-fail-fast"]);
        qemu.tell(&mut command);
        command
    };
    let left_out = ["--", "--skip", "mutants::", "--skip", "torture::"];
    match qemu {
        Qemu::Asked => run(tests().args(left_out)),
        Qemu::LeftOut => {
            let chosen = run(tests().args(targets_without_qemu()?).args(left_out));
            all([chosen, run(tests().arg("--doc"))])
        }
    }
}

/// All tests but those against QEMU: also that each deliberate fault is caught. The steps of a commit are left to the
/// torture run.
fn unit_tests(qemu: Qemu) -> Outcome {
    let tests = TestPrograms::build()?;
    let named = |program: &TestProgram| {
        let mut command = program.command();
        qemu.tell(&mut command).args(["--skip", torture::STEPS_OF_A_COMMIT]);
        Named { name: program.shown(), command }
    };
    let is_left_out =
        |program: &TestProgram| program.is_black_box() || (qemu == Qemu::LeftOut && program.needs_qemu());
    let programs = tests.all().iter().filter(|program| !is_left_out(program)).map(named).collect();
    all([run_side_by_side(programs), run(cargo_test().arg("--doc"))])
}

/// The tests against QEMU: first those whose time is watched, each alone, then the others beside each other.
fn matrix() -> Outcome {
    let tests = TestPrograms::build()?;
    let command = |program: &TestProgram| {
        let mut command = program.command();
        command.env("ZEBU_BIN", tests.binary("zebu"));
        command
    };
    let black_box = || tests.all().iter().filter(|program| program.is_black_box());
    let run_one = |program: &TestProgram| {
        println!("-- {}", program.shown());
        run(&mut command(program))
    };
    let alone = all(black_box().filter(|program| program.is_watched()).map(run_one));
    let named = |program: &TestProgram| Named { name: program.shown(), command: command(program) };
    all([alone, run_side_by_side(black_box().filter(|program| !program.is_watched()).map(named).collect())])
}

fn suite_of_qemu() -> Outcome<Verdict> {
    match iotests::obstacle() {
        Some(obstacle) => Ok(Verdict::Skipped(obstacle)),
        None => iotests::selection(&TestPrograms::build()?.binary("zebu")).map(|()| Verdict::Passed),
    }
}

/// Each defence of the engine is taken away in turn and must be missed, ten times over.
fn faults_ten_times(qemu: Qemu) -> Outcome {
    let tests = TestPrograms::build()?;
    run(qemu
        .tell(&mut tests.of("simulated")?.command())
        .env("ZEBU_MUTANT_ROUNDS", "10")
        .arg("mutants::killed::"))
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

fn static_binary() -> Outcome<Verdict> {
    match toolchain::musl_obstacle() {
        Some(obstacle) => Ok(Verdict::Skipped(obstacle)),
        None => toolchain::musl().map(|()| Verdict::Passed),
    }
}

fn oldest_rust() -> Outcome<Verdict> {
    match toolchain::msrv_obstacle() {
        Some(obstacle) => Ok(Verdict::Skipped(obstacle)),
        None => toolchain::msrv().map(|()| Verdict::Passed),
    }
}

fn seconds(duration: Duration) -> String {
    format!("{:.1} s", duration.as_secs_f64())
}
