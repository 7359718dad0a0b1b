//! The command `bench`: zebu beside what a user would take instead, alternately.

mod allocation;
mod backups;
mod bars;
mod cache_costs;
mod clock;
mod compressed;
mod compressible;
mod copies;
mod fio;
mod headline;
mod lab;
mod load;
mod lookups;
mod mapping;
mod mapping_images;
mod opened;
mod opening;
mod page;
mod page_cache;
mod peers;
mod published;
mod record;
mod recycled;
mod requests;
mod servers;
mod serving;
mod system_calls;
mod whole;

use crate::process::{find, output, run};
use crate::setup::{self, Need};
use crate::toolchain::{cargo, target_dir};
use crate::{Outcome, root};
use clap::{Args, ValueEnum};
use clock::Clock;
use lab::{Extent, Lab};
use peers::{Peer, Peers};
use record::Saved;
use std::cell::{Cell, RefCell};
use std::path::{Path, PathBuf};
use std::process::Command;

#[derive(Args)]
pub(crate) struct BenchArgs {
    /// Only these tables (default: those of published figures, and what users compare; some take part only when they
    /// are named or with --all)
    #[arg(value_enum)]
    tables: Vec<Table>,
    /// All tables: those, too, that show a promise of zebu's alone
    #[arg(long, conflicts_with_all = ["tables", "quick"])]
    all: bool,
    /// Only the rows whose names contain this; may be given again
    #[arg(long = "row", value_name = "TEXT", conflicts_with = "save")]
    rows: Vec<String>,
    /// Small disks; unless tables or rows are named, a few rows of most tables: figures within five minutes
    #[arg(long, conflicts_with_all = ["full", "save"])]
    quick: bool,
    /// The sizes of the published figures (default)
    #[arg(long)]
    full: bool,
    /// Only beside these (default: all that are there)
    #[arg(long, value_enum, value_delimiter = ',', value_name = "PEER,...")]
    peers: Vec<Peer>,
    /// Measured rounds of each benchmark
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(5..))]
    rounds: u32,
    /// A folder on the disk to measure (ext4; some 40 GiB free); default: the target directory
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Keep the results in bench/results, and write the README's figures; a table's earlier ones are replaced. (Otherwise
    /// results and page are in target/bench-results)
    #[arg(long)]
    save: bool,
    /// Only write the page, and the README's figures, from what is saved in bench/results
    #[arg(long, conflicts_with_all = ["tables", "all", "save", "compare"])]
    page: bool,
    /// Name every figure that is worse than in these earlier results (a table's file, or a folder of them) by more than
    /// its spread
    #[arg(long, value_name = "OLD")]
    compare: Option<PathBuf>,
    /// A zebu to measure instead of this tree's release build
    #[arg(long)]
    zebu: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Table {
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
    /// Requests that reach the disk in a convert to raw; beside QEMU (2015)
    Alignment,
    /// First writes into clusters, by preallocation, on ext4 and XFS; beside QEMU (2020)
    Preallocation,
    /// First writes into clusters of 1 and 2 MiB, on ext4 and XFS; beside QEMU
    LargeClusters,
    /// First writes into clusters of overlays, with and without subclusters; beside QEMU
    Overlays,
    /// First writes by step and cluster size, on ext4 and XFS, and the calls that they take; beside QEMU (2019)
    Clusters,
    /// Reading back what was written at random and by several streams; beside QEMU (2021)
    Readback,
    /// Overwriting in place on small and large disks: CPU per request
    Growth,
    /// How recycled clusters are zeroed: write, fallocate, auto
    Recycled,
    /// Compressed images: making them and reading them in small pieces; beside QEMU's fastest setting (2021)
    Compress,
    /// Compressed backups: page cache, memory, and what they cost others on the disk; beside QEMU and fadvise (2021)
    Backup,
    /// Requests over NBD, by depth and connections: IOPS, latency, CPU of the server; beside QEMU's and nbdkit
    Serve,
    /// The same over vhost-user-blk, by rings; beside QEMU's
    ServeVhostUser,
    /// The same of the disk as a file (FUSE); beside QEMU's
    ServeFuse,
    /// Random requests to 16 GiB with a mapping cache that is too small, beside raw, a full cache and QEMU's slices (2017)
    Mapping,
    /// The same on a disk of 2 TiB with clusters of 2 MiB
    MappingLarge,
    /// What a miss costs by size of the cache, and what small slices cost where everything is cached
    Caches,
    /// The same as `mapping` on a disk that takes 2 ms for a read; how it scales with depth
    MappingLatency,
    /// Instructions of a lookup, by the size of slices (callgrind)
    Lookups,
    /// Reads through chains of 1 to 500 images, beside QEMU
    Chains,
    /// Two queues on one image in memory, beside one queue
    Queues,
    /// Memory of the process for disks of 16 GiB to 64 TiB
    Memory,
    /// Checking disks of 1 to 16 TiB that are wholly allocated: time and memory; beside QEMU
    Check,
    /// Creating and deleting an internal snapshot; beside QEMU
    Snapshots,
    /// Opening, and scattered first writes, by size of the disk from 1 GiB to 64 TiB; beside QEMU
    Sizes,
    /// Sequential reads of clusters that lie in order, and in none; beside QEMU
    Fragmentation,
}

/// What a quick run has if nothing is named: tables, and which of their rows.
const QUICK: &[(Table, &[&str])] = &[
    (Table::Preallocation, &["clusters, preallocation off", "preallocation off beside metadata"]),
    (Table::Clusters, &["cluster 64k, step 64k"]),
    (Table::Mapping, &["never written: reads, beside raw", "never written: reads, beside QEMU"]),
    (Table::Alignment, &["block requests of convert"]),
    (Table::Compress, &["convert -c of a file system, zstd", "convert -c of ones, zlib"]),
    (Table::Random, &["scattered reads, depth 32, beside QEMU"]),
    (Table::Convert, &["raw to qcow2"]),
    (Table::Serve, &["serve: 4 KiB random reads, depth 32"]),
    (Table::Chains, &["chain of 10,"]),
    (Table::Check, &["check of"]),
    (Table::Open, &["open"]),
    (Table::Snapshots, &["create a snapshot"]),
];

/// What shows a promise of zebu's alone: measured when it is named, or with `--all`.
const PROMISES: &[Table] = &[
    Table::LargeClusters,
    Table::Overlays,
    Table::Readback,
    Table::Growth,
    Table::Recycled,
    Table::ServeFuse,
    Table::Caches,
    Table::MappingLatency,
    Table::Lookups,
    Table::Queues,
    Table::Memory,
];

impl Table {
    fn name(self) -> &'static str {
        match self {
            Table::Random => "random",
            Table::Sequential => "sequential",
            Table::Convert => "convert",
            Table::Reflink => "reflink",
            Table::Open => "open",
            Table::Alignment => "alignment",
            Table::Preallocation => "preallocation",
            Table::LargeClusters => "large-clusters",
            Table::Overlays => "overlays",
            Table::Clusters => "clusters",
            Table::Readback => "readback",
            Table::Growth => "growth",
            Table::Recycled => "recycled",
            Table::Compress => "compress",
            Table::Backup => "backup",
            Table::Serve => "serve",
            Table::ServeVhostUser => "serve-vhost-user",
            Table::ServeFuse => "serve-fuse",
            Table::Mapping => "mapping",
            Table::MappingLarge => "mapping-large",
            Table::Caches => "caches",
            Table::MappingLatency => "mapping-latency",
            Table::Lookups => "lookups",
            Table::Chains => "chains",
            Table::Queues => "queues",
            Table::Memory => "memory",
            Table::Check => "check",
            Table::Snapshots => "snapshots",
            Table::Sizes => "sizes",
            Table::Fragmentation => "fragmentation",
        }
    }

    fn body(self) -> fn(&Lab) -> Outcome {
        match self {
            Table::Random => requests::random,
            Table::Sequential => requests::sequential,
            Table::Convert => copies::convert,
            Table::Reflink => copies::reflink,
            Table::Open => opening::open,
            Table::Alignment => copies::device_requests,
            Table::Preallocation => allocation::preallocation,
            Table::LargeClusters => allocation::large_clusters,
            Table::Overlays => allocation::overlays,
            Table::Clusters => allocation::clusters,
            Table::Readback => allocation::readback,
            Table::Growth => allocation::growth,
            Table::Recycled => recycled::recycled,
            Table::Compress => compressed::compress,
            Table::Backup => backups::backup,
            Table::Serve => serving::serving,
            Table::ServeVhostUser => serving::vhost_user,
            Table::ServeFuse => serving::fuse,
            Table::Mapping => mapping::mapping,
            Table::MappingLarge => mapping::large,
            Table::Caches => cache_costs::caches,
            Table::MappingLatency => mapping::latency,
            Table::Lookups => lookups::lookups,
            Table::Chains => cache_costs::chains,
            Table::Queues => cache_costs::queues,
            Table::Memory => cache_costs::memory,
            Table::Check => whole::check,
            Table::Snapshots => whole::snapshots,
            Table::Sizes => whole::sizes,
            Table::Fragmentation => whole::fragmentation,
        }
    }
}

pub(crate) fn run_all(args: &BenchArgs) -> Outcome {
    let kept = root().join("bench/results");
    if args.page {
        return publish(&kept);
    }
    // Read before they may be replaced.
    let old = args.compare.as_deref().map(Saved::read_all).transpose()?;
    let results = if args.save { kept.clone() } else { target_dir()?.join("bench-results") };
    std::fs::create_dir_all(&results).map_err(|e| format!("{}: {e}", results.display()))?;
    let (tables, rows) = chosen(args);
    let measured = measure(args, &tables, rows, &results, &kept);
    if args.save {
        publish(&results)?;
    } else {
        println!("{}", page::write(&results, &Saved::read_all(&results)?)?.display());
    }
    measured?;
    let Some(old) = old else { return Ok(()) };
    let mut new = Saved::read_all(&results)?;
    new.retain(|saved| tables.iter().any(|table| table.name() == saved.name));
    let worse = record::regressions(&old, &new)?;
    if worse.is_empty() {
        println!("nothing got worse by more than its spread");
        return Ok(());
    }
    Err(format!("worse by more than the spread:\n  {}", worse.join("\n  ")))
}

/// The tables to be measured, and parts of the names of their rows (none: all).
fn chosen(args: &BenchArgs) -> (Vec<Table>, Vec<String>) {
    let is_a_choice = args.quick && args.tables.is_empty() && args.rows.is_empty();
    if is_a_choice {
        let rows = QUICK.iter().flat_map(|(_, rows)| rows.iter().map(|row| (*row).to_owned()));
        return (QUICK.iter().map(|(table, _)| *table).collect(), rows.collect());
    }
    let tables = if args.tables.is_empty() {
        let others = |table: &Table| args.all || !PROMISES.contains(table);
        Table::value_variants().iter().copied().filter(others).collect()
    } else {
        args.tables.clone()
    };
    (tables, args.rows.clone())
}

/// The page and the README's figures, from what is saved.
fn publish(results: &Path) -> Outcome {
    let tables = Saved::read_all(results)?;
    println!("{}", page::write(results, &tables)?.display());
    headline::write(&root().join("README.md"), results, &tables)
}

/// The commit that is measured, marked if something else was built.
fn commit(args: &BenchArgs) -> Outcome<String> {
    let git = |words: &[&str]| output(Command::new("git").arg("-C").arg(root()).args(words));
    let mut commit = git(&["rev-parse", "--short=12", "HEAD"])?.trim().to_owned();
    if !git(&["status", "--porcelain", "--untracked-files=no", "--", "crates"])?.is_empty() {
        commit += ", changed";
    }
    if args.zebu.is_some() {
        commit = format!("built before {commit}");
    }
    Ok(commit)
}

/// Measures tables into `results`. How long each took the last time is known by what was `kept`.
fn measure(args: &BenchArgs, tables: &[Table], rows: Vec<String>, results: &Path, kept: &Path) -> Outcome {
    if let Err(missing) = setup::ensure(Need::Everything) {
        // The tables that need it say so.
        println!("note: {missing}");
    }
    let zebu = if let Some(zebu) = &args.zebu {
        zebu.clone()
    } else {
        run(cargo().args(["build", "--quiet", "--release", "--locked", "--package", "zebu-cli"]))?;
        target_dir()?.join("release/zebu")
    };
    let base = args.dir.clone().map_or_else(target_dir, Ok)?;
    let scratch = tempfile::TempDir::with_prefix_in("zebu-bench-", &base)
        .map_err(|e| format!("{}: {e}", base.display()))?;
    let tool = |name: &str| find(name).ok_or_else(|| format!("{name} is missing"));
    let extent = if args.quick { Extent::Quick } else { Extent::Full };
    let lab = Lab {
        zebu: std::path::absolute(zebu).map_err(|e| e.to_string())?,
        qemu_img: tool("qemu-img")?,
        qemu_io: tool("qemu-io")?,
        dir: scratch.path().to_owned(),
        gib: if args.quick { 1 } else { 4 },
        extent,
        peers: Peers::new(&args.peers),
        rounds: args.rounds as usize,
        results: results.to_owned(),
        table: Cell::new(""),
        rows,
        commit: commit(args)?,
        failures: RefCell::default(),
    };
    println!(
        "{}\nmedian ± median deviation [min .. max] of {} alternating rounds\n",
        lab.machine()?,
        lab.rounds
    );
    let names: Vec<&'static str> = tables.iter().map(|table| table.name()).collect();
    let mut clock = Clock::new(kept, extent);
    for (done, table) in tables.iter().enumerate() {
        let time = clock.begin(&names[done..]);
        eprintln!("== {} ({} of {}, {time})", table.name(), done + 1, tables.len());
        lab.begin(table.name())?;
        if let Some(published) = published::about(table.name()) {
            println!("{}", published.text());
        }
        // One that can't run here must not hide the figures of the others.
        if let Err(error) = table.body()(&lab) {
            lab.failures.borrow_mut().push(format!("{}: {error}", table.name()));
            lab.not_measured(table.name(), &error)?;
        }
        lab.keep()?;
        lab::empty(&lab.dir)?;
        clock.end();
        if args.save {
            clock.save()?;
        }
    }
    let mut failed = lab.failures.into_inner();
    failed.extend(lab.peers.not_built().map(|why| format!("the other Rust engines: {why}")));
    if failed.is_empty() { Ok(()) } else { Err(format!("not measured:\n  {}", failed.join("\n  "))) }
}
