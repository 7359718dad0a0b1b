//! The place of a measurement: programs, a folder, sizes, and the rows that were measured.

use crate::Outcome;
use crate::mount::{Kind, Mounted};
use crate::peers::Peers;
use crate::process::{output, qemu_version, run};
use crate::record::{Failed, Row};
use crate::run::{Rounds, Side, alternate};
use std::cell::RefCell;
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
    pub(crate) fn name(self) -> &'static str {
        match self {
            Extent::Quick => "quick",
            Extent::Full => "full",
        }
    }
}

/// Programs, a folder of its own on the disk to measure, sizes, and the rows.
pub(crate) struct Lab {
    pub(crate) zebu: PathBuf,
    pub(crate) qemu_img: PathBuf,
    pub(crate) qemu_io: PathBuf,
    pub(crate) dir: PathBuf,
    pub(crate) extent: Extent,
    pub(crate) peers: Peers,
    pub(crate) rounds: usize,
    /// Only rows whose names contain one of these; none: all.
    pub(crate) wanted: Vec<String>,
    pub(crate) rows: RefCell<Vec<Row>>,
}

impl Lab {
    /// Whether a row is to be measured.
    pub(crate) fn wants(&self, name: &str) -> bool {
        self.wanted.is_empty() || self.wanted.iter().any(|part| name.contains(part))
    }

    /// Measures a row: sides in turn, the first beside each of the others. Nothing is measured beside a peer that is not
    /// asked for. Prints the result.
    pub(crate) fn row<'a>(&self, name: &str, sides: impl IntoIterator<Item = Side<'a>>) {
        let sides: Vec<_> = sides.into_iter().filter(|side| self.peers.take_part(&side.who)).collect();
        if !self.wants(name) || sides.len() < 2 {
            return;
        }
        let row = alternate(name, Rounds { measured: self.rounds, warm_up: 0 }, sides);
        println!("{}", row.render());
        self.rows.borrow_mut().push(row);
    }

    /// Notes that nothing of a table, or not the rest of it, can be measured.
    pub(crate) fn failed(&self, table: &str, why: String) {
        println!("{table}: {why}\n");
        let failed = vec![Failed { who: "the table".into(), why }];
        self.rows.borrow_mut().push(Row { row: table.to_owned(), sides: Vec::new(), failed });
    }

    /// `quick` or `full`, by how much is measured.
    pub(crate) fn sized<T>(&self, quick: T, full: T) -> T {
        match self.extent {
            Extent::Quick => quick,
            Extent::Full => full,
        }
    }

    /// GiB of the disk images with data in them.
    pub(crate) fn gib(&self) -> u64 {
        self.sized(1, 4)
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

    /// Has QEMU create a qcow2 image.
    pub(crate) fn create(&self, image: &Path, options: &str, size: u64) -> Outcome {
        let mut create = self.qemu_img();
        create.args(["create", "-q", "-f", "qcow2", "-o", options]);
        run(create.arg(image).arg(size.to_string()))
    }

    /// A file system of its own on a loop device, larger than what is written to it.
    pub(crate) fn file_system(&self, kind: Kind, bytes: u64) -> Outcome<Mounted> {
        Mounted::new(kind, bytes, &self.dir)
    }

    /// The same, all of whose places take the same time.
    pub(crate) fn even_file_system(&self, kind: Kind, bytes: u64) -> Outcome<Mounted> {
        Mounted::written(kind, bytes, &self.dir)
    }

    /// Figures mean nothing without the machine that they come from.
    pub(crate) fn machine(&self) -> Outcome<String> {
        let read = |file: &str| std::fs::read_to_string(file).unwrap_or_default();
        let (kernel, cpus, memory) =
            (read("/proc/sys/kernel/osrelease"), read("/proc/cpuinfo"), read("/proc/meminfo"));
        let model = cpus.lines().find_map(|l| l.strip_prefix("model name")).unwrap_or_default();
        let model = model.trim_start_matches(['\t', ':', ' ']).trim();
        let model = model.split_once(char::is_control).map_or(model, |(m, _)| m);
        let cores = std::thread::available_parallelism().map_or(0, std::num::NonZero::get);
        let kib = memory.lines().find_map(|line| line.strip_prefix("MemTotal:")?.split_whitespace().next());
        let gib = kib.and_then(|kib| kib.parse::<f64>().ok()).unwrap_or_default() / 1048576.0;
        let system = output(Command::new("findmnt").args(["-no", "FSTYPE,OPTIONS", "-T"]).arg(&self.dir))?;
        let version = |(program, option): (&str, &str)| {
            let text = output(Command::new(program).arg(option)).unwrap_or_default();
            text.lines().next().map(|line| line.trim().to_owned())
        };
        let others = [("fio", "--version"), ("nbdkit", "--version"), ("mkfs.xfs", "-V")];
        let others = others.into_iter().filter_map(version);
        let programs: Vec<String> = qemu_version().into_iter().chain(others).collect();
        Ok(format!(
            "Linux {}, {cores} x {model}, {gib:.0} GiB, {}, {}",
            kernel.trim(),
            system.split_whitespace().collect::<Vec<_>>().join(" "),
            programs.join(", ")
        ))
    }
}

/// Removes all files of a folder.
pub(crate) fn empty(dir: &Path) -> Outcome {
    for entry in std::fs::read_dir(dir).map_err(|e| format!("{}: {e}", dir.display()))?.flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_file()) {
            remove(&entry.path())?;
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

/// Waits until the disk has done what it owes to earlier runs.
pub(crate) fn settle() -> Outcome {
    run(&mut Command::new("sync"))
}

pub(crate) fn mib(file: &Path) -> Outcome<f64> {
    let found = std::fs::metadata(file).map_err(|e| format!("{}: {e}", file.display()))?;
    Ok(found.len() as f64 / 1048576.0)
}
