//! The command `bench`: zebu beside what a user would take instead, alternately.

use crate::lab::{Extent, Lab, empty};
use crate::peers::{Peer, Peers};
use crate::process::{find, output, run};
use crate::record::{Heading, Results, regressions};
use crate::tables::{TABLES, Table, When};
use crate::workspace::{cargo, root, target_dir};
use crate::{Outcome, front, page, threads};
use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser};
use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

/// The options of `bench`.
#[derive(Args)]
pub struct BenchArgs {
    /// Only these tables (default: those of published figures, and what users compare)
    #[arg(value_parser = PossibleValuesParser::new(TABLES.iter().map(in_help)))]
    tables: Vec<String>,
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
    /// Measured rounds of each row
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(5..))]
    rounds: u32,
    /// A folder on the disk to measure (ext4; some 40 GiB free); default: the target directory
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Keep the results in bench/results, and write the README's figures; a table's earlier ones are replaced. (Otherwise
    /// results and page are in target/bench-results)
    #[arg(long)]
    save: bool,
    /// Only write the page, and the figures of the README and of docs/threads.md, from what is saved in bench/results
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

fn in_help(table: &Table) -> PossibleValue {
    PossibleValue::new(table.name).help(format!("{}: {}", table.title, table.about))
}

/// The command `bench`.
pub fn command(args: &BenchArgs) -> Outcome {
    let kept = root().join("bench/results");
    if args.page {
        return publish(&kept);
    }
    // Read before they may be replaced.
    let old = args.compare.as_deref().map(Results::read_all).transpose()?;
    let results = if args.save { kept.clone() } else { target_dir()?.join("bench-results") };
    std::fs::create_dir_all(&results).map_err(|e| format!("{}: {e}", results.display()))?;
    let (measured, failed) = measure(args, &results)?;
    if args.save {
        publish(&kept)?;
    } else {
        println!("{}", page::write(&results, &Results::read_all(&results)?)?.display());
    }
    if let Some(old) = old {
        let worse = regressions(&old, &measured)?;
        if !worse.is_empty() {
            return Err(format!("worse by more than the spread:\n  {}", worse.join("\n  ")));
        }
        println!("nothing got worse by more than its spread");
    }
    if failed.is_empty() { Ok(()) } else { Err(format!("not measured:\n  {}", failed.join("\n  "))) }
}

/// The page, and the figures of the README and of `docs/threads.md`, from what is saved.
fn publish(results: &Path) -> Outcome {
    let tables = Results::read_all(results)?;
    println!("{}", page::write(results, &tables)?.display());
    front::write(&root().join("README.md"), results, &tables)?;
    threads::write(&root().join("docs/threads.md"), &tables)
}

/// The tables to be measured, and parts of the names of their rows (none: all).
fn chosen(args: &BenchArgs) -> (Vec<&'static Table>, Vec<String>) {
    let quick_rows = |table: &Table| match table.when {
        When::Always(rows) => rows,
        When::Asked => &[],
    };
    let is_wanted = |table: &&Table| {
        if !args.tables.is_empty() {
            args.tables.iter().any(|name| name == table.name)
        } else if args.quick && args.rows.is_empty() {
            !quick_rows(table).is_empty()
        } else {
            args.all || table.when != When::Asked
        }
    };
    let tables: Vec<&Table> = TABLES.iter().filter(is_wanted).collect();
    let rows = if args.quick && args.tables.is_empty() && args.rows.is_empty() {
        tables.iter().flat_map(|table| quick_rows(table)).map(|row| (*row).to_owned()).collect()
    } else {
        args.rows.clone()
    };
    (tables, rows)
}

/// Measures tables and keeps each in `results`; also says what could not be measured.
fn measure(args: &BenchArgs, results: &Path) -> Outcome<(Vec<Results>, Vec<String>)> {
    let zebu = if let Some(zebu) = &args.zebu {
        zebu.clone()
    } else {
        run(cargo().args(["build", "--quiet", "--release", "--locked", "--package", "zebu-cli"]))?;
        target_dir()?.join("release/zebu")
    };
    let base = args.dir.clone().map_or_else(target_dir, Ok)?;
    let scratch = tempfile::TempDir::with_prefix_in("zebu-bench-", &base)
        .map_err(|e| format!("{}: {e}", base.display()))?;
    let tool = |name: &str| find(name).ok_or_else(|| format!("{name} is missing: run `cargo xtask setup`"));
    let (tables, wanted) = chosen(args);
    let lab = Lab {
        zebu: std::path::absolute(zebu).map_err(|e| e.to_string())?,
        qemu_img: tool("qemu-img")?,
        qemu_io: tool("qemu-io")?,
        dir: scratch.path().to_owned(),
        extent: if args.quick { Extent::Quick } else { Extent::Full },
        peers: Peers::new(&args.peers),
        rounds: args.rounds as usize,
        wanted,
        rows: RefCell::default(),
    };
    let (machine, commit) = (lab.machine()?, commit(args)?);
    println!("{machine}\nmedian \u{b1} median deviation of {} alternating rounds\n", lab.rounds);
    let (mut measured, mut failed) = (Vec::new(), Vec::new());
    for (done, table) in (1..).zip(&tables) {
        eprintln!("== {} ({done} of {})", table.name, tables.len());
        let begin = Instant::now();
        // One that can't run here must not hide the figures of the others.
        if let Err(why) = (table.measure)(&lab) {
            lab.failed(table.name, why);
        }
        let rows = lab.rows.take();
        failed.extend(rows.iter().flat_map(|row| {
            row.failed.iter().map(|failed| format!("{}: {}: {}", row.row, failed.who, failed.why))
        }));
        let heading = Heading {
            machine: machine.clone(),
            date: output(Command::new("date").arg("+%F"))?.trim().to_owned(),
            extent: lab.extent.name().to_owned(),
            commit: commit.clone(),
            seconds: begin.elapsed().as_secs(),
        };
        let table = Results { table: table.name.to_owned(), heading, rows };
        table.write(results)?;
        measured.push(table);
        empty(&lab.dir)?;
    }
    Ok((measured, failed))
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
