//! A server in use for as long as is wanted: guests that write, read, trim and flush, beside snapshots and backups. What it takes
//! is sampled, and what the disk shows is judged by a model, which is kept from one run to the next.

use crate::aging::BLOCK;
use crate::guests::{self, Times, Trims};
use crate::program::zebu;
use crate::qemu::Qemu;
use crate::server::Server;
use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

const IMAGE: &str = "disk.qcow2";
const MODEL: &str = "disk.model";
/// The samples of all runs, a line for each.
const SAMPLES: &str = "samples.csv";
const COLUMNS: &str =
    "run,seconds,requests,p50-us,p99-us,longest-us,resident-kib,descriptors,threads,file-mib,allocated-mib\n";
/// Snapshots at a time.
const MOST_SNAPSHOTS: usize = 3;
/// Samples of the shortest run: on a busy machine it takes longer than it is to.
const LEAST_SAMPLES: usize = 4;

/// How long it goes on, and how.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Where the image and its model lie. They are made if they are not there.
    pub directory: PathBuf,
    /// Bytes of a new disk.
    pub size: u64,
    /// The time under load.
    pub time: Duration,
    /// The time between two samples.
    pub sample: Duration,
    /// The time between two snapshots; a backup is made at every fourth.
    pub snapshot: Duration,
    /// Options of the server.
    pub options: String,
    /// Seed of this run.
    pub seed: u64,
}

/// A sample of what a server takes.
#[derive(Debug, Clone, Default)]
pub struct Sample {
    /// Requests since the sample before.
    pub requests: u64,
    /// The slowest but one in a hundred of them, in microseconds.
    pub p99: u32,
    /// KiB.
    pub resident: u64,
    /// Open descriptors.
    pub descriptors: usize,
    /// Threads.
    pub threads: usize,
    /// Bytes of the image's file.
    pub file: u64,
}

/// Runs it. The samples of this run.
///
/// # Errors
/// A request that failed, a block that shows something else, or an image that is not clean.
///
/// # Panics
/// If a command or the server fails.
pub fn run(qemu: &Qemu, plan: &Plan) -> Result<Vec<Sample>, String> {
    let dir = &plan.directory;
    let failed = |e: std::io::Error| format!("{}: {e}", dir.display());
    if !dir.join(IMAGE).exists() {
        zebu(dir, ["create", "-q", "-f", "qcow2", IMAGE, &plan.size.to_string()]).ok();
        File::create(dir.join(MODEL)).and_then(|file| file.set_len(plan.size / BLOCK * 4)).map_err(failed)?;
        std::fs::write(dir.join(SAMPLES), COLUMNS).map_err(failed)?;
    }
    let model = std::fs::read(dir.join(MODEL)).map_err(failed)?;
    let mut blocks: Vec<u32> =
        model.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().expect("4 bytes"))).collect();
    let runs = std::fs::read_to_string(dir.join(SAMPLES)).map_err(failed)?;
    let number = runs.lines().last().and_then(|line| line.split(',').next()?.parse().ok()).unwrap_or(0) + 1;

    let server = Server::start(dir, &format!("--control ctl.sock {} -f qcow2 {IMAGE}", plan.options));
    let samples = under_load(plan, &server, &mut blocks, number)?;
    server.stop();
    let model: Vec<u8> = blocks.iter().flat_map(|write| write.to_le_bytes()).collect();
    std::fs::write(dir.join(MODEL), model).map_err(failed)?;
    qemu.check_clean(dir, IMAGE)?;
    Ok(samples)
}

fn under_load(plan: &Plan, server: &Server, blocks: &mut [u32], run: u64) -> Result<Vec<Sample>, String> {
    guests::beside(server, blocks, plan.seed, Trims::ReadAsZero, |times, stop| {
        watch(plan, server, times, stop, run)
    })
}

/// Takes samples, snapshots and backups until the time is over, or something failed.
fn watch(
    plan: &Plan,
    server: &Server,
    times: &[Times],
    stop: &AtomicBool,
    run: u64,
) -> Result<Vec<Sample>, String> {
    let dir = &plan.directory;
    let failed = |e: std::io::Error| format!("{}: {e}", dir.display());
    let mut file = File::options().append(true).open(dir.join(SAMPLES)).map_err(failed)?;
    let (start, mut taken, mut rounds) = (Instant::now(), Instant::now(), 0u32);
    let mut samples = Vec::new();
    let mut snapshots: Vec<String> = Vec::new();
    let is_served =
        || times.iter().any(|times| !times.lock().unwrap_or_else(PoisonError::into_inner).is_empty());
    while (start.elapsed() < plan.time || samples.len() < LEAST_SAMPLES) && !stop.load(Relaxed) {
        std::thread::sleep(Duration::from_millis(20));
        // Guests that nobody answers fail by themselves.
        if taken.elapsed() >= plan.sample && is_served() {
            taken = Instant::now();
            let (sample, line) = sample(dir, server, times)?;
            writeln!(file, "{run},{},{line}", start.elapsed().as_secs()).map_err(failed)?;
            samples.push(sample);
        }
        if start.elapsed() >= plan.snapshot * (rounds + 1) {
            rounds += 1;
            if snapshots.len() == MOST_SNAPSHOTS {
                zebu(dir, ["ctl", "ctl.sock", "snapshot-delete", "", &snapshots.remove(0)]).ok();
            }
            let name = format!("run{run}-{rounds}");
            zebu(dir, ["ctl", "ctl.sock", "snapshot-create", "", &name]).ok();
            snapshots.push(name);
            if rounds.is_multiple_of(4) {
                let _ = std::fs::remove_file(dir.join("disk.backup"));
                zebu(dir, ["ctl", "ctl.sock", "backup-start", "-w", "", "disk.backup"]).ok();
            }
        }
    }
    for name in &snapshots {
        zebu(dir, ["ctl", "ctl.sock", "snapshot-delete", "", name]).ok();
    }
    Ok(samples)
}

fn sample(dir: &Path, server: &Server, times: &[Times]) -> Result<(Sample, String), String> {
    use std::os::unix::fs::MetadataExt;
    let mut all: Vec<u32> = Vec::new();
    for times in times {
        all.append(&mut times.lock().unwrap_or_else(PoisonError::into_inner));
    }
    all.sort_unstable();
    let at = |percent: usize| all.get(all.len() * percent / 100).or(all.last()).copied().unwrap_or(0);
    let file = std::fs::metadata(dir.join(IMAGE)).map_err(|e| e.to_string())?;
    let sample = Sample {
        requests: all.len() as u64,
        p99: at(99),
        resident: server.resident_kib(),
        descriptors: server.descriptors(),
        threads: server.threads().len(),
        file: file.len(),
    };
    let mut line = format!("{},{},{},{}", sample.requests, at(50), sample.p99, at(100));
    let _ = write!(line, ",{},{},{}", sample.resident, sample.descriptors, sample.threads);
    let _ = write!(line, ",{},{}", sample.file >> 20, file.blocks() / 2048);
    Ok((sample, line))
}
