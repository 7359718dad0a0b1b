//! A server in use for as long as is wanted: guests that write, read, trim and flush, beside snapshots and backups. What it takes
//! is sampled, and what the disk shows is judged by a model, which is kept from one run to the next.

use crate::aging::{BLOCK, content};
use crate::nbd_client::{Client, command};
use crate::program::zebu;
use crate::qemu::Qemu;
use crate::random::Random;
use crate::server::Server;
use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

const IMAGE: &str = "disk.qcow2";
const MODEL: &str = "disk.model";
/// The samples of all runs, a line for each.
const SAMPLES: &str = "samples.csv";
const COLUMNS: &str = "run,seconds,requests,p50-us,p99-us,longest-us,resident-kib,descriptors,threads,file-mib,allocated-mib\n";
/// Guests, each with a part of the disk of its own.
const GUESTS: u64 = 4;
/// Blocks of a cluster of the image.
const CLUSTER: u64 = (64 << 10) / BLOCK;
/// Snapshots at a time.
const MOST_SNAPSHOTS: usize = 3;

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

/// What a guest noted: times of requests since they were taken last, in microseconds.
type Times = Mutex<Vec<u32>>;

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
    let part = blocks.len() as u64 / GUESTS / CLUSTER * CLUSTER;
    let times: Vec<Times> = (0..GUESTS).map(|_| Times::default()).collect();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let guests: Vec<_> = blocks
            .chunks_mut(part as usize)
            .zip(&times)
            .zip(0..GUESTS)
            .map(|((blocks, times), number)| {
                let stop = &stop;
                scope.spawn(move || {
                    let client = Client::open(server.socket(), "").map_err(|e| format!("connecting: {e}"))?;
                    let random = Random::new(plan.seed ^ number << 56);
                    let mut guest = Guest { client, random, first: number * part, blocks, times };
                    let done = guest.go_on(stop);
                    // The others end, too.
                    stop.store(true, Relaxed);
                    done.map_err(|e| format!("guest {number}: {e}"))
                })
            })
            .collect();
        let samples = watch(plan, server, &times, &stop, run);
        stop.store(true, Relaxed);
        for guest in guests {
            guest.join().map_err(|_| "a guest panicked".to_owned())??;
        }
        samples
    })
}

/// Takes samples, snapshots and backups until the time is over, or something failed.
fn watch(plan: &Plan, server: &Server, times: &[Times], stop: &AtomicBool, run: u64) -> Result<Vec<Sample>, String> {
    let dir = &plan.directory;
    let failed = |e: std::io::Error| format!("{}: {e}", dir.display());
    let mut file = File::options().append(true).open(dir.join(SAMPLES)).map_err(failed)?;
    let (start, mut taken, mut rounds) = (Instant::now(), Instant::now(), 0u32);
    let mut samples = Vec::new();
    let mut snapshots: Vec<String> = Vec::new();
    while start.elapsed() < plan.time && !stop.load(Relaxed) {
        std::thread::sleep(Duration::from_millis(20));
        if taken.elapsed() >= plan.sample {
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

/// A guest, and its part of the disk.
struct Guest<'a> {
    client: Client,
    random: Random,
    /// The first block of its part.
    first: u64,
    /// What its part must show: 0 for zeroes, else the number of the write.
    blocks: &'a mut [u32],
    times: &'a Times,
}

impl Guest<'_> {
    fn go_on(&mut self, stop: &AtomicBool) -> Result<(), String> {
        let mut writes = self.blocks.iter().copied().max().unwrap_or(0);
        while !stop.load(Relaxed) {
            let start = Instant::now();
            match self.random.below(100) {
                0..50 => {
                    writes += 1;
                    let range = self.range(16);
                    let bytes = content(self.on_disk(&range), writes);
                    let error = self.client.write(0, (self.first + range.start) * BLOCK, &bytes);
                    succeeded("write", error)?;
                    self.note(range, writes);
                }
                50..60 => {
                    let range = self.clusters();
                    self.ask("trim", command::TRIM, &range)?;
                    self.note(range, 0);
                }
                60..65 => {
                    let range = self.range(64);
                    self.ask("zeroes", command::WRITE_ZEROES, &range)?;
                    self.note(range, 0);
                }
                65..68 => succeeded("flush", self.client.call(0, command::FLUSH, 0, 0).map(|reply| reply.error))?,
                _ => {
                    let range = self.range(64);
                    self.verify(range)?;
                }
            }
            let micros = u32::try_from(start.elapsed().as_micros()).unwrap_or(u32::MAX);
            self.times.lock().unwrap_or_else(PoisonError::into_inner).push(micros);
        }
        Ok(())
    }

    /// Up to so many blocks of the part.
    fn range(&mut self, most: u64) -> Range<u64> {
        let len = self.random.between(1, most);
        let start = self.random.below(self.blocks.len() as u64 - len);
        start..start + len
    }

    /// Up to eight whole clusters of the part.
    fn clusters(&mut self) -> Range<u64> {
        let all = self.blocks.len() as u64 / CLUSTER;
        let len = self.random.between(1, 8);
        let start = self.random.below(all - len);
        start * CLUSTER..(start + len) * CLUSTER
    }

    fn on_disk(&self, range: &Range<u64>) -> Range<u64> {
        self.first + range.start..self.first + range.end
    }

    fn note(&mut self, range: Range<u64>, write: u32) {
        self.blocks[range.start as usize..range.end as usize].fill(write);
    }

    fn ask(&mut self, what: &str, command: u16, range: &Range<u64>) -> Result<(), String> {
        let (offset, len) = ((self.first + range.start) * BLOCK, (range.end - range.start) * BLOCK);
        succeeded(what, self.client.call(0, command, offset, len).map(|reply| reply.error))
    }

    fn verify(&mut self, range: Range<u64>) -> Result<(), String> {
        let (offset, len) = ((self.first + range.start) * BLOCK, (range.end - range.start) * BLOCK);
        let bytes = self.client.read(offset, len).map_err(|e| format!("read at {offset}: {e}"))?;
        for (block, found) in range.zip(bytes.chunks(BLOCK as usize)) {
            let (number, write) = (self.first + block, self.blocks[block as usize]);
            let is_right = match write {
                0 => found.iter().all(|byte| *byte == 0),
                write => found == content(number..number + 1, write),
            };
            if !is_right {
                return Err(format!("block {number} is not what write {write} made"));
            }
        }
        Ok(())
    }
}

fn succeeded(what: &str, answer: std::io::Result<u32>) -> Result<(), String> {
    match answer {
        Ok(0) => Ok(()),
        Ok(error) => Err(format!("{what}: error {error}")),
        Err(error) => Err(format!("{what}: {error}")),
    }
}
