//! The mapping cache: random requests with less memory than the mapping needs (the problem of 2017), on a fast disk and
//! on one with latency. fio asks over NBD, at random, of both programs alike.

use super::fio::Ask;
use super::lab::{Extent, Lab, remove};
use super::load::SMALL;
use super::mapping_images::{Data, Layout, allocated, raw, shuffle};
use super::opened::Opened;
use crate::Outcome;
use crate::ab::Row;
use crate::slow_disk::SlowFile;
use std::time::Duration;

const READS: Ask = Ask {
    name: "random reads",
    rw: "randread",
    block: SMALL,
    align: SMALL,
    depth: 32,
    connections: 1,
    apart: 0,
};
/// What a read takes on the disk with latency.
const PAUSE: Duration = Duration::from_millis(2);

/// Jobs that each read a small part of the disk, and its bytes.
const JOBS: u32 = 32;
const NEAR: u64 = 32 << 20;

/// A disk, its clusters, and a budget that is too small for its mapping.
#[derive(Debug, Clone, Copy)]
struct Shape {
    size: u64,
    cluster: u64,
    budget: u64,
    name: &'static str,
}

impl Shape {
    /// The name of a row.
    fn row(&self, layout: Layout, data: Data, rest: &str) -> String {
        format!("{}, {}, {}: {rest}", self.name, layout.name(), data.name())
    }
}

const SHAPES: [Shape; 2] = [
    Shape { size: 16 << 30, cluster: 64 << 10, budget: 1 << 20, name: "16 GiB, 64 KiB clusters, 1 MiB" },
    Shape { size: 2 << 40, cluster: 2 << 20, budget: 4 << 20, name: "2 TiB, 2 MiB clusters, 4 MiB" },
];

/// The most blocks that are written one by one: more of a sparse file take minutes.
const MOST_BLOCKS: u64 = 1 << 17;

/// More than the mapping of any of them needs.
const EVERYTHING: u64 = 256 << 20;

/// So little that nearly every read at random misses: the tables above the slices, and a few of these.
const LITTLE: u64 = 96 << 10;

fn compare<'a>(lab: &'a Lab, name: &str, ask: Ask, size: u64, sides: [Opened<'a>; 2]) -> Outcome {
    lab.compare(name, sides.map(|side| side.served(lab, ask, size)))
}

/// Sides in turn, and rows of them: what each adds to `name`, and which two it compares.
fn compare_all<'a>(
    lab: &'a Lab,
    name: impl Fn(&str) -> String,
    (ask, size): (Ask, u64),
    sides: Vec<Opened<'a>>,
    rows: &[(&str, [usize; 2])],
) -> Outcome {
    let sides = sides.into_iter().map(|side| side.served(lab, ask, size)).collect();
    lab.compare_all(sides, rows.iter().map(|(rest, pair)| Row::of(name(rest), *pair)).collect())
}

fn by_depth<'a>(lab: &'a Lab, name: &str, ask: Ask, size: u64, sides: [Opened<'a>; 2]) -> Outcome {
    lab.compare(name, sides.map(|side| side.scaled(lab, ask, size)))
}

/// A disk of 16 GiB: too small a cache beside a full one, raw, and QEMU's slices.
pub(super) fn mapping(lab: &Lab) -> Outcome {
    of_shape(lab, SHAPES[0])
}

/// The same for a disk of 2 TiB with large clusters.
pub(super) fn large(lab: &Lab) -> Outcome {
    of_shape(lab, SHAPES[1])
}

fn of_shape(lab: &Lab, shape: Shape) -> Outcome {
    never_written(lab, shape)?;
    written(lab, shape)
}

/// Clusters that lie as on the virtual disk, and hold nothing: what the mapping costs, without the disk.
fn never_written(lab: &Lab, shape: Shape) -> Outcome {
    let Shape { size, cluster, budget, .. } = shape;
    let raw = raw(lab, size, Data::Holes)?;
    let image = allocated(lab, &lab.dir, size, cluster, Layout::Sequential, Data::Holes)?;
    let what = |rest: &str| shape.row(Layout::Sequential, Data::Holes, rest);
    let small = || Opened::zebu("zebu", &image, budget);
    let qemu = || Opened::qemu(&image, budget);
    let mut sides = vec![
        small(),
        Opened::zebu("zebu, all cached", &image, EVERYTHING),
        Opened::raw(&raw),
        qemu(),
        qemu().with_slices_of(cluster).labelled("QEMU, whole tables"),
        Opened::qemu(&image, EVERYTHING).labelled("QEMU, all cached"),
    ];
    let mut rows = Vec::from(IN_ORDER);
    rows.push(("reads, beside QEMU with whole tables", [0, 4]));
    rows.push(("reads, all cached, beside QEMU", [1, 5]));
    // Two whole tables of 2 MiB and what they cost are more than the other budget.
    if cluster < 1 << 20 {
        sides.push(small().with_slices_of(cluster).labelled("zebu, whole tables"));
        rows.push(("reads, slices of 4 KiB beside whole tables", [0, 6]));
    }
    compare_all(lab, what, (READS, size), sides, &rows)?;
    // The best case of a small cache: what is read at a time lies close together.
    let near = Ask { connections: JOBS, depth: 1, apart: size / u64::from(JOBS), ..READS };
    let sides = vec![small(), Opened::raw(&raw), qemu()];
    let rows = [
        ("reads of 32 jobs in 32 MiB each, beside raw", [0, 1]),
        ("reads of 32 jobs in 32 MiB each, beside QEMU", [0, 2]),
    ];
    compare_all(lab, what, (near, NEAR), sides, &rows)?;
    // What writes fill are holes no more: they come last.
    let writes = Ask { rw: "randwrite", ..READS };
    compare(lab, &what(WRITES), writes, size, [small(), Opened::raw(&raw)])?;
    remove(&image)?;
    remove(&raw)
}

/// What is beside a small cache wherever clusters lie in order: places of sides.
const IN_ORDER: [(&str, [usize; 2]); 3] =
    [("reads, beside a full cache", [0, 1]), ("reads, beside raw", [0, 2]), ("reads, beside QEMU", [0, 3])];

/// The same wherever no two neighbours are neighbours.
const SHUFFLED: [(&str, [usize; 2]); 5] = [
    ("reads, beside raw", [0, 2]),
    ("reads, beside QEMU", [0, 3]),
    ("reads, beside QEMU with whole tables", [0, 4]),
    ("reads, no index, beside raw", [1, 2]),
    ("reads, no index, beside QEMU", [1, 3]),
];
const BY_DEPTH: &str = "by depth, misses, beside raw";
const WRITES: &str = "writes, beside raw";

/// Clusters with data, first in order, then so that no two neighbours are neighbours in the file.
fn written(lab: &Lab, shape: Shape) -> Outcome {
    let Shape { size, cluster, budget, .. } = shape;
    // Of a disk that is larger than what there is, the first block of every so many clusters is written and read: as many
    // of each table as of any other.
    let data = match lab.extent {
        Extent::Full if size <= 1 << 40 => Data::Written,
        _ => Data::FirstBlocks { step: cluster * (size / cluster / MOST_BLOCKS).max(1) },
    };
    let reads = Ask { align: if let Data::FirstBlocks { step } = data { step } else { SMALL }, ..READS };
    let mut shuffled = SHUFFLED.iter().map(|(rest, _)| *rest).chain([BY_DEPTH, WRITES]);
    let mut in_order = IN_ORDER.iter().map(|(rest, _)| *rest);
    let is_wanted = shuffled.any(|rest| lab.wants(&shape.row(Layout::Shuffled, data, rest)))
        || lab.extent == Extent::Full
            && in_order.any(|rest| lab.wants(&shape.row(Layout::Sequential, data, rest)));
    if !is_wanted {
        return Ok(());
    }
    let raw = raw(lab, size, data)?;
    let image = allocated(lab, &lab.dir, size, cluster, Layout::Sequential, data)?;
    let small = || Opened::zebu("zebu", &image, budget);
    let qemu = || Opened::qemu(&image, budget);
    if lab.extent == Extent::Full {
        let what = |rest: &str| shape.row(Layout::Sequential, data, rest);
        let full = Opened::zebu("zebu, all cached", &image, EVERYTHING);
        compare_all(lab, what, (reads, size), vec![small(), full, Opened::raw(&raw), qemu()], &IN_ORDER)?;
    }
    shuffle(&image)?;
    let what = |rest: &str| shape.row(Layout::Shuffled, data, rest);
    let slices = Opened::zebu("zebu, slices alone", &image, budget).without_index();
    let little = || Opened::zebu("zebu, slices alone", &image, LITTLE).without_index();
    let sides = vec![
        small(),
        slices,
        Opened::raw(&raw),
        qemu(),
        qemu().with_slices_of(cluster).labelled("QEMU, whole tables"),
    ];
    compare_all(lab, what, (reads, size), sides, &SHUFFLED)?;
    by_depth(lab, &what(BY_DEPTH), reads, size, [little(), Opened::raw(&raw)])?;
    let writes = Ask { rw: "randwrite", ..reads };
    compare(lab, &what(WRITES), writes, size, [small(), Opened::raw(&raw)])?;
    remove(&image)?;
    remove(&raw)
}

/// The same on a disk that takes 2 ms for a read.
pub(super) fn latency(lab: &Lab) -> Outcome {
    for Shape { size, cluster, budget, name } in SHAPES {
        let raw_file = raw(lab, size, Data::Holes)?;
        let slow_raw = SlowFile::new(&raw_file, lab.file("slow.raw"), PAUSE)?;
        for layout in [Layout::Sequential, Layout::Shuffled] {
            let image = allocated(lab, &lab.dir, size, cluster, layout, Data::Holes)?;
            let slow = SlowFile::new(&image, lab.file("slow.qcow2"), PAUSE)?;
            let file = slow.path();
            let what = |rest: &str| format!("2 ms a read, {name}, {}: {rest}", layout.name());
            let zebu = || Opened::zebu("zebu", file, budget).for_reading();
            let slices = || Opened::zebu("zebu, slices alone", file, budget).without_index().for_reading();
            let qemu = || Opened::qemu(file, budget).for_reading();
            let mut sides = vec![zebu(), qemu(), Opened::raw(slow_raw.path()).for_reading()];
            let mut rows = vec![("reads, beside QEMU", [0, 1]), ("reads, beside raw", [0, 2])];
            if layout == Layout::Shuffled {
                sides.push(slices());
                rows.push(("reads, no index, beside QEMU", [3, 1]));
            }
            compare_all(lab, what, (READS, size), sides, &rows)?;
            if layout == Layout::Shuffled {
                let little = Opened::zebu("zebu, slices alone", file, LITTLE).without_index().for_reading();
                by_depth(lab, &what("by depth, misses, beside QEMU"), READS, size, [little, qemu()])?;
            }
            drop(slow);
            remove(&image)?;
        }
        drop(slow_raw);
        remove(&raw_file)?;
    }
    Ok(())
}
