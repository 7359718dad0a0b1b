//! The command `test`: every check.
//!
//! Steps of a lane run one after the other, lanes of a stage beside each other. The second lane has compilers and
//! computations; it gives way to the tests.

use crate::bindings;
use crate::c_interface;
use crate::interleave;
use crate::iotests;
use crate::nextest::{self, Tests};
use crate::package;
use crate::setup::{self, Need};
use crate::tenth::{ROTATING, SLOWEST, Tenth, is_shared_out, number_of};
use crate::test_programs::{Qemu, TestPrograms, cargo_test};
use crate::times::{self, StepTime};
use crate::toolchain;
use crate::torture;
use crate::under_load;
use crate::wheel;
use clap::Args;
use std::process::Command;
use std::time::Instant;
use zebu_bench::Outcome;
use zebu_bench::front;
use zebu_bench::process::{output, run};
use zebu_bench::workspace::cargo;
use zebu_bench::workspace::root;
use zebu_source::structure;

#[derive(Args)]
#[command(after_help = "Examples:
  cargo xtask test --quick                 # before every commit
  cargo xtask test                         # before every merge
  cargo xtask test --tenth 7               # as a run whose tenth of the long matrices is the eighth
  cargo xtask test --step lints --step doc
  cargo xtask test --list                  # each test, and which runs have it")]
pub(crate) struct TestArgs {
    /// Leave out the tests against QEMU, the deliberate faults, torture, packages and the oldest Rust; install nothing
    #[arg(long, conflicts_with_all = ["long", "under_load"])]
    quick: bool,
    /// Run everything: all tenths, packages, torture on all processors, each deliberate fault ten times, 250 seeds of
    /// random operations
    #[arg(long, conflicts_with = "tenth")]
    long: bool,
    /// Run only what needs no QEMU (with `--quick`, too)
    #[arg(long)]
    skip_qemu: bool,
    /// Tenth of the long matrices, 0 to 9, or `all` [default: the last digit of the number of commits]
    #[arg(long, value_name = "N")]
    tenth: Option<Tenth>,
    /// Run only the steps whose names contain this; may be given again
    #[arg(long = "step", value_name = "TEXT")]
    steps: Vec<String>,
    /// List each test, each step that not all runs have, and the runs that have it, and run nothing
    #[arg(long)]
    list: bool,
    /// Run the watched tests so many times, and all tests once, under a load of 30 beside a writer to the disk
    #[arg(long, value_name = "ROUNDS", num_args = 0..=1, default_missing_value = "20")]
    under_load: Option<u64>,
    /// Write the times of the steps and of the slowest tests into CONTRIBUTING.md
    #[arg(long)]
    record_times: bool,
}

impl TestArgs {
    fn tests(&self) -> Tests {
        let qemu = if self.skip_qemu { Qemu::LeftOut } else { Qemu::Asked };
        let chosen = self.tenth.or(self.long.then_some(Tenth::All));
        Tests { qemu, tenth: chosen.unwrap_or_else(Tenth::of_commit) }
    }
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
fn optional(name: &'static str, work: impl Fn() -> Outcome<Verdict> + Send + 'static) -> Step {
    Step { name, work: Box::new(work) }
}

/// Steps that run one after the other.
struct Lane {
    steps: Vec<Step>,
    priority: Priority,
}

/// The rank of a lane among those that run beside it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Priority {
    First,
    GivesWay,
}

/// All steps. The lanes of a stage run side by side.
fn stages(args: &TestArgs, tests: Tests) -> Vec<Vec<Lane>> {
    let alone = |steps| vec![Lane { steps, priority: Priority::First }];
    let looks = vec![
        step("format", || run(cargo().args(["fmt", "--all", "--check"]))),
        step("structure", structure::command),
    ];
    if args.quick {
        let rest = vec![
            step("lints", lints),
            step("tests of each crate", move || tests.quick()),
            step("documentation", documentation),
        ];
        return vec![alone(looks), alone(rest)];
    }
    let mut first = looks;
    if tests.qemu == Qemu::Asked {
        first.insert(0, step("set-up", move || set_up(tests.tenth)));
    }
    first.push(step("build of all tests", || TestPrograms::build().map(drop)));
    let mut run_tests = vec![step("tests", move || tests.all())];
    if tests.qemu == Qemu::Asked {
        run_tests.push(optional("QEMU's own tests, a selection", move || suite_of_qemu(tests.tenth)));
        run_tests.push(optional("module of Go", move || module_of_go(tests.tenth)));
        run_tests.push(optional("C interface", move || interface_of_c(tests.tenth)));
        run_tests.push(optional("package of Python", move || package_of_python(tests.tenth)));
    }
    let compiled = vec![
        step("lints", lints),
        step("documentation", documentation),
        step("examples in documentation", || run(cargo_test().arg("--doc"))),
        step("chosen schedules", move || interleave::slice(tests.tenth)),
        step("torture, two minutes", move || torture::slice(tests)),
        optional("fuzz targets, a minute", move || fuzz_targets(tests)),
        optional("oldest supported Rust", move || oldest_rust(tests.tenth)),
        optional("packages, installed in clean systems", move || packages(tests.tenth)),
    ];
    let beside = vec![
        Lane { steps: run_tests, priority: Priority::First },
        Lane { steps: compiled, priority: Priority::GivesWay },
    ];
    let mut stages = vec![alone(first), beside];
    if args.long {
        let mut long = vec![
            optional("release for each machine, installed in clean systems", || match package::obstacle() {
                Some(obstacle) => Ok(Verdict::Skipped(obstacle)),
                None => package::try_all().map(|()| Verdict::Passed),
            }),
            step("torture, five minutes on all processors", move || torture::long_slice(tests.qemu)),
            step("deliberate faults, ten times", move || faults_ten_times(tests.qemu)),
        ];
        if tests.qemu == Qemu::Asked {
            let random =
                || program_of_tests("differential", &["--seeds", "250", "--ops", "1000"].map(String::from));
            long.push(step("random operations, long", random));
        }
        stages.push(alone(long));
    }
    stages
}

/// The steps whose names contain one of these texts; all if there is none.
fn chosen(mut stages: Vec<Vec<Lane>>, texts: &[String]) -> Outcome<Vec<Vec<Lane>>> {
    if texts.is_empty() {
        return Ok(stages);
    }
    let steps = stages.iter().flatten().flat_map(|lane| &lane.steps);
    let all: Vec<&str> = steps.map(|step| step.name).collect();
    if let Some(unknown) = texts.iter().find(|text| !all.iter().any(|name| name.contains(*text))) {
        return Err(format!("no step has '{unknown}' in its name: {}", all.join(", ")));
    }
    for lane in stages.iter_mut().flatten() {
        lane.steps.retain(|step| texts.iter().any(|text| step.name.contains(text)));
    }
    Ok(stages)
}

pub(crate) fn command(args: &TestArgs) -> Outcome {
    let tests = args.tests();
    if args.list {
        return list();
    }
    if let Some(rounds) = args.under_load {
        return under_load::command(tests, rounds);
    }
    println!("{}", tests.tenth);
    let mut steps = Vec::new();
    let mut failures = Vec::new();
    for lanes in chosen(stages(args, tests), &args.steps)? {
        let ended: Vec<Vec<Ended>> = std::thread::scope(|scope| {
            let lanes: Vec<_> = lanes.into_iter().map(|lane| scope.spawn(move || run_lane(&lane))).collect();
            lanes.into_iter().map(|lane| lane.join().expect("a step returns its failure")).collect()
        });
        for ended in ended.into_iter().flatten() {
            failures.extend(ended.error.map(|error| format!("{}: {error}", ended.time.name())));
            steps.push(ended.time);
        }
        if !failures.is_empty() {
            break;
        }
    }
    times::print(&steps);
    if !failures.is_empty() {
        return Err(failures.join("\n"));
    }
    if args.record_times { times::record(&steps) } else { Ok(()) }
}

/// The end of a step.
struct Ended {
    time: StepTime,
    error: Option<String>,
}

/// Runs steps until one fails.
fn run_lane(lane: &Lane) -> Vec<Ended> {
    if lane.priority == Priority::GivesWay {
        // Of this thread, on Linux, and of what it starts. Without it, the tests are slower.
        let _ = rustix::process::setpriority_process(None, 10);
    }
    let mut ended = Vec::new();
    for Step { name, work } in &lane.steps {
        println!("== {name}");
        let start = Instant::now();
        let (said, error) = match work() {
            Ok(Verdict::Passed) => ("ok".to_owned(), None),
            Ok(Verdict::Skipped(why)) => (format!("skipped: {why}"), None),
            Err(error) => ("FAILED".to_owned(), Some(error)),
        };
        let failed = error.is_some();
        let time = StepTime::new(name, start.elapsed(), &said);
        println!("== {name}: {said}, {:.1} min", start.elapsed().as_secs_f64() / 60.0);
        ended.push(Ended { time, error });
        if failed {
            break;
        }
    }
    ended
}

/// Prints each test, each step that not all runs have, and which runs have it.
fn list() -> Outcome {
    for name in nextest::names()? {
        let runs = if name.contains(torture::STEPS_OF_A_COMMIT) {
            "every run (torture)".to_owned()
        } else if name.contains(SLOWEST) {
            "every run has a hundredth of its cases, --long all".to_owned()
        } else if ROTATING.iter().any(|rotating| name.contains(rotating)) {
            "every run has a tenth of its cases, --long all".to_owned()
        } else if is_shared_out(&name) {
            format!("--tenth {}, and --long", number_of(&name))
        } else {
            "every run".to_owned()
        };
        println!("{name}: {runs}");
    }
    for (step, number) in SHARED_OUT {
        println!("step '{step}': --tenth {number}, and --long");
    }
    println!(
        "step 'chosen schedules': parts with even tenths, the whole engine with odd ones; --long has all"
    );
    println!("step 'QEMU's own tests, a selection': every run has a tenth of them, --long all");
    Ok(())
}

/// A program of the tests by itself, with these arguments.
pub(crate) fn program_of_tests(name: &str, args: &[String]) -> Outcome {
    let tests = TestPrograms::build()?;
    run(Command::new(tests.binary(name)).env("ZEBU_BIN", tests.binary("zebu")).args(args))
}

/// Installs and fetches everything that this tenth needs, so that later steps build and run alone.
fn set_up(tenth: Tenth) -> Outcome {
    setup::ensure(Need::Tests)?;
    setup::ensure_of_tenth(tenth);
    run(cargo().args(["fetch", "--locked"]))?;
    for dir in OTHER_WORKSPACES {
        run(cargo().current_dir(root().join(dir)).args(["fetch", "--locked"]))?;
    }
    let mut obstacles = Vec::new();
    if iotests::obstacle().is_none() {
        obstacles.extend(iotests::bring().err());
    }
    if tenth.has(TENTH_OF_OLDEST_RUST) {
        obstacles.extend(toolchain::msrv_obstacle());
    }
    if tenth.has(TENTH_OF_PACKAGES) {
        obstacles.extend(toolchain::musl_obstacle());
        if package::obstacle().is_none() {
            obstacles.extend(package::bring().err());
        }
    }
    if tenth.has(TENTH_OF_GO) {
        obstacles.extend(setup::go().and_then(|_| bindings::bring_go()).err());
    }
    if tenth.has(TENTH_OF_PYTHON) {
        obstacles.extend(wheel::obstacle().or_else(|| bindings::bring_python().err()));
    }
    // The steps that need them say so once more.
    for obstacle in obstacles {
        println!("note: {obstacle}");
    }
    Ok(())
}

/// Workspaces of their own, which no step but that of their tenth builds.
const OTHER_WORKSPACES: [&str; 3] = ["fuzz", "bench/peers", wheel::PACKAGE];

fn lints() -> Outcome {
    zebu_source::prose::check()?;
    match front::commits_behind() {
        Ok(behind) if behind > front::MOST_COMMITS_BEHIND => {
            println!(
                "note: the README's figures are {behind} commits old: `cargo xtask bench --save` renews them"
            );
        }
        Ok(_) => {}
        Err(error) => println!("note: nobody knows how old the README's figures are: {error}"),
    }
    // Their lock files have to follow ours.
    for dir in OTHER_WORKSPACES {
        output(cargo().current_dir(root().join(dir)).args([
            "metadata",
            "--locked",
            "--format-version",
            "1",
        ]))?;
    }
    run(cargo().args(["clippy", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"]))
}

fn suite_of_qemu(tenth: Tenth) -> Outcome<Verdict> {
    match iotests::obstacle() {
        Some(obstacle) => Ok(Verdict::Skipped(obstacle)),
        None => iotests::selection(&TestPrograms::build()?.binary("zebu"), tenth).map(|()| Verdict::Passed),
    }
}

/// Each defence of the engine is taken away in turn and must be missed, ten times over.
fn faults_ten_times(qemu: Qemu) -> Outcome {
    let tests = TestPrograms::build()?;
    run(qemu
        .tell(&mut tests.of("zebu-engine", "simulated")?.command())
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

/// The tenth that has the fuzz targets.
const TENTH_OF_FUZZ_TARGETS: u64 = 3;
/// The tenth that has the packages.
const TENTH_OF_PACKAGES: u64 = 0;
/// The tenth that has the oldest Rust. Lints know in every run what the standard library lacked then.
const TENTH_OF_OLDEST_RUST: u64 = 5;
/// The tenth that has the module of Go.
const TENTH_OF_GO: u64 = 7;
/// The tenth that has the C interface.
const TENTH_OF_C: u64 = 4;
/// The tenth that has the package of Python.
const TENTH_OF_PYTHON: u64 = 9;

/// The steps that only one tenth has.
const SHARED_OUT: [(&str, u64); 6] = [
    ("module of Go", TENTH_OF_GO),
    ("C interface", TENTH_OF_C),
    ("package of Python", TENTH_OF_PYTHON),
    ("fuzz targets, a minute", TENTH_OF_FUZZ_TARGETS),
    ("oldest supported Rust", TENTH_OF_OLDEST_RUST),
    ("packages, installed in clean systems", TENTH_OF_PACKAGES),
];

fn module_of_go(tenth: Tenth) -> Outcome<Verdict> {
    if !tenth.has(TENTH_OF_GO) {
        return Ok(Verdict::Skipped(format!("tested with --tenth {TENTH_OF_GO}, and by --long")));
    }
    match bindings::go_obstacle() {
        Some(obstacle) => Ok(Verdict::Skipped(obstacle)),
        None => bindings::go().map(|()| Verdict::Passed),
    }
}

fn interface_of_c(tenth: Tenth) -> Outcome<Verdict> {
    if !tenth.has(TENTH_OF_C) {
        return Ok(Verdict::Skipped(format!("tested with --tenth {TENTH_OF_C}, and by --long")));
    }
    match c_interface::obstacle() {
        Some(obstacle) => Ok(Verdict::Skipped(obstacle)),
        None => c_interface::test().map(|()| Verdict::Passed),
    }
}

fn package_of_python(tenth: Tenth) -> Outcome<Verdict> {
    if !tenth.has(TENTH_OF_PYTHON) {
        return Ok(Verdict::Skipped(format!("tested with --tenth {TENTH_OF_PYTHON}, and by --long")));
    }
    match wheel::obstacle() {
        Some(obstacle) => Ok(Verdict::Skipped(obstacle)),
        None => bindings::python().map(|()| Verdict::Passed),
    }
}

fn fuzz_targets(tests: Tests) -> Outcome<Verdict> {
    if !tests.tenth.has(TENTH_OF_FUZZ_TARGETS) {
        return Ok(Verdict::Skipped(format!("run with --tenth {TENTH_OF_FUZZ_TARGETS}, and by --long")));
    }
    torture::fuzz_slice(tests).map(|()| Verdict::Passed)
}

fn packages(tenth: Tenth) -> Outcome<Verdict> {
    toolchain::manifests_are_complete()?;
    if !tenth.has(TENTH_OF_PACKAGES) {
        return Ok(Verdict::Skipped(format!(
            "built with --tenth {TENTH_OF_PACKAGES}, and by --long; the manifests are complete"
        )));
    }
    if let Some(obstacle) = toolchain::musl_obstacle() {
        return Ok(Verdict::Skipped(obstacle));
    }
    let program = toolchain::publish()?;
    match package::obstacle() {
        Some(obstacle) => println!("note: no package is tried: {obstacle}"),
        None => package::try_packed(&program)?,
    }
    Ok(Verdict::Passed)
}

fn oldest_rust(tenth: Tenth) -> Outcome<Verdict> {
    if !tenth.has(TENTH_OF_OLDEST_RUST) {
        return Ok(Verdict::Skipped(format!("checked with --tenth {TENTH_OF_OLDEST_RUST}, and by --long")));
    }
    match toolchain::msrv_obstacle() {
        Some(obstacle) => Ok(Verdict::Skipped(obstacle)),
        None => toolchain::msrv().map(|()| Verdict::Passed),
    }
}
