//! Counts that hardly depend on the machine: misses of the mapping cache by the size of its slices, calls, and what stays
//! in the page cache.

use super::backup::cached_mib;
use crate::Outcome;
use crate::images::{Allocated, Data, Layout};
use crate::lab::{Lab, remove};
use crate::metric::{Metric, Sample};
use crate::process::{advise, output, run, shown};
use crate::programs::{BOTH, CLUSTER, Load, Program};
use crate::run::Side;
use crate::system_calls::calls_on;
use Step::{Advise, Fill, Fsync};
use libc::{POSIX_FADV_DONTNEED as DONTNEED, POSIX_FADV_SEQUENTIAL as SEQUENTIAL};
use serde_json::Value;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Slices of the mapping cache, and their bytes.
const SLICES: [(&str, u64); 5] = [
    ("zebu, 4 KiB", 4 << 10),
    ("zebu, 512 bytes", 512),
    ("zebu, 1 KiB", 1 << 10),
    ("zebu, 16 KiB", 16 << 10),
    ("zebu, 64 KiB", 64 << 10),
];

/// The table.
pub(super) fn counts(lab: &Lab) -> Outcome {
    for (size, cluster, budget, disk) in [
        (16u64 << 30, CLUSTER, 1u64 << 20, "16 GiB, 64 KiB clusters, 1 MiB of cache"),
        (2 << 40, 2 << 20, 4 << 20, "2 TiB, 2 MiB clusters, 4 MiB of cache"),
    ] {
        let image = Allocated { size, cluster, layout: Layout::Sequential, data: Data::Holes };
        slices(lab, image, budget, disk)?;
    }
    in_order(lab);
    advised(lab);
    Ok(())
}

/// Random reads with a cache that holds half of the mapping, without extents: how many of them miss, by the size of slices.
fn slices(lab: &Lab, image: Allocated, budget: u64, disk: &str) -> Outcome {
    let name = format!("10,000 random reads by the size of slices: {disk}");
    if !lab.wants(&name) {
        return Ok(());
    }
    let image = &image.make(lab, &lab.dir)?;
    let side = |(who, slice): (&str, u64)| Side::new(who, move || misses(lab, image, budget, slice));
    lab.row(&name, SLICES.map(side));
    remove(image)
}

fn misses(lab: &Lab, image: &Path, budget: u64, slice: u64) -> Outcome<Sample> {
    let mut bench = lab.zebu();
    bench.args(["bench", "--output", "json", "-t", "none", "--allow-refs", "all"]);
    bench.args(["-d", "32", "-c", "10000", "-s", "4k", "--random=1", "--image-opts"]);
    let cache = format!("cache-size={budget},l2-cache-entry-size={slice},extent-index=off");
    bench.arg(format!("driver=qcow2,file.filename={},{cache}", image.display()));
    let report: Value = serde_json::from_str(&output(&mut bench)?).map_err(|e| e.to_string())?;
    let misses = report["image"]["cache-misses"].as_f64();
    let misses = misses.ok_or_else(|| format!("{}: no count of misses in its report", shown(&bench)))?;
    Ok(vec![(Metric::MappingMisses, misses)])
}

/// Calls of one writer that goes through the disk: data, tables, and syncs.
fn in_order(lab: &Lab) {
    let (size, text) = lab.sized((128u64 << 20, "128 MiB"), (1 << 30, "1 GiB"));
    let load = Load { block: CLUSTER, step: CLUSTER, count: size / CLUSTER, depth: 32, write: true };
    let side = |program: Program| {
        let image = lab.file("in-order.qcow2");
        Side::new(program.name(), move || {
            remove(&image)?;
            run(program.img(lab).args(["create", "-q", "-f", "qcow2"]).arg(&image).arg(size.to_string()))?;
            let mut command = load.bench(program, lab, "threads");
            calls_on(lab, command.args(["-f", "qcow2"]).arg(&image), &image)
        })
    };
    lab.row(&format!("calls of {text} written in order, 64 KiB at a time"), BOTH.map(side));
}

/// A step of a program that writes a file.
#[derive(Debug, Clone, Copy)]
enum Step {
    /// Gives advice about all of the file.
    Advise(libc::c_int),
    /// Writes 100 MiB, one at a time.
    Fill,
    Fsync,
}

/// The programs of 2021 but for that with O_DIRECT, and at last one that does two of their steps in the other order.
const PROGRAMS: [(&str, &[Step]); 7] = [
    ("sequential, write", &[Advise(SEQUENTIAL), Fill]),
    ("dontneed, write", &[Advise(DONTNEED), Fill]),
    ("write, dontneed", &[Fill, Advise(DONTNEED)]),
    ("sequential, write, fsync", &[Advise(SEQUENTIAL), Fill, Fsync]),
    ("dontneed, write, fsync", &[Advise(DONTNEED), Fill, Fsync]),
    ("write, dontneed, fsync", &[Fill, Advise(DONTNEED), Fsync]),
    ("write, fsync, dontneed", &[Fill, Fsync, Advise(DONTNEED)]),
];

/// Pages that stay in the page cache of 100 MiB that were written with one advice or another.
fn advised(lab: &Lab) {
    let side = |who: &'static str, flags: libc::c_int, steps: &'static [Step]| {
        let file = lab.file("advised");
        Side::new(who, move || {
            remove(&file)?;
            let mut options = OpenOptions::new();
            options.write(true).create_new(true).custom_flags(flags);
            let written =
                options.open(&file).and_then(|out| steps.iter().try_for_each(|step| step.take(&out)));
            written.map_err(|e| format!("{}: {e}", file.display()))?;
            let cached = cached_mib(&file)?;
            remove(&file)?;
            Ok(vec![(Metric::TargetCachedMib, cached)])
        })
    };
    let mut sides = Vec::from(PROGRAMS.map(|(who, steps)| side(who, 0, steps)));
    sides.push(side("O_DIRECT, write", libc::O_DIRECT, &[Fill]));
    lab.row("100 MiB written by programs with advice about the page cache", sides);
}

impl Step {
    fn take(self, mut file: &File) -> io::Result<()> {
        const MIB: usize = 1 << 20;
        const PAGE: usize = 4096;
        match self {
            Advise(advice) => advise(file, advice),
            Fill => {
                let buffer = vec![7u8; MIB + PAGE];
                // O_DIRECT wants whole blocks that begin where one does.
                let begin = buffer.as_ptr().align_offset(PAGE);
                (0..100).try_for_each(|_| file.write_all(&buffer[begin..begin + MIB]))
            }
            Fsync => file.sync_all(),
        }
    }
}
