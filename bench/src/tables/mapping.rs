//! The mapping cache: random requests with less memory than the mapping needs (the problem of 2017); long
//! chains; memory. fio asks over NBD, at random, of both programs alike.

use crate::Outcome;
use crate::fio::{Ask, fio};
use crate::images::{Allocated, Chain, Data, Layout, raw, shuffle};
use crate::lab::{Extent, Lab, remove};
use crate::mount::Kind;
use crate::programs::{ALL, BOTH, CLUSTER, Load, Program, SMALL, scattering_step};
use crate::run::Side;
use crate::servers::{Disk, Door, Running, Server};
use std::path::Path;

const READS: Ask = Ask::random("randread", 32);

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

/// More than the mapping of any of them needs.
const EVERYTHING: u64 = 256 << 20;

/// The most blocks that are written one by one: more of a sparse file take minutes.
const MOST_BLOCKS: u64 = 1 << 17;

/// Files of one kind, and the loads that are put on them.
struct Setting<'a> {
    lab: &'a Lab,
    shape: Shape,
    image: &'a Path,
    raw: &'a Path,
    ask: Ask,
}

impl<'a> Setting<'a> {
    /// A cache of `budget` bytes in slices, served for a second: more rounds tell more than longer loads.
    fn side(&self, who: &'a str, budget: u64, slice: u64, more: &str) -> Side<'a> {
        let options = format!(",l2-cache-size={budget},l2-cache-entry-size={slice}{more}");
        self.served(who, Disk { options, ..Disk::new(self.image, "qcow2") })
    }

    fn raw(&self) -> Side<'a> {
        self.served("raw", Disk::new(self.raw, "raw"))
    }

    fn served(&self, who: &'a str, disk: Disk<'a>) -> Side<'a> {
        let (lab, ask, size) = (self.lab, self.ask, self.shape.size);
        // QEMU's own best under O_DIRECT.
        let disk = Disk { aio: "native", ..disk };
        let size = if ask.apart == 0 { size } else { NEAR };
        Side::new(who, move || {
            let server = if who.starts_with("QEMU") { Server::Qemu } else { Server::Zebu };
            Running::start(lab, server, Door::Nbd, &disk)?.measured(|socket| {
                let uri = format!("--uri=nbd+unix:///?socket={}", socket.display());
                fio(ask, size, 1, &["--ioengine=nbd", &uri])
            })
        })
    }

    fn small(&self, who: &'a str) -> Side<'a> {
        self.side(who, self.shape.budget, SMALL, "")
    }

    fn without_index(&self) -> Side<'a> {
        self.side("zebu", self.shape.budget, SMALL, ",extent-index=off")
    }

    fn full(&self, who: &'a str) -> Side<'a> {
        self.side(who, EVERYTHING, SMALL, "")
    }

    fn whole_tables(&self, who: &'a str) -> Side<'a> {
        self.side(who, self.shape.budget, self.shape.cluster, "")
    }
}

/// Jobs that each read a small part of the disk, and its bytes.
const JOBS: u32 = 32;
const NEAR: u64 = 32 << 20;

/// A disk of 16 GiB.
pub(super) fn mapping(lab: &Lab) -> Outcome {
    never_written(lab, SHAPES[0])?;
    written(lab, SHAPES[0])
}

/// A disk of 2 TiB with large clusters.
pub(super) fn large(lab: &Lab) -> Outcome {
    never_written(lab, SHAPES[1])?;
    written(lab, SHAPES[1])
}

fn row(shape: Shape, layout: Layout, data: Data, rest: &str) -> String {
    format!("{}, {}, {}: {rest}", shape.name, layout.name(), data.name())
}

/// Clusters that lie as on the virtual disk, and hold nothing: what the mapping costs, without the disk.
fn never_written(lab: &Lab, shape: Shape) -> Outcome {
    let Shape { size, cluster, .. } = shape;
    let (layout, data) = (Layout::Sequential, Data::Holes);
    let raw = &raw(lab, size, data)?;
    let image = &Allocated { size, cluster, layout, data }.make(lab, &lab.dir)?;
    let name = |rest: &str| row(shape, layout, data, rest);
    let of = |ask: Ask| Setting { lab, shape, image, raw, ask };
    let reads = of(READS);
    let mut sides = vec![
        reads.small("zebu"),
        reads.small("QEMU"),
        reads.raw(),
        reads.full("zebu, all cached"),
        reads.whole_tables("QEMU, whole tables"),
    ];
    // Two whole tables of 2 MiB and what they cost are more than the other budget.
    if cluster < 1 << 20 {
        sides.push(reads.whole_tables("zebu, whole tables"));
    }
    lab.row(&name("reads"), sides);
    lab.row(&name("reads, all cached"), [reads.full("zebu"), reads.full("QEMU")]);
    // The best case of a small cache: what is read at a time lies close together.
    let near = of(Ask { connections: JOBS, depth: 1, apart: size / u64::from(JOBS), ..READS });
    let sides = [near.small("zebu"), near.small("QEMU"), near.raw()];
    lab.row(&name("reads of 32 jobs in 32 MiB each"), sides);
    // What writes fill are holes no more: they come last.
    let writes = of(Ask::random("randwrite", 32));
    lab.row(&name("writes"), [writes.small("zebu"), writes.raw()]);
    remove(image)?;
    remove(raw)
}

/// Clusters with data, first in order, then so that no two neighbours are neighbours in the file.
fn written(lab: &Lab, shape: Shape) -> Outcome {
    let Shape { size, cluster, .. } = shape;
    // Of a disk that is larger than what there is, the first block of every so many clusters is written and read: as many
    // of each table as of any other.
    let data = match lab.extent {
        Extent::Full if size <= 1 << 40 => Data::Written,
        _ => Data::FirstBlocks { step: cluster * (size / cluster / MOST_BLOCKS).max(1) },
    };
    let name = |layout, rest: &str| row(shape, layout, data, rest);
    let wants =
        |layout| ["reads", "reads, no index", "writes"].iter().any(|rest| lab.wants(&name(layout, rest)));
    let in_order = lab.extent == Extent::Full && lab.wants(&name(Layout::Sequential, "reads"));
    if !in_order && !wants(Layout::Shuffled) {
        return Ok(());
    }
    let align = if let Data::FirstBlocks { step } = data { step } else { SMALL };
    let raw = &raw(lab, size, data)?;
    let image = &Allocated { size, cluster, layout: Layout::Sequential, data }.make(lab, &lab.dir)?;
    let reads = Setting { lab, shape, image, raw, ask: Ask { align, ..READS } };
    if in_order {
        let sides = [reads.small("zebu"), reads.small("QEMU"), reads.raw(), reads.full("zebu, all cached")];
        lab.row(&name(Layout::Sequential, "reads"), sides);
    }
    shuffle(image)?;
    let whole = reads.whole_tables("QEMU, whole tables");
    lab.row(&name(Layout::Shuffled, "reads"), [reads.small("zebu"), reads.small("QEMU"), reads.raw(), whole]);
    let sides = [reads.without_index(), reads.small("QEMU"), reads.raw()];
    lab.row(&name(Layout::Shuffled, "reads, no index"), sides);
    let writes = Setting { ask: Ask { align, ..Ask::random("randwrite", 32) }, ..reads };
    lab.row(&name(Layout::Shuffled, "writes"), [writes.small("zebu"), writes.raw()]);
    remove(image)?;
    remove(raw)
}

/// Requests to an image with these cache options by `bench`, whose steps are regular: that of QEMU has no random mode.
fn benched<'a>(
    who: &str,
    program: Program,
    lab: &'a Lab,
    load: Load,
    image: &'a Path,
    cache: String,
) -> Side<'a> {
    Side::new(who, move || {
        if !BOTH.contains(&program) {
            return load.run(program, lab, image);
        }
        let mut command =
            load.bench(program, lab, if program == Program::Qemu { "native" } else { "io_uring" });
        if program == Program::Zebu {
            command.args(["--allow-refs", "all"]);
        }
        command.arg("--image-opts");
        load.timed(command.arg(format!("driver=qcow2,file.filename={},{cache}", image.display())))
    })
}

fn cache(bytes: u64) -> String {
    format!("l2-cache-size={bytes},l2-cache-entry-size={SMALL}")
}

fn reads(size: u64, count: u64) -> Load {
    Load { block: SMALL, step: scattering_step(size, SMALL), count, depth: 32, write: false }
}

/// Chains of images that each hold a random part of the data, and how often they are read beside an engine that may look
/// into every image for each read.
pub(super) fn chains(lab: &Lab) -> Outcome {
    let (size, many) = lab.sized((1 << 30, 200_000), (4 << 30, 300_000));
    let one = Chain::make(lab, size, CLUSTER, 1)?;
    let chains = [(10, 300_000, &ALL[..]), (100, 60_000, &BOTH), (500, 3_000, &BOTH)];
    for (images, few, programs) in chains.into_iter().take(lab.sized(1, 3)) {
        let chain = Chain::make(lab, size, CLUSTER, images)?;
        let load = reads(size, lab.sized(many / 10, few));
        let side =
            |program: &Program| benched(program.name(), *program, lab, load, chain.top(), cache(32 << 20));
        lab.row(
            &format!("reads through a chain of {images}, {} reads", load.count),
            programs.iter().map(side),
        );
        let load = reads(size, many);
        let side = |who, image| benched(who, Program::Zebu, lab, load, image, cache(32 << 20));
        let sides = [side("zebu", chain.top()), side("zebu, one image", one.top())];
        lab.row(&format!("reads through a chain of {images}, beside one image"), sides);
    }
    Ok(())
}

/// Memory of the process beside that for a small disk with the least cache: what the mapping really takes.
pub(super) fn memory(lab: &Lab) -> Outcome {
    let xfs = lab.even_file_system(Kind::Xfs, 8 << 30)?;
    let make = |size, cluster| {
        Allocated { size, cluster, layout: Layout::Sequential, data: Data::Holes }.make(lab, &xfs.path())
    };
    let small = &make(64 << 20, CLUSTER)?;
    for (size, cluster, mib, name) in [
        (16u64 << 30, CLUSTER, 1, "16 GiB, 1 MiB of cache"),
        (2 << 40, 2 << 20, 4, "2 TiB, 4 MiB of cache"),
        (64 << 40, 2 << 20, 32, "64 TiB, 32 MiB of cache"),
    ] {
        let image = &make(size, cluster)?;
        // A write sets an extent of 1 MiB aside, of which the file system has so many.
        for (what, count, write) in [("reads", lab.sized(60_000, 400_000), false), ("writes", 6_000, true)] {
            let of = |size| Load { write, ..reads(size, count) };
            // With extents, a disk in order hardly needs any slices: without them they fill the budget.
            let slices = cache(mib << 20) + ",extent-index=off";
            let sides = [
                benched("zebu", Program::Zebu, lab, of(size), image, slices),
                benched("zebu, 64 MiB disk", Program::Zebu, lab, of(64 << 20), small, cache(CLUSTER)),
            ];
            lab.row(&format!("memory: {name}, {what}"), sides);
        }
        remove(image)?;
    }
    remove(small)
}
