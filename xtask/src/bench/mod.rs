//! The command `bench`: zebu beside what a user would take instead, alternately.

mod allocation;
mod backups;
mod clock;
mod compressed;
mod compressible;
mod copies;
mod headline;
mod lab;
mod load;
mod mapping;
mod mapping_images;
mod opening;
mod page;
mod page_cache;
mod peers;
mod record;
mod recycled;
mod requests;
mod servers;
mod serving;
mod whole;

use crate::ab::Rounds;
use crate::process::{find, run};
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

#[derive(Args)]
pub(crate) struct BenchArgs {
    /// Only these tables (default: all)
    #[arg(value_enum)]
    tables: Vec<Table>,
    /// Only the rows whose names contain this; may be given again
    #[arg(long = "row", value_name = "TEXT", conflicts_with = "save")]
    rows: Vec<String>,
    /// Small disks: figures within minutes
    #[arg(long, conflicts_with = "full")]
    quick: bool,
    /// The sizes of the published figures (default)
    #[arg(long)]
    full: bool,
    /// Only beside these (default: all that are there)
    #[arg(long, value_enum, value_delimiter = ',', value_name = "PEER,...")]
    peers: Vec<Peer>,
    /// Measured rounds of each benchmark
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(3..))]
    rounds: u32,
    /// A folder on the disk to measure (ext4; some 40 GiB free); default: the target directory
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Write the results into bench/results too, as JSON lines; a table's earlier ones are replaced
    #[arg(long)]
    save: bool,
    /// Only write the page, and the README's figures, from what is saved in bench/results
    #[arg(long, conflicts_with_all = ["tables", "save", "compare"])]
    page: bool,
    /// Name every figure that is worse than in these earlier results (a table's file, or a folder of them) by more than
    /// its spread
    #[arg(long, value_name = "OLD", requires = "save")]
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
    /// First writes into clusters of overlays, with and without subclusters; beside QEMU
    Overlays,
    /// First writes by step and cluster size, on ext4 and XFS; beside QEMU (2019)
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
    /// Random requests with a mapping cache that is too small, beside raw, a full cache and QEMU's slices (2017)
    Mapping,
    /// The same on a disk that takes 2 ms for a read; how it scales with depth
    MappingLatency,
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
            Table::MappingLatency => "mapping-latency",
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
            Table::MappingLatency => mapping::latency,
            Table::Chains => mapping::chains,
            Table::Queues => mapping::queues,
            Table::Memory => mapping::memory,
            Table::Check => whole::check,
            Table::Snapshots => whole::snapshots,
            Table::Sizes => whole::sizes,
            Table::Fragmentation => whole::fragmentation,
        }
    }
}

pub(crate) fn run_all(args: &BenchArgs) -> Outcome {
    let results = root().join("bench/results");
    if args.page {
        return publish(&results);
    }
    // Read before they may be replaced.
    let old = args.compare.as_deref().map(Saved::read_all).transpose()?;
    measure(args, &results)?;
    if args.save {
        publish(&results)?;
    }
    let Some(old) = old else { return Ok(()) };
    let worse = record::regressions(&old, &Saved::read_all(&results)?);
    if worse.is_empty() {
        println!("nothing got worse by more than its spread");
        return Ok(());
    }
    Err(format!("worse by more than the spread:\n  {}", worse.join("\n  ")))
}

/// The page and the README's figures, from what is saved.
fn publish(results: &Path) -> Outcome {
    let tables = Saved::read_all(results)?;
    println!("{}", page::write(results, &tables)?.display());
    headline::write(&root().join("README.md"), &tables)
}

fn measure(args: &BenchArgs, results: &Path) -> Outcome {
    setup::ensure(Need::Everything)?;
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
        rounds: Rounds { measured: args.rounds as usize, warm_up: usize::from(!args.quick) },
        results: args.save.then(|| results.to_owned()),
        table: Cell::new(""),
        rows: args.rows.clone(),
        not_measured: RefCell::default(),
    };
    println!(
        "{}\nmedian ± median deviation [min .. max] of {} alternating rounds\n",
        lab.machine()?,
        lab.rounds.measured
    );
    let tables = if args.tables.is_empty() { Table::value_variants() } else { &args.tables[..] };
    let names: Vec<&'static str> = tables.iter().map(|table| table.name()).collect();
    let mut clock = Clock::new(results, extent);
    for (done, table) in tables.iter().enumerate() {
        let time = clock.begin(&names[done..]);
        eprintln!("== {} ({} of {}, {time})", table.name(), done + 1, tables.len());
        lab.begin(table.name())?;
        // One that can't run here must not hide the figures of the others.
        if let Err(error) = table.body()(&lab) {
            println!("{}: not measured: {error}\n", table.name());
            lab.not_measured.borrow_mut().push(format!("{}: {error}", table.name()));
        }
        lab::empty(&lab.dir)?;
        clock.end();
    }
    if args.save {
        clock.save()?;
    }
    let failed = lab.not_measured.into_inner();
    if failed.is_empty() { Ok(()) } else { Err(format!("not measured:\n  {}", failed.join("\n  "))) }
}
