//! The command `torture`: everything that looks for mistakes by chance, over fresh seeds, for as long as it is told.

mod job;
mod programs;
mod record;
mod report;

use crate::all;
use crate::nextest::Tests;
use crate::run_log::Origin;
use crate::tenth::Tenth;
use crate::test_programs::Qemu;
use clap::Args;
pub(crate) use job::STEPS_OF_A_COMMIT;
use job::{JOBS, Job};
use programs::{Kind, Programs};
use report::Report;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use zebu_bench::Outcome;

/// Seeds that one piece of work may use: pieces never share any.
const SEEDS_OF_A_PIECE: u64 = 1_000_000;

#[derive(Args)]
#[command(after_help = "Examples:
  cargo xtask torture --minutes 10
  cargo xtask torture --hours 8 --record      # adds the counts to docs/records.md
  cargo xtask torture --minutes 2 --only 'crash states' --lanes 1
  cargo xtask torture --minutes 10 --only encrypted

A piece that fails is shown with the one command that repeats it, and the rest goes on.")]
pub(crate) struct TortureArgs {
    /// How long, in hours
    #[arg(long, default_value_t = 0.0)]
    hours: f64,
    /// How long, in minutes, added to the hours
    #[arg(long, default_value_t = 0.0)]
    minutes: f64,
    /// Pieces at the same time; the processors if not given
    #[arg(long)]
    lanes: Option<usize>,
    /// Number that the seeds follow from; the time of day if not given
    #[arg(long)]
    seed: Option<u64>,
    /// Only the jobs whose names contain this; may be given several times
    #[arg(long)]
    only: Vec<String>,
    /// Leave out the jobs that need QEMU
    #[arg(long)]
    skip_qemu: bool,
    /// Where the report goes, as report.json and report.md
    #[arg(long, default_value = "target/torture-report")]
    out: PathBuf,
    /// Add the counts to docs/records/torture.jsonl, and write the totals into docs/records.md
    #[arg(long)]
    record: bool,
}

/// The part that every run of all checks has. Each tenth has its own seeds, so that ten runs have ten times as many, and what
/// fails can be repeated. Fresh seeds are for the runs that somebody looks at.
///
/// One lane: it runs beside other work.
pub(crate) fn slice(tests: Tests) -> Outcome {
    fixed(2.0, Some(1), seed(tests.tenth), tests.qemu, |kind| kind != Kind::Fuzz)
}

/// The fuzz targets in a plain loop. They are built for it, which takes longer.
pub(crate) fn fuzz_slice(tests: Tests) -> Outcome {
    fixed(1.0, Some(1), seed(tests.tenth), tests.qemu, |kind| kind == Kind::Fuzz)
}

fn seed(tenth: Tenth) -> u64 {
    match tenth {
        Tenth::One(number) => number + 1,
        Tenth::All => 1,
    }
}

/// More seeds.
pub(crate) fn long_slice(qemu: Qemu) -> Outcome {
    fixed(5.0, None, 1, qemu, |_| true)
}

fn fixed(minutes: f64, lanes: Option<usize>, seed: u64, qemu: Qemu, has: fn(Kind) -> bool) -> Outcome {
    let args = TortureArgs {
        hours: 0.0,
        minutes,
        lanes,
        seed: Some(seed),
        only: Vec::new(),
        skip_qemu: qemu == Qemu::LeftOut,
        out: PathBuf::from("target/torture-report"),
        record: false,
    };
    torture(&args, has)
}

pub(crate) fn command(args: &TortureArgs) -> Outcome {
    torture(args, |_| true)
}

/// Runs the jobs of the kinds that are asked for.
fn torture(args: &TortureArgs, has: fn(Kind) -> bool) -> Outcome {
    let time = args.hours * 3600.0 + args.minutes * 60.0;
    if time.is_nan() || time <= 0.0 || time > 1e7 {
        return Err("say for how long: --hours H or --minutes M".into());
    }
    let qemu = if args.skip_qemu { Qemu::LeftOut } else { Qemu::Asked };
    let is_possible = |job: &&Job| has(job.kind) && (qemu == Qemu::Asked || !job.kind.needs_qemu());
    let possible: Vec<&Job> = JOBS.iter().filter(is_possible).collect();
    let chosen: Vec<&Job> = possible
        .iter()
        .copied()
        .filter(|job| args.only.is_empty() || args.only.iter().any(|part| job.name.contains(part.as_str())))
        .collect();
    if chosen.is_empty() {
        let names: Vec<_> = possible.iter().map(|job| job.name).collect();
        return Err(format!("no job of that name; there are: {}", names.join(", ")));
    }
    let origin = if args.record { Origin::now()? } else { Origin::or_unknown() };
    let programs = Programs::build(&chosen.iter().map(|job| job.kind).collect::<Vec<_>>(), qemu)?;
    let lanes =
        args.lanes.or_else(|| std::thread::available_parallelism().ok().map(usize::from)).unwrap_or(1).max(1);
    let clock = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |since| since.as_secs());
    let seed = args.seed.unwrap_or_else(clock);
    let out = zebu_bench::workspace::root().join(&args.out);
    std::fs::create_dir_all(&out).map_err(|e| format!("{}: {e}", out.display()))?;
    let total = Duration::from_secs_f64(time);
    println!("{lanes} lanes, {:.1} minutes, seed {seed}", time / 60.0);
    let report = Mutex::new(Report::new(origin, seed, lanes));
    let queue = Mutex::new(Queue::new(chosen, total, seed));
    let start = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..lanes {
            scope.spawn(|| {
                while start.elapsed() < total {
                    let next = queue.lock().unwrap_or_else(|e| e.into_inner()).next();
                    let Some((piece, job)) = next else { break };
                    let first = seed.wrapping_mul(1_000_000_000).wrapping_add(piece * SEEDS_OF_A_PIECE);
                    let left = total.saturating_sub(start.elapsed());
                    let done = job.run(&programs, first, job::share(total).min(left.max(job::SHORTEST)));
                    println!("{:>7.1} s  {:<48} {}", start.elapsed().as_secs_f64(), job.name, done.brief());
                    report.lock().unwrap_or_else(|e| e.into_inner()).add(job, done);
                }
            });
        }
    });
    let mut report = report.into_inner().unwrap_or_else(|e| e.into_inner());
    report.finish(start.elapsed());
    report.write(&out)?;
    println!("\n{}", report.markdown());
    println!("report: {}", out.join("report.md").display());
    let recorded = if args.record { record::add(&report) } else { Ok(()) };
    all([report.verdict(), recorded])
}

/// The queue of work: what is run once first, then the others in turn, each as often as its weight says.
struct Queue<'a> {
    once: Vec<&'a Job>,
    turns: Vec<&'a Job>,
    pieces: u64,
    turn: usize,
}

impl<'a> Queue<'a> {
    /// Short runs with other seeds begin with other jobs.
    fn new(jobs: Vec<&'a Job>, total: Duration, seed: u64) -> Self {
        let (mut once, often): (Vec<_>, Vec<_>) = jobs.into_iter().partition(|job| job.weight == 0);
        // Where the time is short, the seeds matter more than what is the same in every run.
        once.retain(|job| total >= job.worth_it);
        once.reverse();
        let rounds = often.iter().map(|job| job.weight).max().unwrap_or(0);
        let mut turns = Vec::new();
        for round in 0..rounds {
            turns.extend(often.iter().filter(|job| job.weight > round));
        }
        let turn = seed.wrapping_mul(7) as usize % turns.len().max(1);
        Self { once, turns, pieces: 0, turn }
    }

    fn next(&mut self) -> Option<(u64, &'a Job)> {
        self.pieces += 1;
        if let Some(job) = self.once.pop() {
            return Some((self.pieces, job));
        }
        let job = self.turns.get(self.turn % self.turns.len().max(1))?;
        self.turn += 1;
        Some((self.pieces, job))
    }
}
