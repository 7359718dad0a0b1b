//! The mapping cache: random requests with less memory than the mapping needs (the problem of 2017), on a fast disk and
//! on one with latency, through chains, by several queues; and how much memory it really takes.

use super::lab::{Lab, remove};
use super::load::{Load, Program, SMALL, scattering_step};
use super::mapping_images::{Data, Layout, allocated, chain, copy_sparse, raw, remove_chain};
use crate::Outcome;
use crate::ab::Side;
use crate::mount::Kind;
use crate::slow_disk::SlowFile;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const DEPTH: u64 = 32;
/// What a read takes on the disk with latency.
const PAUSE: Duration = Duration::from_millis(2);

/// A disk, its clusters, and a budget that is too small for its mapping.
#[derive(Debug, Clone, Copy)]
struct Shape {
    size: u64,
    cluster: u64,
    budget: u64,
    name: &'static str,
}

const SHAPES: [Shape; 2] = [
    Shape { size: 16 << 30, cluster: 64 << 10, budget: 1 << 20, name: "16 GiB, 64 KiB clusters, 1 MiB" },
    Shape { size: 2 << 40, cluster: 2 << 20, budget: 4 << 20, name: "2 TiB, 2 MiB clusters, 4 MiB" },
];

/// How an image is opened, and by whom.
#[derive(Debug, Clone)]
struct Opened<'a> {
    program: Program,
    label: &'static str,
    format: &'static str,
    file: &'a Path,
    budget: Option<u64>,
    slice: Option<u64>,
    more: &'static [&'static str],
}

impl<'a> Opened<'a> {
    fn zebu(label: &'static str, file: &'a Path, budget: u64) -> Self {
        let program = Program::Zebu;
        Self { program, label, format: "qcow2", file, budget: Some(budget), slice: Some(SMALL), more: &[] }
    }
    fn qemu(file: &'a Path, budget: u64) -> Self {
        Self { program: Program::Qemu, label: "QEMU, slices", ..Self::zebu("", file, budget) }
    }
    fn raw(file: &'a Path) -> Self {
        let program = Program::Zebu;
        Self { program, label: "raw", format: "raw", file, budget: None, slice: None, more: &[] }
    }
    fn with(self, more: &'static [&'static str]) -> Self {
        Self { more, ..self }
    }

    fn command(&self, lab: &Lab, load: Load) -> Command {
        let mut command = self.program.command(lab);
        command.args(["bench", "-t", "none"]);
        // QEMU's own best under O_DIRECT.
        command.args(["-i", if self.program == Program::Qemu { "native" } else { "io_uring" }]);
        command.args(["-d", &load.depth.to_string(), "-c", &load.count.to_string()]);
        command.args(["-s", &load.block.to_string(), "-S", &load.step.to_string()]);
        if load.write {
            command.arg("-w");
        }
        command.args(self.more).arg("--image-opts");
        let mut options = format!("driver={},file.filename={}", self.format, self.file.display());
        if let Some(bytes) = self.budget {
            options += &format!(",l2-cache-size={bytes}");
        }
        if let Some(bytes) = self.slice {
            options += &format!(",l2-cache-entry-size={bytes}");
        }
        command.arg(options);
        command
    }

    fn side(self, lab: &'a Lab, load: Load) -> Side<'a> {
        let label = self.label.to_owned();
        Side { label, run: Box::new(move || load.timed(self.command(lab, load))) }
    }
}

fn reads(size: u64, count: u64, depth: u64) -> Load {
    Load { block: SMALL, step: scattering_step(size, SMALL), count, depth, write: false }
}

fn compare<'a>(lab: &'a Lab, name: &str, load: Load, a: Opened<'a>, b: Opened<'a>) -> Outcome {
    lab.compare(name, [a.side(lab, load), b.side(lab, load)])
}

/// Too small a cache beside a full one, raw, and QEMU's slices; larger caches; smaller slices.
pub(super) fn mapping(lab: &Lab) -> Outcome {
    let count = lab.sized(60_000, 400_000);
    for shape in SHAPES {
        let Shape { size, cluster, budget, name } = shape;
        let kinds: &[Data] = lab.sized(&[Data::Holes][..], &[Data::Holes, Data::Written][..]);
        for data in kinds {
            if *data == Data::Written && size > 1 << 40 {
                continue;
            }
            for layout in [Layout::Sequential, Layout::Shuffled] {
                // Each begins with a file of its own: what the writes fill are holes no more.
                let raw = raw(&lab.dir, size, *data)?;
                let image = allocated(lab, &lab.dir, size, cluster, layout, *data)?;
                let what = |against: &str, doing: &str| {
                    format!("{name}, {}, {data:?}: {doing}, {against}", layout.name())
                };
                let load = reads(size, count, DEPTH);
                let small = || Opened::zebu("zebu", &image, budget);
                let slices = || Opened::zebu("slices alone", &image, budget).with(&["--no-extent-index"]);
                let full = Opened::zebu("all cached", &image, 256 << 20);
                compare(lab, &what("beside a full cache", "reads"), load, small(), full)?;
                compare(lab, &what("beside raw", "reads"), load, small(), Opened::raw(&raw))?;
                compare(lab, &what("beside QEMU", "reads"), load, small(), Opened::qemu(&image, budget))?;
                if layout == Layout::Shuffled {
                    compare(lab, &what("beside raw", "reads, no index"), load, slices(), Opened::raw(&raw))?;
                    let qemu = Opened::qemu(&image, budget);
                    compare(lab, &what("beside QEMU", "reads, no index"), load, slices(), qemu)?;
                }
                let writes = Load { write: true, ..load };
                compare(lab, &what("beside raw", "writes"), writes, small(), Opened::raw(&raw))?;
                remove(&image)?;
                remove(&raw)?;
            }
        }
    }
    larger_caches(lab)?;
    smaller_slices(lab)
}

/// What a miss costs does not depend on the size of the cache: the slices of a disk of 2 TiB with 64 KiB clusters don't
/// fit into any of these.
fn larger_caches(lab: &Lab) -> Outcome {
    let (size, budgets) = lab.sized((1 << 39, &[1u64, 32][..]), (1 << 42, &[1u64, 32, 256][..]));
    let image = allocated(lab, &lab.dir, size, 64 << 10, Layout::Shuffled, Data::Holes)?;
    let load = reads(size, lab.sized(60_000, 600_000), DEPTH);
    for mib in &budgets[1..] {
        let slices = |label, mib: u64| {
            // The tables above the slices are part of the budget.
            Opened::zebu(label, &image, (mib << 20) + size / (512 << 20) * 8 + (64 << 10))
                .with(&["--no-extent-index"])
        };
        let name = format!("every read misses: {mib} MiB beside 1 MiB");
        compare(lab, &name, load, slices("larger", *mib), slices("1 MiB", 1))?;
    }
    remove(&image)
}

/// Everything fits: slices of 4 KiB beside whole tables.
fn smaller_slices(lab: &Lab) -> Outcome {
    let size = 16 << 30;
    let image = allocated(lab, &lab.dir, size, 64 << 10, Layout::Shuffled, Data::Holes)?;
    let load = reads(size, lab.sized(100_000, 1_000_000), DEPTH);
    let of = |label, slice| {
        Opened { slice: Some(slice), ..Opened::zebu(label, &image, 64 << 20) }.with(&["--no-extent-index"])
    };
    compare(
        lab,
        "all cached: 4 KiB slices beside whole tables",
        load,
        of("4 KiB", 4096),
        of("64 KiB", 65536),
    )?;
    remove(&image)
}

/// The same on a disk that takes 2 ms for a read.
pub(super) fn latency(lab: &Lab) -> Outcome {
    let (few, many) = lab.sized((300, 8_000), (1_000, 40_000));
    for Shape { size, cluster, budget, name } in SHAPES {
        let raw_file = raw(&lab.dir, size, Data::Holes)?;
        let slow_raw = SlowFile::new(&raw_file, lab.file("slow.raw"), PAUSE)?;
        for layout in [Layout::Sequential, Layout::Shuffled] {
            let image = allocated(lab, &lab.dir, size, cluster, layout, Data::Holes)?;
            let slow = SlowFile::new(&image, lab.file("slow.qcow2"), PAUSE)?;
            let file = slow.path();
            let load = reads(size, many, DEPTH);
            let what = |rest: &str| format!("2 ms a read, {name}, {}: {rest}", layout.name());
            let zebu = || Opened::zebu("zebu", file, budget);
            let slices = || Opened::zebu("slices alone", file, budget).with(&["--no-extent-index"]);
            compare(lab, &what("reads, beside QEMU"), load, zebu(), Opened::qemu(file, budget))?;
            compare(lab, &what("reads, beside raw"), load, zebu(), Opened::raw(slow_raw.path()))?;
            if layout == Layout::Shuffled {
                let qemu = Opened::qemu(file, budget);
                compare(lab, &what("reads, no index, beside QEMU"), load, slices(), qemu)?;
                let alone = reads(size, few, 1);
                for (label, opened) in [("zebu, no index", slices()), ("raw", Opened::raw(slow_raw.path()))] {
                    let deep = Opened { label: "depth 32", ..opened.clone() }.side(lab, load);
                    let one = Opened { label: "depth 1", ..opened }.side(lab, alone);
                    lab.compare(&what(&format!("depth 32 beside 1, {label}")), [deep, one])?;
                }
            }
            drop(slow);
            remove(&image)?;
        }
        drop(slow_raw);
        remove(&raw_file)?;
    }
    Ok(())
}

/// Chains of images that each hold a random part of the data.
pub(super) fn chains(lab: &Lab) -> Outcome {
    let (size, count) = lab.sized((1 << 30, 200_000), (4 << 30, 2_000_000));
    let cluster = 64 << 10;
    let load = reads(size, count, DEPTH);
    let of = |program, label, file: &Path| {
        let mut opened = Opened::zebu(label, file, 32 << 20);
        opened.program = program;
        if program == Program::Zebu { opened.with(&["--allow-refs", "all"]) } else { opened }
            .command(lab, load)
    };
    let side = |program, label: &'static str, file: &PathBuf| {
        let file = file.clone();
        Side { label: label.to_owned(), run: Box::new(move || load.timed(of(program, label, &file))) }
    };
    let one = chain(lab, &lab.dir, size, cluster, 1)?;
    for (images, label) in lab.sized(&[(10, "10 images"), (100, "100 images")][..], &LONG[..]) {
        let top = chain(lab, &lab.dir, size, cluster, *images)?;
        let name = format!("reads through a chain of {images}");
        let sides = [side(Program::Zebu, label, &top), side(Program::Zebu, "1 image", &one)];
        lab.compare(&format!("{name}, beside one image"), sides)?;
        let sides = [side(Program::Zebu, "zebu", &top), side(Program::Qemu, "QEMU", &top)];
        lab.compare(&format!("{name}, beside QEMU"), sides)?;
        remove_chain(&lab.dir, *images)?;
    }
    remove_chain(&lab.dir, 1)
}

const LONG: [(u64, &str); 3] = [(10, "10 images"), (100, "100 images"), (500, "500 images")];

/// Two queues on one image in memory, everything cached; and on a raw file, which says what the machine's two cores and
/// its kernel can do.
pub(super) fn queues(lab: &Lab) -> Outcome {
    let size = 1 << 30;
    let file = Path::new("/dev/shm").join(format!("zebu-bench-{}", std::process::id()));
    let load = reads(size, lab.sized(400_000, 2_000_000), DEPTH);
    for (layout, format, name) in [
        (Layout::Sequential, "qcow2", "all cached (extents)"),
        (Layout::Shuffled, "qcow2", "all cached (slices)"),
        (Layout::Sequential, "raw", "a raw file"),
    ] {
        let made = match format {
            "raw" => raw(&lab.dir, size, Data::Holes)?,
            _ => allocated(lab, &lab.dir, size, 64 << 10, layout, Data::Holes)?,
        };
        copy_sparse(&made, &file)?;
        let of = |label: &'static str, queues: &'static str| {
            let file = &file;
            let run = move || {
                let mut command = lab.zebu();
                command.args(["bench", "-f", format, "-d", "32", "-s", "4k", "--random", "--queues", queues]);
                command.args(["-c", &load.count.to_string()]).arg(file);
                load.timed(command)
            };
            Side { label: label.to_owned(), run: Box::new(run) }
        };
        let sides = [of("zebu, 2 queues", "2"), of("zebu, 1 queue", "1")];
        let outcome = lab.compare(&format!("in memory, {name}: two queues beside one"), sides);
        remove(&file)?;
        remove(&made)?;
        outcome?;
    }
    Ok(())
}

/// Memory of the process beside that for a small disk with the least cache: what the mapping really takes.
pub(super) fn memory(lab: &Lab) -> Outcome {
    let xfs = lab.file_system(Kind::Xfs, 8 << 30)?;
    let small = allocated(lab, &xfs.path(), 64 << 20, 64 << 10, Layout::Sequential, Data::Holes)?;
    let count = lab.sized(60_000, 400_000);
    for (size, cluster, budget, name) in [
        (16u64 << 30, 64u64 << 10, 1u64 << 20, "16 GiB, 1 MiB of cache"),
        (2 << 40, 2 << 20, 4 << 20, "2 TiB, 4 MiB of cache"),
        (64 << 40, 2 << 20, 32 << 20, "64 TiB, 32 MiB of cache"),
    ] {
        let image = allocated(lab, &xfs.path(), size, cluster, Layout::Sequential, Data::Holes)?;
        let bare = Opened::zebu("64 MiB disk", &small, 64 << 10);
        // Slices only: they fill the budget, extents would not need it.
        let large = Opened::zebu("large disk", &image, budget).with(&["--no-extent-index"]);
        let sides =
            [large.side(lab, reads(size, count, DEPTH)), bare.side(lab, reads(64 << 20, count, DEPTH))];
        lab.compare(&format!("memory: {name}, beside a disk of 64 MiB"), sides)?;
        remove(&image)?;
    }
    remove(&small)
}
