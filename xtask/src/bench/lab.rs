//! What every benchmark needs: programs, a folder, sizes, and where results go.

use super::peers::Peers;
use crate::Outcome;
use crate::ab::{CannotRun, Comparison, Rounds, Row, Side, compare};
use crate::mount::{Kind, Mounted};
use crate::process::{output, run};
use crate::setup;
use std::cell::{Cell, RefCell};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

/// How much is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Extent {
    /// Small disks: the whole within minutes.
    Quick,
    /// The sizes that the published figures have.
    Full,
}

impl Extent {
    /// As it is asked for on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Extent::Quick => "quick",
            Extent::Full => "full",
        }
    }
}

/// Programs, a folder of its own, sizes, and the sink of results.
pub(crate) struct Lab {
    pub(crate) zebu: PathBuf,
    pub(crate) qemu_img: PathBuf,
    pub(crate) qemu_io: PathBuf,
    /// A folder of its own on the disk to measure.
    pub(crate) dir: PathBuf,
    /// GiB of the disk images with data in them.
    pub(crate) gib: u64,
    pub(crate) extent: Extent,
    pub(crate) peers: Peers,
    /// In each of which every side runs once.
    pub(crate) rounds: usize,
    /// Where a table's results go, one file each.
    pub(crate) results: PathBuf,
    /// The table that is being measured.
    pub(crate) table: Cell<&'static str>,
    /// Only rows whose names contain one of these; none: all.
    pub(crate) rows: Vec<String>,
    /// Which zebu is measured.
    pub(crate) commit: String,
    /// What could not be measured, with the reason.
    pub(crate) failures: RefCell<Vec<String>>,
}

impl Lab {
    /// Measures two sides alternately; prints and keeps the result. A side that can't run is shown as such, and the
    /// other benchmarks go on. Nothing is measured beside a peer that is not asked for.
    pub(crate) fn compare(&self, name: &str, sides: [Side<'_>; 2]) -> Outcome {
        self.compare_all(Vec::from(sides), vec![Row::of(name, [0, 1])])
    }

    /// Measures one side alternately with some others, and compares it with each: a row for each.
    pub(crate) fn compare_each(&self, one: Side<'_>, others: Vec<(String, Side<'_>)>) -> Outcome {
        let (names, others): (Vec<String>, Vec<Side<'_>>) = others.into_iter().unzip();
        let rows = (1..).zip(names).map(|(place, name)| Row::of(name, [0, place])).collect();
        self.compare_all([one].into_iter().chain(others).collect(), rows)
    }

    /// Measures sides in turn, each once a round, and makes the rows of them. What no wanted row needs does not run.
    pub(crate) fn compare_all(&self, sides: Vec<Side<'_>>, mut rows: Vec<Row>) -> Outcome {
        rows.retain(|row| {
            self.wants(&row.name) && row.pair.iter().all(|place| self.peers.take_part(&sides[*place].label))
        });
        let (mut places, mut kept) = (vec![0; sides.len()], Vec::new());
        for (place, side) in sides.into_iter().enumerate() {
            if rows.iter().any(|row| row.pair.contains(&place)) {
                places[place] = kept.len();
                kept.push(side);
            }
        }
        for row in &mut rows {
            row.pair = row.pair.map(|place| places[place]);
        }
        let rounds = Rounds { measured: self.rounds, warm_up: 0 };
        rows.iter().zip(compare(rounds, kept, &rows)).try_for_each(|(row, compared)| match compared {
            Ok(comparison) => self.report(&comparison),
            Err(CannotRun { label, why }) => {
                // What another engine can't do is its own affair.
                if !Peers::is_engine(&label) {
                    self.failures.borrow_mut().push(format!("{}: {why}", row.name));
                }
                self.not_measured(&row.name, &why)
            }
        })
    }

    /// Whether a row is to be measured.
    pub(crate) fn wants(&self, name: &str) -> bool {
        self.rows.is_empty() || self.rows.iter().any(|row| name.contains(row))
    }

    /// Prints and keeps the reason why there is no result.
    pub(crate) fn not_measured(&self, name: &str, why: &str) -> Outcome {
        println!("{name}: not measured: {why}\n");
        let file = self.results_file();
        let said = |e: std::io::Error| format!("{}: {e}", file.display());
        let mut out = std::fs::OpenOptions::new().append(true).open(&file).map_err(said)?;
        writeln!(out, "{}", serde_json::json!({ "benchmark": name, "not measured": why })).map_err(said)
    }

    /// While the table is being measured.
    fn results_file(&self) -> PathBuf {
        self.results.join(format!("{}.jsonl.part", self.table.get()))
    }

    /// The results of the table take the place of earlier ones: not before they are complete.
    pub(crate) fn keep(&self) -> Outcome {
        let part = self.results_file();
        std::fs::rename(&part, part.with_extension("")).map_err(|e| format!("{}: {e}", part.display()))
    }

    /// Prints and keeps a result.
    pub(crate) fn report(&self, comparison: &Comparison) -> Outcome {
        println!("{}", comparison.render());
        comparison.append_to(&self.results_file())
    }

    /// Empties the results of a table and notes the machine in its first line.
    pub(crate) fn begin(&self, table: &'static str) -> Outcome {
        self.table.set(table);
        let file = self.results_file();
        let said = |e: std::io::Error| format!("{}: {e}", file.display());
        let mut out = std::fs::File::create(&file).map_err(said)?;
        writeln!(
            out,
            "{}",
            serde_json::json!({
                "machine": self.machine()?, "date": date()?, "extent": self.extent.name(), "commit": self.commit
            })
        )
        .map_err(said)
    }

    /// `quick` or `full`, by how much is measured.
    pub(crate) fn sized<T>(&self, quick: T, full: T) -> T {
        match self.extent {
            Extent::Quick => quick,
            Extent::Full => full,
        }
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    pub(crate) fn zebu(&self) -> Command {
        Command::new(&self.zebu)
    }

    pub(crate) fn qemu_img(&self) -> Command {
        Command::new(&self.qemu_img)
    }

    /// A raw file full of data that does not compress and has no zeroes.
    pub(crate) fn raw_file(&self) -> Outcome<PathBuf> {
        let file = self.file("data.raw");
        fill(&file, self.gib << 30)?;
        Ok(file)
    }

    /// A file system of its own on a loop device, all of whose places take the same time.
    pub(crate) fn file_system(&self, kind: Kind, bytes: u64) -> Outcome<Mounted> {
        Mounted::written(kind, bytes, &self.dir)
    }

    /// A file system that is larger than what is written to it.
    pub(crate) fn sparse_file_system(&self, kind: Kind, bytes: u64) -> Outcome<Mounted> {
        Mounted::new(kind, bytes, &self.dir)
    }

    /// Figures mean nothing without the machine that they come from.
    pub(crate) fn machine(&self) -> Outcome<String> {
        let read = |file: &str| std::fs::read_to_string(file).unwrap_or_default();
        let kernel = read("/proc/sys/kernel/osrelease");
        let cpus = read("/proc/cpuinfo");
        let model = cpus.lines().find_map(|l| l.strip_prefix("model name")).unwrap_or_default();
        let model = model.trim_start_matches(['\t', ':', ' ']).trim();
        let model = model.split_once(char::is_control).map_or(model, |(m, _)| m);
        let cores = std::thread::available_parallelism().map_or(0, std::num::NonZero::get);
        let filesystem =
            output(Command::new("findmnt").args(["-no", "FSTYPE,OPTIONS", "-T"]).arg(&self.dir))?;
        let memory = read("/proc/meminfo");
        let kib = memory.lines().find_map(|line| line.strip_prefix("MemTotal:")?.split_whitespace().next());
        let gib = kib.and_then(|kib| kib.parse::<f64>().ok()).unwrap_or_default() / 1048576.0;
        let qemu = setup::qemu_version().unwrap_or_default();
        let first_line = |program: &str, option: &str| {
            let text = output(Command::new(program).arg(option)).unwrap_or_default();
            text.lines().next().unwrap_or_default().trim().to_owned()
        };
        let others =
            [first_line("fio", "--version"), first_line("nbdkit", "--version"), first_line("mkfs.xfs", "-V")];
        let others: Vec<&str> = others.iter().map(String::as_str).filter(|text| !text.is_empty()).collect();
        Ok(format!(
            "Linux {}, {cores} x {model}, {gib:.0} GiB, {}, {qemu}, {}",
            kernel.trim(),
            filesystem.split_whitespace().collect::<Vec<_>>().join(" "),
            others.join(", ")
        ))
    }
}

fn date() -> Outcome<String> {
    Ok(output(Command::new("date").arg("+%F"))?.trim().to_owned())
}

/// Removes all files of a folder.
pub(crate) fn empty(dir: &Path) -> Outcome {
    for entry in std::fs::read_dir(dir).map_err(|e| format!("{}: {e}", dir.display()))?.flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_file()) {
            std::fs::remove_file(entry.path()).map_err(|e| format!("{}: {e}", entry.path().display()))?;
        }
    }
    Ok(())
}

/// Removes a file that may not be there.
pub(crate) fn remove(file: &Path) -> Outcome {
    match std::fs::remove_file(file) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(format!("{}: {e}", file.display())),
        _ => Ok(()),
    }
}

/// Makes the disk do what it still owes to those before.
pub(crate) fn settle() -> Outcome {
    run(&mut Command::new("sync"))
}

/// Fills a file with pseudo-random bytes (xorshift64*: fast, and nothing that a file system could compress).
pub(crate) fn fill(file: &Path, len: u64) -> Outcome {
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
