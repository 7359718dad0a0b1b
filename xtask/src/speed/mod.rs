//! The command `bench speed`: zebu beside QEMU and fio, alternately.

mod copies;
mod opening;
mod requests;

use crate::ab::{Comparison, Rounds};
use crate::process::{find, output, run};
use crate::setup::{self, Need};
use crate::toolchain::{cargo, target_dir};
use crate::{Outcome, root};
use clap::{Args, ValueEnum};
use std::path::{Path, PathBuf};
use std::process::Command;

#[derive(Args)]
pub(crate) struct SpeedArgs {
    /// Measured rounds of each benchmark
    #[arg(long, default_value_t = 7)]
    rounds: usize,
    /// Only these (default: all)
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Benchmark>,
    /// A folder on the disk to measure (ext4; some 20 GiB free); default: the target directory
    #[arg(long)]
    dir: Option<PathBuf>,
    /// GiB of the disk images
    #[arg(long, default_value_t = 4)]
    gib: u64,
    /// Write the results into bench/results too, as JSON lines
    #[arg(long)]
    save: bool,
    /// A zebu to measure instead of this tree's release build
    #[arg(long)]
    zebu: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Benchmark {
    /// 4 KiB scattered reads and writes of allocated clusters, O_DIRECT, depth 32; beside QEMU and fio
    Random,
    /// 1 MiB sequential reads and writes, O_DIRECT; beside QEMU
    Sequential,
    /// Raw to qcow2 and back, O_DIRECT on both sides; beside QEMU's best setting
    Convert,
    /// The same on XFS by reflink, beside a copy
    Reflink,
    /// Opening a 16 TiB image on XFS; beside QEMU
    Open,
    /// Requests that reach the disk in a convert to raw; beside QEMU
    Requests,
}

/// A benchmark.
type Body = fn(&Lab) -> Outcome;

/// What every benchmark needs.
struct Lab {
    zebu: PathBuf,
    qemu_img: PathBuf,
    qemu_io: PathBuf,
    /// A folder of its own on the disk to measure.
    dir: PathBuf,
    gib: u64,
    rounds: Rounds,
    results: Option<PathBuf>,
}

impl Lab {
    fn report(&self, comparison: &Comparison) -> Outcome {
        println!("{}", comparison.render());
        self.results.as_ref().map_or(Ok(()), |file| comparison.append_to(file))
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    fn zebu(&self) -> Command {
        Command::new(&self.zebu)
    }

    fn qemu_img(&self) -> Command {
        Command::new(&self.qemu_img)
    }

    /// A raw file full of data that does not compress and has no zeroes.
    fn raw_file(&self) -> Outcome<PathBuf> {
        let file = self.file("data.raw");
        fill(&file, self.gib << 30)?;
        Ok(file)
    }
}

pub(crate) fn run_all(args: &SpeedArgs) -> Outcome {
    setup::ensure(Need::Everything)?;
    let zebu = if let Some(zebu) = &args.zebu {
        zebu.clone()
    } else {
        run(cargo().args(["build", "--quiet", "--release", "--locked", "--package", "zebu-cli"]))?;
        target_dir()?.join("release/zebu")
    };
    let base = args.dir.clone().map_or_else(target_dir, Ok)?;
    let scratch = tempfile::TempDir::with_prefix_in("zebu-speed-", &base)
        .map_err(|e| format!("{}: {e}", base.display()))?;
    let tool = |name: &str| find(name).ok_or_else(|| format!("{name} is missing"));
    let lab = Lab {
        zebu,
        qemu_img: tool("qemu-img")?,
        qemu_io: tool("qemu-io")?,
        dir: scratch.path().to_owned(),
        gib: args.gib,
        rounds: Rounds { measured: args.rounds, warm_up: 1 },
        results: args.save.then(|| root().join("bench/results/speed.jsonl")),
    };
    print_machine(&lab)?;
    let wanted = |benchmark| args.only.is_empty() || args.only.contains(&benchmark);
    let all: [(Benchmark, Body); 6] = [
        (Benchmark::Random, requests::random),
        (Benchmark::Sequential, requests::sequential),
        (Benchmark::Convert, copies::convert),
        (Benchmark::Reflink, copies::reflink),
        (Benchmark::Open, opening::open),
        (Benchmark::Requests, copies::device_requests),
    ];
    let mut failures = Vec::new();
    for (benchmark, body) in all {
        if wanted(benchmark) {
            // One that can't run here must not hide the figures of the others.
            if let Err(error) = body(&lab) {
                println!("{benchmark:?}: not measured: {error}\n");
                failures.push(format!("{benchmark:?}"));
            }
            empty(&lab.dir)?;
        }
    }
    if failures.is_empty() { Ok(()) } else { Err(format!("not measured: {}", failures.join(", "))) }
}

/// Figures mean nothing without the machine that they come from.
fn print_machine(lab: &Lab) -> Outcome {
    let read = |file: &str| std::fs::read_to_string(file).unwrap_or_default();
    let kernel = read("/proc/sys/kernel/osrelease");
    let cpus = read("/proc/cpuinfo");
    let model = cpus.lines().find_map(|l| l.strip_prefix("model name")).unwrap_or_default();
    let cores = std::thread::available_parallelism().map_or(0, std::num::NonZero::get);
    let filesystem = output(Command::new("stat").args(["-f", "-c", "%T"]).arg(&lab.dir))?;
    let qemu = setup::qemu_version().unwrap_or_default();
    println!(
        "Linux {}, {cores} x{}, {} file system, {qemu}\nmedian ± median deviation [min .. max] of {} alternating rounds\n",
        kernel.trim(),
        model
            .trim_start_matches(['\t', ':', ' '])
            .trim()
            .split_once(char::is_control)
            .map_or(model, |(m, _)| m),
        filesystem.trim(),
        lab.rounds.measured,
    );
    Ok(())
}

fn empty(dir: &Path) -> Outcome {
    for entry in std::fs::read_dir(dir).map_err(|e| format!("{}: {e}", dir.display()))?.flatten() {
        std::fs::remove_file(entry.path()).map_err(|e| format!("{}: {e}", entry.path().display()))?;
    }
    Ok(())
}

/// Fills a file with pseudo-random bytes (xorshift64*: fast, and nothing that a file system could compress).
fn fill(file: &Path, len: u64) -> Outcome {
    use std::io::Write;
    const CHUNK: usize = 1 << 20;
    let said = |e: std::io::Error| format!("{}: {e}", file.display());
    let mut out = std::fs::File::create(file).map_err(said)?;
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    let mut chunk = vec![0u8; CHUNK];
    for _ in 0..len / CHUNK as u64 {
        for word in chunk.chunks_exact_mut(8) {
            state ^= state >> 12;
            state ^= state << 25;
            state ^= state >> 27;
            word.copy_from_slice(&state.wrapping_mul(0x2545_F491_4F6C_DD1D).to_le_bytes());
        }
        out.write_all(&chunk).map_err(said)?;
    }
    out.sync_all().map_err(said)
}
