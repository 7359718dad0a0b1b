//! A server under mixed load for as long as is told: what it takes is recorded, and must stay what it was.

use clap::Parser;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, SystemTime};
use zebu_tests::days::{Plan, run};
use zebu_tests::qemu::Qemu;

#[derive(Parser)]
#[command(
    about = "Serve an image under mixed load, with snapshots and backups, and record what the server takes"
)]
struct Options {
    /// Where the image, its model and `samples.csv` lie; a run goes on with what the last one left
    directory: PathBuf,
    /// Minutes under load
    #[arg(long, default_value_t = 10.0)]
    minutes: f64,
    /// MiB of a new disk
    #[arg(long, default_value_t = 4096)]
    size: u64,
    /// Seconds between two samples
    #[arg(long, default_value_t = 10)]
    sample: u64,
    /// Seconds between two snapshots; a backup is made at every fourth
    #[arg(long, default_value_t = 60)]
    snapshot: u64,
    /// Options of `zebu serve`
    #[arg(long, default_value = "")]
    options: String,
    /// Seed; by the clock if none is given
    #[arg(long)]
    seed: Option<u64>,
}

fn main() -> ExitCode {
    let options = Options::parse();
    let Some(qemu) = Qemu::find() else { return ExitCode::SUCCESS };
    let clock = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(1, |time| time.as_secs());
    let plan = Plan {
        directory: options.directory,
        size: options.size << 20,
        time: Duration::from_secs_f64(options.minutes * 60.0),
        sample: Duration::from_secs(options.sample),
        snapshot: Duration::from_secs(options.snapshot),
        options: options.options,
        seed: options.seed.unwrap_or(clock),
    };
    match run(&qemu, &plan) {
        Ok(samples) => {
            let requests: u64 = samples.iter().map(|sample| sample.requests).sum();
            println!("seed {}: {requests} requests, {} samples in samples.csv", plan.seed, samples.len());
            ExitCode::SUCCESS
        }
        Err(what) => {
            eprintln!("seed {}: {what}", plan.seed);
            ExitCode::FAILURE
        }
    }
}
