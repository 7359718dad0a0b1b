//! Threads that share an image, watched and judged: random cases over seeds, and named scenarios
//! (`zebu_tests::thread_stress`).

use clap::{Parser, Subcommand};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};
use zebu_tests::qemu::Qemu;
use zebu_tests::thread_stress::plan::{Case, Images};
use zebu_tests::thread_stress::report::Report;
use zebu_tests::thread_stress::runner::Runner;
use zebu_tests::thread_stress::scenarios::Scenario;
use zebu_tests::thread_stress::threads;

/// Requests of a random case, about.
const REQUESTS: u64 = 6000;

#[derive(Parser)]
#[command(name = "threads", about = "Threads that share an image, judged by what each of them saw")]
struct Options {
    #[command(subcommand)]
    work: Option<Work>,
    /// Run fresh seeds for so long
    #[arg(long, default_value_t = 0.0)]
    minutes: f64,
    /// Run fresh seeds for so long
    #[arg(long, default_value_t = 0.0)]
    hours: f64,
    /// The first seed; by the clock if none is given
    #[arg(long)]
    seed: Option<u64>,
    /// Run so many seeds, whatever time it takes
    #[arg(long)]
    seeds: Option<u64>,
    /// Run each seed so often: the same seed meets other schedules
    #[arg(long, default_value_t = 1)]
    repeat: u64,
    /// Run only this: `random`, `encrypted` (random, on encrypted images), `copy-on-read` (random, reads copy from a base), or the name of a scenario (`list` shows them)
    #[arg(long)]
    scenario: Option<String>,
    /// Requests of a random case, about
    #[arg(long, default_value_t = REQUESTS)]
    requests: u64,
    /// Seconds without any sign of life that are a hang
    #[arg(long, default_value_t = 60)]
    patience: u64,
    /// Go on after a violation
    #[arg(long)]
    keep_going: bool,
    /// Write the counts into this file, as JSON
    #[arg(long)]
    report: Option<PathBuf>,
}

#[derive(Subcommand)]
enum Work {
    /// Run one case or scenario in this process, without a judge
    #[command(hide = true)]
    Work {
        #[arg(long)]
        seed: u64,
        #[arg(long)]
        dir: PathBuf,
        #[arg(long, default_value_t = REQUESTS)]
        requests: u64,
        #[arg(long)]
        scenario: Option<String>,
    },
    /// List the scenarios
    List,
}

/// Cases that are run in turns.
#[derive(Debug, Clone, Copy)]
enum What {
    Random(Images),
    Named(Scenario),
}

/// Random cases between every two scenarios.
const RANDOM_SHARE: usize = 4;

fn chosen(name: Option<&str>) -> Result<Vec<What>, String> {
    let random = std::iter::repeat_n(What::Random(Images::Any), RANDOM_SHARE);
    match name {
        None => Ok(Scenario::ALL
            .into_iter()
            .flat_map(|scenario| random.clone().chain([What::Named(scenario)]))
            .collect()),
        Some(name) => {
            let named =
                Images::named(name).map(What::Random).or_else(|| Scenario::named(name).map(What::Named));
            named.map(|what| vec![what]).ok_or_else(|| format!("no scenario {name:?}; `list` shows them"))
        }
    }
}

fn run(options: &Options) -> Result<bool, String> {
    let what = chosen(options.scenario.as_deref())?;
    let Some(qemu) = Qemu::find() else { return Ok(true) };
    let time = Duration::try_from_secs_f64(options.minutes * 60.0 + options.hours * 3600.0)
        .map_err(|e| e.to_string())?;
    let clock = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let first = options.seed.unwrap_or_else(|| clock.map_or(1, |since| since.as_nanos() as u64));
    let seeds = options.seeds.or((time.is_zero()).then_some(1));
    let runner = Runner {
        program: std::env::current_exe().map_err(|e| e.to_string())?,
        qemu: &qemu,
        patience: Duration::from_secs(options.patience),
        requests: options.requests,
    };
    let start = Instant::now();
    let mut report = Report::new(first);
    for (number, what) in (0..).zip(what.iter().cycle()) {
        let is_over = seeds.map_or(start.elapsed() >= time, |seeds| number >= seeds);
        if is_over {
            break;
        }
        let seed = first + number;
        for _ in 0..options.repeat {
            let verdict = match what {
                What::Random(images) => runner.case(seed, *images),
                What::Named(scenario) => runner.scenario(*scenario, seed),
            };
            for violation in &verdict.violations {
                eprintln!("{violation}");
            }
            report.add(seed, &verdict);
            if !report.is_clean() && !options.keep_going {
                break;
            }
        }
        if !report.is_clean() && !options.keep_going {
            break;
        }
    }
    println!("{report}");
    if let Some(path) = &options.report {
        std::fs::write(path, report.to_json()).map_err(|e| format!("{}: {e}", path.display()))?;
    }
    Ok(report.is_clean())
}

fn main() -> ExitCode {
    let options = Options::parse();
    match &options.work {
        Some(Work::Work { seed, dir, requests, scenario }) => {
            // Nobody watches it any more when its parent is gone.
            let signal = rustix::process::Signal::KILL;
            if let Err(e) = rustix::process::set_parent_process_death_signal(Some(signal)) {
                eprintln!("threads: {e}");
            }
            let name = scenario.as_deref().unwrap_or(Images::Any.name());
            match (Images::named(name), Scenario::named(name)) {
                (Some(images), _) => threads::run(&Case::chosen_by(*seed, *requests, images), dir),
                (None, Some(scenario)) => scenario.run(*seed, dir),
                (None, None) => {
                    eprintln!("no such scenario");
                    return ExitCode::FAILURE;
                }
            }
            return ExitCode::SUCCESS;
        }
        Some(Work::List) => {
            for scenario in Scenario::ALL {
                println!("{}", scenario.name());
            }
            return ExitCode::SUCCESS;
        }
        None => {}
    }
    match run(&options) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(what) => {
            eprintln!("threads: {what}");
            ExitCode::FAILURE
        }
    }
}
